//! The open stacks, by name and by inode.
//!
//! Invariants:
//! - an inode number is used for one opening of one stack, never again, so the
//!   kernel can never serve pages of an older one;
//! - calls that change one id run one after the other;
//! - a stack is removed only while no file handle is open, unless forced.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use fuser::{INodeNo, Notifier};
use lsmt::{Opener, RoLayer, Stack, StackError, StackSpec};
use parking_lot::{Mutex, RwLock};

use crate::api::error::{ApiError, Code};
use crate::api::models::{
    CacheMode, Export, Layer, OpenStack, Owner, ReplaceLayers, SealStack, Sealed, StackInfo, Upper,
};
use crate::config::{self, ImageConfig};
use crate::traces::Traces;
use crate::ublk::{Devices, Unavailable};

mod devices;

/// Longest name of a stack.
const MAX_ID_BYTES: usize = 128;
/// Most stacks open at a time: bounds memory and open files.
const MAX_STACKS: usize = 16_384;
/// `close(2)` returns before the kernel reports the release, so a delete waits
/// this long for the last handles to go.
const RELEASE_WAIT: Duration = Duration::from_millis(500);
/// How long a removed stack may be finishing its last I/O.
const DRAIN_WAIT: Duration = Duration::from_secs(5);
/// Pause between two looks at a counter.
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// First inode number given out; 1 is the directory.
const FIRST_INODE: u64 = 2;

/// One opening of one stack.
pub struct Entry {
    /// Caller's name.
    pub id: String,
    /// Inode number of this opening.
    pub inode: u64,
    /// The disk.
    pub stack: Stack,
    /// Kernel caching.
    pub cache: CacheMode,
    /// Owner of the file.
    pub owner: Owner,
    /// Whether pages of zeros that are written are recorded, and not stored.
    pub records_zeros: bool,
    upper: Mutex<Option<Upper>>,
    open_handles: AtomicU64,
    is_device: AtomicBool,
}

impl Entry {
    /// Whether the stack takes writes. Never changes.
    pub fn is_writable(&self) -> bool {
        self.stack.is_writable()
    }

    /// Whether it is a block device, and no file.
    pub fn is_device(&self) -> bool {
        self.is_device.load(Ordering::Acquire)
    }

    /// Counts one more handle.
    fn acquire(&self) {
        self.open_handles.fetch_add(1, Ordering::AcqRel);
    }

    /// Counts one handle less.
    pub fn release(&self) {
        self.open_handles.fetch_sub(1, Ordering::AcqRel);
    }

    fn handles(&self) -> u64 {
        self.open_handles.load(Ordering::Acquire)
    }
}

#[derive(Default)]
struct Tables {
    by_id: HashMap<String, Arc<Entry>>,
    by_inode: HashMap<u64, Arc<Entry>>,
}

/// All open stacks of the daemon.
pub struct Registry {
    mount: PathBuf,
    opener: Opener,
    traces: Traces,
    tables: RwLock<Tables>,
    id_locks: Mutex<HashMap<String, Arc<Mutex<()>>>>,
    next_inode: AtomicU64,
    notifier: OnceLock<Notifier>,
    devices: OnceLock<Result<Devices, Unavailable>>,
}

impl Registry {
    /// An empty registry whose stacks appear under `mount`.
    pub fn new(mount: &Path, opener: Opener, traces: Traces) -> Registry {
        Registry {
            mount: mount.to_owned(),
            opener,
            traces,
            tables: RwLock::default(),
            id_locks: Mutex::default(),
            next_inode: AtomicU64::new(FIRST_INODE),
            notifier: OnceLock::new(),
            devices: OnceLock::new(),
        }
    }

    /// What opens the files of layers, for all stacks.
    pub fn opener(&self) -> &Opener {
        &self.opener
    }

    /// Where stacks appear.
    pub fn mount(&self) -> &Path {
        &self.mount
    }

    /// Sets the way to invalidate kernel caches; once, when the mount is up.
    pub fn set_notifier(&self, notifier: Notifier) {
        // A second call would be a second mount, which does not happen.
        let _ = self.notifier.set(notifier);
    }

    /// The stack of a name.
    pub fn by_id(&self, id: &str) -> Option<Arc<Entry>> {
        self.tables.read().by_id.get(id).cloned()
    }

    /// The stack of an inode.
    pub fn by_inode(&self, inode: u64) -> Option<Arc<Entry>> {
        self.tables.read().by_inode.get(&inode).cloned()
    }

    /// The stack of a name, if it is a file.
    pub fn file_by_id(&self, id: &str) -> Option<Arc<Entry>> {
        self.by_id(id).filter(|entry| !entry.is_device())
    }

