//! Devices as this process sees them.

use simgpu::Config;

/// A device of the host, and the GPU instance of it where it is split.
pub(crate) type Visible = (u32, Option<u32>);

/// The devices this process sees, in the order of its ordinals: all, or those that
/// `CUDA_VISIBLE_DEVICES` names, up to the first that does not exist. Of split devices a process
/// sees one instance, the first if none is named.
pub(crate) fn visible(config: &Config) -> Vec<Visible> {
    select(config, std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref())
}

fn select(config: &Config, named: Option<&str>) -> Vec<Visible> {
    let all = || (0..config.devices).flat_map(|index| config.mig.iter().map(move |mig| (index, Some(mig.gi))));
    if !config.mig.is_empty() {
        let wanted = named.and_then(|named| named.split(',').next()).map(str::trim);
        return match wanted {
            Some(uuid) if uuid.starts_with("MIG-") => {
                all().filter(|(index, gi)| gi.is_some_and(|gi| config.mig_uuid(*index, gi) == uuid)).collect()
            }
            _ => all().take(1).collect(),
        };
    }
    let Some(named) = named else { return (0..config.devices).map(|index| (index, None)).collect() };
    let device = |entry: &str| {
        let entry = entry.trim();
        let index = match entry.strip_prefix("GPU-") {
            Some(uuid) if !uuid.is_empty() => (0..config.devices).find(|index| config.uuid(*index).starts_with(uuid)),
            _ => entry.parse().ok().filter(|index| *index < config.devices),
        };
        index.map(|index| (index, None))
    };
    named.split(',').map_while(device).collect()
}

/// `CUdevice_attribute` values that programs ask for before they use a device.
const ATTRIBUTES: &[(i32, i32)] = &[
    (1, 1024), // max threads per block
    (2, 1024), // max block dimensions
    (3, 1024),
    (4, 64),
    (5, i32::MAX), // max grid dimensions
    (6, 65_535),
    (7, 65_535),
    (8, 49_152),     // shared memory per block
    (9, 65_536),     // constant memory
    (10, 32),        // warp size
    (12, 65_536),    // registers per block
    (13, 1_980_000), // clock rate in kHz
    (16, 132),       // multiprocessors
    (31, 1),         // concurrent kernels
    (39, 2048),      // threads per multiprocessor
    (41, 1),         // unified addressing
    (75, 9),         // compute capability, major
    (83, 1),         // managed memory
    (89, 1),         // concurrent managed access
    (102, 1),        // virtual memory management
    (115, 1),        // memory pools
];

/// Value of an attribute; 0 for those not listed.
pub(crate) fn attribute(attribute: i32) -> i32 {
    ATTRIBUTES.iter().find(|(number, _)| *number == attribute).map_or(0, |(_, value)| *value)
}
