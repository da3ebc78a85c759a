//! Messages of `process.Process` (contract section 3.4). Names are accepted in both spellings.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::de::{Error, Unexpected};
use serde::{Deserialize, Deserializer, Serialize};

use crate::connect::lenient;

/// What runs.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessConfig {
    /// Program: a path, or a name looked up in PATH.
    #[serde(deserialize_with = "lenient::or_default")]
    pub cmd: String,
    /// Arguments after the program's name.
    #[serde(
        deserialize_with = "lenient::or_default",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub args: Vec<String>,
    /// Environment of the request, over the sandbox-wide one.
    #[serde(
        deserialize_with = "lenient::or_default",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub envs: BTreeMap<String, String>,
    /// Working directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
}

/// Terminal size in characters.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default)]
pub struct PtySize {
    /// Columns.
    #[serde(deserialize_with = "lenient::unsigned")]
    pub cols: u32,
    /// Rows.
    #[serde(deserialize_with = "lenient::unsigned")]
    pub rows: u32,
}

/// Terminal of a process.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default)]
pub struct Pty {
    /// Size; absent means 80x24.
    pub size: Option<PtySize>,
}

/// Start request.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct StartRequest {
    /// Program.
    pub process: Option<ProcessConfig>,
    /// Terminal, if one is wanted.
    pub pty: Option<Pty>,
    /// Caller's name for the process.
    pub tag: Option<String>,
    /// Whether stdin is a pipe; absent means yes (older clients).
    pub stdin: Option<bool>,
}

/// Names a process by pid or by tag.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct ProcessSelector {
    /// Process id.
    #[serde(deserialize_with = "lenient::optional_unsigned")]
    pub pid: Option<u32>,
    /// Tag given at Start.
    pub tag: Option<String>,
}

/// Connect, CloseStdin and the start of StreamInput.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct SelectRequest {
    /// Which process.
    pub process: Option<ProcessSelector>,
}

/// Update request.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct UpdateRequest {
    /// Which process.
    pub process: Option<ProcessSelector>,
    /// New terminal size.
    pub pty: Option<Pty>,
}

/// Bytes for a process.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ProcessInput {
    /// For its stdin pipe.
    #[serde(deserialize_with = "lenient::optional_bytes")]
    pub stdin: Option<Bytes>,
    /// For its terminal.
    #[serde(deserialize_with = "lenient::optional_bytes")]
    pub pty: Option<Bytes>,
}

/// SendInput request.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct SendInputRequest {
    /// Which process.
    pub process: Option<ProcessSelector>,
    /// What to write.
    pub input: Option<ProcessInput>,
}

/// Data frame of StreamInput.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct StreamInputData {
    /// What to write.
    pub input: Option<ProcessInput>,
}

/// One message of StreamInput; a keepalive has neither field.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct StreamInputRequest {
    /// First message.
    pub start: Option<SelectRequest>,
    /// Following messages.
    pub data: Option<StreamInputData>,
}

/// SendSignal request.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct SendSignalRequest {
    /// Which process.
    pub process: Option<ProcessSelector>,
    /// Signal, by number or enum name.
    pub signal: Option<Signal>,
}

/// The two signals of the contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// SIGTERM.
    Term,
    /// SIGKILL.
    Kill,
}

impl<'de> Deserialize<'de> for Signal {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = serde_json::Value::deserialize(deserializer)?;
        let known = match &value {
            serde_json::Value::Number(number) => number.as_u64(),
            serde_json::Value::String(name) => match name.as_str() {
                "SIGNAL_SIGKILL" => Some(9),
                "SIGNAL_SIGTERM" => Some(15),
                _ => name.parse().ok(),
            },
            _ => None,
        };
        match known {
            Some(9) => Ok(Signal::Kill),
            Some(15) => Ok(Signal::Term),
            _ => Err(D::Error::invalid_value(
                Unexpected::Other(&value.to_string()),
                &"SIGNAL_SIGKILL (9) or SIGNAL_SIGTERM (15)",
            )),
        }
    }
}

