//! What people see of the running system, and what of each other.

use super::world::{Placing, World};
use serde_json::{Value, json};
use uuid::Uuid;

/// To start a worker of the one member anew.
fn worker(name: &str) -> String {
    format!("/api/v1/admin/runtime/members/{}/workers/{name}/restart", Uuid::from_u128(1))
}

#[tokio::test]
async fn operators_see_where_an_entity_is_and_how_it_came_there() {
    let world = World::new().await;
    let sku = world.sku("h100x4", 4).await;
    let path = format!("/api/v1/admin/runtime/entities/sku/{sku}");
    let seen = world.get(&path).admin().send().await;
    let report = seen.is(200);
    assert_eq!((report["entity"]["state"].as_str(), report["entity"]["version"].as_i64()), (Some("active"), Some(3)));
    let commands: Vec<_> =
        report["history"].as_array().unwrap().iter().map(|row| row["command"].as_str().unwrap()).collect();
    assert_eq!(commands, ["activate", "activate", "create"]);
    assert_eq!(report["history"][0]["actor"], "user:owner");
    assert_eq!(report["history"][0]["correlation_id"], "test");
    let restarts = [
        world.post(&format!("{path}/restart")).admin().send().await,
        world.post(&format!("{path}/restart")).admin().json(&json!({"reason": "it hangs"})).send().await,
        world.post(&format!("{path}/restart")).admin().json(&json!({"why": "it hangs"})).send().await,
        world.post(&format!("{path}/restart")).user("ann").send().await,
        world.post(&worker("timers")).admin().json(&json!({"reason": "it hangs"})).send().await,
        world.post(&worker("committer-1")).admin().send().await,
        world.post(&worker("nobody")).admin().send().await,
        world.post(&worker("%00")).admin().send().await,
        world.post(&worker("timers")).user("ann").send().await,
        world.post("/api/v1/admin/runtime/members/here/workers/timers/restart").admin().send().await,
    ]
    .map(|answer| answer.line());
    insta::assert_snapshot!("restarts", restarts.join("\n"));
    let audited = world.get("/api/v1/admin/audit-log?action=runtime.restart").admin().send().await;
    let rows = audited.is(200)["items"].as_array().unwrap().clone();
    let about: Vec<_> = rows.iter().map(|row| (row["target"]["kind"].clone(), row["metadata"].clone())).collect();
    let why = |worker: Value| {
        let mut metadata = json!({"reason": "it hangs"});
        if !worker.is_null() {
            metadata["worker"] = worker;
            metadata["member"] = json!(Uuid::from_u128(1));
        }
        metadata
    };
    let expected = [
        (json!("runtime"), why(json!("timers"))),
        (json!("sku"), why(Value::Null)),
        (json!("sku"), json!({"reason": null})),
    ];
    assert_eq!(about, expected, "what was refused or could not be done is not written down as done");
    world.get("/api/v1/admin/runtime/tree?kind=node&limit=5").admin().send().await.is(200);

    let lines = [
        world.get("/api/v1/admin/runtime/entities/sku/018f4e2a-7c1b-7000-8000-000000000001").admin().send().await,
        world.get(&format!("/api/v1/admin/runtime/entities/node/{sku}")).admin().send().await,
        world.get(&format!("/api/v1/admin/runtime/entities/robot/{sku}")).admin().send().await,
        world.get("/api/v1/admin/runtime/tree?kind=robot").admin().send().await,
        world.get("/api/v1/admin/runtime/tree?limit=0").admin().send().await,
        world.get("/api/v1/admin/runtime/tree?limit=-1").admin().send().await,
        world.get("/api/v1/admin/runtime/tree?state=%07").admin().send().await,
        world.get("/api/v1/admin/runtime/tree?colour=red").admin().send().await,
        world.get("/api/v1/admin/runtime/cluster").admin().send().await,
    ]
    .map(|answer| answer.line());
    insta::assert_snapshot!(lines.join("\n"));
}