    /// All stacks, by name.
    pub fn all(&self) -> Vec<Arc<Entry>> {
        let mut entries: Vec<_> = self.tables.read().by_id.values().cloned().collect();
        entries.sort_by(|a, b| a.id.cmp(&b.id));
        entries
    }

    /// Takes a handle of an inode. Excludes a removal at the same time.
    pub fn open_handle(&self, inode: u64) -> Option<Arc<Entry>> {
        let tables = self.tables.read();
        let entry = tables.by_inode.get(&inode)?;
        entry.acquire();
        Some(entry.clone())
    }

    /// What a caller is told about a stack.
    pub fn describe(&self, entry: &Entry) -> StackInfo {
        let stats = entry.stack.upper_stats();
        let device = self.devices().and_then(|devices| devices.path(&entry.id));
        StackInfo {
            id: entry.id.clone(),
            export: match &device {
                Some(_) => Export::Ublk,
                None => Export::Fuse,
            },
            path: device.unwrap_or_else(|| self.mount.join(&entry.id)),
            virtual_size_bytes: entry.stack.virtual_size_bytes(),
            lowers: entry.stack.lower_paths(),
            upper: entry.upper.lock().clone(),
            upper_layout: entry.stack.upper_layout().map(Into::into),
            cache: entry.cache,
            owner: entry.owner,
            open_handles: entry.handles(),
            upper_data_bytes: stats.map_or(0, |stats| stats.data_bytes),
            upper_mapped_bytes: stats.map_or(0, |stats| stats.mapped_bytes),
            upper_records: stats.map_or(0, |stats| stats.records),
            waits_for_room: self.devices().is_some_and(|d| d.waits_for_room(&entry.id)),
        }
    }

    /// Opens a stack under a name, or confirms that it is open exactly so.
    pub fn open(&self, id: &str, request: &OpenStack) -> Result<StackInfo, ApiError> {
        let Some(path) = &request.config else {
            check_request(id, request)?;
            return self.with_id(id, || self.open_alone(id, request));
        };
        let (request, result_file) = from_config(path, request)?;
        let opened = self.open(id, &request);
        if let Some(path) = &result_file {
            let failure = opened.as_ref().err().map(ApiError::message);
            config::write_result(path, failure)?;
        }
        opened
    }

    fn open_alone(&self, id: &str, request: &OpenStack) -> Result<StackInfo, ApiError> {
        if let Some(entry) = self.by_id(id) {
            return self.confirm(&entry, request);
        }
        if self.tables.read().by_id.len() >= MAX_STACKS {
            let message = format!("{MAX_STACKS} stacks are open, which is the limit");
            return Err(ApiError::new(
                Code::Busy,
                message,
                "close some stacks first",
            ));
        }
        let is_device = self.wants_device(request)?;
        let entry = self.make_entry(id, request, is_device)?;
        if is_device {
            self.make_device(&entry, request)?;
        }
        self.add(entry.clone());
        tracing::info!(id, inode = entry.inode, "stack opened");
        self.traces.begin(&entry);
        Ok(self.describe(&entry))
    }

    fn make_entry(
        &self,
        id: &str,
        request: &OpenStack,
        is_device: bool,
    ) -> Result<Arc<Entry>, ApiError> {
        let spec = StackSpec {
            lowers: request.lowers.clone(),
            upper: request.upper.as_ref().map(Into::into),
            upper_layout: request.upper_layout.unwrap_or_default().into(),
            virtual_size_bytes: request.virtual_size_bytes,
        };
        let mut stack = Stack::open(&self.opener, &spec)?;
        if let Some(devices) = self.devices().filter(|_| is_device) {
            stack = devices::open_for_device(devices, stack)?;
        }
        if stack.dropped_bytes() > 0 {
            let bytes = stack.dropped_bytes();
            tracing::warn!(id, bytes, "recovery cut unflushed records off the upper");
        }
        Ok(Arc::new(Entry {
            id: id.to_owned(),
            inode: self.next_inode.fetch_add(1, Ordering::Relaxed),
            stack,
            cache: cache_of(request),
            owner: request.owner.unwrap_or_default(),
            records_zeros: request.records_zeros,
            upper: Mutex::new(request.upper.clone()),
            open_handles: AtomicU64::new(0),
            is_device: AtomicBool::new(false),
        }))
    }

    fn add(&self, entry: Arc<Entry>) {
        let mut tables = self.tables.write();
        tables.by_id.insert(entry.id.clone(), entry.clone());
        tables.by_inode.insert(entry.inode, entry);
    }

