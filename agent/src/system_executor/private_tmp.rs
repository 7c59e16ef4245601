//! A `/tmp`, `/var/tmp` and `/dev/shm` of each tenant's own.
//!
//! ```text
//! STATE/private/tmp/<name>                        what the tenant sees as /tmp
//!              /var-tmp/<name>                    as /var/tmp
//!              /shm/<name>                        as /dev/shm: a file system in memory
//! /etc/security/namespace.d/gpuaas-<name>.conf    the same for pam_namespace(8)
//!                           gpuaas-<name>.init    what it runs in the namespace: mounts [`private_proc`]
//! ```
//!
//! Each terminal, and each login through PAM, has a mount namespace in which these are mounted over the machine's, and a `/proc` that shows
//! no process of others ([`private_proc`]). Mounts that the tenant makes there (FUSE, user namespaces) exist nowhere else. A release removes
//! the folders with their content, also what root made in the tenant's name.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use nix::mount::{MsFlags, mount};
use tracing::warn;
use wire::cleanup_proof::{CleanupCheck, CleanupFinding};

use super::accounts::TenantAccount;
use super::directory_walk;
use super::mounts::{self, Mounts};
use super::private_proc::{self, VisibleProcesses};
use crate::atomic_file::{self, FileError};
use crate::cleanup_checks::check_path_removed;
use crate::task_outcome::TaskFailure;
use crate::terminal::ShellCommand;

/// The tenant's own folders and their names. `/tmp` is last: if another one is a link to it, `/tmp` is what the tenant sees.
const FOLDERS: [(CleanupCheck, &str, &str); 3] = [
    (CleanupCheck::VarTmp, "/var/tmp", "var-tmp"),
    (CleanupCheck::DevShm, "/dev/shm", "shm"),
    (CleanupCheck::Tmp, "/tmp", "tmp"),
];
/// The last of them.
const LAST: &str = "/tmp";
/// The folder in memory.
const IN_MEMORY: &str = "shm";
/// The mode of the machine's own.
const MODE: u32 = 0o1777;
/// Accessible to root only: pam_namespace refuses any other mode.
const MODE_OF_PARENT: u32 = 0;
const RULES: &str = "/etc/security/namespace.d";
/// The mode of a program that root runs.
const PROGRAM: u32 = 0o755;

/// Mounts them over the machine's.
const ENTER: &str = r#"set -e
mount --bind "$1" /var/tmp; if [ -d /dev/shm ]; then mount --bind "$2" /dev/shm; fi; mount --bind "$3" /tmp
"#;
/// Executes the arguments behind the folders.
const EXECUTE: &str = r#"shift 3; exec "$@""#;

/// See the module's documentation.
pub struct PrivateTmp {
    base: PathBuf,
    /// Whether sessions have a `/proc` of their own.
    hides_processes: bool,
}

impl PrivateTmp {
    /// # Errors
    /// The folders' parents cannot be created.
    pub fn open(state_dir: &Path) -> Result<Self, FileError> {
        let base = state_dir.join("private");
        atomic_file::private_folder(&base)?;
        for (_, _, own) in FOLDERS {
            let path = base.join(own);
            let make = || {
                DirBuilder::new().recursive(true).mode(MODE_OF_PARENT).create(&path)?;
                atomic_file::protect(&path, MODE_OF_PARENT)
            };
            make().map_err(FileError::at("create", &path))?;
        }
        let hidden = private_proc::check();
        if let Err(why) = &hidden {
            warn_of_processes(why);
        }
        Ok(Self { base, hides_processes: hidden.is_ok() })
    }

    /// Whether a tenant's sessions see no process of other users.
    #[must_use]
    pub const fn hides_processes(&self) -> bool {
        self.hides_processes
    }

    /// Whether a path lies in a folder that each tenant has of its own, and so differs between tenants and the machine.
    #[must_use]
    pub fn covers(path: &Path) -> bool {
        FOLDERS.iter().any(|(_, public, _)| path.starts_with(public))
    }

