//! Which device a process means by a number.
//!
//! Device ordinals are each process's own: `CUDA_VISIBLE_DEVICES` selects and orders them. What the
//! process was told itself (`cuDeviceGetUuid`) is best, then its environment, and when neither
//! decides, nothing is guessed.

use super::devices::{Devices, GpuDevice};
use crate::record::Identity;
use std::collections::{BTreeMap, HashMap};

/// Devices a process can name; more entries of a list are ignored.
const MAX_ORDINALS: usize = 64;

/// Which devices a process can see at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceView {
    /// Those of the host.
    Host,
    /// Perhaps only some: in a container, device 0 may be any.
    Container,
}

/// What is known of all processes.
#[derive(Debug, Default)]
pub struct Attribution {
    devices: Vec<GpuDevice>,
    processes: HashMap<Identity, Known>,
}

#[derive(Debug, Default)]
struct Known {
    uuids: BTreeMap<u32, [u8; 16]>,
    environment: Option<Environment>,
}

#[derive(Debug)]
struct Environment {
    visible: Option<String>,
    order: Option<String>,
    view: DeviceView,
}

impl Attribution {
    /// Starts with the devices NVML lists.
    pub fn new(devices: &Devices) -> Self {
        Self { devices: devices.iter().cloned().collect(), processes: HashMap::new() }
    }

    /// Takes a new list of devices; what processes told stays.
    pub fn set_devices(&mut self, devices: &Devices) {
        self.devices = devices.iter().cloned().collect();
    }

    /// A process was told the UUID of one of its devices.
    pub fn learn_uuid(&mut self, identity: Identity, ordinal: u32, uuid: [u8; 16]) {
        let uuids = &mut self.processes.entry(identity).or_default().uuids;
        if uuids.len() < MAX_ORDINALS || uuids.contains_key(&ordinal) {
            uuids.insert(ordinal, uuid);
        }
    }

    /// The process started with these values of `CUDA_VISIBLE_DEVICES` and `CUDA_DEVICE_ORDER`.
    pub fn learn_environment(
        &mut self,
        identity: Identity,
        visible: Option<&str>,
        order: Option<&str>,
        view: DeviceView,
    ) {
        let environment = Environment { visible: visible.map(str::to_owned), order: order.map(str::to_owned), view };
        self.processes.entry(identity).or_default().environment = Some(environment);
    }

    /// The process is gone, or replaced its image: its numbers mean nothing any more.
    pub fn forget(&mut self, identity: Identity) {
        self.processes.remove(&identity);
    }

    /// NVML's index of the device that `identity` calls `ordinal`; `None` when that is not certain.
    pub fn device(&self, identity: Identity, ordinal: u32) -> Option<u32> {
        let known = self.processes.get(&identity);
        if let Some(uuid) = known.and_then(|known| known.uuids.get(&ordinal)) {
            // A UUID that NVML does not list belongs to a device that came later: no guess helps.
            return self.by_uuid_bytes(uuid);
        }
        match (self.devices.as_slice(), known.and_then(|known| known.environment.as_ref())) {
            ([only], _) => Some(only.index).filter(|_| ordinal == 0 || !only.instances.is_empty()),
            (_, Some(environment)) => self.by_environment(environment, ordinal),
            (_, None) => None,
        }
    }

    fn by_environment(&self, environment: &Environment, ordinal: u32) -> Option<u32> {
        let ordinal = ordinal as usize;
        let Some(visible) = environment.visible.as_deref() else {
            return self.by_number(environment, ordinal);
        };
        // The driver takes entries up to the first it does not understand.
        let mut entries = Vec::new();
        for entry in visible.split(',').map(str::trim).take(MAX_ORDINALS) {
            match self.by_entry(environment, entry) {
                Entry::Device(index) => entries.push(index),
                Entry::End => break,
            }
        }
        entries.get(ordinal).copied().flatten()
    }

