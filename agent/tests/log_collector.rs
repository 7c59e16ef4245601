//! The log collector as a process, against a gateway of this process over TLS. The journal is a file that a script prints as `journalctl`
//! does: from an entry on, and the current boot alone unless all are asked for.
#![allow(clippy::unwrap_used, clippy::expect_used, unreachable_pub, dead_code)]

mod fake_control_plane;

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use axum::http::StatusCode;
use chrono::TimeDelta;
use serde_json::{Value, json};
use tempfile::TempDir;
use wire::bundle::BootstrapBundle;

use fake_control_plane::spawned_agent::enrolled_at;
use fake_control_plane::{FakeControlPlane, SpawnedAgent, eventually};

const MIB: u64 = 1 << 20;
/// The smallest bound that can be set.
const SPOOL_MIB: u64 = 1;
/// The largest file of one batch here.
const BATCH_BYTES: u64 = MIB / 2;

const JOURNALCTL: &str = r#"#!/bin/sh
folder=$(dirname "$0")
printf '%s\n' "$@" >"$folder/arguments"
from=1
boot=$(cat "$folder/boot")
for argument; do
    case $argument in
        --cursor=s=*) from=${argument#--cursor=s=} ;;
        --merge) boot=1 ;;
    esac
done
[ "$from" -ge "$boot" ] || from=$boot
exec tail -n "+$from" -f "$folder/journal"
"#;

/// An enrolled node with a journal.
struct LoggingNode {
    fake: FakeControlPlane,
    folder: TempDir,
    bundle: BootstrapBundle,
    journal: PathBuf,
    lines: usize,
    /// The name of the agent's unit.
    unit: &'static str,
    _agent: SpawnedAgent,
}

impl LoggingNode {
    async fn start() -> Self {
        Self::start_at(FakeControlPlane::start().await).await
    }

