//! What operators see of the running system, and users of each other.

use super::harness::ApiHarness;
use serde_json::{Value, json};
use uuid::Uuid;

/// The path that restarts a worker of the one member.
fn worker(name: &str) -> String {
    format!("/api/v1/admin/runtime/members/{}/workers/{name}/restart", Uuid::from_u128(1))
}

#[tokio::test]
async fn operators_see_where_an_entity_runs_and_its_history() {
    let api = ApiHarness::new().await;
    let sku = api.sku("h100x4", 4).await;
    let path = format!("/api/v1/admin/runtime/entities/sku/{sku}");
    let seen = api.get(&path).admin().send().await;
    let report = seen.is(200);
    assert_eq!((report["entity"]["state"].as_str(), report["entity"]["version"].as_i64()), (Some("active"), Some(3)));
    let commands: Vec<_> =
        report["history"].as_array().unwrap().iter().map(|row| row["command"].as_str().unwrap()).collect();
    assert_eq!(commands, ["activate", "activate", "create"]);
    assert_eq!(report["history"][0]["actor"], "user:owner");
    assert_eq!(report["history"][0]["correlation_id"], "test");
    let restarts = [
        api.post(&format!("{path}/restart")).admin().send().await,
        api.post(&format!("{path}/restart")).admin().json(&json!({"reason": "it hangs"})).send().await,
        api.post(&format!("{path}/restart")).admin().json(&json!({"why": "it hangs"})).send().await,
        api.post(&format!("{path}/restart")).user("ann").send().await,
        api.post(&worker("timers")).admin().json(&json!({"reason": "it hangs"})).send().await,
        api.post(&worker("committer-1")).admin().send().await,
        api.post(&worker("nobody")).admin().send().await,
        api.post(&worker("%00")).admin().send().await,
        api.post(&worker("timers")).user("ann").send().await,
        api.post("/api/v1/admin/runtime/members/here/workers/timers/restart").admin().send().await,
    ]
    .map(|answer| answer.line());
    insta::assert_snapshot!("restarts", restarts.join("\n"));
    let audited = api.get("/api/v1/admin/audit-log?action=runtime.restart").admin().send().await;
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
    api.get("/api/v1/admin/runtime/tree?kind=node&limit=5").admin().send().await.is(200);

    let lines = [
        api.get("/api/v1/admin/runtime/entities/sku/018f4e2a-7c1b-7000-8000-000000000001").admin().send().await,
        api.get(&format!("/api/v1/admin/runtime/entities/node/{sku}")).admin().send().await,
        api.get(&format!("/api/v1/admin/runtime/entities/robot/{sku}")).admin().send().await,
        api.get("/api/v1/admin/runtime/tree?kind=robot").admin().send().await,
        api.get("/api/v1/admin/runtime/tree?limit=0").admin().send().await,
        api.get("/api/v1/admin/runtime/tree?limit=-1").admin().send().await,
        api.get("/api/v1/admin/runtime/tree?state=%07").admin().send().await,
        api.get("/api/v1/admin/runtime/tree?colour=red").admin().send().await,
        // Characters are counted, not bytes.
        api.get(&format!("/api/v1/admin/runtime/tree?state={}", "%C3%A9".repeat(64))).admin().send().await,
        api.get(&format!("/api/v1/admin/runtime/tree?state={}", "e".repeat(65))).admin().send().await,
        api.get("/api/v1/admin/runtime/cluster").admin().send().await,
    ]
    .map(|answer| answer.line());
    insta::assert_snapshot!(lines.join("\n"));
}

#[tokio::test]
async fn allocations_of_other_users_are_not_found() {
    let (api, _) = ApiHarness::with_free_node().await;
    let wanted = json!({"sku": "h100x4", "gpu_count": 1});
    let made = api.post("/api/v1/allocations").user("ann").key("k").json(&wanted).send().await;
    let path = format!("/api/v1/allocations/{}", made.is(201)["id"].as_str().unwrap());
    // The same key of another user is another request.
    let other = api.post("/api/v1/allocations").user("bob").key("k").json(&wanted).send().await;
    assert_ne!(other.is(201)["id"], made.body["id"]);

    api.get(&path).user("ann").send().await.is(200);
    api.get(&path).admin().send().await.is(200);
    api.get(&path).user("bob").send().await.refused(404, "not_found");
    api.get(&format!("{path}/events")).user("bob").send().await.refused(404, "not_found");
    api.post(&format!("{path}/release")).user("bob").send().await.refused(404, "not_found");
    api.get("/api/v1/allocations?user_id=ann").user("bob").send().await.refused(403, "forbidden");

    let owners = async |path: &str, by: &str| {
        let token = api.token(by, &[if by == "root" { "admin" } else { "user" }]);
        let page = api.get(path).by(&token).send().await;
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
async fn caller_reads_their_identity_and_roles() {
    let api = ApiHarness::new().await;
    api.bind("ann", "auditor").await;
    let me = api.get("/api/v1/me").user("ann").send().await.is(200).clone();
    assert_eq!((&me["user_id"], &me["auth_kind"], &me["org_id"]), (&json!("ann"), &json!("user"), &json!("acme")));
    assert_eq!((&me["roles"], &me["platform_roles"]), (&json!(["user"]), &json!(["auditor"])));
    assert_eq!(me["service_account_id"], Value::Null);
    assert_eq!(api.get("/api/v1/me").admin().send().await.is(200)["user_id"], "root");
    api.get("/api/v1/me").send().await.refused(401, "unauthenticated");
}

#[tokio::test]
async fn capacity_counts_free_gpus_by_sku_and_region_without_nodes() {
    let api = ApiHarness::with_sku().await;
    let nodes = [api.active_node("h100x4", 4).await, api.active_node("h100x4", 4).await];
    api.node("h100x4", 4).await;
    let capacity = api.get("/api/v1/capacity").user("ann").send().await;
    let items = capacity.is(200)["items"].as_array().unwrap().clone();
    assert_eq!(items.len(), 1, "{items:?}");
    assert_eq!(
        (&items[0]["sku"], &items[0]["gpus_free"], &items[0]["largest_free"]),
        (&json!("h100x4"), &json!(8), &json!(4))
    );
    for node in nodes {
        assert!(!capacity.body.to_string().contains(&node.to_string()));
    }
    // A count is cached for five seconds for all callers.
    let repeated = api.get("/api/v1/capacity").user("bob").send().await;
    assert_eq!(repeated.is(200)["at"], capacity.body["at"]);
}
