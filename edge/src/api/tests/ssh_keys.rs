//! A user's SSH keys.

use super::harness::{ANNS_KEY, ApiHarness};
use axum::http::Method;
use domain::allocation::{Allocation, Fact};
use serde_json::{Value, json};

const SECOND: &str = "ecdsa-sha2-nistp256 AAAAE2VjZHNhLXNoYTItbmlzdHAyNTYAAAAIbmlzdHAyNTYAAABBBBME4DMtcCQzfrvuQU5iY9qIMAkq4TTFoGh0T21WpxVhwbP1FyKF70/N2AKNDD5TSMddiGmDlrhfM0U5a41GC1g=";

async fn keys(api: &ApiHarness, query: &str) -> Value {
    api.get(&format!("/api/v1/ssh-keys{query}")).user("ann").send().await.is(200).clone()
}

#[tokio::test]
async fn user_registers_keys_and_has_one_default() {
    let api = ApiHarness::new().await;
    let add = |name: &str, key: &str| {
        api.post("/api/v1/ssh-keys").user("ann").json(&json!({"name": name, "public_key": key}))
    };
    assert_eq!(keys(&api, "").await, json!({"items": [], "next_page": null}));
    let first = add("laptop", ANNS_KEY).send().await;
    let key = first.is(201);
    assert_eq!(key["fingerprint"], "SHA256:awLufrjqBI9Fx8fOe4VPSG8EbAofMyKsZudqfQggrNU");
    assert_eq!(
        (&key["owner_user_id"], &key["is_default"], &key["created_by"]),
        (&json!("ann"), &json!(true), &json!("user:ann"))
    );
    assert!(!key["public_key"].as_str().unwrap().contains("ann@laptop"));
    let second = add("desk", SECOND).send().await;
    assert_eq!(second.is(201)["is_default"], false);

    let path = format!("/api/v1/ssh-keys/{}", second.body["id"].as_str().unwrap());
    let made = api.post(&format!("{path}/default")).user("ann").send().await;
    assert_eq!(made.is(200)["is_default"], true);
    let page = keys(&api, "?limit=1").await;
    assert_eq!(page["items"][0]["name"], "laptop");
    assert_eq!(page["items"][0]["is_default"], false);
    let token = page["next_page"].as_str().unwrap();
    let rest = keys(&api, &format!("?limit=1&page_token={token}")).await;
    assert_eq!((&rest["items"][0]["name"], &rest["next_page"]), (&json!("desk"), &Value::Null));

    let lines = [
        add("again", ANNS_KEY).send().await,
        add("", ANNS_KEY).send().await,
        add("a\u{7}b", ANNS_KEY).send().await,
        add("private", "-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----\n").send().await,
        add("option", &format!("command=\"/bin/sh\" {ANNS_KEY}")).send().await,
        add("dsa", "ssh-dss AAAAB3NzaC1kc3M=").send().await,
        add("long", &"x".repeat(9000)).send().await,
        api.call(Method::DELETE, "/api/v1/ssh-keys/018f4e2a-7c1b-7000-8000-000000000001").user("ann").send().await,
        api.call(Method::DELETE, &path).user("bob").send().await,
        api.post(&format!("{path}/default")).user("bob").send().await,
        api.call(Method::DELETE, "/api/v1/ssh-keys/7").user("ann").send().await,
    ]
    .map(|answer| answer.line());
    insta::assert_snapshot!(lines.join("\n"));

    assert_eq!(api.call(Method::DELETE, &path).user("ann").send().await.status, 204);
    let left = keys(&api, "").await;
    assert_eq!((left["items"].as_array().unwrap().len(), &left["items"][0]["is_default"]), (1, &json!(true)));
}

