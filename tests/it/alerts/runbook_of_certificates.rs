//! The runbook of certificates, followed word by word: one that ends soon, one that ends while its process runs, and a reload that is refused.

use super::executed_runbooks::follow;
use super::monitoring::Monitoring;
use crate::docs_recipes::{REFRESH, followed};
use crate::doctor::{EnvFile, expect};
use chrono::Datelike as _;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::error::Error as _;
use std::fs;
use std::time::{Duration, Instant};
use tests::cluster::TestCluster;
use tokio::time::sleep;

const PAGE: &str = "runbooks/ops.certificates.md";
const WITHIN: Duration = Duration::from_secs(60);

/// `systemctl reload gpuaas`, as the page says.
fn reload(cluster: &TestCluster) {
    let pid = cluster.replicas[0].pid().unwrap();
    kill(Pid::from_raw(pid.try_into().unwrap()), Signal::SIGHUP).unwrap();
}

/// What a client gets that has no connection yet: its error, where it refuses the certificate.
async fn connect(cluster: &TestCluster) -> Result<(), String> {
    let http = supervisors::dev::api::https_client(cluster.authority.certificate_path()).unwrap();
    let sent = http.get(format!("{}/api/v1/healthz", cluster.settings.public_url)).send().await;
    sent.map(drop).map_err(|error| {
        let mut text = error.to_string();
        let mut source = error.source();
        while let Some(error) = source {
            text.push_str(&format!(": {error}"));
            source = error.source();
        }
        text
    })
}

/// The line of the log with this text.
async fn logged(cluster: &TestCluster, text: &str) -> String {
    let until = Instant::now() + WITHIN;
    loop {
        let log = fs::read_to_string(cluster.replicas[0].log()).unwrap();
        if let Some(line) = log.lines().find(|line| line.contains(text)) {
            return line.to_owned();
        }
        assert!(Instant::now() < until, "{text:?} is not logged: {log}");
        sleep(Duration::from_millis(200)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn chain_with_a_certificate_that_ends_soon_raises_an_alert_until_it_is_replaced() {
    let cluster = TestCluster::builder().variable(REFRESH.0, REFRESH.1).start().await;
    let monitoring = Monitoring::start(&cluster).await;
    let alerts = &monitoring.alertmanager;
    assert_eq!(monitoring.firing().await, ["GPUAASWatchdog"]);

    // The leaf is good for months, and an intermediate is not.
    let path = cluster.settings.certificate.certificate_path.clone();
    let chain = fs::read_to_string(&path).unwrap();
    let end = chrono::Utc::now() + chrono::TimeDelta::days(10);
    let mut intermediate = rcgen::CertificateParams::new(vec!["intermediate".to_owned()]).unwrap();
    intermediate.not_after = rcgen::date_time_ymd(end.year(), end.month() as u8, end.day() as u8);
    let key = rcgen::KeyPair::generate().unwrap();
    fs::write(&path, format!("{chain}{}", intermediate.self_signed(&key).unwrap().pem())).unwrap();
    reload(&cluster);
    let alert = alerts.expect("tickets", "GPUAASCertificateEndsSoon", true).await;
    let line = logged(&cluster, "a certificate ends within two weeks").await;
    assert!(
        line.contains("\"WARN\"") && line.contains("\"server\"") && line.contains("systemctl reload gpuaas"),
        "{line}"
    );

    let folder = followed(&cluster);
    let seen = follow(folder.path(), &alert, PAGE, &["Look here"], "").await;
    assert_eq!(seen.matches("Not After").count(), 2, "the page shows every certificate of the chain: {seen}");
    fs::write(&path, chain).unwrap();
    reload(&cluster);
    let fixed = follow(folder.path(), &alert, PAGE, &["Afterwards"], "").await;
    assert_eq!(fixed.matches("Not After").count(), 1, "{fixed}");
    alerts.expect("tickets", "GPUAASCertificateEndsSoon", false).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn certificate_that_ends_while_its_process_runs_raises_an_alert_until_a_reload_takes_the_renewed_one() {
    let mut cluster = TestCluster::builder().variable(REFRESH.0, REFRESH.1).start().await;
    let monitoring = Monitoring::start(&cluster).await;
    let alerts = &monitoring.alertmanager;
    cluster.allow_error("\"runbook\":\"ops.certificates\"");
    cluster.allow_error("the reload is refused");
    let (path, key_path) =
        (cluster.settings.certificate.certificate_path.clone(), cluster.settings.certificate.key_path.clone());

    let short = cluster.authority.server_certificate_for("short", Duration::from_secs(25)).unwrap();
    fs::copy(&short.certificate_path, &path).unwrap();
    fs::copy(&short.key_path, &key_path).unwrap();
    reload(&cluster);
    let alert = alerts.expect("pager", "GPUAASCertificateEnds", true).await;
    let until = Instant::now() + WITHIN;
    loop {
        match connect(&cluster).await {
            Err(error) if error.to_lowercase().contains("expired") => break,
            other => assert!(Instant::now() < until, "clients accept a certificate that has ended: {other:?}"),
        }
        sleep(Duration::from_millis(200)).await;
    }
    let line = logged(&cluster, "a certificate has ended").await;
    assert!(line.contains("\"ERROR\"") && line.contains("systemctl reload gpuaas"), "{line}");
    let doctor = tempfile::tempdir().unwrap();
    let (code, report) = EnvFile::of(&cluster, doctor.path()).examine().await;
    assert_eq!(code, 2);
    expect(&report, "certificates", "error: SVC_TLS_CERT_PATH");

    // The renewed chain with the key of before: it is refused, and the alert says so.
    let renewed = cluster.authority.server_certificate("renewed").unwrap();
    fs::copy(&renewed.certificate_path, &path).unwrap();
    reload(&cluster);
    let not_taken = alerts.expect("tickets", "GPUAASReloadRefused", true).await;
    assert_eq!(not_taken.runbook, alert.runbook);
    assert!(connect(&cluster).await.is_err(), "what was in use stays in use");
    let line = logged(&cluster, "the reload is refused").await;
    assert!(line.contains("certificate"), "{line}");

    fs::copy(&renewed.key_path, &key_path).unwrap();
    reload(&cluster);
    let folder = followed(&cluster);
    let until = Instant::now() + WITHIN;
    while let Err(error) = connect(&cluster).await {
        assert!(Instant::now() < until, "the renewed certificate is not presented: {error}");
        sleep(Duration::from_millis(200)).await;
    }
    let fixed = follow(folder.path(), &alert, PAGE, &["Look here", "Afterwards"], "").await;
    assert!(fixed.matches("Not After").count() == 2 && fixed.contains("replica-1"), "{fixed}");
    alerts.expect("pager", "GPUAASCertificateEnds", false).await;
    alerts.expect("tickets", "GPUAASReloadRefused", false).await;
    cluster.shutdown().await;
}
