//! From a Start request to a running process: identity, environment, folder, streams.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};
use rustix::pipe::PipeFlags;
use rustix::pty::OpenptFlags;
use tokio::io::Interest;

use super::cgroup::Cgroup;
use super::io::{channel, set_size, Channel, InputKind, Source, Stdin};
use super::messages::{ProcessConfig, Pty, PtySize, StartRequest};
use super::registry::{Process, Registry};
use super::words;
use crate::app::Settings;
use crate::connect::{error::cause, Code, ConnectError};
use crate::filesystem::paths;
use crate::sys::{self, SpawnPlan, SpawnStage};
use crate::users::User;

/// PATH of a process when neither the agent's environment nor the request has one.
pub const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
const BASH: &str = "/bin/bash";
const SH: &str = "/bin/sh";
const DEFAULT_SIZE: PtySize = PtySize { cols: 80, rows: 24 };

/// A process that runs, and the outputs to be read from it.
pub struct Started {
    /// The registered process.
    pub process: Arc<Process>,
    /// Its outputs.
    pub outputs: Vec<(Arc<Channel>, Source)>,
}

/// Our ends and the child's ends of the standard streams.
struct Streams {
    child: [OwnedFd; 3],
    stdin: Stdin,
    outputs: Vec<(Arc<Channel>, Source)>,
    terminal: bool,
}

/// Starts what the request asks for, as `user`. Reads the disk and waits for the exec, so it belongs on a
/// worker thread: a guest short of memory may take seconds for it.
pub fn start(
    registry: &Registry,
    settings: &Settings,
    user: &User,
    request: StartRequest,
) -> Result<Started, ConnectError> {
    let config = request.process.unwrap_or_default();
    if config.cmd.is_empty() {
        return Err(ConnectError::new(
            Code::InvalidArgument,
            "the request names no program; set process.cmd",
        ));
    }
    let environment = environment(settings, user, &config)?;
    let cwd = working_directory(settings, user, config.cwd.as_deref())?;
    let config = with_shell(config);
    let program = find_program(&config.cmd, &environment, &cwd)?;
    let streams = open_streams(request.pty, request.stdin.unwrap_or(true), user)?;
    let texts = Texts::new(&program, &config, &environment, &cwd)?;
    let cgroup = registry
        .cgroups
        .as_ref()
        .and_then(|root| root.new_group().ok());
    let Streams {
        child,
        stdin,
        outputs,
        terminal,
    } = streams;
    let stdio = [child[0].as_fd(), child[1].as_fd(), child[2].as_fd()];
    let process = registry.register(|| -> Result<Process, ConnectError> {
        let pid = texts
            .spawn(user, stdio, terminal, cgroup.as_ref())
            .map_err(|(stage, error)| spawn_error(stage, &error, &config, user, &cwd))?;
        Ok(Process::new(
            pid,
            config,
            request.tag.filter(|tag| !tag.is_empty()),
            stdin,
            cgroup,
        ))
    })?;
    Ok(Started { process, outputs })
}

/// The strings of a spawn in the form the kernel takes.
struct Texts {
    program: CString,
    arguments: Vec<CString>,
    variables: Vec<CString>,
    cwd: CString,
}

impl Texts {
    fn new(
        program: &Path,
        config: &ProcessConfig,
        environment: &BTreeMap<String, String>,
        cwd: &Path,
    ) -> Result<Self, ConnectError> {
        let mut arguments = vec![c_string(config.cmd.as_bytes(), "process.cmd")?];
        for argument in &config.args {
            arguments.push(c_string(argument.as_bytes(), "process.args")?);
        }
        let mut variables = Vec::with_capacity(environment.len());
        for (name, value) in environment {
            variables.push(c_string(
                format!("{name}={value}").as_bytes(),
                "process.envs",
            )?);
        }
        let program = c_string(program.as_os_str().as_bytes(), "process.cmd")?;
        Ok(Self {
            program,
            arguments,
            variables,
            cwd: c_string(cwd.as_os_str().as_bytes(), "process.cwd")?,
        })
    }