    async fn start_at(fake: FakeControlPlane) -> Self {
        let (fake, folder, agent) = enrolled_at(fake, &[]).await;
        let bundle = fake.bundle(folder.path());
        let programs = folder.path().join("programs");
        fs::create_dir(&programs).unwrap();
        fs::write(programs.join("journalctl"), JOURNALCTL).unwrap();
        fs::set_permissions(programs.join("journalctl"), fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(programs.join("boot"), "1").unwrap();
        let journal = programs.join("journal");
        File::create(&journal).unwrap();
        Self { fake, folder, bundle, journal, lines: 0, unit: "gpuaas-agent.service", _agent: agent }
    }

    /// Appends lines of this length to the journal: `line 1`, `line 2` and so on.
    fn write(&mut self, count: usize, bytes: usize) {
        let mut text = String::new();
        for _ in 0..count {
            self.lines += 1;
            let entry = json!({
                "__CURSOR": format!("s={}", self.lines), "__REALTIME_TIMESTAMP": (1_700_000_000_000_000 + self.lines).to_string(),
                "_SYSTEMD_UNIT": self.unit, "MESSAGE": format!("{:x<bytes$}", line(self.lines)),
            });
            text += &format!("{entry}\n");
        }
        self.append(&text);
    }

    /// Appends a line that journalctl prints, whatever it is.
    fn print(&mut self, text: &str) {
        self.lines += 1;
        self.append(&format!("{text}\n"));
    }

    fn append(&self, text: &str) {
        OpenOptions::new().append(true).open(&self.journal).unwrap().write_all(text.as_bytes()).unwrap();
    }

    /// The lines from here on are of another boot than those before.
    fn reboot(&self) {
        fs::write(self.journal.with_file_name("boot"), (self.lines + 1).to_string()).unwrap();
    }

    fn state(&self) -> PathBuf {
        self.folder.path().join("collector")
    }

    fn cursor(&self) -> Option<String> {
        fs::read_to_string(self.state().join("cursor")).ok()
    }

    /// The spool's size, and whether it has this line.
    fn spool(&self, number: usize) -> (u64, bool) {
        let files = fs::read_dir(self.state().join("spool")).into_iter().flatten();
        let contents: Vec<String> = files.filter_map(|entry| fs::read_to_string(entry.ok()?.path()).ok()).collect();
        let wanted = line(number);
        (contents.iter().map(|text| text.len() as u64).sum(), contents.iter().any(|text| text.contains(&wanted)))
    }

    /// Waits until the gateway has accepted this line.
    async fn expect_accepted(&self, number: usize) {
        let wanted = line(number);
        eventually(|| self.fake.log_gateway().accepted().iter().any(|text| text.starts_with(&wanted)).then_some(()))
            .await;
    }

    /// Waits until everything up to this line is acknowledged on the disk, too: a crash before that repeats a batch.
    async fn expect_settled(&self, number: usize) {
        let cursor = format!("s={number}");
        eventually(|| (self.cursor().as_ref() == Some(&cursor) && self.spool(number).0 == 0).then_some(())).await;
    }

    /// The numbers of the accepted lines, in order.
    fn accepted(&self) -> Vec<usize> {
        let gateway = self.fake.log_gateway();
        let number = |text: &&str| text.split([' ', '.']).nth(1).unwrap().parse().unwrap();
        gateway.accepted().iter().map(number).collect()
    }

    fn collect(&self) -> Collector {
        let ca_file = &self.bundle.ca_bundle_path;
        let path = format!("{}:/usr/bin:/bin", self.journal.parent().unwrap().display());
        let log = self.folder.path().join(format!("collector-{}.log", uuid::Uuid::now_v7()));
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpuaas-log-collector"));
        command.env_clear().env("PATH", path).env("SVC_NODE_LOG_COLLECTOR_ENABLED", "1");
        command.env("SVC_NODE_LOG_COLLECTOR_CA_FILE", ca_file).env("SVC_NODE_LOG_COLLECTOR_STATE_DIR", self.state());
        command.env("SVC_NODE_LOG_COLLECTOR_SPOOL_MIB", SPOOL_MIB.to_string());
        command.env("SVC_NODE_AGENT_SYSTEMD_UNIT", self.unit);
        command.env("SVC_NODE_AGENT_STATE_DIR", self.folder.path().join("state"));
        command.arg("--env-file").arg(self.folder.path().join("agent.env"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log).unwrap());
        Collector { child: command.spawn().unwrap(), log }
    }
}

/// A line's beginning. The dot ends its number.
fn line(number: usize) -> String {
    format!("line {number}.")
}

/// A running collector. Dropping it kills it, as a crash does.
struct Collector {
    child: Child,
    log: PathBuf,
}

impl Collector {
    /// What it has logged with this error code.
    fn logged(&self, error_code: &str) -> Vec<Value> {
        let text = fs::read_to_string(&self.log).unwrap();
        let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.filter(|line| line["error_code"] == error_code).collect()
    }

    /// How many lines it has counted as lost, in its warnings and in the total of the last one.
    fn lost(&self) -> (u64, u64) {
        let logged = self.logged("log_lines_lost");
        let sum = logged.iter().map(|line| line["lines"].as_u64().unwrap()).sum();
        (sum, logged.last().map_or(0, |line| line["lost_since_start"].as_u64().unwrap()))
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("{}", fs::read_to_string(&self.log).unwrap_or_default());
        }
    }
}

