//! The executor that makes Linux users, on machines that are thrown away.

#![allow(clippy::unwrap_used, clippy::expect_used, unreachable_pub)]

mod failing_gpus;
mod full_state_folder;
mod gpu_outages;
mod homes_elsewhere;
mod hostile_tenants;
mod neighbours;
mod overlay_machine;
mod private_tmp;
mod skipped_tests;
mod tenant_bounds;

use std::collections::BTreeMap;
use std::fs;
use std::ops::RangeInclusive;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use agent::executor::Executor as _;
use agent::gpu_probe::DEFAULT_DEADLINE;
use agent::gpus::{GpuSimulation, Gpus};
use agent::integrity::recorded_tenants::RecordedTenants;
use agent::integrity::sudo_rules;
use agent::system_executor::tenant_limits::LimitSettings;
use agent::system_executor::{Settings, System};
use overlay_machine::{FileRecord, View};
use uuid::Uuid;
use wire::cleanup_proof::{CleanupCheck, CleanupFinding, CleanupReport, FindingOutcome};
use wire::inventory::{DeviceRef, ExecutorKind};
use wire::recording::RecordTerms;
use wire::task::{OpenTerminal, Provision, ReconcileSshKeys, Release};

const STATE: &str = "/var/lib/gpuaas-agent";
const NAME: &str = "tena";
/// The user name of a second tenant.
const NEIGHBOUR: &str = "neighbour";
/// Which uids the machine's agents gave: numbers, and nothing of a tenant.
const UIDS: &str = "/var/lib/gpuaas-uids.json";
/// Not the first ones of the default: the kernel counts keys and processes of a uid for the whole machine, and other tests' booted machines
/// have tenants at the same time.
const TENANT_UIDS: RangeInclusive<u32> = 80_000..=99_999;

/// A node with four GPUs whose device nodes are the kernel's null device under other names.
struct Node {
    system: System,
    gpus: Arc<Gpus>,
}

impl Node {
    fn start() -> Self {
        Self::start_with(&["/bin/sleep"])
    }

    /// With these commands that tenants may run as root.
    fn start_with(sudo_commands: &[&str]) -> Self {
        Self::start_bounded(sudo_commands, Settings::default().account_tool_limit)
    }

    /// The same, where one of the tools that change accounts may run for so long.
    fn start_bounded(sudo_commands: &[&str], account_tool_limit: Duration) -> Self {
        let sudo_commands = sudo_commands.iter().map(|command| command.parse().unwrap()).collect();
        Self::start_as(Settings { sudo_commands, account_tool_limit, ..Settings::default() })
    }

    /// With these shares of the machine.
    fn start_limited(limits: LimitSettings) -> Self {
        Self::start_as(Settings { limits, ..Settings::default() })
    }

    fn start_as(settings: Settings) -> Self {
        for minor in 0..4 {
            let node = format!("/dev/nvidia{minor}");
            if !Path::new(&node).exists() {
                run("mknod", &["-m", "666", &node, "c", "1", "3"]);
            }
        }
        // Every machine has it from its first change of a user on.
        fs::write("/etc/.pwd.lock", "").unwrap();
        let asked = GpuSimulation { count: 4, model: "H100".into(), memory_mib: 81_920 };
        let gpus = Arc::new(Gpus::detect(Uuid::nil(), Some(&asked), DEFAULT_DEADLINE));
        let (shared, program) = (vec!["/scratch".into()], env!("CARGO_BIN_EXE_gpuaas-agent").into());
        let settings = Settings { uids: TENANT_UIDS, shared, program, ..settings };
        fs::create_dir_all(STATE).unwrap();
        Self { system: System::open(Path::new(STATE), settings, Arc::clone(&gpus)).unwrap(), gpus }
    }

    fn devices(&self, which: &[usize]) -> Vec<DeviceRef> {
        let all = self.gpus.list().unwrap();
        which.iter().map(|index| DeviceRef::from(&all[*index])).collect()
    }

    fn provision(&self, id: Uuid, name: &str, devices: &[usize]) -> Provision {
        Provision {
            allocation_id: id,
            user_name: name.into(),
            authorized_keys: vec!["ssh-ed25519 AAAA ann@laptop".into()],
            devices: self.devices(devices),
            sku: "h100".into(),
            deadline_at: chrono::Utc::now(),
        }
    }

