//! The permission matrix over HTTP: the status of every route for every identity. The routes come from the description that the
//! service serves, so that a new one is in no table and fails; the tables are checked in and reviewed as text.

use crate::openapi::with_responses;
use edge::node_api::{ROUTES, RequiredCredential};
use local_servers::identity::DemoUser;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{Duration, Instant};
use tests::cluster::client::{Client, send_request};
use tests::cluster::fake_agent::{EnrollmentAttempt, FakeAgent, anonymous};
use tests::cluster::{REGION, TestCluster, WAIT_TIMEOUT, id_of, ssh_public_key};
use uuid::Uuid;

const ACCOUNTS: &str = "/api/v1/service-accounts";

/// A caller, named as in the columns of the table.
struct Identity {
    name: &'static str,
    caller: Client,
}

/// Service accounts of `user`: one, and one whose key was revoked after its token was issued.
struct Accounts {
    valid: Client,
    revoked: Client,
}

impl Accounts {
    async fn made(cluster: &TestCluster) -> Self {
        let account = cluster.user.post(ACCOUNTS, &json!({ "name": "swept by" })).await.created();
        let keys = format!("{ACCOUNTS}/{}/keys", id_of(&account));
        let caller = async || {
            let key = cluster.user.send_once(Method::POST, &keys, None).await.created();
            let form = [
                ("grant_type", "client_credentials"),
                ("client_id", account["id"].as_str().unwrap()),
                ("client_secret", key["client_secret"].as_str().unwrap()),
            ];
            let asked = cluster.anonymous_client().request(Method::POST, &format!("{ACCOUNTS}/token")).form(&form);
            let token = cluster.anonymous_client().send(asked).await.ok();
            (cluster.anonymous_client().as_bearer(token["access_token"].as_str().unwrap()), id_of(&key))
        };
        let ((valid, _), (revoked, key)) = (caller().await, caller().await);
        let gone = cluster.user.send_once(Method::DELETE, &format!("{keys}/{key}"), None).await;
        assert_eq!(gone.status, StatusCode::NO_CONTENT, "{gone}");
        Self { valid, revoked }
    }
}

/// The identities in the order of their permissions, weakest first, so that changes by a stronger one do not affect a weaker one.
async fn identities_by_permission(cluster: &TestCluster) -> Vec<Identity> {
    let accounts = Accounts::made(cluster).await;
    let bearer = |claims: &Value| {
        let token = cluster.identity.mint(claims).expect("the provider signs");
        cluster.anonymous_client().as_bearer(secrecy::ExposeSecret::expose_secret(&token))
    };
    let claims = |username: &str| cluster.identity.claims_of(username).expect("a person of the cluster");
    let mut expired = claims("admin");
    let past = |claims: &Value, name: &str| claims[name].as_i64().unwrap_or_default() - 7200;
    for name in ["iat", "nbf", "exp"] {
        expired[name] = json!(past(&expired, name));
    }
    let mut without_role = claims("user");
    without_role["realm_access"]["roles"] = json!(["offline_access"]);
    vec![
        Identity { name: "anonymous", caller: cluster.anonymous_client() },
        Identity { name: "garbage", caller: cluster.anonymous_client().as_bearer("eyJhbGciOiJub25lIn0.e30.") },
        Identity { name: "expired admin", caller: bearer(&expired) },
        Identity { name: "no role", caller: bearer(&without_role) },
        Identity { name: "other user", caller: cluster.other_user.clone() },
        Identity { name: "revoked key", caller: accounts.revoked },
        Identity { name: "service account", caller: accounts.valid },
        Identity { name: "revoked role", caller: role_holder(cluster, "was-owner", "inventory_owner", true).await },
        Identity { name: "auditor", caller: role_holder(cluster, "auditor", "auditor", false).await },
        Identity { name: "inventory owner", caller: role_holder(cluster, "owner", "inventory_owner", false).await },
        Identity {
            name: "billing operator",
            caller: role_holder(cluster, "biller", "billing_operations", false).await,
        },
        Identity { name: "user", caller: cluster.user.clone() },
        Identity { name: "admin", caller: cluster.admin.clone() },
    ]
}

