//! The runtime API: an operator at any replica inspects and controls every replica.

use reqwest::Method;
use serde_json::{Value, json};
use tests::cluster::TestCluster;
use tests::cluster::client::Client;
use uuid::Uuid;

const TREE: &str = "/api/v1/admin/runtime/tree?shards=true";

#[tokio::test(flavor = "multi_thread")]
async fn overview_counts_entities_by_state_free_gpus_and_money() {
    const OVERVIEW: &str = "/api/v1/admin/overview";
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    let accounts = cluster.admin.get("/api/v1/admin/billing/accounts").await.ok();
    let accounts = accounts["items"].as_array().unwrap();
    let sum: i64 = accounts.iter().map(|account| account["balance_minor"].as_i64().unwrap()).sum();
    let (currency, count) = (&accounts[0]["currency"], accounts.len());
    let money = json!([{ "currency": currency, "accounts": count, "depleted": 0, "balance_minor": sum }]);
    assert!(sum > 0, "{accounts:?}");
    for replica in [0, 1] {
        let seen = cluster.at_replica(replica, "admin").get(OVERVIEW).await.ok();
        assert_eq!((&seen["money"], &seen["gpus"]), (&money, &json!([])), "at replica {replica}");
    }

    cluster.node("h100").await;
    let is_free = |it: &Value| it["gpus"][0]["gpus_free"] == 8 && it["gpus"][0]["gpus_held"] == 0;
    cluster.admin.wait_until(OVERVIEW, "all GPUs are free", is_free).await;
    let rented = cluster.rent_active("h100", 1).await;
    for replica in [0, 1] {
        let admin = cluster.at_replica(replica, "admin");
        let seen = admin
            .wait_until(OVERVIEW, "the rental is counted", |it| {
                it["entities_by_kind"]["allocation"] == json!({ "active": 1 }) && it["gpus"][0]["gpus_held"] == 1
            })
            .await;
        assert_eq!(seen["entities_by_kind"]["node"], json!({ "active": 1 }), "{seen}");
        let of_nodes = &seen["gpus"][0];
        assert_eq!((&of_nodes["nodes"], &of_nodes["sku"]), (&json!(1), &json!("h100")), "{seen}");
        // A node without isolation of devices has one tenant at a time.
        assert_eq!((&of_nodes["gpus_total"], &of_nodes["gpus_free"]), (&json!(8), &json!(0)), "{seen}");
    }
    rented.release_fully().await;
    let released = |it: &Value| it["entities_by_kind"]["allocation"] == json!({ "released": 1 });
    cluster.admin.wait_until(OVERVIEW, "the release is counted", released).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn any_replica_shows_shards_and_queues_of_every_member_and_restarts_their_workers() {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    let node = cluster.node("h100").await;
    let (here, there) = (cluster.at_replica(0, "admin"), cluster.replicas[1].name().to_owned());
    let tree = here
        .wait_until(TREE, "two members have all shards and have looked at their consumers", |tree| {
            let members = tree["members"].as_array().unwrap();
            let lag = |member: &Value| {
                let is_known = |it: &&str| find_row(member, it).is_some_and(|row| row["queue"]["waiting"].is_u64());
                ["node-events", "provisioning-events"].iter().all(is_known)
            };
            // A shard that is on its way is not open, and is counted at either end.
            let is_settled = |member: &Value| {
                member["shards"].as_u64() == member["owned_shards"].as_array().map(|it| it.len() as u64)
            };
            members.len() == 2
                && shards(tree).len() == 256
                && shards(tree).iter().all(|shard| shard["state"] == "open")
                && members.iter().all(|member| lag(member) && is_settled(member))
        })
        .await;
    let shards: Vec<_> = shards(&tree);
    assert!(shards.iter().all(|shard| shard["state"] == "open" && shard["epoch"].as_i64() > Some(0)), "{shards:?}");
    for member in tree["members"].as_array().unwrap() {
        assert_eq!(member["shards"], member["owned_shards"].as_array().unwrap().len());
        for (worker, bound) in [("outbox-relay", true), ("committer-1", true), ("provisioning-events", false)] {
            let queue = &row(member, worker)["queue"];
            assert!(queue["waiting"].is_u64() && queue["bound"].is_u64() == bound, "{worker}: {queue}");
        }
        assert!(row(member, "timers")["restartable"] == true && row(member, "edge")["restartable"] == true, "{member}");
    }

    // A worker that also carries the response, and one with several children.
    let other = member(&tree, &there);
    for worker in ["timers", "peer-rpc", "public-api", "provisioning", "committer-1"] {
        let before = restarts(&here, &there, below(worker)).await;
        let path = restart_of(&other, worker);
        let answer = here.send_once(Method::POST, &path, Some(&json!({ "reason": "it hangs" }))).await;
        assert_eq!(answer.ok()["restarted"], true, "{worker}");
        let what = format!("{worker} of {there} runs again");
        here.wait_until(TREE, &what, |tree| {
            let row = row_of(tree, &there, below(worker));
            row["restarts"].as_u64() > Some(before) && row["state"] == "running"
        })
        .await;
    }
    let audited = here.get("/api/v1/admin/audit-log?action=runtime.restart").await.ok();
    let workers: Vec<_> =
        audited["items"].as_array().unwrap().iter().map(|row| row["metadata"]["worker"].clone()).collect();
    assert_eq!(workers, ["committer-1", "provisioning", "public-api", "peer-rpc", "timers"]);
    assert!(audited["items"][0]["actor"].as_str().unwrap().starts_with("user:"), "{audited}");

    here.send_once(Method::POST, &restart_of(&other, "nobody"), None).await.expect_error(404, "not_found");
    let nobody = json!({ "id": Uuid::from_u128(7) });
    here.send_once(Method::POST, &restart_of(&nobody, "timers"), None).await.expect_error(404, "not_found");

    // The restarted workers work.
    let allocation = cluster.rent_active("h100", 1).await;
    allocation.release_fully().await;
    node.expect_all_free().await;
    cluster.shutdown().await;
}

/// A worker whose restart count shows the restart.
fn below(worker: &str) -> &str {
    if worker == "provisioning" { "node-events" } else { worker }
}

fn restart_of(member: &Value, worker: &str) -> String {
    let id = member["id"].as_str().expect("a member has an id");
    format!("/api/v1/admin/runtime/members/{id}/workers/{worker}/restart")
}

fn shards(tree: &Value) -> Vec<Value> {
    let members = tree["members"].as_array().expect("a tree has members").iter();
    members.flat_map(|member| member["owned_shards"].as_array().cloned().unwrap_or_default()).collect()
}

fn member(tree: &Value, name: &str) -> Value {
    let found = tree["members"].as_array().expect("a tree has members").iter().find(|member| member["name"] == name);
    found.unwrap_or_else(|| panic!("{name} is not in {tree:#}")).clone()
}

fn row<'a>(member: &'a Value, worker: &str) -> &'a Value {
    find_row(member, worker).unwrap_or_else(|| panic!("{worker} is not in {member:#}"))
}

fn find_row<'a>(member: &'a Value, worker: &str) -> Option<&'a Value> {
    member["workers"].as_array().expect("a member has workers").iter().find(|row| row["name"] == worker)
}

/// `null` where the tree lacks the member, which may have answered late, or its worker.
fn row_of(tree: &Value, name: &str, worker: &str) -> Value {
    let found = tree["members"].as_array().and_then(|members| members.iter().find(|member| member["name"] == name));
    found.and_then(|member| find_row(member, worker)).cloned().unwrap_or_default()
}

async fn restarts(at: &Client, name: &str, worker: &str) -> u64 {
    let what = format!("{worker} of {name} is shown");
    let tree = at.wait_until(TREE, &what, |tree| row_of(tree, name, worker)["restarts"].is_u64()).await;
    row_of(&tree, name, worker)["restarts"].as_u64().expect("it is counted")
}