    fn release(&self, id: Uuid, name: &str, devices: &[usize]) -> Vec<CleanupFinding> {
        let task = Release { allocation_id: id, user_name: name.into(), devices: self.devices(devices) };
        self.system.release(&task).unwrap().findings
    }

    fn make(&self, id: Uuid, name: &str, devices: &[usize]) -> u32 {
        let output = self.system.provision(&self.provision(id, name, devices)).unwrap();
        output["uid"].as_u64().unwrap().try_into().unwrap()
    }
}

/// Everything on this machine that could have changed.
fn snapshot(except: &[&Path]) -> BTreeMap<String, FileRecord> {
    View::of("/").snapshot(except, |listing| fs::read_to_string(listing).unwrap_or_default())
}

fn run(program: &str, args: &[&str]) -> String {
    let ran = Command::new(program).args(args).output().unwrap();
    assert!(ran.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&ran.stderr));
    String::from_utf8(ran.stdout).unwrap()
}

/// A shell of the tenant, in a session of its own as a login would have it.
fn shell(uid: u32, script: &str) -> Command {
    let mut command = Command::new("setsid");
    command.args(["sh", "-c", script]).uid(uid).gid(uid).current_dir("/").stdin(Stdio::null()).stderr(Stdio::null());
    command
}

fn can(uid: u32, script: &str) -> bool {
    shell(uid, script).stdout(Stdio::null()).status().unwrap().success()
}

fn spawn(uid: u32, script: &str) -> Child {
    shell(uid, script).stdout(Stdio::null()).spawn().unwrap()
}

fn stop(mut program: Child) {
    program.kill().unwrap();
    program.wait().unwrap();
}

fn assert_clean(findings: &[CleanupFinding]) {
    let report = CleanupReport {
        node_id: Uuid::nil(),
        allocation_id: Uuid::nil(),
        task_id: Uuid::nil(),
        attempt: 1,
        boot_id: Uuid::nil(),
        checked_at: chrono::Utc::now(),
        findings: findings.to_vec(),
    };
    let missing: Vec<_> = report.missing_checks(ExecutorKind::System).collect();
    let left: Vec<_> = report.leftovers().collect();
    assert!(report.is_clean(ExecutorKind::System), "left: {left:#?}\nnot looked for: {missing:?}");
}

fn outcome(findings: &[CleanupFinding], what: CleanupCheck) -> FindingOutcome {
    let worst = findings.iter().filter(|finding| finding.what == what).map(|finding| finding.outcome);
    worst.max_by_key(|outcome| *outcome != FindingOutcome::Gone).unwrap()
}

