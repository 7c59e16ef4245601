//! Accounts with the rights of root, and the keys with which accounts that are no tenant's are entered.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use super::bounded_file::{self, CONFIGURATION_BYTES, digest};
use super::privileges::{Observed, name_of};

/// The files of an account in which sshd looks for keys, unless its configuration names others.
const KEY_FILES: [&str; 2] = [".ssh/authorized_keys", ".ssh/authorized_keys2"];
/// Digits of a line's digest in the name of an entry.
const DIGITS: usize = 16;
/// The most accounts that are read.
const MAX_ACCOUNTS: usize = 4096;

/// The accounts of the machine.
#[derive(Debug, Default)]
pub struct MachineAccounts {
    accounts: Vec<Account>,
    incomplete: Option<String>,
}

#[derive(Debug, PartialEq, Eq)]
struct Account {
    name: String,
    uid: u32,
    home: PathBuf,
    /// What decides about its login: password field, uid, gid, home and shell.
    fields: String,
}

impl MachineAccounts {
    /// Those of `/etc/passwd` below the root folder.
    #[must_use]
    pub fn read(root: &Path) -> Self {
        let text = match bounded_file::read(&root.join("etc/passwd"), CONFIGURATION_BYTES) {
            Ok(Some((text, _))) => text,
            Ok(None) => return Self::failed("/etc/passwd is not there".to_owned()),
            Err(error) => return Self::failed(format!("/etc/passwd: {error}")),
        };
        let text = String::from_utf8_lossy(&text);
        let accounts: Vec<Account> = text.lines().filter_map(account).take(MAX_ACCOUNTS).collect();
        let incomplete =
            (accounts.len() == MAX_ACCOUNTS).then(|| format!("/etc/passwd has more than {MAX_ACCOUNTS} accounts"));
        Self { accounts, incomplete }
    }

    fn failed(why: String) -> Self {
        Self { accounts: Vec::new(), incomplete: Some(why) }
    }

    /// The names of tenants.
    #[must_use]
    pub fn tenants(&self, uids: &RangeInclusive<u32>) -> BTreeSet<&str> {
        self.accounts.iter().filter(|account| uids.contains(&account.uid)).map(|it| it.name.as_str()).collect()
    }

    /// Whether there is certainly no tenant.
    #[must_use]
    pub fn has_no_tenant(&self, uids: &RangeInclusive<u32>) -> bool {
        self.incomplete.is_none() && self.tenants(uids).is_empty()
    }

    /// The accounts with the rights of root.
    #[must_use]
    pub fn with_uid_zero(&self) -> Observed {
        let mut observed = Observed { incomplete: self.incomplete.clone(), ..Observed::default() };
        for account in self.accounts.iter().filter(|account| account.uid == 0) {
            observed.add(name_of(Path::new(&account.name)), account.fields.clone());
        }
        observed
    }

    /// The authorized keys of all accounts but tenants', and what is in the folder of tenants' keys and is no tenant's. `listed` are the
    /// names in that folder as of before the accounts were read: a tenant's account is made before its keys.
    #[must_use]
    pub fn authorized_keys(
        &self,
        root: &Path,
        (folder, listed): (&Path, &io::Result<Vec<PathBuf>>),
        uids: &RangeInclusive<u32>,
    ) -> Observed {
        let mut observed = Observed { incomplete: self.incomplete.clone(), ..Observed::default() };
        let of_others = self.accounts.iter().filter(|account| !uids.contains(&account.uid));
        let homes: BTreeSet<&Path> = of_others.map(|account| account.home.as_path()).collect();
        for home in homes {
            for file in KEY_FILES {
                observe_keys(root, &home.join(file), &mut observed);
            }
        }
        let tenants = self.tenants(uids);
        match listed {
            Ok(listed) => {
                for name in listed.iter().filter(|name| !name.to_str().is_some_and(|name| tenants.contains(name))) {
                    observe_keys(root, &folder.join(name), &mut observed);
                }
            }
            Err(error) => observed.fail(|| format!("{}: {error}", folder.display())),
        }
        observed
    }
}

