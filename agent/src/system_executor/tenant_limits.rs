//! Bounds of what one tenant may take of the machine: memory, processes and processor time, in proportion to its GPUs.
//!
//! A drop-in of the slice of its sessions, beside the one of its devices ([`super::device_guard`], which also has systemd read it and
//! removes both at the release). Only with systemd and control groups of version 2: nothing else bounds the sum of a user's processes. What
//! the kernel bounds is read back from the slice. Disks are bounded by [`super::disk_quotas`].

use std::fs;
use std::path::PathBuf;

use super::accounts::TenantAccount;
use super::device_guard::launcher_in_slice;
use crate::atomic_file;
use crate::bounded_tool::{SHORT_LIMIT, Tool, ToolError};
use crate::task_outcome::TaskFailure;

const FILE: &str = "60-limits.conf";
/// The controllers of the machine's control groups, with version 2.
const CONTROLLERS: &str = "/sys/fs/cgroup/cgroup.controllers";
const NEEDED: [&str; 3] = ["cpu", "memory", "pids"];
const MEMORY: &str = "/proc/meminfo";
/// The default of what stays for the machine itself: this part of its memory.
const RESERVED_PART: u64 = 16;
/// Where the kernel begins to slow a tenant down, in percent of where it ends its programs.
const HIGH: u64 = 95;
/// Shows what the kernel bounds in the slice of the program that runs it. A kernel without swap does not have the last file.
const READ_BACK: &str = r#"cd "/sys/fs/cgroup$(dirname "$(sed -n 's/^0:://p' /proc/self/cgroup)")" && pwd && \
for file in memory.max pids.max memory.swap.max; do ! [ -e "$file" ] || echo "$file $(cat "$file")"; done"#;
/// The group of the slices of users, and the files that [`READ_BACK`] shows.
const USER_SLICES: &str = "/sys/fs/cgroup/user.slice";
const BOUND_FILES: [&str; 3] = ["memory.max", "pids.max", "memory.swap.max"];
/// Of one GPU, as systemd's default of a slice is 100.
const CPU_WEIGHT: u64 = 100;
const MAX_CPU_WEIGHT: u64 = 10_000;

/// An operator's settings of the bounds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LimitSettings {
    pub is_on: bool,
    /// Memory that no tenant gets; `None`: a sixteenth.
    pub reserved_memory_mib: Option<u64>,
    /// Processes and threads for each GPU.
    pub tasks_per_gpu: u64,
    /// Space of each disk that no tenant gets; `None`: a sixteenth.
    pub reserved_disk_gib: Option<u64>,
}

impl Default for LimitSettings {
    fn default() -> Self {
        Self { is_on: true, reserved_memory_mib: None, tasks_per_gpu: 16_384, reserved_disk_gib: None }
    }
}

/// Why tenants are not bounded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnboundedTenants {
    #[error("SVC_NODE_AGENT_TENANT_LIMITS is off")]
    Off,
    #[error("systemd does not run")]
    NoSystemd,
    #[error("the machine has no control groups of version 2 with cpu, memory and pids")]
    NoControlGroups,
    #[error("{MEMORY} does not say how much memory the machine has")]
    NoMemory,
}

