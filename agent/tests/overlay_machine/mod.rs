//! A disposable machine: the host's file system under an overlay, with processes, IPC objects and mounts of its own.
//!
//! Everything that is written on it is in the overlay's upper folder, and nothing else is: so a comparison of the whole file system
//! before and after reads one folder, whatever else runs on the host.
//!
//! The agent's own tests run inside of such a machine; the whole service's tests inspect one from outside.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Set inside of the machine; names the test that runs there.
const INSIDE: &str = "GPUAAS_TEST_MACHINE";

/// The path of the machine's own upper folder inside of it, and of the host's file system without the overlay.
pub const UPPER: &str = "/run/gpuaas-upper";
const LOWER: &str = "/run/gpuaas-lower";

/// Its namespaces: flags of `unshare`.
pub const NAMESPACES: [&str; 7] = ["--mount", "--pid", "--ipc", "--fork", "--kill-child", "--propagation", "private"];

/// Gives a machine of the agent's own tests a network of its own, in which nothing else listens and no other program has rules.
const NETWORK: &str = r#"ip link set lo up && exec "$@""#;

/// Creates the machine and starts a program in it. `$1` is a folder for it, the rest is the program.
pub const MAKE: &str = r#"
set -eu
base=$1; shift
mount -t tmpfs -o mode=0755 tmpfs "$base"
mkdir "$base/upper" "$base/work" "$base/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$base/upper,workdir=$base/work" "$base/root"
root=$base/root
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount -t tmpfs -o mode=0755 tmpfs "$root/dev"
for node in null zero full random urandom tty; do touch "$root/dev/$node"; mount --bind "/dev/$node" "$root/dev/$node"; done
mkdir -m 1777 "$root/dev/shm"
mkdir "$root/dev/pts"
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620,gid=5 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
for folder in tmp var/tmp run dev/shm; do mount -t tmpfs -o mode=1777 tmpfs "$root/$folder"; done
mkdir "$root/run/gpuaas-upper" "$root/run/gpuaas-lower"
mount --bind "$base/upper" "$root/run/gpuaas-upper"
mount --bind -o ro / "$root/run/gpuaas-lower"
# No chroot, in which the kernel allows no user namespace.
cd "$root"
mkdir run/host
pivot_root . run/host
umount -l run/host
rmdir run/host
exec "$@"
"#;

/// Runs `test` in a machine of its own: this program starts itself again there, for the one test called `name`.
pub fn alone(name: &str, test: impl FnOnce()) {
    if std::env::var(INSIDE).is_ok_and(|inside| inside == name) {
        return test();
    }
    if !nix::unistd::Uid::effective().is_root() {
        return crate::skipped_tests::report_skipped("it needs root, to make Linux users in namespaces of its own");
    }
    let folder = tempfile::tempdir().unwrap();
    let ran = Command::new("unshare")
        .args(NAMESPACES)
        .args(["--net", "sh", "-c", NETWORK, "sh", "sh", "-c", MAKE, "sh"])
        .arg(folder.path())
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture", "--test-threads=1"])
        .env(INSIDE, name)
        .output()
        .unwrap();
    let output = format!("{}\n{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success() && output.contains("1 passed"), "{output}");
}

/// The state of a file for a comparison: its kind, owner, mode and content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileRecord {
    kind: char,
    mode: u32,
    uid: u32,
    gid: u32,
    content: Vec<u8>,
}

/// A view of a machine: from inside, or through `/proc/<pid>/root`.
pub struct View {
    root: PathBuf,
}

