//! The catalog.

use super::world::{Answer, Placing, World, node_body, sku_body};
use actors::AskError;
use actors::place::id_of_name;
use axum::http::Method;
use domain::bindings::Bindings;
use domain::node::{self, Node};
use domain::sku::{Approve, Change, Command, InUse, Seen, Sku};
use domain::{AllocationId, EntityRef, Kind, Principal, SkuId};
use persistence::read::AuditFilter;
use serde_json::json;
use uuid::Uuid;

#[tokio::test]
async fn a_sku_is_drafted_activated_repriced_and_taken_out_of_the_offer() {
    let world = World::new().await;
    let created = world.post("/api/v1/admin/skus").admin().json(&sku_body("h100x4", 4)).send().await;
    let sku = created.is(201).clone();
    let offered =
        async || world.get("/api/v1/skus").user("ann").send().await.is(200)["items"].as_array().unwrap().len();
    assert_eq!((sku["status"].as_str(), offered().await), (Some("draft"), 0));
    let path = format!("/api/v1/admin/skus/{}", sku["id"].as_str().unwrap());
    let decision = json!({"reason": "tested", "impact_review": "none\nat all", "rollback_plan": "x"});
    let active = world.decide(&format!("{path}/activate"), &decision).await;
    assert_eq!((active.is(200)["status"].as_str(), offered().await), (Some("active"), 1));
    let by: Vec<_> =
        active.body["approvals"].as_array().unwrap().iter().map(|it| (&it["role"], &it["actor"])).collect();
    assert_eq!(
        by,
        [(&json!("platform_operations"), &json!("user:root")), (&json!("inventory_owner"), &json!("user:owner")),]
    );
    let dearer = json!({"price": {"currency": "EUR", "amount_minor_per_gpu_hour": 300}, "allowed_regions": ["eu-2"]});
    let revised = world.call(Method::PATCH, &path).admin().json(&dearer).send().await;
    assert_eq!(revised.is(200)["price"]["amount_minor_per_gpu_hour"], 300);
    assert_eq!(world.get(&path).admin().send().await.is(200), &revised.body);
    world.decide(&format!("{path}/deactivate"), &json!({"reason": "old"})).await.is(200);
    assert_eq!(offered().await, 0);
    let inactive = world.get("/api/v1/admin/skus?status=inactive").admin().send().await;
    assert_eq!(inactive.is(200)["items"][0]["id"], sku["id"]);
    let mut shown = inactive.body["items"][0].clone();
    for field in ["id", "created_at"] {
        shown[field] = "<varies>".into();
    }
    shown["approvals"].as_array_mut().unwrap().iter_mut().for_each(|approval| approval["at"] = "<varies>".into());
    insta::assert_json_snapshot!("sku", shown);
}

#[tokio::test]
async fn what_is_no_sku_is_refused() {
    let world = World::new().await;
    world.post("/api/v1/admin/skus").admin().json(&sku_body("taken", 4)).send().await.is(201);
    let draft =
        world.get("/api/v1/admin/skus").admin().send().await.is(200)["items"][0]["id"].as_str().unwrap().to_owned();
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
        lines.push(world.post("/api/v1/admin/skus").admin().json(&body).send().await.line());
    }
    let path = format!("/api/v1/admin/skus/{draft}");
    world.bind("root", "platform_operations").await.is(201);
    lines.push(world.call(Method::PATCH, &path).admin().json(&json!({})).send().await.line());
    lines.push(world.post(&format!("{path}/deactivate")).admin().json(&json!({"reason": "x"})).send().await.line());
    lines.push(world.post(&format!("{path}/activate")).admin().json(&json!({})).send().await.line());
    lines.push(
        world
            .post(&format!("{path}/activate"))
            .admin()
            .json(&json!({"reason": "x", "role": "king"}))
            .send()
            .await
            .line(),
    );
    let nowhere = "/api/v1/admin/skus/018f4e2a-7c1b-7000-8000-000000000001";
    lines.push(world.get(nowhere).admin().send().await.line());
    lines.push(world.post(&format!("{nowhere}/activate")).admin().json(&json!({"reason": "x"})).send().await.line());
    lines.push(world.get("/api/v1/admin/skus?status=gone").admin().send().await.line());
    lines.push(world.get("/api/v1/skus?status=active").user("ann").send().await.line());
    insta::assert_snapshot!(lines.join("\n"));
}

/// A SKU of nobody yet, as `ann` (`platform_operations`), `bob` (`inventory_owner`) and `eve` (both) find it.
async fn draft(world: &World) -> String {
    for (subject, role) in [
        ("ann", "platform_operations"),
        ("bob", "inventory_owner"),
        ("eve", "platform_operations"),
        ("eve", "inventory_owner"),
    ] {
        world.bind(subject, role).await;
    }
    let created = world.post("/api/v1/admin/skus").admin().json(&sku_body("h100x4", 4)).send().await;
    format!("/api/v1/admin/skus/{}", created.is(201)["id"].as_str().unwrap())
}

async fn say(world: &World, path: &str, by: &str) -> Answer {
    world.post(path).user(by).json(&json!({"reason": "tested"})).send().await
}

