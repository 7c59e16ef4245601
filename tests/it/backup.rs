//! Backups by pgBackRest with the shipped settings and scripts, and a restore as the page about it says.

use crate::alerts::monitoring::{Monitoring, MonitoringOptions};
use crate::external_tools::root;
use crate::restore_gate::{refusal, run, wait_until_marked};
use local_servers::test_database::TestDatabase;
use secrecy::ExposeSecret as _;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use supervisors::dev::replica::Replica;
use tests::cluster::TestCluster;
use tests::cluster::backup_machine::{
    BackedUpServer, BackupMachine, make_empty_data, output_of, wait_until_archived, wait_until_recovered,
};
use tokio::time::sleep;

const PAGE: &str = "deploy/docs/src/operator/backup.md";
const RUNBOOK: &str = "deploy/runbooks/ops.backup.md";

/// The blocks under a heading that begin with this fence.
pub(crate) fn block(page: &str, title: &str, fence: &str) -> String {
    let text = fs::read_to_string(root().join(page)).unwrap();
    let below = text.split(&format!("\n## {title}\n")).nth(1).unwrap_or_else(|| panic!("{page} has no {title:?}"));
    let below = below.split("\n## ").next().unwrap();
    let mut code = String::new();
    let mut is_code = false;
    for line in below.lines().map(str::trim_start) {
        match line {
            line if line == format!("```{fence}") => is_code = true,
            line if line.starts_with("```") => is_code = false,
            line if is_code => code.extend([line, "\n"]),
            _ => {}
        }
    }
    assert!(!code.is_empty(), "{page} has no {fence} under {title:?}");
    code
}

/// Puts the data directory aside, and makes an empty one.
fn put_aside(data: &Path) {
    fs::rename(data, data.with_extension("lost")).unwrap();
    make_empty_data(data);
}

fn is_empty(folder: &Path) -> bool {
    fs::read_dir(folder).unwrap().next().is_none()
}

/// A script with the settings of a replica, in this folder.
fn service(script: &str, given: Vec<(String, String)>, replica: &Replica, programs: &Path, folder: &Path) -> Command {
    let mut command = Command::new("bash");
    command.args(["-euc", script]).env_clear().current_dir(folder);
    command.envs(replica.command(&[]).as_std().get_envs().filter_map(|(name, value)| Some((name, value?))));
    let scripts = root().join("deploy/backup");
    command.env("PATH", format!("{}:{}:/usr/bin:/bin", programs.display(), scripts.display())).envs(given);
    command
}