#[track_caller]
fn eventually(what: impl Fn() -> bool) {
    let begun = Instant::now();
    while !what() {
        assert!(begun.elapsed() < Duration::from_secs(60), "it did not come about");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn mode(path: impl AsRef<Path>) -> (u32, u32, u32) {
    let metadata = fs::symlink_metadata(path).unwrap();
    (metadata.mode() & 0o7777, metadata.uid(), metadata.gid())
}

#[test]
fn tenant_has_an_account_its_devices_and_its_sudo_commands() {
    overlay_machine::alone("tenant_has_an_account_its_devices_and_its_sudo_commands", || {
        let node = Node::start();
        let id = Uuid::from_u128(1);
        let output = node.system.provision(&node.provision(id, NAME, &[0, 2])).unwrap();
        let uid = u32::try_from(output["uid"].as_u64().unwrap()).unwrap();
        assert!(TENANT_UIDS.contains(&uid), "{uid}");
        assert_eq!(run("id", &[NAME]).trim(), format!("uid={uid}({NAME}) gid={uid}({NAME}) groups={uid}({NAME})"));
        assert_eq!(mode("/home/tena"), (0o700, uid, uid));
        assert_eq!(mode("/etc/ssh/gpuaas-keys/tena"), (0o644, 0, 0));
        assert_eq!(fs::read_to_string("/etc/ssh/gpuaas-keys/tena").unwrap(), "ssh-ed25519 AAAA ann@laptop\n");

        assert!(can(uid, "cat /dev/nvidia0 && cat /dev/nvidia2"));
        assert!(!can(uid, "cat /dev/nvidia1") && !can(uid, "echo x > /dev/nvidia3"));
        assert!(can(uid, "sudo -n /bin/sleep 0"));
        for forbidden in ["sudo -n id", "sudo -n /bin/sh -c id", "sudo -n -u daemon /bin/sleep 0", "su -c id"] {
            assert!(!can(uid, forbidden), "{forbidden}");
        }

        let neighbour = node.make(Uuid::from_u128(2), "neighbour", &[1]);
        assert_ne!(neighbour, uid);
        assert!(can(neighbour, "cat /dev/nvidia1"));
        assert!(!can(neighbour, "cat /dev/nvidia0") && !can(neighbour, "ls /home/tena"));

        // Repeated, by the same agent and by the next one.
        assert_eq!(node.make(id, NAME, &[0, 2]), uid);
        assert_eq!(Node::start().make(id, NAME, &[0, 2]), uid);
        assert!(can(uid, "cat /dev/nvidia0"), "a restart takes no device from who holds it");
    });
}

fn threads_of(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count)
}

#[test]
fn program_whose_main_thread_has_ended_is_ended_by_a_release() {
    overlay_machine::alone("program_whose_main_thread_has_ended_is_ended_by_a_release", || {
        let node = Node::start();
        let id = Uuid::from_u128(1);
        let uid = node.make(id, NAME, &[0]);
        // The system call ends the main thread alone.
        let number = if cfg!(target_arch = "x86_64") { 60 } else { 93 };
        let program = format!("perl -Mthreads -e 'threads->create(sub {{ sleep 1000 }}); syscall({number}, 0)'");
        let mut program = spawn(uid, &format!("exec {program}"));
        let stat = format!("/proc/{}/stat", program.id());
        eventually(|| fs::read_to_string(&stat).is_ok_and(|stat| stat.contains("(perl) Z ")));
        assert!(program.try_wait().unwrap().is_none(), "its second thread runs");
        assert_clean(&node.release(id, NAME, &[0]));
        eventually(|| {
            fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(" Z ")) && threads_of(program.id()) <= 1
        });
        assert!(!program.wait().unwrap().success(), "it was killed");
    });
}

#[test]
fn changed_sudo_commands_reach_present_tenants_and_are_no_difference_and_an_altered_rule_is() {
    overlay_machine::alone(
        "changed_sudo_commands_reach_present_tenants_and_are_no_difference_and_an_altered_rule_is",
        || {
            let (root, file) = (Path::new("/"), "/etc/sudoers.d/gpuaas-tena");
            let is_different =
                || sudo_rules::observe(root, &RecordedTenants::read(root, Path::new(STATE))).entries.contains_key(file);
            let first = Node::start();
            let id = Uuid::from_u128(1);
            first.make(id, NAME, &[0]);
            assert!(fs::read_to_string(file).unwrap().ends_with("NOPASSWD: /bin/sleep\n") && !is_different());
            drop(first);
            drop(Node::start_with(&["/bin/sleep", "/bin/true"]));
            assert!(
                fs::read_to_string(file).unwrap().ends_with("NOPASSWD: /bin/sleep, /bin/true\n") && !is_different()
            );
            // A start must not hide what another program has written.
            fs::write(file, "tena ALL=(ALL) NOPASSWD: ALL\n").unwrap();
            let last = Node::start_with(&["/bin/true"]);
            assert!(fs::read_to_string(file).unwrap().ends_with("ALL\n") && is_different());
            fs::remove_file(file).unwrap();
            drop(last);
            let last = Node::start_with(&[]);
            assert!(!Path::new(file).exists() && !is_different());
            assert_clean(&last.release(id, NAME, &[0]));
        },
    );
}

#[test]
fn reboot_restores_the_tenants_device_access() {
    overlay_machine::alone("reboot_restores_the_tenants_device_access", || {
        let uid = Node::start().make(Uuid::from_u128(1), NAME, &[1]);
        // As the kernel makes them: open to everybody.
        for minor in 0..4 {
            let node = format!("/dev/nvidia{minor}");
            fs::remove_file(&node).unwrap();
            run("mknod", &["-m", "666", &node, "c", "1", "3"]);
        }
        assert!(can(uid, "cat /dev/nvidia0"));
        let node = Node::start();
        assert!(can(uid, "cat /dev/nvidia1") && !can(uid, "cat /dev/nvidia0"));
        assert!(!can(node.make(Uuid::from_u128(2), "neighbour", &[2]), "cat /dev/nvidia1"));
    });
}

