//! serde helpers for what proto-JSON accepts beyond plain JSON: null for a default, integers as
//! strings, bytes in either base64 alphabet (contract section 3.3).

use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig, STANDARD};
use base64::engine::DecodePaddingMode;
use base64::Engine;
use bytes::Bytes;
use serde::de::{Error, Unexpected};
use serde::{Deserialize, Deserializer, Serializer};

/// Decoder that takes padding or none.
pub const BASE64: GeneralPurpose = GeneralPurpose::new(
    &base64::alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// null means the default.
pub fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}

#[derive(Deserialize)]
#[serde(untagged)]
enum NumberOrText {
    Number(f64),
    Text(String),
}

/// An integer written as a number or as a string.
pub fn integer<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i64, D::Error> {
    let value = match Option::<NumberOrText>::deserialize(deserializer)? {
        None => return Ok(0),
        Some(NumberOrText::Number(number)) => number,
        Some(NumberOrText::Text(text)) => {
            return text
                .trim()
                .parse()
                .map_err(|_| D::Error::invalid_value(Unexpected::Str(&text), &"an integer"));
        }
    };
    if value.fract() != 0.0 || value.abs() > 9_007_199_254_740_992.0 {
        return Err(D::Error::invalid_value(
            Unexpected::Float(value),
            &"an integer",
        ));
    }
    Ok(value as i64)
}

/// An unsigned 32-bit integer, see [`integer`].
pub fn unsigned<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    let value = integer(deserializer)?;
    u32::try_from(value).map_err(|_| {
        D::Error::invalid_value(
            Unexpected::Signed(value),
            &"an integer from 0 to 4294967295",
        )
    })
}

/// See [`unsigned`]; absent and null are None.
pub fn optional_unsigned<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<u32>, D::Error> {
    #[derive(Deserialize)]
    struct Wrapped(#[serde(deserialize_with = "unsigned")] u32);
    Ok(Option::<Wrapped>::deserialize(deserializer)?.map(|wrapped| wrapped.0))
}

/// Base64 bytes; absent and null are None.
pub fn optional_bytes<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Bytes>, D::Error> {
    let Some(text) = Option::<String>::deserialize(deserializer)? else {
        return Ok(None);
    };
    let plain = if text.contains(['-', '_']) {
        text.replace('-', "+").replace('_', "/")
    } else {
        text
    };
    BASE64
        .decode(plain)
        .map(|bytes| Some(bytes.into()))
        .map_err(|error| D::Error::custom(format_args!("bytes are not base64: {error}")))
}

/// Bytes as base64; None never comes here, it is left out.
pub fn write_bytes<S: Serializer>(bytes: &Option<Bytes>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&STANDARD.encode(bytes.as_deref().unwrap_or_default()))
}

/// int64 as proto-JSON writes it: a string.
pub fn write_integer<S: Serializer>(value: &i64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

/// False fields are left out, as proto-JSON does.
pub fn is_false(value: &bool) -> bool {
    !*value
}
