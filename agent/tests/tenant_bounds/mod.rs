//! What one tenant may take of the machine: what the kernel has not taken of it is known, and what it has taken holds.

use super::gpu_outages::{boot_systemd, install_program};
use super::*;

/// The machine on which the second half runs, which is thrown away afterwards: it has systemd, control groups of version 2, and all
/// file systems of tenants mounted with `usrquota`.
const DISPOSABLE: &str = "GPUAAS_DISPOSABLE_MACHINE";
const GROUPS: &str = "/sys/fs/cgroup";

/// A machine with the control groups that tenants need, of which this is what a program in a tenant's slice sees.
fn boot_with_groups(shown: &str) {
    run("mount", &["-t", "tmpfs", "groups", GROUPS]);
    fs::write(format!("{GROUPS}/cgroup.controllers"), "cpuset cpu io memory pids\n").unwrap();
    boot_systemd();
    see_in_slices(shown);
}

fn see_in_slices(shown: &str) {
    install_program("systemd-run", &format!("echo \"$@\" >>/run/systemd-run.calls\n{shown}"));
}

fn findings_of(node: &Node) -> Vec<String> {
    let found = node.system.unbounded_tenants().into_iter();
    found.map(|it| format!("{}/{} {}", it.key.probe, it.key.code, it.detail)).collect()
}

const TAKEN: &str = "echo /g; echo memory.max 4096; echo pids.max 100; echo memory.swap.max 0";
const NOT_TAKEN: &str = "echo /g; echo memory.max max; echo pids.max 100";

#[test]
fn bounds_that_the_kernel_has_not_taken_are_a_finding_until_their_tenant_has_left() {
    overlay_machine::alone(
        "tenant_bounds::bounds_that_the_kernel_has_not_taken_are_a_finding_until_their_tenant_has_left",
        || {
            boot_with_groups(TAKEN);
            let node = Node::start();
            let (id, next) = (Uuid::from_u128(1), Uuid::from_u128(2));
            let made = node.system.provision(&node.provision(id, NAME, &[0])).unwrap();
            assert_eq!((made["separated"]["resources"].clone(), findings_of(&node)), (true.into(), vec![]));
            let calls = fs::read_to_string("/run/systemd-run.calls").unwrap();
            assert!(calls.contains(&format!("--slice=user-{}.slice", made["uid"])), "{calls}");
            let drop_in = format!("/run/systemd/system/user-{}.slice.d/60-limits.conf", made["uid"]);
            let text = fs::read_to_string(&drop_in).unwrap();
            assert!(text.contains("\nMemorySwapMax=0\nTasksMax=16384\n"), "{text}");

            for (shown, why) in [
                (NOT_TAKEN, "/g has memory.max max, not "),
                ("echo /g", "/g has no memory.max"),
                ("echo Failed to start: no bus >&2; exit 1", "a program cannot be started in the slice"),
            ] {
                see_in_slices(shown);
                let made = node.system.provision(&node.provision(next, NEIGHBOUR, &[1])).unwrap();
                assert_eq!(made["separated"]["resources"], false, "{why}");
                let found = findings_of(&node);
                let wanted = format!("limits/not_taken uid {}: ", made["uid"]);
                assert!(found.len() == 1 && found[0].starts_with(&wanted) && found[0].contains(why), "{found:?}");
                assert_eq!(node.system.validate().unwrap()["separated"]["resources"], false);
                assert_clean(&node.release(next, NEIGHBOUR, &[1]));
                assert_eq!(findings_of(&node), Vec::<String>::new());
            }
            assert_clean(&node.release(id, NAME, &[0]));
            assert!(!Path::new(&drop_in).exists());
        },
    );
}

