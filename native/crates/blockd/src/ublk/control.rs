//! Commands to `/dev/ublk-control`, each with a deadline.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::libc;
use thiserror::Error;

use super::abi::{command, flag, state, DeviceInfo, Parameters, INFO_BYTES};
use super::sys;

const CONTROL: &str = "/dev/ublk-control";
const DEVICES_LIMIT: &str = "/sys/module/ublk_drv/parameters/ublks_max";
/// As many as stacks may be open.
const WANTED_DEVICES: u32 = 16_384;
/// Commands that only look or note something.
const SHORT: Duration = Duration::from_secs(5);
/// Commands that wait for I/O or for users of a device.
const LONG: Duration = Duration::from_secs(15);
/// How long a device may take to see that its server died, or its node to appear.
const SETTLE: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Why the kernel offers no ublk devices here.
#[derive(Debug, Error)]
pub enum Unavailable {
    /// No control device.
    #[error("{CONTROL} cannot be opened ({0}); load the driver with `modprobe ublk_drv`")]
    NoControl(io::Error),
    /// Too old.
    #[error(
        "the kernel's ublk driver does not tell its features ({0}); Linux 6.5 or newer is needed"
    )]
    NoFeatures(io::Error),
    /// Lacks something.
    #[error("the kernel's ublk driver lacks what a restart of the server needs (features {0:#x})")]
    Lacking(u64),
    /// Something else.
    #[error("cannot keep the records of ublk devices in {0}: {1}")]
    Folder(PathBuf, io::Error),
}

/// The control device.
#[derive(Debug)]
pub struct Control {
    file: File,
}

impl Control {
    /// Opens it and asks for features first.
    pub fn open() -> Result<Control, Unavailable> {
        let mut options = std::fs::OpenOptions::new();
        let opened = options.read(true).write(true).open(CONTROL);
        let control = Control {
            file: opened.map_err(Unavailable::NoControl)?,
        };
        let mut bytes = [0; 8];
        control
            .call(command::GET_FEATURES, u32::MAX, 0, &mut bytes, SHORT)
            .map_err(Unavailable::NoFeatures)?;
        let features = u64::from_le_bytes(bytes);
        if features & flag::NEEDED != flag::NEEDED {
            return Err(Unavailable::Lacking(features));
        }
        allow_many_devices();
        Ok(control)
    }

    fn call(
        &self,
        command: u32,
        number: u32,
        data: u64,
        buffer: &mut [u8],
        deadline: Duration,
    ) -> io::Result<()> {
        sys::control(&self.file, command, number, data, buffer, deadline)
    }

    /// Makes a device with one queue; returns what the kernel made of it.
    pub fn add(&self, depth: u16, max_io_bytes: u32, owner_tag: u64) -> io::Result<DeviceInfo> {
        let wanted = DeviceInfo {
            queues: 1,
            depth,
            max_io_bytes,
            number: u32::MAX,
            flags: flag::NEEDED,
            owner_tag,
            server_pid: -1,
            ..DeviceInfo::default()
        };
        let mut bytes = wanted.encode();
        let added = self.call(command::ADD_DEV, u32::MAX, 0, &mut bytes, SHORT);
        added.map_err(|error| match error.raw_os_error() {
            Some(libc::EACCES) => {
                let message = format!("the kernel allows no more ublk devices ({DEVICES_LIMIT})");
                io::Error::new(io::ErrorKind::QuotaExceeded, message)
            }
            _ => error,
        })?;
        Ok(DeviceInfo::decode(&bytes))
    }

    /// What the kernel says of a device.
    pub fn info(&self, number: u32) -> io::Result<DeviceInfo> {
        let mut bytes = [0; INFO_BYTES];
        self.call(command::GET_DEV_INFO, number, 0, &mut bytes, SHORT)?;
        Ok(DeviceInfo::decode(&bytes))
    }

