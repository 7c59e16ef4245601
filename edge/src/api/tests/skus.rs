//! The SKU catalog.

use super::harness::{ApiHarness, PlacementOutcome, TestResponse, node_body, sku_body};
use actors::AskError;
use actors::sharding::id_of_name;
use axum::http::Method;
use domain::node::{self, Node};
use domain::role_bindings::RoleBindings;
use domain::sku::{ApprovalContext, ApprovalRequest, Command, Sku, SkuUsage, StatusChange};
use domain::{AllocationId, EntityKind, EntityRef, Principal, SkuId};
use persistence::queries::AuditFilter;
use serde_json::json;
use uuid::Uuid;

#[tokio::test]
async fn sku_is_drafted_activated_repriced_and_deactivated() {
    let api = ApiHarness::new().await;
    let created = api.post("/api/v1/admin/skus").admin().json(&sku_body("h100x4", 4)).send().await;
    let sku = created.is(201).clone();
    let offered = async || api.get("/api/v1/skus").user("ann").send().await.is(200)["items"].as_array().unwrap().len();
    assert_eq!((sku["status"].as_str(), offered().await), (Some("draft"), 0));
    let path = format!("/api/v1/admin/skus/{}", sku["id"].as_str().unwrap());
    let decision = json!({"reason": "tested", "impact_review": "none\nat all", "rollback_plan": "x"});
    let active = api.decide(&format!("{path}/activate"), &decision).await;
    assert_eq!((active.is(200)["status"].as_str(), offered().await), (Some("active"), 1));
    let by: Vec<_> =
        active.body["approvals"].as_array().unwrap().iter().map(|it| (&it["role"], &it["actor"])).collect();
    assert_eq!(
        by,
        [(&json!("platform_operations"), &json!("user:root")), (&json!("inventory_owner"), &json!("user:owner")),]
    );
    let dearer = json!({"price": {"currency": "EUR", "amount_minor_per_gpu_hour": 300}, "allowed_regions": ["eu-2"]});
    let revised = api.call(Method::PATCH, &path).admin().json(&dearer).send().await;
    assert_eq!(revised.is(200)["price"]["amount_minor_per_gpu_hour"], 300);
    assert_eq!(api.get(&path).admin().send().await.is(200), &revised.body);
    api.decide(&format!("{path}/deactivate"), &json!({"reason": "old"})).await.is(200);
    assert_eq!(offered().await, 0);
    let inactive = api.get("/api/v1/admin/skus?status=inactive").admin().send().await;
    assert_eq!(inactive.is(200)["items"][0]["id"], sku["id"]);
    let mut shown = inactive.body["items"][0].clone();
    for field in ["id", "created_at"] {
        shown[field] = "<varies>".into();
    }
    shown["approvals"].as_array_mut().unwrap().iter_mut().for_each(|approval| approval["at"] = "<varies>".into());
    insta::assert_json_snapshot!("sku", shown);
}

#[tokio::test]
async fn change_of_a_sku_that_another_administrator_has_changed_is_refused() {
    let api = ApiHarness::new().await;
    let created = api.post("/api/v1/admin/skus").admin().json(&sku_body("h100x4", 4)).send().await;
    let path = format!("/api/v1/admin/skus/{}", created.is(201)["id"].as_str().unwrap());
    let read = api.get(&path).admin().send().await;
    let etag = read.headers["etag"].to_str().unwrap().to_owned();
    assert_eq!(
        (etag, &created.headers["etag"]),
        (format!("\"{}\"", read.is(200)["generation"]), &read.headers["etag"])
    );
    let listed = api.get("/api/v1/admin/skus").admin().send().await.is(200)["items"][0].clone();
    assert_eq!(&listed, read.is(200), "the list has the generation, too");

    let price = |amount: i64| json!({"price": {"currency": "EUR", "amount_minor_per_gpu_hour": amount}});
    let change = async |etag: &str, amount| {
        api.call(Method::PATCH, &path).admin().header("if-match", etag).json(&price(amount)).send().await
    };
    let etag = read.headers["etag"].to_str().unwrap();
    let first = change(etag, 300).await;
    assert_eq!(first.is(200)["price"]["amount_minor_per_gpu_hour"], 300);
    let stale = change(etag, 400).await;
    let details = stale.refused(409, "state_conflict");
    assert_eq!((&details["field"], &details["current_generation"]), (&json!("If-Match"), &first.body["generation"]));
    assert_eq!(api.get(&path).admin().send().await.is(200), &first.body, "nothing changed");

    let current = first.headers["etag"].to_str().unwrap();
    assert_eq!(change(current, 400).await.is(200)["price"]["amount_minor_per_gpu_hour"], 400);
    assert_eq!(change("*", 500).await.is(200)["price"]["amount_minor_per_gpu_hour"], 500);
    for bad in ["7", "\"x\"", "\"1\", \"2\"", "W/\"1\""] {
        assert_eq!(change(bad, 600).await.refused(400, "invalid_request")["field"], "If-Match", "{bad}");
    }
}

