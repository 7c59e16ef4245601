//! Two tenants at once: what one of them sees and reaches of the other.

use agent::system_executor::loopback_guard::LoopbackGuard;
use agent::system_executor::private_proc;

use super::private_tmp::{install_profile, is_known_to_pam, login};
use super::*;

const PORT: u16 = 18_888;
/// Another address of the machine.
const OTHER_ADDRESS: &str = "192.0.2.7";
/// A program with a secret in its command line and one in its environment. `exec` keeps its process.
const SECRETIVE: &str = "SECRET=environment exec perl -e 'sleep 1000' -- --token=hunter2";

/// A tenant's program, found by its command line in the machine's own `/proc`.
fn pid_of(mark: &str) -> i32 {
    let find = || {
        View::of("/").processes().into_iter().find_map(|(pid, command)| {
            let command = String::from_utf8_lossy(&command).replace('\0', " ");
            (command.starts_with("perl") && command.contains(mark)).then_some(pid)
        })
    };
    eventually(|| find().is_some());
    find().unwrap()
}

/// Every way to a process that needs no right over it.
fn looks(pid: i32) -> Vec<String> {
    let mut looks: Vec<String> = ["cmdline", "comm", "stat", "status", "limits", "mountinfo", "cgroup"]
        .map(|file| format!("cat /proc/{pid}/{file}"))
        .into();
    looks.extend(["task", "ns", "net"].map(|folder| format!("ls /proc/{pid}/{folder}")));
    looks.extend([
        format!("test -e /proc/{pid}"),
        format!("ls /proc | grep -x {pid}"),
        format!("ps -p {pid}"),
        "ps -e -o args | grep -v grep | grep hunter2".to_owned(),
        // The machine's own `/proc` lies below.
        format!("unshare --user --map-root-user --mount sh -c 'umount /proc; cat /proc/{pid}/cmdline'"),
    ]);
    looks
}

#[test]
fn terminal_shows_a_tenant_its_own_processes_and_none_of_a_neighbour() {
    overlay_machine::alone("neighbours::terminal_shows_a_tenant_its_own_processes_and_none_of_a_neighbour", || {
        if let Err(why) = private_proc::check() {
            return skipped_tests::report_skipped(&why.as_text());
        }
        let node = Node::start();
        let (id, next) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let made = node.system.provision(&node.provision(id, NAME, &[0])).unwrap();
        assert_eq!(made["separated"]["processes"], true);
        node.make(next, NEIGHBOUR, &[1]);
        let mut secretive = node.in_a_terminal(id, NAME, SECRETIVE).spawn().unwrap();
        let pid = pid_of("hunter2");
        let private =
            [format!("cat /proc/{pid}/environ"), format!("ls /proc/{pid}/fd/"), format!("ls /proc/{pid}/cwd/")];
        for look in looks(pid).iter().chain(&private) {
            assert!(!node.terminal_can(next, NEIGHBOUR, &format!("{look} >/dev/null 2>&1")), "{look}");
        }
        for look in &looks(pid)[..looks(pid).len() - 1] {
            assert!(node.terminal_can(id, NAME, &format!("{look} >/dev/null")), "its own: {look}");
        }
        // What is no process is as it was, and so is the machine's own folder.
        assert!(node.terminal_can(next, NEIGHBOUR, "cat /proc/meminfo /proc/cpuinfo /proc/self/status >/dev/null"));
        assert!(can(65_534, &format!("cat /proc/{pid}/cmdline >/dev/null")), "the machine's own users");
        assert_clean(&node.release(id, NAME, &[0]));
        assert!(!secretive.wait().unwrap().success());
        assert_clean(&node.release(next, NEIGHBOUR, &[1]));
    });
}