    /// States size and limits of a device that is not started.
    pub fn set_parameters(&self, number: u32, parameters: &Parameters) -> io::Result<()> {
        let mut bytes = parameters.encode();
        self.call(command::SET_PARAMS, number, 0, &mut bytes, SHORT)
    }

    /// Makes the block device. Its slots must have been given, and be served meanwhile.
    pub fn start(&self, number: u32) -> io::Result<()> {
        let pid = u64::from(std::process::id());
        self.call(command::START_DEV, number, pid, &mut [], LONG)
    }

    /// Ends I/O and removes the block device, whoever has it.
    pub fn stop(&self, number: u32) -> io::Result<()> {
        self.call(command::STOP_DEV, number, 0, &mut [], LONG)
    }

    /// Removes a stopped device. Where the kernel can, without waiting for those who still
    /// have it open: it is gone when they are.
    pub fn delete(&self, number: u32) -> io::Result<()> {
        match self.call(command::DEL_DEV_ASYNC, number, 0, &mut [], LONG) {
            Err(error) if is_unknown(&error) => {
                self.call(command::DEL_DEV, number, 0, &mut [], LONG)
            }
            other => other,
        }
    }

    /// Takes a device over from a server that died; `false` when it never was started, or
    /// is stopped, so that there is nothing to take over.
    pub fn begin_recovery(&self, number: u32) -> io::Result<bool> {
        let end = Instant::now() + SETTLE;
        loop {
            match self.info(number)?.state {
                state::DEAD => return Ok(false),
                state::QUIESCED => {
                    match self.call(command::START_USER_RECOVERY, number, 0, &mut [], LONG) {
                        Ok(()) => return Ok(true),
                        Err(error) if error.raw_os_error() != Some(libc::EBUSY) => {
                            return Err(error)
                        }
                        Err(_) => {}
                    }
                }
                _ => {}
            }
            if Instant::now() > end {
                let message = "the device does not notice that its server is gone";
                return Err(io::Error::new(io::ErrorKind::TimedOut, message));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Lets the I/O of a device go on that was taken over.
    pub fn end_recovery(&self, number: u32) -> io::Result<()> {
        let pid = u64::from(std::process::id());
        self.call(command::END_USER_RECOVERY, number, pid, &mut [], LONG)
    }
}

/// Opens a device's server side. Its node appears a moment after the device, and only one
/// process may have it.
pub fn open_server_side(number: u32) -> io::Result<File> {
    let path = PathBuf::from(format!("/dev/ublkc{number}"));
    let end = Instant::now() + SETTLE;
    loop {
        let mut options = std::fs::OpenOptions::new();
        match options.read(true).write(true).open(&path) {
            Ok(file) => return Ok(file),
            Err(error) if !is_passing(&error) || Instant::now() > end => return Err(error),
            Err(_) => std::thread::sleep(POLL_INTERVAL),
        }
    }
}

fn is_unknown(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EINVAL))
}

fn is_passing(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::EBUSY)
}

/// The block device.
pub fn block_path(number: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkb{number}"))
}

/// The numbers of all ublk devices of the machine.
pub fn numbers() -> Vec<u32> {
    let Ok(entries) = std::fs::read_dir(Path::new("/sys/class/ublk-char")) else {
        return Vec::new();
    };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names
        .filter_map(|name| name.strip_prefix("ublkc")?.parse().ok())
        .collect()
}

/// Raises the limit of devices, which before Linux 6.15 counts all, and is 64 at first.
fn allow_many_devices() {
    let limit = std::fs::read_to_string(DEVICES_LIMIT);
    let limit = limit.ok().and_then(|text| text.trim().parse::<u32>().ok());
    if limit.is_some_and(|limit| limit >= WANTED_DEVICES) {
        return;
    }
    if let Err(error) = std::fs::write(DEVICES_LIMIT, WANTED_DEVICES.to_string()) {
        tracing::warn!(%error, limit, "cannot raise {DEVICES_LIMIT}");
    }
}
