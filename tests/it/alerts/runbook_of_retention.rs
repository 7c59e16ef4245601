//! The runbook about old data, followed as `executed_runbooks` does. The waits of its rules are seconds here.

use super::executed_runbooks::follow;
use super::monitoring::{Monitoring, MonitoringOptions};
use crate::docs_recipes::{REFRESH, followed};
use secrecy::ExposeSecret as _;
use tests::cluster::TestCluster;

/// A month of the history that no policy keeps by default.
const OLD_MONTH: &str =
    "CREATE TABLE history_2024_01 PARTITION OF history FOR VALUES FROM ('2024-01-01 UTC') TO ('2024-02-01 UTC')";

/// What `gpuaas retention` prints about the history.
fn history_line(printed: &str) -> &str {
    printed.lines().find(|line| line.starts_with("history ")).unwrap_or(printed).trim_end()
}

#[tokio::test(flavor = "multi_thread")]
async fn alert_about_an_old_month_is_resolved_by_its_runbook() {
    const PAGE: &str = "runbooks/ops.retention.md";
    let cluster = TestCluster::builder().variable(REFRESH.0, REFRESH.1).start().await;
    sqlx::query(OLD_MONTH).execute(&cluster.pool).await.unwrap();
    let options = MonitoringOptions { hurried: &["retention.yaml"], ..MonitoringOptions::default() };
    let monitoring = Monitoring::start_with(&cluster, &options).await;
    let alerts = &monitoring.alertmanager;

    // A member removes nothing in its first hour, and measures.
    let lagging = alerts.expect("tickets", "GPUAASRetentionLags", true).await;
    let folder = followed(&cluster);
    let database = format!(
        "export SVC_DATABASE_URL='{}' SVC_DATABASE_CA_PATH='{}'",
        cluster.settings.database_url.expose_secret(),
        cluster.settings.database_ca_path.display()
    );
    let seen = follow(folder.path(), &lagging, PAGE, &["Look here"], &database).await;
    assert!(history_line(&seen).ends_with("2024-01"), "the page shows the month: {seen}");
    let given = format!("{database}\nmonths=1200 member=replica-1");
    let fixed = follow(folder.path(), &lagging, PAGE, &["Fix: keep more months", "Afterwards"], &given).await;
    assert!(history_line(fixed.split_once("--- Afterwards").unwrap().1).ends_with("nothing"), "{fixed}");
    alerts.expect("tickets", "GPUAASRetentionLags", false).await;
    cluster.shutdown().await;
}
