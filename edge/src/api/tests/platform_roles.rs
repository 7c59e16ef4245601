//! Bindings of platform roles, and their revocation.

use super::harness::ApiHarness;
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

async fn revoke(api: &ApiHarness, subject: &str, role: &str) -> super::harness::TestResponse {
    let path = format!("{BINDINGS}?subject={subject}&role={role}&reason=left");
    api.call(Method::DELETE, &path).admin().send().await
}

#[tokio::test]
async fn role_is_bound_listed_used_and_revoked() {
    let api = ApiHarness::new().await;
    let ann = || api.get(SKUS).user("ann").send();
    let refused = ann().await;
    refused.refused(403, "forbidden");
    insta::assert_snapshot!(refused.line(), @"403 forbidden: This needs the role `admin` or the platform role `platform_operations` or `inventory_owner`; ask an administrator to bind it to you.");

    let first = api.bind("ann", "inventory_owner").await;
    assert_eq!((first.is(201)["subject"].as_str(), first.body["bound_by"].as_str()), (Some("ann"), Some("user:root")));
    ann().await.is(200);
    let repeated = api.bind("ann", "inventory_owner").await;
    assert_eq!(repeated.is(200), &first.body, "binding twice is binding once");
    for (subject, role) in [("ann", "auditor"), ("bob", "auditor"), ("root", "platform_operations")] {
        api.bind(subject, role).await.is(201);
    }
    let list = async |query: &str| bound(api.get(&format!("{BINDINGS}{query}")).admin().send().await.is(200));
    let all = ["ann/inventory_owner", "ann/auditor", "bob/auditor", "root/platform_operations"];
    assert_eq!(list("").await, all);
    assert_eq!(list("?role=auditor").await, ["ann/auditor", "bob/auditor"]);
    assert_eq!(list("?subject=ann&role=auditor").await, ["ann/auditor"]);
    assert_eq!(list("?subject=nobody").await, [""; 0]);
    let (mut seen, mut token) = (Vec::new(), None::<String>);
    loop {
        let query = token.map_or("?limit=1".to_owned(), |token| format!("?limit=1&page_token={token}"));
        let page = api.get(&format!("{BINDINGS}{query}")).admin().send().await;
        seen.extend(bound(page.is(200)));
        token = page.body["next_page"].as_str().map(str::to_owned);
        if token.is_none() {
            break;
        }
    }
    assert_eq!(seen, all);

    revoke(&api, "ann", "inventory_owner").await.is(204);
    ann().await.refused(403, "forbidden");
    revoke(&api, "ann", "inventory_owner").await.refused(404, "not_found");
    revoke(&api, "nobody", "auditor").await.refused(404, "not_found");
    assert_eq!(list("?subject=ann").await, ["ann/auditor"]);
    api.bind("ann", "inventory_owner").await.is(201);
    ann().await.is(200);

    let audited = api.app.reads.audit(&persistence::queries::AuditFilter::default(), None, 100).await.unwrap();
    let output: Vec<_> = audited
        .items
        .iter()
        .rev()
        .map(|row| {
            let (role, own) = (row.metadata["role"].as_str().unwrap(), &row.metadata["of_oneself"]);
            format!("{} {} {role} {} {own}", row.actor, row.action, row.metadata["subject"].as_str().unwrap())
        })
        .collect();
    insta::assert_snapshot!(output.join("\n"), @r"
    user:root platform_roles.bind inventory_owner ann false
    user:root platform_roles.bind auditor ann false
    user:root platform_roles.bind auditor bob false
    user:root platform_roles.bind platform_operations root true
    user:root platform_roles.revoke inventory_owner ann false
    user:root platform_roles.bind inventory_owner ann false
    ");
}

#[tokio::test]
async fn platform_role_admits_no_caller_without_a_role_in_the_token() {
    let api = ApiHarness::new().await;
    api.bind("ann", "inventory_owner").await.is(201);
    api.get(SKUS).by(&api.token("ann", &["user"])).send().await.is(200);
    api.get(SKUS).by(&api.token("ann", &["offline_access"])).send().await.refused(403, "forbidden");
}

#[tokio::test]
async fn concurrent_bindings_make_one() {
    let api = ApiHarness::new().await;
    let answers = futures::future::join_all((0..20).map(|_| api.bind("ann", "auditor"))).await;
    assert_eq!(answers.iter().filter(|answer| answer.status == 201).count(), 1);
    let first = answers.iter().find(|answer| answer.status == 201).unwrap().body.clone();
    assert!(answers.iter().all(|answer| answer.body == first));
    let of_all = ["auditor", "inventory_owner", "platform_operations", "billing_operations"];
    let answers = futures::future::join_all((0..20).map(|n| api.bind("bob", of_all[n % 4]))).await;
    assert_eq!(answers.iter().filter(|answer| answer.status == 201).count(), 4);
    let audited = api.app.reads.audit(&persistence::queries::AuditFilter::default(), None, 100).await.unwrap();
    assert_eq!(audited.items.len(), 5);
}

#[tokio::test]
async fn subject_is_an_opaque_text_within_bounds() {
    let api = ApiHarness::new().await;
    let longest = "ü".repeat(255);
    for subject in ["*", ">", "a.b.>", "иван", "' OR 1=1 --", " ", "🦀", longest.as_str()] {
        api.bind(subject, "auditor").await.is(201);
    }
    let wildcard = api.get(&format!("{BINDINGS}?subject=%2A")).admin().send().await;
    assert_eq!(bound(wildcard.is(200)), ["*/auditor"]);
    revoke(&api, "%3E", "auditor").await.is(204);
    assert_eq!(api.get(BINDINGS).admin().send().await.is(200)["items"].as_array().unwrap().len(), 7);

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
        lines.push(api.post(BINDINGS).admin().json(&body).send().await.line());
    }
    for query in ["", "?subject=ann", "?subject=ann&role=king", "?subject=&role=auditor", "?subject=%00&role=auditor"] {
        lines.push(api.call(Method::DELETE, &format!("{BINDINGS}{query}")).admin().send().await.line());
    }
    for query in ["?role=king", "?subject=", "?limit=0", "?page_token=x", "?colour=red"] {
        lines.push(api.get(&format!("{BINDINGS}{query}")).admin().send().await.line());
    }
    insta::assert_snapshot!("invalid_binding_is_refused", lines.join("\n"));
}

