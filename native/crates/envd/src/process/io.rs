//! Output of a process to its followers, input of clients to the process.

use std::cell::RefCell;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rustix::fs::OFlags;
use tokio::io::unix::AsyncFd;
use tokio::io::Interest;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::messages::{DataEvent, ProcessEvent, PtySize};
use super::registry::Process;
use crate::app::lock;
use crate::connect::{Code, ConnectError};
use crate::limits::{
    DRAIN_EXTRA_BYTES, DRAIN_MAX, DRAIN_QUIET, OUTPUT_CHUNK_BYTES, PTY_CHUNK_BYTES,
};
use crate::sys;

/// A non-blocking descriptor in the event loop.
pub type Channel = AsyncFd<OwnedFd>;

/// Puts our end of a pipe or terminal into the event loop.
pub fn channel(fd: OwnedFd, interest: Interest) -> io::Result<Channel> {
    let flags = rustix::fs::fcntl_getfl(&fd)?;
    rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?;
    sys::watch_fd(fd, interest)
}

/// Which stream a descriptor carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
    /// Terminal.
    Pty,
}

impl Source {
    fn event(self, bytes: Bytes) -> ProcessEvent {
        let mut data = DataEvent::default();
        match self {
            Source::Stdout => data.stdout = Some(bytes),
            Source::Stderr => data.stderr = Some(bytes),
            Source::Pty => data.pty = Some(bytes),
        }
        ProcessEvent::Data(data)
    }
}

/// State of a pump once the leader is gone.
struct Drain {
    /// Bytes that were in the pipe when the exit was seen: all the leader can have left behind.
    owed_bytes: usize,
    /// Bytes that others may add.
    extra_bytes: usize,
    /// End of the patience with other writers.
    hard_stop: Instant,
}

/// Reads one output of a process until nobody can write to it any more.
///
/// `drained` fires at end of file, or after the leader's exit as soon as its own output is through and
/// the pipe was quiet for [`DRAIN_QUIET`], or stayed busy for [`DRAIN_MAX`] or [`DRAIN_EXTRA_BYTES`]: a background child that
/// kept the pipe must not hold back the `end` event. Reading goes on for that child's sake, which would
/// die of SIGPIPE otherwise; what it writes then has no followers and is dropped.
pub async fn pump(
    fd: Arc<Channel>,
    source: Source,
    process: Arc<Process>,
    drained: oneshot::Sender<()>,
) {
    let limit_bytes = match source {
        Source::Pty => PTY_CHUNK_BYTES,
        Source::Stdout | Source::Stderr => OUTPUT_CHUNK_BYTES,
    };
    let mut exit = process.exit.subscribe();
    let mut drained = Some(drained);
    let mut drain: Option<Drain> = None;
    loop {
        if drain.is_none() && exit.borrow_and_update().is_some() {
            let owed_bytes = rustix::io::ioctl_fionread(&*fd).unwrap_or(0) as usize;
            drain = Some(Drain {
                owed_bytes,
                extra_bytes: DRAIN_EXTRA_BYTES,
                hard_stop: Instant::now() + DRAIN_MAX,
            });
        }
        let draining = drain.is_some();
        let quiet = if draining { DRAIN_QUIET } else { Duration::MAX };
        let bytes = tokio::select! {
            read = read_some(&fd, limit_bytes) => read,
            // Nothing was readable for a while, so nothing is owed either.
            () = tokio::time::sleep(quiet), if draining && drained.is_some() => {
                drained.take().map(|sender| sender.send(()));
                continue;
            }
            _ = exit.changed(), if !draining => continue,
        };
        // EIO is how a terminal says that its last user closed it.
        let Some(bytes) = bytes.ok().filter(|bytes| !bytes.is_empty()) else {
            break;
        };
        let count = bytes.len();
        process.publish(source.event(bytes)).await;
        if let Some(drain) = &mut drain {
            let others_bytes = count.saturating_sub(drain.owed_bytes);
            drain.owed_bytes = drain.owed_bytes.saturating_sub(count);
            drain.extra_bytes = drain.extra_bytes.saturating_sub(others_bytes);
            if drain.owed_bytes == 0
                && (drain.extra_bytes == 0 || Instant::now() >= drain.hard_stop)
            {
                drained.take().map(|sender| sender.send(()));
            }
        }
    }
}

thread_local! {
    /// Where output is read to before it is cut to size: one for all processes, since they may be thousands.
    static SCRATCH: RefCell<[u8; OUTPUT_CHUNK_BYTES]> = const { RefCell::new([0; OUTPUT_CHUNK_BYTES]) };
}

/// At most `limit_bytes`; empty at the end of the stream.
async fn read_some(fd: &Channel, limit_bytes: usize) -> io::Result<Bytes> {
    fd.async_io(Interest::READABLE, |fd| {
        SCRATCH.with_borrow_mut(|buffer| {
            let count = rustix::io::read(fd, &mut buffer[..limit_bytes])?;
            Ok(Bytes::copy_from_slice(&buffer[..count]))
        })
    })
    .await
}

