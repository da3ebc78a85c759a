//! The methods of `process.Process`.

use std::sync::Arc;
use std::time::Duration;

use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::{Request, Response};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::io::pump;
use super::messages::{
    Empty, ListResponse, ProcessInput, ProcessSelector, SelectRequest, SendInputRequest,
    SendSignalRequest, Signal, StartRequest, StreamInputRequest, UpdateRequest,
};
use super::registry::{Process, Subscription};
use super::spawn::{self, Started};
use super::stream::EventBody;
use crate::app::App;
use crate::connect::frames::{self, Format, FrameReader};
use crate::connect::{Code, ConnectError};
use crate::http::{basic_user, full, Body};
use crate::limits::KILL_CONFIRM;
use crate::rpc;

/// Answers one call.
pub async fn handle(app: Arc<App>, method: &str, request: Request<Incoming>) -> Response<Body> {
    match method {
        "List" => {
            rpc::unary(request, |_: SelectRequest| async {
                Ok(ListResponse {
                    processes: app.processes.list(),
                })
            })
            .await
        }
        "Start" => start(app, request).await,
        "Connect" => connect(app, request).await,
        "Update" => rpc::unary(request, |query: UpdateRequest| update(app, query)).await,

        "SendInput" => rpc::unary(request, |query: SendInputRequest| send_input(app, query)).await,
        "StreamInput" => stream_input(app, request).await,
        "SendSignal" => {
            rpc::unary(request, |query: SendSignalRequest| send_signal(app, query)).await
        }
        "CloseStdin" => rpc::unary(request, |query: SelectRequest| close_stdin(app, query)).await,
        _ => rpc::unimplemented(request.uri().path()),
    }
}

async fn start(app: Arc<App>, request: Request<Incoming>) -> Response<Body> {
    let format = match rpc::stream_format(request.headers()) {
        Ok(format) => format,
        Err(refusal) => return *refusal,
    };
    let keepalive = rpc::keepalive(request.headers());
    match try_start(&app, format, request).await {
        Ok((subscription, deadline)) => rpc::stream(
            format,
            EventBody::new(subscription, format, keepalive, deadline).boxed_unsync(),
        ),
        Err(error) => rpc::stream_error(format, &error),
    }
}

async fn try_start(
    app: &Arc<App>,
    format: Format,
    request: Request<Incoming>,
) -> Result<(Subscription, Option<Instant>), ConnectError> {
    let timeout = rpc::deadline(request.headers())?;
    let user_name = basic_user(request.headers());
    let query: StartRequest = rpc::single_message(format, request.into_body()).await?;
    // A task of its own: a client that leaves now must not leave a process behind that nobody follows.
    let launch = tokio::spawn(launch(app.clone(), user_name, query, timeout));
    launch.await.map_err(lost_worker)?
}

fn lost_worker(error: tokio::task::JoinError) -> ConnectError {
    ConnectError::new(Code::Internal, format_args!("worker failed: {error}"))
}

async fn launch(
    app: Arc<App>,
    user_name: Option<String>,
    query: StartRequest,
    timeout: Option<Duration>,
) -> Result<(Subscription, Option<Instant>), ConnectError> {
    let worker = app.clone();
    let spawn = move || {
        let user = worker.rpc_user(user_name.as_deref())?;
        let settings = worker.settings().clone();
        spawn::start(&worker.processes, &settings, &user, query)
    };
    let Started { process, outputs } = tokio::task::spawn_blocking(spawn)
        .await
        .map_err(lost_worker)??;
    let subscription = process.subscribe()?;
    let drained = outputs
        .into_iter()
        .map(|(fd, source)| {
            let (sender, receiver) = oneshot::channel();
            tokio::spawn(pump(fd, source, process.clone(), sender));
            receiver
        })
        .collect();
    let deadline = timeout.map(|timeout| Instant::now() + timeout);
    tokio::spawn(supervise(app, process, drained, deadline));
    Ok((subscription, deadline))
}

/// Follows a process to its end, whether or not anyone listens. At the deadline the whole tree is
/// killed, see [`super::registry::Registry::signal`]; a client that leaves changes nothing.
async fn supervise(
    app: Arc<App>,
    process: Arc<Process>,
    drained: Vec<oneshot::Receiver<()>>,
    deadline: Option<Instant>,
) {
    let mut exit = process.exit.subscribe();
    if let Some(deadline) = deadline {
        let in_time = tokio::time::timeout_at(deadline, exit.wait_for(Option::is_some))
            .await
            .is_ok();
        if !in_time {
            let selector = ProcessSelector {
                pid: Some(process.pid),
                tag: None,
            };
            // An error says that it ended this very moment.
            let _ended = app.processes.signal(&selector, Signal::Kill);
        }
    }
    let end = match exit.wait_for(Option::is_some).await {
        Ok(end) => end.clone(),
        // The sender lives in `process`, which is held here.
        Err(_) => None,
    };
    // Descriptors go now; only the status is kept for late followers.
    process.stdin.release();
    for output in drained {
        // A pump that is gone has read all there was.
        let _gone = output.await;
    }
    if let Some(end) = end {
        process.finish(end);
    }
    app.processes.retire(&process);
}