    fn by_entry(&self, environment: &Environment, entry: &str) -> Entry {
        if let Ok(number) = entry.parse::<i64>() {
            let Ok(number) = usize::try_from(number) else { return Entry::End };
            return Entry::Device(self.by_number(environment, number));
        }
        if entry.is_empty() {
            return Entry::End;
        }
        let devices = || {
            self.devices.iter().flat_map(|device| {
                let own = std::iter::once(device.uuid.as_deref());
                let instances = device.instances.iter().map(|instance| instance.uuid.as_deref());
                own.chain(instances).flatten().map(move |uuid| (device.index, uuid))
            })
        };
        // `MIG-GPU-<uuid>/<gi>/<ci>` is how drivers before R470 name an instance.
        let entry = entry.strip_prefix("MIG-").filter(|rest| rest.starts_with("GPU-")).unwrap_or(entry);
        let prefix = entry.split('/').next().unwrap_or(entry);
        let mut matches = devices().filter(|(_, uuid)| starts_with_ignoring_case(uuid, prefix)).map(|(index, _)| index);
        match matches.next() {
            None => Entry::End,
            Some(first) => Entry::Device(matches.all(|other| other == first).then_some(first)),
        }
    }

    /// The device with this number when nothing selects. Numbers follow NVML's order only if asked
    /// to, or if all devices are alike: by default the fastest comes first.
    fn by_number(&self, environment: &Environment, number: usize) -> Option<u32> {
        let in_pci_order = environment.order.as_deref() == Some("PCI_BUS_ID");
        let first = self.devices.first()?;
        let alike = first.name.is_some() && self.devices.iter().all(|device| device.name == first.name);
        // With a split device, a number may be an instance or be left out.
        let split = self.devices.iter().any(|device| !device.instances.is_empty());
        let certain = environment.view == DeviceView::Host && (in_pci_order || alike) && !split;
        self.devices.get(number).filter(|_| certain).map(|device| device.index)
    }

    fn by_uuid_bytes(&self, uuid: &[u8; 16]) -> Option<u32> {
        let matches = |text: &Option<crate::record::Text>| {
            text.as_deref().and_then(uuid_bytes).is_some_and(|bytes| bytes == *uuid)
        };
        let found = self
            .devices
            .iter()
            .find(|device| matches(&device.uuid) || device.instances.iter().any(|instance| matches(&instance.uuid)));
        found.map(|device| device.index)
    }
}

/// What an entry of `CUDA_VISIBLE_DEVICES` says.
enum Entry {
    /// A device, if it is certain which.
    Device(Option<u32>),
    /// The list ends here.
    End,
}

fn starts_with_ignoring_case(text: &str, prefix: &str) -> bool {
    text.len() >= prefix.len() && text.as_bytes()[..prefix.len()].eq_ignore_ascii_case(prefix.as_bytes())
}

