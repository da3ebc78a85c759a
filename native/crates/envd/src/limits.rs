//! Every limit of the guest agent, each with its unit in the name and its reason.

use std::time::Duration;

/// Port the clients of the contract expect (contract section 1.2).
pub const DEFAULT_PORT: u16 = 49983;
/// Version reported by `/init`; clients choose features by it (contract section 3.7).
pub const ENVD_VERSION: &str = "0.6.13";

/// One unary or enveloped request message. Larger than the kernel's own limit on arguments plus
/// environment (2 MiB), so that E2BIG is the kernel's answer and not ours.
pub const MESSAGE_MAX_BYTES: usize = 16 * 1024 * 1024;
/// How long a request's body may stand still before its message is whole.
pub const BODY_IDLE_MAX: Duration = Duration::from_secs(60);
/// How long the message of a streaming request may take in all: its size is that of a unary one.
pub const FIRST_MESSAGE_WAIT: Duration = Duration::from_secs(600);
/// Messages below this many bytes are never compressed: it would make them larger.
pub const COMPRESS_MIN_BYTES: usize = 512;
/// Body of `/init` and `/files/compose`: a few settings, certificates at most.
pub const CONTROL_BODY_MAX_BYTES: usize = 4 * 1024 * 1024;

/// One read of a child's stdout or stderr (contract section 3.4).
pub const OUTPUT_CHUNK_BYTES: usize = 32 * 1024;
/// One read of a terminal (contract section 3.4).
pub const PTY_CHUNK_BYTES: usize = 16 * 1024;
/// The end of a streaming request's body, after its message: an honest client sends both at once.
pub const REQUEST_END_MAX: Duration = Duration::from_secs(30);
/// Events waiting for one subscriber before its process is made to wait: 8 x 32 KiB at most.
pub const SUBSCRIBER_QUEUE_EVENTS: usize = 8;
/// Clients that may follow one process.
pub const SUBSCRIBERS_MAX: usize = 64;
/// With several subscribers, one that accepts nothing for this long is cut so the others go on.
pub const SUBSCRIBER_STALL: Duration = Duration::from_secs(30);
/// Silence on an output pipe, after the leader is gone, that ends the wait for stragglers.
pub const DRAIN_QUIET: Duration = Duration::from_millis(100);
/// Whole time stragglers may hold back the `end` event once the leader's own output is read.
pub const DRAIN_MAX: Duration = Duration::from_secs(2);
/// And how much of their output may still go before it: what fits into a few pipes on the way.
pub const DRAIN_EXTRA_BYTES: usize = 1024 * 1024;
/// How long an exit status is kept for a late Connect (contract section 3.4).
pub const FINISHED_RETENTION: Duration = Duration::from_secs(30);
/// Exit statuses kept at most; the oldest go first.
pub const FINISHED_MAX: usize = 4096;
/// Keepalive interval when the client names none (contract section 3.4).
pub const KEEPALIVE_DEFAULT: Duration = Duration::from_secs(90);
/// Longest keepalive interval and request deadline accepted.
pub const DEADLINE_MAX: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// Stack of the child between clone and exec.
pub const SPAWN_STACK_BYTES: usize = 64 * 1024;
/// How long the answer to SIGKILL waits for the process to be gone, which it nearly always is at once;
/// one stuck in the kernel must not hold the caller.
pub const KILL_CONFIRM: Duration = Duration::from_millis(500);
/// Passes over /proc that stop a tree, before it is killed without a cgroup; each catches what was forked
/// during the last one. Only a fork bomb needs as many.
pub const KILL_PASSES: usize = 16;
/// Exit statuses collected before the reaper lets other work run.
pub const REAP_BATCH: usize = 512;

