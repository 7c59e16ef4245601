//! Files by which programs are run as root, or logins are admitted, without any other privilege: what an intruder leaves to come back.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::accounts::below;
use super::bounded_file::{self, CONFIGURATION_BYTES, digest};
use super::privileges::{Observed, name_of};
use super::recorded_tenants::RecordedTenants;
use crate::ssh;

/// Single files.
const FILES: [&str; 6] = [
    // Libraries that every program loads first.
    "/etc/ld.so.preload",
    // Where accounts, and the rules of sudo, are looked up; what sudo loads.
    "/etc/nsswitch.conf",
    "/etc/sudo.conf",
    "/etc/crontab",
    "/etc/anacrontab",
    "/etc/ssh/sshd_config",
];
/// Folders whose files are compared.
const FOLDERS: [&str; 7] = [
    "/etc/cron.d",
    "/etc/cron.hourly",
    "/etc/cron.daily",
    "/etc/cron.weekly",
    "/etc/cron.monthly",
    "/etc/pam.d",
    "/etc/ssh/sshd_config.d",
];
/// A file for each user. A tenant's has the tenant's rights.
const CRONTABS: &str = "/var/spool/cron/crontabs";
/// The most files of one folder.
const MAX_FILES: usize = 512;

/// These files, without those of agents and tenants.
#[must_use]
pub fn observe(root: &Path, tenants: &RecordedTenants) -> Observed {
    let mut observed = Observed::default();
    for file in FILES {
        observe_file(root, Path::new(file), &mut observed);
    }
    for folder in FOLDERS {
        for name in names_in(root, folder, &mut observed) {
            observe_file(root, &Path::new(folder).join(name), &mut observed);
        }
    }
    for name in names_in(root, CRONTABS, &mut observed) {
        if name.to_str().is_none_or(|name| tenants.get(name).is_none()) {
            observe_file(root, &Path::new(CRONTABS).join(name), &mut observed);
        }
    }
    observed
}

