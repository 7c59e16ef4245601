//! A terminal across restarts of its agent, under the shipped unit on a Debian that systemd has booted.

mod tenant_devices;

use crate::external_tools::{root, tools};
use crate::recording::complete;
use local_servers::private_files;
use serde_json::Value;
use std::time::{Duration, Instant};
use tests::cluster::terminal::Terminal;
use tests::cluster::{GPU_MEMORY_MIB, NodeHandle, TestCluster, WAIT_TIMEOUT};
use tests::systemd_container::{OTHERS_PORTS, SystemdContainer};
use uuid::Uuid;

const AGENT: &str = "gpuaas-agent.service";
const SKU: &str = "h100x1";
/// A program of the same content in another file.
const NEXT: &str = "gpuaas-agent-next";
/// A megabyte a second for 20 s.
const LINES: usize = 1_200_000;
pub(crate) const WRITER: &str =
    "for k in $(seq 0 199); do seq -f 'line %09.0f' $((k*6000+1)) $((k*6000+6000)); sleep 0.09; done; exit 7\n";

/// A machine whose unit runs the agent, with one simulated GPU.
struct Machine {
    container: SystemdContainer,
    node: NodeHandle,
}

impl Machine {
    async fn boot(cluster: &mut TestCluster) -> Option<Self> {
        let agent = private_files::find_sibling(&std::env::current_exe().unwrap(), "gpuaas-agent").unwrap();
        let folder = tempfile::tempdir().unwrap();
        let next = folder.path().join(NEXT);
        std::fs::copy(&agent, &next).unwrap();
        let container = SystemdContainer::start(&tools(), &[agent]).expect("the container starts")?;
        container.write(&format!("/usr/local/bin/{NEXT}"), 0o755, &std::fs::read(next).unwrap());
        cluster.offer_sku(SKU, 1).await;
        let node = cluster.register(SKU).await;
        let bundle = cluster.bundle(&node).await;
        let unit = std::fs::read(root().join("deploy/systemd").join(AGENT)).unwrap();
        container.write(&format!("/etc/systemd/system/{AGENT}"), 0o644, &unit);
        container.run("install -d -m 0755 /etc/gpuaas; mknod -m 666 /dev/nvidia0 c 195 0");
        container.write("/etc/gpuaas/agent.env", 0o600, bundle.to_env_file().unwrap().as_bytes());
        let it = Self { container, node };
        it.run_program("gpuaas-agent");
        it.node.expect_state("active").await;
        Some(it)
    }

    /// Restarts the unit with this program.
    fn run_program(&self, program: &str) {
        let start = format!(
            "[Service]\n{OTHERS_PORTS}\nExecStart=\nExecStart=/usr/local/bin/{program} --env-file /etc/gpuaas/agent.env --executor system \
             --simulate-gpus 1 --gpu-memory-mib {GPU_MEMORY_MIB}\n"
        );
        self.container.run(&format!("install -d /etc/systemd/system/{AGENT}.d"));
        self.container.write(&format!("/etc/systemd/system/{AGENT}.d/program.conf"), 0o644, start.as_bytes());
        self.container.run("systemctl daemon-reload");
        self.container.run(&format!("systemctl restart {AGENT}"));
    }

    fn holders(&self) -> String {
        self.container.attempt("pgrep -f '[-]-hold-terminal'").unwrap_or_default()
    }

