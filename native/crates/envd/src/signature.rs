//! Signed file addresses, version 1 (contract section 3.1).
//!
//! `"v1_" + base64_nopad(sha256(path ":" operation ":" user ":" token [":" expiration]))`

use base64::engine::general_purpose::STANDARD_NO_PAD;
use base64::Engine;
use sha2::{Digest, Sha256};

/// What a signature allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Download.
    Read,
    /// Upload.
    Write,
}

/// Why a request without a token header is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SignatureError {
    /// Neither header nor signature.
    #[error("missing signature query parameter")]
    Missing,
    /// Signed for something else, or not by us.
    #[error("invalid signature")]
    Invalid,
    /// Valid once.
    #[error("signature is already expired")]
    Expired,
}

/// Signature over the raw query values; `user` is empty when the address names none.
pub fn sign(
    path: &str,
    operation: Operation,
    user: &str,
    token: &str,
    expiration: Option<&str>,
) -> String {
    let operation = match operation {
        Operation::Read => "read",
        Operation::Write => "write",
    };
    let mut text = format!("{path}:{operation}:{user}:{token}");
    if let Some(expiration) = expiration {
        text.push(':');
        text.push_str(expiration);
    }
    format!("v1_{}", STANDARD_NO_PAD.encode(Sha256::digest(text)))
}

/// Checks in the order of the contract: present, valid, then not expired.
pub fn verify(
    path: &str,
    operation: Operation,
    user: &str,
    token: &str,
    signature: Option<&str>,
    expiration: Option<&str>,
    now_seconds: i64,
) -> Result<(), SignatureError> {
    let given = signature
        .filter(|text| !text.is_empty())
        .ok_or(SignatureError::Missing)?;
    let expiration = expiration.filter(|text| !text.is_empty());
    if !constant_time_eq(
        given.as_bytes(),
        sign(path, operation, user, token, expiration).as_bytes(),
    ) {
        return Err(SignatureError::Invalid);
    }
    match expiration.map(str::parse::<i64>) {
        None => Ok(()),
        Some(Ok(end)) if end >= now_seconds => Ok(()),
        Some(Ok(_)) => Err(SignatureError::Expired),
        Some(Err(_)) => Err(SignatureError::Invalid),
    }
}

/// Comparison whose duration depends on the lengths only.
pub fn constant_time_eq(left: &[u8], right: &[u8]) -> bool {
    if left.len() != right.len() {
        return false;
    }
    let difference = left
        .iter()
        .zip(right)
        .fold(0u8, |sum, (a, b)| sum | (a ^ b));
    std::hint::black_box(difference) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATH: &str = "/home/user/a.txt";

    #[test]
    fn vectors_of_the_contract() {
        assert_eq!(
            sign(PATH, Operation::Read, "", "tok", None),
            "v1_Zkbb3914oLJLvMBzCAHQhm2ydBLxbSx2eQUR/kLdvIY"
        );
        assert_eq!(
            sign(PATH, Operation::Write, "root", "tok", Some("1700000000")),
            "v1_3hlIyTfkHTdfJKgNFUJamAQ7q+SOj3624i+geS/jqCM"
        );
    }

    #[test]
    fn checks_come_in_order() {
        let signature = sign(PATH, Operation::Read, "", "tok", Some("100"));
        let check = |signature: Option<&str>, now| {
            verify(
                PATH,
                Operation::Read,
                "",
                "tok",
                signature,
                Some("100"),
                now,
            )
        };
        assert_eq!(check(Some(&signature), 100), Ok(()));
        assert_eq!(check(Some(&signature), 101), Err(SignatureError::Expired));
        assert_eq!(check(Some("v1_x"), 101), Err(SignatureError::Invalid));
        assert_eq!(check(None, 101), Err(SignatureError::Missing));
        assert_eq!(
            verify(
                PATH,
                Operation::Write,
                "",
                "tok",
                Some(&signature),
                Some("100"),
                1
            ),
            Err(SignatureError::Invalid)
        );
        assert_eq!(
            verify(PATH, Operation::Read, "", "tok", Some(&signature), None, 1),
            Err(SignatureError::Invalid)
        );
    }
}
