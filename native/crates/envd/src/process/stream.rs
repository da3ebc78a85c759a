//! Body of the Start and Connect streams: start, output, keepalives, end, end frame.
//!
//! Invariant: frames are made only when the connection asks for one, so a slow client fills its queue
//! and with it stops its process, and nothing else.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::Frame;
use tokio::time::{Instant, Sleep};

use super::messages::{EventResponse, ProcessEvent};
use super::registry::Subscription;
use crate::connect::frames::{self, Format};
use crate::connect::{Code, ConnectError};

/// Where the stream is.
enum Stage {
    Start,
    Events,
    EndFrame,
    Done,
}

/// The stream of one follower.
pub struct EventBody {
    subscription: Subscription,
    format: Format,
    stage: Stage,
    keepalive: Duration,
    silence: Pin<Box<Sleep>>,
    deadline: Option<Pin<Box<Sleep>>>,
}

impl EventBody {
    /// A stream that starts with `start` and ends at the process's end or at `deadline`.
    pub fn new(
        subscription: Subscription,
        format: Format,
        keepalive: Duration,
        deadline: Option<Instant>,
    ) -> Self {
        Self {
            subscription,
            format,
            stage: Stage::Start,
            keepalive,
            silence: Box::pin(tokio::time::sleep(keepalive)),
            deadline: deadline.map(|at| Box::pin(tokio::time::sleep_until(at))),
        }
    }

    fn emit(&mut self, event: ProcessEvent) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let at = Instant::now() + self.keepalive;
        self.silence.as_mut().reset(at);
        match frames::message(self.format, &EventResponse::from(event)) {
            Ok(bytes) => Poll::Ready(Some(Ok(Frame::data(bytes)))),
            Err(error) => self.finish(Some(&error)),
        }
    }

    fn finish(&mut self, error: Option<&ConnectError>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        self.stage = Stage::Done;
        Poll::Ready(Some(Ok(Frame::data(frames::end(error)))))
    }

    fn poll_events(&mut self, context: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        if self
            .deadline
            .as_mut()
            .is_some_and(|deadline| deadline.as_mut().poll(context).is_ready())
        {
            return self.finish(Some(&ConnectError::new(
                Code::DeadlineExceeded,
                "the deadline of the request passed; raise its timeout",
            )));
        }
        match self.subscription.events.poll_recv(context) {
            Poll::Ready(Some(event)) => return self.emit(event),
            Poll::Ready(None) => {
                let Some(end) = self.subscription.end() else {
                    let error = ConnectError::new(
                        Code::ResourceExhausted,
                        "this follower read too slowly and was dropped; connect again",
                    );
                    return self.finish(Some(&error));
                };
                self.stage = Stage::EndFrame;
                return self.emit(ProcessEvent::End(end));
            }
            Poll::Pending => {}
        }
        match self.silence.as_mut().poll(context) {
            Poll::Ready(()) => {
                let frame = self.emit(ProcessEvent::Keepalive);
                // The new timer must be polled once to wake us.
                let _pending = self.silence.as_mut().poll(context);
                frame
            }
            Poll::Pending => Poll::Pending,
        }
    }
}

impl http_body::Body for EventBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let this = self.get_mut();
        match this.stage {
            Stage::Start => {
                this.stage = Stage::Events;
                let pid = this.subscription.process.pid;
                this.emit(ProcessEvent::Start { pid })
            }
            Stage::Events => this.poll_events(context),
            Stage::EndFrame => this.finish(None),
            Stage::Done => Poll::Ready(None),
        }
    }
}
