//! Each tenant's own `/tmp`, `/var/tmp` and `/dev/shm`.

use super::*;

const FOLDERS: [&str; 3] = ["/tmp", "/var/tmp", "/dev/shm"];

impl Node {
    /// A program of the tenant's, started as its terminals are.
    pub(super) fn in_a_terminal(&self, id: Uuid, name: &str, script: &str) -> Command {
        let (session_id, ends_at, recording) = (Uuid::from_u128(5), chrono::Utc::now(), RecordTerms::default());
        let task = OpenTerminal { session_id, allocation_id: id, user_name: name.into(), ends_at, recording };
        let shell = self.system.shell(&task).unwrap();
        let uid = shell.user.unwrap();
        let mut command = Command::new(&shell.launcher[0]);
        command.args(&shell.launcher[1..]).args(["setpriv", &format!("--reuid={uid}"), &format!("--regid={uid}")]);
        command.args(["--clear-groups", "--", "/bin/sh", "-c", script]).current_dir("/").stdin(Stdio::null());
        command
    }

    pub(super) fn terminal_can(&self, id: Uuid, name: &str, script: &str) -> bool {
        self.in_a_terminal(id, name, script).status().unwrap().success()
    }
}

/// The tenant's folders, as root sees them.
fn own_folders(name: &str) -> [PathBuf; 3] {
    ["tmp", "var-tmp", "shm"].map(|own| Path::new(STATE).join("private").join(own).join(name))
}

fn nothing_is_left_of(name: &str) {
    for path in own_folders(name) {
        assert!(fs::symlink_metadata(&path).is_err(), "{}", path.display());
    }
    assert!(!fs::read_to_string("/proc/self/mountinfo").unwrap().contains(name));
    for ending in ["conf", "init"] {
        assert!(!Path::new("/etc/security/namespace.d").join(format!("gpuaas-{name}.{ending}")).exists());
    }
}

/// Whether a login through PAM can have folders of its own here. If not, that is reported as a test not run.
pub(super) fn is_known_to_pam() -> bool {
    let is_known = agent::system_executor::private_tmp::is_known_to_pam();
    if !is_known || !Path::new("/usr/sbin/pam-auth-update").exists() {
        skipped_tests::report_skipped("it needs pam_namespace and pam-auth-update");
        return false;
    }
    true
}

/// Installs the profile as an operator does.
pub(super) fn install_profile() {
    let profile = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("deploy/pam/gpuaas-tenants");
    fs::copy(profile, "/usr/share/pam-configs/gpuaas-tenants").unwrap();
    run("env", &["DEBIAN_FRONTEND=noninteractive", "pam-auth-update", "--package"]);
}

/// A program as cron, at, su and the machine's sshd start it: through PAM, by root.
pub(super) fn login(user: &str, script: &str) {
    let ran = Command::new("su").args(["-s", "/bin/sh", user, "-c", script]).output().unwrap();
    assert!(ran.status.success(), "{user} {script}: {}", String::from_utf8_lossy(&ran.stderr));
}