    /// Creates the missing folders of the tenant.
    ///
    /// # Errors
    /// `node_storage`.
    pub fn make(&self, account: &TenantAccount) -> Result<(), TaskFailure> {
        let mounts = Mounts::of_this_machine().map_err(FileError::at("read", Path::new("/proc/self/mountinfo")))?;
        for (_, _, own) in FOLDERS {
            let path = self.base.join(own).join(&account.name);
            let make = || {
                DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
                if own == IN_MEMORY && !mounts.has(&path) {
                    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
                    mount(Some("tmpfs"), &path, Some("tmpfs"), flags, Some("mode=1777"))?;
                }
                atomic_file::protect(&path, MODE)
            };
            make().map_err(FileError::at("make the tenant's own", &path))?;
        }
        // Without PAM on the node there is nothing to write.
        if Path::new(RULES).parent().is_some_and(Path::is_dir) {
            DirBuilder::new()
                .recursive(true)
                .mode(0o755)
                .create(RULES)
                .map_err(FileError::at("create", RULES.as_ref()))?;
            if self.hides_processes {
                let script = private_proc::script();
                atomic_file::write_if_changed(&script_of(account), script.as_bytes(), PROGRAM)?;
            }
            atomic_file::write_if_changed(&rules_of(account), self.rules(account).as_bytes(), atomic_file::PUBLIC)?;
        }
        Ok(())
    }

    /// namespace.conf(5): for this user alone.
    fn rules(&self, account: &TenantAccount) -> String {
        // It runs for one of the folders: the namespace is the same for all of them.
        let hides = |public: &str| public == LAST && self.hides_processes;
        let rule = |(_, public, own): (CleanupCheck, &str, &str)| {
            let script = if hides(public) { format!(":iscript={}", script_name(account)) } else { String::new() };
            format!("{public} \"{}/\" user{script} ~{}\n", self.base.join(own).display(), account.name)
        };
        FOLDERS.into_iter().map(rule).collect()
    }

    /// Removes them; [`PrivateTmp::check_removed`] shows what is left.
    pub fn remove(&self, account: &TenantAccount) {
        let _ = atomic_file::remove(&rules_of(account));
        let _ = atomic_file::remove(&script_of(account));
        for path in self.folders_of(account) {
            // Emptied first: another tenant's namespace may hold the mount.
            directory_walk::empty(&path, account.uid);
            let mounted = Mounts::of_this_machine().is_ok_and(|mounts| mounts.has(&path));
            if mounted {
                let _ = mounts::unmount(&path);
            }
            let _ = directory_walk::remove_at(&path, &Mounts::default(), account.uid);
        }
    }

    /// Checks that the folders are gone.
    #[must_use]
    pub fn check_removed(&self, account: &TenantAccount) -> Vec<CleanupFinding> {
        let folders = FOLDERS.into_iter().zip(self.folders_of(account));
        let folders = folders.map(|((what, _, _), path)| check_path_removed(what, &path));
        let files = [rules_of(account), script_of(account)];
        folders.chain(files.map(|path| check_path_removed(CleanupCheck::SessionFiles, &path))).collect()
    }

    /// The parents of all tenants' folders.
    pub fn folders(&self) -> impl Iterator<Item = (CleanupCheck, PathBuf)> {
        FOLDERS.into_iter().map(|(what, _, own)| (what, self.base.join(own)))
    }

    fn folders_of(&self, account: &TenantAccount) -> [PathBuf; 3] {
        FOLDERS.map(|(_, _, own)| self.base.join(own).join(&account.name))
    }

    /// The shell in a mount namespace of its own with the tenant's folders in it. A shell that cannot have them does not start.
    #[must_use]
    pub fn wrap_shell(&self, account: &TenantAccount, mut shell: ShellCommand) -> ShellCommand {
        let proc = if self.hides_processes { private_proc::MOUNT } else { ":" };
        let enter = format!("{ENTER}{proc}\n{EXECUTE}");
        let words = ["unshare", "--mount", "--propagation", "slave", "--", "/bin/sh", "-c", &enter, "sh"];
        shell.launcher.extend(words.map(str::to_owned));
        shell.launcher.extend(self.folders_of(account).map(|path| path.to_string_lossy().into_owned()));
        shell
    }
}

fn rules_of(account: &TenantAccount) -> PathBuf {
    Path::new(RULES).join(format!("gpuaas-{}.conf", account.name))
}

/// pam_namespace(8) reads files with the ending `.conf` as rules, and no others.
fn script_name(account: &TenantAccount) -> String {
    format!("gpuaas-{}.init", account.name)
}

fn script_of(account: &TenantAccount) -> PathBuf {
    Path::new(RULES).join(script_name(account))
}

fn warn_of_processes(why: &VisibleProcesses) {
    warn!(
        error_code = "processes_visible",
        error = why.as_text(),
        "tenants see the command lines of each other's processes; give this machine one tenant at a time, or a kernel from 5.8 on"
    );
}

/// The folders of PAM's modules on various distributions.
const MODULES: [&str; 4] = ["/lib64/security", "/usr/lib64/security", "/lib/security", "/usr/lib/security"];