#[test]
fn tenant_with_leftovers_everywhere_is_removed_completely() {
    overlay_machine::alone("tenant_with_leftovers_everywhere_is_removed_completely", || {
        let node = Node::start();
        // An older account in the backups must stay unchanged.
        fs::write("/etc/passwd-", "old:x:900:900::/:/bin/sh\n").unwrap();
        fs::create_dir_all("/tmp/others").unwrap();
        fs::set_permissions("/tmp/others", fs::Permissions::from_mode(0o1777)).unwrap();
        let state = [Path::new(STATE), Path::new(UIDS)];
        let before = snapshot(&state);

        let id = Uuid::from_u128(1);
        let uid = node.make(id, NAME, &[0, 1]);
        litter(uid);
        let findings = node.release(id, NAME, &[0, 1]);
        assert_clean(&findings);
        let differences = View::of("/").differences(&before, &snapshot(&state));
        assert!(differences.is_empty(), "{differences:#?}");
        assert_clean(&node.release(id, NAME, &[0, 1]));
        assert_ne!(node.make(Uuid::from_u128(2), NAME, &[0]), uid, "a uid is never used twice");
    });
}

/// By system call numbers, since not every machine has a tool for keys.
const KEYS: &str = "exec perl -e 'my ($add, $ctl) = `uname -m` =~ /aarch64/ ? (217, 219) : (248, 250); \
    my ($kind, $name, $secret) = (q(user), q(mine), q(secret)); \
    for my $ring (-4, -5) { syscall($add, $kind, $name, $secret, 6, $ring) > 0 or die } \
    syscall($ctl, 22, -1, -4) > 0 or die'";

/// Creates everything that a tenant, and processes that run as root on its behalf, can leave behind.
fn litter(uid: u32) {
    for script in [
        "mkdir -p ~/closed/deep && echo x > ~/closed/deep/x && chmod 000 ~/closed",
        "ln -s /etc ~/.ssh",
        "mkdir ~/fixed && echo x > ~/fixed/x && echo x > /tmp/fixed",
        "echo x > /tmp/x; mkdir /tmp/d; echo x > /tmp/d/x; chmod 000 /tmp/d; echo x > /tmp/others/x",
        "echo x > /var/tmp/x; echo x > /dev/shm/x; echo x > /dev/shm/sem.x; ln -s /etc/passwd /tmp/link",
        "ipcmk -M 64 && ipcmk -S 1 && ipcmk -Q",
        // A key in each of its keyrings: add_key(2), and KEYCTL_GET_PERSISTENT into the user's.
        KEYS,
    ] {
        assert!(can(uid, &format!("HOME=/home/{NAME}; {script}")), "{script}");
    }
    // A queue, as mq_open creates it.
    fs::create_dir_all("/run/queues").unwrap();
    run("mount", &["-t", "mqueue", "mqueue", "/run/queues"]);
    fs::write("/run/queues/q", "").unwrap();
    run("chown", &[&uid.to_string(), "/run/queues/q"]);
    run("umount", &["/run/queues"]);
    fs::remove_dir("/run/queues").unwrap();
    // What cron, sudo and a login store of it.
    for folder in ["/var/spool/cron/crontabs", "/var/mail", "/run/sudo/ts", "/var/lib/sudo/lectured"] {
        if Path::new(folder).is_dir() {
            fs::write(Path::new(folder).join(NAME), "x").unwrap();
        }
    }
    // Files that were made immutable by root on its behalf, or by a program with that capability.
    run("chattr", &["+i", &format!("/home/{NAME}/fixed/x"), &format!("/home/{NAME}/fixed"), "/tmp/fixed"]);
    // Mounts in the home: one of its own, and one of the machine's own files, which must not be removed.
    for mounted in ["own", "etc"] {
        fs::create_dir(format!("/home/{NAME}/{mounted}")).unwrap();
    }
    run("mount", &["-t", "tmpfs", "tmpfs", &format!("/home/{NAME}/own")]);
    run("mount", &["--bind", "/etc", &format!("/home/{NAME}/etc")]);
    // Processes: one that ignores signals, one that runs as root on its behalf, one that forks endlessly.
    let scripts = [
        "trap '' TERM HUP; while true; do sleep 1; done",
        "exec sudo -n /bin/sleep 1000",
        "ulimit -u 64; while true; do sleep 1000 & sleep 1000 & done",
    ];
    let children: Vec<Child> = scripts.iter().map(|script| spawn(uid, script)).collect();
    std::thread::spawn(move || children.into_iter().for_each(|mut child| drop(child.wait())));
    eventually(|| View::of("/").processes().len() > 40);
}