/// Kind of a process's input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputKind {
    /// A pipe.
    Pipe,
    /// A terminal.
    Pty,
    /// /dev/null.
    Disabled,
}

/// Where input goes. Writers take turns, so the bytes of two of them do not mix.
pub struct Stdin {
    kind: InputKind,
    /// None once closed, and for [`InputKind::Disabled`].
    channel: std::sync::Mutex<Option<Arc<Channel>>>,
    turn: tokio::sync::Mutex<()>,
}

impl Stdin {
    /// Input through our end of a pipe or terminal.
    pub fn new(kind: InputKind, channel: Option<Arc<Channel>>) -> Self {
        Self {
            kind,
            channel: std::sync::Mutex::new(channel),
            turn: tokio::sync::Mutex::default(),
        }
    }

    /// Writes all of `bytes` to the stdin pipe. Waits as long as the process does not read; the wait
    /// ends with the process.
    pub async fn write_pipe(&self, process: &Process, bytes: &[u8]) -> Result<(), ConnectError> {
        match self.kind {
            InputKind::Pipe => self.write(process, bytes).await,
            InputKind::Pty => Err(refusal(
                process,
                "has a terminal; send pty input instead of stdin",
            )),
            InputKind::Disabled => Err(refusal(
                process,
                "was started with stdin disabled; start it with stdin: true",
            )),
        }
    }

    /// Writes all of `bytes` to the terminal, see [`Stdin::write_pipe`].
    pub async fn write_pty(&self, process: &Process, bytes: &[u8]) -> Result<(), ConnectError> {
        match self.kind {
            InputKind::Pty => self.write(process, bytes).await,
            InputKind::Pipe | InputKind::Disabled => Err(refusal(
                process,
                "has no terminal; send stdin input instead of pty",
            )),
        }
    }

    async fn write(&self, process: &Process, bytes: &[u8]) -> Result<(), ConnectError> {
        let _turn = self.turn.lock().await;
        let channel = lock(&self.channel).clone();
        match channel {
            Some(channel) => write_all(&channel, process, bytes).await,
            None => Err(ConnectError::new(
                Code::FailedPrecondition,
                format_args!("stdin of process {} is closed", process.pid),
            )),
        }
    }

    /// Closes the stdin pipe after the writes that came before; closing it again is no error.
    pub async fn close(&self, process: &Process) -> Result<(), ConnectError> {
        match self.kind {
            InputKind::Pipe => {
                let _turn = self.turn.lock().await;
                self.release();
                Ok(())
            }
            InputKind::Pty => Err(refusal(
                process,
                "has a terminal; send it Ctrl-D (0x04) instead",
            )),
            InputKind::Disabled => Err(refusal(process, "was started with stdin disabled")),
        }
    }

    /// Gives up our end, of whatever kind.
    pub fn release(&self) {
        lock(&self.channel).take();
    }

    /// Resizes the terminal. Both sides must be from 1 to 65535, else nothing changes.
    pub fn resize(&self, process: &Process, size: PtySize) -> Result<(), ConnectError> {
        let channel = lock(&self.channel);
        match channel.as_ref().filter(|_| self.kind == InputKind::Pty) {
            Some(channel) => set_size(channel.get_ref(), size),
            None => Err(ConnectError::new(
                Code::FailedPrecondition,
                format_args!("process {} has no terminal", process.pid),
            )),
        }
    }
}

fn refusal(process: &Process, why: &str) -> ConnectError {
    ConnectError::new(
        Code::Internal,
        format_args!("process {} {why}", process.pid),
    )
}

/// Sets the size of a terminal.
pub fn set_size(fd: &OwnedFd, size: PtySize) -> Result<(), ConnectError> {
    let side = |value: u32, name: &str| match u16::try_from(value) {
        Ok(value @ 1..) => Ok(value),
        _ => Err(ConnectError::new(
            Code::InvalidArgument,
            format_args!("terminal {name} must be from 1 to 65535, not {value}"),
        )),
    };
    let winsize = rustix::termios::Winsize {
        ws_row: side(size.rows, "rows")?,
        ws_col: side(size.cols, "cols")?,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    rustix::termios::tcsetwinsize(fd, winsize)
        .map_err(|error| ConnectError::from_io("cannot resize the terminal", &error.into()))
}

async fn write_all(fd: &Channel, process: &Process, mut bytes: &[u8]) -> Result<(), ConnectError> {
    let mut exit = process.exit.subscribe();
    while !bytes.is_empty() {
        let written = tokio::select! {
            written = fd.async_io(Interest::WRITABLE, |fd| Ok(rustix::io::write(fd, bytes)?)) => written,
            _ = exit.wait_for(Option::is_some) => Err(io::Error::from_raw_os_error(libc::EPIPE)),
        };
        match written {
            Ok(count) => bytes = &bytes[count..],
            Err(error) => {
                return Err(ConnectError::from_io(
                    format_args!("process {} does not take input", process.pid),
                    &error,
                ));
            }
        }
    }
    Ok(())
}