#[test]
fn terminal_has_a_private_tmp_that_does_not_outlive_the_release() {
    overlay_machine::alone("private_tmp::terminal_has_a_private_tmp_that_does_not_outlive_the_release", || {
        let node = Node::start();
        let state = [Path::new(STATE), Path::new(UIDS)];
        let before = snapshot(&state);
        let (id, next) = (Uuid::from_u128(1), Uuid::from_u128(2));
        node.make(id, NAME, &[0]);
        node.make(next, "neighbour", &[1]);
        for place in FOLDERS {
            assert!(node.terminal_can(id, NAME, &format!("echo mine > {place}/secret && mkdir {place}/d")), "{place}");
            assert!(node.terminal_can(id, NAME, &format!("grep -q mine {place}/secret")), "{place}: the next terminal");
            assert!(!node.terminal_can(next, "neighbour", &format!("ls {place}/secret 2>&1")), "{place}");
            assert!(!Path::new(place).join("secret").exists(), "{place}: the machine's own");
        }
        assert!(!node.terminal_can(next, "neighbour", &format!("ls {STATE}/private 2>&1")));
        // What root makes in the tenant's name, and a mount of the tenant's own.
        fs::write(own_folders(NAME)[0].join("roots"), "x").unwrap();
        let mut mounts = node.in_a_terminal(
            id,
            NAME,
            "unshare --user --map-root-user --mount sh -c 'mount -t tmpfs tmpfs /tmp/d; touch /tmp/mounted; sleep 1000'",
        );
        let mut mounts = mounts.spawn().unwrap();
        eventually(|| own_folders(NAME)[0].join("mounted").exists());
        // A neighbour whose terminal was started meanwhile, and holds every mount that existed then.
        let mut holds = node.in_a_terminal(next, "neighbour", "touch /tmp/holds; sleep 1000").spawn().unwrap();
        eventually(|| own_folders("neighbour")[0].join("holds").exists());

        // A restarted agent finds them unchanged.
        let node = Node::start();
        assert!(node.terminal_can(id, NAME, "grep -q mine /dev/shm/secret"));
        assert_clean(&node.release(id, NAME, &[0]));
        assert!(!mounts.wait().unwrap().success());
        nothing_is_left_of(NAME);
        assert!(node.terminal_can(next, "neighbour", "test -e /tmp/holds"), "what is the neighbour's stays");
        assert_clean(&node.release(next, "neighbour", &[1]));
        holds.wait().unwrap();
        nothing_is_left_of("neighbour");
        let differences = View::of("/").differences(&before, &snapshot(&state));
        assert!(differences.is_empty(), "{differences:#?}");
    });
}

#[test]
fn terminal_without_a_private_tmp_does_not_start() {
    overlay_machine::alone("private_tmp::terminal_without_a_private_tmp_does_not_start", || {
        let node = Node::start();
        let id = Uuid::from_u128(1);
        node.make(id, NAME, &[0]);
        fs::remove_dir(&own_folders(NAME)[0]).unwrap();
        assert!(!node.terminal_can(id, NAME, "true"));
    });
}

#[test]
fn agent_starts_although_a_folder_of_one_tenant_cannot_be_made() {
    overlay_machine::alone("private_tmp::agent_starts_although_a_folder_of_one_tenant_cannot_be_made", || {
        let node = Node::start();
        let (id, next) = (Uuid::from_u128(1), Uuid::from_u128(2));
        node.make(id, NAME, &[0]);
        node.make(next, NEIGHBOUR, &[1]);
        let own = &own_folders(NAME)[0];
        fs::remove_dir(own).unwrap();
        fs::write(own, "no folder").unwrap();
        drop(node);
        let node = Node::start();
        assert!(!node.terminal_can(id, NAME, "true"));
        assert!(node.terminal_can(next, NEIGHBOUR, "touch /tmp/mine"));
    });
}

#[test]
fn pam_login_has_a_private_tmp_when_the_profile_is_installed() {
    if !is_known_to_pam() {
        return;
    }
    overlay_machine::alone("private_tmp::pam_login_has_a_private_tmp_when_the_profile_is_installed", || {
        let node = Node::start();
        install_profile();
        let (id, name) = (Uuid::from_u128(1), "gpu-1");
        node.make(id, name, &[0]);
        for place in FOLDERS {
            login(name, &format!("echo mine > {place}/secret"));
            assert!(!Path::new(place).join("secret").exists(), "{place}");
            assert!(
                node.terminal_can(id, name, &format!("grep -q mine {place}/secret")),
                "{place}: in a terminal, too"
            );
        }
        // Another user of the machine is not affected.
        login("daemon", "echo x > /tmp/daemons");
        assert!(Path::new("/tmp/daemons").exists());
        assert_clean(&node.release(id, name, &[0]));
        nothing_is_left_of(name);
    });
}