#[test]
fn unremovable_leftover_is_reported_and_keeps_the_devices_reserved() {
    overlay_machine::alone("unremovable_leftover_is_reported_and_keeps_the_devices_reserved", || {
        let node = Node::start();
        let (id, next) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let uid = node.make(id, NAME, &[0]);
        // A file of the tenant on a file system that became read-only.
        fs::create_dir("/tmp/stuck").unwrap();
        run("mount", &["-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/tmp/stuck"]);
        assert!(can(uid, "echo x > /tmp/stuck/x"));
        run("mount", &["-o", "remount,ro", "/tmp/stuck"]);

        let findings = node.release(id, NAME, &[0]);
        assert_eq!(outcome(&findings, CleanupCheck::Tmp), FindingOutcome::Present);
        assert_eq!(outcome(&findings, CleanupCheck::PasswdEntry), FindingOutcome::Gone);
        assert_eq!(outcome(&findings, CleanupCheck::DeviceReservation), FindingOutcome::Present);
        let refused = node.system.provision(&node.provision(next, "next", &[0])).unwrap_err();
        assert_eq!(refused.code, "device_in_use");

        // The account is gone, but the next agent still knows its uid.
        run("mount", &["-o", "remount,rw", "/tmp/stuck"]);
        let node = Node::start();
        assert_clean(&node.release(id, NAME, &[0]));
        assert!(!Path::new("/tmp/stuck/x").exists());
        node.make(next, "next", &[0]);
    });
}

/// Replaces programs of this machine by one that never ends. Returns what they were.
fn hang_programs(paths: &[PathBuf]) -> Vec<(PathBuf, Vec<u8>)> {
    let replace = |path: &PathBuf| {
        let was = fs::read(path).unwrap();
        fs::remove_file(path).unwrap();
        fs::write(path, "#!/bin/sh\nexec sleep 1000000\n").unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
        (path.clone(), was)
    };
    paths.iter().map(replace).collect()
}

#[test]
fn release_goes_on_where_the_machines_programs_hang_and_is_proved_once_they_do_not() {
    overlay_machine::alone("release_goes_on_where_the_machines_programs_hang_and_is_proved_once_they_do_not", || {
        let node = Node::start_bounded(&[], Duration::from_secs(1));
        let id = Uuid::from_u128(1);
        let uid = node.make(id, NAME, &[0]);
        let mut program = spawn(uid, "sleep 1000");
        std::thread::spawn(move || program.wait());
        assert!(can(uid, "touch /home/tena/file /tmp/file"), "it leaves files");
        let path_of = |tool: &str| PathBuf::from(run("sh", &["-c", &format!("command -v {tool}")]).trim());
        let found = ["userdel", "groupdel"].map(path_of);
        let were = hang_programs(&found);

        let begun = Instant::now();
        let findings = node.release(id, NAME, &[0]);
        assert!(begun.elapsed() < Duration::from_secs(120), "{:?}", begun.elapsed());
        let of = |what| outcome(&findings, what);
        for gone in [CleanupCheck::Processes, CleanupCheck::Home, CleanupCheck::Tmp, CleanupCheck::AuthorizedKeys] {
            assert_eq!(of(gone), FindingOutcome::Gone, "{gone:?}: {findings:?}");
        }
        for left in [CleanupCheck::PasswdEntry, CleanupCheck::GroupEntry, CleanupCheck::DeviceReservation] {
            assert_eq!(of(left), FindingOutcome::Present, "{left:?}: {findings:?}");
        }
        let sleeping = View::of("/").processes().into_values().any(|command| command.starts_with(b"sleep\x001000000"));
        assert!(!sleeping, "a program that hangs is left");

        for (path, was) in were {
            fs::write(path, was).unwrap();
        }
        assert_clean(&node.release(id, NAME, &[0]));
    });
}