#[tokio::test]
async fn platform_role_requests_are_counted() {
    let api = ApiHarness::with_own_postgres(None).await;
    api.bind("ann", "auditor").await.is(201);
    api.bind("ann", "king").await.is(400);
    revoke(&api, "ann", "auditor").await.is(204);
    revoke(&api, "ann", "auditor").await.is(404);
    api.get(BINDINGS).admin().send().await.is(200);
    api.get(BINDINGS).user("ann").send().await.is(403);
    api.post(BINDINGS).user("ann").json(&json!({})).send().await.is(403);
    api.call(Method::DELETE, BINDINGS).send().await.is(401);
    let counted = || {
        let of = &api.app.platform_roles;
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
    api.kill_postgres().await;
    for answer in
        [api.bind("ann", "auditor").await, revoke(&api, "ann", "auditor").await, api.get(BINDINGS).admin().send().await]
    {
        answer.refused(503, "service_unavailable");
    }
    assert_eq!(counted(), [3, 4, 4, 2, 4, 2, 3]);
    // A role that cannot be read admits no caller.
    api.get(SKUS).user("ann").send().await.refused(503, "service_unavailable");
}

#[tokio::test]
async fn binding_is_read_by_id_while_it_is_bound() {
    let api = ApiHarness::new().await;
    let bound = api.bind("ann", "auditor").await;
    let path = format!("/api/v1/admin/platform-roles/bindings/{}", bound.body["id"].as_str().unwrap());
    assert_eq!(api.get(&path).admin().send().await.is(200), &bound.body);
    let revoke = "/api/v1/admin/platform-roles/bindings?subject=ann&role=auditor";
    api.call(Method::DELETE, revoke).admin().send().await.is(204);
    api.get(&path).admin().send().await.refused(404, "not_found");
}
