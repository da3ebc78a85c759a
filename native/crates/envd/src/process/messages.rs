//! Messages of `process.Process` (contract section 3.4), in both encodings by one definition.
//!
//! JSON names are accepted in both spellings. A protobuf `oneof` is a struct of optional fields here:
//! on the wire they are the same. Field numbers are those of the contract; the ones it does not list
//! (requests that only name a process, StreamInput, answers) are as the clients' own code has them.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::de::{Error, Unexpected};
use serde::{Deserialize, Deserializer, Serialize};

use crate::connect::lenient;

/// What runs.
#[derive(Clone, PartialEq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessConfig {
    /// Program: a path, or a name looked up in PATH.
    #[prost(string, tag = "1")]
    #[serde(deserialize_with = "lenient::or_default")]
    pub cmd: String,
    /// Arguments after the program's name.
    #[prost(string, repeated, tag = "2")]
    #[serde(
        deserialize_with = "lenient::or_default",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub args: Vec<String>,
    /// Environment of the request, over the sandbox-wide one.
    #[prost(btree_map = "string, string", tag = "3")]
    #[serde(
        deserialize_with = "lenient::or_default",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub envs: BTreeMap<String, String>,
    /// Working directory.
    #[prost(string, optional, tag = "4")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
}

/// Terminal size in characters.
#[derive(Clone, Copy, PartialEq, prost::Message, Deserialize)]
#[serde(default)]
pub struct PtySize {
    /// Columns.
    #[prost(uint32, tag = "1")]
    #[serde(deserialize_with = "lenient::unsigned")]
    pub cols: u32,
    /// Rows.
    #[prost(uint32, tag = "2")]
    #[serde(deserialize_with = "lenient::unsigned")]
    pub rows: u32,
}

/// Terminal of a process.
#[derive(Clone, Copy, PartialEq, prost::Message, Deserialize)]
#[serde(default)]
pub struct Pty {
    /// Size; absent means 80x24.
    #[prost(message, optional, tag = "1")]
    pub size: Option<PtySize>,
}

/// Start request.
#[derive(Clone, PartialEq, prost::Message, Deserialize)]
#[serde(default)]
pub struct StartRequest {
    /// Program.
    #[prost(message, optional, tag = "1")]
    pub process: Option<ProcessConfig>,
    /// Terminal, if one is wanted.
    #[prost(message, optional, tag = "2")]
    pub pty: Option<Pty>,
    /// Caller's name for the process.
    #[prost(string, optional, tag = "3")]
    pub tag: Option<String>,
    /// Whether stdin is a pipe; absent means yes (older clients).
    #[prost(bool, optional, tag = "4")]
    pub stdin: Option<bool>,
}

/// Names a process by pid or by tag.
#[derive(Clone, PartialEq, prost::Message, Deserialize)]
#[serde(default)]
pub struct ProcessSelector {
    /// Process id.
    #[prost(uint32, optional, tag = "1")]
    #[serde(deserialize_with = "lenient::optional_unsigned")]
    pub pid: Option<u32>,
    /// Tag given at Start.
    #[prost(string, optional, tag = "2")]
    pub tag: Option<String>,
}

/// Connect, CloseStdin and the start of StreamInput.
#[derive(Clone, PartialEq, prost::Message, Deserialize)]
#[serde(default)]
pub struct SelectRequest {
    /// Which process.
    #[prost(message, optional, tag = "1")]
    pub process: Option<ProcessSelector>,
}

/// Update request.
#[derive(Clone, PartialEq, prost::Message, Deserialize)]
#[serde(default)]
pub struct UpdateRequest {
    /// Which process.
    #[prost(message, optional, tag = "1")]
    pub process: Option<ProcessSelector>,
    /// New terminal size.
    #[prost(message, optional, tag = "2")]
    pub pty: Option<Pty>,
}

/// Bytes for a process.
#[derive(Clone, PartialEq, prost::Message, Deserialize)]
#[serde(default)]
pub struct ProcessInput {
    /// For its stdin pipe.
    #[prost(bytes = "bytes", optional, tag = "1")]
    #[serde(deserialize_with = "lenient::optional_bytes")]
    pub stdin: Option<Bytes>,
    /// For its terminal.
    #[prost(bytes = "bytes", optional, tag = "2")]
    #[serde(deserialize_with = "lenient::optional_bytes")]
    pub pty: Option<Bytes>,
}

/// SendInput request.
#[derive(Clone, PartialEq, prost::Message, Deserialize)]
#[serde(default)]
pub struct SendInputRequest {
    /// Which process.
    #[prost(message, optional, tag = "1")]
    pub process: Option<ProcessSelector>,
    /// What to write.
    #[prost(message, optional, tag = "2")]
    pub input: Option<ProcessInput>,
}