/// A running process.
#[derive(Debug, Serialize)]
pub struct ProcessInfo {
    /// What runs.
    pub config: ProcessConfig,
    /// Process id.
    pub pid: u32,
    /// Tag given at Start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
}

/// List answer.
#[derive(Debug, Serialize)]
pub struct ListResponse {
    /// All running processes started here.
    pub processes: Vec<ProcessInfo>,
}

/// How a process ended.
#[derive(Debug, Clone, Serialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct EndEvent {
    /// Exit code, or -1 after a signal.
    pub exit_code: i32,
    /// False after a signal.
    #[serde(skip_serializing_if = "lenient::is_false")]
    pub exited: bool,
    /// `exit status N` or `signal: killed`.
    pub status: String,
    /// Same as status unless the code is 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// One event of a process.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum ProcessEvent {
    /// First event of every stream.
    Start {
        /// Process id.
        pid: u32,
    },
    /// Output.
    Data(DataEvent),
    /// Last event.
    End(EndEvent),
    /// Sign of life.
    Keepalive {},
}

/// Output bytes by source.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum DataEvent {
    /// Standard output.
    Stdout(#[serde(serialize_with = "lenient::write_bytes")] Bytes),
    /// Standard error.
    Stderr(#[serde(serialize_with = "lenient::write_bytes")] Bytes),
    /// Terminal.
    Pty(#[serde(serialize_with = "lenient::write_bytes")] Bytes),
}

/// Message of the Start and Connect streams.
#[derive(Debug, Serialize)]
pub struct EventResponse<'a> {
    /// The event.
    pub event: &'a ProcessEvent,
}

/// Answer without fields.
#[derive(Debug, Serialize)]
pub struct Empty {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connect::Codec;

    #[test]
    fn requests_accept_what_proto_json_accepts() {
        let request: StartRequest = Codec::Json
            .decode(br#"{"process":{"cmd":"/bin/sh","args":null,"envs":{"A":"b"},"unknown":[1]},"pty":{"size":{"cols":"80","rows":24}},"stdin":false,"tag":null}"#)
            .unwrap();
        let size = request.pty.unwrap().size.unwrap();
        assert_eq!((size.cols, size.rows, request.stdin), (80, 24, Some(false)));
        for signal in ["9", "\"SIGNAL_SIGKILL\"", "\"9\""] {
            let text = format!(r#"{{"process":{{"pid":"12"}},"signal":{signal}}}"#);
            let request: SendSignalRequest = Codec::Json.decode(text.as_bytes()).unwrap();
            assert_eq!(request.signal, Some(Signal::Kill));
            assert_eq!(request.process.unwrap().pid, Some(12));
        }
        assert!(Codec::Json
            .decode::<SendSignalRequest>(br#"{"signal":"SIGNAL_SIGHUP"}"#)
            .is_err());
        assert!(Codec::Json
            .decode::<UpdateRequest>(br#"{"pty":{"size":{"cols":-1}}}"#)
            .is_err());
        let input: SendInputRequest = Codec::Json.decode(br#"{"input":{"stdin":"_-8"}}"#).unwrap();
        assert_eq!(&input.input.unwrap().stdin.unwrap()[..], b"\xff\xef");
    }

    #[test]
    fn events_have_the_shape_of_the_contract() {
        let text = |event: &ProcessEvent| serde_json::to_string(&EventResponse { event }).unwrap();
        assert_eq!(
            text(&ProcessEvent::Start { pid: 5 }),
            r#"{"event":{"start":{"pid":5}}}"#
        );
        assert_eq!(
            text(&ProcessEvent::Keepalive {}),
            r#"{"event":{"keepalive":{}}}"#
        );
        let data = ProcessEvent::Data(DataEvent::Stdout(Bytes::from_static(b"hi\n")));
        assert_eq!(text(&data), r#"{"event":{"data":{"stdout":"aGkK"}}}"#);
        let end = EndEvent {
            exit_code: 0,
            exited: true,
            status: "exit status 0".into(),
            error: None,
        };
        assert_eq!(
            text(&ProcessEvent::End(end)),
            r#"{"event":{"end":{"exitCode":0,"exited":true,"status":"exit status 0"}}}"#
        );
    }
}