#[tokio::test]
async fn invalid_sku_is_refused() {
    let api = ApiHarness::new().await;
    api.post("/api/v1/admin/skus").admin().json(&sku_body("taken", 4)).send().await.is(201);
    let draft =
        api.get("/api/v1/admin/skus").admin().send().await.is(200)["items"][0]["id"].as_str().unwrap().to_owned();
    let mut lines = Vec::new();
    let with = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut body = sku_body("new", 4);
        change(&mut body);
        body
    };
    for body in [
        sku_body("taken", 4),
        sku_body("018f4e2a-7c1b-7000-8000-000000000001", 4),
        sku_body("with space", 4),
        sku_body(&"x".repeat(65), 4),
        sku_body("new", 0),
        sku_body("new", 65),
        with(&|body| body["gpu"]["memory_mib"] = json!(-1)),
        with(&|body| body["gpu"]["memory_mib"] = json!(u64::MAX)),
        with(&|body| body["price"]["currency"] = json!("euro")),
        with(&|body| body["price"]["amount_minor_per_gpu_hour"] = json!(-1)),
        with(&|body| body["price"]["amount_minor_per_gpu_hour"] = json!(2.5)),
        with(&|body| body["allowed_regions"] = json!((0..65).map(|n| format!("r{n}")).collect::<Vec<_>>())),
        with(&|body| body["gpu"]["colour"] = json!("green")),
        with(&|body| body["status"] = json!("active")),
        with(&|body| body["interconnect"] = json!("a\u{0}b")),
    ] {
        lines.push(api.post("/api/v1/admin/skus").admin().json(&body).send().await.line());
    }
    let path = format!("/api/v1/admin/skus/{draft}");
    api.bind("root", "platform_operations").await.is(201);
    lines.push(api.call(Method::PATCH, &path).admin().json(&json!({})).send().await.line());
    lines.push(api.post(&format!("{path}/deactivate")).admin().json(&json!({"reason": "x"})).send().await.line());
    lines.push(api.post(&format!("{path}/activate")).admin().json(&json!({})).send().await.line());
    lines.push(
        api.post(&format!("{path}/activate")).admin().json(&json!({"reason": "x", "role": "king"})).send().await.line(),
    );
    let nowhere = "/api/v1/admin/skus/018f4e2a-7c1b-7000-8000-000000000001";
    lines.push(api.get(nowhere).admin().send().await.line());
    lines.push(api.post(&format!("{nowhere}/activate")).admin().json(&json!({"reason": "x"})).send().await.line());
    lines.push(api.get("/api/v1/admin/skus?status=gone").admin().send().await.line());
    lines.push(api.get("/api/v1/skus?status=active").user("ann").send().await.line());
    insta::assert_snapshot!(lines.join("\n"));
}

/// A draft SKU without approvals; `ann` has `platform_operations`, `bob` `inventory_owner` and `eve` both.
async fn draft(api: &ApiHarness) -> String {
    for (subject, role) in [
        ("ann", "platform_operations"),
        ("bob", "inventory_owner"),
        ("eve", "platform_operations"),
        ("eve", "inventory_owner"),
    ] {
        api.bind(subject, role).await;
    }
    let created = api.post("/api/v1/admin/skus").admin().json(&sku_body("h100x4", 4)).send().await;
    format!("/api/v1/admin/skus/{}", created.is(201)["id"].as_str().unwrap())
}

async fn approve(api: &ApiHarness, path: &str, by: &str) -> TestResponse {
    api.post(path).user(by).json(&json!({"reason": "tested"})).send().await
}

