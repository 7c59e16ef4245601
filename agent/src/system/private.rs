//! A `/tmp`, `/var/tmp` and `/dev/shm` of each tenant's own.
//!
//! ```text
//! STATE/private/tmp/<name>                        what the tenant sees as /tmp
//!              /var-tmp/<name>                    as /var/tmp
//!              /shm/<name>                        as /dev/shm: a file system in memory
//! /etc/security/namespace.d/gpuaas-<name>.conf    the same for pam_namespace(8)
//! ```
//!
//! Each terminal, and each login through PAM, has a mount namespace in which these lie over the machine's. Mounts that the tenant makes there
//! (FUSE, user namespaces) are nowhere else. A release removes the folders with everything in them, also what root made in the tenant's name.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder};
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use nix::mount::{MsFlags, mount};
use tracing::warn;
use wire::proof::{Checked, Finding};

use super::accounts::Account;
use super::mounts::{self, Mounts};
use super::walk;
use crate::executor::Failure;
use crate::store::{self, StoreError};
use crate::tenant::look_at_path;
use crate::terminal::Shell;

/// What the tenant has of its own, and under which name. `/tmp` is last: where another is a link to it, it is what the tenant sees.
const FOLDERS: [(Checked, &str, &str); 3] =
    [(Checked::VarTmp, "/var/tmp", "var-tmp"), (Checked::DevShm, "/dev/shm", "shm"), (Checked::Tmp, "/tmp", "tmp")];
/// The one that lies in memory.
const IN_MEMORY: &str = "shm";
/// As the machine's own.
const MODE: u32 = 0o1777;
/// Passable for root alone: pam_namespace refuses any other.
const MODE_OF_PARENT: u32 = 0;
const RULES: &str = "/etc/security/namespace.d";

/// Lays them over the machine's, and becomes the rest of its words.
const ENTER: &str = r#"set -e
mount --bind "$1" /var/tmp; if [ -d /dev/shm ]; then mount --bind "$2" /dev/shm; fi; mount --bind "$3" /tmp
shift 3; exec "$@""#;

/// See the module's documentation.
pub struct Private {
    base: PathBuf,
}

impl Private {
    /// # Errors
    /// The folders' parents cannot be made.
    pub fn open(state_dir: &Path) -> Result<Self, StoreError> {
        let base = state_dir.join("private");
        store::private_folder(&base)?;
        for (_, _, own) in FOLDERS {
            let path = base.join(own);
            let make = || {
                DirBuilder::new().recursive(true).mode(MODE_OF_PARENT).create(&path)?;
                fs::set_permissions(&path, fs::Permissions::from_mode(MODE_OF_PARENT))
            };
            make().map_err(StoreError::at("create", &path))?;
        }
        Ok(Self { base })
    }

    /// Whether a path lies in a place that tenants have of their own, and so is not the same for them as for the machine.
    #[must_use]
    pub fn covers(path: &Path) -> bool {
        FOLDERS.iter().any(|(_, public, _)| path.starts_with(public))
    }

    /// Makes what is missing of the tenant's folders.
    ///
    /// # Errors
    /// `node_storage`.
    pub fn make(&self, account: &Account) -> Result<(), Failure> {
        let mounts = Mounts::of_this_machine().map_err(StoreError::at("read", Path::new("/proc/self/mountinfo")))?;
        for (_, _, own) in FOLDERS {
            let path = self.base.join(own).join(&account.name);
            let make = || {
                DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
                if own == IN_MEMORY && !mounts.has(&path) {
                    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
                    mount(Some("tmpfs"), &path, Some("tmpfs"), flags, Some("mode=1777"))?;
                }
                fs::set_permissions(&path, fs::Permissions::from_mode(MODE))
            };
            make().map_err(StoreError::at("make the tenant's own", &path))?;
        }
        // Without PAM on the node there is nothing to write.
        if Path::new(RULES).parent().is_some_and(Path::is_dir) {
            DirBuilder::new()
                .recursive(true)
                .mode(0o755)
                .create(RULES)
                .map_err(StoreError::at("create", RULES.as_ref()))?;
            store::write_without_sync(&rules_of(account), self.rules(account).as_bytes(), store::PUBLIC)?;
        }
        Ok(())
    }

