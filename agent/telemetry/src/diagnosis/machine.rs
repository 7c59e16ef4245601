//! Findings of any machine: free space, who may read files with secrets, and which process has a port.

use super::DiagnosticFinding;
use nix::sys::statvfs::statvfs;
use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

const MEBIBYTE: u64 = 1024 * 1024;

/// The free space of the file system that the folder is on.
#[must_use]
pub fn disk(folder: &Path) -> DiagnosticFinding {
    match statvfs(folder) {
        Ok(stat) => {
            let bytes = |blocks: u64| blocks.saturating_mul(stat.fragment_size());
            // A file system without a table of inodes has none free and none at all.
            let free_files = if stat.files() == 0 { 100 } else { stat.files_available() * 100 / stat.files() };
            judge_disk(folder, bytes(stat.blocks_available()), bytes(stat.blocks()), free_files)
        }
        Err(error) => {
            let summary = format!("{}: the free space is not known: {error}", folder.display());
            DiagnosticFinding::warning(summary, "look at it with df")
        }
    }
}

fn judge_disk(folder: &Path, free: u64, total: u64, free_files_percent: u64) -> DiagnosticFinding {
    let summary = format!("{}: {} MiB of {} MiB are free", folder.display(), free / MEBIBYTE, total / MEBIBYTE);
    let action = "remove what is not needed (journalctl --vacuum-size, old packages), or enlarge the disk";
    if free < 100 * MEBIBYTE {
        return DiagnosticFinding::error(summary, action);
    }
    if free < 1024 * MEBIBYTE || free < total / 20 {
        return DiagnosticFinding::warning(summary, action);
    }
    if free_files_percent < 5 {
        let summary = format!("{}: {free_files_percent} % of its inodes are free", folder.display());
        return DiagnosticFinding::warning(summary, "find the folder with many small files, and remove them");
    }
    DiagnosticFinding::ok(summary)
}

/// Whether others than its owner may read the file `name`, which has secrets. `None` where nothing is wrong.
#[must_use]
pub fn secret_file(name: &str, path: &Path) -> Option<DiagnosticFinding> {
    judge_mode(name, path, std::fs::metadata(path).map(|metadata| metadata.permissions().mode()))
}

fn judge_mode(name: &str, path: &Path, mode: std::io::Result<u32>) -> Option<DiagnosticFinding> {
    let at = path.display();
    match mode {
        Ok(mode) if mode & 0o077 == 0 => None,
        Ok(mode) => Some(DiagnosticFinding::warning(
            format!("{name}: {at} is readable by others than its owner (mode {:03o})", mode & 0o777),
            format!("chmod go= {at}; if others could read it before, replace the secrets in it"),
        )),
        Err(error) => Some(DiagnosticFinding::error(
            format!("{name}: {at} cannot be read: {error}"),
            "run this command as root, or put the file where the setting says it is",
        )),
    }
}

/// The name and the id of the process that listens on the TCP port, of those that this user may see.
#[must_use]
pub fn port_holder(port: u16) -> Option<(String, i32)> {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(|path| std::fs::read_to_string(path).unwrap_or_default());
    let sockets: BTreeSet<String> = tables
        .iter()
        .flat_map(|table| listening_inodes(table, port))
        .map(|inode| format!("socket:[{inode}]"))
        .collect();
    let processes = std::fs::read_dir("/proc").ok()?.flatten();
    processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok()).find_map(|pid| {
        let mut descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten();
        let is_it = |target: PathBuf| target.to_str().is_some_and(|target| sockets.contains(target));
        descriptors.any(|descriptor| std::fs::read_link(descriptor.path()).is_ok_and(is_it)).then(|| {
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            (name.trim().to_owned(), pid)
        })
    })
}

/// The inodes of sockets that listen on the port (`proc_net(5)`).
fn listening_inodes(table: &str, port: u16) -> Vec<u64> {
    const LISTEN: &str = "0A";
    let wanted = format!(":{port:04X}");
    let inode = |line: &str| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let (local, state) = (fields.get(1)?, fields.get(3)?);
        (local.ends_with(&wanted) && *state == LISTEN).then(|| fields.get(9)?.parse().ok())?
    };
    table.lines().skip(1).filter_map(inode).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnosis::DiagnosticLevel::{Error, Ok as Fine, Warning};

    #[test]
    fn disk_is_judged_by_free_bytes_share_and_inodes() {
        const GIB: u64 = 1 << 30;
        let judge = |free, total, files| judge_disk(Path::new("/"), free, total, files).level;
        assert_eq!(judge(20 * GIB, 100 * GIB, 50), Fine);
        assert_eq!(judge(4 * GIB, 100 * GIB, 50), Warning);
        assert_eq!(judge(GIB / 2, 4 * GIB, 50), Warning);
        assert_eq!(judge(GIB / 20, 4 * GIB, 50), Error);
        assert_eq!(judge(20 * GIB, 100 * GIB, 1), Warning);
    }

    #[test]
    fn files_with_secrets_belong_to_their_owner_alone() {
        let judge = |mode| judge_mode("SVC_KEK_FILE", Path::new("/etc/gpuaas/kek"), mode);
        assert_eq!(judge(Ok(0o100_600)), None);
        let open = judge(Ok(0o100_640)).unwrap_or_else(|| DiagnosticFinding::ok(""));
        assert_eq!(open.level, Warning);
        assert!(open.summary.contains("mode 640"), "{open:?}");
        assert!(open.action.is_some_and(|action| action.starts_with("chmod go= /etc/gpuaas/kek")));
        let absent = judge(Err(std::io::ErrorKind::NotFound.into()));
        assert!(absent.is_some_and(|finding| finding.level == Error));
    }

    #[test]
    fn socket_that_listens_on_a_port_is_found_in_the_kernels_table() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   \
                     0: 0100007F:20FB 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1\n   \
                     1: 0100007F:20FB 0100007F:A000 01 00000000:00000000 00:00000000 00000000     0        0 4712 1\n";
        assert_eq!(listening_inodes(table, 0x20FB), [4711]);
    }
}
