//! Rollouts in a cluster: canaries, waves, the first roll back, steering, and deaths of the control plane.

use serde_json::{Value, json};
use sqlx::Row as _;
use std::time::Duration;
use tests::cluster::db_lock::StatementFate;
use tests::cluster::updatable_agent::{UpdatableFleet, digest};
use tests::cluster::{NodeHandle, TestCluster, id_of};
use uuid::Uuid;

const PATH: &str = "/api/v1/admin/rollouts";
const SKU: &str = "h100";
/// More than any test has updates.
const ALL: usize = 1000;
/// Longer than the way of a message, and shorter than the first resend.
const QUIET: Duration = Duration::from_millis(1500);

async fn create(cluster: &TestCluster, canary: u32, max_unavailable: u32) -> String {
    let body = json!({
        "digest": digest('a'), "canary": canary, "max_unavailable": max_unavailable, "soak_seconds": 0,
        "selector": { "sku": SKU }, "reason": "a release",
    });
    let created = cluster.admin.post(PATH, &body).await.created();
    format!("{PATH}/{}", id_of(&created))
}

async fn steer(cluster: &TestCluster, path: &str, verb: &str) -> Value {
    cluster.admin.post(&format!("{path}/{verb}"), &json!({ "reason": "r" })).await.ok()
}

async fn expect_state(cluster: &TestCluster, path: &str, state: &str) -> Value {
    cluster.admin.wait_until(path, &format!("the rollout is {state}"), |rollout| rollout["state"] == state).await
}