    /// namespace.conf(5): for this user alone.
    fn rules(&self, account: &Account) -> String {
        let rule = |(_, public, own): (Checked, &str, &str)| {
            format!("{public} \"{}/\" user ~{}\n", self.base.join(own).display(), account.name)
        };
        FOLDERS.into_iter().map(rule).collect()
    }

    /// Removes them; [`Private::look`] tells whether that was all.
    pub fn remove(&self, account: &Account) {
        let _ = store::remove(&rules_of(account));
        for path in self.folders_of(account) {
            // Emptied first: another tenant's namespace may hold on to what is mounted.
            walk::empty(&path, account.uid);
            let mounted = Mounts::of_this_machine().is_ok_and(|mounts| mounts.has(&path));
            if mounted {
                let _ = mounts::unmount(&path);
            }
            let _ = walk::remove_at(&path, &Mounts::default(), account.uid);
        }
    }

    /// Looks for them.
    #[must_use]
    pub fn look(&self, account: &Account) -> Vec<Finding> {
        let folders = FOLDERS.into_iter().zip(self.folders_of(account));
        let folders = folders.map(|((what, _, _), path)| look_at_path(what, &path));
        folders.chain([look_at_path(Checked::SessionFiles, &rules_of(account))]).collect()
    }

    /// Where those of all tenants lie.
    pub fn places(&self) -> impl Iterator<Item = (Checked, PathBuf)> {
        FOLDERS.into_iter().map(|(what, _, own)| (what, self.base.join(own)))
    }

    fn folders_of(&self, account: &Account) -> [PathBuf; 3] {
        FOLDERS.map(|(_, _, own)| self.base.join(own).join(&account.name))
    }

    /// The shell, begun in a mount namespace of its own with the tenant's folders in it. A shell that cannot have them does not begin.
    #[must_use]
    pub fn around(&self, account: &Account, mut shell: Shell) -> Shell {
        let words = ["unshare", "--mount", "--propagation", "slave", "--", "/bin/sh", "-c", ENTER, "sh"];
        shell.launcher.extend(words.map(str::to_owned));
        shell.launcher.extend(self.folders_of(account).map(|path| path.to_string_lossy().into_owned()));
        shell
    }
}

fn rules_of(account: &Account) -> PathBuf {
    Path::new(RULES).join(format!("gpuaas-{}.conf", account.name))
}

/// Where distributions keep PAM's modules.
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

/// Where PAM is told what its services do.
const PAM: &str = "/etc/pam.d";
/// The machine's own services by which a tenant may come in.
const SERVICES: [&str; 5] = ["sshd", "cron", "crond", "atd", "su"];

/// Logs which of the machine's logins see its own `/tmp`, and what to do about it.
pub fn warn_of_logins_without() {
    let services = services_without(Path::new(PAM));
    if !services.is_empty() {
        warn!(
            error_code = "pam_profile_missing",
            services = services.join(", "),
            "tenants who log in by these services see the machine's /tmp, /var/tmp and /dev/shm; install the profile \
             deploy/pam/gpuaas-tenants with pam-auth-update, or require pam_namespace.so in their sessions"
        );
    }
}

/// The services under this folder whose sessions do not go through `pam_namespace`. One that is not there lets nobody in.
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
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_for_the_tenant_alone() {
        let private = Private { base: "/state dir/private".into() };
        let account = Account { name: "gpu-1".into(), uid: 70_001 };
        let rules = private.rules(&account);
        assert_eq!(
            rules.lines().collect::<Vec<_>>(),
            [
                "/var/tmp \"/state dir/private/var-tmp/\" user ~gpu-1",
                "/dev/shm \"/state dir/private/shm/\" user ~gpu-1",
                "/tmp \"/state dir/private/tmp/\" user ~gpu-1",
            ]
        );
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
    fn homes_in_a_place_that_tenants_have_of_their_own_are_seen() {
        assert!(Private::covers(Path::new("/var/tmp/homes")) && Private::covers(Path::new("/tmp")));
        assert!(!Private::covers(Path::new("/home")) && !Private::covers(Path::new("/tmpfs")));
    }
}
