//! Replies to calls that must not be done twice, kept for clients that ask again.
//!
//! A client that lost its connection repeats what it has no answer to. A repeated REMOVE would then
//! fail with "not there" although the first one did its work.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Mutex, PoisonError};

/// Most replies kept: more than a client has under way at once.
const KEPT_MAX: usize = 512;
/// Larger ones are not kept; those of the calls in question are a few hundred bytes.
const REPLY_MAX_BYTES: usize = 1024;
const NFS_PROGRAM: u32 = 100_003;

/// What makes two calls the same one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallKey {
    xid: u32,
    content: u64,
}

impl CallKey {
    /// The key of a call that must not be done twice; None for one that may.
    pub fn of(program: u32, procedure: u32, xid: u32, record: &[u8]) -> Option<Self> {
        let once = matches!(procedure, 2 | 8..=15);
        (program == NFS_PROGRAM && once).then(|| {
            let mut hasher = DefaultHasher::new();
            record.hash(&mut hasher);
            Self {
                xid,
                content: hasher.finish(),
            }
        })
    }
}

/// The replies.
#[derive(Default)]
pub struct Replies {
    kept: Mutex<VecDeque<(CallKey, Vec<u8>)>>,
}

impl Replies {
    /// The reply to a call that was done already.
    pub fn find(&self, key: CallKey) -> Option<Vec<u8>> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.iter()
            .rev()
            .find(|(other, _)| *other == key)
            .map(|(_, reply)| reply.clone())
    }

    /// Keeps a reply.
    pub fn keep(&self, key: CallKey, reply: &[u8]) {
        if reply.len() > REPLY_MAX_BYTES {
            return;
        }
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == KEPT_MAX {
            kept.pop_front();
        }
        kept.push_back((key, reply.to_vec()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_call_finds_its_reply() {
        let replies = Replies::default();
        let key = CallKey::of(NFS_PROGRAM, 12, 5, b"remove a").unwrap();
        replies.keep(key, b"done");
        assert_eq!(replies.find(key).as_deref(), Some(&b"done"[..]));
        for (xid, record) in [(6, &b"remove a"[..]), (5, b"remove b")] {
            let other = CallKey::of(NFS_PROGRAM, 12, xid, record).unwrap();
            assert_eq!(replies.find(other), None);
        }
        assert_eq!(CallKey::of(NFS_PROGRAM, 6, 5, b"read"), None);
    }

    #[test]
    fn the_oldest_go() {
        let replies = Replies::default();
        let key = |xid| CallKey::of(NFS_PROGRAM, 9, xid, b"").unwrap();
        for xid in 0..=KEPT_MAX as u32 {
            replies.keep(key(xid), b"x");
        }
        assert_eq!(replies.find(key(0)), None);
        assert!(replies.find(key(1)).is_some());
    }
}
