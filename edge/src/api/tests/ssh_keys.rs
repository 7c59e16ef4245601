//! A user's SSH keys.

use super::world::{ANNS_KEY, World};
use axum::http::Method;
use serde_json::{Value, json};

const SECOND: &str = "ecdsa-sha2-nistp256 AAAAE2VjZHNhLXNoYTItbmlzdHAyNTYAAAAIbmlzdHAyNTYAAABBBBME4DMtcCQzfrvuQU5iY9qIMAkq4TTFoGh0T21WpxVhwbP1FyKF70/N2AKNDD5TSMddiGmDlrhfM0U5a41GC1g=";

async fn keys(world: &World, query: &str) -> Value {
    world.get(&format!("/api/v1/ssh-keys{query}")).user("ann").send().await.is(200).clone()
}

#[tokio::test]
async fn a_user_keeps_keys_and_has_one_default() {
    let world = World::new().await;
    let add = |name: &str, key: &str| {
        world.post("/api/v1/ssh-keys").user("ann").json(&json!({"name": name, "public_key": key}))
    };
    assert_eq!(keys(&world, "").await, json!({"items": [], "next_page": null}));
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
    let made = world.post(&format!("{path}/default")).user("ann").send().await;
    assert_eq!(made.is(200)["is_default"], true);
    let page = keys(&world, "?limit=1").await;
    assert_eq!(page["items"][0]["name"], "laptop");
    assert_eq!(page["items"][0]["is_default"], false);
    let token = page["next_page"].as_str().unwrap();
    let rest = keys(&world, &format!("?limit=1&page_token={token}")).await;
    assert_eq!((&rest["items"][0]["name"], &rest["next_page"]), (&json!("desk"), &Value::Null));

    let lines = [
        add("again", ANNS_KEY).send().await,
        add("", ANNS_KEY).send().await,
        add("a\u{7}b", ANNS_KEY).send().await,
        add("private", "-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----\n").send().await,
        add("option", &format!("command=\"/bin/sh\" {ANNS_KEY}")).send().await,
        add("dsa", "ssh-dss AAAAB3NzaC1kc3M=").send().await,
        add("long", &"x".repeat(9000)).send().await,
        world.call(Method::DELETE, "/api/v1/ssh-keys/018f4e2a-7c1b-7000-8000-000000000001").user("ann").send().await,
        world.call(Method::DELETE, &path).user("bob").send().await,
        world.post(&format!("{path}/default")).user("bob").send().await,
        world.call(Method::DELETE, "/api/v1/ssh-keys/7").user("ann").send().await,
    ]
    .map(|answer| answer.line());
    insta::assert_snapshot!(lines.join("\n"));

    assert_eq!(world.call(Method::DELETE, &path).user("ann").send().await.status, 204);
    let left = keys(&world, "").await;
    assert_eq!((left["items"].as_array().unwrap().len(), &left["items"][0]["is_default"]), (1, &json!(true)));
}
