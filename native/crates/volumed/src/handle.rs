//! File handles as guests hold them.
//!
//! ```text
//! 0       8         9        13       13+n         29+n
//! | volume | n      | kind   | n bytes | signature |
//! ```
//!
//! `volume` names the export, `kind` and the n bytes are the kernel's own handle. The signature is the
//! first half of an HMAC-SHA256 over all before it, with the volume's key: a guest can hand back only
//! what it was given for that volume, so no inode number it makes up reaches the rest of the file
//! system. Handles outlive this program and the guest's pauses.

use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};

use crate::sys::FileHandle;

/// Most bytes of a handle in NFS version 3 (RFC 1813 section 2.4).
pub const HANDLE_MAX_BYTES: usize = 64;
const VOLUME_BYTES: usize = 8;
const HEAD_BYTES: usize = VOLUME_BYTES + 1 + 4;
const SIGNATURE_BYTES: usize = 16;

/// Names an export in a handle.
pub type VolumeTag = [u8; VOLUME_BYTES];

/// The tag of a volume's name.
pub fn tag_of(name: &str) -> VolumeTag {
    let mut tag = VolumeTag::default();
    tag.copy_from_slice(&Sha256::digest(name)[..VOLUME_BYTES]);
    tag
}

/// The volume a handle claims to be of.
pub fn claimed_tag(handle: &[u8]) -> Option<VolumeTag> {
    handle.get(..VOLUME_BYTES)?.try_into().ok()
}

/// What a guest is given. None when the file system's own handle is too long.
pub fn seal(tag: VolumeTag, key: &[u8], own: &FileHandle) -> Option<Vec<u8>> {
    let mut handle = Vec::with_capacity(HANDLE_MAX_BYTES);
    handle.extend_from_slice(&tag);
    handle.push(u8::try_from(own.data.len()).ok()?);
    handle.extend_from_slice(&own.kind.to_be_bytes());
    handle.extend_from_slice(&own.data);
    let signature = signer(key, &handle)?.finalize().into_bytes();
    handle.extend_from_slice(&signature[..SIGNATURE_BYTES]);
    (handle.len() <= HANDLE_MAX_BYTES).then_some(handle)
}

/// The kernel's handle in one that `seal` made with the same key. None for anything else.
pub fn unseal(key: &[u8], handle: &[u8]) -> Option<FileHandle> {
    let length = *handle.get(VOLUME_BYTES)? as usize;
    if handle.len() != HEAD_BYTES + length + SIGNATURE_BYTES {
        return None;
    }
    let (signed, signature) = handle.split_at(HEAD_BYTES + length);
    signer(key, signed)?.verify_truncated_left(signature).ok()?;
    Some(FileHandle {
        kind: i32::from_be_bytes(signed[VOLUME_BYTES + 1..HEAD_BYTES].try_into().ok()?),
        data: signed[HEAD_BYTES..].to_vec(),
    })
}

fn signer(key: &[u8], signed: &[u8]) -> Option<Hmac<Sha256>> {
    let mut signer = Hmac::<Sha256>::new_from_slice(key).ok()?;
    signer.update(signed);
    Some(signer)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sealed() -> Vec<u8> {
        let own = FileHandle {
            kind: 1,
            data: vec![9; 20],
        };
        seal(tag_of("v"), b"key", &own).unwrap()
    }

    #[test]
    fn a_handle_comes_back() {
        let own = unseal(b"key", &sealed()).unwrap();
        assert_eq!((own.kind, own.data), (1, vec![9; 20]));
        assert_eq!(claimed_tag(&sealed()), Some(tag_of("v")));
    }

    #[test]
    fn nothing_else_does() {
        let whole = sealed();
        assert_eq!(unseal(b"other", &whole), None);
        for index in 0..whole.len() {
            let mut forged = whole.clone();
            forged[index] ^= 1;
            assert_eq!(unseal(b"key", &forged), None, "byte {index}");
            assert_eq!(unseal(b"key", &whole[..index]), None, "length {index}");
        }
        let mut longer = whole;
        longer.push(0);
        assert_eq!(unseal(b"key", &longer), None);
    }

    #[test]
    fn too_long_ones_are_not_made() {
        for (length, fits) in [(35, true), (36, false), (128, false)] {
            let own = FileHandle {
                kind: 1,
                data: vec![0; length],
            };
            assert_eq!(seal(tag_of("v"), b"key", &own).is_some(), fits);
        }
    }
}