#[test]
fn home_replaced_by_a_symlink_is_not_followed_on_removal() {
    overlay_machine::alone("home_replaced_by_a_symlink_is_not_followed_on_removal", || {
        let node = Node::start();
        let id = Uuid::from_u128(1);
        node.make(id, NAME, &[0]);
        fs::create_dir("/srv/precious").unwrap();
        fs::write("/srv/precious/file", "x").unwrap();
        fs::remove_dir_all("/home/tena").unwrap();
        symlink("/srv/precious", "/home/tena").unwrap();
        let refused = node.system.provision(&node.provision(id, NAME, &[0])).unwrap_err();
        assert_eq!(refused.code, "home_exists");
        assert_clean(&node.release(id, NAME, &[0]));
        assert!(fs::symlink_metadata("/home/tena").is_err());
        assert!(PathBuf::from("/srv/precious/file").exists());
    });
}

/// Values that a shell, a file format or a terminal could interpret.
const HOSTILE: [&str; 9] = [
    "$(touch /tmp/HIT)",
    "`touch /tmp/HIT`",
    "'; touch /tmp/HIT; \"",
    "x ALL=(ALL) NOPASSWD: ALL\nx",
    "x\r\ny",
    "x\0y",
    "-rf",
    "../../etc/passwd",
    "x\u{2028}y",
];

#[test]
fn task_values_are_never_interpreted() {
    overlay_machine::alone("task_values_are_never_interpreted", || {
        let node = Node::start();
        let state = [Path::new(STATE), Path::new(UIDS)];
        let before = snapshot(&state);
        for (n, hostile) in HOSTILE.into_iter().enumerate() {
            let id = Uuid::from_u128(100 + n as u128);
            let plain = node.provision(id, NAME, &[0]);
            let refused = |task: &Provision| node.system.provision(task).unwrap_err().code;
            assert_eq!(
                refused(&Provision { user_name: hostile.into(), ..plain.clone() }),
                "invalid_task",
                "{hostile:?}"
            );
            let nobody = Release { allocation_id: id, user_name: hostile.into(), devices: Vec::new() };
            assert_eq!(node.system.release(&nobody).unwrap_err().code, "invalid_task", "{hostile:?}");
            let devices = vec![DeviceRef { index: 0, uuid: hostile.into() }];
            assert_eq!(refused(&Provision { devices, ..plain.clone() }), "device_unknown", "{hostile:?}");
            for key in [
                hostile.to_owned(),
                format!("command=\"{hostile}\" ssh-ed25519 AAAA"),
                format!("ssh-ed25519 AAAA\n{hostile}"),
                format!("ssh-ed25519 AAAA {hostile}"),
            ] {
                // The name of a SKU is written to the agent's own record only.
                let task = Provision { authorized_keys: vec![key.clone()], sku: hostile.into(), ..plain.clone() };
                match node.system.provision(&task) {
                    Err(refused) => assert_eq!(refused.code, "invalid_task", "{key:?}"),
                    Ok(_) => {
                        // The comment stays on its one line.
                        let written = fs::read_to_string("/etc/ssh/gpuaas-keys/tena").unwrap();
                        assert_eq!((written.lines().count(), written), (1, format!("ssh-ed25519 AAAA {hostile}\n")));
                        assert_clean(&node.release(id, NAME, &[0]));
                    }
                }
            }
        }
        let differences = View::of("/").differences(&before, &snapshot(&state));
        assert!(differences.is_empty(), "{differences:#?}");
    });
}

#[test]
fn existing_user_of_the_machine_is_neither_reused_nor_removed() {
    overlay_machine::alone("existing_user_of_the_machine_is_neither_reused_nor_removed", || {
        let node = Node::start();
        let id = Uuid::from_u128(1);
        let passwd = fs::read_to_string("/etc/passwd").unwrap();
        let refused = node.system.provision(&node.provision(id, "daemon", &[0])).unwrap_err();
        assert_eq!(refused.code, "user_exists");
        assert_clean(&node.release(id, "daemon", &[0]));
        assert_eq!(fs::read_to_string("/etc/passwd").unwrap(), passwd);
    });
}

