//! Request bodies: read whole, within a size and a time.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, Request};
use http_body_util::BodyExt;
use serde::de::DeserializeOwned;

use super::error::ApiError;

/// Largest request body.
const MAX_BODY_BYTES: usize = 8 << 20;
/// Bytes of a too large body that are read and dropped, so that its sender gets
/// the reply and not a reset connection.
const MAX_DROPPED_BYTES: usize = 64 << 20;
/// How long a caller may take to send the body.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

/// The whole body of a request.
pub struct WholeBody(Bytes);

impl WholeBody {
    /// Whether the caller sent none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The body as the JSON a route expects.
    pub fn decode<T: DeserializeOwned>(&self) -> Result<T, ApiError> {
        serde_json::from_slice(&self.0).map_err(|error| {
            let message = format!("the body is not what this route expects: {error}");
            ApiError::invalid(message, "correct the JSON body")
        })
    }
}

impl<S: Send + Sync> FromRequest<S> for WholeBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, _state: &S) -> Result<WholeBody, ApiError> {
        match tokio::time::timeout(READ_TIMEOUT, read(request.into_body())).await {
            Ok(result) => result,
            Err(_) => {
                let message = format!("the body did not arrive within {READ_TIMEOUT:?}");
                Err(ApiError::invalid(message, "send the whole body at once"))
            }
        }
    }
}

async fn read(mut body: Body) -> Result<WholeBody, ApiError> {
    let mut bytes = Vec::new();
    let mut total = 0;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| {
            let message = format!("cannot read the body: {error}");
            ApiError::invalid(message, "send the request again")
        })?;
        let Some(data) = frame.data_ref() else {
            continue;
        };
        total += data.len();
        if total <= MAX_BODY_BYTES {
            bytes.extend_from_slice(data);
        } else if total > MAX_DROPPED_BYTES {
            break;
        }
    }
    if total > MAX_BODY_BYTES {
        let message = format!("the body is larger than {MAX_BODY_BYTES} bytes");
        return Err(ApiError::invalid(message, "send a smaller body"));
    }
    Ok(WholeBody(bytes.into()))
}
