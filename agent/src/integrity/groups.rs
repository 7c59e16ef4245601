//! Members, administrators and passwords of groups. Membership in `sudo`, `docker`, `disk`, `shadow` and others is worth the rights of root,
//! and which of them a machine has is its own affair: all are compared. An agent makes tenants members of their own group alone.

use std::path::Path;

use super::accounts::{MachineAccounts, is_usable, lines_of, unknown_line};
use super::bounded_file::digest;
use super::privileges::{Observed, name_of};

const GROUP: &str = "/etc/group";
const GSHADOW: &str = "/etc/gshadow";

/// Who is in which group, besides by an account's own main group where that is no tenant's.
#[must_use]
pub fn observe(root: &Path, accounts: &MachineAccounts<'_>) -> Observed {
    let mut observed = accounts.tenants_in_other_groups();
    for line in lines_of(root, GROUP, &mut observed) {
        let fields: Vec<&str> = line.splitn(4, ':').collect();
        match fields[..] {
            [name, password, gid, members] if gid.parse::<u32>().is_ok() => {
                let name = name_of(Path::new(name));
                // The group's name may stay, and its number be that of another one.
                add_people(&mut observed, &name, ("member", members), gid);
                // A password that is elsewhere is an `x`.
                if is_usable(password) && password != "x" {
                    observed.add_line(format!("{name} password in {GROUP}"), digest(password.as_bytes()));
                }
            }
            _ => observed.add_line(unknown_line(GROUP, &line), String::new()),
        }
    }
    for line in lines_of(root, GSHADOW, &mut observed) {
        let fields: Vec<&str> = line.splitn(4, ':').collect();
        match fields[..] {
            [name, password, administrators, members] => {
                let name = name_of(Path::new(name));
                add_people(&mut observed, &name, ("administrator", administrators), "");
                add_people(&mut observed, &name, ("member by gshadow", members), "");
                if is_usable(password) && !password.is_empty() {
                    observed.add_line(format!("{name} password"), digest(password.as_bytes()));
                }
            }
            _ => observed.add_line(unknown_line(GSHADOW, &line), String::new()),
        }
    }
    observed
}

fn add_people(observed: &mut Observed, group: &str, (role, people): (&str, &str), state: &str) {
    for one in people.split(',').map(str::trim).filter(|one| !one.is_empty()) {
        observed.add_line(format!("{group} {role} {}", name_of(Path::new(one))), state.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::integrity::privileges::{Entries, differences};
    use crate::integrity::recorded_tenants::RecordedTenants;
    use crate::system_executor::account_records::WrittenFiles;

    const PASSWD: &str =
        "root:x:0:0::/root:/bin/sh\nops:x:1000:1000::/home/ops:/bin/sh\ntena:x:70001:70001::/:/bin/sh\n";
    const GROUPS: &str = "root:x:0:\nsudo:x:27:ops\ndocker:x:998:ops\ntena:x:70001:\n";
    const SHADOWED: &str = "root:*::\nsudo:*::ops\ndocker:!::ops\ntena:!::\n";

    fn machine() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("etc")).unwrap();
        for (file, text) in [("passwd", PASSWD), ("group", GROUPS), ("gshadow", SHADOWED)] {
            fs::write(root.path().join("etc").join(file), text).unwrap();
        }
        root
    }

    fn look(root: &Path) -> Entries {
        let tenants = RecordedTenants::of(&[("tena", 70_001, WrittenFiles::default())]);
        let observed = observe(root, &MachineAccounts::read(root, &tenants));
        assert_eq!(observed.incomplete, None);
        observed.entries
    }

    #[test]
    fn every_way_into_a_group_shows() {
        let root = machine();
        let before = look(root.path());
        assert_eq!(before.len(), 4, "{before:?}");
        for (file, from, to, shown) in [
            ("group", "sudo:x:27:ops", "sudo:x:27:ops,tena", "sudo member tena"),
            ("group", "docker:x:998:ops", "docker:x:0:ops", "docker member ops"),
            ("group", "root:x:0:", "root:x:0:\neve:x:0:tena", "eve member tena"),
            ("group", "docker:x:998:ops", "docker:x:998:ops\ndocker:x:0:ops", "docker member ops"),
            ("group", "sudo:x:27:ops", "sudo::27:ops", "sudo password in /etc/group"),
            ("gshadow", "docker:!::ops", "docker:!:tena:ops", "docker administrator tena"),
            ("gshadow", "docker:!::ops", "docker:!::ops,tena", "docker member by gshadow tena"),
            ("gshadow", "docker:!::ops", "docker:$y$a::ops", "docker password"),
            ("passwd", "tena:x:70001:70001", "tena:x:70001:27", "group 27 of tena"),
        ] {
            let root = machine();
            let file = root.path().join("etc").join(file);
            let text = fs::read_to_string(&file).unwrap();
            fs::write(&file, text.replacen(from, to, 1)).unwrap();
            let found = differences(&before, &look(root.path()));
            assert_eq!(found.keys().map(String::as_str).collect::<Vec<_>>(), [shown], "{from} to {to}");
        }
        let odd = machine();
        fs::write(odd.path().join("etc/group"), GROUPS.to_owned() + "eve:x: 0:tena\n").unwrap();
        assert_eq!(differences(&before, &look(odd.path())).len(), 1, "a line that is not understood");
    }
}