/// The 16 bytes of `GPU-8932f937-d72c-4106-c12f-20bd9faed9f6` or `MIG-…`.
fn uuid_bytes(text: &str) -> Option<[u8; 16]> {
    let digits = text.strip_prefix("GPU-").or_else(|| text.strip_prefix("MIG-"))?;
    let mut bytes = [0; 16];
    let mut halves = digits.bytes().filter(|byte| *byte != b'-').map(|byte| char::from(byte).to_digit(16));
    for byte in &mut bytes {
        *byte = (halves.next()?? << 4 | halves.next()??) as u8;
    }
    halves.next().is_none().then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::{Attribution, DeviceView, Devices, uuid_bytes};
    use crate::gpu::devices::{GpuDevice, MigInstance};
    use crate::record::Identity;

    const ME: Identity = Identity { tgid: 7, start_ns: 1 };
    const UUIDS: [&str; 3] = [
        "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
        "GPU-8932aaaa-d72c-4106-c12f-20bd9faed9f6",
        "GPU-11112222-3333-4444-5555-666677778888",
    ];

    fn host(names: &[&str]) -> Attribution {
        let mut devices = Devices::default();
        for (index, name) in names.iter().enumerate() {
            devices.insert(GpuDevice {
                index: index as u32,
                uuid: Some(UUIDS[index].into()),
                name: Some((*name).into()),
                instances: Vec::new(),
            });
        }
        Attribution::new(&devices)
    }

    fn with(visible: Option<&str>, order: Option<&str>, view: DeviceView) -> [Option<u32>; 4] {
        let mut host = host(&["H100", "H100", "H100"]);
        host.learn_environment(ME, visible, order, view);
        [0, 1, 2, 3].map(|ordinal| host.device(ME, ordinal))
    }

    #[test]
    fn what_the_process_was_told_decides() {
        let mut host = host(&["H100", "H100", "H100"]);
        assert_eq!(host.device(ME, 0), None);
        host.learn_environment(ME, Some("1"), None, DeviceView::Host);
        host.learn_uuid(ME, 0, uuid_bytes(UUIDS[2]).unwrap());
        assert_eq!(host.device(ME, 0), Some(2));
        host.learn_uuid(ME, 0, [9; 16]);
        assert_eq!(host.device(ME, 0), None, "a device NVML does not list");
        host.forget(ME);
        assert_eq!(host.device(ME, 0), None);
        let reused = Identity { tgid: 7, start_ns: 2 };
        host.learn_uuid(ME, 0, uuid_bytes(UUIDS[2]).unwrap());
        assert_eq!(host.device(reused, 0), None, "another process with the number");
    }

    #[test]
    fn a_uuid_has_16_bytes() {
        let bytes = uuid_bytes(UUIDS[0]).unwrap();
        assert_eq!(bytes[..6], [0x89, 0x32, 0xf9, 0x37, 0xd7, 0x2c]);
        assert_eq!(bytes[15], 0xf6);
        for text in [
            "",
            "GPU-",
            "8932f937-d72c-4106-c12f-20bd9faed9f6",
            "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6a",
            "GPU-8932f937-d72c-4106-c12f-20bd9faedxyz",
        ] {
            assert_eq!(uuid_bytes(text), None, "{text}");
        }
    }

    #[test]
    fn the_environment_selects_and_orders() {
        use DeviceView::Host;
        assert_eq!(with(None, None, Host), [Some(0), Some(1), Some(2), None]);
        assert_eq!(with(Some("2,0"), None, Host), [Some(2), Some(0), None, None]);
        assert_eq!(with(Some(" 1 , 2 "), None, Host), [Some(1), Some(2), None, None]);
        assert_eq!(with(Some(""), None, Host), [None; 4], "no device");
        assert_eq!(with(Some("-1"), None, Host), [None; 4], "no device");
        assert_eq!(with(Some("1,-1,2"), None, Host), [Some(1), None, None, None], "the list ends at -1");
        assert_eq!(with(Some("1,nonsense,2"), None, Host), [Some(1), None, None, None]);
        assert_eq!(with(Some("9,1"), None, Host), [None, Some(1), None, None]);
        assert_eq!(with(Some(UUIDS[1]), None, Host)[0], Some(1));
        assert_eq!(with(Some("gpu-1111"), None, Host)[0], Some(2), "a prefix, in any case");
        assert_eq!(with(Some("GPU-8932"), None, Host)[0], None, "two devices begin so");
    }

    #[test]
    fn numbers_mean_nothing_where_the_order_is_unknown() {
        assert_eq!(with(Some("1"), None, DeviceView::Container)[0], None);
        assert_eq!(with(None, None, DeviceView::Container)[0], None);
        assert_eq!(with(Some("GPU-1111"), None, DeviceView::Container)[0], Some(2));

        let mut mixed = host(&["H100", "L4", "H100"]);
        mixed.learn_environment(ME, Some("1"), None, DeviceView::Host);
        assert_eq!(mixed.device(ME, 0), None, "fastest first");
        mixed.learn_environment(ME, Some("1"), Some("PCI_BUS_ID"), DeviceView::Host);
        assert_eq!(mixed.device(ME, 0), Some(1));
    }

    #[test]
    fn one_device_needs_no_evidence() {
        assert_eq!(host(&["H100"]).device(ME, 0), Some(0));
        assert_eq!(host(&["H100"]).device(ME, 1), None);
        assert_eq!(host(&[]).device(ME, 0), None);
    }

    #[test]
    fn instances_lead_to_their_device() {
        let mut devices = Devices::default();
        let mig = "MIG-aaaabbbb-cccc-dddd-eeee-ffff00001111";
        for (index, instances) in [vec![], vec![MigInstance { gi: 3, uuid: Some(mig.into()) }]].into_iter().enumerate()
        {
            devices.insert(GpuDevice {
                index: index as u32,
                uuid: Some(UUIDS[index].into()),
                name: Some("A100".into()),
                instances,
            });
        }
        let mut host = Attribution::new(&devices);
        for visible in [mig.to_owned(), format!("MIG-{}/3/0", UUIDS[1])] {
            host.learn_environment(ME, Some(&visible), None, DeviceView::Host);
            assert_eq!(host.device(ME, 0), Some(1), "{visible}");
        }
        host.learn_environment(ME, Some("1"), None, DeviceView::Host);
        assert_eq!(host.device(ME, 0), None, "a number may be an instance");
        host.learn_uuid(ME, 0, uuid_bytes(mig).unwrap());
        assert_eq!(host.device(ME, 0), Some(1));
    }
}
