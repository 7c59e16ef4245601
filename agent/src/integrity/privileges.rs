//! What gives rights on a machine: the observed state, and how it differs from the baseline.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use super::bounded_file::{digest, is_unfit};
use crate::finding_log::{Condition, PRIVILEGE};

/// The most entries of one kind.
pub const MAX_ENTRIES: usize = 4096;
/// The most differences that a finding names; a finding is shorter yet.
const NAMED: usize = 8;
/// Digits of a digest in a finding.
const SHOWN_DIGITS: usize = 12;

/// A kind of privilege. Its name is the code of its findings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PrivilegeKind {
    Sudoers,
    Setuid,
    FileCapability,
    UidZero,
    Account,
    GroupMember,
    AuthorizedKeys,
    ListeningPort,
    Autostart,
}

impl PrivilegeKind {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Sudoers,
        Self::Setuid,
        Self::FileCapability,
        Self::UidZero,
        Self::Account,
        Self::GroupMember,
        Self::AuthorizedKeys,
        Self::ListeningPort,
        Self::Autostart,
    ];

    /// The kind with this code.
    #[must_use]
    pub fn of(code: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.code() == code)
    }

    /// The code of its findings.
    #[must_use]
    pub const fn code(self) -> &'static str {
        match self {
            Self::Sudoers => "sudoers",
            Self::Setuid => "setuid",
            Self::FileCapability => "file_capability",
            Self::UidZero => "uid_zero",
            Self::Account => "account",
            Self::GroupMember => "group_member",
            Self::AuthorizedKeys => "authorized_keys",
            Self::ListeningPort => "listening_port",
            Self::Autostart => "autostart",
        }
    }
}

/// The entries of one kind: its name, such as a path, and its state, such as a digest.
pub type Entries = BTreeMap<String, String>;

/// Everything that gives rights on the machine.
pub type Privileges = BTreeMap<PrivilegeKind, Entries>;

/// What was observed of one kind.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Observed {
    pub entries: Entries,
    /// Why something may be missing in the entries. Then an entry that is not there says nothing.
    pub incomplete: Option<String>,
}

impl Observed {
    /// Adds an entry, if there is room.
    pub fn add(&mut self, name: String, state: String) {
        if self.entries.len() < MAX_ENTRIES || self.entries.contains_key(&name) {
            self.entries.insert(name, state);
        } else {
            self.fail(|| format!("there are more than {MAX_ENTRIES} entries"));
        }
    }

    /// Adds a line of a file. Several lines with one name count in their order: which of them a program reads is its own affair.
    pub fn add_line(&mut self, name: String, state: String) {
        match self.entries.get_mut(&name) {
            Some(before) => {
                before.push('|');
                before.push_str(&state);
            }
            None => self.add(name, state),
        }
    }

    /// Notes that a file was not read. One that is too large or no regular file is an entry: padding must not hide what is in it.
    pub fn unread(&mut self, name: &str, error: &io::Error) {
        if is_unfit(error) {
            self.add(format!("{name}: {error}"), String::new());
        } else {
            self.fail(|| format!("{name}: {error}"));
        }
    }

    /// Notes that something could not be read. The first reason is reported.
    pub fn fail(&mut self, why: impl FnOnce() -> String) {
        self.incomplete.get_or_insert_with(why);
    }
}

/// A path as the name of an entry: distinct for each path, and without control characters.
#[must_use]
pub fn name_of(path: &Path) -> String {
    path.as_os_str().as_bytes().escape_ascii().to_string()
}

/// The entries that are not in the baseline, or have another state there. What is gone gives no rights.
#[must_use]
pub fn differences(baseline: &Entries, observed: &Entries) -> Entries {
    let differs = |(name, state): &(&String, &String)| baseline.get(*name) != Some(*state);
    observed.iter().filter(differs).map(|(name, state)| (name.clone(), state.clone())).collect()
}

/// The finding about the differences of one kind. Other differences are another occurrence.
#[must_use]
pub fn condition(kind: PrivilegeKind, differences: &Entries) -> Condition {
    let state = state_of(differences);
    let mut named: Vec<&str> = differences.keys().take(NAMED).map(String::as_str).collect();
    if differences.len() > NAMED {
        named.push("…");
    }
    let detail = format!("{} ({}): {}", differences.len(), &state[..SHOWN_DIGITS], named.join(", "));
    Condition::of_machine(PRIVILEGE, kind.code(), detail).with_state(state)
}

/// What identifies these differences.
#[must_use]
pub fn state_of(differences: &Entries) -> String {
    let mut text = String::new();
    for (name, state) in differences {
        // Neither a name nor a state has a line end in it.
        text.push_str(&format!("{name}\t{state}\n"));
    }
    digest(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entries() -> impl Strategy<Value = Entries> {
        prop::collection::btree_map("[a-d]", "[xy]", 0..4)
    }

    proptest! {
        #[test]
        fn accepted_differences_are_none_and_only_new_or_changed_entries_are_some(baseline in entries(), observed in entries()) {
            let found = differences(&baseline, &observed);
            for (name, state) in &observed {
                prop_assert_eq!(found.contains_key(name), baseline.get(name) != Some(state));
            }
            prop_assert!(found.keys().all(|name| observed.contains_key(name)));
            let mut accepted = baseline;
            accepted.extend(found.clone());
            prop_assert!(differences(&accepted, &observed).is_empty());
            if !found.is_empty() {
                prop_assert!(state_of(&found) != state_of(&Entries::new()));
            }
        }
    }

    #[test]
    fn hostile_names_are_distinct_and_of_one_line() {
        use std::ffi::OsStr;
        let names: Vec<String> = [&b"/a\nb"[..], b"/a\\nb", b"/a\x1b[31m", b"/\xff", b"/\xfe", b"/\xc3\xa9"]
            .iter()
            .map(|bytes| name_of(Path::new(OsStr::from_bytes(bytes))))
            .collect();
        let distinct: std::collections::BTreeSet<_> = names.iter().collect();
        assert_eq!(distinct.len(), names.len(), "{names:?}");
        assert!(names.iter().all(|name| name.bytes().all(|byte| (b' '..=b'~').contains(&byte))), "{names:?}");
    }

    #[test]
    fn entries_over_the_bound_are_left_out_and_the_kind_is_incomplete() {
        let mut observed = Observed::default();
        (0..=MAX_ENTRIES).for_each(|n| observed.add(format!("/{n}"), String::new()));
        assert_eq!(observed.entries.len(), MAX_ENTRIES);
        assert!(observed.incomplete.is_some());
        let found = condition(PrivilegeKind::Setuid, &observed.entries);
        assert!(found.detail.starts_with("4096 (") && found.detail.ends_with("…"), "{}", found.detail);
    }
}