/// Whether logins through PAM can have these folders: `pam_namespace` is installed.
#[must_use]
pub fn is_known_to_pam() -> bool {
    let of_architecture =
        ["/lib", "/usr/lib"].into_iter().flat_map(|folder| fs::read_dir(folder).into_iter().flatten().flatten());
    let of_architecture = of_architecture.map(|entry| entry.path().join("security"));
    let mut folders = MODULES.iter().map(PathBuf::from).chain(of_architecture);
    folders.any(|folder| folder.join("pam_namespace.so").is_file())
}

/// The folder of PAM's service configurations.
const PAM: &str = "/etc/pam.d";
/// The machine's own services by which a tenant may log in, or begin programs: `systemd-user` is that of `systemctl --user`.
const SERVICES: [&str; 6] = ["sshd", "cron", "crond", "atd", "su", "systemd-user"];

/// Logs which of the machine's login services see its own `/tmp` and all processes, and what to do about it.
pub fn warn_of_logins_without() {
    let services = services_without(Path::new(PAM));
    if !services.is_empty() {
        warn!(
            error_code = "pam_profile_missing",
            services = services.join(", "),
            "tenants who log in by these services see the machine's /tmp, /var/tmp and /dev/shm, and everybody's processes; install the profile \
             deploy/pam/gpuaas-tenants with pam-auth-update, or require pam_namespace.so in their sessions"
        );
    }
}

/// The services in this folder whose sessions do not use `pam_namespace`. A service that is not configured admits no login.
fn services_without(pam: &Path) -> Vec<&'static str> {
    let lacks = |service: &&str| pam.join(service).is_file() && !has_namespace(pam, service, &mut BTreeSet::new());
    SERVICES.into_iter().filter(lacks).collect()
}

/// Whether the service, or what it includes, has `pam_namespace` in its session.
fn has_namespace(pam: &Path, service: &str, read: &mut BTreeSet<String>) -> bool {
    if !read.insert(service.to_owned()) {
        return false;
    }
    let text = fs::read_to_string(pam.join(service)).unwrap_or_default();
    text.lines().any(|line| {
        let line = line.split('#').next().unwrap_or_default();
        let words: Vec<_> = line.split_whitespace().collect();
        match words.as_slice() {
            ["@include", other] | ["session" | "-session", "include" | "substack", other] => {
                has_namespace(pam, other, read)
            }
            ["session" | "-session", _, ..] => line.contains("pam_namespace.so"),
            _ => false,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespace_rules_apply_to_the_tenant_only() {
        let private = PrivateTmp { base: "/state dir/private".into(), hides_processes: true };
        let account = TenantAccount { name: "gpu-1".into(), uid: 70_001 };
        let rules = private.rules(&account);
        assert_eq!(
            rules.lines().collect::<Vec<_>>(),
            [
                "/var/tmp \"/state dir/private/var-tmp/\" user ~gpu-1",
                "/dev/shm \"/state dir/private/shm/\" user ~gpu-1",
                "/tmp \"/state dir/private/tmp/\" user:iscript=gpuaas-gpu-1.init ~gpu-1",
            ]
        );
        let without = PrivateTmp { hides_processes: false, ..private };
        assert!(!without.rules(&account).contains("iscript"), "a login does not fail where /proc cannot be mounted");
    }

    #[test]
    fn services_that_never_reach_pam_namespace_are_named() {
        let pam = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(pam.path().join(name), text).unwrap();
        assert_eq!(services_without(pam.path()), [""; 0], "none is installed");
        write("sshd", "auth required pam_unix.so\n@include common-session\n");
        write("cron", "session include common-session\n@include cron\n");
        write("su", "# session required pam_namespace.so\nauth required pam_namespace.so\n");
        write("common-session", "session required pam_unix.so\n");
        assert_eq!(services_without(pam.path()), ["sshd", "cron", "su"]);
        // As the profile is installed.
        write("common-session", "session\trequired\tpam_unix.so\nsession\trequired\tpam_namespace.so mount_private\n");
        assert_eq!(services_without(pam.path()), ["su"]);
        write("su", "session [success=1 default=ignore] pam_succeed_if.so\nsession required pam_namespace.so\n");
        assert_eq!(services_without(pam.path()), [""; 0]);
    }

    #[test]
    fn homes_inside_a_private_tmp_folder_are_detected() {
        assert!(PrivateTmp::covers(Path::new("/var/tmp/homes")) && PrivateTmp::covers(Path::new("/tmp")));
        assert!(!PrivateTmp::covers(Path::new("/home")) && !PrivateTmp::covers(Path::new("/tmpfs")));
    }
}
