//! The thread that compares, and the order of what it does.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use tokio_util::sync::DropGuard;

use super::*;

const WITHIN: Duration = Duration::from_secs(60);

/// A machine in a folder, with sudo's rules and a program that sets its user.
struct Machine(tempfile::TempDir);

impl Machine {
    fn new() -> Self {
        let machine = Self(tempfile::tempdir().unwrap());
        machine.write("etc/passwd", "root:x:0:0::/root:/bin/sh\n", 0o644);
        machine.write("etc/sudoers", "root ALL=(ALL) ALL\n", 0o440);
        machine.write("usr/bin/su", "su", 0o4755);
        machine
    }

    fn write(&self, path: &str, content: &str, mode: u32) {
        let path = self.0.path().join("root").join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    }

    fn settings(&self) -> PrivilegeSettings {
        PrivilegeSettings {
            root: self.0.path().join("root"),
            state_dir: self.0.path().join("state"),
            homes: "/home".into(),
            keys: "/etc/ssh/gpuaas-keys".into(),
            ssh_listen: None,
            ignored_ports: Vec::new(),
        }
    }

    fn baseline(&self) -> PathBuf {
        self.0.path().join("state/privileges.json")
    }

    fn watched(&self) -> Watched {
        fs::create_dir_all(self.0.path().join("state")).unwrap();
        Watched { privileges: Some(PrivilegeChecker::open(self.settings())), package: None }
    }

    /// A monitor that compares once, and then by order alone, until the guard is dropped.
    fn monitor(&self) -> (Arc<IntegrityMonitor>, DropGuard) {
        fs::create_dir_all(self.0.path().join("state")).unwrap();
        let settings = IntegritySettings { privileges: Some(self.settings()), interval: Duration::from_secs(3600) };
        let stop = CancellationToken::new();
        let monitor = IntegrityMonitor::start(settings, None, stop.clone(), || {}).unwrap();
        wait_until(|| monitor.conditions() == Some(Vec::new()));
        (monitor, stop.drop_guard())
    }
}

fn wait_until(is_so: impl Fn() -> bool) {
    let until = Instant::now() + WITHIN;
    while !is_so() {
        assert!(Instant::now() < until);
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn found(watched: &mut Watched, orders: &Orders, depth: Depth) -> Vec<String> {
    let conditions = watched.compare(orders, depth, || true).unwrap();
    conditions.into_iter().map(|condition| format!("{} {}", condition.key.code, condition.detail)).collect()
}

fn codes(monitor: &IntegrityMonitor) -> Vec<String> {
    monitor.conditions().unwrap_or_default().into_iter().map(|condition| condition.key.code).collect()
}

#[test]
fn clean_up_searches_the_file_systems_at_once_and_accepts_nothing() {
    let machine = Machine::new();
    let (monitor, _running) = machine.monitor();
    machine.write("var/lib/.x", "sh", 0o4755);
    for _ in 0..2 {
        monitor.renew();
        wait_until(|| codes(&monitor) == ["setuid"]);
    }
    // The next comparison is none of the file systems, and still has what was found in them.
    machine.write("etc/sudoers", "eve ALL=(ALL) ALL\n", 0o440);
    monitor.accept("none", "");
    wait_until(|| codes(&monitor) == ["sudoers", "setuid"]);
}

#[test]
fn comparison_has_the_lowest_priority() {
    let machine = Machine::new();
    let _running = machine.monitor();
    let nice = |thread: &Path| {
        let status = fs::read_to_string(thread.join("stat")).ok()?;
        // After the name in parentheses: the third field is the state, the nineteenth the nice value.
        let (name, fields) = status.rsplit_once(')')?;
        name.ends_with("(integrity").then(|| fields.split_whitespace().nth(16).unwrap().to_owned())
    };
    let threads = fs::read_dir("/proc/self/task").unwrap().flatten();
    let found: Vec<String> = threads.filter_map(|thread| nice(&thread.path())).collect();
    assert!(!found.is_empty() && found.iter().all(|nice| nice == "19"), "{found:?}");
}

#[test]
fn accepted_state_is_the_baseline_of_the_next_check() {
    let machine = Machine::new();
    let mut watched = machine.watched();
    assert_eq!(found(&mut watched, &Orders::default(), Depth::Full), Vec::<String>::new());
    machine.write("etc/sudoers.d/a", "eve ALL=(ALL) ALL\n", 0o440);
    let conditions = watched.compare(&Orders::default(), Depth::Quick, || true).unwrap();
    let accepted = vec![("sudoers".to_owned(), conditions[0].state.clone().unwrap())];
    machine.write("etc/sudoers.d/b", "eve ALL=(ALL) ALL\n", 0o440);
    let shown = found(&mut watched, &Orders { renews: false, accepted }, Depth::Quick);
    assert!(
        shown.len() == 1 && shown[0].starts_with("sudoers 1 (") && shown[0].ends_with("/etc/sudoers.d/b"),
        "{shown:?}"
    );
}

#[test]
fn first_record_follows_a_search_and_an_ended_comparison_reports_nothing() {
    let machine = Machine::new();
    let mut watched = machine.watched();
    assert!(watched.compare(&Orders::default(), Depth::Full, || false).is_none());
    assert_eq!(found(&mut watched, &Orders::default(), Depth::Quick), Vec::<String>::new());
    assert!(!machine.baseline().exists());
    found(&mut watched, &Orders::default(), Depth::Full);
    assert!(machine.baseline().exists());
}

#[test]
fn order_that_is_repeated_with_every_heartbeat_is_stored_once() {
    let monitor = IntegrityMonitor::with_conditions(None);
    (0..100).for_each(|_| monitor.accept("setuid", "a"));
    monitor.accept("setuid", "b");
    assert_eq!(monitor.accepted().len(), 2);
}

#[test]
fn comparison_without_progress_is_a_condition_until_it_goes_on() {
    let monitor = IntegrityMonitor::with_conditions(Some(Vec::new()));
    assert_eq!(monitor.late(), None, "none is in progress");
    monitor.note_progress();
    assert_eq!(monitor.late(), None);
    monitor.shared().progress_at = Some(Instant::now() - PROGRESS_WITHIN);
    let late = monitor.late().unwrap();
    assert_eq!((late.key.probe, late.key.code.as_str()), ("reading", "integrity"));
    monitor.note_progress();
    assert_eq!(monitor.late(), None);
}
