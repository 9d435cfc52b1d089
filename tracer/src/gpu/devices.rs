//! The devices of this host, as NVML lists them.

use crate::record::Text;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// One device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuDevice {
    /// NVML's index, which is the order of PCI addresses.
    pub index: u32,
    /// `GPU-…`.
    pub uuid: Option<Text>,
    /// Product name.
    pub name: Option<Text>,
    /// Its MIG instances, if it is split.
    #[serde(default)]
    pub instances: Vec<MigInstance>,
}

/// One MIG device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigInstance {
    /// GPU instance it computes in; several MIG devices may share one and its memory.
    pub gi: u32,
    /// `MIG-…`.
    pub uuid: Option<Text>,
}

/// All devices, by index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Devices {
    /// Driver version.
    pub driver: Option<Text>,
    devices: BTreeMap<u32, GpuDevice>,
}

impl Devices {
    /// No device, with the driver's version.
    pub fn new(driver: Option<Text>) -> Self {
        Self { driver, devices: BTreeMap::new() }
    }

    /// Adds a device, or replaces what was known of it.
    pub fn insert(&mut self, device: GpuDevice) {
        self.devices.insert(device.index, device);
    }

    /// In the order of their indexes.
    pub fn iter(&self) -> impl Iterator<Item = &GpuDevice> {
        self.devices.values()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.devices.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.devices.is_empty()
    }
}
