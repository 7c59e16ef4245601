use super::*;
use crate::bounded_reading::hanging_mount::OwnMounts;
use crate::system_executor::account_records::{WrittenFiles, content_digest};
use crate::terminal::skipped_tests;

const TENANTS_KEYS: &str = "ssh-x of the tenant\n";

fn machine() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    let etc = root.path().join("etc");
    fs::create_dir_all(&etc).unwrap();
    let passwd = "root:x:0:0:root:/admin:/bin/bash\n# comment\nops:x:1000:1000::/home/ops:/bin/sh\n\
                  tena:x:70001:70001::/home/tena:/bin/sh\nnobody:x:65534:65534::/nonexistent:/bin/false\n";
    fs::write(etc.join("passwd"), passwd).unwrap();
    fs::write(etc.join("shadow"), "root:*:1:0:9:7:::\nops:$y$a:1:0:9:7:::\ntena:*:1:0:9:7:::\n").unwrap();
    for home in ["admin", "home/ops", "home/tena"] {
        fs::create_dir_all(root.path().join(home).join(".ssh")).unwrap();
        fs::write(root.path().join(home).join(".ssh/authorized_keys"), format!("# none\n\nssh-x {home}\n")).unwrap();
    }
    fs::create_dir_all(root.path().join("keys")).unwrap();
    root
}

fn tenants() -> RecordedTenants {
    let authorized_keys = Some(content_digest(TENANTS_KEYS.as_bytes()));
    RecordedTenants::of(&[("tena", 70_001, WrittenFiles { authorized_keys, sudo_rules: None })])
}

fn append(root: &Path, path: &str, more: &str) {
    let path = root.join(path);
    fs::write(&path, fs::read_to_string(&path).unwrap() + more).unwrap();
}

fn keys(root: &Path) -> Observed {
    let listed = key_files(root, Path::new("/keys"));
    MachineAccounts::read(root, &tenants()).authorized_keys((Path::new("/keys"), &listed), &mut HomeReads::default())
}

fn names(observed: &Observed) -> Vec<&str> {
    observed.entries.keys().map(String::as_str).collect()
}

#[test]
fn second_account_with_uid_zero_and_another_shell_of_root_show() {
    let root = machine();
    let look = || MachineAccounts::read(root.path(), &tenants()).with_uid_zero();
    let before = look();
    assert_eq!(names(&before), ["root"]);
    let passwd = root.path().join("etc/passwd");
    let text = fs::read_to_string(&passwd).unwrap();
    fs::write(&passwd, text.replace("/admin:/bin/bash", "/admin:/bin/dash") + "toor::0:0::/:/bin/sh\n").unwrap();
    let after = look();
    assert_eq!(names(&after), ["root", "toor"]);
    assert_ne!(after.entries["root"], before.entries["root"]);
    fs::remove_file(&passwd).unwrap();
    assert!(look().incomplete.is_some());
}

#[test]
fn line_that_only_glibc_understands_and_second_line_of_one_name_show() {
    let root = machine();
    let look = || MachineAccounts::read(root.path(), &tenants()).with_uid_zero();
    let before = look();
    let passwd = root.path().join("etc/passwd");
    let text = fs::read_to_string(&passwd).unwrap();
    for hidden in [
        "toor:x:-0:0::/:/bin/sh\n",
        "toor:x: 0:0::/:/bin/sh\n",
        "  toor:x:0:0::/:/bin/sh:x\n",
        "toor::0:0\n",
        "+::::::\n",
    ] {
        fs::write(&passwd, text.clone() + hidden).unwrap();
        assert_eq!(look().entries.len(), 2, "{hidden}");
    }
    // The first one is what a login takes.
    fs::write(&passwd, "root::0:0::/:/bin/sh\n".to_owned() + &text).unwrap();
    assert_ne!(look().entries["root"], before.entries["root"]);
    let padding = "#\n".repeat(usize::try_from(CONFIGURATION_BYTES / 2).unwrap());
    fs::write(&passwd, text + &padding + "toor::0:0::/:/bin/sh\n").unwrap();
    assert_eq!(names(&look()), ["/etc/passwd: it has more than 1048576 bytes"]);
}

#[test]
fn account_in_the_range_of_tenants_shows_and_only_recorded_tenants_do_not() {
    let root = machine();
    let look = || MachineAccounts::read(root.path(), &tenants()).without_uid_zero();
    let before = look();
    assert_eq!(names(&before), ["nobody", "ops", "ops password"]);
    append(root.path(), "etc/passwd", "eve:x:70002:70002::/home/eve:/bin/sh\nevil:x:70001:70001::/:/bin/sh\n");
    assert_eq!(names(&look()), ["eve", "evil", "nobody", "ops", "ops password"]);
}

#[test]
fn new_and_changed_passwords_show_and_locked_accounts_do_not() {
    let root = machine();
    let look = || MachineAccounts::read(root.path(), &tenants()).without_uid_zero();
    let before = look();
    let shadow = "root:$y$b:1:0:9:7:::\nops:$y$c:1:0:9:7:::\ntena::1:0:9:7:::\nnobody:!$y$d:1:0:9:7:::\n";
    fs::write(root.path().join("etc/shadow"), shadow).unwrap();
    let after = look();
    assert_eq!(names(&after), ["nobody", "ops", "ops password", "root password", "tena password"]);
    assert_ne!(after.entries["ops password"], before.entries["ops password"]);
    assert!(!after.entries.values().any(|state| state.contains("$y$")), "no hash is in the record");
}