#[test]
fn crash_between_any_two_steps_is_cleaned_up_by_the_next_agent() {
    overlay_machine::alone("crash_between_any_two_steps_is_cleaned_up_by_the_next_agent", || {
        let state = [Path::new(STATE), Path::new(UIDS)];
        let before = {
            let _ = Node::start();
            snapshot(&state)
        };
        // The completed steps, undone from the last to the first.
        let undo: [fn(); 4] = [
            || fs::remove_file("/etc/ssh/gpuaas-keys/tena").unwrap(),
            || fs::remove_file("/etc/sudoers.d/gpuaas-tena").unwrap(),
            || fs::remove_dir_all("/home/tena").unwrap(),
            || {
                run("userdel", &[NAME]);
            },
        ];
        for steps in 0..=undo.len() {
            let id = Uuid::from_u128(10 + steps as u128);
            Node::start().make(id, NAME, &[0]);
            undo.iter().take(steps).for_each(|undo| undo());
            assert_clean(&Node::start().release(id, NAME, &[0]));
            // The tool that simulated the crash wrote its own backups.
            let differences = View::of("/").differences(&before, &snapshot(&state));
            let traces: Vec<_> =
                differences.iter().filter(|it| !it.starts_with("/etc/") || it.contains("tena")).collect();
            assert!(traces.is_empty(), "{traces:#?}");
        }
    });
}

fn reconcile(id: Uuid, name: &str, keys: &[&str]) -> ReconcileSshKeys {
    let authorized_keys = keys.iter().map(|key| (*key).to_owned()).collect();
    ReconcileSshKeys { allocation_id: id, user_name: name.into(), authorized_keys }
}

#[test]
fn authorized_keys_are_written_to_the_agents_file_only() {
    overlay_machine::alone("authorized_keys_are_written_to_the_agents_file_only", || {
        let (id, other) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let node = Node::start();
        let uid = node.make(id, NAME, &[0]);
        node.make(other, "neighbour", &[1]);
        // Paths of the tenant that other systems read.
        assert!(can(
            uid,
            "rm -rf /home/tena/.ssh; ln -s /etc/ssh /home/tena/.ssh; echo mine > /home/tena/authorized_keys"
        ));
        let file = "/etc/ssh/gpuaas-keys/tena";
        let except = [Path::new(STATE), Path::new(UIDS), Path::new(file)];
        let before = snapshot(&except);
        for keys in [&["ssh-ed25519 AAAA", "ssh-ed25519 BBBB"][..], &["ssh-ed25519 BBBB"], &["ssh-ed25519 BBBB"], &[]] {
            node.system.reconcile_keys(&reconcile(id, NAME, keys)).unwrap();
            let written = fs::read_to_string(file).unwrap();
            assert_eq!(written.lines().collect::<Vec<_>>(), keys);
            assert_eq!(mode(file), (0o644, 0, 0));
        }
        // A link in the file's place is not followed.
        fs::write("/srv/precious", "x").unwrap();
        fs::remove_file(file).unwrap();
        symlink("/srv/precious", file).unwrap();
        node.system.reconcile_keys(&reconcile(id, NAME, &["ssh-ed25519 CCCC"])).unwrap();
        assert_eq!(fs::read_to_string("/srv/precious").unwrap(), "x");
        assert_eq!(fs::read_to_string(file).unwrap(), "ssh-ed25519 CCCC\n");
        fs::remove_file("/srv/precious").unwrap();
        let differences = View::of("/").differences(&before, &snapshot(&except));
        assert!(differences.is_empty(), "{differences:#?}");

        let code = |task: &ReconcileSshKeys| node.system.reconcile_keys(task).unwrap_err().code;
        for key in [
            "command=\"id\" ssh-ed25519 AAAA",
            "ssh-ed25519 AAAA\nssh-ed25519 BBBB",
            "ssh-dss AAAA",
            "-----BEGIN OPENSSH PRIVATE KEY-----",
        ] {
            assert_eq!(code(&reconcile(id, NAME, &[key])), "invalid_task", "{key}");
        }
        assert_eq!(code(&reconcile(id, "neighbour", &[])), "tenant_unknown");
        assert_eq!(code(&reconcile(Uuid::from_u128(9), "root", &["ssh-ed25519 AAAA"])), "tenant_unknown");
        // Of two tenants one is released: its file is removed, the other's stays.
        assert_clean(&node.release(id, NAME, &[0]));
        assert_eq!(code(&reconcile(id, NAME, &["ssh-ed25519 AAAA"])), "tenant_unknown");
        assert!(!Path::new(file).exists());
        assert_eq!(fs::read_to_string("/etc/ssh/gpuaas-keys/neighbour").unwrap(), "ssh-ed25519 AAAA ann@laptop\n");
    });
}