impl View {
    /// `root` leads to the machine's own root: `/` from inside.
    pub fn of(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The path at which the machine's path is found in this process.
    pub fn at(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Everything on the machine that could have changed: files of the overlay and of the file systems in memory, and processes (by
    /// command line); with the machine's lists of System V objects.
    pub fn snapshot(&self, except: &[&Path], sysv: impl Fn(&str) -> String) -> BTreeMap<String, FileRecord> {
        let mut seen = BTreeMap::new();
        let upper = self.at(UPPER);
        for path in walk(&upper, &self.at(LOWER)) {
            let path = Path::new("/").join(path.strip_prefix(&upper).unwrap());
            self.snapshot_path(&path, except, &mut seen);
        }
        for place in ["/tmp", "/var/tmp", "/dev/shm", "/run", "/dev"] {
            for found in walk(&self.at(place), &self.at(LOWER)) {
                let path = Path::new("/").join(found.strip_prefix(&self.root).unwrap());
                if !path.starts_with(UPPER) && !path.starts_with(LOWER) {
                    self.snapshot_path(&path, except, &mut seen);
                }
            }
        }
        for listing in ["shm", "msg", "sem"] {
            let path = format!("/proc/sysvipc/{listing}");
            let rows = sysv(&path).lines().count();
            seen.insert(path, plain('i', rows.to_string().into_bytes()));
        }
        for (pid, command) in self.processes() {
            seen.insert(format!("process {pid}"), plain('p', command));
        }
        seen
    }

    fn snapshot_path(&self, path: &Path, except: &[&Path], seen: &mut BTreeMap<String, FileRecord>) {
        if !except.iter().any(|folder| path.starts_with(folder)) {
            seen.insert(path.display().to_string(), found_at(&self.at(path)));
        }
    }

    /// The processes of this machine that are still alive.
    pub fn processes(&self) -> BTreeMap<i32, Vec<u8>> {
        let proc = self.at("/proc");
        let pids = fs::read_dir(&proc).unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        pids.filter_map(|pid: i32| {
            let command = fs::read(proc.join(pid.to_string()).join("cmdline")).ok()?;
            (!command.is_empty()).then_some((pid, command))
        })
        .collect()
    }

    /// What was removed, added or changed between two snapshots.
    pub fn differences(
        &self,
        before: &BTreeMap<String, FileRecord>,
        after: &BTreeMap<String, FileRecord>,
    ) -> Vec<String> {
        let names: std::collections::BTreeSet<_> = before.keys().chain(after.keys()).collect();
        let differs = |name: &&&String| {
            let (was, is) = (before.get(**name), after.get(**name));
            // A file of the host that was copied up to be changed, and has its old content again: compared with the host's own.
            was != is
                && !(was.is_none()
                    && is.is_some_and(|is| *is == found_at(&self.at(LOWER).join(name.trim_start_matches('/')))))
        };
        names
            .iter()
            .filter(differs)
            .map(|name| format!("{name}: {:?} -> {:?}", before.get(*name), after.get(*name)))
            .collect()
    }
}

fn found_at(path: &Path) -> FileRecord {
    // In the upper folder and not on the machine: a file of the host that was removed here.
    let Ok(metadata) = fs::symlink_metadata(path) else { return plain('-', Vec::new()) };
    let kind = metadata.file_type();
    let (kind, content) = if kind.is_symlink() {
        ('l', fs::read_link(path).unwrap().into_os_string().into_encoded_bytes())
    } else if kind.is_dir() {
        ('d', Vec::new())
    } else if kind.is_char_device() {
        ('c', metadata.rdev().to_string().into_bytes())
    } else if kind.is_file() {
        ('f', fs::read(path).unwrap_or_default())
    } else {
        ('s', Vec::new())
    };
    let (mode, uid, gid) = (metadata.mode() & 0o7777, metadata.uid(), metadata.gid());
    FileRecord { kind, mode, uid, gid, content }
}

fn plain(kind: char, content: Vec<u8>) -> FileRecord {
    FileRecord { kind, mode: 0, uid: 0, gid: 0, content }
}

fn walk(folder: &Path, but: &Path) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) && path != but {
            paths.extend(walk(&path, but));
        }
        paths.push(path);
    }
    paths
}
