//! Accounts that are no tenant's: those with the rights of root, all others, their passwords, and the keys with which they are entered.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::bounded_file::{self, CONFIGURATION_BYTES, digest};
use super::privileges::{Observed, name_of};
use super::recorded_tenants::RecordedTenants;
use crate::bounded_reading::{BoundedReading, LATE_AFTER, Reading};

const PASSWD: &str = "/etc/passwd";
const SHADOW: &str = "/etc/shadow";
/// The files of an account in which sshd looks for keys, unless its configuration names others.
const KEY_FILES: [&str; 2] = [".ssh/authorized_keys", ".ssh/authorized_keys2"];
/// Digits of a line's digest in the name of an entry.
const DIGITS: usize = 16;
/// The most accounts that are read.
const MAX_ACCOUNTS: usize = 4096;

/// The accounts of the machine.
#[derive(Debug)]
pub struct MachineAccounts<'a> {
    root: &'a Path,
    tenants: &'a RecordedTenants,
    accounts: Vec<Account>,
    /// What of the files was not understood.
    unread: Observed,
}

#[derive(Debug, PartialEq, Eq)]
struct Account {
    name: String,
    uid: u32,
    gid: u32,
    home: PathBuf,
    /// What decides about its login: password field, gid, home and shell.
    fields: String,
    is_tenants: bool,
}

impl<'a> MachineAccounts<'a> {
    /// Those of `/etc/passwd` below the root folder.
    #[must_use]
    pub fn read(root: &'a Path, tenants: &'a RecordedTenants) -> Self {
        let mut unread = Observed { incomplete: tenants.incomplete.clone(), ..Observed::default() };
        let mut accounts = Vec::new();
        if !root.join("etc/passwd").exists() {
            unread.fail(|| format!("{PASSWD} is not there"));
        }
        for line in lines_of(root, PASSWD, &mut unread) {
            match account(&line, tenants) {
                Some(account) if accounts.len() < MAX_ACCOUNTS => accounts.push(account),
                Some(_) => unread.fail(|| format!("{PASSWD} has more than {MAX_ACCOUNTS} accounts")),
                None => unread.add_line(unknown_line(PASSWD, &line), String::new()),
            }
        }
        Self { root, tenants, accounts, unread }
    }

    /// The accounts with the rights of root.
    #[must_use]
    pub fn with_uid_zero(&self) -> Observed {
        let mut observed = self.unread.clone();
        for account in self.accounts.iter().filter(|account| account.uid == 0) {
            observed.add_line(name_of(Path::new(&account.name)), account.fields.clone());
        }
        observed
    }

    /// The other accounts that are no tenant's, and the passwords of all accounts. An agent gives tenants none.
    #[must_use]
    pub fn without_uid_zero(&self) -> Observed {
        let mut observed = Observed { incomplete: self.unread.incomplete.clone(), ..Observed::default() };
        for account in self.accounts.iter().filter(|account| account.uid != 0 && !account.is_tenants) {
            observed.add_line(name_of(Path::new(&account.name)), format!("{} {}", account.uid, account.fields));
        }
        for line in lines_of(self.root, SHADOW, &mut observed) {
            let mut fields = line.split(':');
            let (Some(name), Some(password)) = (fields.next(), fields.next()) else { continue };
            if is_usable(password) {
                observed.add_line(format!("{} password", name_of(Path::new(name))), digest(password.as_bytes()));
            }
        }
        observed
    }

    /// Tenants whose main group is not their own.
    #[must_use]
    pub fn tenants_in_other_groups(&self) -> Observed {
        let mut observed = Observed { incomplete: self.unread.incomplete.clone(), ..Observed::default() };
        for account in self.accounts.iter().filter(|account| account.is_tenants && account.gid != account.uid) {
            observed.add_line(format!("group {} of {}", account.gid, name_of(Path::new(&account.name))), String::new());
        }
        observed
    }

    /// The authorized keys of all accounts but tenants', and what is in the folder of tenants' keys and is not what the agent has written.
    /// `listed` are the names in that folder as of before the accounts were read: a tenant's account is made before its keys.
    #[must_use]
    pub fn authorized_keys(
        &self,
        (folder, listed): (&Path, &io::Result<Vec<PathBuf>>),
        reads: &mut HomeReads,
    ) -> Observed {
        let mut observed = Observed { incomplete: self.unread.incomplete.clone(), ..Observed::default() };
        let of_others = self.accounts.iter().filter(|account| !account.is_tenants);
        let homes: BTreeSet<&Path> = of_others.map(|account| account.home.as_path()).collect();
        for home in reads.of_homes(self.root, &homes) {
            match home {
                (_, Reading::Fresh(files)) => {
                    files.into_iter().for_each(|(path, read)| observe_keys(&path, read, None, &mut observed));
                }
                (home, Reading::Late { .. }) => {
                    observed.fail(|| format!("{}: its file system does not answer", name_of(home)));
                }
            }
        }
        match listed {
            Ok(listed) => {
                for name in listed {
                    let tenant = name.to_str().and_then(|name| self.tenants.get(name));
                    // Of a tenant of an earlier release it is not known what was written.
                    let written = match tenant.map(|tenant| &tenant.written.authorized_keys) {
                        Some(None) => continue,
                        Some(Some(digest)) => Some(digest.as_str()),
                        None => None,
                    };
                    let path = folder.join(name);
                    observe_keys(&path, read_keys(self.root, &path), written, &mut observed);
                }
            }
            Err(error) => observed.fail(|| format!("{}: {error}", folder.display())),
        }
        observed
    }
}

