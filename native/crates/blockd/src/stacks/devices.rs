//! Stacks that are ublk devices: making, taking over after a kill, and ending them.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::Arc;

use lsmt::{RoLayer, Stack, StackError};

use super::{Entry, Registry};
use crate::api::error::{ApiError, Code};
use crate::api::models::{Export, OpenStack, SealStack};
use crate::ublk::record::Record;
use crate::ublk::{users, Devices, Unavailable};

/// Devices ended at the same time when the daemon ends.
const ENDED_AT_ONCE: usize = 8;

impl Registry {
    /// Sets whether, or why not, stacks can be devices; once, before the first is opened.
    pub fn set_devices(&self, devices: Result<Devices, Unavailable>) {
        // A second call would be a second daemon, which does not happen.
        let _ = self.devices.set(devices);
    }

    /// The ublk devices, if the host has them.
    pub fn devices(&self) -> Option<&Devices> {
        self.devices.get()?.as_ref().ok()
    }

    /// Kinds of export that can be asked for, and why the others cannot.
    pub fn exports(&self) -> (Vec<Export>, Option<String>) {
        match self.devices.get() {
            Some(Ok(_)) => (vec![Export::Fuse, Export::Ublk], None),
            Some(Err(reason)) => (vec![Export::Fuse], Some(reason.to_string())),
            None => (
                vec![Export::Fuse],
                Some("it was started without --ublk-state".into()),
            ),
        }
    }

    /// Whether a stack that is asked for so is to be a device.
    pub(super) fn wants_device(&self, request: &OpenStack) -> Result<bool, ApiError> {
        match request.export.unwrap_or(Export::Fuse) {
            Export::Fuse => Ok(false),
            Export::Auto => Ok(self.devices().is_some()),
            Export::Ublk if self.devices().is_some() => Ok(true),
            Export::Ublk => {
                let (_, reason) = self.exports();
                let message = format!("no ublk devices here: {}", reason.unwrap_or_default());
                let hint =
                    "ask for export \"auto\" or \"fuse\", or load the driver and start blockd anew";
                Err(ApiError::invalid(message, hint))
            }
        }
    }

    /// Makes the device of a new entry. Where any export will do, a failure leaves it a file.
    pub(super) fn make_device(
        &self,
        entry: &Arc<Entry>,
        request: &OpenStack,
    ) -> Result<(), ApiError> {
        let Some(devices) = self.devices() else {
            return Ok(());
        };
        let open = OpenStack {
            config: None,
            virtual_size_bytes: Some(entry.stack.virtual_size_bytes()),
            ..request.clone()
        };
        let made = devices.attach(entry, |device| {
            let record = Record {
                device,
                open,
                next_upper: None,
            };
            devices.records.write(&entry.id, &record)
        });
        match made {
            Ok(()) => entry.is_device.store(true, Ordering::Release),
            Err(error) => {
                devices
                    .records
                    .remove(&entry.id)
                    .map_err(|error| failed(entry, &error))?;
                if request.export != Some(Export::Auto) {
                    return Err(failed(entry, &error));
                }
                tracing::warn!(id = entry.id, %error, "no ublk device; the stack is a file");
                entry.stack.flush()?;
                entry.stack.end_journal();
            }
        }
        Ok(())
    }

    /// Takes over what a killed daemon left. What cannot be taken over is removed, with a
    /// word in the log: its users get errors.
    pub fn recover(&self) {
        let Some(devices) = self.devices() else {
            return;
        };
        let records = devices.records.all().unwrap_or_else(|error| {
            tracing::error!(%error, "cannot read the records of ublk devices");
            Vec::new()
        });
        for (id, record) in records {
            let number = record.device;
            match self.with_id(&id, || self.recover_one(devices, &id, record)) {
                Ok(true) => tracing::info!(id, number, "ublk device taken over"),
                outcome => {
                    if let Err(error) = outcome {
                        let reason = error.message();
                        tracing::error!(id, number, reason, "cannot take over a ublk device");
                    }
                    if let Err(error) = devices.records.remove(&id) {
                        tracing::error!(id, %error, "cannot remove the record of a device");
                    }
                }
            }
        }
        devices.discard_strays();
    }

    fn recover_one(
        &self,
        devices: &Devices,
        id: &str,
        mut record: Record,
    ) -> Result<bool, ApiError> {
        self.finish_seal(&mut record)?;
        let open = &record.open;
        for path in &open.lowers {
            // A layer that was sealed without `sync` counts as durable from the next flush on.
            let synced = std::fs::File::open(path).and_then(|file| file.sync_data());
            synced.map_err(|error| ApiError::io(&path.display().to_string(), &error))?;
        }
        let entry = self.make_entry(id, open, true)?;
        let found = devices.take_over(&entry, record.device);
        if !found.map_err(|error| failed(&entry, &error))? {
            return Ok(false);
        }
        entry.is_device.store(true, Ordering::Release);
        // Noted before it is listed, so that the record is never behind.
        let noted = devices.records.write(id, &record);
        noted.map_err(|error| failed(&entry, &error))?;
        self.add(entry);
        Ok(true)
    }

