//! Runbooks, followed word by word: a fault in a real cluster makes Prometheus fire the shipped alert and Alertmanager deliver it; the page that it
//! names is followed, and the alert resolves.

use super::monitoring::{DeliveredAlert, Monitoring, MonitoringOptions};
use crate::audit_log::{tamper, wait_until_sealed};
use crate::docs_recipes::{REFRESH, followed, recipe, transcript};
use chrono::TimeDelta;
use reqwest::Method;
use serde_json::json;
use std::fs;
use std::path::Path;
use supervisors::process_roles::ProcessRole;
use tests::cluster::fake_agent::FakeAgent;
use tests::cluster::fake_processor::{FakeProcessor, event, intent};
use tests::cluster::{GPUS, TestCluster};

/// More events of the payment processor than its alert allows to fail.
const FAILING_EVENTS: usize = 7;
/// More requests than the alert about unreadable clients allows.
const UNREADABLE_CLIENTS: usize = 15;
/// More messages than the alert about forged ones allows.
const FORGED_MESSAGES: usize = 12;

/// Requests for tasks of a node that have failed.
const FAILED_ORDERS: &str =
    r#"http_requests_total{service="api",status_class="5xx",route=~"/api/v1/admin/nodes/.+/tasks"}"#;

/// Runs the blocks under these headings of an alert's runbook, as an administrator who is logged in, and returns what they print.
pub(crate) async fn follow(
    folder: &Path,
    alert: &DeliveredAlert,
    page: &'static str,
    titles: &[&'static str],
    given: &str,
) -> String {
    assert_eq!(page, format!("runbooks/{}.md", alert.runbook), "the alert leads to the page");
    let mut script = format!(
        "set -eu\n. .dev/env\nPATH=$PWD/target/debug:$PATH\n{given}\n\
         printf '%s\\n' \"$SVC_ADMIN_PASSWORD\" | gpuctl login --username \"$SVC_ADMIN_USERNAME\" --password-stdin\n"
    );
    for &title in titles {
        script.push_str(&format!("echo '--- {title}'\n{}", recipe((page, title))));
    }
    let (went_well, transcript) = transcript(&script, folder).await;
    assert!(went_well, "{page}: {transcript}");
    transcript
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_event_of_the_payment_processor_raises_an_alert_and_is_dismissed_by_its_runbook() {
    const PAGE: &str = "runbooks/ops.webhook.outage.md";
    const EVENTS: &str = "/api/v1/admin/billing/processor-events";
    let processor = FakeProcessor::start().await;
    let cluster = processor.configure(TestCluster::builder().variable(REFRESH.0, REFRESH.1)).start().await;
    let monitoring = Monitoring::start(&cluster).await;
    let alerts = &monitoring.alertmanager;
    assert_eq!(monitoring.firing().await, ["GPUAASWatchdog"]);

    // The processor reports another amount than was to be paid, in more events than the alert allows to fail.
    let payment = cluster.insert_open_payment("user", 5_000, "pi_1").await;
    for number in 1..=FAILING_EVENTS {
        let object = intent("pi_1", payment, 4_999, "succeeded");
        let contradiction = event(&format!("evt_{number}"), "payment_intent.succeeded", &object);
        cluster.deliver(0, &contradiction).await.ok();
    }
    // None is dead yet: an alert about dead events makes this one silent.
    let failing = alerts.expect("pager", "GPUAASWebhookProcessingFailuresSpike", true).await;
    let folder = followed(&cluster);
    follow(folder.path(), &failing, PAGE, &["Look here"], "").await;

    // Each is dismissed but for one, which fails in its last attempt.
    let are_retried = |page: &serde_json::Value| page["items"].as_array().map(Vec::len) == Some(FAILING_EVENTS);
    let path = format!("{EVENTS}?state=retrying");
    let retried = cluster.admin.wait_until(&path, "each has failed", are_retried).await;
    cluster.set_policy("billing.webhook_max_attempts", 1).await;
    alerts.expect("pager", "GPUAASPaymentsUnderReview", true).await;
    for it in retried["items"].as_array().unwrap() {
        let order = if it["event_id"] == "evt_1" { "retry" } else { "dismiss" };
        let path = format!("{EVENTS}/{}/{order}", it["id"].as_str().unwrap());
        cluster.admin.post(&path, &json!({ "reason": "a test needs it" })).await.ok();
    }
    let alert = alerts.expect("pager", "GPUAASProcessorEventsDead", true).await;

    let seen = follow(folder.path(), &alert, PAGE, &["Look here"], "").await;
    assert!(seen.contains("evt_1") && seen.contains("50.00 USD"), "the page shows the event and its error: {seen}");
    let events = cluster.admin.get("/api/v1/admin/billing/processor-events?state=dead").await.ok();
    let given = format!("event={}", events["items"][0]["id"].as_str().unwrap());
    let fixed = follow(folder.path(), &alert, PAGE, &["Fix: dismiss an event", "Afterwards"], &given).await;
    assert!(!fixed.split_once("--- Afterwards").unwrap().1.contains("evt_1"), "{fixed}");
    alerts.expect("pager", "GPUAASProcessorEventsDead", false).await;

    // With the last event the review of the payment was dismissed. Another payment is reviewed, and its review is ended at the payment.
    alerts.expect("pager", "GPUAASPaymentsUnderReview", false).await;
    let payment = cluster.insert_open_payment("user", 5_000, "pi_2").await;
    let contradiction = event("evt_9", "payment_intent.succeeded", &intent("pi_2", payment, 4_998, "succeeded"));
    cluster.deliver(0, &contradiction).await.ok();
    let under_review = alerts.expect("pager", "GPUAASPaymentsUnderReview", true).await;
    let path = format!("/api/v1/billing/payments/{}", payment.0);
    let review = cluster.admin.get(&path).await.ok()["review"].as_str().unwrap().to_owned();
    let given = format!("payment={}; review={review}", payment.0);
    let ended = follow(folder.path(), &under_review, PAGE, &["Fix: end a review"], &given).await;
    assert_eq!(ended.matches(&review).count(), 1, "it waits, until it is decided about: {ended}");
    assert_eq!(cluster.admin.get(&path).await.ok()["state"], "canceled");
    alerts.expect("pager", "GPUAASPaymentsUnderReview", false).await;
    // The event about money that was decided about is processed by its next attempt.
    let dead = cluster.admin.get("/api/v1/admin/billing/processor-events?state=dead").await.ok();
    let given = format!("event={}", dead["items"][0]["id"].as_str().unwrap());
    follow(folder.path(), &under_review, PAGE, &["Fix: retry an event"], &given).await;
    let none_is_dead = |page: &serde_json::Value| page["items"].as_array().is_some_and(Vec::is_empty);
    cluster.admin.wait_until(&format!("{EVENTS}?state=dead"), "the event is processed", none_is_dead).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replica_that_was_killed_raises_alerts_of_itself_and_of_its_role_and_is_started_by_its_runbook() {
    const PAGE: &str = "runbooks/ops.api.degradation.md";
    let others: Vec<_> =
        ProcessRole::ALL.iter().filter(|role| **role != ProcessRole::Billing).map(|role| role.name()).collect();
    let builder = TestCluster::builder().replicas(2).clock_of(1).variable(REFRESH.0, REFRESH.1);
    let builder = builder.variable("SVC_TRUSTED_PROXIES", "127.0.0.1/32");
    let mut cluster = builder.variable_of(0, "SVC_ROLES", &others.join(",")).start().await;
    // Shards on their way have no owner for a moment.
    cluster.wait_for_balanced_shards().await;
    let options = MonitoringOptions { hurried: &["api.yaml"], ..MonitoringOptions::default() };
    let monitoring = Monitoring::start_with(&cluster, &options).await;
    let alerts = &monitoring.alertmanager;

    // A stranger with a user of the NATS server publishes what only members may.
    let bus = cluster.bus().await;
    for _ in 0..FORGED_MESSAGES {
        bus.publish("gpuaas.cluster.changed", "forged".into()).await.unwrap();
    }
    bus.flush().await.unwrap();
    let forged = alerts.expect("pager", "GPUAASForgedMemberMessages", true).await;
    let folder = followed(&cluster);
    let seen = follow(folder.path(), &forged, PAGE, &["Look here"], "").await;
    assert!(seen.contains("replica-1") && seen.contains("replica-2"), "nothing has happened to the members: {seen}");

    // A proxy in front of a replica hides its clients' addresses.
    let client = cluster.at_replica(0, "user");
    for _ in 0..UNREADABLE_CLIENTS {
        let request = client.request(Method::GET, "/api/v1/me").header("x-forwarded-for", "unknown");
        client.send(request).await.ok();
    }
    let unreadable = alerts.expect("tickets", "GPUAASClientsUnreadable", true).await;
    assert_eq!(unreadable.runbook, forged.runbook);

    // A member's clock is ahead.
    let clock = cluster.service_clock.as_ref().unwrap();
    clock.set_offset(TimeDelta::seconds(10));
    let clock_off = alerts.expect("tickets", "GPUAASMemberClockOff", true).await;
    assert_eq!(clock_off.runbook, forged.runbook);
    clock.set_offset(TimeDelta::zero());
    alerts.expect("tickets", "GPUAASMemberClockOff", false).await;

    // One member is cut off from NATS, and its shards move to the other and back.
    cluster.nats_links[1].cut();
    let cut_off = alerts.expect("pager", "GPUAASMemberCutOff", true).await;
    assert_eq!(cut_off.runbook, forged.runbook);
    cluster.nats_links[1].restore();
    alerts.expect("pager", "GPUAASMemberCutOff", false).await;
    cluster.wait_for_balanced_shards().await;

    // Its shards cannot be taken over while a transaction holds their rows, which it does from before the end of their owner.
    let mut holding = cluster.pool.begin().await.unwrap();
    let rows = "SELECT FROM shard WHERE owner IN (SELECT id FROM member WHERE name = 'replica-2') FOR UPDATE";
    let held = sqlx::query(rows).execute(&mut *holding).await.unwrap().rows_affected();
    cluster.kill9_replica(1);
    assert!(held > 0, "the member that was killed owns shards");
    let ownerless = alerts.expect("pager", "GPUAASShardsWithoutOwner", true).await;
    assert_eq!(ownerless.runbook, forged.runbook);
    holding.rollback().await.unwrap();
    alerts.expect("pager", "GPUAASShardsWithoutOwner", false).await;
    alerts.expect("pager", "GPUAASReplicaDown", true).await;
    let alert = alerts.expect("pager", "GPUAASRoleMissing", true).await;
    let is_alone = |report: &serde_json::Value| {
        report["unowned_shards"] == 0 && report["members"].as_array().map(Vec::len) == Some(1)
    };
    let survivor = cluster.at_replica(0, "admin");
    survivor.wait_until("/api/v1/admin/runtime/cluster", "the other one owns everything", is_alone).await;

    let seen = follow(folder.path(), &alert, PAGE, &["Look here"], "").await;
    assert!(seen.contains("replica-1") && !seen.contains("replica-2"), "the page shows which member lives: {seen}");
    // `systemctl start gpuaas`, as the page says.
    cluster.restart_replica(1).await;
    let fixed = follow(folder.path(), &alert, PAGE, &["Afterwards"], "").await;
    assert!(fixed.contains("replica-2") && fixed.contains("billing"), "a member has the role: {fixed}");
    for name in ["GPUAASReplicaDown", "GPUAASRoleMissing"] {
        alerts.expect("pager", name, false).await;
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn altered_snapshot_raises_alerts_and_its_entity_is_restarted_by_its_runbook() {
    const PAGE: &str = "runbooks/ops.snapshot.altered.md";
    const PARKED_PAGE: &str = "runbooks/ops.provisioning.stuck.md";
    const API_PAGE: &str = "runbooks/ops.api.degradation.md";
    // An agent of the test's own renews no certificate.
    let builder = TestCluster::builder().policy("node.certificate_ttl_seconds", 600).variable(REFRESH.0, REFRESH.1);
    let mut cluster = builder.start().await;
    cluster.offer_sku("h100", GPUS).await;
    let node = cluster.register("h100").await;
    let agent = FakeAgent::onboard(&cluster.bundle(&node).await, GPUS).await;
    let order = json!({ "type": "node.validate", "reason": "a look" });
    cluster.admin.post(&format!("{}/tasks", node.path()), &order).await.created();
    let options = MonitoringOptions { hurried: &["certificates.yaml"], ..MonitoringOptions::default() };
    let monitoring = Monitoring::start_with(&cluster, &options).await;
    let alerts = &monitoring.alertmanager;

    // Passivated, so that the altered row is loaded.
    cluster.replicas[0].stop().await;
    let alteration =
        "UPDATE entity SET body = replace(body::text, 'node.validate', 'node.reboot')::jsonb WHERE id = $1";
    sqlx::query(alteration).bind(node.id).execute(&cluster.pool).await.unwrap();
    cluster.allow_parked(node.id);
    cluster.allow_error("snapshot_refused");
    cluster.allow_error(&node.id.to_string());
    cluster.restart_replica(0).await;
    assert_eq!(agent.poll(1).await.expect("an answer").status.as_u16(), 503);
    let parked = alerts.expect("pager", "GPUAASEntitiesParked", true).await;
    let altered = alerts.expect("pager", "GPUAASSnapshotAltered", true).await;
    let ending = alerts.expect("tickets", "GPUAASNodeCertificatesEnd", true).await;
    assert_eq!(ending.runbook, "ops.certificates");
    // What clients ask of it fails, which is most of what they ask here. A counter that has no earlier sample has no rate.
    let path = format!("{}/tasks", node.path());
    for attempts in [1, 20] {
        for _ in 0..attempts {
            let failed = cluster.admin.send_once(Method::POST, &path, Some(&order)).await;
            assert!(failed.status.is_server_error(), "{failed}");
        }
        monitoring.wait_for_samples(&[FAILED_ORDERS]).await;
    }
    let burning = alerts.expect("pager", "GPUAASApiBudgetBurnsFast", true).await;

    let folder = followed(&cluster);
    follow(folder.path(), &burning, API_PAGE, &["Look here"], "").await;
    for (alert, page) in [(&parked, PARKED_PAGE), (&altered, PAGE)] {
        let seen = follow(folder.path(), alert, page, &["Look here"], "").await;
        assert!(seen.contains(&node.id.to_string()), "the page shows the entity: {seen}");
    }
    // The content that was committed, from the backup.
    let restored = "UPDATE entity SET body = replace(body::text, 'node.reboot', 'node.validate')::jsonb WHERE id = $1";
    sqlx::query(restored).bind(node.id).execute(&cluster.pool).await.unwrap();
    let given = format!("entity=node/{}", node.id);
    let fixed = follow(folder.path(), &altered, PAGE, &["Fix: restart the entity", "Afterwards"], &given).await;
    assert!(!fixed.split_once("--- Afterwards").unwrap().1.contains(&node.id.to_string()), "{fixed}");
    alerts.expect("pager", "GPUAASEntitiesParked", false).await;
    assert_eq!(agent.next_task().await.task.kind(), "node.validate");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn head_of_an_audit_chain_that_was_deleted_raises_an_alert_until_it_is_restored() {
    const PAGE: &str = "runbooks/ops.audit.chain.md";
    let mut cluster = TestCluster::builder().variable(REFRESH.0, REFRESH.1).start().await;
    cluster.offer_sku("h100", GPUS).await;
    let node = cluster.register("h100").await;
    wait_until_sealed(&cluster).await;
    let monitoring = Monitoring::start(&cluster).await;
    let alerts = &monitoring.alertmanager;

    let shard: i16 = sqlx::query_scalar("SELECT shard FROM entity WHERE id = $1")
        .bind(node.id)
        .fetch_one(&cluster.pool)
        .await
        .unwrap();
    let last = format!("shard = {shard} AND number = (SELECT max(number) FROM audit_head WHERE shard = {shard})");
    tamper(&cluster, &format!("CREATE TABLE backup AS SELECT * FROM audit_head WHERE {last}")).await;
    cluster.allow_error("the audit log of a shard was changed");
    assert_eq!(tamper(&cluster, &format!("DELETE FROM audit_head WHERE {last}")).await, 1);
    // The chain is looked at when it is to be extended.
    cluster.bundle(&node).await;
    let alert = alerts.expect("pager", "GPUAASAuditChainBroken", true).await;

    let folder = followed(&cluster);
    let seen = follow(folder.path(), &alert, PAGE, &["Look here"], "").await;
    assert!(seen.contains(&format!("shard {shard}: ")) && seen.contains("it ended with 1"), "{seen}");
    // The backup.
    assert_eq!(tamper(&cluster, "INSERT INTO audit_head SELECT * FROM backup").await, 1);
    tamper(&cluster, "DROP TABLE backup").await;
    alerts.expect("pager", "GPUAASAuditChainBroken", false).await;
    wait_until_sealed(&cluster).await;
    follow(folder.path(), &alert, PAGE, &["Afterwards"], "").await;
    assert!(fs::read_to_string(folder.path().join("heads")).unwrap().lines().count() > 0);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn balance_that_was_altered_raises_an_alert_until_it_is_restored() {
    const PAGE: &str = "runbooks/ops.ledger.difference.md";
    const INVARIANT_PAGE: &str = "runbooks/ops.api.degradation.md";
    let mut cluster = TestCluster::builder().variable(REFRESH.0, REFRESH.1).start().await;
    let monitoring = Monitoring::start(&cluster).await;
    let alerts = &monitoring.alertmanager;
    cluster.allow_error("\"invariant\":\"I3\"");
    // The page lists the accounts, whose seals are checked.
    cluster.allow_error("snapshot_refused");

    let (account, body): (uuid::Uuid, serde_json::Value) =
        sqlx::query_as("SELECT id, body FROM entity WHERE kind = 'billing_account' ORDER BY id LIMIT 1")
            .fetch_one(&cluster.pool)
            .await
            .unwrap();
    let altered = "UPDATE entity SET body = jsonb_set(body, '{balance}', to_jsonb((body->>'balance')::bigint + 1000000)) WHERE id = $1";
    sqlx::query(altered).bind(account).execute(&cluster.pool).await.unwrap();
    let alert = alerts.expect("pager", "GPUAASLedgerDiffers", true).await;
    // The auditor finds it, too, by the sum of the postings.
    let broken = alerts.expect("pager", "GPUAASInvariantBroken", true).await;

    let folder = followed(&cluster);
    follow(folder.path(), &broken, INVARIANT_PAGE, &["Look here"], "").await;
    let seen = follow(folder.path(), &alert, PAGE, &["Look here"], "").await;
    assert!(seen.contains(&account.to_string()) && seen.contains("it ended with 1"), "{seen}");
    // The backup.
    let restored = "UPDATE entity SET body = $2 WHERE id = $1";
    sqlx::query(restored).bind(account).bind(&body).execute(&cluster.pool).await.unwrap();
    follow(folder.path(), &alert, PAGE, &["Afterwards"], "").await;
    alerts.expect("pager", "GPUAASLedgerDiffers", false).await;
    cluster.shutdown().await;
}
