//! The only module with `unsafe`: what neither std nor rustix offers safely.
//!
//! Invariants: nothing here allocates between clone and exec, and a thread that borrowed another
//! identity has its own back before the function that borrowed it returns.

use std::ffi::CStr;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use libc::{c_char, c_int, c_long, c_void};
use rustix::thread::{capabilities, set_capabilities, CapabilitySet, CapabilitySets};
use tokio::io::unix::AsyncFd;
use tokio::io::Interest;

use crate::limits::SPAWN_STACK_BYTES;

/// Step of a spawn that failed, reported by the child through shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum SpawnStage {
    /// The clone itself: limits on processes or memory.
    Clone = 0,
    /// New session, standard streams, controlling terminal.
    Session = 1,
    /// Groups, gid, uid.
    Identity = 2,
    /// Working directory.
    WorkingDirectory = 3,
    /// The exec itself.
    Exec = 4,
}

/// All a child needs, ready made: the child only issues system calls.
pub struct SpawnPlan<'a> {
    /// Absolute or cwd-relative program path.
    pub program: &'a CStr,
    /// NULL-terminated argument pointers.
    pub argv: &'a [*const c_char],
    /// NULL-terminated environment pointers.
    pub envp: &'a [*const c_char],
    /// Working directory.
    pub cwd: &'a CStr,
    /// User id, or None to keep the caller's identity (not root).
    pub identity: Option<(u32, u32, &'a [u32])>,
    /// Descriptors that become 0, 1 and 2.
    pub stdio: [BorrowedFd<'a>; 3],
    /// Make descriptor 0 the controlling terminal.
    pub controlling_terminal: bool,
    /// Directory of the cgroup to be born in.
    pub cgroup: Option<BorrowedFd<'a>>,
}

#[repr(C)]
struct SpawnShared<'a> {
    plan: &'a SpawnPlan<'a>,
    stage: u8,
    errno: c_int,
}

#[repr(C, align(8))]
#[derive(Default)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

const CLONE_CLEAR_SIGHAND: u64 = 0x1_0000_0000;
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Starts a program in a session of its own and returns its pid.
///
/// The child shares the memory of the caller until it execs, so the cost does not grow with the
/// caller's size, and a failure up to and including exec comes back as an error with its stage.
pub fn spawn(plan: &SpawnPlan<'_>) -> Result<u32, (SpawnStage, io::Error)> {
    let mut stack: Vec<u8> = Vec::with_capacity(SPAWN_STACK_BYTES);
    let base = stack.as_mut_ptr() as u64;
    let aligned = (base + 15) & !15;
    let mut shared = SpawnShared {
        plan,
        stage: 0,
        errno: 0,
    };
    let mut args = CloneArgs {
        flags: libc::CLONE_VM as u64 | libc::CLONE_VFORK as u64 | CLONE_CLEAR_SIGHAND,
        exit_signal: libc::SIGCHLD as u64,
        stack: aligned,
        stack_size: (SPAWN_STACK_BYTES as u64 - 16) & !15,
        ..CloneArgs::default()
    };
    if let Some(cgroup) = plan.cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = cgroup.as_raw_fd() as u64;
    }
    // SAFETY: all signals are blocked so no handler runs in the child on borrowed memory; `args`,
    // `shared` and `stack` outlive the call because CLONE_VFORK suspends this thread until the
    // child has exec'd or exited; `spawn_child` never returns.
    let result = unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut old: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut old);
        let result = clone3(&args, spawn_child, (&raw mut shared).cast());
        libc::pthread_sigmask(libc::SIG_SETMASK, &old, std::ptr::null_mut());
        result
    };
    drop(stack);
    if result < 0 {
        return Err((
            SpawnStage::Clone,
            io::Error::from_raw_os_error(-result as i32),
        ));
    }
    // SAFETY: plain field of a live local, written by the child before this thread resumed.
    let errno = unsafe { std::ptr::read_volatile(&raw const shared.errno) };
    if errno == 0 {
        return Ok(result as u32);
    }
    let stage = match shared.stage {
        1 => SpawnStage::Session,
        2 => SpawnStage::Identity,
        3 => SpawnStage::WorkingDirectory,
        _ => SpawnStage::Exec,
    };
    Err((stage, io::Error::from_raw_os_error(errno)))
}

#[cfg(not(target_arch = "x86_64"))]
compile_error!("the spawn path is written for x86_64, the only architecture of the guests");