#[test]
fn keys_of_tenants_are_compared_with_what_the_agent_wrote_and_those_of_all_others_with_the_baseline() {
    let root = machine();
    let paths = |observed: &Observed| {
        let path = |name: &String| name.split(" key ").next().unwrap().to_owned();
        observed.entries.keys().map(path).collect::<Vec<_>>()
    };
    let before = keys(root.path());
    assert_eq!(paths(&before), ["/admin/.ssh/authorized_keys", "/home/ops/.ssh/authorized_keys"]);
    fs::write(root.path().join("keys/tena"), TENANTS_KEYS).unwrap();
    fs::write(root.path().join("keys/.tena.new"), "ssh-x being written\n").unwrap();
    assert_eq!(keys(root.path()), before);
    append(root.path(), "keys/tena", "ssh-x of an intruder\n");
    assert_eq!(paths(&keys(root.path()))[2..], ["/keys/tena", "/keys/tena"]);
    fs::write(root.path().join("keys/tena"), TENANTS_KEYS).unwrap();
    // sshd of tenants would admit root with it.
    fs::write(root.path().join("keys/root"), "ssh-x of an intruder\n").unwrap();
    assert_eq!(paths(&keys(root.path()))[2..], ["/keys/root"]);
}

#[test]
fn named_pipe_and_endless_file_in_the_place_of_keys_show_and_end_the_reading() {
    let root = machine();
    let file = root.path().join("admin/.ssh/authorized_keys");
    let shows = |why: &str| keys(root.path()).entries.keys().any(|name| name.contains(why));
    fs::remove_file(&file).unwrap();
    nix::unistd::mkfifo(&file, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert!(shows("no regular file"));
    fs::remove_file(&file).unwrap();
    fs::File::create(&file).unwrap().set_len(CONFIGURATION_BYTES + 1).unwrap();
    assert!(shows("more than"));
}

#[test]
fn second_file_of_keys_is_compared_too() {
    let root = machine();
    let before = keys(root.path());
    fs::write(root.path().join("home/ops/.ssh/authorized_keys2"), "ssh-x of an intruder\n").unwrap();
    let after = keys(root.path());
    let new: Vec<_> = after.entries.keys().filter(|name| !before.entries.contains_key(*name)).collect();
    assert!(new.len() == 1 && new[0].starts_with("/home/ops/.ssh/authorized_keys2 key "), "{new:?}");
}

#[test]
fn accounts_over_the_bound_are_incomplete() {
    let root = machine();
    let account = |n: usize| format!("u{n}:x:{}:{}::/:/bin/sh\n", 100_000 + n, 100_000 + n);
    append(root.path(), "etc/passwd", &(0..MAX_ACCOUNTS).map(account).collect::<String>());
    let tenants = tenants();
    let accounts = MachineAccounts::read(root.path(), &tenants);
    for observed in [accounts.with_uid_zero(), accounts.without_uid_zero(), accounts.tenants_in_other_groups()] {
        assert!(observed.incomplete.is_some_and(|why| why.contains("more than 4096 accounts")));
    }
    assert!(keys(root.path()).incomplete.is_some());
}

#[test]
fn folder_of_tenants_keys_that_cannot_be_listed_is_incomplete() {
    let root = machine();
    fs::remove_dir(root.path().join("keys")).unwrap();
    assert_eq!(keys(root.path()).incomplete, None, "no tenant was there yet");
    fs::write(root.path().join("keys"), "").unwrap();
    assert!(keys(root.path()).incomplete.is_some_and(|why| why.starts_with("/keys: ")));
}

#[test]
fn home_that_hangs_is_incomplete_and_keys_in_the_others_are_compared() {
    let root = machine();
    let Some(mounts) = OwnMounts::of_this_thread(skipped_tests::report_skipped) else { return };
    let hanging = mounts.hang(&root.path().join("home/ops"));
    let listed = key_files(root.path(), Path::new("/keys"));
    let (tenants, mut reads) = (tenants(), HomeReads::default());
    let accounts = MachineAccounts::read(root.path(), &tenants);
    let mut look = || accounts.authorized_keys((Path::new("/keys"), &listed), &mut reads);
    let key = |home: &str| {
        format!("{home}/.ssh/authorized_keys key {}", &digest(format!("ssh-x {}", &home[1..]).as_bytes())[..DIGITS])
    };
    for _ in 0..2 {
        let found = look();
        assert_eq!(names(&found), [key("/admin")]);
        assert_eq!(found.incomplete.as_deref(), Some("/home/ops: its file system does not answer"));
    }
    drop(hanging);
    let found = loop {
        let found = look();
        // The read that hung ends with an error, and the next one reads what is there.
        if found.incomplete.is_none() {
            break found;
        }
    };
    assert_eq!(names(&found), [key("/admin"), key("/home/ops")]);
}
