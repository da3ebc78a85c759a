//! Memory capture: this test process plays the VMM.

use std::fs::OpenOptions;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::ptr::NonNull;

use nix::sys::mman::{madvise, mmap, mprotect, munmap, MapFlags, MmapAdvise, ProtFlags};
use serde_json::{json, Value};

use crate::rig::{content, Daemon};

const PAGE: usize = 4096;

/// A private, writable mapping of a stack's file, as a VMM makes it.
struct Memory {
    address: NonNull<std::ffi::c_void>,
    length: usize,
}

impl Memory {
    fn map(path: &PathBuf, length: usize) -> Memory {
        let file = OpenOptions::new().read(true).open(path).unwrap();
        let size = NonZeroUsize::new(length).unwrap();
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a fresh mapping at an address the kernel chooses; it is used
        // through `bytes` only and unmapped once, in drop.
        let address = unsafe { mmap(None, size, access, MapFlags::MAP_PRIVATE, &file, 0) };
        Memory {
            address: address.unwrap(),
            length,
        }
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping covers `length` bytes, is readable and writable,
        // and `&mut self` makes the slice the only one.
        unsafe { std::slice::from_raw_parts_mut(self.address.as_ptr().cast(), self.length) }
    }

    /// Splits the mapping in three for the kernel, without changing its use.
    fn split(&mut self, from: usize, length: usize) {
        // SAFETY: the range lies inside the mapping; read access stays, and the
        // caller does not write to it afterwards.
        unsafe {
            let start = self.address.byte_add(from);
            mprotect(start, length, ProtFlags::PROT_READ).unwrap();
        }
    }
}