    /// A kill in the middle of a seal leaves the upper sealed or not, and nothing between.
    fn finish_seal(&self, record: &mut Record) -> Result<(), ApiError> {
        let (Some(upper), Some(next)) = (&record.open.upper, record.next_upper.take()) else {
            return Ok(());
        };
        match RoLayer::open(self.opener(), &upper.data) {
            Ok(_) => {
                record.open.lowers.push(upper.data.clone());
                record.open.upper = Some(next);
            }
            Err(_) => {
                // Best effort: an empty pair is usable by the next seal.
                let _ = std::fs::remove_file(&next.data);
                let _ = std::fs::remove_file(&next.index);
            }
        }
        Ok(())
    }

    /// Notes what a seal is about to do, and has the stack get all that its device was given.
    pub(super) fn before_seal(&self, entry: &Entry, request: &SealStack) -> Result<(), ApiError> {
        let Some(devices) = self.device_of(entry) else {
            return Ok(());
        };
        self.write_back(entry)?;
        self.note(devices, entry, |record| {
            record.next_upper = Some(request.upper.clone())
        })
    }

    /// Notes the layers that the stack has now.
    pub(super) fn after_change(&self, entry: &Entry) -> Result<(), ApiError> {
        let Some(devices) = self.device_of(entry) else {
            return Ok(());
        };
        self.note(devices, entry, |record| {
            record.next_upper = None;
            record.open.lowers = entry.stack.lower_paths();
            record.open.upper.clone_from(&entry.upper.lock());
        })
    }

    fn note(
        &self,
        devices: &Devices,
        entry: &Entry,
        change: impl FnOnce(&mut Record),
    ) -> Result<(), ApiError> {
        let noted = devices.records.change(&entry.id, change);
        noted.map_err(|error| failed(entry, &error))
    }

    fn device_of(&self, entry: &Entry) -> Option<&Devices> {
        self.devices().filter(|_| entry.is_device())
    }

    /// Has the stack of a device get all that the kernel still caches of it.
    pub(super) fn write_back(&self, entry: &Entry) -> Result<(), ApiError> {
        match self.device_of(entry) {
            Some(devices) => devices
                .write_back(&entry.id)
                .map_err(|error| failed(entry, &error)),
            None => Ok(()),
        }
    }

    /// Refuses while another process has the device, unless forced, and removes it.
    pub(super) fn end_device(&self, entry: &Entry, force: bool) -> Result<(), ApiError> {
        let Some(devices) = self.device_of(entry) else {
            return Ok(());
        };
        let path = devices.path(&entry.id);
        if let (Some(path), false) = (path, force) {
            if let Some((path, pid)) = users::processes(&[path]).first() {
                let message = format!(
                    "process {pid} uses {} of stack {:?}",
                    path.display(),
                    entry.id
                );
                let hint = "end it first, or pass force=true";
                return Err(ApiError::new(Code::Busy, message, hint));
            }
        }
        devices
            .detach(&entry.id)
            .map_err(|error| failed(entry, &error))
    }

    /// Stacks whose device another process uses.
    pub(super) fn busy_devices(&self) -> Vec<String> {
        let Some(devices) = self.devices() else {
            return Vec::new();
        };
        let all = self.all().into_iter().filter(|entry| entry.is_device());
        let named: Vec<_> = all
            .filter_map(|e| Some((devices.path(&e.id)?, e.id.clone())))
            .collect();
        let paths: Vec<_> = named.iter().map(|(path, _)| path.clone()).collect();
        let used = users::processes(&paths);
        let is_used = |path| used.iter().any(|(other, _)| other == path);
        named
            .iter()
            .filter(|(path, _)| is_used(path))
            .map(|(_, id)| id.clone())
            .collect()
    }

    /// Ends every device, for the daemon's own end; returns how many failed.
    pub fn end_devices(&self) -> usize {
        let Some(devices) = self.devices() else {
            return 0;
        };
        let entries: Vec<_> = self.all().into_iter().filter(|e| e.is_device()).collect();
        let end = |entry: &Arc<Entry>| {
            let ended = devices.detach(&entry.id).map_err(|error| error.to_string());
            let ended = ended.and_then(|()| entry.stack.flush().map_err(|error| error.to_string()));
            match &ended {
                Ok(()) => entry.stack.end_journal(),
                Err(reason) => tracing::error!(id = entry.id, reason, "cannot end a ublk device"),
            }
            ended.is_err()
        };
        let share = entries.len().div_ceil(ENDED_AT_ONCE).max(1);
        std::thread::scope(|scope| {
            let parts: Vec<_> = entries
                .chunks(share)
                .map(|part| scope.spawn(|| part.iter().filter(|entry| end(entry)).count()))
                .collect();
            parts.into_iter().map(|part| part.join().unwrap_or(1)).sum()
        })
    }
}

/// Opens a stack that is to be a device.
pub(super) fn open_for_device(devices: &Devices, mut stack: Stack) -> Result<Stack, StackError> {
    stack.keep_journals(&devices.records.journals())?;
    Ok(stack)
}

fn failed(entry: &Entry, error: &io::Error) -> ApiError {
    ApiError::io(&format!("ublk device of stack {:?}", entry.id), error)
}