#[tokio::test]
async fn busy_gateway_gets_lines_again_and_a_refused_line_is_pushed_alone_once() {
    let mut node = LoggingNode::start().await;
    node.write(10, 20);
    let is_bad = |text: &String| text.starts_with(&line(7));
    let mut failures = [(429, Some(2)), (503, None), (500, None), (401, None), (404, None)].into_iter();
    node.fake.log_gateway().answer = Some(Box::new(move |lines| match failures.next() {
        Some((status, retry_after)) => (StatusCode::from_u16(status).unwrap(), retry_after),
        None if lines.iter().any(is_bad) => (StatusCode::BAD_REQUEST, None),
        None => (StatusCode::NO_CONTENT, None),
    }));
    let collector = node.collect();
    node.expect_accepted(10).await;
    assert_eq!(node.accepted(), [1, 2, 3, 4, 5, 6, 8, 9, 10]);
    {
        let gateway = node.fake.log_gateway();
        let pushes = &gateway.pushes;
        assert!(
            pushes[..6].iter().all(|push| push.lines == pushes[0].lines),
            "the same lines until there is an answer for them"
        );
        let pause = pushes[1].at - pushes[0].at;
        assert!(pause >= Duration::from_secs(2), "Retry-After is 2 s, and it waited {pause:?}");
        assert_eq!(gateway.tokens, 2, "401 costs the token");
        let alone = pushes.iter().filter(|push| push.lines.len() == 1 && is_bad(&push.lines[0])).count();
        assert_eq!(alone, 1, "a refused line is not retried");
    }
    assert_eq!(collector.lost(), (1, 1));
    assert_eq!(collector.logged("log_gateway").len(), 1, "one warning for an outage");
}

#[tokio::test]
async fn page_of_a_proxy_is_no_refusal_of_lines() {
    let mut node = LoggingNode::start().await;
    // A line that the gateway refuses alone is dropped.
    node.write(1, 20);
    let mut pages = [StatusCode::BAD_REQUEST, StatusCode::UNSUPPORTED_MEDIA_TYPE].into_iter();
    {
        let mut gateway = node.fake.log_gateway();
        gateway.refuses_with_pages = true;
        gateway.answer = Some(Box::new(move |_| (pages.next().unwrap_or(StatusCode::NO_CONTENT), None)));
    }
    let collector = node.collect();
    node.expect_accepted(1).await;
    assert_eq!(node.accepted(), [1]);
    assert_eq!(collector.lost(), (0, 0));
}

#[tokio::test]
async fn outage_that_the_spool_cannot_hold_loses_the_oldest_lines_in_order_and_counts_them() {
    const LINES: usize = 3000;
    let mut node = LoggingNode::start().await;
    node.fake.log_gateway().always(StatusCode::SERVICE_UNAVAILABLE);
    node.write(10, 20);
    let collector = node.collect();
    // The first batch is being sent when the others come.
    let first = eventually(|| node.fake.log_gateway().pushes.first().map(|push| push.lines.len())).await;
    node.write(LINES - 10, 1000);
    let mut largest = 0;
    eventually(|| {
        let (bytes, is_last_line_spooled) = node.spool(LINES);
        largest = largest.max(bytes);
        is_last_line_spooled.then_some(())
    })
    .await;
    // A batch is on the disk before the oldest one is removed for it.
    assert!(largest <= SPOOL_MIB * MIB + BATCH_BYTES, "{largest} bytes were spooled");
    assert!(node.accepted().is_empty());

    node.fake.log_gateway().answer = None;
    node.expect_accepted(LINES).await;
    let accepted = node.accepted();
    let (in_flight, rest) = accepted.split_at(first);
    let sent = (1..=first).collect::<Vec<_>>();
    assert_eq!(in_flight, sent, "the lines that were being sent are neither lost nor counted");
    assert!((500..2000).contains(&rest.len()), "{} lines are about what the spool holds", rest.len());
    let newest: Vec<usize> = (LINES + 1 - rest.len()..=LINES).collect();
    assert!(rest == newest, "the newest lines, in order, each once: {rest:?}");
    let lost = (LINES - accepted.len()) as u64;
    assert_eq!(collector.lost(), (lost, lost));

    // What is written afterwards is complete.
    node.write(20, 20);
    node.expect_accepted(LINES + 20).await;
    assert_eq!(node.accepted()[accepted.len()..], (LINES + 1..=LINES + 20).collect::<Vec<_>>());
}