/// Piece of a file read or written in one hop to a worker thread.
pub const FILE_CHUNK_BYTES: usize = 128 * 1024;
/// Worker threads for file system calls and for the start of processes.
pub const FILE_THREADS_MAX: usize = 16;
/// Those that exist from the start.
pub const FILE_THREADS_MIN: usize = 4;
/// How long an idle one is kept: for good.
pub const FILE_THREADS_KEPT: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// How long an upload waits for an earlier one to the same path.
pub const UPLOAD_TURN_WAIT: Duration = Duration::from_secs(60);
/// How long an upload may stand still before it is given up, so that a client that vanished does not keep
/// others from the path (contract section 1.6: idle limits of at least 600 s).
pub const UPLOAD_IDLE_MAX: Duration = Duration::from_secs(600);
/// Headers of one multipart part.
pub const PART_HEADERS_MAX_BYTES: usize = 16 * 1024;
/// What is read and thrown away of a refused request, so that the client gets to read the refusal.
pub const REFUSED_BODY_MAX_BYTES: u64 = 256 * 1024 * 1024;
/// And for how long.
pub const REFUSED_BODY_WAIT: Duration = Duration::from_secs(20);
/// Parts of one multipart upload.
pub const PARTS_MAX: usize = 10_000;
/// Length of one metadata key and of all metadata together (contract section 3.2).
pub const METADATA_KEY_MAX_BYTES: usize = 246;
/// See [`METADATA_KEY_MAX_BYTES`].
pub const METADATA_TOTAL_MAX_BYTES: usize = 4096;
/// Depth of a directory listing.
pub const LIST_DEPTH_MAX: u32 = 4096;
/// Entries of one directory listing; more is an error naming this limit.
pub const LIST_ENTRIES_MAX: usize = 200_000;
/// Sources of one compose call.
pub const COMPOSE_SOURCES_MAX: usize = 10_000;
/// Symbolic links followed while a path is resolved, as in the kernel.
pub const PATH_MAX_BYTES: usize = 4096;

/// Watches at once. Each takes one of the kernel's inotify descriptors, 128 by default for all programs of
/// root; this leaves some.
pub const WATCHERS_MAX: usize = 96;
/// Folders of all watches together: about 20 MiB here and 70 MiB in the kernel.
pub const WATCHED_FOLDERS_MAX: usize = 65_536;
/// Events of one watch that nobody collected or read yet. The rule at this limit: the watch ends, the
/// client gets the events before it and then an error, so that it knows to look for itself.
pub const WATCH_QUEUE_EVENTS_MAX: usize = 200_000;
/// Memory of such events of all watches together; the same rule.
pub const WATCH_QUEUED_MAX_BYTES: usize = 64 * 1024 * 1024;
/// Events made ready in one hop to a worker thread.
pub const WATCH_BATCH_EVENTS: usize = 4096;
/// Such hops a poll makes at most to catch up: more than the kernel's queue (16384 records) holds.
pub const WATCH_CATCH_UP_BATCHES: usize = 16;
/// One read of the kernel's queue; a record takes at most 272 bytes.
pub const WATCH_READ_BYTES: usize = 32 * 1024;
/// Messages handed to the connection at once.
pub const WATCH_FRAMES_BYTES: usize = 64 * 1024;
/// A polled watcher ends when nobody collects its events for this long.
pub const POLLED_WATCHER_IDLE_MAX: Duration = Duration::from_secs(3600);

/// Connections served at once, those of the host not counted: it must get in whatever the guest does.
pub const CONNECTIONS_MAX: usize = 4096;
/// How long a connection may be idle. Clients keep theirs for minutes and must not meet a closing one
/// (contract section 1.6: at least 600 s).
pub const IDLE_TIMEOUT: Duration = Duration::from_secs(660);
/// Pause after `accept` failed for want of descriptors.
pub const ACCEPT_RETRY: Duration = Duration::from_millis(50);

/// Pieces of an archive that wait: for the disk while a build's files are unpacked, each one read of the connection;
/// for the connection while files are read.
pub const UNPACK_QUEUE_PIECES: usize = 8;

/// Longest time the root file system stays frozen, should the host not come back.
pub const FREEZE_MAX: Duration = Duration::from_secs(30);

/// Wait for the root device to appear at boot.
pub const ROOT_DEVICE_WAIT: Duration = Duration::from_secs(30);
/// Step of that wait.
pub const ROOT_DEVICE_POLL: Duration = Duration::from_millis(2);
/// Clock difference that `/init` leaves alone.
pub const CLOCK_TOLERANCE_NS: i128 = 1_000_000;
/// Seed of the kernel's random generator: less than this is no reseed.
pub const ENTROPY_MIN_BYTES: usize = 32;
/// And more than this is a mistake.
pub const ENTROPY_MAX_BYTES: usize = 4096;
/// Text files of the image that are read whole (passwd, group, hosts).
pub const CONFIG_FILE_MAX_BYTES: u64 = 8 * 1024 * 1024;
/// Time processes have between SIGTERM and SIGKILL at shutdown.
pub const SHUTDOWN_GRACE: Duration = Duration::from_millis(500);
