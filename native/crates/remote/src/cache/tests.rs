use std::os::unix::fs::{FileExt, MetadataExt};

use super::*;

const BLOCK: usize = BLOCK_BYTES as usize;

fn block(seed: u8) -> Vec<u8> {
    (0..BLOCK)
        .map(|at| (at as u8).wrapping_mul(31) ^ seed)
        .collect()
}

fn holds(blob: &CachedBlob, number: u64, seed: u8) -> bool {
    let mut content = vec![0; BLOCK];
    let is_there = blob.get(number, &mut content);
    assert!(
        !is_there || content == block(seed),
        "block {number} came back wrong"
    );
    is_there
}

fn open(folder: &Path, blocks: u64) -> Cache {
    Cache::open(folder, blocks * BLOCK as u64, 0).unwrap()
}

fn stored_bytes(folder: &Path) -> u64 {
    let files = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap());
    let data = files.filter(|file| {
        file.path()
            .extension()
            .is_some_and(|extension| extension == "data")
    });
    data.map(|file| file.metadata().unwrap().blocks() * 512)
        .sum()
}

#[test]
fn the_limit_holds_and_what_is_read_stays() {
    let folder = tempfile::tempdir().unwrap();
    let cache = open(folder.path(), 8);
    let one = cache.blob([1; 32], 100 * BLOCK as u64).unwrap();
    let two = cache.blob([2; 32], 100 * BLOCK as u64).unwrap();
    for number in 0..50 {
        cache.put(&one, number, &block(number as u8));
        cache.put(&two, number, &block(number as u8));
        // Read all the time: never cold.
        assert!(holds(&one, 0, 0), "after {number}");
        assert!(cache.stats().used_bytes <= 8 * BLOCK as u64);
    }
    assert_eq!(cache.stats().evicted_blocks, 92);
    assert!(
        stored_bytes(folder.path()) <= 8 * BLOCK as u64,
        "holes are punched"
    );
}

#[test]
fn eviction_under_open_readers_never_shows_wrong_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let cache = open(folder.path(), 4);
    let blob = cache.blob([1; 32], 16 * BLOCK as u64).unwrap();
    std::thread::scope(|scope| {
        for reader in 0..4_u64 {
            let (cache, blob) = (&cache, &blob);
            scope.spawn(move || {
                for round in 0..300 {
                    let number = (round * 7 + reader * 3) % 16;
                    if !holds(blob, number, number as u8) {
                        cache.put(blob, number, &block(number as u8));
                    }
                }
            });
        }
    });
    assert!(
        cache.stats().used_bytes <= (4 + 4) * BLOCK as u64,
        "each thread may be one block late"
    );
    assert_eq!(cache.stats().damaged_blocks, 0, "a race is no damage");
}

/// Changes a data file and its map.
type Spoil = fn(&Path, &Path);

/// Whatever a crash leaves of the two files, the next process reads right bytes or
/// none.
#[test]
fn any_state_of_the_files_costs_blocks_only() {
    let spoil: [(&str, Spoil); 8] = [
        ("data gone", |data, _| std::fs::remove_file(data).unwrap()),
        ("map gone", |_, map| std::fs::remove_file(map).unwrap()),
        ("data cut", |data, _| truncate(data, BLOCK as u64 + 100)),
        ("map cut in an entry", |_, map| truncate(map, 64 + 8 + 3)),
        ("map cut in its header", |_, map| truncate(map, 20)),
        ("data all holes", |data, _| {
            truncate(data, 0);
            truncate(data, 4 * BLOCK as u64);
        }),
        ("torn entry", |_, map| overwrite(map, 64 + 4, &[0xff; 4])),
        ("another blob's header", |_, map| {
            overwrite(map, 30, &[9; 8])
        }),
    ];
    for (name, action) in spoil {
        let folder = tempfile::tempdir().unwrap();
        let cache = open(folder.path(), 100);
        let blob = cache.blob([1; 32], 4 * BLOCK as u64).unwrap();
        (0..4).for_each(|number| cache.put(&blob, number, &block(number as u8)));
        drop((blob, cache));
        let stem = folder.path().join(hex(&[1; 32]));
        action(&stem.with_extension("data"), &stem.with_extension("map"));
        let cache = open(folder.path(), 100);
        let blob = cache.blob([1; 32], 4 * BLOCK as u64).unwrap();
        for number in 0..4 {
            if !holds(&blob, number, number as u8) {
                cache.put(&blob, number, &block(number as u8));
            }
            assert!(
                holds(&blob, number, number as u8),
                "{name}: block {number} is kept anew"
            );
        }
        assert_eq!(cache.stats().used_bytes, 4 * BLOCK as u64, "{name}");
    }
}

fn truncate(path: &Path, length: u64) {
    File::options()
        .write(true)
        .open(path)
        .unwrap()
        .set_len(length)
        .unwrap();
}