impl Memory {
    /// Splits the mapping in three for the kernel; it stays readable and writable.
    fn advise(&mut self, from: usize, length: usize) {
        // SAFETY: the range lies inside the mapping; the advice changes no content.
        unsafe {
            let start = self.address.byte_add(from);
            madvise(start, length, MmapAdvise::MADV_RANDOM).unwrap();
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping made by `map`, which nothing uses any more.
        unsafe { munmap(self.address, self.length) }.unwrap();
    }
}

fn fill(daemon: &Daemon, stack: &str, layers: &[PathBuf]) -> Value {
    let body = json!({ "pid": std::process::id(), "stack": stack, "layers": layers });
    daemon.ok("POST", "/v1/fills", &body)
}

fn capture(daemon: &Daemon, stack: &str, output: &PathBuf) -> Value {
    let body = json!({
        "pid": std::process::id(), "stack": stack, "output": output, "sync": false,
    });
    daemon.ok("POST", "/v1/captures", &body)
}

#[test]
fn generations_of_memory_read_back_exactly() {
    let daemon = Daemon::start();
    let length = 64 << 20;
    let mut lowers: Vec<PathBuf> = Vec::new();
    let mut expected = vec![0_u8; length];
    for generation in 0..5_usize {
        let id = format!("memory-{generation}");
        let body = json!({ "lowers": lowers, "virtual_size_bytes": length, "cache": "page" });
        daemon.ok("PUT", &format!("/v1/stacks/{id}"), &body);
        let mut memory = Memory::map(&daemon.file(&id), length);
        assert!(memory.bytes() == expected, "generation {generation}");
        for step in 0..800 {
            let page = (step * 37 + generation * 11) % (length / PAGE);
            let bytes = content((step + generation) as u32, 100);
            let at = page * PAGE + (step * 13) % (PAGE - 100);
            memory.bytes()[at..at + 100].copy_from_slice(&bytes);
            expected[at..at + 100].copy_from_slice(&bytes);
        }
        // Zero some pages that hold data, and touch one that is zero already.
        for page in (0..40).map(|step| (step * 37 * 3 + generation * 11) % (length / PAGE)) {
            memory.bytes()[page * PAGE..(page + 1) * PAGE].fill(0);
            expected[page * PAGE..(page + 1) * PAGE].fill(0);
        }
        memory.split(length / 2, 8 * PAGE);
        let output = daemon.path(&format!("layer-{generation}"));
        let reply = capture(&daemon, &id, &output);
        let count = |name: &str| reply[name].as_u64().unwrap();
        assert!(count("zero_pages") >= 40 && count("pages") <= 840);
        assert_eq!(count("pages"), count("zero_pages") + count("stored_pages"));
        assert_eq!(
            count("size_bytes"),
            std::fs::metadata(&output).unwrap().len()
        );
        assert!(count("size_bytes") < (count("stored_pages") + 20) * PAGE as u64);
        lowers.push(output);
        drop(memory);
        daemon.ok("DELETE", &format!("/v1/stacks/{id}"), &Value::Null);
    }
    daemon.ok("PUT", "/v1/stacks/all", &json!({ "lowers": lowers }));
    assert!(std::fs::read(daemon.file("all")).unwrap() == expected);
}

#[test]
fn zero_pages_are_recorded_only_where_they_hide_something() {
    let daemon = Daemon::start();
    let length = 4 << 20;
    let body = json!({ "virtual_size_bytes": length, "cache": "page" });
    daemon.ok("PUT", "/v1/stacks/zero", &body);
    let mut memory = Memory::map(&daemon.file("zero"), length);
    for page in 0..length / PAGE {
        memory.bytes()[page * PAGE] = 0;
    }
    let reply = capture(&daemon, "zero", &daemon.path("layer"));
    assert_eq!(reply["zero_pages"], length / PAGE);
    assert_eq!(reply["stored_pages"], 0);
    assert_eq!(reply["size_bytes"], 8192, "header and trailer only");
}

#[test]
fn an_unchanged_mapping_gives_an_empty_layer() {
    let daemon = Daemon::start();
    let body = json!({ "virtual_size_bytes": 1 << 20, "cache": "page" });
    daemon.ok("PUT", "/v1/stacks/zero", &body);
    let mut memory = Memory::map(&daemon.file("zero"), 1 << 20);
    assert_eq!(memory.bytes()[5000], 0);
    let reply = capture(&daemon, "zero", &daemon.path("layer"));
    assert_eq!(
        (&reply["pages"], &reply["size_bytes"]),
        (&json!(0), &json!(8192))
    );
}

#[test]
fn wrong_targets_are_named() {
    let daemon = Daemon::start();
    let body = json!({ "virtual_size_bytes": 1 << 20, "cache": "page" });
    daemon.ok("PUT", "/v1/stacks/zero", &body);
    let output = daemon.path("layer");
    let mut request = json!({ "pid": std::process::id(), "stack": "zero", "output": output });
    let not_mapped = daemon.fails(400, "POST", "/v1/captures", &request);
    assert_eq!(not_mapped, "invalid_input");
    request["stack"] = json!("absent");
    assert_eq!(
        daemon.fails(404, "POST", "/v1/captures", &request),
        "not_found"
    );
    request["stack"] = json!("zero");
    // Above the largest process id the kernel gives out.
    request["pid"] = json!(i32::MAX);
    assert_eq!(
        daemon.fails(404, "POST", "/v1/captures", &request),
        "not_found"
    );
    drop(daemon.disk("disk", &[], Some(1 << 20)));
    request["stack"] = json!("disk");
    assert_eq!(
        daemon.fails(400, "POST", "/v1/captures", &request),
        "invalid_input"
    );
    request["stack"] = json!("zero");
    request["pid"] = json!(std::process::id());
    let first = Memory::map(&daemon.file("zero"), 1 << 20);
    let second = Memory::map(&daemon.file("zero"), 1 << 20);
    assert_eq!(
        daemon.fails(400, "POST", "/v1/captures", &request),
        "invalid_input"
    );
    drop((first, second));
    assert!(!output.exists() && !daemon.path("layer.tmp").exists());
}

/// A memory that is filled reads, and is captured, like one that maps all layers.
#[test]
fn filled_memory_is_that_of_all_layers() {
    let daemon = Daemon::start();
    let length = 8 << 20;
    let mut lowers: Vec<PathBuf> = Vec::new();
    let mut expected = vec![0_u8; length];
    for (generation, strides) in [(0_usize, 3_usize), (1, 7), (2, 5)] {
        let id = format!("memory-{generation}");
        let body = json!({ "lowers": lowers, "virtual_size_bytes": length, "cache": "page" });
        daemon.ok("PUT", &format!("/v1/stacks/{id}"), &body);
        let mut memory = Memory::map(&daemon.file(&id), length);
        for page in (generation..length / PAGE).step_by(strides) {
            // Every other page is emptied, whatever it held.
            let bytes = match page % 2 {
                0 => vec![0; PAGE],
                _ => content((page * 3 + generation) as u32, PAGE),
            };
            memory.bytes()[page * PAGE..(page + 1) * PAGE].copy_from_slice(&bytes);
            expected[page * PAGE..(page + 1) * PAGE].copy_from_slice(&bytes);
        }
        let output = daemon.path(&format!("layer-{generation}"));
        capture(&daemon, &id, &output);
        lowers.push(output);
    }
    for own in 0..3 {
        let (below, layers) = lowers.split_at(own);
        let id = format!("below-{own}");
        let body = json!({ "lowers": below, "virtual_size_bytes": length, "cache": "page" });
        daemon.ok("PUT", &format!("/v1/stacks/{id}"), &body);
        let mut memory = Memory::map(&daemon.file(&id), length);
        // In three pieces for the kernel, as a VMM may have it.
        memory.advise(length / 2, 64 * PAGE);
        let reply = fill(&daemon, &id, layers);
        assert!(reply["bytes"].as_u64().unwrap() > 0);
        assert!(memory.bytes() == expected, "{own} layers below");
        let output = daemon.path(&format!("again-{own}"));
        capture(&daemon, &id, &output);
        let all = [below, &[output]].concat();
        let body = json!({ "lowers": all, "virtual_size_bytes": length, "cache": "page" });
        daemon.ok("PUT", &format!("/v1/stacks/all-{own}"), &body);
        assert!(std::fs::read(daemon.file(&format!("all-{own}"))).unwrap() == expected);
    }
}

#[test]
fn fills_that_cannot_be_are_named() {
    let daemon = Daemon::start();
    let length = 1 << 20;
    let body = json!({ "virtual_size_bytes": length, "cache": "page" });
    daemon.ok("PUT", "/v1/stacks/zero", &body);
    let mut memory = Memory::map(&daemon.file("zero"), length);
    memory.bytes()[length - PAGE..].fill(7);
    let layer = daemon.path("layer");
    capture(&daemon, "zero", &layer);
    drop(memory);
    let request = |stack: &str, pid: u32, layer: &PathBuf| json!({ "pid": pid, "stack": stack, "layers": [layer] });
    let own = std::process::id();
    let refused = |status, body: &Value| daemon.fails(status, "POST", "/v1/fills", body);
    assert_eq!(refused(400, &request("zero", own, &layer)), "invalid_input");
    // Half of the file only: the last page has no place.
    let half = Memory::map(&daemon.file("zero"), length / 2);
    assert_eq!(refused(400, &request("zero", own, &layer)), "invalid_input");
    drop(half);
    let _memory = Memory::map(&daemon.file("zero"), length);
    assert_eq!(refused(404, &request("absent", own, &layer)), "not_found");
    assert_eq!(
        refused(404, &request("zero", i32::MAX as u32, &layer)),
        "not_found"
    );
    let relative = PathBuf::from("layer");
    assert_eq!(
        refused(400, &request("zero", own, &relative)),
        "invalid_input"
    );
    let damaged = daemon.path("damaged");
    std::fs::write(&damaged, [1; 20_000]).unwrap();
    assert_eq!(refused(500, &request("zero", own, &damaged)), "corrupt");
    daemon.ok("POST", "/v1/fills", &request("zero", own, &layer));
}