/// A further user with a platform role, or with a revoked one.
async fn role_holder(cluster: &TestCluster, username: &str, role: &str, revoked: bool) -> Client {
    cluster.identity.admit(DemoUser::new(username, &["user"]));
    cluster.bind(username, role).await;
    if revoked {
        let subject = cluster.identity.person(username).expect("they were let in").id;
        let path = format!("/api/v1/admin/platform-roles/bindings?subject={subject}&role={role}");
        cluster.admin.delete(&path).await.ok();
    }
    let token = cluster.identity.token_of(username).expect("the provider signs");
    cluster.anonymous_client().as_bearer(secrecy::ExposeSecret::expose_secret(&token))
}

/// Whether a platform role permits this to users who are no administrators.
fn is_public_for(who: &str, method: &Method, path: &str) -> bool {
    match who {
        "billing operator" => path.starts_with("/api/v1/admin/billing/"),
        "auditor" => path == "/api/v1/admin/audit-log",
        "inventory owner" => {
            let decides = ["/activate", "/deprecate", "/deactivate"].iter().any(|it| path.ends_with(it));
            path.starts_with("/api/v1/admin/skus") && (*method == Method::GET || decides)
        }
        _ => false,
    }
}

/// A resource of `user` or of the administrators: the prefix of its paths, and the values of their parameters.
type TestResource = (&'static str, Vec<(&'static str, String)>);

async fn create_resources(cluster: &mut TestCluster) -> Vec<TestResource> {
    let sku = cluster.offer_sku("swept", 8).await;
    let node = cluster.register("swept").await;
    // There is no capacity, so the user's allocation stays queued.
    let wanted = json!({ "sku": "swept", "region_code": REGION, "gpu_count": 1, "queue_seconds": 3600 });
    let allocation = cluster.user.post("/api/v1/allocations", &wanted).await.created();
    let key = json!({ "name": "swept", "public_key": ssh_public_key("swept") });
    let key = cluster.user.post("/api/v1/ssh-keys", &key).await.created();
    let second_key = json!({ "name": "swept too", "public_key": ssh_public_key("swept too") });
    let second_key = cluster.user.post("/api/v1/ssh-keys", &second_key).await.created();
    let user_id = cluster.identity.person("user").expect("the user is known").id;
    let endpoint = json!({ "kind": "webhook", "url": "https://receiver.example/hooks" });
    let endpoint = cluster.user.post("/api/v1/notification-endpoints", &endpoint).await.created();
    let account = cluster.user.post(ACCOUNTS, &json!({ "name": "swept" })).await.created();
    let account_key = format!("{ACCOUNTS}/{}/keys", id_of(&account));
    let account_key = cluster.user.send_once(Method::POST, &account_key, None).await.created();
    // An active allocation, and a shell on it.
    cluster.node("swept-alive").await;
    let alive = cluster.rent_active("swept-alive", 1).await;
    let terminal = cluster.issue_terminal_token(&cluster.user.clone(), alive.id, None).await;
    wait_for_recording(cluster, terminal.session).await;
    let browser_session = cluster.log_in_to_console("user").await.session_id().await;
    let payment = cluster.begin_payment(5_000).await;
    let cancelled = cluster.begin_payment(5_000).await;
    let account_of_user = id_of(&cluster.user.get("/api/v1/billing/balance").await.ok());
    let member = cluster.admin.get("/api/v1/admin/runtime/cluster").await.ok();
    let one = |prefix, id: Uuid| (prefix, vec![("{id}", id.to_string())]);
    let both = |prefix, first: (&'static str, String), second: (&'static str, String)| (prefix, vec![first, second]);
    let id = |id: Uuid| ("{id}", id.to_string());
    vec![
        one("/api/v1/admin/skus/{id}", sku),
        // No agent has enrolled, so that the node has no task, no finding and no GPU.
        (
            "/api/v1/admin/nodes/{id}",
            vec![
                id(node.id),
                ("{task_id}", Uuid::nil().to_string()),
                ("{finding_id}", Uuid::nil().to_string()),
                ("{gpu_uuid}", "GPU-0".to_owned()),
            ],
        ),
        both("/api/v1/admin/runtime/entities/{kind}/{id}", ("{kind}", "node".to_owned()), id(node.id)),
        both(
            "/api/v1/admin/runtime/members/{member}/workers/{worker}",
            ("{member}", member["members"][0]["id"].as_str().unwrap().to_owned()),
            ("{worker}", "idle-passivation".to_owned()),
        ),
        one("/api/v1/admin/allocations/{id}", id_of(&allocation)),
        // No rollout has this id.
        one("/api/v1/admin/rollouts/{id}", Uuid::nil()),
        // No binding and no value has this id.
        one("/api/v1/admin/platform-roles/bindings/{id}", Uuid::nil()),
        one("/api/v1/admin/policy-values/{id}", Uuid::nil()),
        one("/api/v1/admin/terminal-sessions/{id}", terminal.session),
        // No login has this id.
        one("/api/v1/admin/browser-sessions/{id}", Uuid::nil()),
        one("/api/v1/me/sessions/{id}", browser_session),
        // No payment has this id.
        one("/api/v1/admin/billing/payments/{id}", Uuid::nil()),
        // Without a payment processor there are no events.
        one("/api/v1/admin/billing/processor-events/{id}", Uuid::nil()),
        both("/api/v1/admin/billing/accounts/{id}", id(account_of_user), ("{month}", this_month())),
        ("/api/v1/billing/statements/{month}", vec![("{month}", this_month())]),
        one("/api/v1/billing/payments/{id}/cancel", cancelled.id),
        one("/api/v1/billing/payments/{id}", payment.id),
        (
            "/billing/checkout/{payment_id}",
            vec![("{payment_id}", payment.id.to_string()), ("{processor_id}", payment.intent)],
        ),
        ("/billing/assets/{name}", vec![("{name}", "main.js".to_owned())]),
        one("/api/v1/allocations/{id}/terminal-tokens", alive.id),
        both(
            "/api/v1/allocations/{id}/terminal-sessions/{session_id}",
            id(alive.id),
            ("{session_id}", terminal.session.to_string()),
        ),
        ("/terminal/assets/{name}", vec![("{name}", "main.js".to_owned())]),
        ("/terminal/{allocation_id}", vec![("{allocation_id}", alive.id.to_string())]),
        one("/api/v1/allocations/{id}", id_of(&allocation)),
        one("/api/v1/notification-endpoints/{id}", id_of(&endpoint)),
        one("/api/v1/recordings/{id}", terminal.session),
        ("/recordings/{session_id}", vec![("{session_id}", terminal.session.to_string())]),
        (
            "/api/v1/admin/users/{user_id}/ssh-keys",
            vec![("{user_id}", user_id.to_string()), ("{id}", id_of(&second_key).to_string())],
        ),
        one("/api/v1/ssh-keys/{id}", id_of(&key)),
        both("/api/v1/service-accounts/{id}", id(id_of(&account)), ("{key_id}", id_of(&account_key).to_string())),
    ]
}