    fn confirm(&self, entry: &Entry, request: &OpenStack) -> Result<StackInfo, ApiError> {
        let info = self.describe(entry);
        let same_size = request
            .virtual_size_bytes
            .is_none_or(|size_bytes| size_bytes == info.virtual_size_bytes);
        if info.lowers == request.lowers
            && info.upper == request.upper
            && info.cache == cache_of(request)
            && info.owner == request.owner.unwrap_or_default()
            && entry.records_zeros == request.records_zeros
            && matches!(request.export.unwrap_or(Export::Fuse), wanted if wanted == Export::Auto || wanted == info.export)
            && same_size
        {
            return Ok(info);
        }
        let message = format!("stack {:?} is open with other layers or settings", entry.id);
        let hint = "close it first, or choose another id";
        Err(ApiError::new(Code::Conflict, message, hint))
    }

    /// Seals the upper in place and goes on with a fresh one.
    pub fn seal(&self, id: &str, request: &SealStack) -> Result<Sealed, ApiError> {
        check_absolute(&request.upper.data)?;
        check_absolute(&request.upper.index)?;
        self.with_id(id, || self.seal_alone(id, request))
    }

    fn seal_alone(&self, id: &str, request: &SealStack) -> Result<Sealed, ApiError> {
        let entry = self.by_id(id).ok_or_else(|| ApiError::no_stack(id))?;
        if entry.upper.lock().as_ref() != Some(&request.upper) {
            let fresh = (&request.upper).into();
            self.before_seal(&entry, request)?;
            let sealed = entry.stack.seal(&fresh, request.sync);
            if sealed.is_ok() {
                *entry.upper.lock() = Some(request.upper.clone());
            }
            self.after_change(&entry)?;
            sealed?;
        } else if request.sync {
            // A repeated call may ask for more durability than the first did.
            entry.stack.flush()?;
        }
        let lowers = entry.stack.lower_paths();
        let Some(top) = lowers.last() else {
            let message = format!("stack {id:?} already writes to that upper and has no layer");
            let hint = "give a fresh pair of files";
            return Err(ApiError::new(Code::Conflict, message, hint));
        };
        Ok(Sealed {
            layer: describe_layer(&self.opener, top)?,
            stack: self.describe(&entry),
        })
    }

    /// Reads a run of sealed layers from one layer from now on. A repeated call
    /// finds the replacement in their place and is content.
    pub fn replace(&self, id: &str, request: &ReplaceLayers) -> Result<StackInfo, ApiError> {
        let mut paths = request.lowers.iter().chain([&request.replacement]);
        paths.try_for_each(|path| check_absolute(path))?;
        self.with_id(id, || {
            let entry = self.by_id(id).ok_or_else(|| ApiError::no_stack(id))?;
            if !entry.stack.lower_paths().contains(&request.replacement) {
                entry.stack.replace(&request.lowers, &request.replacement)?;
                self.after_change(&entry)?;
            }
            Ok(self.describe(&entry))
        })
    }

    /// Flushes one stack.
    pub fn flush(&self, id: &str) -> Result<(), ApiError> {
        let entry = self.by_id(id).ok_or_else(|| ApiError::no_stack(id))?;
        self.write_back(&entry)?;
        Ok(entry.stack.flush()?)
    }

    /// Flushes every stack; returns how many failed, after logging why.
    pub fn flush_all(&self) -> usize {
        let failed = self.all().into_iter().filter(|entry| {
            let result = entry.stack.flush();
            if let Err(error) = &result {
                tracing::error!(id = entry.id, %error, "flush failed");
            }
            result.is_err()
        });
        failed.count()
    }

    /// Stacks with open handles.
    pub fn busy(&self) -> Vec<String> {
        let entries = self.all().into_iter();
        let open = entries.filter(|entry| entry.handles() > 0);
        let mut busy: Vec<_> = open.map(|entry| entry.id.clone()).collect();
        busy.append(&mut self.busy_devices());
        busy
    }

    /// Flushes and closes a stack. With `force` also while handles are open:
    /// these then fail.
    pub fn close(&self, id: &str, force: bool) -> Result<(), ApiError> {
        self.with_id(id, || self.close_alone(id, force))
    }

    fn close_alone(&self, id: &str, force: bool) -> Result<(), ApiError> {
        let entry = self.by_id(id).ok_or_else(|| ApiError::no_stack(id))?;
        let deadline = Instant::now() + RELEASE_WAIT;
        while !force && entry.handles() > 0 && Instant::now() < deadline {
            std::thread::sleep(POLL_INTERVAL);
        }
        self.end_device(&entry, force)?;
        entry.stack.flush()?;
        {
            let mut tables = self.tables.write();
            let handles = entry.handles();
            if handles > 0 && !force {
                let message = format!("stack {id:?} has {handles} open handles");
                let hint = "close its users first, or pass force=true";
                return Err(ApiError::new(Code::Busy, message, hint));
            }
            tables.by_id.remove(id);
            tables.by_inode.remove(&entry.inode);
        }
        self.forget_name(id);
        drain(&entry)?;
        entry.stack.end_journal();
        tracing::info!(id, "stack closed");
        Ok(())
    }