#[tokio::test]
async fn one_person_is_not_enough_to_change_a_status() {
    let world = World::new().await;
    let path = draft(&world).await;
    let activate = format!("{path}/activate");
    let first = say(&world, &activate, "eve").await;
    assert_eq!(
        (first.is(202)["status"].as_str(), &first.body["approvals"][0]["change"]),
        (Some("draft"), &json!("activate"))
    );
    assert!(first.body["approvals"][0]["expires_at"].is_string());
    // The same one again, in whatever role.
    for role in ["platform_operations", "inventory_owner"] {
        let again = world.post(&activate).user("eve").json(&json!({"reason": "again", "role": role})).send().await;
        assert_eq!(again.is(202), &first.body);
    }
    // Another one in the same role.
    assert_eq!(say(&world, &activate, "ann").await.is(202), &first.body);
    assert_eq!(world.get(&path).user("bob").send().await.is(200), &first.body, "who is to approve sees what");
    // One in the other role who is not allowed it, an administrator in none.
    let taken = world.post(&activate).user("ann").json(&json!({"reason": "x", "role": "inventory_owner"})).send().await;
    assert_eq!(taken.refused(403, "forbidden")["field"], "role");
    world.post(&activate).admin().json(&json!({"reason": "x"})).send().await.refused(403, "forbidden");
    assert_eq!(say(&world, &activate, "bob").await.is(200)["status"], "active");
    assert_eq!(say(&world, &activate, "bob").await.is(200)["approvals"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn of_many_approvals_at_once_one_pair_decides() {
    let world = World::new().await;
    let path = draft(&world).await;
    let activate = format!("{path}/activate");
    let people = ["ann", "bob", "eve", "ann", "bob", "eve", "ann", "bob", "eve", "bob"];
    let answers = futures::future::join_all(people.map(|by| say(&world, &activate, by))).await;
    for answer in &answers {
        // At the worst too many looked at once, and one was told to look again.
        assert!(matches!(answer.status, 200 | 202 | 409), "{}", answer.body);
    }
    let id = path.rsplit('/').next().unwrap().parse().unwrap();
    let activated = async || {
        let filter = AuditFilter { action: Some("skus.activate".into()), target: Some(id), ..AuditFilter::default() };
        world.services.reads.audit(&filter, None, 10).await.unwrap().items
    };
    say(&world, &activate, "ann").await;
    say(&world, &activate, "bob").await.is(200);
    let rows = activated().await;
    assert_eq!(rows.len(), 1, "activated exactly once");
    let by = rows[0].metadata["approved_by"].as_array().unwrap().clone();
    assert_ne!(by[0]["user_id"], by[1]["user_id"]);
    assert_ne!(by[0]["role"], by[1]["role"]);
}

#[tokio::test]
async fn an_approval_is_withdrawn_by_the_opposite_and_void_with_its_givers_role() {
    let world = World::new().await;
    let path = draft(&world).await;
    let (activate, deactivate) = (format!("{path}/activate"), format!("{path}/deactivate"));
    say(&world, &deactivate, "ann").await.refused(409, "state_conflict");
    say(&world, &activate, "ann").await.is(202);
    assert_eq!(
        say(&world, &deactivate, "bob").await.is(200)["approvals"],
        json!([]),
        "a draft again that nobody wants"
    );
    say(&world, &activate, "ann").await.is(202);
    let revoke = "/api/v1/admin/platform-roles/bindings?subject=ann&role=platform_operations";
    world.call(Method::DELETE, revoke).admin().send().await.is(204);
    let alone = say(&world, &activate, "bob").await;
    assert_eq!(alone.is(202)["approvals"].as_array().unwrap().len(), 1);
    assert_eq!(alone.body["approvals"][0]["actor"], "user:bob");
    say(&world, &activate, "ann").await.refused(403, "forbidden");
    assert_eq!(say(&world, &activate, "eve").await.is(200)["status"], "active");
    say(&world, &deactivate, "eve").await.is(202);
    let kept = say(&world, &activate, "bob").await;
    assert_eq!((&kept.is(200)["status"], kept.body["approvals"].as_array().unwrap().len()), (&json!("active"), 2));
}

/// I6: whoever looked before the revocation was answered and is late writes nothing.
#[tokio::test]
async fn what_was_asked_in_a_role_is_not_committed_after_its_revocation() {
    let world = World::new().await;
    let path = draft(&world).await;
    let id: Uuid = path.rsplit('/').next().unwrap().parse().unwrap();
    let bindings = id_of_name(Kind::Bindings, "ann");
    let row = world.services.reads.entity(EntityRef { kind: Kind::Bindings, id: bindings }).await.unwrap().unwrap();
    let grant = serde_json::from_str::<Bindings>(&row.body).unwrap().grant(bindings, row.version);
    let ann = Principal::Caller(domain::authz::Caller {
        user_id: "ann".into(),
        roles: [domain::authz::Role::User].into(),
        org_id: None,
        project_id: None,
        plan: None,
        grant: Some(grant),
        service_account: None,
    });
    let late = |version| {
        let seen = Seen { version, in_use: InUse::default(), first: None };
        let (change, reason) = (Change::Activate, "late".to_owned());
        Command::Approve(Box::new(Approve {
            change,
            reason,
            role: None,
            impact_review: None,
            rollback_plan: None,
            seen,
        }))
    };
    let revoke = "/api/v1/admin/platform-roles/bindings?subject=ann&role=platform_operations";
    world.call(Method::DELETE, revoke).admin().send().await.is(204);
    let answer = world.ask::<Sku>(&ann, id, late(1)).await;
    assert!(matches!(answer, Err(AskError::Unavailable { .. })), "{answer:?}");
    assert_eq!(world.get(&path).admin().send().await.is(200)["approvals"], json!([]));
    // Bound anew, it is another look.
    world.bind("ann", "platform_operations").await.is(201);
    assert!(world.ask::<Sku>(&ann, id, late(1)).await.is_err());
    say(&world, &format!("{path}/activate"), "ann").await.is(202);
}

#[tokio::test]
async fn a_sku_in_use_is_deactivated_with_an_impact_review_and_a_rollback_plan() {
    let world = World::new().await;
    let sku = world.sku("h100x4", 4).await;
    let path = format!("/api/v1/admin/skus/{sku}");
    let deactivate = format!("{path}/deactivate");
    let id = sku.parse().unwrap();
    let in_use = async || {
        let found = world.services.reads.in_use(SkuId(id)).await.unwrap();
        (found.nodes, found.allocations)
    };
    assert_eq!(in_use().await, (0, 0));
    let wanted = json!({"sku": "h100x4", "gpu_count": 1, "queue_seconds": 600});
    let queued = world.post("/api/v1/allocations").user("ann").key("q").json(&wanted).send().await;
    let queued = format!("/api/v1/allocations/{}", queued.is(201)["id"].as_str().unwrap());
    assert_eq!(in_use().await, (0, 1), "one that waits for a node");
    let mut given = json!({"reason": "old"});
    let refused = async |given: &serde_json::Value| {
        let answer = world.post(&deactivate).user("owner").json(given).send().await;
        answer.refused(400, "invalid_request")["field"].as_str().unwrap().to_owned()
    };
    assert_eq!(refused(&given).await, "impact_review");
    given["impact_review"] = json!("ann waits for one");
    assert_eq!(refused(&given).await, "rollback_plan");
    world.post(&format!("{queued}/release")).user("ann").send().await.is(202);
    assert_eq!(in_use().await, (0, 0));
    let node = world.active_node("h100x4", 4).await;
    assert_eq!(in_use().await, (1, 0));
    let reserve = node::Command::Reserve {
        allocation_id: AllocationId(Uuid::from_u128(5)),
        gpu_count: 2,
        keys: Vec::new(),
        revision: 0,
    };
    world.tell::<Node>(node.0, reserve).await;
    assert_eq!(in_use().await, (1, 1));
    assert_eq!(refused(&given).await, "rollback_plan");

    // Deprecated, it takes no new node and can be rented on the ones that it has.
    assert_eq!(
        world.decide(&format!("{path}/deprecate"), &json!({"reason": "old"})).await.is(200)["status"],
        "deprecated"
    );
    world
        .post("/api/v1/admin/nodes")
        .admin()
        .json(&node_body("h100x4", 4))
        .send()
        .await
        .refused(400, "invalid_request");
    assert_eq!(world.get("/api/v1/skus").user("ann").send().await.is(200)["items"], json!([]));
    world.places(Placing::On(node));
    let wanted = json!({"sku": "h100x4", "gpu_count": 1});
    world.post("/api/v1/allocations").user("ann").key("d").json(&wanted).send().await.is(201);

    given["rollback_plan"] = json!("activate it again");
    let both = world.decide(&deactivate, &given).await;
    assert_eq!(both.is(200)["status"], "inactive");
    assert_eq!(both.body["approvals"][0]["impact_review"], "ann waits for one");
    world.post("/api/v1/allocations").user("ann").key("i").json(&wanted).send().await.refused(400, "invalid_request");
    let filter = AuditFilter { action: Some("skus.approve".into()), target: Some(id), ..AuditFilter::default() };
    let audited = world.services.reads.audit(&filter, None, 1).await.unwrap();
    let said = &audited.items[0].metadata["approval"];
    assert_eq!((&said["rollback_plan"], &said["in_use"]["nodes"]), (&json!("activate it again"), &json!(1)));
}

#[tokio::test]
async fn users_see_the_catalog_without_who_decided_on_it() {
    let world = World::new().await;
    world.sku("h100x4", 4).await;
    let offered = world.get("/api/v1/skus").user("ann").send().await.is(200)["items"][0].clone();
    assert_eq!((&offered["name"], &offered["status"]), (&json!("h100x4"), &json!("active")));
    assert!(offered.get("approvals").is_none(), "{offered}");
    let all = world.get("/api/v1/admin/skus").admin().send().await;
    assert_eq!(all.is(200)["items"][0]["approvals"].as_array().unwrap().len(), 2);
}
