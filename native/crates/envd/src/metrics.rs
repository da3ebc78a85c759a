//! `GET /metrics` (contract section 3.2): CPU, memory and disk of the guest.

use serde::Serialize;

use crate::app::{lock, App};
use crate::clock;

/// CPU counters of one moment, in clock ticks.
#[derive(Debug, Clone, Copy)]
pub struct CpuSample {
    busy_ticks: u64,
    total_ticks: u64,
}

/// Answer of `/metrics`. Sizes in bytes unless the name says MiB.
#[derive(Debug, Serialize)]
pub struct Metrics {
    ts: i64,
    cpu_count: usize,
    cpu_used_pct: f64,
    mem_total: u64,
    mem_used: u64,
    mem_cache: u64,
    mem_total_mib: u64,
    mem_used_mib: u64,
    disk_used: u64,
    disk_total: u64,
}

/// Begins a new interval: CPU use before now is not this sandbox's (it is the boot's, or that of the template's build).
pub fn begin(app: &App) {
    let sample = parse_cpu(&read_stat());
    *lock(&app.cpu) = Some(sample);
}

fn read_stat() -> String {
    std::fs::read_to_string("/proc/stat").unwrap_or_default()
}

/// Reads all figures. CPU use is since the last call, or else since `begin`.
pub fn read(app: &App) -> Metrics {
    let stat = read_stat();
    let sample = parse_cpu(&stat);
    let before = lock(&app.cpu).replace(sample);
    let memory = Memory::parse(&std::fs::read_to_string("/proc/meminfo").unwrap_or_default());
    let (disk_total, disk_used) = match rustix::fs::statvfs("/") {
        Ok(info) => (
            info.f_blocks * info.f_frsize,
            info.f_blocks.saturating_sub(info.f_bfree) * info.f_frsize,
        ),
        Err(_) => (0, 0),
    };
    Metrics {
        ts: clock::unix_seconds(),
        cpu_count: stat
            .lines()
            .filter(|line| line.starts_with("cpu") && !line.starts_with("cpu "))
            .count(),
        cpu_used_pct: used_percent(before, sample),
        mem_total: memory.total,
        mem_used: memory.used(),
        mem_cache: memory.cache,
        mem_total_mib: memory.total >> 20,
        mem_used_mib: memory.used() >> 20,
        disk_used,
        disk_total,
    }
}

fn parse_cpu(stat: &str) -> CpuSample {
    let first = stat.lines().next().unwrap_or("");
    // user nice system idle iowait irq softirq steal; guest time is part of user.
    let ticks: Vec<u64> = first
        .split_whitespace()
        .skip(1)
        .take(8)
        .map(|field| field.parse().unwrap_or(0))
        .collect();
    let idle = ticks.get(3).unwrap_or(&0) + ticks.get(4).unwrap_or(&0);
    let total_ticks: u64 = ticks.iter().sum();
    CpuSample {
        busy_ticks: total_ticks.saturating_sub(idle),
        total_ticks,
    }
}

fn used_percent(before: Option<CpuSample>, now: CpuSample) -> f64 {
    let before = before.unwrap_or(CpuSample {
        busy_ticks: 0,
        total_ticks: 0,
    });
    let total = now.total_ticks.saturating_sub(before.total_ticks);
    if total == 0 {
        return 0.0;
    }
    let busy = now.busy_ticks.saturating_sub(before.busy_ticks).min(total);
    (busy as f64 * 10_000.0 / total as f64).round() / 100.0
}

struct Memory {
    total: u64,
    available: u64,
    cache: u64,
}

impl Memory {
    fn parse(text: &str) -> Self {
        let field = |name: &str| -> u64 {
            let line = text
                .lines()
                .find(|line| line.split(':').next() == Some(name));
            let kib = line
                .and_then(|line| line.split_whitespace().nth(1))
                .and_then(|value| value.parse::<u64>().ok());
            kib.unwrap_or(0) * 1024
        };
        Self {
            total: field("MemTotal"),
            available: field("MemAvailable"),
            cache: field("Cached"),
        }
    }

    fn used(&self) -> u64 {
        self.total.saturating_sub(self.available)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_use_is_between_two_readings() {
        let before = parse_cpu("cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1 2\n");
        let now = parse_cpu("cpu  150 0 75 810 65 0 0 0 0 0\n");
        assert!((used_percent(Some(before), now) - 75.0).abs() < 0.01);
        assert!(used_percent(Some(now), now).abs() < f64::EPSILON);
        assert!((used_percent(None, before) - 15.0).abs() < 0.01);
    }

    #[test]
    fn memory_counts_what_is_not_available() {
        let memory = Memory::parse(
            "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 400 kB\nCached: 300 kB\n",
        );
        assert_eq!(
            (memory.total, memory.used(), memory.cache),
            (1_024_000, 614_400, 307_200)
        );
    }
}