#[tokio::test]
async fn administrator_sets_the_default_among_a_users_own_keys_and_deletes_one() {
    let api = ApiHarness::new().await;
    let first = add(&api, "ann", "laptop", ANNS_KEY).await;
    let second = add(&api, "ann", "desk", SECOND).await;
    let of_ann = "/api/v1/admin/users/ann/ssh-keys";
    let make_default = |key: &str| api.post(&format!("{of_ann}/{key}/default"));
    make_default(&second).user("bob").send().await.refused(403, "forbidden");
    make_default(&second).user("ann").send().await.refused(403, "forbidden");
    api.get(of_ann).user("ann").send().await.refused(403, "forbidden");
    // Under another user the key is not found.
    api.post(&format!("/api/v1/admin/users/bob/ssh-keys/{second}/default"))
        .admin()
        .send()
        .await
        .refused(404, "not_found");

    let made = make_default(&second).admin().send().await;
    assert_eq!((&made.is(200)["is_default"], &made.body["owner_user_id"]), (&json!(true), &json!("ann")));
    let listed = api.get(of_ann).admin().send().await;
    let defaults: Vec<&Value> =
        listed.is(200)["items"].as_array().unwrap().iter().map(|key| &key["is_default"]).collect();
    assert_eq!(defaults, [false, true]);
    assert_eq!(keys(&api, "").await, listed.body);

    assert_eq!(api.call(Method::DELETE, &format!("{of_ann}/{second}")).admin().send().await.status, 204);
    let left = keys(&api, "").await;
    assert_eq!((&left["items"][0]["id"], &left["items"][0]["is_default"]), (&json!(first), &json!(true)));
    // The audit log names the administrator.
    let log = api.get("/api/v1/admin/audit-log?target_kind=tenant").admin().send().await;
    let rows = log.is(200)["items"].as_array().unwrap();
    let by_others = rows.iter().filter(|row| row["actor"] != "user:ann");
    let done: Vec<&Value> =
        by_others.filter(|row| row["metadata"]["result"] == "ok").map(|row| &row["action"]).collect();
    assert_eq!(done, ["ssh_keys.delete", "ssh_keys.make_default"], "{log:?}");
}

