//! Who gets what, at every route there is: the permission matrix as it is over HTTP. The routes come from the description that the
//! service serves, so that one which is new stands in no table and fails; the tables are checked in and reviewed as text.

use edge::node_api::{PAGE, Shows};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use tests::world::client::{Client, answer_to};
use tests::world::hand::{HandAgent, anonymous};
use tests::world::{REGION, World, id_of, ssh_public_key};
use uuid::Uuid;

/// A caller, as the columns of the table call it.
struct Identity {
    name: &'static str,
    caller: Client,
}

/// Who is tried, from the weakest on, so that what the strong do to a resource is not in the way of the weak.
fn identities(world: &World) -> Vec<Identity> {
    let bearer = |claims: &Value| {
        let token = world.identity.mint(claims).expect("the provider signs");
        world.stranger().as_bearer(secrecy::ExposeSecret::expose_secret(&token))
    };
    let claims = |username: &str| world.identity.claims_of(username).expect("a person of the world");
    let mut expired = claims("admin");
    let past = |claims: &Value, name: &str| claims[name].as_i64().unwrap_or_default() - 7200;
    for name in ["iat", "nbf", "exp"] {
        expired[name] = json!(past(&expired, name));
    }
    let mut without_role = claims("user");
    without_role["realm_access"]["roles"] = json!(["offline_access"]);
    vec![
        Identity { name: "anonymous", caller: world.stranger() },
        Identity { name: "garbage", caller: world.stranger().as_bearer("eyJhbGciOiJub25lIn0.e30.") },
        Identity { name: "expired admin", caller: bearer(&expired) },
        Identity { name: "no role", caller: bearer(&without_role) },
        Identity { name: "other user", caller: world.other_user.clone() },
        Identity { name: "user", caller: world.user.clone() },
        Identity { name: "admin", caller: world.admin.clone() },
    ]
}

/// Things of `user` and of the administrators, by how paths name them.
async fn things(world: &mut World) -> Vec<(&'static str, Uuid)> {
    let sku = world.offer("swept", 8).await;
    let node = world.register("swept").await;
    // There is no capacity, so it waits in line: the user's own, and still.
    let wanted = json!({ "sku": "swept", "region_code": REGION, "gpu_count": 1, "queue_seconds": 3600 });
    let allocation = world.user.post("/api/v1/allocations", &wanted).await.created();
    let key = json!({ "name": "swept", "public_key": ssh_public_key("swept") });
    let key = world.user.post("/api/v1/ssh-keys", &key).await.created();
    vec![
        ("/api/v1/admin/skus/{id}", sku),
        ("/api/v1/admin/nodes/{id}", node.id),
        ("/api/v1/admin/runtime/entities/{kind}/{id}", node.id),
        ("/api/v1/admin/allocations/{id}", id_of(&allocation)),
        ("/api/v1/allocations/{id}", id_of(&allocation)),
        ("/api/v1/ssh-keys/{id}", id_of(&key)),
    ]
}

/// The path with an existing thing in it.
fn filled(path: &str, things: &[(&str, Uuid)]) -> String {
    if !path.contains('{') {
        return path.to_owned();
    }
    let (_, id) = things
        .iter()
        .find(|(prefix, _)| path.starts_with(prefix))
        .unwrap_or_else(|| panic!("the sweep has nothing to put into {path}: make one in `things`"));
    let path = path.replace("{id}", &id.to_string()).replace("{kind}", "node");
    assert!(!path.contains('{'), "the sweep does not know every parameter of {path}");
    path
}

struct Operation {
    method: Method,
    path: String,
    described: Value,
}

/// Reading first, then changing, then deleting; each in the order of the paths.
fn operations(description: &Value) -> Vec<Operation> {
    let paths = description["paths"].as_object().expect("the description has paths");
    let mut all = Vec::new();
    for (path, item) in paths {
        for (method, described) in item.as_object().expect("a path has operations") {
            let method = Method::from_bytes(method.to_uppercase().as_bytes()).expect("a method");
            all.push(Operation { method, path: path.clone(), described: described.clone() });
        }
    }
    let order =
        |method: &Method| ["GET", "PATCH", "PUT", "POST", "DELETE"].iter().position(|one| *one == method.as_str());
    all.sort_by_key(|it| (order(&it.method), it.path.clone()));
    all
}

/// The status. The description lists it for this operation, and the code of a refusal with it.
async fn tried(by: &Client, operation: &Operation, path: &str) -> u16 {
    let Operation { method, described, .. } = operation;
    let mut request = by.request(method.clone(), path);
    if method == Method::POST {
        request = request.header("Idempotency-Key", Uuid::new_v4().to_string());
    }
    let example = &described["requestBody"]["content"]["application/json"]["example"];
    if !example.is_null() {
        request = request.json(example);
    }
    let answer = request.send().await.unwrap_or_else(|error| panic!("{method} {path}: no answer: {error:?}"));
    let status = answer.status().as_u16();
    let listed = &described["responses"][status.to_string()];
    assert!(listed.is_object(), "{method} {path} answers {status}, which its description does not list");
    // A stream of events has no end to wait for.
    if status < 400 {
        return status;
    }
    let body: Value = answer.json().await.expect("a refusal is JSON");
    let code = body["code"].as_str().unwrap_or_else(|| panic!("{method} {path}: no code in {body}"));
    let codes = listed["x-error-codes"].as_array().expect("the description lists codes");
    assert!(codes.iter().any(|one| one == code), "{method} {path} answers {code}, which is none of {codes:?}");
    status
}