/// Raw clone3 whose child starts in `entry` on the stack of `args`. Returns the pid or -errno.
unsafe fn clone3(
    args: &CloneArgs,
    entry: extern "C" fn(*mut c_void) -> !,
    data: *mut c_void,
) -> c_long {
    let result: c_long;
    // SAFETY: the child leaves this frame at once for a stack of its own and never comes back, so
    // the parent's frame and registers are as the compiler expects them.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r12",
            "call r13",
            "ud2",
            "2:",
            inlateout("rax") libc::SYS_clone3 => result,
            in("rdi") std::ptr::from_ref(args),
            in("rsi") std::mem::size_of::<CloneArgs>(),
            in("r12") data,
            in("r13") entry,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    result
}

/// Body of the child. Raw system calls only: glibc's setuid family would signal the threads of the
/// parent, whose memory this still is.
extern "C" fn spawn_child(data: *mut c_void) -> ! {
    // SAFETY: `data` is the `SpawnShared` of the suspended parent; every call below is a plain
    // system call on memory prepared by it.
    unsafe {
        let shared = &mut *data.cast::<SpawnShared<'_>>();
        let (stage, errno) = spawn_steps(shared.plan);
        std::ptr::write_volatile(&raw mut shared.stage, stage as u8);
        std::ptr::write_volatile(&raw mut shared.errno, errno);
        libc::syscall(libc::SYS_exit_group, 127);
    }
    loop {
        std::hint::spin_loop();
    }
}

/// Runs up to exec; returns only on failure.
unsafe fn spawn_steps(plan: &SpawnPlan<'_>) -> (SpawnStage, c_int) {
    // SAFETY: see `spawn_child`.
    unsafe {
        if libc::setsid() < 0 {
            return (SpawnStage::Session, errno());
        }
        for (target, fd) in plan.stdio.iter().enumerate() {
            if libc::dup2(fd.as_raw_fd(), target as c_int) < 0 {
                return (SpawnStage::Session, errno());
            }
        }
        if plan.controlling_terminal && libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
            return (SpawnStage::Session, errno());
        }
        // A child does not inherit the agent's protection; failures here are harmless.
        libc::syscall(libc::SYS_setpriority, libc::PRIO_PROCESS, 0, 0);
        let oom = libc::open(
            c"/proc/self/oom_score_adj".as_ptr(),
            libc::O_WRONLY | libc::O_CLOEXEC,
        );
        if oom >= 0 {
            libc::write(oom, c"0".as_ptr().cast(), 1);
            libc::close(oom);
        }
        // Ignored signals outlive exec, and the agent may have inherited some (nohup, a shell's background job).
        // By the raw call, because the C library keeps two signals to itself; it fails for those that cannot be changed.
        let default = [0_u64; KERNEL_SIGACTION_WORDS];
        for signal in 1..=SIGNALS {
            libc::syscall(
                libc::SYS_rt_sigaction,
                signal,
                default.as_ptr(),
                std::ptr::null_mut::<u64>(),
                SIGNAL_SET_BYTES,
            );
        }
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &none, std::ptr::null_mut());
        if let Some((uid, gid, groups)) = plan.identity {
            if libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) < 0
                || libc::syscall(libc::SYS_setgid, gid) < 0
                || libc::syscall(libc::SYS_setuid, uid) < 0
            {
                return (SpawnStage::Identity, errno());
            }
        }
        if libc::chdir(plan.cwd.as_ptr()) < 0 {
            return (SpawnStage::WorkingDirectory, errno());
        }
        libc::execve(
            plan.program.as_ptr(),
            plan.argv.as_ptr(),
            plan.envp.as_ptr(),
        );
        (SpawnStage::Exec, errno())
    }
}

/// Highest signal number of Linux (signal(7)).
const SIGNALS: c_int = 64;
/// The kernel's own `struct sigaction` on x86-64: handler, flags, restorer, mask; all zero is the default action.
const KERNEL_SIGACTION_WORDS: usize = 4;
/// Size of the kernel's signal set: one bit for each of the 64.
const SIGNAL_SET_BYTES: usize = 8;

fn errno() -> c_int {
    // SAFETY: always a valid pointer to this thread's errno.
    unsafe { *libc::__errno_location() }
}

fn check(result: c_int) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// A write to a closed pipe or socket is an error value, not death.
pub fn ignore_sigpipe() {
    // SAFETY: setting a disposition to "ignore" installs no handler.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_IGN);
    }
}