#[test]
fn start_writes_the_bounds_of_present_tenants_by_the_present_settings() {
    overlay_machine::alone("tenant_bounds::start_writes_the_bounds_of_present_tenants_by_the_present_settings", || {
        boot_with_groups(TAKEN);
        let node = Node::start();
        let uid = node.make(Uuid::from_u128(1), NAME, &[0, 1]);
        let tasks = || {
            let text = fs::read_to_string(format!("/run/systemd/system/user-{uid}.slice.d/60-limits.conf")).unwrap();
            text.lines().find_map(|line| line.strip_prefix("TasksMax=")).unwrap().to_owned()
        };
        assert_eq!(tasks(), "32768");
        drop(node);
        let limits = LimitSettings { tasks_per_gpu: 300, ..LimitSettings::default() };
        let reloads = || fs::read_to_string("/run/systemctl.calls").unwrap().lines().count();
        let before = reloads();
        see_in_slices(NOT_TAKEN);
        let node = Node::start_limited(limits);
        assert_eq!((tasks().as_str(), reloads()), ("600", before + 1));
        assert_eq!(findings_of(&node).len(), 1, "what the kernel has not taken is known after a restart, too");
        assert_clean(&node.release(Uuid::from_u128(1), NAME, &[0, 1]));
    });
}

#[test]
fn start_bounds_all_present_tenants_at_once() {
    overlay_machine::alone("tenant_bounds::start_bounds_all_present_tenants_at_once", || {
        boot_with_groups(TAKEN);
        let node = Node::start();
        let tenants = ["one", "two", "three", "four"];
        for (at, name) in tenants.into_iter().enumerate() {
            node.make(Uuid::from_u128(at as u128), name, &[at]);
        }
        drop(node);
        // Each answers once all have begun, and fails otherwise.
        let count = "$(ls /run/begun | wc -l)";
        see_in_slices(&format!(
            "mkdir -p /run/begun; touch /run/begun/$$; for i in $(seq 80); do [ {count} -ge 4 ] && break; sleep 0.1; done\n\
             [ {count} -ge 4 ] || exit 1\n{TAKEN}"
        ));
        let node = Node::start();
        assert_eq!(findings_of(&node), Vec::<String>::new());
    });
}

#[test]
fn bounds_of_a_present_tenant_are_read_although_no_program_starts_in_its_slice() {
    overlay_machine::alone(
        "tenant_bounds::bounds_of_a_present_tenant_are_read_although_no_program_starts_in_its_slice",
        || {
            boot_with_groups(TAKEN);
            let node = Node::start();
            let uid = node.make(Uuid::from_u128(1), NAME, &[0]);
            drop(node);
            let group = format!("{GROUPS}/user.slice/user-{uid}.slice");
            fs::create_dir_all(&group).unwrap();
            let set = |file: &str, bound: &str| fs::write(format!("{group}/{file}"), bound).unwrap();
            set("memory.max", "4096\n");
            set("pids.max", "100\n");
            set("memory.swap.max", "0\n");
            see_in_slices("echo Resource temporarily unavailable >&2; exit 1");
            let node = Node::start();
            assert_eq!(findings_of(&node), Vec::<String>::new());
            drop(node);
            set("memory.max", "max\n");
            let node = Node::start();
            let found = findings_of(&node);
            assert!(found.len() == 1 && found[0].contains("has memory.max max, not "), "{found:?}");
            fs::remove_dir_all(&group).unwrap();
            assert_clean(&node.release(Uuid::from_u128(1), NAME, &[0]));
        },
    );
}

#[test]
fn machine_without_user_quotas_takes_tenants_and_says_that_the_disk_is_shared() {
    overlay_machine::alone(
        "tenant_bounds::machine_without_user_quotas_takes_tenants_and_says_that_the_disk_is_shared",
        || {
            let node = Node::start();
            let id = Uuid::from_u128(1);
            let made = node.system.provision(&node.provision(id, NAME, &[0])).unwrap();
            assert_eq!(made["separated"]["disk"], false);
            assert_eq!(node.system.validate().unwrap()["separated"]["disk"], false);
            assert_clean(&node.release(id, NAME, &[0]));
        },
    );
}

