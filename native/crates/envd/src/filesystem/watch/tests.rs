//! Whole watches against the real kernel.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::messages::EventKind::{self, Chmod, Create, Remove, Rename, Write as Written};
use super::registry::Watchers;
use super::tracker::{Failure, Progress, Target, Tracker};
use super::watcher;
use crate::connect::Code;
use crate::limits::{POLLED_WATCHER_IDLE_MAX, WATCHED_FOLDERS_MAX};
use crate::users::User;

/// A folder of its own, removed at the end.
pub struct Scratch {
    pub path: PathBuf,
}

impl Scratch {
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("envd-watch-{name}-{}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Self { path }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    fn target(&self, recursive: bool) -> Target {
        Target {
            path: self.path.clone(),
            recursive,
            include_entry: false,
            allow_network: false,
        }
    }

    fn watch(&self) -> Watch {
        let used = Arc::new(AtomicUsize::new(0));
        let tracker = Tracker::open(self.target(true), used.clone()).unwrap();
        Watch { tracker, used }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _gone = fs::remove_dir_all(&self.path);
    }
}

type Events = Vec<(EventKind, String)>;

struct Watch {
    tracker: Tracker,
    used: Arc<AtomicUsize>,
}

impl Watch {
    /// All events so far, and how the watch stands.
    fn advance(&mut self) -> (Events, Progress) {
        let mut all = Vec::new();
        loop {
            let (events, progress) = self.tracker.advance();
            all.extend(events.into_iter().map(|event| (event.kind(), event.name)));
            if !matches!(progress, Progress::More) {
                return (all, progress);
            }
        }
    }

    fn events(&mut self) -> Events {
        let (events, progress) = self.advance();
        assert!(matches!(progress, Progress::Idle), "{progress:?}");
        events
    }

    fn folders(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }
}

fn expected(events: &[(EventKind, &str)]) -> Events {
    let events = events.iter();
    events
        .map(|(kind, name)| (*kind, (*name).to_owned()))
        .collect()
}

fn me() -> User {
    User {
        name: "root".into(),
        uid: 0,
        gid: 0,
        groups: vec![0],
        home: "/".into(),
    }
}

#[test]
fn an_uploaded_file_is_three_events_and_another_upload_writes_only() {
    let scratch = Scratch::new("upload");
    let info = fs::metadata(&scratch.path).unwrap();
    let owner = User {
        uid: std::os::unix::fs::MetadataExt::uid(&info),
        gid: std::os::unix::fs::MetadataExt::gid(&info),
        ..me()
    };
    let mut watch = scratch.watch();
    let upload = || {
        let path = scratch.at("new");
        let mut file = crate::files::upload::create(&path, &owner, &BTreeMap::new(), 0).unwrap();
        file.write_all(b"text").unwrap();
    };
    upload();
    let events = [(Create, "new"), (Chmod, "new"), (Written, "new")];
    assert_eq!(watch.events(), expected(&events));
    upload();
    // Cutting it short and writing it are the same to the kernel, and it may join them.
    let events = watch.events();
    assert!(!events.is_empty());
    assert!(events.iter().all(|event| *event == (Written, "new".into())));
}

#[test]
fn folders_made_and_filled_before_anyone_looked() {
    let scratch = Scratch::new("filled");
    let mut watch = scratch.watch();
    fs::create_dir_all(scratch.at("a/b")).unwrap();
    fs::write(scratch.at("a/b/full"), "x").unwrap();
    fs::write(scratch.at("a/empty"), "").unwrap();
    std::os::unix::fs::symlink("/etc", scratch.at("a/link")).unwrap();
    let first = [
        (Create, "a"),
        (Create, "a/b"),
        (Create, "a/empty"),
        (Create, "a/link"),
        (Create, "a/b/full"),
        (Written, "a/b/full"),
    ];
    assert_eq!(watch.events(), expected(&first));
    assert_eq!(watch.folders(), 3);
    fs::write(scratch.at("a/b/full"), "longer").unwrap();
    fs::remove_file(scratch.at("a/b/full")).unwrap();
    fs::remove_dir(scratch.at("a/b")).unwrap();
    let then = watch.events();
    assert_eq!(then.first(), Some(&(Written, "a/b/full".into())));
    assert_eq!(
        then[then.len() - 2..],
        expected(&[(Remove, "a/b/full"), (Remove, "a/b")])
    );
    assert_eq!(watch.folders(), 2);
    drop(watch.tracker);
    assert_eq!(watch.used.load(Ordering::Relaxed), 0);
}

#[test]
fn moves_within_keep_the_watch_and_change_the_names() {
    let scratch = Scratch::new("within");
    fs::create_dir_all(scratch.at("a/b")).unwrap();
    fs::create_dir(scratch.at("c")).unwrap();
    let mut watch = scratch.watch();
    fs::rename(scratch.at("a"), scratch.at("c/x")).unwrap();
    fs::rename(scratch.at("c/x"), scratch.at("y")).unwrap();
    fs::write(scratch.at("y/b/f"), "").unwrap();
    fs::rename(scratch.at("y/b/f"), scratch.at("y/g")).unwrap();
    let events = [
        (Rename, "a"),
        (Create, "c/x"),
        (Rename, "c/x"),
        (Create, "y"),
        (Create, "y/b/f"),
        (Rename, "y/b/f"),
        (Create, "y/g"),
    ];
    assert_eq!(watch.events(), expected(&events));
    assert_eq!(watch.folders(), 4);
}

