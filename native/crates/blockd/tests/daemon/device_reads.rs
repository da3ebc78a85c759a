//! Reads of devices: the same bytes whichever way they come, from the page cache or not,
//! in one piece of a layer or in many, alone or many at a time.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::devices::{direct, open, start};
use crate::rig::{content, Daemon};
use crate::MIB;

const BLOCK_BYTES: usize = 4096;
const SIZE: usize = 16 * MIB as usize;
const READERS: usize = 8;

#[repr(align(4096))]
struct Aligned([u8; 64 * BLOCK_BYTES]);

fn read(file: &File, offset: usize, length: usize) -> Vec<u8> {
    let mut bytes = Box::new(Aligned([0xee; 64 * BLOCK_BYTES]));
    let (place, _) = bytes.0.split_at_mut(length);
    file.read_exact_at(place, offset as u64).unwrap();
    place.to_vec()
}

/// A layer of random bytes with a hole, upon another one that shows through it, and what
/// both are together.
fn layers(daemon: &Daemon) -> (Vec<PathBuf>, Vec<u8>) {
    let mut all = content(1, SIZE);
    let mut paths = Vec::new();
    for (seed, from, to) in [(1, 0, SIZE), (2, 5, 9), (3, 7, 8)] {
        let (from, to) = match seed {
            1 => (from, to),
            _ => (from * MIB as usize + 512, to * MIB as usize - 1024),
        };
        let id = format!("make-{seed}");
        let disk = direct(&open(daemon, &id, &paths, Some(SIZE as u64)));
        drop(disk);
        let stack = daemon.ok("GET", &format!("/v1/stacks/{id}"), &json!(null));
        let device = File::options()
            .write(true)
            .open(stack["path"].as_str().unwrap())
            .unwrap();
        let new = content(seed, to - from);
        device.write_all_at(&new, from as u64).unwrap();
        device.sync_all().unwrap();
        all[from..to].copy_from_slice(&new);
        let body = json!({ "upper": daemon.upper(&format!("unused-{seed}")) });
        let sealed = daemon.ok("POST", &format!("/v1/stacks/{id}/seal"), &body);
        paths.push(PathBuf::from(sealed["layer"]["path"].as_str().unwrap()));
        drop(device);
        daemon.ok(
            "DELETE",
            &format!("/v1/stacks/{id}?force=true"),
            &json!(null),
        );
    }
    (paths, all)
}

fn forget(layer: &Path) {
    let file = File::open(layer).unwrap();
    file.sync_all().unwrap();
    // SAFETY: takes numbers and an open descriptor.
    let code =
        unsafe { nix::libc::posix_fadvise(file.as_raw_fd(), 0, 0, nix::libc::POSIX_FADV_DONTNEED) };
    assert_eq!(code, 0);
}

fn check(device: &Path, expected: &[u8]) {
    std::thread::scope(|scope| {
        for reader in 0..READERS {
            scope.spawn(move || {
                let disk = direct(device);
                for step in 0..512 {
                    let length = [1, 2, 7, 64][step % 4] * BLOCK_BYTES;
                    let blocks = (SIZE - length) / BLOCK_BYTES;
                    let offset = (reader + step * 2741) % blocks * BLOCK_BYTES;
                    let found = read(&disk, offset, length);
                    assert!(
                        found == expected[offset..offset + length],
                        "{offset} {length}"
                    );
                }
            });
        }
    });
}

#[test]
fn reads_are_the_same_from_the_page_cache_and_from_the_disk() {
    let Some(daemon) = start() else { return };
    let (lowers, mut expected) = layers(&daemon);
    let device = open(&daemon, "disk", &lowers, Some(SIZE as u64));
    for _ in 0..3 {
        lowers.iter().for_each(|layer| forget(layer));
        check(&device, &expected);
    }
    check(&device, &expected); // all of it is in the page cache now
    let disk = File::options().write(true).open(&device).unwrap();
    let new = content(9, 3 * MIB as usize);
    disk.write_all_at(&new, 6 * MIB + 4096).unwrap();
    disk.sync_all().unwrap();
    let from = 6 * MIB as usize + 4096;
    expected[from..from + new.len()].copy_from_slice(&new);
    check(&device, &expected);
    // Buffers that an idle device gave back are filled anew.
    std::thread::sleep(std::time::Duration::from_millis(1500));
    check(&device, &expected);
}

#[test]
fn a_layer_that_was_cut_short_is_an_error_and_no_other_bytes() {
    let Some(daemon) = start() else { return };
    let (lowers, expected) = layers(&daemon);
    let device = open(&daemon, "disk", &lowers[..1], Some(SIZE as u64));
    let disk = direct(&device);
    assert!(read(&disk, SIZE / 2, BLOCK_BYTES) == content(1, SIZE)[SIZE / 2..][..BLOCK_BYTES]);
    let layer = File::options().write(true).open(&lowers[0]).unwrap();
    layer.set_len(MIB).unwrap();
    let mut bytes = Box::new(Aligned([0; 64 * BLOCK_BYTES]));
    let error = disk.read_exact_at(&mut bytes.0[..BLOCK_BYTES], SIZE as u64 / 2);
    assert_eq!(error.unwrap_err().raw_os_error(), Some(nix::libc::EIO));
    assert!(expected.len() == SIZE);
    daemon.ok("GET", "/v1/info", &json!(null));
}