    /// Makes the kernel look the name up again.
    fn forget_name(&self, id: &str) {
        let Some(notifier) = self.notifier.get() else {
            return;
        };
        if let Err(error) = notifier.inval_entry(INodeNo::ROOT, OsStr::new(id)) {
            // The kernel reports a name it never cached as an error too.
            tracing::debug!(id, %error, "name was not in the kernel's cache");
        }
    }

    /// Runs `action` while no other call changes the same id.
    fn with_id<R>(&self, id: &str, action: impl FnOnce() -> R) -> R {
        let lock = self
            .id_locks
            .lock()
            .entry(id.to_owned())
            .or_default()
            .clone();
        let result = {
            let _alone = lock.lock();
            action()
        };
        let mut locks = self.id_locks.lock();
        // Two owners, the map and this call: nobody waits for the lock.
        if Arc::strong_count(&lock) == 2 {
            locks.remove(id);
        }
        result
    }
}

/// Waits for I/O under way and makes what it wrote durable, so that the files
/// are free for the next user when this returns.
fn drain(entry: &Arc<Entry>) -> Result<(), ApiError> {
    let deadline = Instant::now() + DRAIN_WAIT;
    while Arc::strong_count(entry) > 1 && Instant::now() < deadline {
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(entry.stack.flush()?)
}

fn cache_of(request: &OpenStack) -> CacheMode {
    match (request.cache, &request.upper) {
        (Some(cache), _) => cache,
        (None, Some(_)) => CacheMode::Direct,
        (None, None) => CacheMode::Page,
    }
}

/// The same request with the layers that a config names, and where the config
/// wants the outcome.
fn from_config(path: &Path, request: &OpenStack) -> Result<(OpenStack, Option<PathBuf>), ApiError> {
    check_absolute(path)?;
    if !request.lowers.is_empty() || request.upper.is_some() {
        let message = "a request with a config cannot name layers besides";
        return Err(ApiError::invalid(message, "leave lowers and upper out"));
    }
    let resolved = ImageConfig::read(path)?.resolve(path)?;
    for lower in &resolved.lowers {
        lower.place_stub()?;
    }
    let named = OpenStack {
        config: None,
        lowers: resolved.paths(),
        upper: resolved.upper.map(|upper| Upper {
            data: upper.data,
            index: upper.index,
        }),
        ..request.clone()
    };
    Ok((named, resolved.result_file))
}

fn check_request(id: &str, request: &OpenStack) -> Result<(), ApiError> {
    let is_allowed =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"._-".contains(&byte);
    let is_dots = id == "." || id == "..";
    if id.is_empty() || id.len() > MAX_ID_BYTES || is_dots || !id.bytes().all(is_allowed) {
        let message = format!("{id:?} is not a stack id");
        let hint = "use 1 to 128 characters of a-z 0-9 . _ -";
        return Err(ApiError::invalid(message, hint));
    }
    let mut paths: Vec<&PathBuf> = request.lowers.iter().collect();
    if let Some(upper) = &request.upper {
        paths.extend([&upper.data, &upper.index]);
        if request.cache == Some(CacheMode::Page) {
            let message = "a stack with an upper cannot use cache mode \"page\"";
            let hint = "use \"direct\", or open the stack without an upper";
            return Err(ApiError::invalid(message, hint));
        }
    }
    paths.into_iter().try_for_each(|path| check_absolute(path))
}

/// Refuses a path that depends on the daemon's working folder.
pub fn check_absolute(path: &Path) -> Result<(), ApiError> {
    if path.is_absolute() {
        return Ok(());
    }
    let message = format!("{} is not an absolute path", path.display());
    Err(ApiError::invalid(message, "give the path from the root"))
}

fn describe_layer(opener: &Opener, path: &Path) -> Result<Layer, ApiError> {
    let (layer, entries) = RoLayer::open(opener, path).map_err(StackError::from)?;
    let data = entries.iter().filter(|segment| !segment.is_zeroed());
    let sectors: u64 = data.map(|segment| segment.length()).sum();
    Ok(Layer {
        path: path.to_owned(),
        size_bytes: layer.blob().size_bytes(),
        mapped_bytes: sectors * lsmt::format::SECTOR_BYTES,
        uuid: layer.trailer().uuid.clone(),
    })
}
