//! Who holds which platform role, and that it ends with its revocation.

use super::world::World;
use axum::http::Method;
use serde_json::{Value, json};

const BINDINGS: &str = "/api/v1/admin/platform-roles/bindings";
const SKUS: &str = "/api/v1/admin/skus";

/// `subject/role` of each.
fn bound(page: &Value) -> Vec<String> {
    let text = |item: &Value, name: &str| item[name].as_str().unwrap().to_owned();
    let items = page["items"].as_array().unwrap().iter();
    items.map(|item| format!("{}/{}", text(item, "subject"), text(item, "role"))).collect()
}

async fn revoke(world: &World, subject: &str, role: &str) -> super::world::Answer {
    let path = format!("{BINDINGS}?subject={subject}&role={role}&reason=left");
    world.call(Method::DELETE, &path).admin().send().await
}

#[tokio::test]
async fn a_role_is_bound_listed_used_and_revoked() {
    let world = World::new().await;
    let ann = || world.get(SKUS).user("ann").send();
    let refused = ann().await;
    refused.refused(403, "forbidden");
    insta::assert_snapshot!(refused.line(), @"403 forbidden: This needs the role `admin` or the platform role `platform_operations` or `inventory_owner`; ask an administrator to bind it to you.");

    let first = world.bind("ann", "inventory_owner").await;
    assert_eq!((first.is(201)["subject"].as_str(), first.body["bound_by"].as_str()), (Some("ann"), Some("user:root")));
    ann().await.is(200);
    let again = world.bind("ann", "inventory_owner").await;
    assert_eq!(again.is(200), &first.body, "binding twice is binding once");
    for (subject, role) in [("ann", "auditor"), ("bob", "auditor"), ("root", "platform_operations")] {
        world.bind(subject, role).await.is(201);
    }
    let list = async |query: &str| bound(world.get(&format!("{BINDINGS}{query}")).admin().send().await.is(200));
    let all = ["ann/inventory_owner", "ann/auditor", "bob/auditor", "root/platform_operations"];
    assert_eq!(list("").await, all);
    assert_eq!(list("?role=auditor").await, ["ann/auditor", "bob/auditor"]);
    assert_eq!(list("?subject=ann&role=auditor").await, ["ann/auditor"]);
    assert_eq!(list("?subject=nobody").await, [""; 0]);
    let (mut seen, mut token) = (Vec::new(), None::<String>);
    loop {
        let query = token.map_or("?limit=1".to_owned(), |token| format!("?limit=1&page_token={token}"));
        let page = world.get(&format!("{BINDINGS}{query}")).admin().send().await;
        seen.extend(bound(page.is(200)));
        token = page.body["next_page"].as_str().map(str::to_owned);
        if token.is_none() {
            break;
        }
    }
    assert_eq!(seen, all);

    revoke(&world, "ann", "inventory_owner").await.is(204);
    ann().await.refused(403, "forbidden");
    revoke(&world, "ann", "inventory_owner").await.refused(404, "not_found");
    revoke(&world, "nobody", "auditor").await.refused(404, "not_found");
    assert_eq!(list("?subject=ann").await, ["ann/auditor"]);
    world.bind("ann", "inventory_owner").await.is(201);
    ann().await.is(200);

    let audited = world.services.reads.audit(&persistence::read::AuditFilter::default(), None, 100).await.unwrap();
    let said: Vec<_> = audited
        .items
        .iter()
        .rev()
        .map(|row| {
            let (role, own) = (row.metadata["role"].as_str().unwrap(), &row.metadata["of_oneself"]);
            format!("{} {} {role} {} {own}", row.actor, row.action, row.metadata["subject"].as_str().unwrap())
        })
        .collect();
    insta::assert_snapshot!(said.join("\n"), @r"
    user:root platform_roles.bind inventory_owner ann false
    user:root platform_roles.bind auditor ann false
    user:root platform_roles.bind auditor bob false
    user:root platform_roles.bind platform_operations root true
    user:root platform_roles.revoke inventory_owner ann false
    user:root platform_roles.bind inventory_owner ann false
    ");
}

#[tokio::test]
async fn whom_the_identity_provider_has_put_out_no_platform_role_lets_in() {
    let world = World::new().await;
    world.bind("ann", "inventory_owner").await.is(201);
    world.get(SKUS).by(&world.token("ann", &["user"])).send().await.is(200);
    world.get(SKUS).by(&world.token("ann", &["offline_access"])).send().await.refused(403, "forbidden");
}

#[tokio::test]
async fn of_many_bindings_at_once_one_is_made() {
    let world = World::new().await;
    let answers = futures::future::join_all((0..20).map(|_| world.bind("ann", "auditor"))).await;
    assert_eq!(answers.iter().filter(|answer| answer.status == 201).count(), 1);
    let first = answers.iter().find(|answer| answer.status == 201).unwrap().body.clone();
    assert!(answers.iter().all(|answer| answer.body == first));
    let of_all = ["auditor", "inventory_owner", "platform_operations", "billing_operations"];
    let answers = futures::future::join_all((0..20).map(|n| world.bind("bob", of_all[n % 4]))).await;
    assert_eq!(answers.iter().filter(|answer| answer.status == 201).count(), 4);
    let audited = world.services.reads.audit(&persistence::read::AuditFilter::default(), None, 100).await.unwrap();
    assert_eq!(audited.items.len(), 5);
}

#[tokio::test]
async fn a_subject_is_an_opaque_text_within_bounds() {
    let world = World::new().await;
    let longest = "ü".repeat(255);
    for subject in ["*", ">", "a.b.>", "иван", "' OR 1=1 --", " ", "🦀", longest.as_str()] {
        world.bind(subject, "auditor").await.is(201);
    }
    let wildcard = world.get(&format!("{BINDINGS}?subject=%2A")).admin().send().await;
    assert_eq!(bound(wildcard.is(200)), ["*/auditor"]);
    revoke(&world, "%3E", "auditor").await.is(204);
    assert_eq!(world.get(BINDINGS).admin().send().await.is(200)["items"].as_array().unwrap().len(), 7);

    let long = "x".repeat(10_240);
    let with = |subject: Value, role: Value, reason: Value| json!({"subject": subject, "role": role, "reason": reason});
    let mut lines = Vec::new();
    for body in [
        with(json!(""), json!("auditor"), json!("r")),
        with(json!(long), json!("auditor"), json!("r")),
        with(json!("a\u{0}b"), json!("auditor"), json!("r")),
        with(json!("a\nb"), json!("auditor"), json!("r")),
        with(json!(7), json!("auditor"), json!("r")),
        with(json!("ann"), json!("admin"), json!("r")),
        with(json!("ann"), json!(["auditor"]), json!("r")),
        with(json!("ann"), json!("auditor"), json!("")),
        with(json!("ann"), json!("auditor"), Value::Null),
        json!({"subject": "ann", "role": "auditor", "reason": "r", "until": "tomorrow"}),
        json!([]),
    ] {
        lines.push(world.post(BINDINGS).admin().json(&body).send().await.line());
    }
    for query in ["", "?subject=ann", "?subject=ann&role=king", "?subject=&role=auditor", "?subject=%00&role=auditor"] {
        lines.push(world.call(Method::DELETE, &format!("{BINDINGS}{query}")).admin().send().await.line());
    }
    for query in ["?role=king", "?subject=", "?limit=0", "?page_token=x", "?colour=red"] {
        lines.push(world.get(&format!("{BINDINGS}{query}")).admin().send().await.line());
    }
    insta::assert_snapshot!("what_is_no_binding_is_refused", lines.join("\n"));
}

#[tokio::test]
async fn what_is_asked_about_platform_roles_is_counted() {
    let world = World::new().await;
    world.bind("ann", "auditor").await.is(201);
    world.bind("ann", "king").await.is(400);
    revoke(&world, "ann", "auditor").await.is(204);
    revoke(&world, "ann", "auditor").await.is(404);
    world.get(BINDINGS).admin().send().await.is(200);
    world.get(BINDINGS).user("ann").send().await.is(403);
    world.post(BINDINGS).user("ann").json(&json!({})).send().await.is(403);
    world.call(Method::DELETE, BINDINGS).send().await.is(401);
    let counted = || {
        let of = &world.services.platform_roles;
        let counters = [
            &of.list_requests,
            &of.bind_requests,
            &of.revoke_requests,
            &of.mutation_success,
            &of.mutation_failure,
            &of.admin_denied,
            &of.service_unavailable,
        ];
        counters.map(prometheus::IntCounter::get)
    };
    assert_eq!(counted(), [2, 3, 3, 2, 2, 2, 0]);
    world.stop_postgres();
    for answer in [
        world.bind("ann", "auditor").await,
        revoke(&world, "ann", "auditor").await,
        world.get(BINDINGS).admin().send().await,
    ] {
        answer.refused(503, "service_unavailable");
    }
    assert_eq!(counted(), [3, 4, 4, 2, 4, 2, 3]);
    // Nor is anybody let in by a role that cannot be looked up.
    world.get(SKUS).user("ann").send().await.refused(503, "service_unavailable");
}

#[tokio::test]
async fn one_binding_is_read_by_its_id_while_it_is_bound() {
    let world = World::new().await;
    let bound = world.bind("ann", "auditor").await;
    let path = format!("/api/v1/admin/platform-roles/bindings/{}", bound.body["id"].as_str().unwrap());
    assert_eq!(world.get(&path).admin().send().await.is(200), &bound.body);
    let revoke = "/api/v1/admin/platform-roles/bindings?subject=ann&role=auditor";
    world.call(Method::DELETE, revoke).admin().send().await.is(204);
    world.get(&path).admin().send().await.refused(404, "not_found");
}