/// Data frame of StreamInput.
#[derive(Clone, PartialEq, prost::Message, Deserialize)]
#[serde(default)]
pub struct StreamInputData {
    /// What to write.
    #[prost(message, optional, tag = "2")]
    pub input: Option<ProcessInput>,
}

/// One message of StreamInput; a keepalive has neither field.
#[derive(Clone, PartialEq, prost::Message, Deserialize)]
#[serde(default)]
pub struct StreamInputRequest {
    /// First message.
    #[prost(message, optional, tag = "1")]
    pub start: Option<SelectRequest>,
    /// Following messages.
    #[prost(message, optional, tag = "2")]
    pub data: Option<StreamInputData>,
}

/// SendSignal request.
#[derive(Clone, PartialEq, prost::Message, Deserialize)]
#[serde(default)]
pub struct SendSignalRequest {
    /// Which process.
    #[prost(message, optional, tag = "1")]
    pub process: Option<ProcessSelector>,
    /// Signal; JSON has its number or its name.
    #[prost(enumeration = "Signal", tag = "2")]
    #[serde(deserialize_with = "signal_number")]
    pub signal: i32,
}

/// The signals of the contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum Signal {
    /// None given.
    Unspecified = 0,
    /// SIGKILL.
    Kill = 9,
    /// SIGTERM.
    Term = 15,
}

fn signal_number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i32, D::Error> {
    let value = serde_json::Value::deserialize(deserializer)?;
    let known = match &value {
        serde_json::Value::Null => Some(0),
        serde_json::Value::Number(number) => number.as_i64(),
        serde_json::Value::String(name) => match name.as_str() {
            "SIGNAL_UNSPECIFIED" => Some(0),
            "SIGNAL_SIGKILL" => Some(9),
            "SIGNAL_SIGTERM" => Some(15),
            _ => name.parse().ok(),
        },
        _ => None,
    };
    known
        .and_then(|number| Signal::try_from(i32::try_from(number).ok()?).ok())
        .map(i32::from)
        .ok_or_else(|| {
            D::Error::invalid_value(
                Unexpected::Other(&value.to_string()),
                &"SIGNAL_SIGKILL (9) or SIGNAL_SIGTERM (15)",
            )
        })
}

/// A running process.
#[derive(Clone, PartialEq, prost::Message, Serialize)]
pub struct ProcessInfo {
    /// What runs.
    #[prost(message, optional, tag = "1")]
    pub config: Option<ProcessConfig>,
    /// Process id.
    #[prost(uint32, tag = "2")]
    pub pid: u32,
    /// Tag given at Start.
    #[prost(string, optional, tag = "3")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
}

/// List answer.
#[derive(Clone, PartialEq, prost::Message, Serialize)]
pub struct ListResponse {
    /// All running processes started here.
    #[prost(message, repeated, tag = "1")]
    pub processes: Vec<ProcessInfo>,
}

/// How a process ended.
#[derive(Clone, PartialEq, Eq, prost::Message, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EndEvent {
    /// Exit code, or -1 after a signal.
    #[prost(sint32, tag = "1")]
    pub exit_code: i32,
    /// False after a signal.
    #[prost(bool, tag = "2")]
    #[serde(skip_serializing_if = "lenient::is_false")]
    pub exited: bool,
    /// `exit status N` or `signal: killed`.
    #[prost(string, tag = "3")]
    pub status: String,
    /// Same as status unless the code is 0.
    #[prost(string, optional, tag = "4")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// One event of a process.
#[derive(Debug, Clone)]
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
    Keepalive,
}

/// Output bytes by source: exactly one field is set.
#[derive(Clone, PartialEq, prost::Message, Serialize)]
pub struct DataEvent {
    /// Standard output.
    #[prost(bytes = "bytes", optional, tag = "1")]
    #[serde(
        skip_serializing_if = "Option::is_none",
        serialize_with = "lenient::write_bytes"
    )]
    pub stdout: Option<Bytes>,
    /// Standard error.
    #[prost(bytes = "bytes", optional, tag = "2")]
    #[serde(
        skip_serializing_if = "Option::is_none",
        serialize_with = "lenient::write_bytes"
    )]
    pub stderr: Option<Bytes>,
    /// Terminal.
    #[prost(bytes = "bytes", optional, tag = "3")]
    #[serde(
        skip_serializing_if = "Option::is_none",
        serialize_with = "lenient::write_bytes"
    )]
    pub pty: Option<Bytes>,
}

/// First event.
#[derive(Clone, Copy, PartialEq, prost::Message, Serialize)]
pub struct StartEvent {
    /// Process id.
    #[prost(uint32, tag = "1")]
    pub pid: u32,
}

/// A [`ProcessEvent`] as it is written: exactly one field is set.
#[derive(Clone, PartialEq, prost::Message, Serialize)]
pub struct EventFields {
    /// First event.
    #[prost(message, optional, tag = "1")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<StartEvent>,
    /// Output.
    #[prost(message, optional, tag = "2")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<DataEvent>,
    /// Last event.
    #[prost(message, optional, tag = "3")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end: Option<EndEvent>,
    /// Sign of life.
    #[prost(message, optional, tag = "4")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keepalive: Option<Empty>,
}

