use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use super::*;

const HEADER: &str =
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n";

/// A machine in a folder.
struct Machine {
    folder: tempfile::TempDir,
}

impl Machine {
    fn new() -> Self {
        let machine = Self { folder: tempfile::tempdir().unwrap() };
        machine.write("etc/passwd", "root:x:0:0::/root:/bin/sh\n", 0o644);
        machine.write("etc/group", "root:x:0:\nsudo:x:27:\n", 0o644);
        machine.write("etc/sudoers", "root ALL=(ALL) ALL\n", 0o440);
        machine.write("root/.ssh/authorized_keys", "ssh-x of an operator\n", 0o600);
        machine.write("usr/bin/su", "su", 0o4755);
        machine.write("proc/net/tcp", &(HEADER.to_owned() + &listener("00000000:0016", 0)), 0o444);
        machine
    }

    fn write(&self, path: &str, content: &str, mode: u32) {
        let path = self.folder.path().join("root").join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    }

    fn append(&self, path: &str, more: &str) {
        let path = self.folder.path().join("root").join(path);
        fs::write(&path, fs::read_to_string(&path).unwrap() + more).unwrap();
    }

    fn remove(&self, path: &str) {
        fs::remove_file(self.folder.path().join("root").join(path)).unwrap();
    }

    /// A tenant, as the agent records and makes it.
    fn rent(&self) {
        let records =
            r#"{"last_uid":70001,"accounts":{"00000000-0000-0000-0000-000000000001":{"name":"tena","uid":70001}}}"#;
        fs::create_dir_all(self.state_dir()).unwrap();
        fs::write(self.state_dir().join("accounts.json"), records).unwrap();
        self.append("etc/passwd", "tena:x:70001:70001::/home/tena:/bin/sh\n");
    }

