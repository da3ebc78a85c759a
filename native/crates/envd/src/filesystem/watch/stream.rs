//! Body of the WatchDir stream: start, events, keepalives, and an end frame when the watch is over.
//!
//! Invariant: a client that leaves drops the body, and with it the watch.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body::Frame;
use tokio::time::{Instant, Sleep};

use super::messages::WatchMessage;
use super::watcher::{Next, Subscription};
use crate::connect::frames::{self, Format};
use crate::connect::{Code, ConnectError};
use crate::limits::WATCH_FRAMES_BYTES;

/// The stream of one watch.
pub struct WatchBody {
    /// None once the end frame is out.
    subscription: Option<Subscription>,
    format: Format,
    keepalive: Duration,
    silence: Pin<Box<Sleep>>,
    deadline: Option<Pin<Box<Sleep>>>,
    is_started: bool,
}

impl WatchBody {
    /// A stream that ends with the watch or at `deadline`.
    pub fn new(
        subscription: Subscription,
        format: Format,
        keepalive: Duration,
        deadline: Option<Instant>,
    ) -> Self {
        Self {
            subscription: Some(subscription),
            format,
            keepalive,
            silence: Box::pin(tokio::time::sleep(keepalive)),
            deadline: deadline.map(|at| Box::pin(tokio::time::sleep_until(at))),
            is_started: false,
        }
    }

    /// Adds one message, or the end frame when that fails.
    fn emit(&mut self, message: &WatchMessage, out: &mut BytesMut) {
        match frames::message(self.format, message) {
            Ok(frame) => out.extend_from_slice(&frame),
            Err(error) => self.finish(Some(&error), out),
        }
    }

    fn finish(&mut self, error: Option<&ConnectError>, out: &mut BytesMut) {
        self.subscription = None;
        out.extend_from_slice(&frames::end(error));
    }

    /// Puts into `out` what there is to send, at most about [`WATCH_FRAMES_BYTES`].
    fn fill(&mut self, context: &mut Context<'_>, out: &mut BytesMut) {
        if !self.is_started {
            self.is_started = true;
            self.emit(&WatchMessage::start(), out);
            return;
        }
        if self
            .deadline
            .as_mut()
            .is_some_and(|deadline| deadline.as_mut().poll(context).is_ready())
        {
            let error = ConnectError::new(
                Code::DeadlineExceeded,
                "the deadline of the request passed; raise its timeout",
            );
            self.finish(Some(&error), out);
            return;
        }
        while out.len() < WATCH_FRAMES_BYTES {
            let Some(subscription) = &mut self.subscription else {
                return;
            };
            match subscription.poll_next(context) {
                Poll::Ready(Next::Event(event)) => {
                    self.emit(&WatchMessage::event(event), out);
                }
                Poll::Ready(Next::End(error)) => self.finish(error.as_ref(), out),
                Poll::Pending => break,
            }
        }
        if out.is_empty() && self.silence.as_mut().poll(context).is_ready() {
            self.emit(&WatchMessage::keepalive(), out);
        }
    }
}

impl http_body::Body for WatchBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let this = self.get_mut();
        if this.subscription.is_none() {
            return Poll::Ready(None);
        }
        let mut out = BytesMut::new();
        this.fill(context, &mut out);
        if out.is_empty() {
            return Poll::Pending;
        }
        // Whatever was sent ends the silence. The timer is polled, and so set, when nothing is left to send.
        let at = Instant::now() + this.keepalive;
        this.silence.as_mut().reset(at);
        Poll::Ready(Some(Ok(Frame::data(out.freeze()))))
    }
}