#[test]
fn moves_out_and_in() {
    let scratch = Scratch::new("inside");
    let outside = Scratch::new("outside");
    fs::create_dir_all(scratch.at("a/b")).unwrap();
    let mut watch = scratch.watch();
    fs::rename(scratch.at("a"), outside.at("a")).unwrap();
    fs::write(outside.at("a/b/unseen"), "").unwrap();
    fs::create_dir(outside.at("a/new")).unwrap();
    assert_eq!(watch.events(), expected(&[(Rename, "a")]));
    assert_eq!(watch.folders(), 1);
    fs::rename(outside.at("a"), scratch.at("back")).unwrap();
    let events = [
        (Create, "back"),
        (Create, "back/b"),
        (Create, "back/new"),
        (Create, "back/b/unseen"),
    ];
    assert_eq!(watch.events(), expected(&events));
    fs::write(scratch.at("back/new/f"), "").unwrap();
    assert_eq!(watch.events(), expected(&[(Create, "back/new/f")]));
}

#[test]
fn a_name_taken_over_while_the_first_folder_moves_on() {
    let scratch = Scratch::new("takeover");
    let mut watch = scratch.watch();
    fs::create_dir(scratch.at("a")).unwrap();
    fs::write(scratch.at("a/one"), "").unwrap();
    fs::rename(scratch.at("a"), scratch.at("b")).unwrap();
    fs::create_dir(scratch.at("a")).unwrap();
    fs::write(scratch.at("a/two"), "").unwrap();
    let events = [
        (Create, "a"),
        (Rename, "a"),
        (Create, "b"),
        (Create, "b/one"),
        (Create, "a"),
        (Create, "a/two"),
    ];
    assert_eq!(watch.events(), expected(&events));
    fs::write(scratch.at("a/3"), "").unwrap();
    fs::write(scratch.at("b/4"), "").unwrap();
    let later = [(Create, "a/3"), (Create, "b/4")];
    assert_eq!(watch.events(), expected(&later));
    for _ in 0..3 {
        fs::create_dir(scratch.at("t")).unwrap();
        fs::remove_dir(scratch.at("t")).unwrap();
    }
    let churn = [(Create, "t"), (Remove, "t")].repeat(3);
    assert_eq!(watch.events(), expected(&churn));
}

/// Trees are made while the watch reads, so its folders are caught at any stage.
#[test]
fn nothing_is_lost_or_doubled_in_a_race() {
    let scratch = Scratch::new("race");
    let mut watch = scratch.watch();
    let root = scratch.path.clone();
    const ROUNDS: usize = 200;
    let maker = std::thread::spawn(move || {
        for round in 0..ROUNDS {
            let folder = root.join(format!("{round}/b/c"));
            fs::create_dir_all(&folder).unwrap();
            for file in ["one", "two"] {
                fs::write(folder.join(file), "text").unwrap();
            }
        }
    });
    let mut seen: HashMap<(EventKind, String), usize> = HashMap::new();
    let mut order = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(30);
    while !maker.is_finished() {
        assert!(Instant::now() < deadline);
        order.extend(watch.events());
    }
    maker.join().unwrap();
    order.extend(watch.events());
    for event in &order {
        *seen.entry(event.clone()).or_default() += 1;
    }
    for round in 0..ROUNDS {
        for name in ["", "/b", "/b/c", "/b/c/one", "/b/c/two"] {
            assert_eq!(seen.get(&(Create, format!("{round}{name}"))), Some(&1));
        }
        for name in ["one", "two"] {
            assert!(seen.contains_key(&(Written, format!("{round}/b/c/{name}"))));
        }
    }
    let place = |name: &str| order.iter().position(|(_, other)| other == name).unwrap();
    for round in 0..ROUNDS {
        let [a, b, c, f] =
            ["", "/b", "/b/c", "/b/c/one"].map(|name| place(&format!("{round}{name}")));
        assert!(a < b && b < c && c < f, "round {round}");
    }
}