    fn spawn(
        &self,
        user: &User,
        stdio: [std::os::fd::BorrowedFd<'_>; 3],
        controlling_terminal: bool,
        cgroup: Option<&Cgroup>,
    ) -> Result<u32, (SpawnStage, io::Error)> {
        let pointers = |texts: &[CString]| -> Vec<_> {
            texts
                .iter()
                .map(|text| text.as_ptr())
                .chain([std::ptr::null()])
                .collect()
        };
        let own = rustix::process::geteuid().as_raw();
        let plan = SpawnPlan {
            program: &self.program,
            argv: &pointers(&self.arguments),
            envp: &pointers(&self.variables),
            cwd: &self.cwd,
            // Without root there is only one identity to have, and the kernel refuses any other.
            identity: (own == 0 || own != user.uid).then_some((user.uid, user.gid, &user.groups)),
            stdio,
            controlling_terminal,
            cgroup: cgroup.map(Cgroup::fd),
        };
        sys::spawn(&plan)
    }
}

fn c_string(bytes: &[u8], field: &str) -> Result<CString, ConnectError> {
    CString::new(bytes).map_err(|_| {
        ConnectError::new(
            Code::InvalidArgument,
            format_args!("{field} holds a NUL byte"),
        )
    })
}

/// Environment built from nothing (contract section 3.4): PATH, the user's, the sandbox's, the request's.
fn environment(
    settings: &Settings,
    user: &User,
    config: &ProcessConfig,
) -> Result<BTreeMap<String, String>, ConnectError> {
    let mut all = BTreeMap::new();
    all.insert(
        "PATH".to_owned(),
        std::env::var("PATH").unwrap_or_else(|_| DEFAULT_PATH.to_owned()),
    );
    all.insert("HOME".to_owned(), user.home.to_string_lossy().into_owned());
    all.insert("USER".to_owned(), user.name.clone());
    all.insert("LOGNAME".to_owned(), user.name.clone());
    for (name, value) in settings.envs.iter().chain(&config.envs) {
        if name.is_empty() || name.contains('=') {
            return Err(ConnectError::new(
                Code::InvalidArgument,
                format_args!("'{name}' is not a name for an environment variable"),
            ));
        }
        all.insert(name.clone(), value.clone());
    }
    Ok(all)
}

/// Folder of the process: the request's, else the default one, else the home if there is one.
fn working_directory(
    settings: &Settings,
    user: &User,
    asked: Option<&str>,
) -> Result<PathBuf, ConnectError> {
    let path = match (
        asked.filter(|path| !path.is_empty()),
        &settings.default_workdir,
    ) {
        (Some(asked), workdir) => paths::resolve(asked, user, workdir.as_deref())?,
        (None, Some(workdir)) => workdir.clone(),
        (None, None) if user.home.is_dir() => return Ok(user.home.clone()),
        (None, None) => return Ok("/".into()),
    };
    match std::fs::metadata(&path) {
        Ok(info) if info.is_dir() => Ok(path),
        Ok(_) => Err(ConnectError::new(
            Code::InvalidArgument,
            format_args!("cwd '{}' is not a directory", path.display()),
        )),
        Err(_) => Err(ConnectError::new(
            Code::InvalidArgument,
            format_args!("cwd '{}' does not exist", path.display()),
        )),
    }
}

/// The clients' shell, bash, is sh where the image has no bash: both take the options clients give. Where there is
/// no shell at all, a line of plain words is run without one.
fn with_shell(config: ProcessConfig) -> ProcessConfig {
    if !matches!(config.cmd.as_str(), BASH | SH) || Path::new(&config.cmd).exists() {
        return config;
    }
    if Path::new(SH).exists() {
        return ProcessConfig {
            cmd: SH.to_owned(),
            ..config
        };
    }
    without_shell(&config).unwrap_or(config)
}

/// What `bash -l -c LINE` comes to when LINE needs no shell.
fn without_shell(config: &ProcessConfig) -> Option<ProcessConfig> {
    let (line, options) = config.args.split_last()?;
    let is_line = options.last().is_some_and(|option| option == "-c");
    if !is_line
        || options
            .iter()
            .any(|option| !matches!(option.as_str(), "-l" | "-c"))
    {
        return None;
    }
    let mut words = words::plain(line)?.into_iter();
    Some(ProcessConfig {
        cmd: words.next()?,
        args: words.collect(),
        ..config.clone()
    })
}

/// A name without a slash is looked up in the PATH the process will have.
fn find_program(
    cmd: &str,
    environment: &BTreeMap<String, String>,
    cwd: &Path,
) -> Result<PathBuf, ConnectError> {
    if cmd.contains('/') {
        return Ok(cmd.into());
    }
    let folders = environment.get("PATH").map_or("", String::as_str);
    for folder in folders.split(':') {
        let candidate = cwd.join(folder).join(cmd);
        if std::fs::metadata(&candidate)
            .is_ok_and(|info| info.is_file() && info.permissions().mode() & 0o111 != 0)
        {
            return Ok(candidate);
        }
    }
    Err(ConnectError::new(
        Code::NotFound,
        format_args!("cannot run '{cmd}': not found in PATH ({folders})"),
    ))
}

fn open_streams(pty: Option<Pty>, stdin: bool, user: &User) -> Result<Streams, ConnectError> {
    let opened = match pty {
        Some(pty) => open_terminal(pty.size, user)?,
        None => open_pipes(stdin),
    };
    opened.map_err(|error| ConnectError::from_io("cannot open the streams of the process", &error))
}

fn open_pipes(with_stdin: bool) -> io::Result<Streams> {
    let (stdin, child_stdin) = if with_stdin {
        let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        (
            Stdin::new(
                InputKind::Pipe,
                Some(Arc::new(channel(write, Interest::WRITABLE)?)),
            ),
            read,
        )
    } else {
        (
            Stdin::new(InputKind::Disabled, None),
            rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?,
        )
    };
    let (stdout, child_stdout) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    let (stderr, child_stderr) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    let outputs = vec![
        (
            Arc::new(channel(stdout, Interest::READABLE)?),
            Source::Stdout,
        ),
        (
            Arc::new(channel(stderr, Interest::READABLE)?),
            Source::Stderr,
        ),
    ];
    Ok(Streams {
        child: [child_stdin, child_stdout, child_stderr],
        stdin,
        outputs,
        terminal: false,
    })
}

fn open_terminal(size: Option<PtySize>, user: &User) -> Result<io::Result<Streams>, ConnectError> {
    let open = || -> io::Result<(OwnedFd, OwnedFd)> {
        let control =
            rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        rustix::pty::unlockpt(&control)?;
        let name: CString = rustix::pty::ptsname(&control, Vec::new())?;
        let path = PathBuf::from(std::ffi::OsString::from_vec(name.into_bytes()));
        let line = rustix::fs::open(
            &path,
            OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        Ok((control, line))
    };
    let (control, line) = match open() {
        Ok(pair) => pair,
        Err(error) => return Ok(Err(error)),
    };
    // Older clients leave the size out or send zeros when they have no terminal themselves.
    let size = size
        .filter(|size| (size.cols, size.rows) != (0, 0))
        .unwrap_or(DEFAULT_SIZE);
    set_size(&control, size)?;
    Ok(finish_terminal(control, line, user))
}

fn finish_terminal(control: OwnedFd, line: OwnedFd, user: &User) -> io::Result<Streams> {
    // Programs that switch users reopen the terminal by name; refused only when we are not root.
    let _not_root = std::os::unix::fs::fchown(&line, Some(user.uid), None);
    let child = [line.try_clone()?, line.try_clone()?, line];
    let control = Arc::new(channel(control, Interest::READABLE | Interest::WRITABLE)?);
    let stdin = Stdin::new(InputKind::Pty, Some(control.clone()));
    Ok(Streams {
        child,
        stdin,
        outputs: vec![(control, Source::Pty)],
        terminal: true,
    })
}

fn spawn_error(
    stage: SpawnStage,
    error: &io::Error,
    config: &ProcessConfig,
    user: &User,
    cwd: &Path,
) -> ConnectError {
    let what = match stage {
        SpawnStage::Clone => "cannot start a process".to_owned(),
        SpawnStage::Session => "cannot set up the session of the process".to_owned(),
        SpawnStage::Identity => format!("cannot become user '{}'", user.name),
        SpawnStage::WorkingDirectory => format!("cannot enter cwd '{}'", cwd.display()),
        SpawnStage::Exec => format!("cannot run '{}'", config.cmd),
    };
    let hint = match error.raw_os_error() {
        Some(libc::E2BIG) => " (one argument or variable may have 128 KiB, all together 2 MiB at most; pass large data by a file or stdin)",
        Some(libc::ENOEXEC) => " (not a program for this machine, or a script without #! line)",
        Some(libc::EAGAIN) => " (the limit on processes is reached; end some first)",
        Some(libc::ENOENT) if stage == SpawnStage::Exec && config.cmd.starts_with('/') && Path::new(&config.cmd).exists() => {
            " (its interpreter or dynamic loader is missing)"
        }
        Some(libc::ENOENT) if stage == SpawnStage::Exec && matches!(config.cmd.as_str(), BASH | SH) => {
            " (the image has no shell; without one only a line of plain words can be run: a program of the image and its arguments)"
        }
        _ => "",
    };
    let code = match error.raw_os_error() {
        Some(libc::E2BIG | libc::ENOEXEC) => Code::InvalidArgument,
        _ => ConnectError::from_io("", error).code,
    };
    ConnectError::new(code, format_args!("{what}: {}{hint}", cause(error)))
}