fn expect_shut(operation: &Operation, statuses: &BTreeMap<&str, u16>) {
    let Operation { method, path, described } = operation;
    let status = |who: &str| statuses[who];
    let shut = |who: &str| matches!(status(who), 401 | 403);
    if described["security"].is_null() {
        assert!(!statuses.keys().any(|who| shut(who)), "{method} {path} asks for no token: {statuses:?}");
        return;
    }
    for who in ["anonymous", "garbage", "expired admin"] {
        assert_eq!(status(who), 401, "{method} {path} for {who}");
    }
    assert_eq!(status("no role"), 403, "{method} {path}");
    let for_admins = path.starts_with("/api/v1/admin/");
    for who in ["other user", "user"] {
        assert_eq!(shut(who), for_admins, "{method} {path} for {who}: {statuses:?}");
    }
    assert!(!shut("admin"), "{method} {path} for admin");
    // What is another's is not there.
    if !for_admins && path.contains("{id}") {
        assert_eq!(status("other user"), 404, "{method} {path}");
        assert!(status("user") < 300, "{method} {path}: {statuses:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_gives_everybody_what_is_theirs_and_no_more() {
    let mut world = World::start().await;
    let description = world.stranger().get("/api/v1/openapi.json").await.ok();
    let things = things(&mut world).await;
    let identities = identities(&world);
    let columns: Vec<_> = identities.iter().map(|identity| identity.name).collect();
    let mut table = format!("{:<64} {}\n", "", columns.join(" | "));
    for operation in operations(&description) {
        let path = filled(&operation.path, &things);
        let (mut cells, mut statuses) = (Vec::new(), BTreeMap::new());
        for Identity { name, caller } in &identities {
            let status = tried(caller, &operation, &path).await;
            statuses.insert(*name, status);
            cells.push(format!("{status:<width$}", width = name.len()));
        }
        expect_shut(&operation, &statuses);
        let route = format!("{} {}", operation.method, operation.path);
        writeln!(table, "{route:<64} {}", cells.join(" | ")).unwrap();
    }
    insta::assert_snapshot!("public_api", table);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_of_the_node_api_is_a_nodes_own() {
    let mut world = World::start().await;
    let (own, other, gone) =
        (world.register("swept").await, world.register("swept").await, world.register("swept").await);
    let bundle = world.bundle(&own).await;
    let agent = HandAgent::enroll(&bundle, 8).await;
    let other = HandAgent::enroll(&world.bundle(&other).await, 8).await;
    let removed = HandAgent::onboard(&world.bundle(&gone).await, 8).await;
    gone.expect_state("active").await;
    gone.order("retire").await.accepted();
    gone.order("remove").await.accepted();
    gone.expect_state("removed").await;

    let nobody = anonymous(&bundle);
    let mut table = format!("{:<60} own | none | another node's | a removed node's, at its path\n", "certificate:");
    for route in PAGE {
        let (method, path) = (Method::from_bytes(route.method.as_bytes()).unwrap(), route.path);
        let path = path.trim_start_matches("/internal/v1/nodes/{id}/").replace("{task_id}", &Uuid::nil().to_string());
        let path = if path.ends_with("/wait") { format!("{path}?timeout_seconds=1") } else { path };
        let (none, others) = (&nobody, other.client_without_pool());
        let removeds = removed.client_without_pool();
        let own = agent.client_without_pool();
        let tries =
            [(&own, agent.node_id), (none, agent.node_id), (&others, agent.node_id), (&removeds, removed.node_id)];
        let mut cells = Vec::new();
        for (http, at) in tries {
            let request = agent.request_with(http, at, method.clone(), &path);
            let request = if method == Method::POST { request.json(&json!({})) } else { request };
            let answer = answer_to(request).await.unwrap_or_else(|error| panic!("{path}: no answer: {error:?}"));
            if answer.status.is_client_error() {
                answer.in_envelope();
                let listed = route.codes().any(|code| code.as_str() == answer.code());
                assert!(listed, "{path} answers {}, which its table does not list", answer.code());
            }
            let reason = answer.body["details"]["reason"].as_str().unwrap_or_default();
            cells.push(format!("{} {reason}", answer.status.as_u16()).trim_end().to_owned());
            let is_own = at == agent.node_id && std::ptr::eq(http, &raw const own);
            if route.shows == Shows::Certificate && !is_own {
                assert_eq!(answer.status, StatusCode::UNAUTHORIZED, "{path}: {answer}");
            }
        }
        writeln!(table, "{:<60} {}", format!("{} {}", route.method, route.path), cells.join(" | ")).unwrap();
    }
    insta::assert_snapshot!("node_api", table);
    world.end().await;
}