#[tokio::test]
async fn other_peoples_allocations_do_not_exist_for_a_user() {
    let world = World::new().await;
    world.sku("h100x4", 4).await;
    let node = world.active_node("h100x4", 4).await;
    world.places(Placing::On(node));
    let wanted = json!({"sku": "h100x4", "gpu_count": 1});
    let made = world.post("/api/v1/allocations").user("ann").key("k").json(&wanted).send().await;
    let path = format!("/api/v1/allocations/{}", made.is(201)["id"].as_str().unwrap());
    // The same key of another user is another request.
    let other = world.post("/api/v1/allocations").user("bob").key("k").json(&wanted).send().await;
    assert_ne!(other.is(201)["id"], made.body["id"]);

    world.get(&path).user("ann").send().await.is(200);
    world.get(&path).admin().send().await.is(200);
    world.get(&path).user("bob").send().await.refused(404, "not_found");
    world.get(&format!("{path}/events")).user("bob").send().await.refused(404, "not_found");
    world.post(&format!("{path}/release")).user("bob").send().await.refused(404, "not_found");
    world.get("/api/v1/allocations?user_id=ann").user("bob").send().await.refused(403, "forbidden");

    let owners = async |path: &str, by: &str| {
        let token = world.token(by, &[if by == "root" { "admin" } else { "user" }]);
        let page = world.get(path).by(&token).send().await;
        let items = page.is(200)["items"].as_array().unwrap().clone();
        items.iter().map(|item| item["user_id"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(owners("/api/v1/allocations", "bob").await, ["bob"]);
    assert_eq!(owners("/api/v1/allocations?user_id=bob", "bob").await, ["bob"]);
    assert_eq!(owners("/api/v1/allocations", "root").await, ["ann", "bob"]);
    assert_eq!(owners("/api/v1/allocations?user_id=ann", "root").await, ["ann"]);
    assert_eq!(owners("/api/v1/allocations?state=provisioning&sku=h100x4", "root").await, ["ann", "bob"]);
    assert_eq!(owners("/api/v1/allocations?state=active", "root").await, [""; 0]);
}

#[tokio::test]
async fn a_caller_reads_who_they_are_to_the_service() {
    let world = World::new().await;
    world.bind("ann", "auditor").await;
    let me = world.get("/api/v1/me").user("ann").send().await.is(200).clone();
    assert_eq!((&me["user_id"], &me["auth_kind"], &me["org_id"]), (&json!("ann"), &json!("user"), &json!("acme")));
    assert_eq!((&me["roles"], &me["platform_roles"]), (&json!(["user"]), &json!(["auditor"])));
    assert_eq!(me["service_account_id"], Value::Null);
    assert_eq!(world.get("/api/v1/me").admin().send().await.is(200)["user_id"], "root");
    world.get("/api/v1/me").send().await.refused(401, "unauthenticated");
}

#[tokio::test]
async fn free_gpus_are_counted_by_sku_and_region_without_naming_nodes() {
    let world = World::new().await;
    world.sku("h100x4", 4).await;
    let nodes = [world.active_node("h100x4", 4).await, world.active_node("h100x4", 4).await];
    world.node("h100x4", 4).await;
    let capacity = world.get("/api/v1/capacity").user("ann").send().await;
    let items = capacity.is(200)["items"].as_array().unwrap().clone();
    assert_eq!(items.len(), 1, "{items:?}");
    assert_eq!(
        (&items[0]["sku"], &items[0]["gpus_free"], &items[0]["largest_free"]),
        (&json!("h100x4"), &json!(8), &json!(4))
    );
    for node in nodes {
        assert!(!capacity.body.to_string().contains(&node.to_string()));
    }
    // Within five seconds there is one count, whoever asks.
    let again = world.get("/api/v1/capacity").user("bob").send().await;
    assert_eq!(again.is(200)["at"], capacity.body["at"]);
}