#[tokio::test]
async fn status_change_requires_two_people() {
    let api = ApiHarness::new().await;
    let path = draft(&api).await;
    let activate = format!("{path}/activate");
    let first = approve(&api, &activate, "eve").await;
    assert_eq!(
        (first.is(202)["status"].as_str(), &first.body["approvals"][0]["change"]),
        (Some("draft"), &json!("activate"))
    );
    assert!(first.body["approvals"][0]["expires_at"].is_string());
    // The same person again, in any role.
    let is_refused = |repeated: TestResponse| {
        assert_eq!(repeated.refused(409, "state_conflict")["role"], "inventory_owner", "{}", repeated.body);
        assert!(repeated.body["message"].as_str().unwrap().contains("a second person, in role `inventory_owner`"));
    };
    for role in ["platform_operations", "inventory_owner"] {
        is_refused(api.post(&activate).user("eve").json(&json!({"reason": "again", "role": role})).send().await);
    }
    // Another person in the same role.
    is_refused(approve(&api, &activate, "ann").await);
    assert_eq!(api.get(&path).user("bob").send().await.is(200), &first.body, "the approver sees the pending change");
    // A person without the other role, and an administrator without a role.
    let taken = api.post(&activate).user("ann").json(&json!({"reason": "x", "role": "inventory_owner"})).send().await;
    assert_eq!(taken.refused(403, "forbidden")["field"], "role");
    api.post(&activate).admin().json(&json!({"reason": "x"})).send().await.refused(403, "forbidden");
    assert_eq!(approve(&api, &activate, "bob").await.is(200)["status"], "active");
    assert_eq!(approve(&api, &activate, "bob").await.is(200)["approvals"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn concurrent_approvals_change_the_status_once() {
    let api = ApiHarness::new().await;
    let path = draft(&api).await;
    let activate = format!("{path}/activate");
    let people = ["ann", "bob", "eve", "ann", "bob", "eve", "ann", "bob", "eve", "bob"];
    let answers = futures::future::join_all(people.map(|by| approve(&api, &activate, by))).await;
    for answer in &answers {
        // At worst an approval exceeded its retries, and is refused for the moment.
        assert!(matches!(answer.status, 200 | 202 | 409 | 503), "{}", answer.body);
    }
    let id = path.rsplit('/').next().unwrap().parse().unwrap();
    let activated = async || {
        let filter = AuditFilter { action: Some("skus.activate".into()), target: Some(id), ..AuditFilter::default() };
        api.app.reads.audit(&filter, None, 10).await.unwrap().items
    };
    approve(&api, &activate, "ann").await;
    approve(&api, &activate, "bob").await.is(200);
    let rows = activated().await;
    assert_eq!(rows.len(), 1, "activated exactly once");
    let by = rows[0].metadata["approved_by"].as_array().unwrap().clone();
    assert_ne!(by[0]["user_id"], by[1]["user_id"]);
    assert_ne!(by[0]["role"], by[1]["role"]);
}

#[tokio::test]
async fn approval_is_withdrawn_by_the_opposite_change_and_void_after_role_revocation() {
    let api = ApiHarness::new().await;
    let path = draft(&api).await;
    let (activate, deactivate) = (format!("{path}/activate"), format!("{path}/deactivate"));
    approve(&api, &deactivate, "ann").await.refused(409, "state_conflict");
    approve(&api, &activate, "ann").await.is(202);
    assert_eq!(approve(&api, &deactivate, "bob").await.is(200)["approvals"], json!([]), "a draft that is not needed");
    approve(&api, &activate, "ann").await.is(202);
    let revoke = "/api/v1/admin/platform-roles/bindings?subject=ann&role=platform_operations";
    api.call(Method::DELETE, revoke).admin().send().await.is(204);
    let alone = approve(&api, &activate, "bob").await;
    assert_eq!(alone.is(202)["approvals"].as_array().unwrap().len(), 1);
    assert_eq!(alone.body["approvals"][0]["actor"], "user:bob");
    approve(&api, &activate, "ann").await.refused(403, "forbidden");
    assert_eq!(approve(&api, &activate, "eve").await.is(200)["status"], "active");
    approve(&api, &deactivate, "eve").await.is(202);
    let unchanged = approve(&api, &activate, "bob").await;
    assert_eq!(
        (&unchanged.is(200)["status"], unchanged.body["approvals"].as_array().unwrap().len()),
        (&json!("active"), 2)
    );
}

/// I6: a command that was prepared before the revocation and arrives after it commits nothing.
#[tokio::test]
async fn command_in_a_role_is_not_committed_after_its_revocation() {
    let api = ApiHarness::new().await;
    let path = draft(&api).await;
    let id: Uuid = path.rsplit('/').next().unwrap().parse().unwrap();
    let bindings = id_of_name(EntityKind::Bindings, "ann");
    let row = api.app.reads.entity(EntityRef { kind: EntityKind::Bindings, id: bindings }).await.unwrap().unwrap();
    let grant = serde_json::from_str::<RoleBindings>(&row.body).unwrap().grant(bindings, row.version);
    let ann = Principal::Caller(domain::authz::CallerIdentity {
        grant: Some(grant),
        ..domain::authz::CallerIdentity::new("ann", [domain::authz::TokenRole::User])
    });
    let late = |version| {
        let seen = ApprovalContext { version, in_use: SkuUsage::default(), first: None };
        let (change, reason) = (StatusChange::Activate, "late".to_owned());
        Command::Approve(Box::new(ApprovalRequest {
            change,
            reason,
            role: None,
            impact_review: None,
            rollback_plan: None,
            seen,
        }))
    };
    let revoke = "/api/v1/admin/platform-roles/bindings?subject=ann&role=platform_operations";
    api.call(Method::DELETE, revoke).admin().send().await.is(204);
    let answer = api.ask::<Sku>(&ann, id, late(1)).await;
    assert!(matches!(answer, Err(AskError::Unavailable { .. })), "{answer:?}");
    assert_eq!(api.get(&path).admin().send().await.is(200)["approvals"], json!([]));
    // A new binding has a new version.
    api.bind("ann", "platform_operations").await.is(201);
    assert!(api.ask::<Sku>(&ann, id, late(1)).await.is_err());
    approve(&api, &format!("{path}/activate"), "ann").await.is(202);
}

#[tokio::test]
async fn sku_in_use_is_deactivated_with_impact_review_and_rollback_plan() {
    let api = ApiHarness::new().await;
    let sku = api.sku("h100x4", 4).await;
    let path = format!("/api/v1/admin/skus/{sku}");
    let deactivate = format!("{path}/deactivate");
    let id = sku.parse().unwrap();
    let in_use = async || {
        let found = api.app.reads.sku_references(SkuId(id)).await.unwrap();
        (found.nodes, found.allocations)
    };
    assert_eq!(in_use().await, (0, 0));
    let wanted = json!({"sku": "h100x4", "gpu_count": 1, "queue_seconds": 600});
    let queued = api.post("/api/v1/allocations").user("ann").key("q").json(&wanted).send().await;
    let queued = format!("/api/v1/allocations/{}", queued.is(201)["id"].as_str().unwrap());
    assert_eq!(in_use().await, (0, 1), "one that waits for a node");
    let mut given = json!({"reason": "old"});
    let refused = async |given: &serde_json::Value| {
        let answer = api.post(&deactivate).user("owner").json(given).send().await;
        answer.refused(400, "invalid_request")["field"].as_str().unwrap().to_owned()
    };
    assert_eq!(refused(&given).await, "impact_review");
    given["impact_review"] = json!("ann waits for one");
    assert_eq!(refused(&given).await, "rollback_plan");
    api.post(&format!("{queued}/release")).user("ann").send().await.is(202);
    assert_eq!(in_use().await, (0, 0));
    let node = api.active_node("h100x4", 4).await;
    assert_eq!(in_use().await, (1, 0));
    let reserve = node::Instruction::Reserve {
        allocation_id: AllocationId(Uuid::from_u128(5)),
        gpu_count: 2,
        keys: Vec::new(),
        revision: 0,
        reimages: false,
    };
    api.ask_as_system::<Node>(node.0, reserve).await;
    assert_eq!(in_use().await, (1, 1));
    assert_eq!(refused(&given).await, "rollback_plan");

    // A deprecated SKU takes no new node, and can be rented on existing ones.
    assert_eq!(
        api.decide(&format!("{path}/deprecate"), &json!({"reason": "old"})).await.is(200)["status"],
        "deprecated"
    );
    api.post("/api/v1/admin/nodes").admin().json(&node_body("h100x4", 4)).send().await.refused(400, "invalid_request");
    assert_eq!(api.get("/api/v1/skus").user("ann").send().await.is(200)["items"], json!([]));
    api.set_placement(PlacementOutcome::On(node));
    let wanted = json!({"sku": "h100x4", "gpu_count": 1});
    api.post("/api/v1/allocations").user("ann").key("d").json(&wanted).send().await.is(201);

    given["rollback_plan"] = json!("activate it again");
    let both = api.decide(&deactivate, &given).await;
    assert_eq!(both.is(200)["status"], "inactive");
    assert_eq!(both.body["approvals"][0]["impact_review"], "ann waits for one");
    api.post("/api/v1/allocations").user("ann").key("i").json(&wanted).send().await.refused(400, "invalid_request");
    let filter = AuditFilter { action: Some("skus.approve".into()), target: Some(id), ..AuditFilter::default() };
    let audited = api.app.reads.audit(&filter, None, 1).await.unwrap();
    let output = &audited.items[0].metadata["approval"];
    assert_eq!((&output["rollback_plan"], &output["in_use"]["nodes"]), (&json!("activate it again"), &json!(1)));
}

#[tokio::test]
async fn users_see_the_catalog_without_approvals() {
    let api = ApiHarness::with_sku().await;
    let offered = api.get("/api/v1/skus").user("ann").send().await.is(200)["items"][0].clone();
    assert_eq!((&offered["name"], &offered["status"]), (&json!("h100x4"), &json!("active")));
    assert!(offered.get("approvals").is_none(), "{offered}");
    let all = api.get("/api/v1/admin/skus").admin().send().await;
    assert_eq!(all.is(200)["items"][0]["approvals"].as_array().unwrap().len(), 2);
}