/// The names in the folder of tenants' keys.
///
/// # Errors
/// It cannot be listed.
pub fn key_files(root: &Path, folder: &Path) -> io::Result<Vec<PathBuf>> {
    match fs::read_dir(below(root, folder)) {
        // What the agent writes beside a file's name begins with a dot.
        Ok(entries) => entries
            .map(|entry| Ok(PathBuf::from(entry?.file_name())))
            .filter(|name| !name.as_ref().is_ok_and(|name| name.as_os_str().as_encoded_bytes().starts_with(b".")))
            .collect(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// A path of the machine below the root folder.
#[must_use]
pub fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// Each line that is a key is an entry of its own; its options decide too.
fn observe_keys(root: &Path, path: &Path, observed: &mut Observed) {
    match bounded_file::read(&below(root, path), CONFIGURATION_BYTES) {
        Ok(Some((content, _))) => {
            let lines = content.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
            for line in lines.filter(|line| !line.is_empty() && !line.starts_with(b"#")) {
                observed.add(format!("{} key {}", name_of(path), &digest(line)[..DIGITS]), String::new());
            }
        }
        Ok(None) => {}
        Err(error) => observed.fail(|| format!("{}: {error}", name_of(path))),
    }
}

fn account(line: &str) -> Option<Account> {
    let fields: Vec<&str> = line.split(':').collect();
    let [name, password, uid, gid, _, home, shell] = fields[..] else { return None };
    let fields = format!("{password}:{gid}:{home}:{shell}");
    Some(Account { name: name.to_owned(), uid: uid.parse().ok()?, home: home.into(), fields })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TENANTS: RangeInclusive<u32> = 70_000..=79_999;

    fn machine() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let etc = root.path().join("etc");
        fs::create_dir_all(&etc).unwrap();
        let passwd = "root:x:0:0:root:/admin:/bin/bash\nbroken line\nops:x:1000:1000::/home/ops:/bin/sh\n\
                      tena:x:70001:70001::/home/tena:/bin/sh\nnobody:x:65534:65534::/nonexistent:/bin/false\n";
        fs::write(etc.join("passwd"), passwd).unwrap();
        for home in ["admin", "home/ops", "home/tena"] {
            fs::create_dir_all(root.path().join(home).join(".ssh")).unwrap();
            fs::write(root.path().join(home).join(".ssh/authorized_keys"), format!("# none\n\nssh-x {home}\n"))
                .unwrap();
        }
        fs::create_dir_all(root.path().join("keys")).unwrap();
        root
    }

    fn keys(root: &Path) -> Observed {
        let listed = key_files(root, Path::new("/keys"));
        MachineAccounts::read(root).authorized_keys(root, (Path::new("/keys"), &listed), &TENANTS)
    }

    #[test]
    fn second_account_with_uid_zero_and_another_shell_of_root_show() {
        let root = machine();
        let before = MachineAccounts::read(root.path()).with_uid_zero();
        assert_eq!(before.entries.keys().collect::<Vec<_>>(), ["root"]);
        let passwd = root.path().join("etc/passwd");
        let text = fs::read_to_string(&passwd).unwrap();
        fs::write(&passwd, text.replace("/admin:/bin/bash", "/admin:/bin/dash") + "toor::0:0::/:/bin/sh\n").unwrap();
        let after = MachineAccounts::read(root.path()).with_uid_zero();
        assert_eq!(after.entries.keys().collect::<Vec<_>>(), ["root", "toor"]);
        assert_ne!(after.entries["root"], before.entries["root"]);
        fs::remove_file(&passwd).unwrap();
        assert!(MachineAccounts::read(root.path()).with_uid_zero().incomplete.is_some());
    }

    #[test]
    fn keys_of_tenants_are_not_compared_and_those_of_all_others_are() {
        let root = machine();
        let names = |observed: &Observed| {
            let path = |name: &String| name.split(" key ").next().unwrap().to_owned();
            observed.entries.keys().map(path).collect::<Vec<_>>()
        };
        let before = keys(root.path());
        assert_eq!(names(&before), ["/admin/.ssh/authorized_keys", "/home/ops/.ssh/authorized_keys"]);
        fs::write(root.path().join("keys/tena"), "ssh-x of the tenant\n").unwrap();
        fs::write(root.path().join("keys/.tena.new"), "ssh-x being written\n").unwrap();
        assert_eq!(keys(root.path()), before);
        // sshd of tenants would admit root with it.
        fs::write(root.path().join("keys/root"), "ssh-x of an intruder\n").unwrap();
        assert_eq!(names(&keys(root.path())).last().unwrap(), "/keys/root");
    }

    #[test]
    fn named_pipe_and_endless_file_in_the_place_of_keys_end_the_reading() {
        let root = machine();
        let file = root.path().join("admin/.ssh/authorized_keys");
        fs::remove_file(&file).unwrap();
        nix::unistd::mkfifo(&file, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(keys(root.path()).incomplete.unwrap().contains("no regular file"));
        fs::remove_file(&file).unwrap();
        fs::File::create(&file).unwrap().set_len(CONFIGURATION_BYTES + 1).unwrap();
        assert!(keys(root.path()).incomplete.unwrap().contains("more than"));
    }
}