/// The lines of a file of accounts, without comments. None where it is not there.
pub fn lines_of(root: &Path, path: &str, observed: &mut Observed) -> Vec<String> {
    let content = match bounded_file::read(&below(root, Path::new(path)), CONFIGURATION_BYTES) {
        Ok(Some((content, _))) => content,
        Ok(None) => return Vec::new(),
        Err(error) => {
            observed.unread(path, &error);
            return Vec::new();
        }
    };
    let text = String::from_utf8_lossy(&content);
    // glibc skips blanks before a name.
    let lines = text.lines().map(|line| line.trim_start().to_owned());
    lines.filter(|line| !line.is_empty() && !line.starts_with('#')).collect()
}

/// The entry of a line that is not understood here: another program may understand it.
#[must_use]
pub fn unknown_line(path: &str, line: &str) -> String {
    format!("{path} line {}", &digest(line.as_bytes())[..DIGITS])
}

/// Whether there is a password with which one can log in; an empty one is.
#[must_use]
pub fn is_usable(password: &str) -> bool {
    !password.starts_with(['!', '*'])
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

/// The content of a file with keys. `None`: there is none.
type KeysRead = io::Result<Option<Vec<u8>>>;

/// The files of a home, as they were read.
type HomeKeys = Vec<(PathBuf, KeysRead)>;

/// Reads of the keys in accounts' homes. A home may be on a file system of another machine, or of a program, that does not answer: each home
/// has a reading of its own, so that the others are compared.
#[derive(Debug, Default)]
pub struct HomeReads(BTreeMap<PathBuf, BoundedReading<HomeKeys>>);

impl HomeReads {
    fn of_homes<'a>(&mut self, root: &Path, homes: &BTreeSet<&'a Path>) -> Vec<(&'a Path, Reading<HomeKeys>)> {
        self.0.retain(|home, reading| reading.is_in_flight() || homes.contains(home.as_path()));
        let read = |home: &'a Path| {
            let subject = || format!("keys in {}", home.display());
            let reading = self.0.entry(home.to_owned()).or_insert_with(|| BoundedReading::of(subject()));
            let (root, home_path) = (root.to_owned(), home.to_owned());
            let of_file = move |file: &str| {
                let path = home_path.join(file);
                let read = read_keys(&root, &path);
                (path, read)
            };
            (home, reading.read_within(LATE_AFTER, move || KEY_FILES.map(of_file).into()))
        };
        homes.iter().copied().map(read).collect()
    }
}

fn read_keys(root: &Path, path: &Path) -> KeysRead {
    Ok(bounded_file::read(&below(root, path), CONFIGURATION_BYTES)?.map(|(content, _)| content))
}

/// Each line that is a key is an entry of its own; its options decide too. None of them where the file is as it was `written`.
fn observe_keys(path: &Path, read: KeysRead, written: Option<&str>, observed: &mut Observed) {
    match read {
        Ok(Some(content)) if written == Some(digest(&content).as_str()) => {}
        Ok(Some(content)) => {
            let lines = content.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
            for line in lines.filter(|line| !line.is_empty() && !line.starts_with(b"#")) {
                observed.add(format!("{} key {}", name_of(path), &digest(line)[..DIGITS]), String::new());
            }
        }
        Ok(None) => {}
        Err(error) => observed.unread(&name_of(path), &error),
    }
}

/// As glibc reads it, which takes colons after the sixth as part of the shell.
fn account(line: &str, tenants: &RecordedTenants) -> Option<Account> {
    let fields: Vec<&str> = line.splitn(7, ':').collect();
    let [name, password, uid, gid, _, home, shell] = fields[..] else { return None };
    let (uid, gid) = (uid.parse().ok()?, gid.parse().ok()?);
    let fields = format!("{password}:{gid}:{home}:{shell}");
    Some(Account { name: name.to_owned(), uid, gid, home: home.into(), fields, is_tenants: tenants.has(name, uid) })
}

#[cfg(test)]
mod tests;