async fn connect(app: Arc<App>, request: Request<Incoming>) -> Response<Body> {
    let format = match rpc::stream_format(request.headers()) {
        Ok(format) => format,
        Err(refusal) => return *refusal,
    };
    let keepalive = rpc::keepalive(request.headers());
    let follow = async {
        let timeout = rpc::deadline(request.headers())?.map(|timeout| Instant::now() + timeout);
        let query: SelectRequest = rpc::single_message(format, request.into_body()).await?;
        let process = app.processes.find_any(&query.process.unwrap_or_default())?;
        Ok((process.subscribe()?, timeout))
    };
    match follow.await {
        Ok((subscription, deadline)) => rpc::stream(
            format,
            EventBody::new(subscription, format, keepalive, deadline).boxed_unsync(),
        ),
        Err(error) => rpc::stream_error(format, &error),
    }
}

async fn update(app: Arc<App>, query: UpdateRequest) -> Result<Empty, ConnectError> {
    let process = app
        .processes
        .find_live(&query.process.unwrap_or_default())?;
    let size = query.pty.and_then(|pty| pty.size).ok_or_else(|| {
        ConnectError::new(Code::InvalidArgument, "nothing to update; set pty.size")
    })?;
    process.stdin.resize(&process, size)?;
    Ok(Empty {})
}

async fn write_input(process: &Process, input: Option<ProcessInput>) -> Result<(), ConnectError> {
    match input.unwrap_or_default() {
        ProcessInput {
            stdin: Some(bytes), ..
        } => process.stdin.write_pipe(process, &bytes).await,
        ProcessInput {
            pty: Some(bytes), ..
        } => process.stdin.write_pty(process, &bytes).await,
        ProcessInput { .. } => Err(ConnectError::new(
            Code::InvalidArgument,
            "the input is empty; set stdin or pty",
        )),
    }
}

async fn send_input(app: Arc<App>, query: SendInputRequest) -> Result<Empty, ConnectError> {
    let process = app
        .processes
        .find_live(&query.process.unwrap_or_default())?;
    write_input(&process, query.input).await?;
    Ok(Empty {})
}

/// Client stream: the process first, then its input. One answer at the end.
async fn stream_input(app: Arc<App>, request: Request<Incoming>) -> Response<Body> {
    let format = match rpc::stream_format(request.headers()) {
        Ok(format) => format,
        Err(refusal) => return *refusal,
    };
    let limit = match rpc::deadline(request.headers()) {
        Ok(limit) => limit.unwrap_or(Duration::MAX),
        Err(error) => return rpc::stream_error(format, &error),
    };
    let mut reader = FrameReader::new(request.into_body(), format);
    let work = async {
        let mut process: Option<Arc<Process>> = None;
        while let Some(message) = reader.next::<StreamInputRequest>().await? {
            if let Some(start) = message.start {
                process = Some(
                    app.processes
                        .find_live(&start.process.unwrap_or_default())?,
                );
            }
            if let Some(data) = message.data {
                let target = process.as_ref().ok_or_else(|| {
                    ConnectError::new(Code::InvalidArgument, "input came before the start message")
                })?;
                write_input(target, data.input).await?;
            }
        }
        frames::message(format, &Empty {})
    };
    let result = tokio::time::timeout(limit, work).await;
    tokio::spawn(reader.discard_rest());
    match result.unwrap_or_else(|_| {
        Err(ConnectError::new(
            Code::DeadlineExceeded,
            "the deadline of the request passed",
        ))
    }) {
        Ok(answer) => rpc::stream(format, full([answer, frames::end(None)].concat())),
        Err(error) => rpc::stream_error(format, &error),
    }
}

/// Answers a SIGKILL only once the process is collected, so that whoever asks next finds it gone.
async fn send_signal(app: Arc<App>, query: SendSignalRequest) -> Result<Empty, ConnectError> {
    let signal = query.signal();
    if signal == Signal::Unspecified {
        return Err(ConnectError::new(
            Code::InvalidArgument,
            "the request names no signal there is; set SIGNAL_SIGKILL or SIGNAL_SIGTERM",
        ));
    }
    let process = app
        .processes
        .signal(&query.process.unwrap_or_default(), signal)?;
    if signal == Signal::Kill {
        let mut exit = process.exit.subscribe();
        let _stuck = tokio::time::timeout(KILL_CONFIRM, exit.wait_for(Option::is_some)).await;
    }
    Ok(Empty {})
}

async fn close_stdin(app: Arc<App>, query: SelectRequest) -> Result<Empty, ConnectError> {
    let process = app
        .processes
        .find_live(&query.process.unwrap_or_default())?;
    process.stdin.close(&process).await?;
    Ok(Empty {})
}