#[test]
fn pam_login_shows_a_tenant_no_process_of_a_neighbour() {
    if !is_known_to_pam() {
        return;
    }
    overlay_machine::alone("neighbours::pam_login_shows_a_tenant_no_process_of_a_neighbour", || {
        if let Err(why) = private_proc::check() {
            return skipped_tests::report_skipped(&why.as_text());
        }
        let node = Node::start();
        install_profile();
        let (id, next) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let uid = node.make(id, "gpu-1", &[0]);
        node.make(next, "gpu-2", &[1]);
        let mut secretive = spawn(uid, SECRETIVE);
        let pid = pid_of("hunter2");
        for look in looks(pid) {
            login("gpu-2", &format!("! {{ {look}; }} >/dev/null 2>&1"));
        }
        login("gpu-1", &format!("grep -q hunter2 /proc/{pid}/cmdline"));
        // Another user of the machine is not affected.
        login("daemon", &format!("grep -q hunter2 /proc/{pid}/cmdline"));
        assert_clean(&node.release(id, "gpu-1", &[0]));
        secretive.wait().unwrap();
        assert_clean(&node.release(next, "gpu-2", &[1]));
    });
}

/// Whether this kernel and this machine have nftables. If not, that is reported as a test not run.
fn has_nftables() -> bool {
    let tried = Command::new("nft").args(["add", "table", "inet", "gpuaas_tried"]).output();
    let has = tried.is_ok_and(|tried| tried.status.success());
    if has {
        run("nft", &["delete", "table", "inet", "gpuaas_tried"]);
    } else {
        skipped_tests::report_skipped("it needs nftables, and nf_tables in the kernel");
    }
    has
}

/// An address of a socket as a program of perl.
fn address(host: &str, port: u16) -> String {
    match host.contains(':') {
        true => format!("pack_sockaddr_in6({port}, inet_pton(AF_INET6, \"{host}\"))"),
        false => format!("pack_sockaddr_in({port}, inet_aton(\"{host}\"))"),
    }
}

fn socket(host: &str, kind: &str) -> String {
    let family = if host.contains(':') { "AF_INET6" } else { "AF_INET" };
    format!("use Socket qw(:all); socket(S, {family}, {kind}, 0) or die")
}

/// A server that gives a secret to every client.
fn listens(host: &str) -> String {
    let (socket, address) = (socket(host, "SOCK_STREAM"), address(host, PORT));
    format!(
        "exec perl -e '{socket}; setsockopt(S, SOL_SOCKET, SO_REUSEADDR, 1); bind(S, {address}) or die; listen(S, 64) or die; \
         while (accept(C, S)) {{ syswrite(C, \"secret\\n\"); close(C) }}' listens"
    )
}

/// A client that has this local address, if it is given, and reads the secret. It ends within so many seconds.
fn reads(from: Option<&str>, host: &str, seconds: u32) -> String {
    let (socket, address) = (socket(host, "SOCK_STREAM"), address(host, PORT));
    let bind = from.map(|from| format!("bind(S, {}) or die;", self::address(from, 0))).unwrap_or_default();
    format!(
        "exec perl -e '{socket}; alarm {seconds}; {bind} connect(S, {address}) or die; exit(<S> eq \"secret\\n\" ? 0 : 1)'"
    )
}

/// A server that answers each datagram with a secret.
fn answers(host: &str) -> String {
    let (socket, address) = (socket(host, "SOCK_DGRAM"), address(host, PORT));
    format!(
        "exec perl -e '{socket}; bind(S, {address}) or die; while (my $from = recv(S, my $text, 99, 0)) \
         {{ send(S, \"secret\", 0, $from) or die }}' answers"
    )
}

fn asks(host: &str, seconds: u32) -> String {
    let (socket, address) = (socket(host, "SOCK_DGRAM"), address(host, PORT));
    format!(
        "exec perl -e '{socket}; alarm {seconds}; send(S, \"x\", 0, {address}) or die; recv(S, my $text, 99, 0); \
         exit($text eq \"secret\" ? 0 : 1)'"
    )
}

/// How long a client waits for an answer that has to come, and for one that must not.
const COMES: u32 = 60;
const COMES_NOT: u32 = 2;

