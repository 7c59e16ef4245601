//! Bounds of what one tenant may store on the machine's disks, in proportion to its GPUs: quotas of its uid.
//!
//! They hold for all that the tenant owns on a file system, wherever it lies: its home, its `/tmp` and `/var/tmp`. The kernel has them only
//! where the file system is mounted with `usrquota`. Quotas of projects do not bound a tenant: the owner of a file may take it out of its
//! project (`chattr -p 0`).

use std::io;
use std::path::Path;

use nix::errno::Errno;
use nix::sys::quota::{Dqblk, QuotaType, QuotaValidFlags, quotactl_get, quotactl_set};
use nix::sys::statvfs::statvfs;
use wire::cleanup_proof::{CleanupCheck, CleanupFinding};

use super::accounts::TenantAccount;
use super::mounts::{self, QuotaFileSystem};
use super::tenant_limits::{LimitSettings, part_of, to_count};
use crate::cleanup_checks::finding;

const GIB: u64 = 1 << 30;
/// The unit of quotas, in bytes.
const BLOCK: u64 = 1024;
/// The largest block of a file system, in that unit.
const MAX_ROUNDING: u64 = 64;

/// Why disks are not bounded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnboundedDisk {
    #[error("SVC_NODE_AGENT_TENANT_LIMITS is off")]
    Off,
    #[error("{path} is on a file system that is not mounted with usrquota")]
    NoQuotas { path: String },
    #[error("the table of mounts cannot be read: {0}")]
    Table(String),
}

/// Why the quotas of a tenant are not as they should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuotaFault {
    #[error("the table of mounts cannot be read: {0}")]
    Table(String),
    /// `ESRCH`: mounted with the option, and not switched on (`quotaon`).
    #[error("{point}: no quota can be set ({errno}); is it switched on (quotaon -p {point})?")]
    Refused { point: String, errno: Errno },
    /// A quota below it would stop what the tenant runs. The quota before it stays.
    #[error("{point}: the tenant has {found} {unit}, more than its share of {share}")]
    Exceeded { point: String, unit: &'static str, found: u64, share: u64 },
    #[error("{point}: the kernel has a quota of {found} KiB, not {wanted}")]
    NotTaken { point: String, found: u64, wanted: u64 },
}

/// Whether all that a tenant owns at these paths is bounded.
///
/// # Errors
/// [`UnboundedDisk`], of the first path that is not.
pub fn check(settings: &LimitSettings, paths: &[&Path]) -> Result<(), UnboundedDisk> {
    if !settings.is_on {
        return Err(UnboundedDisk::Off);
    }
    for path in paths {
        let is_bounded =
            mounts::has_user_quotas(path).map_err(|error: io::Error| UnboundedDisk::Table(error.to_string()))?;
        if !is_bounded {
            return Err(UnboundedDisk::NoQuotas { path: path.display().to_string() });
        }
    }
    Ok(())
}

/// Bounds a tenant that holds so many of the machine's GPUs on every file system that has quotas of users, where it has no more than its
/// share.
///
/// # Errors
/// The first [`QuotaFault`]; the others are set.
pub fn set(account: &TenantAccount, settings: &LimitSettings, held: usize, gpus: usize) -> Result<(), QuotaFault> {
    if !settings.is_on {
        return Ok(());
    }
    let (held, gpus) = (to_count(held).max(1), to_count(gpus).max(1));
    let reserved = settings.reserved_disk_gib.map(|gib| gib.saturating_mul(GIB));
    let set = |system: QuotaFileSystem| {
        let refused = |errno| QuotaFault::Refused { point: system.point.display().to_string(), errno };
        let size = statvfs(&system.point).map_err(refused)?;
        let bytes = size.blocks().saturating_mul(size.fragment_size());
        // A limit of 0 is none.
        let blocks = (part_of(bytes, reserved, held, gpus) / BLOCK).max(1);
        // Some file systems have no fixed number of files.
        let files = if size.files() == 0 { 0 } else { part_of(size.files(), None, held, gpus).max(1) };
        let (used_blocks, used_files) = use_of(&system, account).map_err(refused)?;
        let point = || system.point.display().to_string();
        check_use(point, "KiB", used_blocks, blocks)?;
        if files > 0 {
            check_use(point, "files", used_files, files)?;
        }
        write(&system, account, blocks, files)
    };
    file_systems()?.into_iter().map(set).fold(Ok(()), Result::and)
}