#[test]
fn the_watched_folder_itself() {
    let scratch = Scratch::new("itself");
    let top = scratch.at("top");
    let open = || {
        fs::create_dir(&top).unwrap();
        let mut target = scratch.target(true);
        target.path = top.clone();
        target.include_entry = true;
        let used = Arc::new(AtomicUsize::new(0));
        let tracker = Tracker::open(target, used.clone()).unwrap();
        Watch { tracker, used }
    };
    let mut watch = open();
    let mode = |mode| std::os::unix::fs::PermissionsExt::from_mode(mode);
    fs::set_permissions(&top, mode(0o700)).unwrap();
    let (events, _) = watch.tracker.advance();
    assert_eq!((events[0].kind(), events[0].name.as_str()), (Chmod, "."));
    let entry = events[0].entry.as_ref().unwrap();
    assert_eq!(
        (PathBuf::from(&entry.path), entry.mode),
        (top.clone(), 0o700)
    );
    fs::remove_dir(&top).unwrap();
    let (events, progress) = watch.advance();
    assert_eq!(events, expected(&[(Remove, ".")]));
    assert!(matches!(progress, Progress::Over), "{progress:?}");

    let mut watch = open();
    fs::rename(&top, scratch.at("elsewhere")).unwrap();
    let (events, progress) = watch.advance();
    assert_eq!(events, expected(&[(Rename, ".")]));
    assert!(matches!(progress, Progress::Over), "{progress:?}");
}

#[test]
fn an_overflow_of_the_kernel_queue_is_an_error() {
    let scratch = Scratch::new("overflow");
    let limit: usize = fs::read_to_string("/proc/sys/fs/inotify/max_queued_events")
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    let mut watch = scratch.watch();
    // Two names in turn, so that the kernel cannot join the records.
    for round in 0..=limit / 2 {
        fs::write(scratch.at("a"), "x").unwrap();
        fs::write(scratch.at("b"), "x").unwrap();
        assert!(round <= limit);
    }
    let (events, progress) = watch.advance();
    assert!(events.len() >= limit - 1);
    let Progress::Failed(failure @ Failure::Overflow) = progress else {
        panic!("{progress:?}");
    };
    assert_eq!(failure.error().code, Code::ResourceExhausted);
}

#[test]
fn folders_are_limited_at_the_start_and_later() {
    let scratch = Scratch::new("folders");
    fs::create_dir(scratch.at("a")).unwrap();
    let open = |left| {
        let used = Arc::new(AtomicUsize::new(WATCHED_FOLDERS_MAX - left));
        (Tracker::open(scratch.target(true), used.clone()), used)
    };
    let (refused, used) = open(1);
    let error = refused.err().unwrap();
    assert_eq!(error.code, Code::ResourceExhausted);
    assert_eq!(used.load(Ordering::Relaxed), WATCHED_FOLDERS_MAX - 1);
    let (tracker, used) = open(2);
    let mut watch = Watch {
        tracker: tracker.unwrap(),
        used,
    };
    fs::create_dir(scratch.at("b")).unwrap();
    let (events, progress) = watch.advance();
    assert_eq!(events, expected(&[(Create, "b")]));
    assert!(matches!(progress, Progress::Failed(Failure::Folders)));
}

#[test]
fn refusals_name_their_cause() {
    let scratch = Scratch::new("refusals");
    fs::write(scratch.at("file"), "").unwrap();
    let open = |name: &str| {
        let mut target = scratch.target(false);
        target.path = scratch.at(name);
        Tracker::open(target, Arc::default()).err().unwrap()
    };
    assert_eq!(open("file").code, Code::InvalidArgument);
    assert_eq!(open("none").code, Code::NotFound);
    assert_eq!(open("file/below").code, Code::InvalidArgument);
}

/// Time stands still but for the sleeps, so hours pass at once.
#[tokio::test(start_paused = true)]
async fn a_polled_watcher_lives_while_it_is_polled() {
    let scratch = Scratch::new("polled");
    let watchers = Arc::new(Watchers::default());
    let start = || watcher::start(&watchers.budget, me(), scratch.target(false));
    let id = watchers.add(start().await.unwrap());
    let other = watchers.add(start().await.unwrap());
    assert_ne!(id, other);
    for round in 0..3 {
        tokio::time::sleep(POLLED_WATCHER_IDLE_MAX * 3 / 4).await;
        fs::write(scratch.at(&format!("{round}")), "x").unwrap();
        let events = watchers.poll(&id).await.unwrap();
        let kinds: Vec<_> = events.iter().map(|event| event.kind()).collect();
        assert_eq!(kinds, [Create, Written]);
    }
    assert_eq!(
        watchers.poll(&other).await.unwrap_err().code,
        Code::NotFound
    );
    tokio::time::sleep(POLLED_WATCHER_IDLE_MAX + Duration::from_secs(1)).await;
    assert_eq!(watchers.remove(&id).unwrap_err().code, Code::NotFound);
}

#[tokio::test]
async fn polling_after_the_end_of_the_folder() {
    let scratch = Scratch::new("ended");
    let watchers = Arc::new(Watchers::default());
    let mut target = scratch.target(false);
    target.path = scratch.at("d");
    fs::create_dir(&target.path).unwrap();
    let subscription = watcher::start(&watchers.budget, me(), target)
        .await
        .unwrap();
    let id = watchers.add(subscription);
    fs::remove_dir(scratch.at("d")).unwrap();
    assert_eq!(watchers.poll(&id).await.unwrap().len(), 1);
    assert_eq!(watchers.poll(&id).await.unwrap().len(), 0);
    watchers.remove(&id).unwrap();
    assert_eq!(watchers.poll(&id).await.unwrap_err().code, Code::NotFound);
}