#[tokio::test]
async fn cursor_is_saved_with_the_acknowledgement_and_a_crash_before_it_loses_nothing() {
    let mut node = LoggingNode::start().await;
    node.write(10, 20);
    node.fake.log_gateway().always(StatusCode::SERVICE_UNAVAILABLE);
    let collector = node.collect();
    eventually(|| (node.fake.log_gateway().pushes.len() > 1).then_some(())).await;
    assert_eq!(node.cursor(), None, "there is no acknowledgement");
    drop(collector);

    node.fake.log_gateway().answer = None;
    let collector = node.collect();
    node.expect_accepted(10).await;
    assert_eq!(node.accepted(), (1..=10).collect::<Vec<_>>());
    node.expect_settled(10).await;
    drop(collector);

    node.write(5, 20);
    let collector = node.collect();
    node.expect_accepted(15).await;
    assert_eq!(node.accepted(), (1..=15).collect::<Vec<_>>(), "each once");
    assert!(collector.logged("journal_gap").is_empty());
}

#[tokio::test]
async fn lines_of_the_last_boot_that_were_not_read_are_collected() {
    let mut node = LoggingNode::start().await;
    node.write(3, 20);
    let collector = node.collect();
    node.expect_accepted(3).await;
    node.expect_settled(3).await;
    drop(collector);
    // As before a power failure, which the collector did not survive.
    node.write(4, 20);
    node.reboot();
    node.write(2, 20);
    let _collector = node.collect();
    node.expect_accepted(9).await;
    assert_eq!(node.accepted(), (1..=9).collect::<Vec<_>>());
}

#[tokio::test]
async fn collector_on_a_machine_with_a_wrong_clock_pushes_by_the_control_planes_time() {
    for ahead in [TimeDelta::days(3650), TimeDelta::hours(24), -TimeDelta::hours(25), -TimeDelta::days(3650)] {
        let validity = (-TimeDelta::hours(6), TimeDelta::hours(6));
        let mut node = LoggingNode::start_at(FakeControlPlane::start_ahead(ahead, validity).await).await;
        node.write(1, 100);
        let collector = node.collect();
        node.expect_settled(1).await;
        drop(collector);
        // Nothing is known of the time but what the answers say.
        fs::remove_file(node.folder.path().join("state/server_time.json")).unwrap();
        node.write(1, 100);
        let _collector = node.collect();
        node.expect_accepted(2).await;
    }
}

#[tokio::test]
async fn agents_unit_is_read_under_its_name_of_the_settings_and_each_dropped_line_is_counted_with_its_reason() {
    let mut node = LoggingNode::start().await;
    node.unit = "rented.service";
    node.write(3, 20);
    let other = json!({
        "__CURSOR": "s=4", "__REALTIME_TIMESTAMP": "1700000000000004", "_SYSTEMD_UNIT": "init.scope",
        "COREDUMP_UNIT": node.unit, "MESSAGE": "a tenant's program dumped core",
    });
    node.print(&other.to_string());
    node.print("no entry");
    node.write(1, 20);
    let collector = node.collect();
    node.expect_accepted(6).await;
    assert_eq!(node.accepted(), [1, 2, 3, 6]);
    let arguments = fs::read_to_string(node.journal.with_file_name("arguments")).unwrap();
    let units: Vec<_> = arguments.lines().filter_map(|argument| argument.strip_prefix("--unit=")).collect();
    assert!(units.contains(&"rented.service") && !units.contains(&"gpuaas-agent.service"), "{units:?}");
    assert_eq!(collector.lost(), (2, 2));
    let why: Vec<_> = collector.logged("log_lines_lost").iter().map(|line| line["why"].to_string()).collect();
    let has = |part: &str| why.iter().any(|why| why.contains(part));
    assert!(has("of no unit that is collected") && has("no entry of the journal"), "{why:?}");
}
