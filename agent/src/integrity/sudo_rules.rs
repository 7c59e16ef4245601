//! The files from which sudo reads its rules.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::accounts::below;
use super::bounded_file::{self, CONFIGURATION_BYTES, digest};
use super::privileges::{Observed, name_of};
use super::recorded_tenants::RecordedTenants;
use crate::system_executor::account_records::content_digest;
use crate::system_executor::sudoers;

const FIRST: &str = "/etc/sudoers";
/// sudo reads it where its first file includes it, as Debian's does. It is compared in any case.
const FOLDER: &str = "/etc/sudoers.d";
/// The most files that are read.
const MAX_FILES: usize = 256;

/// The rules of sudo, without what the agent has written for these tenants.
#[must_use]
pub fn observe(root: &Path, tenants: &RecordedTenants) -> Observed {
    let mut reading = Reading { root, tenants, observed: Observed::default(), seen: BTreeSet::new() };
    reading.read_file(Path::new(FIRST));
    reading.read_folder(Path::new(FOLDER));
    reading.observed
}

struct Reading<'a> {
    root: &'a Path,
    tenants: &'a RecordedTenants,
    observed: Observed,
    /// Files that include each other are read once.
    seen: BTreeSet<PathBuf>,
}

impl Reading<'_> {
    fn read_file(&mut self, path: &Path) {
        if self.seen.len() >= MAX_FILES {
            self.observed.fail(|| format!("sudo has more than {MAX_FILES} files of rules"));
            return;
        }
        if !self.seen.insert(path.to_owned()) {
            return;
        }
        let (content, metadata) = match bounded_file::read(&below(self.root, path), CONFIGURATION_BYTES) {
            Ok(Some(read)) => read,
            Ok(None) => return,
            Err(error) => return self.observed.unread(&name_of(path), &error),
        };
        if !self.is_of_tenant(path, &content) {
            let owner = format!("{}:{} {:04o}", metadata.uid(), metadata.gid(), metadata.mode() & 0o7777);
            self.observed.add(name_of(path), format!("{owner} {}", digest(&content)));
        }
        for included in included(&String::from_utf8_lossy(&content), path) {
            match included {
                Included::File(path) => self.read_file(&path),
                Included::Folder(path) => self.read_folder(&path),
            }
        }
    }

    fn read_folder(&mut self, folder: &Path) {
        let listed = fs::read_dir(below(self.root, folder))
            .and_then(|entries| entries.map(|entry| Ok(entry?.file_name())).collect::<io::Result<BTreeSet<_>>>());
        match listed {
            Ok(names) => {
                // sudo skips these names.
                let is_read = |name: &[u8]| !name.contains(&b'.') && !name.ends_with(b"~");
                for name in names.iter().filter(|name| is_read(name.as_encoded_bytes())) {
                    self.read_file(&folder.join(name));
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => self.observed.fail(|| format!("{}: {error}", name_of(folder))),
        }
    }

    /// Exactly what the agent has written for a tenant that is there, whatever it would write for the next one.
    fn is_of_tenant(&self, path: &Path, content: &[u8]) -> bool {
        let written = self.tenants.all().find(|(name, _)| sudoers::path_of(name) == path);
        written.is_some_and(|(_, tenant)| tenant.written.sudo_rules == Some(content_digest(content)))
    }
}

enum Included {
    File(PathBuf),
    Folder(PathBuf),
}

/// sudoers(5): `@include` and `@includedir`, or with `#` in place of `@`; a relative path is beside the file.
fn included(text: &str, file: &Path) -> Vec<Included> {
    let folder = file.parent().unwrap_or(Path::new("/"));
    let directive = |line: &str| {
        let line = line.trim_start();
        let rest = line.strip_prefix('@').or_else(|| line.strip_prefix('#'))?;
        let (word, path) = rest.split_once(char::is_whitespace)?;
        let path = folder.join(path.trim().trim_matches('"').replace("\\ ", " "));
        match word {
            "include" => Some(Included::File(path)),
            "includedir" => Some(Included::Folder(path)),
            _ => None,
        }
    };
    text.lines().filter_map(directive).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::integrity::privileges::differences;
    use crate::system_executor::account_records::WrittenFiles;

    fn machine() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("etc/sudoers.d")).unwrap();
        let rules = "root ALL=(ALL) ALL\n@includedir /etc/sudoers.d\n#include sudoers.more\n# include this not\n";
        fs::write(root.path().join("etc/sudoers"), rules).unwrap();
        fs::write(root.path().join("etc/sudoers.more"), "@include /etc/sudoers\n").unwrap();
        root
    }

    #[test]
    fn added_line_file_and_included_file_show() {
        let root = machine();
        let look = || observe(root.path(), &RecordedTenants::default());
        let names = |observed: &Observed| observed.entries.keys().cloned().collect::<Vec<_>>();
        let before = look();
        assert_eq!(names(&before), ["/etc/sudoers", "/etc/sudoers.more"]);
        for (file, shown) in [("etc/sudoers.more", "/etc/sudoers.more"), ("etc/sudoers.d/zz", "/etc/sudoers.d/zz")] {
            fs::write(root.path().join(file), "eve ALL=(ALL) NOPASSWD: ALL\n").unwrap();
            assert_ne!(look().entries.get(shown), before.entries.get(shown), "{file}");
        }
        let found = look();
        for skipped in ["a.b", ".hidden", "backup~"] {
            fs::write(root.path().join("etc/sudoers.d").join(skipped), "eve ALL=(ALL) ALL\n").unwrap();
        }
        assert_eq!(look(), found, "sudo does not read them");
    }

    #[test]
    fn file_of_a_tenant_is_compared_only_where_it_is_not_what_the_agent_wrote() {
        let root = machine();
        let rule = "tena ALL=(root) NOPASSWD: /usr/bin/nvidia-smi\n";
        let file = root.path().join("etc/sudoers.d/gpuaas-tena");
        fs::write(&file, rule).unwrap();
        let shows = |sudo_rules: Option<&str>, name: &str| {
            let sudo_rules = sudo_rules.map(|rules| content_digest(rules.as_bytes()));
            let tenants =
                RecordedTenants::of(&[(name, 70_001, WrittenFiles { sudo_rules, ..WrittenFiles::default() })]);
            observe(root.path(), &tenants).entries.contains_key("/etc/sudoers.d/gpuaas-tena")
        };
        assert!(!shows(Some(rule), "tena"));
        assert!(shows(Some(rule), "tenb"), "no such tenant is there");
        assert!(shows(None, "tena"), "the tenant was given no rule");
        fs::write(&file, "tena ALL=(root) NOPASSWD: ALL\n").unwrap();
        assert!(shows(Some(rule), "tena"), "another rule");
    }

    #[test]
    fn rule_in_a_file_that_is_too_large_to_be_read_shows() {
        let root = machine();
        let before = observe(root.path(), &RecordedTenants::default());
        let padding = "#\n".repeat(usize::try_from(CONFIGURATION_BYTES / 2).unwrap());
        let rules = fs::read_to_string(root.path().join("etc/sudoers")).unwrap();
        fs::write(root.path().join("etc/sudoers"), rules + &padding + "eve ALL=(ALL) NOPASSWD: ALL\n").unwrap();
        let after = observe(root.path(), &RecordedTenants::default());
        assert!(!differences(&before.entries, &after.entries).is_empty(), "{after:?}");
    }

    #[test]
    fn many_files_and_files_that_include_each_other_end_the_reading() {
        let root = machine();
        for n in 0..=MAX_FILES {
            fs::write(root.path().join(format!("etc/sudoers.d/{n}")), "@include /etc/sudoers\n").unwrap();
        }
        let observed = observe(root.path(), &RecordedTenants::default());
        assert!(observed.incomplete.unwrap().contains("more than 256"));
        assert_eq!(observed.entries.len(), MAX_FILES);
    }

    #[test]
    fn owner_and_mode_of_a_file_of_rules_count() {
        use std::os::unix::fs::PermissionsExt as _;
        let root = machine();
        let before = observe(root.path(), &RecordedTenants::default());
        let file = root.path().join("etc/sudoers.more");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o666)).unwrap();
        let found = differences(&before.entries, &observe(root.path(), &RecordedTenants::default()).entries);
        assert_eq!(found.keys().collect::<Vec<_>>(), ["/etc/sudoers.more"], "everyone may write to it");
    }

    #[test]
    fn folder_is_compared_without_an_include_and_includes_may_be_quoted_or_escaped() {
        let root = machine();
        let etc = root.path().join("etc");
        fs::write(etc.join("sudoers"), "@include \"/etc/my rules\"\n@include /etc/other\\ rules\n").unwrap();
        for file in ["my rules", "other rules", "sudoers.d/zz"] {
            fs::write(etc.join(file), "eve ALL=(ALL) ALL\n").unwrap();
        }
        let found = observe(root.path(), &RecordedTenants::default());
        let names: Vec<_> = found.entries.keys().map(String::as_str).collect();
        assert_eq!(names, ["/etc/my rules", "/etc/other rules", "/etc/sudoers", "/etc/sudoers.d/zz"]);
    }

    #[test]
    fn folder_that_cannot_be_listed_is_incomplete() {
        let root = machine();
        fs::remove_dir(root.path().join("etc/sudoers.d")).unwrap();
        fs::write(root.path().join("etc/sudoers.d"), "").unwrap();
        let found = observe(root.path(), &RecordedTenants::default());
        assert!(found.incomplete.is_some_and(|why| why.starts_with("/etc/sudoers.d: ")));
    }
}