/// Message of the Start and Connect streams.
#[derive(Clone, PartialEq, prost::Message, Serialize)]
pub struct EventResponse {
    /// The event.
    #[prost(message, optional, tag = "1")]
    pub event: Option<EventFields>,
}

impl From<ProcessEvent> for EventResponse {
    fn from(event: ProcessEvent) -> Self {
        let mut fields = EventFields::default();
        match event {
            ProcessEvent::Start { pid } => fields.start = Some(StartEvent { pid }),
            ProcessEvent::Data(data) => fields.data = Some(data),
            ProcessEvent::End(end) => fields.end = Some(end),
            ProcessEvent::Keepalive => fields.keepalive = Some(Empty {}),
        }
        Self {
            event: Some(fields),
        }
    }
}

/// A message without fields.
#[derive(Clone, Copy, PartialEq, prost::Message, Serialize, Deserialize)]
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
            assert_eq!(request.signal(), Signal::Kill);
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
        let text = |event| serde_json::to_string(&EventResponse::from(event)).unwrap();
        assert_eq!(
            text(ProcessEvent::Start { pid: 5 }),
            r#"{"event":{"start":{"pid":5}}}"#
        );
        assert_eq!(
            text(ProcessEvent::Keepalive),
            r#"{"event":{"keepalive":{}}}"#
        );
        let data = ProcessEvent::Data(DataEvent {
            stdout: Some(Bytes::from_static(b"hi\n")),
            ..DataEvent::default()
        });
        assert_eq!(text(data), r#"{"event":{"data":{"stdout":"aGkK"}}}"#);
        let end = EndEvent {
            exit_code: 0,
            exited: true,
            status: "exit status 0".into(),
            error: None,
        };
        assert_eq!(
            text(ProcessEvent::End(end)),
            r#"{"event":{"end":{"exitCode":0,"exited":true,"status":"exit status 0"}}}"#
        );
    }

    #[test]
    fn binary_messages_have_the_numbers_of_the_contract() {
        let request: StartRequest = Codec::Proto
            .decode(b"\x0a\x0f\x0a\x02ls\x12\x02-l\x1a\x05\x0a\x01A\x12\0\x12\x06\x0a\x04\x08\x50\x10\x18\x1a\x01t\x20\0")
            .unwrap();
        let process = request.process.unwrap();
        assert_eq!(
            (process.cmd.as_str(), &process.args[..]),
            ("ls", &["-l".to_owned()][..])
        );
        assert_eq!(process.envs.get("A").map(String::as_str), Some(""));
        let size = request.pty.unwrap().size.unwrap();
        assert_eq!((size.cols, size.rows), (80, 24));
        assert_eq!(
            (request.tag.as_deref(), request.stdin),
            (Some("t"), Some(false))
        );
        let end = ProcessEvent::End(EndEvent {
            exit_code: -1,
            exited: false,
            status: "s".into(),
            error: Some("e".into()),
        });
        let bytes = Codec::Proto.encode_body(&EventResponse::from(end)).unwrap();
        assert_eq!(&bytes[..], b"\x0a\x0a\x1a\x08\x08\x01\x1a\x01s\x22\x01e");
        assert!(Codec::Proto.decode::<StartRequest>(b"\x0a\xff").is_err());
    }

    #[test]
    fn noise_is_a_message_or_an_error() {
        let mut noise = crate::fuzz::Noise::new(17);
        let json = [
            r#"{"process":{"cmd":"/bin/sh","args":["a"],"envs":{"A":"b"}},"pty":{"size":{"cols":"80","rows":24}},"stdin":false}"#,
            r#"{"process":{"pid":"12"},"signal":"SIGNAL_SIGKILL","input":{"stdin":"_-8="}}"#,
            r#"{"start":{"process":{"tag":"t"}},"data":{"input":{"pty":"aGk="}},"keepalive":{}}"#,
        ];
        let binary = [
            &b"\x0a\x0f\x0a\x02ls\x12\x02-l\x1a\x05\x0a\x01A\x12\0\x12\x06\x0a\x04\x08\x50\x10\x18"
                [..],
            b"\x0a\x02\x08\x0c\x10\x09",
        ];
        for _ in 0..20_000 {
            for (codec, bytes) in [
                (Codec::Json, noise.mutate(&json)),
                (Codec::Proto, noise.mutate(&binary)),
            ] {
                let _any = codec.decode::<StartRequest>(&bytes);
                let _any = codec.decode::<SendSignalRequest>(&bytes);
                let _any = codec.decode::<SendInputRequest>(&bytes);
                let _any = codec.decode::<StreamInputRequest>(&bytes);
                let _any = codec.decode::<UpdateRequest>(&bytes);
            }
        }
    }
}