#[test]
fn tenant_shell_starts_as_the_tenant_and_never_as_root() {
    overlay_machine::alone("tenant_shell_starts_as_the_tenant_and_never_as_root", || {
        let node = Node::start();
        let id = Uuid::from_u128(1);
        let uid = node.make(id, NAME, &[0]);
        let ask = |allocation_id, user_name: &str| {
            let (session_id, ends_at) = (Uuid::from_u128(5), chrono::Utc::now());
            node.system.shell(&OpenTerminal {
                session_id,
                allocation_id,
                user_name: user_name.into(),
                ends_at,
                recording: RecordTerms::default(),
            })
        };
        let shell = ask(id, NAME).unwrap();
        assert_eq!((shell.user, shell.folder.as_path()), (Some(uid), Path::new("/home/tena")));
        assert!(shell.environment.iter().all(|(name, _)| !name.starts_with("SVC_")), "{:?}", shell.environment);
        assert_eq!(ask(id, "root").unwrap_err().code, "tenant_unknown");
        assert_clean(&node.release(id, NAME, &[0]));
        assert_eq!(ask(id, NAME).unwrap_err().code, "tenant_unknown");
    });
}

#[test]
fn two_agents_on_one_machine_share_no_uids_and_ignore_each_others_tenants() {
    overlay_machine::alone("two_agents_on_one_machine_share_no_uids_and_ignore_each_others_tenants", || {
        fs::write("/etc/passwd-", "old:x:900:900::/:/bin/sh\n").unwrap();
        let one = Node::start();
        // With the same range of uids, the same homes and a state folder of its own. Devices are never shared between agents.
        let settings = Settings {
            uids: TENANT_UIDS,
            devices: "/dev/none".into(),
            program: env!("CARGO_BIN_EXE_gpuaas-agent").into(),
            ..Settings::default()
        };
        let state = Path::new("/var/lib/second-agent");
        fs::create_dir_all(state).unwrap();
        let gpus = Arc::clone(&one.gpus);
        let two = Node { system: System::open(state, settings, Arc::clone(&gpus)).unwrap(), gpus };
        let stays = two.make(Uuid::from_u128(900), "stays", &[3]);
        assert!(can(stays, "echo x > /tmp/stays"));
        let mut running = spawn(stays, "exec sleep 1000");
        let rents = |node: &Node, prefix: &str, device: usize| -> Vec<u32> {
            let rent = |n: u128| {
                let (id, name) = (Uuid::from_u128(100 * (device as u128 + 1) + n), format!("{prefix}{n}"));
                let uid = node.make(id, &name, &[device]);
                assert!(can(uid, &format!("echo x > /tmp/{name}; echo x > /home/{name}/x")), "{name}");
                assert_clean(&node.release(id, &name, &[device]));
                uid
            };
            (0..5).map(rent).collect()
        };
        let given = std::thread::scope(|scope| {
            let others = scope.spawn(|| rents(&two, "two", 1));
            let mut given = rents(&one, "one", 0);
            given.extend(others.join().unwrap());
            given
        });
        let different: std::collections::BTreeSet<u32> = given.iter().copied().chain([stays]).collect();
        assert_eq!(different.len(), 11, "{given:?} {stays}");
        assert_eq!(fs::read_to_string("/etc/passwd-").unwrap(), "old:x:900:900::/:/bin/sh\n");
        assert!(running.try_wait().unwrap().is_none() && Path::new("/tmp/stays").exists());
        assert_clean(&two.release(Uuid::from_u128(900), "stays", &[3]));
        running.wait().unwrap();
    });
}