fn file_systems() -> Result<Vec<QuotaFileSystem>, QuotaFault> {
    mounts::with_user_quotas().map_err(|error| QuotaFault::Table(error.to_string()))
}

fn write(system: &QuotaFileSystem, account: &TenantAccount, blocks: u64, files: u64) -> Result<(), QuotaFault> {
    let refused = |errno| QuotaFault::Refused { point: system.point.display().to_string(), errno };
    let mut limits = Dqblk::default();
    limits.set_blocks_hard_limit(blocks);
    limits.set_inodes_hard_limit(files);
    let uid = account.uid.cast_signed();
    quotactl_set(QuotaType::USRQUOTA, &system.device, uid, &limits, QuotaValidFlags::QIF_LIMITS).map_err(refused)?;
    let found = limit_of(system, account).map_err(refused)?;
    // XFS rounds down to blocks of its own.
    if blocks.saturating_sub(MAX_ROUNDING) <= found && found <= blocks {
        return Ok(());
    }
    Err(QuotaFault::NotTaken { point: system.point.display().to_string(), found, wanted: blocks })
}

fn check_use(point: impl Fn() -> String, unit: &'static str, found: u64, share: u64) -> Result<(), QuotaFault> {
    if found <= share { Ok(()) } else { Err(QuotaFault::Exceeded { point: point(), unit, found, share }) }
}

/// What the tenant has, in KiB and in files.
fn use_of(system: &QuotaFileSystem, account: &TenantAccount) -> Result<(u64, u64), Errno> {
    match quotactl_get(QuotaType::USRQUOTA, &system.device, account.uid.cast_signed()) {
        Ok(found) => Ok((found.occupied_space().unwrap_or(0).div_ceil(BLOCK), found.allocated_inodes().unwrap_or(0))),
        // XFS has no record of a uid that has nothing and no limit.
        Err(Errno::ENOENT) => Ok((0, 0)),
        Err(errno) => Err(errno),
    }
}

/// In KiB; 0: none.
fn limit_of(system: &QuotaFileSystem, account: &TenantAccount) -> Result<u64, Errno> {
    match quotactl_get(QuotaType::USRQUOTA, &system.device, account.uid.cast_signed()) {
        Ok(found) => Ok(found.blocks_hard_limit().unwrap_or(0)),
        // XFS has no record of a uid that has nothing and no limit.
        Err(Errno::ENOENT) => Ok(0),
        Err(errno) => Err(errno),
    }
}

/// Removes the bounds of a tenant; [`check_removed`] shows what is left.
pub fn remove(account: &TenantAccount) {
    for system in file_systems().unwrap_or_default() {
        let _ = write(&system, account, 0, 0);
    }
}

/// Checks that no file system has a quota of the tenant.
#[must_use]
pub fn check_removed(account: &TenantAccount) -> CleanupFinding {
    let looked_for = format!("disk quotas of uid {}", account.uid);
    let found = file_systems().map_err(|error| io::Error::other(error.to_string())).map(|systems| {
        let has_limit = |system: &QuotaFileSystem| limit_of(system, account).is_ok_and(|limit| limit > 0);
        systems.iter().filter(|system| has_limit(system)).map(|system| system.point.display().to_string()).collect()
    });
    finding(CleanupCheck::Home, looked_for, found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_without_quotas_is_named_by_the_path_on_it_and_bounds_switched_off_say_so() {
        let off = LimitSettings { is_on: false, ..LimitSettings::default() };
        assert_eq!(check(&off, &[Path::new("/proc")]), Err(UnboundedDisk::Off));
        let unbounded = check(&LimitSettings::default(), &[Path::new("/proc")]);
        assert_eq!(unbounded, Err(UnboundedDisk::NoQuotas { path: "/proc".into() }));
    }

    #[test]
    fn tenant_that_has_more_than_its_share_is_named_with_both() {
        let check = |found| check_use(|| "/home".to_owned(), "KiB", found, 100);
        assert_eq!((check(0), check(100)), (Ok(()), Ok(())));
        let why = check(101).unwrap_err().to_string();
        assert_eq!(why, "/home: the tenant has 101 KiB, more than its share of 100");
    }

    #[test]
    fn shares_of_a_disk_leave_the_reserve_and_are_never_without_a_bound() {
        assert_eq!(part_of(1600 * GIB, None, 2, 8), 375 * GIB);
        assert_eq!(part_of(1600 * GIB, Some(800 * GIB), 8, 8), 800 * GIB);
        assert_eq!(part_of(GIB, Some(2 * GIB), 1, 8), 0);
    }
}