/// The nodes that rollouts have ordered to update, once for each update.
async fn orders(cluster: &TestCluster) -> Vec<Uuid> {
    let query = "SELECT entity FROM history WHERE kind = 'node' AND command = 'update_for_rollout' \
                 AND why LIKE 'rollout % ordered %' ORDER BY at";
    let rows = sqlx::query(query).fetch_all(&cluster.pool).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn canary_precedes_the_waves_and_nodes_that_cannot_be_updated_are_skipped() {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    let fleet = UpdatableFleet::start(&mut cluster, SKU, 6, 0).await;
    let never_active = cluster.register(SKU).await;
    let other_sku = UpdatableFleet::start(&mut cluster, "a100", 1, ALL).await;
    let quarantined = &fleet.nodes[5];
    quarantined.order("quarantine").await.ok();

    let path = create(&cluster, 1, 2).await;
    let canary = fleet.shared.expect_begun(1).await;
    tokio::time::sleep(QUIET).await;
    assert_eq!(fleet.shared.begun(), canary, "the canary is alone");
    fleet.shared.finish(1);
    fleet.shared.expect_begun(3).await;
    tokio::time::sleep(QUIET).await;
    assert_eq!(fleet.shared.begun().len(), 3, "no more than the bound are under update");
    let shown = cluster.admin.get(&path).await.ok();
    assert_eq!((&shown["stage"], shown["in_flight"].as_array().map(Vec::len)), (&json!("waves"), Some(2)), "{shown}");
    fleet.shared.finish(ALL);

    let ended = expect_state(&cluster, &path, "completed").await;
    assert_eq!((&ended["updated"], &ended["failed"], &ended["skipped"]), (&json!(5), &json!(0), &json!(2)), "{ended}");
    let mut skips: Vec<_> =
        ended["skips"].as_array().unwrap().iter().map(|it| (it["node_id"].clone(), it["reason"].clone())).collect();
    skips.sort_by_key(|(_, reason)| reason.to_string());
    let expected = [(json!(never_active.id), json!("not_active")), (json!(quarantined.id), json!("quarantined"))];
    assert_eq!(skips, expected);
    assert_eq!((fleet.shared.most_in_flight(), other_sku.shared.begun().len()), (2, 0));
    for node in &fleet.nodes[..5] {
        let found = node.get().await;
        assert_eq!(found["agent"]["package_digest"], digest('a'));
        assert!(path.ends_with(found["agent_update"]["rollout_id"].as_str().unwrap()), "{found}");
    }
    let nodes = cluster.admin.get(&format!("{path}/nodes")).await.ok();
    let outcomes: Vec<_> = nodes["items"].as_array().unwrap().iter().map(|item| item["outcome"].clone()).collect();
    assert_eq!(outcomes, vec![json!("updated"); 5]);

    // What has the version is skipped without an update.
    let repeated = create(&cluster, 1, 2).await;
    let ended = expect_state(&cluster, &repeated, "completed").await;
    assert_eq!((&ended["updated"], &ended["skipped"]), (&json!(0), &json!(7)), "{ended}");
    assert_eq!(fleet.shared.begun().len(), 5);
    cluster.shutdown().await;
}

/// A failed validation holds the node.
async fn fail_validation(cluster: &TestCluster, fleet: &UpdatableFleet, node: &NodeHandle) {
    fleet.shared.fail_validations(node.id);
    let order = json!({ "level": "quick", "reason": "r" });
    cluster.admin.post(&format!("{}/validate", node.path()), &order).await.created();
    let held = node.expect_state("quarantined").await;
    assert_eq!(held["quarantine_holds"][0]["author"], "validation", "{held}");
}

#[tokio::test(flavor = "multi_thread")]
async fn node_that_a_fault_holds_is_updated_where_the_order_includes_held_ones_and_one_of_an_administrator_is_not() {
    let mut cluster = TestCluster::start().await;
    let fleet = UpdatableFleet::start(&mut cluster, SKU, 3, ALL).await;
    let [_, faulty, taken] = &fleet.nodes[..] else { unreachable!("three nodes") };
    fail_validation(&cluster, &fleet, faulty).await;
    taken.order("quarantine").await.ok();
    let quarantined = |node: &NodeHandle| json!({ "node_id": node.id, "reason": "quarantined" });

    let path = create(&cluster, 0, 2).await;
    let without = expect_state(&cluster, &path, "completed").await;
    assert_eq!((&without["include_held"], &without["updated"]), (&json!(false), &json!(1)), "{without}");
    assert_eq!(without["skips"], json!([quarantined(faulty), quarantined(taken)]));

    let body = json!({
        "digest": digest('a'), "canary": 0, "max_unavailable": 2, "soak_seconds": 0, "include_held": true,
        "selector": { "sku": SKU }, "reason": "the cure",
    });
    let path = format!("{PATH}/{}", id_of(&cluster.admin.post(PATH, &body).await.created()));
    let ended = expect_state(&cluster, &path, "completed").await;
    assert_eq!((&ended["include_held"], &ended["updated"], &ended["failed"]), (&json!(true), &json!(1), &json!(0)));
    assert!(ended["skips"].as_array().unwrap().contains(&quarantined(taken)), "{ended}");
    let updated = faulty.get().await;
    assert_eq!((&updated["agent"]["package_digest"], &updated["state"]), (&json!(digest('a')), &json!("quarantined")));
    assert_eq!(taken.get().await["agent"]["package_digest"], digest('0'));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn first_roll_back_stops_it_and_resume_goes_on_with_the_others() {
    let mut cluster = TestCluster::start().await;
    let fleet = UpdatableFleet::start(&mut cluster, SKU, 5, 1).await;
    let bad = fleet.nodes[1].id;
    fleet.shared.fail(bad);
    let path = create(&cluster, 1, 1).await;
    fleet.shared.expect_begun(2).await;
    fleet.shared.finish(ALL);
    let stopped = expect_state(&cluster, &path, "stopped").await;
    assert_eq!(stopped["stopped_by"], json!({ "node_id": bad, "reason": "made_up" }), "{stopped}");
    tokio::time::sleep(QUIET).await;
    assert_eq!(fleet.shared.begun().len(), 2, "nothing begins after the stop");
    let refused =
        cluster.admin.post(PATH, &json!({ "digest": digest('b'), "max_unavailable": 1, "reason": "r" })).await;
    let details = refused.expect_error(409, "state_conflict").body["details"].clone();
    assert!(path.ends_with(details["rollout_id"].as_str().unwrap()), "{details}");

    steer(&cluster, &path, "resume").await;
    let ended = expect_state(&cluster, &path, "completed").await;
    assert_eq!((&ended["updated"], &ended["failed"]), (&json!(4), &json!(1)), "{ended}");
    assert_eq!((fleet.shared.begun().len(), fleet.shared.most_in_flight()), (5, 1));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn paused_and_aborted_rollouts_begin_nothing_and_wait_for_what_is_in_flight() {
    let mut cluster = TestCluster::start().await;
    let fleet = UpdatableFleet::start(&mut cluster, SKU, 6, 0).await;
    let path = create(&cluster, 0, 2).await;
    fleet.shared.expect_begun(2).await;
    steer(&cluster, &path, "pause").await;
    fleet.shared.finish(2);
    let is_idle = |rollout: &Value| rollout["updated"] == 2 && rollout["in_flight"] == json!([]);
    let paused = cluster.admin.wait_until(&path, "nothing is in flight", is_idle).await;
    assert_eq!(paused["state"], "paused");
    tokio::time::sleep(QUIET).await;
    assert_eq!(fleet.shared.begun().len(), 2, "nothing begins while it is paused");

    steer(&cluster, &path, "resume").await;
    fleet.shared.expect_begun(4).await;
    assert_eq!(steer(&cluster, &path, "abort").await["state"], "aborting");
    fleet.shared.finish(ALL);
    let aborted = expect_state(&cluster, &path, "aborted").await;
    assert_eq!(aborted["updated"], 4, "{aborted}");
    tokio::time::sleep(QUIET).await;
    assert_eq!(fleet.shared.begun().len(), 4, "nothing begins after the abort");

    // Another one has the others.
    let next = create(&cluster, 0, 2).await;
    let ended = expect_state(&cluster, &next, "completed").await;
    assert_eq!((&ended["updated"], &ended["skipped"]), (&json!(2), &json!(4)), "{ended}");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn kill_of_the_owner_at_any_commit_of_a_rollout_loses_no_node_and_updates_none_twice() {
    let mut cluster = TestCluster::start().await;
    let commits = [
        ("rollout", "nodes_found", StatementFate::RolledBack),
        ("rollout", "nodes_found", StatementFate::Committed),
        ("node", "update_for_rollout", StatementFate::RolledBack),
        ("node", "update_for_rollout", StatementFate::Committed),
        ("node", "report", StatementFate::RolledBack),
        ("node", "report", StatementFate::Committed),
        ("rollout", "node_ended", StatementFate::RolledBack),
        ("rollout", "node_ended", StatementFate::Committed),
    ];
    let fleet = UpdatableFleet::start(&mut cluster, SKU, 3, ALL).await;
    for (n, (kind, command, fate)) in commits.into_iter().enumerate() {
        let lock = cluster.lock_commits_of(kind, command).await;
        let version = char::from_digit(u32::try_from(n).unwrap() + 1, 16).unwrap();
        let body = json!({ "digest": digest(version), "canary": 1, "max_unavailable": 2, "soak_seconds": 0, "reason": "a release" });
        let path = format!("{PATH}/{}", id_of(&cluster.admin.post(PATH, &body).await.created()));
        cluster.kill_while_writing(lock, fate).await;
        cluster.restart_replica(0).await;
        let ended = expect_state(&cluster, &path, "completed").await;
        assert_eq!((&ended["updated"], &ended["failed"]), (&json!(3), &json!(0)), "{kind} {command} {fate:?}: {ended}");
        let mut orders = orders(&cluster).await.split_off(3 * n);
        orders.sort();
        let mut nodes: Vec<_> = fleet.nodes.iter().map(|node| node.id).collect();
        nodes.sort();
        assert_eq!(orders, nodes, "{kind} {command} {fate:?}");
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_begins_in_a_soak_which_survives_the_death_of_its_owner() {
    const SOAK: Duration = Duration::from_secs(15);
    let mut cluster = TestCluster::start().await;
    let fleet = UpdatableFleet::start(&mut cluster, SKU, 3, ALL).await;
    let body = json!({
        "digest": digest('a'), "canary": 1, "max_unavailable": 2, "soak_seconds": SOAK.as_secs(), "reason": "a release",
    });
    let path = format!("{PATH}/{}", id_of(&cluster.admin.post(PATH, &body).await.created()));
    let soaks = |rollout: &Value| !rollout["soaks_until"].is_null();
    let soaking = cluster.admin.wait_until(&path, "its canary is watched", soaks).await;
    let until: chrono::DateTime<chrono::Utc> = soaking["soaks_until"].as_str().unwrap().parse().unwrap();
    cluster.kill9_replica(0);
    cluster.restart_replica(0).await;
    let shown = cluster.admin.get(&path).await.ok();
    // A replica that took longer than the soak to start shows what comes after it.
    if chrono::Utc::now() < until {
        assert_eq!((&shown["soaks_until"], &shown["stage"]), (&soaking["soaks_until"], &json!("canary")), "{shown}");
    }
    fleet.shared.expect_begun(2).await;
    assert!(chrono::Utc::now() >= until, "an update began in the soak");
    let ended = expect_state(&cluster, &path, "completed").await;
    assert_eq!((&ended["updated"], &ended["failed"]), (&json!(3), &json!(0)), "{ended}");
    cluster.shutdown().await;
}