    /// Waits until nothing of a session is left.
    async fn expect_no_session(&self) {
        let until = Instant::now() + WAIT_TIMEOUT;
        while !self.holders().is_empty() || self.container.property(AGENT, "NFileDescriptorStore") != "0" {
            assert!(Instant::now() < until, "{}: {}", self.holders(), self.container.journal(AGENT));
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
}

/// Receives for so long.
pub(crate) async fn receive_for(terminal: &mut Terminal, time: Duration) {
    let until = Instant::now() + time;
    while Instant::now() < until {
        terminal.receive(Duration::from_millis(100)).await;
    }
}

fn lines(text: &str) -> Vec<&str> {
    text.lines().map(str::trim_end).filter(|line| line.starts_with("line ")).collect()
}

pub(crate) fn expect_every_line_once(text: &str, what: &str) {
    let lines = lines(text);
    let expected = (1..=LINES).map(|number| format!("line {number:09}"));
    let wrong = lines.iter().zip(expected).position(|(line, expected)| *line != expected);
    let around = wrong.map(|at| &lines[at.saturating_sub(2)..lines.len().min(at + 3)]);
    assert_eq!((lines.len(), around), (LINES, None), "{what}");
}

/// The output in a recording.
async fn recorded_output(cluster: &TestCluster, session: Uuid) -> String {
    let answer = cluster.user.get(&format!("/api/v1/recordings/{session}/asciicast")).await;
    let events = answer.text.lines().skip(1).map(|line| serde_json::from_str::<Value>(line).unwrap());
    events.filter(|event| event[1] == "o").map(|event| event[2].as_str().unwrap().to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn terminal_outlives_restart_kill_and_update_of_its_agent_and_a_stop_ends_it() {
    let builder = TestCluster::builder().policy("terminal.recording_enabled", true);
    let mut cluster = builder.policy("terminal.recording_mode", "strict").start().await;
    let Some(machine) = Machine::boot(&mut cluster).await else { return cluster.shutdown().await };
    let container = &machine.container;
    let allocation = cluster.rent_active(SKU, 1).await;
    let (mut terminal, session) = cluster.terminal(allocation.id).await;
    terminal.enter("PS1=; stty -echo; echo be''gun\n").await;
    terminal.expect_output("begun").await;
    terminal.enter(WRITER).await;
    receive_for(&mut terminal, Duration::from_secs(1)).await;

    container.run(&format!("systemctl restart {AGENT}"));
    receive_for(&mut terminal, Duration::from_secs(2)).await;
    container.run(&format!("systemctl kill --kill-who=main --signal=KILL {AGENT}"));
    // After RestartSec, which is five seconds.
    let until = Instant::now() + WAIT_TIMEOUT;
    while container.property(AGENT, "NRestarts") != "1" {
        assert!(Instant::now() < until, "it is not restarted: {}", container.journal(AGENT));
        receive_for(&mut terminal, Duration::from_millis(500)).await;
    }
    container.expect_property(AGENT, "ActiveState", "active").await;
    receive_for(&mut terminal, Duration::from_secs(1)).await;
    machine.run_program(NEXT);
    let program = format!("readlink /proc/{}/exe", container.property(AGENT, "MainPID"));
    assert_eq!(container.run(&program).trim(), format!("/usr/local/bin/{NEXT}"));
    assert_eq!(machine.holders().lines().count(), 1, "{}", machine.holders());

    let exit = terminal.receive_exit(Duration::from_secs(90), || container.journal(AGENT)).await;
    assert_eq!(exit["code"], 7);
    expect_every_line_once(&String::from_utf8_lossy(&terminal.shown), "shown");
    let recording = complete(&cluster, session).await;
    assert_eq!(recording["lost_bytes"], 0, "{recording}");
    expect_every_line_once(&recorded_output(&cluster, session).await, "recorded");
    machine.expect_no_session().await;

    // A stop for good ends a session at once, and its user is notified.
    let (mut terminal, _) = cluster.terminal(allocation.id).await;
    terminal.enter("echo re''ady\n").await;
    terminal.expect_output("ready").await;
    tenant_devices::expect_only_its_own(container, &mut terminal).await;
    container.run(&format!("systemctl stop {AGENT}"));
    assert_eq!(terminal.close_code().await, 1011, "{:?}", terminal.closed);
    machine.expect_no_session().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn neither_proc_nor_systemd_shows_a_tenant_the_command_lines_of_others() {
    let mut cluster = TestCluster::start().await;
    let Some(machine) = Machine::boot(&mut cluster).await else { return cluster.shutdown().await };
    let container = &machine.container;
    container.run(
        "systemd-run --quiet --unit=neighbour --description=neighbour --slice=user-4242.slice -- \
         setpriv --reuid=4242 --regid=4242 --clear-groups sleep 424242",
    );
    container.expect_property("neighbour.service", "SubState", "running").await;
    let looks = "{ cat /proc/*/cmdline | tr '\\0' ' '; systemctl status --no-pager user-4242.slice; busctl call \
                 org.freedesktop.systemd1 /org/freedesktop/systemd1 org.freedesktop.systemd1.Manager GetUnitProcesses s \
                 user-4242.slice; } 2>/dev/null | grep -a -o '42424[2]' | wc -l";
    let seen = container.run(looks);
    assert_eq!(
        seen.trim(),
        "3",
        "root sees it each way: {}",
        container.run("systemctl status --no-pager user-4242.slice")
    );
    let allocation = cluster.rent_active(SKU, 1).await;
    let (mut terminal, _) = cluster.terminal(allocation.id).await;
    terminal.enter(&format!("count=$({looks}); echo shown:$count.\n")).await;
    terminal.expect_output("shown:0.").await;
    cluster.shutdown().await;
}
