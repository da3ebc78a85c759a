//! Threads for work that may take long: made when needed, kept for a while, bounded.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// An idle thread ends after this time.
const IDLE_TIME: Duration = Duration::from_secs(10);

type Work = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    queue: VecDeque<Work>,
    threads: usize,
    idle: usize,
}

/// A bounded number of threads with a queue. Its length is bounded by whoever asks: the
/// kernel has so many requests under way.
pub struct Crew {
    name: &'static str,
    most: usize,
    shared: Arc<(Mutex<State>, Condvar)>,
}

impl Crew {
    /// A crew of at most so many threads; none is there yet.
    pub fn new(name: &'static str, most: usize) -> Crew {
        Crew {
            name,
            most,
            shared: Arc::default(),
        }
    }

    /// Has the work done by a thread of the crew, or by the caller when none can be made.
    pub fn run(&self, work: impl FnOnce() + Send + 'static) {
        let mut state = self.shared.0.lock();
        state.queue.push_back(Box::new(work));
        if state.idle >= state.queue.len() || state.threads >= self.most {
            drop(state);
            self.shared.1.notify_one();
            return;
        }
        state.threads += 1;
        drop(state);
        let shared = self.shared.clone();
        let thread = std::thread::Builder::new().name(self.name.to_owned());
        if let Err(error) = thread.spawn(move || serve(&shared)) {
            tracing::warn!(%error, name = self.name, "cannot start a thread");
            let mut state = self.shared.0.lock();
            state.threads -= 1;
            let work = state.queue.pop_front();
            drop(state);
            if let Some(work) = work {
                work();
            }
        }
    }
}

fn serve(shared: &(Mutex<State>, Condvar)) {
    let mut state = shared.0.lock();
    loop {
        if let Some(work) = state.queue.pop_front() {
            drop(state);
            work();
            state = shared.0.lock();
            continue;
        }
        state.idle += 1;
        let is_over = shared.1.wait_for(&mut state, IDLE_TIME).timed_out();
        state.idle -= 1;
        if is_over && state.queue.is_empty() {
            state.threads -= 1;
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn all_work_is_done_and_slow_work_holds_up_nothing_else() {
        let crew = Crew::new("test", 4);
        let (done, finished) = mpsc::channel();
        let (open, gate) = mpsc::channel::<()>();
        crew.run(move || gate.recv().unwrap());
        let count = Arc::new(AtomicUsize::new(0));
        for _ in 0..1000 {
            let (count, done) = (count.clone(), done.clone());
            crew.run(move || {
                if count.fetch_add(1, Ordering::SeqCst) == 999 {
                    done.send(()).unwrap();
                }
            });
        }
        finished.recv_timeout(Duration::from_secs(10)).unwrap();
        assert!(crew.shared.0.lock().threads <= 4);
        open.send(()).unwrap();
    }
}