async fn add(api: &ApiHarness, user: &str, name: &str, key: &str) -> String {
    let body = json!({"name": name, "public_key": key});
    let added = api.post("/api/v1/ssh-keys").user(user).json(&body).send().await;
    added.is(201)["id"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn malformed_weak_and_private_ssh_keys_are_refused_by_cause() {
    let api = ApiHarness::new().await;
    let weak_rsa = "ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAAAgQC7Vd0S3YxLhY0W5h8yM7cXo9sYv3hX1xvZ2Q8nC0mZ0w==";
    for (what, key) in [
        ("an option", format!("command=\"/bin/sh\" {ANNS_KEY}")),
        ("an environment", format!("environment=\"PATH=/tmp\" {ANNS_KEY}")),
        ("a second line", format!("{ANNS_KEY}\n{ANNS_KEY}")),
        ("a carriage return", format!("{ANNS_KEY}\rssh-ed25519 AAAA")),
        ("a NUL", format!("{ANNS_KEY}\0")),
        ("DSA", "ssh-dss AAAAB3NzaC1kc3MAAACBAJ8=".into()),
        ("a short RSA key", weak_rsa.into()),
        ("a certificate", ANNS_KEY.replacen("ssh-ed25519", "ssh-ed25519-cert-v01@openssh.com", 1)),
        (
            "a private key",
            "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaA==\n-----END OPENSSH PRIVATE KEY-----\n".into(),
        ),
        ("another type than it says", ANNS_KEY.replacen("ssh-ed25519", "ssh-rsa", 1)),
        ("nothing", String::new()),
    ] {
        let answer =
            api.post("/api/v1/ssh-keys").user("ann").json(&json!({"name": "k", "public_key": key})).send().await;
        answer.refused(400, "invalid_request");
        let output = answer.body["message"].as_str().unwrap();
        // A NUL is refused before the key is looked up.
        assert!(output.contains("public_key") || what == "a NUL", "{what}: {output}");
        assert!(!answer.body.to_string().contains("b3BlbnNzaA"), "{what}: {output}");
    }
    assert_eq!(keys(&api, "").await["items"], json!([]));
}

#[tokio::test]
async fn ssh_keys_of_an_allocation_are_chosen_from_the_users_own() {
    let (api, node) = ApiHarness::with_free_node().await;
    let first = add(&api, "ann", "laptop", ANNS_KEY).await;
    let second = add(&api, "ann", "desk", SECOND).await;
    let bobs = add(&api, "bob", "bobs", ANNS_KEY).await;
    let wanted = json!({"sku": "h100x4", "gpu_count": 1});
    let made = api.post("/api/v1/allocations").user("ann").key("k").json(&wanted).send().await;
    let id: uuid::Uuid = made.is(201)["id"].as_str().unwrap().parse().unwrap();
    api.ask_as_system::<Allocation>(id, Fact::Provisioned { node_id: node }).await;
    let path = format!("/api/v1/allocations/{id}/ssh-keys");
    let choose = |keys: Value| api.call(Method::PUT, &path).json(&json!({"ssh_key_ids": keys}));

    let chosen = choose(json!([second])).user("ann").send().await;
    let ssh = &chosen.is(200)["ssh"];
    assert_eq!((ssh["key_fingerprints"].as_array().unwrap().len(), &ssh["keys_written"]), (1, &json!(false)));
    let notified = Fact::LoginsWritten { node_id: node, revision: 1 };
    api.ask_as_system::<Allocation>(id, notified).await;
    let seen = api.get(&format!("/api/v1/allocations/{id}")).user("ann").send().await;
    assert_eq!(seen.is(200)["ssh"]["keys_written"], true);
    // The same choice again changes nothing.
    let repeated = choose(json!([second])).user("ann").send().await;
    assert_eq!(
        (repeated.is(200)["generation"].clone(), &repeated.body["ssh"]["keys_written"]),
        (seen.body["generation"].clone(), &json!(true))
    );
    assert_eq!(
        choose(json!([first, second])).admin().send().await.is(200)["ssh"]["key_fingerprints"]
            .as_array()
            .unwrap()
            .len(),
        2
    );
    assert_eq!(choose(json!([])).user("ann").send().await.is(200)["ssh"]["key_fingerprints"], json!([]));
    let default = choose(Value::Null).user("ann").send().await;
    assert_eq!(
        default.is(200)["ssh"]["key_fingerprints"],
        json!(["SHA256:awLufrjqBI9Fx8fOe4VPSG8EbAofMyKsZudqfQggrNU"])
    );

    choose(json!([first])).user("bob").send().await.refused(404, "not_found");
    for foreign in [json!([bobs]), json!([first, uuid::Uuid::nil()])] {
        let refused = choose(foreign).user("ann").send().await;
        assert_eq!(refused.refused(400, "invalid_request")["field"], "ssh_key_ids");
    }
    let many: Vec<_> = (0..33).map(uuid::Uuid::from_u128).collect();
    choose(json!(many)).user("ann").send().await.refused(400, "invalid_request");
    choose(json!("all")).user("ann").send().await.refused(400, "invalid_request");
    api.call(Method::PUT, &path).user("ann").json(&json!({})).send().await.refused(400, "invalid_request");
    api.post(&format!("/api/v1/allocations/{id}/release")).user("ann").send().await.is(202);
    choose(json!([first])).user("ann").send().await.refused(409, "state_conflict");
}

#[tokio::test]
async fn ssh_key_is_readable_by_its_user_and_administrators_alone() {
    let api = ApiHarness::new().await;
    let key = json!({"name": "laptop", "public_key": ANNS_KEY});
    let key = api.post("/api/v1/ssh-keys").user("ann").json(&key).send().await.is(201).clone();
    let id = key["id"].as_str().unwrap();
    let path = format!("/api/v1/ssh-keys/{id}");
    assert_eq!(api.get(&path).user("ann").send().await.is(200), &key);
    api.get(&path).user("bob").send().await.refused(404, "not_found");
    assert_eq!(api.get(&format!("/api/v1/admin/users/ann/ssh-keys/{id}")).admin().send().await.is(200), &key);
}