    fn release(&self) {
        self.write("etc/passwd", "root:x:0:0::/root:/bin/sh\n", 0o644);
        fs::write(self.state_dir().join("accounts.json"), r#"{"last_uid":70001,"accounts":{}}"#).unwrap();
    }

    fn state_dir(&self) -> PathBuf {
        self.folder.path().join("state")
    }

    fn open(&self) -> PrivilegeChecker {
        PrivilegeChecker::open(PrivilegeSettings {
            root: self.folder.path().join("root"),
            state_dir: self.state_dir(),
            homes: "/home".into(),
            keys: "/etc/ssh/gpuaas-keys".into(),
            ssh_listen: None,
            ignored_ports: Vec::new(),
        })
    }

    /// A checker with the baseline of the machine as it is.
    fn recorded(&self) -> PrivilegeChecker {
        let mut checker = self.open();
        assert!(checker.check(Depth::Full, || true));
        checker.record_first();
        assert!(!checker.has_unrecorded());
        checker
    }
}

/// A machine, and a checker with its baseline.
fn recorded() -> (Machine, PrivilegeChecker) {
    let machine = Machine::new();
    let checker = machine.recorded();
    (machine, checker)
}

fn listener(address: &str, uid: u32) -> String {
    format!("   0: {address} 00000000:0000 0A 00000000:00000000 00:00000000 00000000 {uid:>5}        0 1 1 0 100\n")
}

fn found(checker: &mut PrivilegeChecker, depth: Depth) -> Vec<String> {
    assert!(checker.check(depth, || true));
    checker.conditions().into_iter().map(|condition| condition.key.code).collect()
}

type Intrusion = fn(&Machine);

/// What an intruder with the rights of root leaves, with the code of its finding.
const INTRUSIONS: [(&str, Intrusion); 9] = [
    ("sudoers", |it| it.append("etc/sudoers", "eve ALL=(ALL) NOPASSWD: ALL\n")),
    ("setuid", |it| it.write("var/lib/.x", "sh", 0o4755)),
    ("uid_zero", |it| it.append("etc/passwd", "toor:x:0:0::/:/bin/sh\n")),
    ("account", |it| it.append("etc/passwd", "eve:x:70001:70001::/:/bin/sh\n")),
    ("group_member", |it| it.write("etc/group", "root:x:0:\nsudo:x:27:tena\n", 0o644)),
    ("autostart", |it| it.write("etc/ld.so.preload", "/lib/evil.so\n", 0o644)),
    ("listening_port", |it| it.append("proc/net/tcp", &listener("00000000:1338", 70_001))),
    ("authorized_keys", |it| it.append("root/.ssh/authorized_keys", "ssh-x of eve\n")),
    ("listening_port", |it| it.append("proc/net/tcp", &listener("00000000:1337", 0))),
];

#[test]
fn each_gained_privilege_is_a_finding_of_its_own_and_ends_when_it_is_taken_away() {
    for (code, intrude) in INTRUSIONS {
        let machine = Machine::new();
        let mut checker = machine.recorded();
        assert_eq!(found(&mut checker, Depth::Full), Vec::<String>::new(), "{code}");
        intrude(&machine);
        assert_eq!(found(&mut checker, Depth::Full), [code]);
        // A restarted agent compares with the same baseline.
        let mut repeated = machine.open();
        assert_eq!(found(&mut repeated, Depth::Full), [code]);
        let clean = Machine::new();
        for path in ["etc/sudoers", "etc/passwd", "etc/group", "root/.ssh/authorized_keys", "proc/net/tcp"] {
            let content = fs::read_to_string(clean.folder.path().join("root").join(path)).unwrap();
            machine.write(path, &content, if path == "etc/sudoers" { 0o440 } else { 0o644 });
        }
        match code {
            "setuid" => machine.remove("var/lib/.x"),
            "autostart" => machine.remove("etc/ld.so.preload"),
            _ => {}
        }
        assert_eq!(
            found(&mut repeated, Depth::Quick),
            Vec::<String>::new(),
            "{code} shows as corrected without a search"
        );
    }
}

#[test]
fn clean_up_does_not_accept_what_a_tenant_has_gained() {
    let (machine, mut checker) = recorded();
    machine.write("var/lib/.x", "sh", 0o4755);
    assert_eq!(found(&mut checker, Depth::Full), ["setuid"]);
    checker.renew();
    assert_eq!(found(&mut checker, Depth::Full), ["setuid"]);
    assert_eq!(found(&mut machine.open(), Depth::Full), ["setuid"]);
}

#[test]
fn clean_up_forgets_what_is_gone() {
    let (machine, mut checker) = recorded();
    machine.remove("usr/bin/su");
    assert_eq!(found(&mut checker, Depth::Full), Vec::<String>::new(), "what is gone gives no rights");
    checker.renew();
    machine.write("usr/bin/su", "su", 0o4755);
    assert_eq!(found(&mut checker, Depth::Full), ["setuid"], "it came back after the clean-up");
}

#[test]
fn operator_accepts_exactly_the_differences_that_were_reported() {
    let (machine, mut checker) = recorded();
    machine.write("var/lib/.x", "sh", 0o4755);
    assert_eq!(found(&mut checker, Depth::Full), ["setuid"]);
    let seen = checker.conditions()[0].state.clone().unwrap();
    machine.write("var/lib/.y", "sh", 0o4755);
    assert_eq!(found(&mut checker, Depth::Full), ["setuid"]);
    checker.accept("setuid", &seen);
    assert_eq!(found(&mut checker, Depth::Full), ["setuid"], "another file came in between");
    let both = checker.conditions()[0].state.clone().unwrap();
    checker.accept("sudoers", &both);
    checker.accept("singing", &both);
    checker.accept("setuid", &both);
    assert!(checker.conditions().is_empty());
    assert_eq!(found(&mut machine.open(), Depth::Full), Vec::<String>::new(), "it is stored");
}

#[test]
fn nothing_is_recorded_while_a_tenant_is_there_for_the_first_time() {
    let machine = Machine::new();
    machine.rent();
    let mut checker = machine.open();
    assert!(checker.check(Depth::Full, || true));
    checker.renew();
    assert!(checker.has_unrecorded() && checker.conditions().is_empty(), "nothing is known of any difference");
    machine.release();
    checker.renew();
    assert!(!checker.has_unrecorded());
}

#[test]
fn damaged_baseline_is_a_finding_until_an_operator_accepts_the_machine() {
    let machine = Machine::new();
    drop(machine.recorded());
    let file = machine.state_dir().join("privileges.json");
    fs::write(&file, fs::read_to_string(&file).unwrap().replace("/usr/bin/su", "/usr/bin/sv")).unwrap();
    let mut checker = machine.open();
    checker.accept(BASELINE_DAMAGED, "");
    assert_eq!(found(&mut checker, Depth::Full), [BASELINE_DAMAGED], "nothing was observed yet");
    checker.renew();
    checker.record_first();
    assert_eq!(found(&mut checker, Depth::Full), [BASELINE_DAMAGED]);
    checker.accept("setuid", "");
    checker.accept(BASELINE_NEWER, "");
    assert_eq!(found(&mut checker, Depth::Full), [BASELINE_DAMAGED], "another finding was accepted");
    checker.accept(BASELINE_DAMAGED, "");
    assert_eq!(found(&mut checker, Depth::Full), Vec::<String>::new());
    machine.write("var/lib/.x", "sh", 0o4755);
    assert_eq!(found(&mut checker, Depth::Full), ["setuid"]);
}

#[test]
fn difference_that_lasts_for_less_than_a_moment_is_none() {
    let (machine, mut checker) = recorded();
    machine.append("etc/passwd", "toor:x:0:0::/:/bin/sh\n");
    let folder = machine.folder.path().join("root/etc/passwd");
    checker.between_looks = Some(Box::new(move || fs::write(folder, "root:x:0:0::/root:/bin/sh\n").unwrap()));
    assert_eq!(found(&mut checker, Depth::Quick), Vec::<String>::new());
    assert!(checker.between_looks.is_none(), "it looked once");
}

#[test]
fn unreadable_part_is_shown_and_ends_no_finding() {
    let (machine, mut checker) = recorded();
    machine.append("etc/passwd", "toor:x:0:0::/:/bin/sh\n");
    assert_eq!(found(&mut checker, Depth::Quick), ["uid_zero"]);
    let passwd: &Path = &machine.folder.path().join("root/etc/passwd");
    fs::rename(passwd, passwd.with_extension("away")).unwrap();
    let codes = found(&mut checker, Depth::Quick);
    assert!(codes.contains(&"uid_zero".to_owned()) && codes.contains(&INCOMPLETE.to_owned()), "{codes:?}");
    fs::rename(passwd.with_extension("away"), passwd).unwrap();
    assert_eq!(found(&mut checker, Depth::Quick), ["uid_zero"]);
}

#[test]
fn ended_comparison_changes_nothing() {
    let (machine, mut checker) = recorded();
    machine.write("var/lib/.x", "sh", 0o4755);
    assert!(!checker.check(Depth::Full, || false));
    assert!(checker.conditions().iter().all(|condition| condition.key.code != "setuid"));
}

#[test]
fn state_that_changes_from_look_to_look_is_a_difference_and_no_clean_up_accepts_it() {
    let (machine, mut checker) = recorded();
    let file = machine.folder.path().join("root/etc/sudoers.d/x");
    machine.write("etc/sudoers.d/x", "eve ALL=(ALL) NOPASSWD: ALL # 0\n", 0o440);
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let (stopped, written) = (std::sync::Arc::clone(&stop), file.clone());
    let intruder = std::thread::spawn(move || {
        for n in 1_u32.. {
            if stopped.load(std::sync::atomic::Ordering::Relaxed) {
                break;
            }
            let new = written.with_file_name(".new");
            fs::write(&new, format!("eve ALL=(ALL) NOPASSWD: ALL # {n}\n")).unwrap();
            fs::rename(&new, &written).unwrap();
            std::thread::sleep(CONFIRMED_AFTER / 20);
        }
    });
    assert_eq!(found(&mut checker, Depth::Quick), ["sudoers"]);
    checker.renew();
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    intruder.join().unwrap();
    assert_eq!(found(&mut machine.open(), Depth::Full), ["sudoers"], "nothing of it was accepted");
}

#[test]
fn kind_that_was_not_observed_whole_is_recorded_later_and_not_compared_before() {
    let machine = Machine::new();
    let mut checker = machine.open();
    assert!(checker.check(Depth::Full, || true));
    checker.incomplete.insert(PrivilegeKind::Setuid, "the search took too long".into());
    checker.record_first();
    assert!(checker.has_unrecorded());
    machine.write("var/lib/late", "sh", 0o4755);
    assert_eq!(found(&mut checker, Depth::Full), Vec::<String>::new());
    checker.record_first();
    assert!(!checker.has_unrecorded());
    machine.write("var/lib/later", "sh", 0o4755);
    assert_eq!(found(&mut checker, Depth::Full), ["setuid"]);
}

#[test]
fn recorded_tenant_is_no_difference_and_what_it_is_given_by_others_is() {
    let (machine, mut checker) = recorded();
    machine.rent();
    machine.append("proc/net/tcp", &listener("00000000:1F90", 70_001));
    assert_eq!(found(&mut checker, Depth::Full), Vec::<String>::new());
    machine.write("etc/group", "root:x:0:\nsudo:x:27:tena\n", 0o644);
    assert_eq!(found(&mut checker, Depth::Quick), ["group_member"]);
    machine.write("etc/group", "root:x:0:\nsudo:x:27:\n", 0o644);
    // The record is what makes a tenant.
    fs::write(machine.state_dir().join("accounts.json"), "{").unwrap();
    let codes = found(&mut checker, Depth::Quick);
    for code in ["account", "listening_port", INCOMPLETE] {
        assert!(codes.iter().any(|found| found == code), "{code}: {codes:?}");
    }
}

#[test]
fn baseline_of_a_later_version_stays_and_shows_until_the_last_tenant_is_gone() {
    let machine = Machine::new();
    drop(machine.recorded());
    machine.rent();
    let file = machine.state_dir().join("privileges.json");
    let later = r#"{"version":99,"entries":{}}"#;
    fs::write(&file, later).unwrap();
    let mut checker = machine.open();
    machine.write("var/lib/.x", "sh", 0o4755);
    assert_eq!(found(&mut checker, Depth::Full), [BASELINE_NEWER]);
    checker.record_first();
    checker.renew();
    assert_eq!(fs::read_to_string(&file).unwrap(), later, "another tenant is there");
    machine.release();
    checker.record_first();
    assert_eq!(fs::read_to_string(&file).unwrap(), later, "there was no clean-up");
    checker.renew();
    assert_eq!(found(&mut checker, Depth::Full), Vec::<String>::new());
    machine.write("var/lib/.y", "sh", 0o4755);
    assert_eq!(found(&mut machine.open(), Depth::Full), ["setuid"], "it is compared from here on");
}

#[test]
fn unknown_kind_of_a_later_release_stays_until_the_next_clean_up_and_the_others_are_compared() {
    let machine = Machine::new();
    drop(machine.recorded());
    let file = BaselineFile::in_folder(&machine.state_dir());
    let StoredBaseline::Of(mut baseline) = file.load() else { panic!("there is a baseline") };
    baseline.newer.insert("boot".to_owned(), serde_json::json!({ "/boot/vmlinuz": "a" }));
    file.store(&baseline).unwrap();
    let mut checker = machine.open();
    assert_eq!(found(&mut checker, Depth::Full), [BASELINE_NEWER]);
    machine.write("var/lib/.x", "sh", 0o4755);
    assert_eq!(found(&mut checker, Depth::Full), ["setuid", BASELINE_NEWER]);
    let accepted = checker.conditions()[0].state.clone().unwrap();
    checker.accept("setuid", &accepted);
    let StoredBaseline::Of(stored) = file.load() else { panic!("there is a baseline") };
    assert_eq!(stored.newer, baseline.newer, "an accepted difference leaves it as it is");
    checker.renew();
    assert_eq!(found(&mut checker, Depth::Full), Vec::<String>::new());
    assert_eq!(found(&mut machine.open(), Depth::Full), Vec::<String>::new());
}

#[test]
fn difference_that_moves_between_two_looks_is_no_finding_yet_and_no_clean_up_accepts_it() {
    let (machine, mut checker) = recorded();
    let folder = machine.folder.path().join("root/etc/sudoers.d");
    machine.write("etc/sudoers.d/a", "eve ALL=(ALL) NOPASSWD: ALL\n", 0o440);
    checker.between_looks = Some(Box::new(move || fs::rename(folder.join("a"), folder.join("b")).unwrap()));
    assert_eq!(found(&mut checker, Depth::Quick), Vec::<String>::new());
    assert!(checker.between_looks.is_none(), "it looked once");
    checker.renew();
    assert_eq!(found(&mut machine.open(), Depth::Full), ["sudoers"]);
}

#[test]
fn kind_that_is_recorded_later_takes_nothing_of_the_others_over() {
    let machine = Machine::new();
    let mut checker = machine.open();
    assert!(checker.check(Depth::Full, || true));
    checker.incomplete.insert(PrivilegeKind::Setuid, "the search took too long".into());
    checker.record_first();
    machine.append("etc/sudoers", "eve ALL=(ALL) NOPASSWD: ALL\n");
    assert_eq!(found(&mut checker, Depth::Full), ["sudoers"]);
    checker.record_first();
    assert!(!checker.has_unrecorded());
    assert_eq!(found(&mut checker, Depth::Full), ["sudoers"]);
}

#[test]
fn accepted_difference_that_cannot_be_stored_stays_a_finding() {
    let (machine, mut checker) = recorded();
    machine.write("var/lib/.x", "sh", 0o4755);
    assert_eq!(found(&mut checker, Depth::Full), ["setuid"]);
    let state = checker.conditions()[0].state.clone().unwrap();
    // What cannot be replaced by a file.
    let file = machine.state_dir().join("privileges.json");
    fs::remove_file(&file).unwrap();
    fs::create_dir_all(file.join("full")).unwrap();
    checker.accept("setuid", &state);
    assert_eq!(checker.conditions()[0].key.code, "setuid");
    fs::remove_dir_all(&file).unwrap();
    checker.accept("setuid", &state);
    assert!(checker.conditions().is_empty());
    assert_eq!(found(&mut machine.open(), Depth::Full), Vec::<String>::new());
}

#[test]
fn searched_file_that_cannot_be_opened_ends_no_finding_before_the_next_search() {
    let (machine, mut checker) = recorded();
    machine.write("var/lib/.x", "sh", 0o4755);
    assert_eq!(found(&mut checker, Depth::Full), ["setuid"]);
    machine.remove("var/lib/.x");
    let socket = std::os::unix::net::UnixListener::bind(machine.folder.path().join("root/var/lib/.x")).unwrap();
    assert_eq!(found(&mut checker, Depth::Quick), ["setuid"]);
    assert_eq!(found(&mut checker, Depth::Full), Vec::<String>::new());
    drop(socket);
}

#[test]
fn file_that_changes_after_the_report_is_not_accepted_with_it() {
    let (machine, mut checker) = recorded();
    machine.write("etc/sudoers.d/x", "ops ALL=(ALL) /usr/bin/systemctl\n", 0o440);
    assert_eq!(found(&mut checker, Depth::Quick), ["sudoers"]);
    let reported = checker.conditions()[0].state.clone().unwrap();
    machine.write("etc/sudoers.d/x", "ops ALL=(ALL) NOPASSWD: ALL\n", 0o440);
    assert_eq!(found(&mut checker, Depth::Quick), ["sudoers"]);
    checker.accept("sudoers", &reported);
    assert_eq!(found(&mut checker, Depth::Quick), ["sudoers"]);
}
