//! What a simulated host is like.

use serde::{Deserialize, Serialize};

/// Most devices of a host.
pub const MAX_DEVICES: usize = 16;
/// GPU instances are numbered from 1 to below this.
pub const MAX_INSTANCES: usize = 16;

/// A simulated host, fixed when it is created.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// Number of devices, at most [`MAX_DEVICES`].
    pub devices: u32,
    /// Bytes of each device.
    pub memory: u64,
    /// Bytes of each device the driver keeps for itself.
    pub reserved: u64,
    /// Product name of each device.
    pub name: String,
    /// Driver version, as NVML tells it.
    pub driver: String,
    /// CUDA version, as `cuDriverGetVersion` tells it.
    pub cuda: i32,
    /// Bytes a context costs on its device.
    pub context_overhead: u64,
    /// Milliseconds it takes to create a context.
    pub context_time_ms: u64,
    /// Milliseconds from when a client's last descriptor closed to when its memory is back.
    pub release_delay_ms: u64,
    /// Further milliseconds for each GiB of pinned host memory it held.
    pub release_per_pinned_gib_ms: u64,
    /// GPU instances each device is split into; none for whole devices.
    #[serde(default)]
    pub mig: Vec<Mig>,
    /// Whether imported memory is billed to its importers as well as to its owner. The open kernel
    /// modules count duplicated objects (`_gpuCollectMemInfo`); whether NVML adds them is not known.
    #[serde(default = "yes")]
    pub bill_imports: bool,
}

fn yes() -> bool {
    true
}

/// A GPU instance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Mig {
    /// Its number.
    pub gi: u32,
    /// Its bytes.
    pub memory: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            devices: 1,
            memory: 80 << 30,
            reserved: 0,
            name: "Simulated GPU 80GB".to_owned(),
            driver: "550.163.01".to_owned(),
            cuda: 12_040,
            context_overhead: 300 << 20,
            context_time_ms: 5,
            release_delay_ms: 500,
            release_per_pinned_gib_ms: 0,
            mig: Vec::new(),
            bill_imports: true,
        }
    }
}

impl Config {
    /// Bytes a process can use at most: of a device, or of a GPU instance of it.
    pub fn capacity(&self, gi: Option<u32>) -> u64 {
        match gi {
            None => self.memory - self.reserved,
            Some(gi) => self.mig.iter().find(|mig| mig.gi == gi).map_or(0, |mig| mig.memory),
        }
    }

    /// Bytes that are shown as all there is.
    pub fn total(&self, gi: Option<u32>) -> u64 {
        if gi.is_none() { self.memory } else { self.capacity(gi) }
    }

    /// Why there can be no such host, if so.
    pub fn objection(&self) -> Option<String> {
        let split: u64 = self.mig.iter().map(|mig| mig.memory).sum();
        let numbered = |mig: &Mig| (1..MAX_INSTANCES as u32).contains(&mig.gi);
        if self.devices as usize > MAX_DEVICES {
            Some(format!("at most {MAX_DEVICES} devices"))
        } else if self.reserved > self.memory || split > self.memory - self.reserved {
            Some("the driver's reserve and the instances need more memory than a device has".to_owned())
        } else if !self.mig.iter().all(numbered) {
            Some(format!("instances are numbered from 1 to {}", MAX_INSTANCES - 1))
        } else {
            None
        }
    }

    /// UUID of a device, as it is printed behind `GPU-`.
    pub fn uuid(&self, device: u32) -> String {
        let hex = format!("{:032x}", u128::from_be_bytes(self.uuid_bytes(device)));
        format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
    }

    /// UUID of a GPU instance, as it is printed.
    pub fn mig_uuid(&self, device: u32, gi: u32) -> String {
        let [.., tail] = (device * 256 + gi).to_be_bytes();
        format!("MIG-{}{:02x}{tail:02x}", &self.uuid(device)[..32], device)
    }

    /// The sixteen bytes of a device's UUID.
    pub fn uuid_bytes(&self, device: u32) -> [u8; 16] {
        let mut bytes = *b"simgpu\0\0\x80\0\0\0\0\0\0\0";
        bytes[12..].copy_from_slice(&(device + 1).to_be_bytes());
        bytes
    }

    /// PCI address of a device.
    pub fn pci(&self, device: u32) -> String {
        format!("00000000:{:02X}:00.0", 0x10 + device)
    }
}

#[cfg(test)]
mod tests {
    use super::Config;

    #[test]
    fn uuids_look_like_uuids_and_differ() {
        let config = Config::default();
        assert_eq!(config.uuid(0), "73696d67-7075-0000-8000-000000000001");
        assert_eq!(config.uuid(15), "73696d67-7075-0000-8000-000000000010");
    }
}
