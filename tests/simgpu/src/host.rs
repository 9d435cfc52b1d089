//! The folder of a simulated host.

use crate::client::{self, ClientView};
use crate::config::Config;
use crate::fault::Fault;
use crate::state::{Mapped, State};
use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::Ordering::{AcqRel, Acquire};

/// Why a simulated host cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// A file of the host cannot be used.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file of the host does not hold what it should.
    #[error("{}: {reason}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// There are too many clients at once.
    #[error("the simulated host has no room for another client")]
    Full,
}

impl HostError {
    pub(crate) fn io(path: &Path, source: impl Into<std::io::Error>) -> Self {
        Self::Io { path: path.to_owned(), source: source.into() }
    }
}

/// A simulated host.
#[derive(Debug)]
pub struct Host {
    directory: PathBuf,
    config: Config,
    state: Mapped,
    faults: Mutex<(u64, Vec<Fault>)>,
}

/// One device at one moment.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct DeviceView {
    /// Its index.
    pub index: u32,
    /// Bytes in use, the driver's reserve not counted.
    pub used: u64,
    /// Of those, bytes that dead clients left behind.
    pub left_behind: u64,
}

/// A host at one moment.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct View {
    /// By index.
    pub devices: Vec<DeviceView>,
    /// Those whose memory is not back yet.
    pub clients: Vec<ClientView>,
}

impl Host {
    /// Makes a host in a folder and installs the simulated libraries, found in `libraries` (where
    /// cargo puts them: `target/<profile>`).
    pub fn create(directory: &Path, config: Config, libraries: &Path) -> Result<Self, HostError> {
        if let Some(reason) = config.objection() {
            return Err(HostError::Content { path: directory.to_owned(), reason });
        }
        let make = |path: PathBuf| fs::create_dir_all(&path).map_err(|error| HostError::io(&path, error));
        for folder in ["dev", "clients", "lib"] {
            make(directory.join(folder))?;
        }
        let write = |name: &str, content: &[u8]| {
            let path = directory.join(name);
            fs::write(&path, content).map_err(|error| HostError::io(&path, error))
        };
        let devices = (0..config.devices).map(|device| format!("dev/nvidia{device}"));
        for name in devices.chain(["dev/nvidiactl".to_owned(), "dev/nvidia-uvm".to_owned(), "lock".to_owned()]) {
            write(&name, b"")?;
        }
        for (from, to) in [("libsimgpu_cuda.so", "libcuda.so.1"), ("libsimgpu_nvml.so", "libnvidia-ml.so.1")] {
            let from = libraries.join(from);
            fs::copy(&from, directory.join("lib").join(to)).map_err(|error| HostError::io(&from, error))?;
        }
        let text = serde_json::to_string_pretty(&config).unwrap_or_default();
        write("config.json", text.as_bytes())?;
        write("faults.json", b"[]")?;
        let path = directory.join("state");
        let options = || fs::OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path);
        let state = options().and_then(|file| Mapped::create(&file)).map_err(|error| HostError::io(&path, error))?;
        Ok(Self { directory: directory.to_owned(), config, state, faults: Mutex::default() })
    }

    /// Opens a host that was created.
    pub fn open(directory: &Path) -> Result<Self, HostError> {
        let path = directory.join("config.json");
        let text = fs::read_to_string(&path).map_err(|error| HostError::io(&path, error))?;
        let config = serde_json::from_str(&text)
            .map_err(|error| HostError::Content { path: path.clone(), reason: error.to_string() })?;
        let path = directory.join("state");
        let file = fs::OpenOptions::new().read(true).write(true).open(&path);
        let state = file.and_then(|file| Mapped::open(&file)).map_err(|error| HostError::io(&path, error))?;
        Ok(Self { directory: directory.to_owned(), config, state, faults: Mutex::default() })
    }

    /// Its folder.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// What it is like.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Its shared memory.
    pub fn state(&self) -> &State {
        self.state.get()
    }

    /// Folder of the simulated libraries.
    pub fn lib_dir(&self) -> PathBuf {
        self.directory.join("lib")
    }

    /// Folder of the simulated device files.
    pub fn device_dir(&self) -> PathBuf {
        self.directory.join("dev")
    }

    /// What a process needs in its environment to run on this host.
    pub fn env(&self) -> Vec<(String, String)> {
        vec![
            (crate::DIRECTORY.to_owned(), self.directory.display().to_string()),
            ("LD_LIBRARY_PATH".to_owned(), self.lib_dir().display().to_string()),
        ]
    }

    pub(crate) fn client_file(&self, slot: usize) -> PathBuf {
        self.directory.join("clients").join(slot.to_string())
    }

    /// The lock for changes of more than one word. Opened anew each time: a copy inherited by a
    /// fork would be the same lock.
    pub(crate) fn lock(&self) -> Result<OwnedFd, HostError> {
        let path = self.directory.join("lock");
        let failed = |errno| HostError::io(&path, errno);
        let file = open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(failed)?;
        flock(&file, FlockOperation::LockExclusive).map_err(failed)?;
        Ok(file)
    }

    /// Notices dead clients and gives back what is due.
    pub fn reap(&self) {
        if let Ok(_guard) = self.lock() {
            self.reap_locked();
        }
    }

    pub(crate) fn reap_locked(&self) {
        client::reap(self, self.state());
    }

    /// Makes something go wrong from now on.
    pub fn fault(&self, fault: Fault) -> Result<(), HostError> {
        let mut faults = self.faults();
        faults.push(fault);
        self.set_faults(&faults)
    }

    /// Nothing goes wrong any more. What was left behind stays.
    pub fn clear_faults(&self) -> Result<(), HostError> {
        self.set_faults(&[])
    }

    fn set_faults(&self, faults: &[Fault]) -> Result<(), HostError> {
        let _guard = self.lock()?;
        // By rename: readers see the old list or the new one.
        let (path, new) = (self.directory.join("faults.json"), self.directory.join("faults.json.new"));
        let text = serde_json::to_string_pretty(faults).unwrap_or_default();
        fs::write(&new, text).and_then(|()| fs::rename(&new, &path)).map_err(|error| HostError::io(&path, error))?;
        self.state().fault_epoch.fetch_add(1, AcqRel);
        Ok(())
    }

    /// What goes wrong at present.
    pub fn faults(&self) -> Vec<Fault> {
        let epoch = self.state().fault_epoch.load(Acquire);
        let mut known = self.faults.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if known.0 != epoch {
            let text = fs::read_to_string(self.directory.join("faults.json")).unwrap_or_default();
            *known = (epoch, serde_json::from_str(&text).unwrap_or_default());
        }
        known.1.clone()
    }

    /// Everything at this moment.
    pub fn view(&self) -> View {
        self.reap();
        let state = self.state();
        let device = |index: u32| {
            let device = &state.devices[index as usize];
            DeviceView { index, used: device.used.load(Acquire), left_behind: device.left_behind.load(Acquire) }
        };
        let clients = state.clients.iter().filter(|client| client.taken.load(Acquire) != 0);
        let client = |client: &crate::state::ClientState| {
            Some(ClientView {
                pid: client.visible_pid()?,
                comm: client.comm(),
                gi: client.gi.load(Acquire),
                gone: client.gone_ns.load(Acquire) != 0,
                billed: client.bills(),
            })
        };
        View { devices: (0..self.config.devices).map(device).collect(), clients: clients.filter_map(client).collect() }
    }
}