/// A program of the tenant in its slice, as a terminal begins it.
fn in_slice(uid: u32, script: &str) -> Command {
    let mut command = Command::new("systemd-run");
    command.args(["--quiet", "--scope", "--collect", &format!("--slice=user-{uid}.slice"), "--", "setpriv"]);
    command.args([&format!("--reuid={uid}"), &format!("--regid={uid}"), "--clear-groups", "sh", "-c", script]);
    command.current_dir("/").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

#[test]
fn tenant_that_forks_fills_memory_and_fills_the_disk_leaves_their_shares_to_its_neighbour_and_the_machine() {
    if std::env::var_os(DISPOSABLE).is_none() {
        return skipped_tests::report_skipped(
            "it fills memory, processes and disk: set GPUAAS_DISPOSABLE_MACHINE on a machine that is thrown away, with systemd, \
             control groups of version 2 and usrquota",
        );
    }
    let limits = LimitSettings { tasks_per_gpu: 300, ..LimitSettings::default() };
    let node = Node::start_limited(limits);
    let (id, next) = (Uuid::from_u128(1), Uuid::from_u128(2));
    let made = node.system.provision(&node.provision(id, NAME, &[0])).unwrap();
    assert_eq!((made["separated"]["resources"].clone(), made["separated"]["disk"].clone()), (true.into(), true.into()));
    let (uid, neighbour) = (u32::try_from(made["uid"].as_u64().unwrap()).unwrap(), node.make(next, NEIGHBOUR, &[1]));
    assert_eq!(findings_of(&node), Vec::<String>::new());
    let mut works = in_slice(neighbour, "exec sleep 1000").spawn().unwrap();
    let is_well = |what: &str| {
        let wrote = in_slice(neighbour, "head -c 1048576 /dev/zero >/home/neighbour/x && sh -c 'sh -c true'").status();
        assert!(wrote.unwrap().success(), "the neighbour, beside a tenant that {what}");
        assert!(can(0, "true") && node.system.validate().is_ok(), "the agent, beside a tenant that {what}");
    };
    // Without end: a few of its programs are as many as it may have.
    let mut forks = in_slice(uid, "f() { while :; do sh -c 'sleep 1000' & done; }; f & f & f & wait").spawn().unwrap();
    let group = format!("{GROUPS}/user.slice/user-{uid}.slice");
    // It is there while a program runs in it.
    let read = |file: &str| fs::read_to_string(format!("{group}/{file}")).unwrap_or_default();
    // Not `pids.events`: kernels without `pids_localevents` count a refused fork in the program's own group, not in the bounded one.
    eventually(|| read("pids.current").trim().parse::<u64>().is_ok_and(|tasks| tasks >= 290));
    is_well("forks");
    assert!(read("pids.current").trim().parse::<u64>().unwrap() <= 300);
    fs::write(format!("{group}/cgroup.kill"), "1").unwrap();
    forks.wait().unwrap();
    // More than the machine has. From MemoryHigh on it is slowed down, and at MemoryMax it is killed.
    let mut stays = in_slice(uid, "exec sleep 1000").spawn().unwrap();
    eventually(|| !read("memory.events").is_empty());
    let mut fills = in_slice(uid, "exec perl -e '$x .= \"x\" x 1000000 while 1'").spawn().unwrap();
    eventually(|| read("memory.events").lines().any(|line| line.starts_with("high ") && line != "high 0"));
    is_well("fills memory");
    assert!(works.try_wait().unwrap().is_none(), "a program of the neighbour was killed in its place");
    for program in [&mut fills, &mut stays] {
        let _ = program.kill();
        program.wait().unwrap();
    }
    // What it owns outside of its home counts as well.
    let fills = "dd if=/dev/zero of=/home/tena/x bs=1M; dd if=/dev/zero of=/var/tmp/x bs=1M; echo x >/var/tmp/y";
    assert!(!in_slice(uid, &format!("{fills} && test -s /var/tmp/y")).status().unwrap().success());
    is_well("fills the disk");
    assert_clean(&node.release(id, NAME, &[0]));
    stop(works);
    assert_clean(&node.release(next, NEIGHBOUR, &[1]));
}