/// The current month, of which every account has a statement.
fn this_month() -> String {
    chrono::Utc::now().format("%Y-%m").to_string()
}

/// Waits until the session has a recording.
async fn wait_for_recording(cluster: &TestCluster, session: Uuid) {
    let until = Instant::now() + WAIT_TIMEOUT;
    while !cluster.user.get(&format!("/api/v1/recordings/{session}")).await.status.is_success() {
        assert!(Instant::now() < until, "nothing is recorded of {session}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// The path with the parameters of an existing resource.
fn fill_path(path: &str, things: &[TestResource]) -> String {
    if !path.contains('{') {
        return path.to_owned();
    }
    let (_, parameters) = things
        .iter()
        .find(|(prefix, _)| path.starts_with(prefix))
        .unwrap_or_else(|| panic!("the sweep has nothing to put into {path}: make one in `create_resources`"));
    let path = parameters.iter().fold(path.to_owned(), |path, (name, value)| path.replace(name, value));
    assert!(!path.contains('{'), "the sweep does not know every parameter of {path}: name it in `create_resources`");
    path
}

struct Operation {
    method: Method,
    path: String,
    described: Value,
}

/// Reads first, then changes, then deletions; each in the order of the paths.
fn operations(description: &Value) -> Vec<Operation> {
    let paths = description["paths"].as_object().expect("the description has paths");
    let mut all = Vec::new();
    for (path, item) in paths {
        for (method, described) in item.as_object().expect("a path has operations") {
            let method = Method::from_bytes(method.to_uppercase().as_bytes()).expect("a method");
            all.push(Operation { method, path: path.clone(), described: with_responses(description, described) });
        }
    }
    let order =
        |method: &Method| ["GET", "PATCH", "PUT", "POST", "DELETE"].iter().position(|one| *one == method.as_str());
    // Deleting a resource deletes what it contains, so that is deleted first.
    let depth = |it: &Operation| if it.method == Method::DELETE { usize::MAX - it.path.len() } else { 0 };
    all.sort_by_key(|it| (order(&it.method), depth(it), it.path.clone()));
    all
}

/// The status of the response, which the description must list for this operation, as well as the code of an error.
async fn request_status(by: &Client, operation: &Operation, path: &str) -> u16 {
    let Operation { method, described, .. } = operation;
    let mut request = by.request(method.clone(), path);
    if method == Method::POST {
        request = request.header("Idempotency-Key", Uuid::new_v4().to_string());
    }
    let content = &described["requestBody"]["content"];
    let (json, form) = (&content["application/json"], &content["application/x-www-form-urlencoded"]);
    if !json.is_null() {
        let mut body = json["example"].clone();
        // The example names a session that does not exist; without it the token is for a new one.
        if path.ends_with("/terminal-tokens") {
            body = json!({});
        }
        // The same for a dead letter.
        if path.contains("/dead-letters/") {
            body = json!({});
        }
        // The same for keys.
        if *method == Method::PUT && path.ends_with("/ssh-keys") {
            body = json!({ "ssh_key_ids": [] });
        }
        // No machine of a test has what the example expects of it.
        if *method == Method::PATCH && path.contains("/skus/") {
            body["expected_hardware"] = json!({});
        }
        request = request.json(&body);
    } else if !form.is_null() {
        request = request.form(&form["example"]);
    }
    // A busy machine may delay a response beyond a timeout: the same request is sent again.
    let until = Instant::now() + WAIT_TIMEOUT;
    let answer = loop {
        let same = request.try_clone().expect("its body is no stream");
        let why = match same.send().await {
            Ok(answer) if answer.status() != StatusCode::SERVICE_UNAVAILABLE => break answer,
            Ok(answer) => answer.status().to_string(),
            Err(error) => format!("{error:?}"),
        };
        assert!(Instant::now() < until, "{method} {path}: no answer: {why}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    let status = answer.status().as_u16();
    let listed = &described["responses"][status.to_string()];
    assert!(listed.is_object(), "{method} {path} answers {status}, which its description does not list");
    // An event stream does not end.
    if status < 400 {
        return status;
    }
    let body: Value = answer.json().await.expect("a refusal is JSON");
    let code = body["code"].as_str().unwrap_or_else(|| panic!("{method} {path}: no code in {body}"));
    let codes = listed["x-error-codes"].as_array().expect("the description lists codes");
    assert!(codes.iter().any(|one| one == code), "{method} {path} answers {code}, which is none of {codes:?}");
    status
}

fn expect_denied(operation: &Operation, statuses: &BTreeMap<&str, u16>) {
    let Operation { method, path, described } = operation;
    let status = |who: &str| statuses[who];
    let shut = |who: &str| matches!(status(who), 401 | 403);
    if described["security"].is_null() {
        assert!(!statuses.keys().any(|who| shut(who)), "{method} {path} asks for no token: {statuses:?}");
        return;
    }
    let takes_tokens = described["security"].as_array().unwrap().iter().any(|one| one["bearer"].is_array());
    if !takes_tokens {
        // Authenticated by other means than a user's token: a service account's key, an operator's token.
        assert!(statuses.values().all(|status| *status >= 400), "{method} {path}: {statuses:?}");
        return;
    }
    for who in ["anonymous", "garbage", "expired admin", "revoked key"] {
        assert_eq!(status(who), 401, "{method} {path} for {who}");
    }
    assert_eq!(status("no role"), 403, "{method} {path}");
    let for_admins = path.starts_with("/api/v1/admin/");
    for who in ["other user", "revoked role", "auditor", "inventory owner", "billing operator", "user"] {
        let expected = for_admins && !is_public_for(who, method, path);
        assert_eq!(shut(who), expected, "{method} {path} for {who}: {statuses:?}");
    }
    assert!(!shut("admin"), "{method} {path} for admin");
    if for_admins {
        assert!(shut("service account"), "{method} {path} for a user's service account");
    }
    // Another user's resource is not found.
    if !for_admins && path.contains("{id}") {
        assert_eq!(status("other user"), 404, "{method} {path}");
        // A deleted resource exists for the first identity alone: the user's service account acts for the user.
        assert!(status("user").min(status("service account")) < 300, "{method} {path}: {statuses:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_answers_each_identity_by_the_permission_matrix() {
    let mut cluster = TestCluster::builder().with_processor().start().await;
    let description = cluster.anonymous_client().get("/api/v1/openapi.json").await.ok();
    let things = create_resources(&mut cluster).await;
    let identities = identities_by_permission(&cluster).await;
    let columns: Vec<_> = identities.iter().map(|identity| identity.name).collect();
    let mut table = format!("{:<64} {}\n", "", columns.join(" | "));
    for operation in operations(&description) {
        let path = fill_path(&operation.path, &things);
        let (mut cells, mut statuses) = (Vec::new(), BTreeMap::new());
        for Identity { name, caller } in &identities {
            let status = request_status(caller, &operation, &path).await;
            statuses.insert(*name, status);
            cells.push(format!("{status:<width$}", width = name.len()));
        }
        expect_denied(&operation, &statuses);
        let route = format!("{} {}", operation.method, operation.path);
        writeln!(table, "{route:<64} {}", cells.join(" | ")).unwrap();
    }
    insta::assert_snapshot!("public_api", table);
    cluster.shutdown().await;
}

/// The body that a valid agent sends, so that the response depends on its identity alone.
fn body_of(path: &str, agent: &FakeAgent) -> Value {
    let (enrollment, _) = EnrollmentAttempt::valid(&agent.bundle, 8);
    match path.rsplit('/').next() {
        Some("enroll") => enrollment.body(),
        Some("renew") => json!({ "csr_pem": enrollment.csr_pem }),
        Some("heartbeat") => agent.heartbeat_body(),
        Some("result") => {
            let now = chrono::Utc::now();
            json!({ "attempt": 1, "status": "succeeded", "output": {}, "started_at": now, "finished_at": now })
        }
        Some(_) | None => json!({}),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_of_the_node_api_serves_its_own_node_alone() {
    let mut cluster = TestCluster::start().await;
    let (own, other, gone) =
        (cluster.register("swept").await, cluster.register("swept").await, cluster.register("swept").await);
    let bundle = cluster.bundle(&own).await;
    let agent = FakeAgent::enroll(&bundle, 8).await;
    let other = FakeAgent::enroll(&cluster.bundle(&other).await, 8).await;
    let removed = FakeAgent::onboard(&cluster.bundle(&gone).await, 8).await;
    gone.expect_state("active").await;
    gone.order("retire").await.accepted();
    gone.order("remove").await.accepted();
    gone.expect_state("removed").await;

    let nobody = anonymous(&bundle);
    let mut table = format!("{:<60} own | none | another node's | a removed node's, at its path\n", "certificate:");
    for route in ROUTES {
        let (method, path) = (Method::from_bytes(route.method.as_bytes()).unwrap(), route.path);
        let path = path.trim_start_matches("/internal/v1/nodes/{id}/").replace("{task_id}", &Uuid::nil().to_string());
        let path = path.replace("{session_id}", &Uuid::nil().to_string()).replace("{seq}", "0");
        let digest = format!("sha256:{}", "0".repeat(64));
        let path = path.replace("{reference}", &digest).replace("{digest}", &digest);
        let path = if path.ends_with("/wait") { format!("{path}?timeout_seconds=1") } else { path };
        let (none, others) = (&nobody, other.client_without_pool());
        let removeds = removed.client_without_pool();
        let own = agent.client_without_pool();
        let tries =
            [(&own, agent.node_id), (none, agent.node_id), (&others, agent.node_id), (&removeds, removed.node_id)];
        let mut cells = Vec::new();
        for (http, at) in tries {
            let request = agent.request_with(http, at, method.clone(), &path);
            let request = if method == Method::POST { request.json(&body_of(&path, &agent)) } else { request };
            let request = if method == Method::PUT {
                request.header("content-type", "application/octet-stream").body("frames")
            } else {
                request
            };
            let answer = send_request(request).await.unwrap_or_else(|error| panic!("{path}: no answer: {error:?}"));
            if answer.status.is_client_error() {
                answer.expect_error_envelope();
                let listed = route.codes().any(|code| code.as_str() == answer.code());
                assert!(listed, "{path} answers {}, which its table does not list", answer.code());
            }
            let reason = answer.body["details"]["reason"].as_str().unwrap_or_default();
            cells.push(format!("{} {reason}", answer.status.as_u16()).trim_end().to_owned());
            let is_own = at == agent.node_id && std::ptr::eq(http, &raw const own);
            let is_closed =
                matches!(route.shows, RequiredCredential::Certificate | RequiredCredential::CertificateOrToken);
            if is_closed && !is_own {
                assert_eq!(answer.status, StatusCode::UNAUTHORIZED, "{path}: {answer}");
            }
        }
        writeln!(table, "{:<60} {}", format!("{} {}", route.method, route.path), cells.join(" | ")).unwrap();
    }
    insta::assert_snapshot!("node_api", table);
    cluster.shutdown().await;
}