/// Why it is not certain that the kernel bounds a tenant whose slice has bounds.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UntakenLimits {
    #[error("{group} has {file} {found}, not {wanted}")]
    Looser { group: String, file: &'static str, found: String, wanted: u64 },
    #[error("{group} has no {file}")]
    Absent { group: String, file: &'static str },
    #[error("a program cannot be started in the slice, to read its bounds")]
    Unread(#[source] ToolError),
}

/// The bounds of one tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Share {
    memory_bytes: u64,
    tasks: u64,
    cpu_weight: u64,
}

/// See the module's documentation.
pub struct TenantLimits {
    settings: LimitSettings,
    /// The folder of slice configuration until the next boot, where bounds hold.
    slices: Result<PathBuf, UnboundedTenants>,
    memory_bytes: u64,
}

impl TenantLimits {
    /// `slices`: the folder of slice configuration, where systemd runs.
    #[must_use]
    pub fn of_this_machine(settings: LimitSettings, slices: Option<PathBuf>) -> Self {
        let memory = fs::read_to_string(MEMORY).ok().and_then(|text| total_memory(&text));
        let controllers = fs::read_to_string(CONTROLLERS).unwrap_or_default();
        let slices = match slices {
            _ if !settings.is_on => Err(UnboundedTenants::Off),
            None => Err(UnboundedTenants::NoSystemd),
            Some(_) if !has_controllers(&controllers) => Err(UnboundedTenants::NoControlGroups),
            Some(_) if memory.is_none() => Err(UnboundedTenants::NoMemory),
            Some(folder) => Ok(folder),
        };
        Self { settings, slices, memory_bytes: memory.unwrap_or_default() }
    }

    /// Whether tenants are bounded.
    ///
    /// # Errors
    /// [`UnboundedTenants`].
    pub fn check(&self) -> Result<(), UnboundedTenants> {
        self.slices.as_ref().map(|_| ()).map_err(Clone::clone)
    }

    /// Writes the bounds of a tenant that holds this many of the machine's GPUs. Returns whether systemd has to reload afterwards.
    ///
    /// # Errors
    /// `node_storage`.
    pub fn write(&self, account: &TenantAccount, held: usize, gpus: usize) -> Result<bool, TaskFailure> {
        let Ok(slices) = &self.slices else { return Ok(false) };
        let path = slices.join(format!("user-{}.slice.d", account.uid)).join(FILE);
        let text = self.share(held, gpus).as_drop_in();
        Ok(atomic_file::write_if_changed(&path, text.as_bytes(), atomic_file::PUBLIC)?)
    }

    /// Whether the kernel bounds a tenant as it was written: its slice shows it, or a program in the slice where it has none yet. In a slice
    /// at its bounds no program starts.
    ///
    /// # Errors
    /// [`UntakenLimits`].
    pub fn check_taken(&self, account: &TenantAccount, held: usize, gpus: usize) -> Result<(), UntakenLimits> {
        if self.slices.is_err() {
            return Ok(());
        }
        let share = self.share(held, gpus);
        let read = share.check_taken(&shown_by_slice(account.uid));
        if read.is_ok() {
            return read;
        }
        let [program, options @ ..] = launcher_in_slice(account.uid);
        let shown = Tool::new(program).args(options).args(["/bin/sh", "-c", READ_BACK]).run(SHORT_LIMIT);
        match (shown, read) {
            (Ok(shown), _) => share.check_taken(&shown),
            (Err(_), Err(looser @ UntakenLimits::Looser { .. })) => Err(looser),
            (Err(error), _) => Err(UntakenLimits::Unread(error)),
        }
    }

    fn share(&self, held: usize, gpus: usize) -> Share {
        let (held, gpus) = (to_count(held).max(1), to_count(gpus).max(1));
        let held = held.min(gpus);
        let reserved = self.settings.reserved_memory_mib.map(|mib| mib.saturating_mul(1 << 20));
        Share {
            // Never 0, with which no program starts.
            memory_bytes: part_of(self.memory_bytes, reserved, held, gpus).max(1 << 20),
            tasks: self.settings.tasks_per_gpu.saturating_mul(held),
            cpu_weight: (CPU_WEIGHT * held).min(MAX_CPU_WEIGHT),
        }
    }
}

impl Share {
    fn as_drop_in(self) -> String {
        let Self { memory_bytes, tasks, cpu_weight } = self;
        let high = memory_bytes / 100 * HIGH;
        // Swap would be memory beyond the bound, and none of it has a share of its own.
        format!(
            "[Slice]\nMemoryHigh={high}\nMemoryMax={memory_bytes}\nMemorySwapMax=0\nTasksMax={tasks}\nCPUWeight={cpu_weight}\n"
        )
    }

    /// Compares with what [`READ_BACK`] has shown. The kernel rounds down, and a tighter bound is an administrator's.
    fn check_taken(self, shown: &str) -> Result<(), UntakenLimits> {
        let group = shown.lines().next().unwrap_or_default();
        let bounds: [(&'static str, u64, bool); 3] = [
            ("memory.max", self.memory_bytes, true),
            ("pids.max", self.tasks, true),
            // A kernel without swap.
            ("memory.swap.max", 0, false),
        ];
        for (file, wanted, is_needed) in bounds {
            let found = shown.lines().find_map(|line| line.strip_prefix(file)?.strip_prefix(' '));
            let Some(found) = found else {
                if is_needed {
                    return Err(UntakenLimits::Absent { group: group.to_owned(), file });
                }
                continue;
            };
            if found.parse::<u64>().is_ok_and(|found| found <= wanted) {
                continue;
            }
            return Err(UntakenLimits::Looser { group: group.to_owned(), file, found: found.to_owned(), wanted });
        }
        Ok(())
    }
}

/// What [`READ_BACK`] shows, without a program in the slice: the group alone where it does not exist.
fn shown_by_slice(uid: u32) -> String {
    let group = format!("{USER_SLICES}/user-{uid}.slice");
    let bound = |file: &str| {
        let value = fs::read_to_string(format!("{group}/{file}")).ok()?;
        Some(format!("{file} {}", value.trim_end()))
    };
    let bounds = BOUND_FILES.into_iter().filter_map(bound);
    std::iter::once(group.clone()).chain(bounds).collect::<Vec<_>>().join("\n")
}

/// What of an amount a tenant gets that holds so many of the machine's GPUs, where so much is reserved; `None`: a sixteenth.
pub(super) fn part_of(amount: u64, reserved: Option<u64>, held: u64, gpus: u64) -> u64 {
    let shared = amount.saturating_sub(reserved.unwrap_or(amount / RESERVED_PART));
    shared / gpus.max(1) * held.min(gpus.max(1))
}

pub(super) fn to_count(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

/// proc_meminfo(5), in bytes.
fn total_memory(text: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn has_controllers(text: &str) -> bool {
    NEEDED.iter().all(|needed| text.split_whitespace().any(|there| there == *needed))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn limits(memory_bytes: u64, reserved_memory_mib: Option<u64>) -> TenantLimits {
        let settings = LimitSettings { reserved_memory_mib, ..LimitSettings::default() };
        TenantLimits { settings, slices: Err(UnboundedTenants::NoSystemd), memory_bytes }
    }

    #[test]
    fn tenants_of_all_gpus_together_leave_the_reserve_to_the_machine() {
        let limits = limits(1024 * GIB, None);
        for held in 1..=8 {
            let (one, others) = (limits.share(held, 8), limits.share(8 - held, 8));
            let both = one.memory_bytes + if held == 8 { 0 } else { others.memory_bytes };
            assert_eq!(both, 960 * GIB, "{held} of 8");
            assert_eq!((one.tasks, one.cpu_weight), (16_384 * held as u64, 100 * held as u64));
        }
    }

    #[test]
    fn share_is_never_empty_whatever_is_reserved() {
        assert_eq!(limits(GIB, Some(4096)).share(1, 8).memory_bytes, 1 << 20);
        assert_eq!(limits(8 * GIB, Some(u64::MAX)).share(1, 1).memory_bytes, 1 << 20);
        let more_than_there_are = limits(8 * GIB, Some(0)).share(3, 2);
        assert_eq!(more_than_there_are.memory_bytes, 8 * GIB);
    }

    #[test]
    fn drop_in_bounds_memory_processes_and_processor_time() {
        let text = limits(16 * GIB, Some(0)).share(1, 2).as_drop_in();
        assert_eq!(
            text,
            "[Slice]\nMemoryHigh=8160437775\nMemoryMax=8589934592\nMemorySwapMax=0\nTasksMax=16384\nCPUWeight=100\n"
        );
    }

    #[test]
    fn bound_that_the_kernel_has_not_taken_is_named_with_its_control_group() {
        let share = limits(16 * GIB, Some(0)).share(1, 2);
        let shown = |memory: &str, pids: &str| {
            share
                .check_taken(&format!("/sys/fs/cgroup/user.slice/user-7.slice\nmemory.max {memory}\npids.max {pids}\n"))
        };
        assert_eq!(shown("8589934592", "16384"), Ok(()));
        assert_eq!(shown("8589930496", "200"), Ok(()), "rounded, and an administrator's own");
        let why = shown("max", "16384").unwrap_err().to_string();
        assert_eq!(why, "/sys/fs/cgroup/user.slice/user-7.slice has memory.max max, not 8589934592");
        assert!(shown("8589934592", "16385").unwrap_err().to_string().ends_with("has pids.max 16385, not 16384"));
        let absent = share.check_taken("/sys/fs/cgroup/user.slice/user-7.slice\npids.max 1\n").unwrap_err();
        assert!(absent.to_string().ends_with("user-7.slice has no memory.max"), "{absent}");
        let swaps = "/g\nmemory.max 1\npids.max 1\nmemory.swap.max ";
        assert!(
            share.check_taken(&format!("{swaps}0\n")).is_ok() && share.check_taken(&format!("{swaps}max\n")).is_err()
        );
        assert!(share.check_taken("").is_err(), "nothing was shown");
    }

    #[test]
    fn systemd_reads_the_drop_in_without_a_complaint() {
        let folder = tempfile::tempdir().unwrap();
        let slice = folder.path().join("user-80001.slice");
        fs::write(&slice, "[Slice]\n").unwrap();
        let limits = TenantLimits { slices: Ok(folder.path().to_owned()), ..limits(16 * GIB, None) };
        let account = TenantAccount { name: "gpu-1".into(), uid: 80_001 };
        assert!(limits.write(&account, 1, 2).unwrap(), "systemd has to read it");
        assert!(!limits.write(&account, 1, 2).unwrap(), "the same again is not written");
        assert!(folder.path().join("user-80001.slice.d").join(FILE).exists());
        let ran = std::process::Command::new("systemd-analyze").arg("verify").arg(slice).output();
        let ran = ran.expect("systemd-analyze is installed");
        let printed = [ran.stdout, ran.stderr].map(|output| String::from_utf8_lossy(&output).into_owned()).concat();
        assert_eq!(printed, "");
    }

    #[test]
    fn memory_and_controllers_are_read_as_the_kernel_writes_them() {
        assert_eq!(total_memory("MemTotal:       49368368 kB\nMemFree:        1 kB\n"), Some(49_368_368 * 1024));
        assert_eq!(total_memory("MemFree:        1 kB\n"), None);
        assert!(has_controllers("cpuset cpu io memory hugetlb pids rdma misc\n"));
        assert!(!has_controllers("cpuset io memory") && !has_controllers(""));
    }

    #[test]
    fn machine_without_systemd_or_with_bounds_switched_off_says_why() {
        let off = LimitSettings { is_on: false, ..LimitSettings::default() };
        assert_eq!(TenantLimits::of_this_machine(off, Some("/run".into())).check(), Err(UnboundedTenants::Off));
        let without = TenantLimits::of_this_machine(LimitSettings::default(), None);
        assert_eq!(without.check(), Err(UnboundedTenants::NoSystemd));
    }
}