#[tokio::test(flavor = "multi_thread")]
async fn restored_service_starts_after_the_page_and_reports_what_was_lost() {
    let mut machine = BackupMachine::new();
    let mut cluster = TestCluster::builder().postgres_with(machine.postgres()).start().await;
    machine.configure(&BackedUpServer::of(&cluster.postgres).await);
    let (node, other_node) = (cluster.node("h100").await, cluster.node("h100").await);
    let kept = cluster.rent_active("h100", 1).await;
    machine.expect(&block(PAGE, "The first backup", "sh,postgres")).await;

    // The copy of the key ring, with the service's variables.
    let copies = cluster.settings.key_ring_path.parent().unwrap().to_owned();
    fs::write(copies.join("passphrase"), "a passphrase of the test").unwrap();
    let programs = cluster.settings.executable.parent().unwrap().to_owned();
    let variable = |name: &str, value: &Path| (name.to_owned(), value.display().to_string());
    let given = vec![variable("PASSPHRASE_FILE", &copies.join("passphrase")), variable("COPIES", &copies)];
    let copying = service(&block(PAGE, "The key ring", "sh,service"), given, &cluster.replicas[0], &programs, &copies);
    let (code, printed) = output_of(copying).await;
    assert!(code == Some(0) && printed.contains("the key ring fits the database"), "{printed}");
    let copy = fs::read(copies.join("key-ring.gpg")).unwrap();
    let ring = fs::read_to_string(&cluster.settings.key_ring_path).unwrap();
    let key = ring.lines().find_map(|line| line.strip_prefix("key ")?.split(' ').nth(1)).unwrap();
    assert!(!copy.windows(key.len()).any(|bytes| bytes == key.as_bytes()), "the copy is encrypted");

    // What the target does not have: another tenant on the node.
    cluster.expect_settled().await;
    sleep(Duration::from_millis(1100)).await;
    let now = "SELECT to_char(date_trunc('second', clock_timestamp()) AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS+00')";
    let target: String = sqlx::query_scalar(now).fetch_one(&cluster.pool).await.unwrap();
    sleep(Duration::from_millis(1100)).await;
    let lost = cluster.rent_active("h100", 2).await;
    cluster.expect_settled().await;
    wait_until_marked(&cluster).await;
    wait_until_archived(&cluster.pool).await;

    // The disks are lost. The replica goes on until it is stopped.
    cluster.kill9_replica(0);
    let data = cluster.postgres.data_folder().await;
    cluster.postgres.stop().await;
    put_aside(&data);
    let (code, printed) = machine.run(&block(PAGE, "Restore", "sh,postgres"), &[("TARGET", &target)]).await;
    assert_eq!(code, Some(0), "{printed}");
    cluster.postgres.start_again().await;
    wait_until_recovered(&cluster.pool, cluster.postgres.log()).await;

    cluster.allow_error("gpuaas: ");
    cluster.allow_changed_audit_log();
    let refused = refusal(&mut cluster.replicas[0]).await;
    assert!(refused.contains("exit status: 78") && refused.contains("was restored from a backup"), "{refused}");
    assert!(refused.contains("gpuaas begin-incarnation"), "{refused}");

    // As the page says: the report, and the incarnation.
    let nodes = copies.join("nodes");
    for node in [&node, &other_node] {
        let copying = r#"mkdir -p "$0" && cp -r "$(find "$1" -name allocations -type d | head -n 1)" "$0""#;
        let mut command = Command::new("sh");
        command.args(["-c", copying]).arg(nodes.join(&node.name)).arg(cluster.agent_folder(node));
        let (code, printed) = output_of(command).await;
        assert_eq!(code, Some(0), "{printed}");
    }
    let operator = cluster.nats.url("operator").unwrap().expose_secret().to_owned();
    let given = vec![variable("NODES", &nodes), ("GPUAAS_OPERATOR_NATS_URL".to_owned(), operator.clone())];
    let restoring = service(&block(PAGE, "Restore", "sh,service"), given, &cluster.replicas[0], &programs, &copies);
    let (code, printed) = output_of(restoring).await;
    assert!(code == Some(0) && printed.contains("members may start"), "{printed}");
    let report: Value = serde_json::from_slice(&fs::read(copies.join("recover-report.json")).unwrap()).unwrap();
    let losses = report["losses"].as_array().unwrap();
    let subject = format!("allocation/{}", lost.id);
    assert_eq!(losses.len(), 1, "{report:#}");
    assert!(losses[0]["kind"] == "tenant_without_allocation" && losses[0]["subject"] == subject, "{report:#}");
    assert_eq!(report["sources"]["nodes"]["count"], 2, "{report:#}");
    assert!(report["lost_events"]["provisioning.active"] == 1, "{report:#}");

    // Once more, it changes nothing; and the report is the same after the members have started.
    let (code, printed) = run(&cluster.replicas[0], &["begin-incarnation"]).await;
    assert!(code == Some(0) && printed.contains("nothing was restored since incarnation"), "{printed}");
    cluster.restart_replica(0).await;
    node.expect_state("active").await;
    other_node.expect_state("active").await;
    kept.expect_state("active").await;
    assert_eq!(cluster.user.get(&format!("/api/v1/allocations/{}", lost.id)).await.status.as_u16(), 404);
    let arguments = ["recover-report", "--nats-url", &operator];
    let (code, printed) = run(&cluster.replicas[0], &arguments).await;
    assert!(code == Some(1) && printed.contains(&subject), "{printed}");

    // The metrics have the age of the backup, and of the archive.
    let until = Instant::now() + Duration::from_secs(60);
    let metrics = format!("{}/metrics", cluster.replicas[0].operations_url());
    loop {
        let page = reqwest::get(&metrics).await.unwrap().text().await.unwrap();
        let has = |name: &str| page.lines().any(|line| line.starts_with(name));
        if has("backup_completed_timestamp_seconds{kind=\"full\"}") && has("wal_archived_timestamp_seconds{") {
            break;
        }
        assert!(Instant::now() < until, "the ages are not exported: {page}");
        sleep(Duration::from_millis(500)).await;
    }

    // The timers were off for nine days.
    let options = MonitoringOptions { hurried: &["backup.yaml"], lab_hosts: &[] };
    let monitoring = Monitoring::start_with(&cluster, &options).await;
    let ages = "UPDATE backup_record SET completed_at = completed_at - interval '9 days'";
    cluster.postgres.execute(ages).await;
    let alert = monitoring.alertmanager.expect("pager", "GPUAASBackupOld", true).await;
    let full = monitoring.alertmanager.expect("tickets", "GPUAASFullBackupOld", true).await;
    for alert in [alert, full] {
        assert_eq!(format!("deploy/runbooks/{}.md", alert.runbook), RUNBOOK);
    }
    for title in ["Look here", "Fix", "Afterwards"] {
        machine.expect(&block(RUNBOOK, title, "sh,postgres")).await;
    }
    monitoring.alertmanager.expect("pager", "GPUAASBackupOld", false).await;
    monitoring.alertmanager.expect("tickets", "GPUAASFullBackupOld", false).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn truncated_backup_and_missing_wal_are_named_and_nothing_is_restored() {
    let mut machine = BackupMachine::new();
    let db = TestDatabase::with_options(machine.postgres()).await;
    machine.configure(&BackedUpServer::of(&db).await);
    machine.expect(&block(PAGE, "The first backup", "sh,postgres")).await;
    for _ in 0..3 {
        db.execute("INSERT INTO entity_count (kind, state, change) VALUES ('node', 'none', 0)").await;
        wait_until_archived(&db.pool).await;
    }
    // The pages are followed where nothing is wrong, too.
    for title in ["Look here", "Fix", "Afterwards"] {
        machine.expect(&block(RUNBOOK, title, "sh,postgres")).await;
    }
    db.execute("INSERT INTO entity_count (kind, state, change) VALUES ('node', 'none', 0)").await;
    wait_until_archived(&db.pool).await;
    db.execute("INSERT INTO entity_count (kind, state, change) VALUES ('node', 'none', 0)").await;
    wait_until_archived(&db.pool).await;
    let data = db.data_folder().await;
    db.stop().await;
    put_aside(&data);

    // A gap: Postgres would end its recovery there and start.
    let segments = machine.files(&["/archive/", ".zst"]);
    let missing = &segments[segments.len() - 2];
    let aside = machine.folder().join("missing");
    fs::rename(missing, &aside).unwrap();
    for target in ["check", "latest"] {
        let (code, printed) = machine.run(&format!("gpuaas-restore {target}"), &[]).await;
        assert_eq!(code, Some(1), "{target}: {printed}");
        assert!(printed.contains("the WAL between 0000") && printed.contains("is missing"), "{printed}");
    }
    assert!(is_empty(&data), "nothing was restored");
    fs::rename(&aside, missing).unwrap();

    // A truncated file of the newest backup.
    let files = machine.files(&["/backup/", "/pg_data/base/"]);
    let largest = files
        .iter()
        .max_by_key(|path| (path.to_string_lossy().into_owned(), fs::metadata(path).unwrap().len()))
        .unwrap();
    let content = fs::read(largest).unwrap();
    fs::write(largest, &content[..content.len() / 2]).unwrap();
    for target in ["check", "latest"] {
        let (code, printed) = machine.run(&format!("gpuaas-restore {target}"), &[]).await;
        assert_eq!(code, Some(1), "{target}: {printed}");
        assert!(printed.contains("is damaged: files of it are missing, truncated or altered"), "{printed}");
    }
    assert!(is_empty(&data), "nothing was restored");
    fs::write(largest, content).unwrap();

    // No backup ended before this time, and a word is no time.
    for (target, reason) in [("2020-01-01 00:00:00+00", "no such backup"), ("yesterweek", "is no time")] {
        let (code, printed) = machine.run(&format!("gpuaas-restore '{target}'"), &[]).await;
        assert!(code == Some(1) && printed.contains(reason), "{printed}");
    }
    let (code, printed) = machine.run("gpuaas-restore latest", &[]).await;
    assert_eq!(code, Some(0), "whole again: {printed}");
    db.start_again().await;
    wait_until_recovered(&db.pool, db.log()).await;
}