/// Waits until the server of this user answers its own tenant.
fn serve(uid: u32, server: &str, client: impl Fn(u32) -> String) -> Child {
    let server = spawn(uid, server);
    eventually(|| can(uid, &client(1)));
    server
}

#[test]
fn what_a_tenant_listens_on_at_a_loopback_address_is_reached_by_no_neighbour() {
    overlay_machine::alone(
        "neighbours::what_a_tenant_listens_on_at_a_loopback_address_is_reached_by_no_neighbour",
        || {
            if !has_nftables() {
                return;
            }
            run("ip", &["address", "add", &format!("{OTHER_ADDRESS}/32"), "dev", "lo"]);
            let node = Node::start();
            let (id, next) = (Uuid::from_u128(1), Uuid::from_u128(2));
            let made = node.system.provision(&node.provision(id, NAME, &[0])).unwrap();
            assert_eq!(made["separated"]["loopback"], true);
            let uid = u32::try_from(made["uid"].as_u64().unwrap()).unwrap();
            let neighbour = node.make(next, NEIGHBOUR, &[1]);
            for (listens_on, from, to) in [
                ("127.0.0.1", None, "127.0.0.1"),
                ("127.0.0.1", Some(OTHER_ADDRESS), "127.0.0.1"),
                ("0.0.0.0", None, "127.0.0.9"),
                ("::1", None, "::1"),
                ("::", None, "127.0.0.1"),
            ] {
                let case = format!("{listens_on} from {from:?} to {to}");
                let server = serve(uid, &listens(listens_on), |seconds| reads(from, to, seconds));
                assert!(!can(neighbour, &reads(from, to, COMES_NOT)), "{case}");
                assert!(can(uid, &reads(from, to, COMES)), "{case}: its own");
                assert!(
                    can(0, &reads(from, to, COMES)) && can(65_534, &reads(from, to, COMES)),
                    "{case}: the machine's own"
                );
                stop(server);
            }
            for host in ["127.0.0.1", "::1"] {
                let server = serve(uid, &answers(host), |seconds| asks(host, seconds));
                assert!(!can(neighbour, &asks(host, COMES_NOT)), "a datagram to {host}");
                assert!(can(uid, &asks(host, COMES)), "its own, and the server has not ended by an error: {host}");
                stop(server);
            }
            // An address of the machine in its network is open to the whole network.
            let server = serve(uid, &listens("0.0.0.0"), |seconds| reads(None, OTHER_ADDRESS, seconds));
            assert!(can(neighbour, &reads(None, OTHER_ADDRESS, COMES)));
            stop(server);
            // All users reach the machine's own services.
            let server = serve(0, &listens("127.0.0.1"), |seconds| reads(None, "127.0.0.1", seconds));
            assert!(can(uid, &reads(None, "127.0.0.1", COMES)) && can(neighbour, &reads(None, "127.0.0.1", COMES)));
            stop(server);
            assert_clean(&node.release(id, NAME, &[0]));
            assert_clean(&node.release(next, NEIGHBOUR, &[1]));
        },
    );
}

#[test]
fn rules_that_a_firewall_has_removed_are_there_again_for_the_next_tenant() {
    overlay_machine::alone("neighbours::rules_that_a_firewall_has_removed_are_there_again_for_the_next_tenant", || {
        if !has_nftables() {
            return;
        }
        let node = Node::start();
        let (id, next) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let uid = node.make(id, NAME, &[0]);
        run("nft", &["flush", "ruleset"]);
        let neighbour = node.make(next, NEIGHBOUR, &[1]);
        let server = serve(uid, &listens("127.0.0.1"), |seconds| reads(None, "127.0.0.1", seconds));
        assert!(!can(neighbour, &reads(None, "127.0.0.1", COMES_NOT)));
        run("nft", &["flush", "ruleset"]);
        assert_eq!(node.system.validate().unwrap()["separated"]["loopback"], true);
        assert!(!can(neighbour, &reads(None, "127.0.0.1", COMES_NOT)));
        // A start replaces what is there, and nothing is left on a machine that leaves the service.
        let node = Node::start();
        assert!(!can(neighbour, &reads(None, "127.0.0.1", COMES_NOT)));
        assert_eq!(run("nft", &["list", "tables"]), "table inet gpuaas_loopback_80000_99999\n");
        stop(server);
        assert_clean(&node.release(id, NAME, &[0]));
        assert_clean(&node.release(next, NEIGHBOUR, &[1]));
        LoopbackGuard::new(Path::new(STATE), &Settings { uids: TENANT_UIDS, ..Settings::default() }).remove();
        assert_eq!(run("nft", &["list", "tables"]), "");
        assert_eq!(fs::read_to_string("/proc/sys/net/ipv4/tcp_fwmark_accept").unwrap(), "0\n");
    });
}