/// Orphans of our children come to us, as they do to PID 1.
pub fn become_subreaper() -> io::Result<()> {
    // SAFETY: takes integers only.
    check(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) })
}

/// Runs `work` with the file system identity of a user, on this thread only.
///
/// Permission checks are then the kernel's own, so a link planted by the user leads nowhere the user
/// could not go. The capabilities go too, not only those the kernel takes with the file system user: with
/// what is left a path through another user's /proc/PID/cwd would be open, and the blocks of a full disk
/// that are kept for root. No-op for root and when the agent itself is not root.
pub fn with_file_identity<T>(uid: u32, gid: u32, groups: &[u32], work: impl FnOnce() -> T) -> T {
    // SAFETY: takes nothing.
    if uid == 0 || unsafe { libc::geteuid() } != 0 {
        return work();
    }
    struct Restore {
        groups: Vec<u32>,
        capabilities: Option<CapabilitySets>,
    }
    impl Drop for Restore {
        fn drop(&mut self) {
            // First, because the calls below need them; a failure shows there.
            if let Some(own) = self.capabilities {
                let _seen_below = set_capabilities(None, own);
            }
            // SAFETY: raw calls act on this thread alone; the list outlives the call.
            let restored = unsafe {
                libc::syscall(libc::SYS_setfsuid, 0);
                libc::syscall(libc::SYS_setfsgid, 0);
                libc::syscall(libc::SYS_setgroups, self.groups.len(), self.groups.as_ptr())
            };
            if restored < 0 {
                // A worker with a stranger's groups must not serve the next request.
                std::process::abort();
            }
        }
    }
    // SAFETY: as above; getgroups fills at most the given length.
    let restore = unsafe {
        let count = libc::getgroups(0, std::ptr::null_mut()).max(0);
        let mut own = vec![0u32; count as usize];
        let count = libc::getgroups(count, own.as_mut_ptr()).max(0);
        own.truncate(count as usize);
        let own_capabilities = capabilities(None).ok();
        let restore = Restore {
            groups: own,
            capabilities: own_capabilities,
        };
        libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr());
        libc::syscall(libc::SYS_setfsgid, gid);
        libc::syscall(libc::SYS_setfsuid, uid);
        restore
    };
    if let Some(own) = restore.capabilities {
        let none = CapabilitySets {
            effective: CapabilitySet::empty(),
            ..own
        };
        // Giving up is always allowed.
        let _never_fails = set_capabilities(None, none);
    }
    let result = work();
    drop(restore);
    result
}

/// Mixes secret bytes into the kernel's random generator, credits them and forces a reseed.
pub fn add_entropy(fd: BorrowedFd<'_>, seed: &[u8]) -> io::Result<()> {
    const RNDADDENTROPY: c_int = 0x4008_5203;
    const RNDRESEEDCRNG: c_int = 0x5207;
    let mut request: Vec<u32> = vec![0; 2 + seed.len().div_ceil(4)];
    request[0] = (seed.len() * 8) as u32;
    request[1] = seed.len() as u32;
    for (index, byte) in seed.iter().enumerate() {
        request[2 + index / 4] |= u32::from(*byte) << (8 * (index % 4));
    }
    // SAFETY: the buffer is a `struct rand_pool_info` (two ints, then the bytes).
    unsafe {
        check(libc::ioctl(
            fd.as_raw_fd(),
            RNDADDENTROPY as _,
            request.as_ptr(),
        ))?;
        check(libc::ioctl(fd.as_raw_fd(), RNDRESEEDCRNG as _, 0))
    }
}

/// FIFREEZE: writes the file system of `fd` out and lets nobody change it. Blocks until its writers are done.
pub fn freeze(fd: BorrowedFd<'_>) -> io::Result<()> {
    const FIFREEZE: u32 = 0xc004_5877;
    // SAFETY: the call takes no argument.
    unsafe { check(libc::ioctl(fd.as_raw_fd(), FIFREEZE as _, 0)) }
}

/// FITHAW: undoes `freeze`.
pub fn thaw(fd: BorrowedFd<'_>) -> io::Result<()> {
    const FITHAW: u32 = 0xc004_5878;
    // SAFETY: the call takes no argument.
    unsafe { check(libc::ioctl(fd.as_raw_fd(), FITHAW as _, 0)) }
}

