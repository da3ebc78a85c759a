//! Fetches under way: whoever needs the same bytes waits for the one that asks.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use crate::error::RemoteError;

/// What a fetch brought.
pub type Landed = Result<Arc<Vec<u8>>, RemoteError>;

/// One fetch under way.
#[derive(Default)]
pub struct Flight {
    landed: Mutex<Option<Landed>>,
    signal: Condvar,
}

impl Flight {
    /// Waits for the one that asks.
    pub fn wait(&self) -> Landed {
        let mut landed = self.landed.lock();
        loop {
            if let Some(result) = &*landed {
                return result.clone();
            }
            self.signal.wait(&mut landed);
        }
    }
}

/// All fetches of one blob, by window.
#[derive(Default)]
pub struct Flights {
    under_way: Mutex<HashMap<u64, Arc<Flight>>>,
}

/// The part one caller got.
pub enum Turn {
    /// It asks for these windows, and must `land` each.
    Ask(std::ops::Range<u64>),
    /// Somebody else asks.
    Wait(Arc<Flight>),
}

impl Flights {
    /// Takes the fetch of `window`, and of those right after it, while `wanted`.
    pub fn take(&self, window: u64, wanted: impl Fn(u64) -> bool) -> Turn {
        let mut under_way = self.under_way.lock();
        if let Some(flight) = under_way.get(&window) {
            return Turn::Wait(flight.clone());
        }
        let mut end = window;
        while end == window || (!under_way.contains_key(&end) && wanted(end)) {
            under_way.insert(end, Arc::default());
            end += 1;
        }
        Turn::Ask(window..end)
    }

    /// Tells those who wait, and lets the next caller ask.
    pub fn land(&self, window: u64, landed: Landed) {
        let Some(flight) = self.under_way.lock().remove(&window) else {
            return;
        };
        *flight.landed.lock() = Some(landed);
        flight.signal.notify_all();
    }
}
