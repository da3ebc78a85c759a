//! Who may call what (contract section 3.1).

use hyper::{HeaderMap, Method, StatusCode};

use crate::app::App;
use crate::clock;
use crate::http::{header, query_value, RestError};
use crate::signature::{self, constant_time_eq, Operation};

const UNAUTHORIZED: &str =
    "unauthorized access, please provide a valid access token or method signing if supported";
const TOKEN_MISMATCH: &str = "access token present in header but does not match";

/// Checks one request. `/health` and the host-internal paths never come here.
pub fn check(
    app: &App,
    method: &Method,
    path: &str,
    headers: &HeaderMap,
    query: &[(String, String)],
) -> Result<(), RestError> {
    let Some(token) = app.settings().access_token.clone() else {
        return Ok(());
    };
    let given = header(headers, "x-access-token");
    let unauthorized = |message: &str| Err(RestError::new(StatusCode::UNAUTHORIZED, message));
    let operation = match (method, path) {
        (&Method::GET | &Method::HEAD, "/files") => Operation::Read,
        (&Method::POST, "/files") => Operation::Write,
        _ => {
            return match given {
                Some(given) if constant_time_eq(given.as_bytes(), token.as_bytes()) => Ok(()),
                _ => unauthorized(UNAUTHORIZED),
            }
        }
    };
    if let Some(given) = given.filter(|given| !given.is_empty()) {
        return if constant_time_eq(given.as_bytes(), token.as_bytes()) {
            Ok(())
        } else {
            unauthorized(TOKEN_MISMATCH)
        };
    }
    signature::verify(
        query_value(query, "path").unwrap_or(""),
        operation,
        query_value(query, "username").unwrap_or(""),
        &token,
        query_value(query, "signature"),
        query_value(query, "signature_expiration"),
        clock::unix_seconds(),
    )
    .or_else(|error| unauthorized(&error.to_string()))
}