fn names_in(root: &Path, folder: &str, observed: &mut Observed) -> BTreeSet<PathBuf> {
    let listed = fs::read_dir(below(root, Path::new(folder))).and_then(|entries| {
        let names = entries.take(MAX_FILES + 1).map(|entry| Ok(PathBuf::from(entry?.file_name())));
        names.collect::<io::Result<BTreeSet<_>>>()
    });
    match listed {
        Ok(names) => {
            if names.len() > MAX_FILES {
                observed.add(format!("{folder} has more than {MAX_FILES} files"), String::new());
            }
            // What the agent writes beside a file's name begins with a dot, and programs skip such files.
            names.into_iter().filter(|name| !name.as_os_str().as_encoded_bytes().starts_with(b".")).collect()
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => BTreeSet::new(),
        Err(error) => {
            observed.fail(|| format!("{folder}: {error}"));
            BTreeSet::new()
        }
    }
}

fn observe_file(root: &Path, path: &Path, observed: &mut Observed) {
    let file = below(root, path);
    // Those who own the file behind a link decide about it, too.
    let link = fs::read_link(&file).map(|target| format!("-> {} ", name_of(&target))).unwrap_or_default();
    match bounded_file::read(&file, CONFIGURATION_BYTES) {
        Ok(Some((content, _))) if ssh::is_own_pam_service(path, &content) => {}
        Ok(Some((content, metadata))) => {
            let owner = format!("{}:{} {:04o}", metadata.uid(), metadata.gid(), metadata.mode() & 0o7777);
            observed.add(name_of(path), format!("{link}{owner} {}", digest(&content)));
        }
        Ok(None) => {}
        // A folder is no job and no configuration.
        Err(_) if file.is_dir() => {}
        Err(error) => observed.unread(&name_of(path), &error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::integrity::privileges::differences;
    use crate::system_executor::account_records::WrittenFiles;

    fn write(root: &Path, path: &str, content: &str) {
        let path = below(root, Path::new(path));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    #[test]
    fn each_way_to_come_back_shows_and_what_agents_and_tenants_have_does_not() {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), "/etc/cron.d/e2scrub_all", "30 3 * * 0 root true\n");
        write(root.path(), "/etc/pam.d/sshd", "auth required pam_unix.so\n");
        let tenants = RecordedTenants::of(&[("tena", 70_001, WrittenFiles::default())]);
        let look = || observe(root.path(), &tenants);
        let before = look();
        assert_eq!((before.entries.len(), &before.incomplete), (2, &None));
        let service = "# Written by the node agent at each start.\nauth required pam_deny.so\naccount required pam_unix.so\n\
                       session required pam_namespace.so mount_private ignore_config_error\n";
        write(root.path(), "/etc/pam.d/gpuaas-sshd-01234567", service);
        write(root.path(), "/var/spool/cron/crontabs/tena", "* * * * * true\n");
        write(root.path(), "/etc/cron.d/.placeholder", "");
        fs::create_dir_all(root.path().join("etc/cron.d/folder")).unwrap();
        assert_eq!(look(), before);
        for (path, content) in [
            ("/etc/ld.so.preload", "/lib/evil.so\n"),
            ("/etc/cron.d/zz", "* * * * * root /lib/evil\n"),
            ("/etc/cron.d/e2scrub_all", "* * * * * root /lib/evil\n"),
            ("/var/spool/cron/crontabs/root", "* * * * * /lib/evil\n"),
            ("/etc/pam.d/sshd", "auth sufficient pam_permit.so\n"),
            ("/etc/pam.d/gpuaas-sshd-01234567", "session optional pam_exec.so /lib/evil\n"),
            ("/etc/pam.d/zz", service),
            ("/etc/ssh/sshd_config.d/zz.conf", "AuthorizedKeysFile /lib/keys\n"),
        ] {
            let original = fs::read(below(root.path(), Path::new(path))).ok();
            write(root.path(), path, content);
            let found = differences(&before.entries, &look().entries);
            assert_eq!(found.keys().map(String::as_str).collect::<Vec<_>>(), [path]);
            match original {
                Some(content) => fs::write(below(root.path(), Path::new(path)), content).unwrap(),
                None => fs::remove_file(below(root.path(), Path::new(path))).unwrap(),
            }
        }
        assert_eq!(look(), before);
    }

    #[test]
    fn each_file_and_each_folder_is_compared_with_owner_mode_and_link() {
        use std::os::unix::fs::{PermissionsExt as _, symlink};
        let reviewed = [
            "/etc/anacrontab",
            "/etc/cron.d/x",
            "/etc/cron.daily/x",
            "/etc/cron.hourly/x",
            "/etc/cron.monthly/x",
            "/etc/cron.weekly/x",
            "/etc/crontab",
            "/etc/ld.so.preload",
            "/etc/nsswitch.conf",
            "/etc/pam.d/x",
            "/etc/ssh/sshd_config",
            "/etc/ssh/sshd_config.d/x",
            "/etc/sudo.conf",
            "/var/spool/cron/crontabs/x",
        ];
        let root = tempfile::tempdir().unwrap();
        reviewed.iter().for_each(|path| write(root.path(), path, "before\n"));
        let look = || observe(root.path(), &RecordedTenants::default());
        let before = look();
        assert_eq!(before.entries.keys().map(String::as_str).collect::<Vec<_>>(), reviewed);
        for path in reviewed {
            let file = below(root.path(), Path::new(path));
            let shows = |change: &str| {
                let found = differences(&before.entries, &look().entries);
                assert_eq!(found.keys().map(String::as_str).collect::<Vec<_>>(), [path], "{change}");
            };
            let mode = fs::metadata(&file).unwrap().permissions();
            fs::set_permissions(&file, fs::Permissions::from_mode(0o666)).unwrap();
            shows("everyone may write to it");
            fs::set_permissions(&file, mode).unwrap();
            // The same content, of which others decide from here on.
            let elsewhere = root.path().join("elsewhere");
            fs::rename(&file, &elsewhere).unwrap();
            symlink(&elsewhere, &file).unwrap();
            shows("a link");
            fs::remove_file(&file).unwrap();
            fs::rename(&elsewhere, &file).unwrap();
            assert_eq!(look(), before);
        }
    }

    #[test]
    fn folder_with_too_many_files_or_that_cannot_be_listed_shows() {
        let root = tempfile::tempdir().unwrap();
        (0..=MAX_FILES).for_each(|n| write(root.path(), &format!("/etc/cron.d/{n}"), ""));
        write(root.path(), "/etc/pam.d", "");
        let found = observe(root.path(), &RecordedTenants::default());
        assert!(found.entries.contains_key("/etc/cron.d has more than 512 files"));
        assert!(found.incomplete.is_some_and(|why| why.starts_with("/etc/pam.d: ")));
    }

    #[test]
    fn job_in_a_file_that_is_too_large_to_be_read_or_no_regular_file_shows() {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), "/etc/crontab", "# none\n");
        let before = observe(root.path(), &RecordedTenants::default());
        let padding = "#\n".repeat(usize::try_from(CONFIGURATION_BYTES / 2).unwrap());
        write(root.path(), "/etc/crontab", &(padding + "* * * * * root /lib/evil\n"));
        let pipe = below(root.path(), Path::new("/etc/anacrontab"));
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let found = differences(&before.entries, &observe(root.path(), &RecordedTenants::default()).entries);
        let names: Vec<_> = found.keys().map(|name| name.split(':').next().unwrap()).collect();
        assert_eq!(names, ["/etc/anacrontab", "/etc/crontab"], "{found:?}");
    }
}