/// EXT4_IOC_RESIZE_FS: lets the mounted file system of `fd` have that many blocks; no change when it has them.
pub fn resize_ext4(fd: BorrowedFd<'_>, blocks: u64) -> io::Result<()> {
    const EXT4_IOC_RESIZE_FS: u32 = 0x4008_6610;
    // SAFETY: the kernel reads one u64 through the pointer.
    unsafe {
        check(libc::ioctl(
            fd.as_raw_fd(),
            EXT4_IOC_RESIZE_FS as _,
            &raw const blocks,
        ))
    }
}

fn interface_request(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: plain data, all zero is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.is_empty() || name.len() >= request.ifr_name.len() {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    for (slot, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *slot = byte as c_char;
    }
    Ok(request)
}

fn inet_address(address: Ipv4Addr) -> libc::sockaddr {
    let inet = libc::sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: 0,
        sin_addr: libc::in_addr {
            s_addr: u32::from_ne_bytes(address.octets()),
        },
        sin_zero: [0; 8],
    };
    // SAFETY: both are 16 bytes of plain data.
    unsafe { std::mem::transmute(inet) }
}

/// Sets the IPv4 address and netmask of an interface.
pub fn set_interface_address(
    socket: BorrowedFd<'_>,
    name: &str,
    address: Ipv4Addr,
    netmask: Ipv4Addr,
) -> io::Result<()> {
    let mut request = interface_request(name)?;
    request.ifr_ifru.ifru_addr = inet_address(address);
    // SAFETY: `request` is a valid ifreq for both calls.
    unsafe {
        check(libc::ioctl(
            socket.as_raw_fd(),
            libc::SIOCSIFADDR as _,
            &request,
        ))?;
        request.ifr_ifru.ifru_netmask = inet_address(netmask);
        check(libc::ioctl(
            socket.as_raw_fd(),
            libc::SIOCSIFNETMASK as _,
            &request,
        ))
    }
}

/// Sets an interface up.
pub fn set_interface_up(socket: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    let mut request = interface_request(name)?;
    // SAFETY: `request` is a valid ifreq; the kernel fills the flags before they are read.
    unsafe {
        check(libc::ioctl(
            socket.as_raw_fd(),
            libc::SIOCGIFFLAGS as _,
            &mut request,
        ))?;
        request.ifr_ifru.ifru_flags |= libc::IFF_UP as i16;
        check(libc::ioctl(
            socket.as_raw_fd(),
            libc::SIOCSIFFLAGS as _,
            &request,
        ))
    }
}

/// Adds the IPv4 default route.
pub fn add_default_route(socket: BorrowedFd<'_>, gateway: Ipv4Addr) -> io::Result<()> {
    // SAFETY: plain data; `route` is a valid rtentry for the call.
    unsafe {
        let mut route: libc::rtentry = std::mem::zeroed();
        route.rt_dst = inet_address(Ipv4Addr::UNSPECIFIED);
        route.rt_genmask = inet_address(Ipv4Addr::UNSPECIFIED);
        route.rt_gateway = inet_address(gateway);
        route.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
        check(libc::ioctl(
            socket.as_raw_fd(),
            libc::SIOCADDRT as _,
            &route,
        ))
    }
}

/// Records a neighbour's hardware address for good, so that no ARP is needed after a restore.
pub fn add_neighbour(
    socket: BorrowedFd<'_>,
    name: &str,
    address: Ipv4Addr,
    mac: [u8; 6],
) -> io::Result<()> {
    // SAFETY: plain data; `entry` is a valid arpreq for the call.
    unsafe {
        let mut entry: libc::arpreq = std::mem::zeroed();
        entry.arp_pa = inet_address(address);
        entry.arp_ha.sa_family = libc::ARPHRD_ETHER;
        for (slot, byte) in entry.arp_ha.sa_data.iter_mut().zip(mac) {
            *slot = byte as c_char;
        }
        entry.arp_flags = libc::ATF_PERM | libc::ATF_COM;
        for (slot, byte) in entry.arp_dev.iter_mut().zip(name.bytes().take(15)) {
            *slot = byte as c_char;
        }
        check(libc::ioctl(socket.as_raw_fd(), libc::SIOCSARP as _, &entry))
    }
}

/// Puts a descriptor into the event loop.
pub fn watch_fd(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the descriptor is owned by the result and so is closed only after it was deregistered.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}