#[test]
fn machine_without_nftables_takes_tenants_and_says_that_loopback_is_shared() {
    overlay_machine::alone(
        "neighbours::machine_without_nftables_takes_tenants_and_says_that_loopback_is_shared",
        || {
            for program in ["/usr/sbin/nft", "/sbin/nft", "/usr/bin/nft"] {
                let _ = fs::remove_file(program);
            }
            let node = Node::start();
            let id = Uuid::from_u128(1);
            let made = node.system.provision(&node.provision(id, NAME, &[0])).unwrap();
            assert_eq!(made["separated"]["loopback"], false);
            assert_eq!(node.system.validate().unwrap()["separated"]["loopback"], false);
            assert_clean(&node.release(id, NAME, &[0]));
        },
    );
}

/// A program through which root lets tenants log in, on a port of loopback.
fn sshd() -> Child {
    let _ = fs::create_dir("/run/sshd");
    for key in ["/run/test_host_key", "/run/test_key"] {
        run("ssh-keygen", &["-q", "-t", "ed25519", "-N", "", "-f", key]);
    }
    let config = "ListenAddress 127.0.0.1:2222\nHostKey /run/test_host_key\nPidFile none\nStrictModes no\nUsePAM no\n\
                  AuthorizedKeysFile /etc/ssh/gpuaas-keys/%u\n";
    fs::write("/run/test_sshd_config", config).unwrap();
    Command::new("/usr/sbin/sshd")
        .args(["-D", "-e", "-f", "/run/test_sshd_config"])
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
fn ssh_forwarding_reaches_the_tenants_own_port_and_no_neighbours() {
    if !Path::new("/usr/sbin/sshd").exists() {
        return skipped_tests::report_skipped("it needs openssh-server");
    }
    overlay_machine::alone("neighbours::ssh_forwarding_reaches_the_tenants_own_port_and_no_neighbours", || {
        if !has_nftables() {
            return;
        }
        let node = Node::start();
        let (id, next) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let uid = node.make(id, NAME, &[0]);
        node.make(next, NEIGHBOUR, &[1]);
        let sshd = sshd();
        let key = fs::read_to_string("/run/test_key.pub").unwrap();
        for (id, name) in [(id, NAME), (next, NEIGHBOUR)] {
            node.system.reconcile_keys(&reconcile(id, name, &[key.trim()])).unwrap();
        }
        let forwards = |user: &str, seconds: u32| {
            let options = "-F none -i /run/test_key -p 2222 -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null \
                           -o ConnectionAttempts=60";
            let script = format!("timeout {seconds} ssh {options} -W 127.0.0.1:{PORT} {user}@127.0.0.1 </dev/null");
            let ran = Command::new("sh").args(["-c", &script]).output().unwrap();
            String::from_utf8_lossy(&ran.stdout).into_owned()
        };
        let server = serve(uid, &listens("127.0.0.1"), |seconds| reads(None, "127.0.0.1", seconds));
        assert_eq!(forwards(NAME, COMES), "secret\n");
        assert_eq!(forwards(NEIGHBOUR, COMES_NOT * 2), "");
        stop(server);
        stop(sshd);
        assert_clean(&node.release(id, NAME, &[0]));
        assert_clean(&node.release(next, NEIGHBOUR, &[1]));
    });
}