fn overwrite(path: &Path, offset: u64, bytes: &[u8]) {
    File::options()
        .write(true)
        .open(path)
        .unwrap()
        .write_all_at(bytes, offset)
        .unwrap();
}

#[test]
fn a_smaller_limit_is_met_at_the_start_and_foreign_files_stay() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("notes.txt"), "mine").unwrap();
    let cache = open(folder.path(), 100);
    let blob = cache.blob([1; 32], 50 * BLOCK as u64).unwrap();
    (0..50).for_each(|number| cache.put(&blob, number, &block(number as u8)));
    drop((blob, cache));
    let cache = open(folder.path(), 10);
    assert_eq!(cache.stats().used_bytes, 10 * BLOCK as u64);
    assert!(stored_bytes(folder.path()) <= 10 * BLOCK as u64);
    drop(cache);
    drop(open(folder.path(), 0));
    drop(open(folder.path(), 0));
    let mut names: Vec<_> = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(
        names,
        ["lock", "notes.txt"],
        "blobs without blocks leave no files"
    );
}

#[test]
fn the_last_block_may_be_short_and_sizes_must_agree() {
    let folder = tempfile::tempdir().unwrap();
    let cache = open(folder.path(), 10);
    let blob = cache.blob([1; 32], BLOCK as u64 + 5).unwrap();
    cache.put(&blob, 1, b"abcde");
    let mut content = [0; 5];
    assert!(blob.get(1, &mut content));
    assert_eq!(&content, b"abcde");
    assert!(cache.blob([1; 32], 7).is_err());
}

#[test]
fn a_cache_shrinks_when_asked_to() {
    let folder = tempfile::tempdir().unwrap();
    let cache = open(folder.path(), 100);
    let blob = cache.blob([1; 32], 50 * BLOCK as u64).unwrap();
    (0..20).for_each(|number| cache.put(&blob, number, &block(number as u8)));
    assert!(holds(&blob, 7, 7));
    assert_eq!(cache.shrink(10 * BLOCK as u64 - 1), 10 * BLOCK as u64);
    assert!(holds(&blob, 7, 7), "what was read stays longest");
    assert!(stored_bytes(folder.path()) <= 10 * BLOCK as u64);
    assert_eq!(cache.shrink(u64::MAX), 10 * BLOCK as u64);
    assert_eq!(cache.stats().used_bytes, 0);
}

/// A file system of 1 MiB, gone in the end.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn mount() -> SmallDisk {
        assert!(
            nix::unistd::geteuid().is_root(),
            "this test needs root (it mounts a small tmpfs)"
        );
        let folder = tempfile::tempdir().unwrap();
        let flags = nix::mount::MsFlags::empty();
        let (none, options) = (None::<&str>, Some("size=1m"));
        nix::mount::mount(none, folder.path(), Some("tmpfs"), flags, options).unwrap();
        SmallDisk(folder)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = nix::mount::umount2(self.0.path(), nix::mount::MntFlags::MNT_DETACH);
    }
}

#[test]
fn a_full_disk_keeps_nothing_and_fails_nothing() {
    let disk = SmallDisk::mount();
    let cache = open(disk.0.path(), 1000);
    let blob = cache.blob([1; 32], 100 * BLOCK as u64).unwrap();
    for number in 0..100 {
        cache.put(&blob, number, &block(number as u8));
    }
    let there = |number: &u64| holds(&blob, *number, *number as u8);
    let kept = (0..100).filter(there).count() as u64;
    assert!((5..16).contains(&kept), "{kept} blocks were kept on 1 MiB");
    let stats = cache.stats();
    assert_eq!(stats.used_bytes, kept * BLOCK as u64);
    assert_eq!(stats.unkept_blocks, 100 - kept);
}

#[test]
fn a_nearly_full_disk_is_left_as_it_is() {
    let disk = SmallDisk::mount();
    let cache = Cache::open(disk.0.path(), 1000 * BLOCK as u64, 2 << 20).unwrap();
    let blob = cache.blob([1; 32], 100 * BLOCK as u64).unwrap();
    cache.put(&blob, 0, &block(0));
    assert_eq!(cache.stats().used_bytes, 0, "nothing gives way yet");
    drop((blob, cache));
    let cache = Cache::open(disk.0.path(), 1000 * BLOCK as u64, 0).unwrap();
    let blob = cache.blob([1; 32], 100 * BLOCK as u64).unwrap();
    (0..4).for_each(|number| cache.put(&blob, number, &block(number as u8)));
    drop((blob, cache));
    let cache = Cache::open(disk.0.path(), 1000 * BLOCK as u64, 2 << 20).unwrap();
    let blob = cache.blob([1; 32], 100 * BLOCK as u64).unwrap();
    for number in 4..40 {
        cache.put(&blob, number, &block(number as u8));
        assert!(holds(&blob, number, number as u8));
        assert_eq!(cache.stats().used_bytes, 4 * BLOCK as u64);
    }
}
