//! Keys of the service, rotated by an operator.

use super::world::{Answer, World, without_ids};
use crate::keys::Keys;
use domain::policy::Key;
use serde_json::{Value, json};
use wire::Verifiers;
use wire::keys::{KeyStatus, VerifierSet};

async fn rotate(world: &World, step: &str, body: &Value) -> Answer {
    world.post(&format!("/api/v1/admin/keys/{step}")).admin().json(body).send().await
}

async fn staged(world: &World, purpose: &str) -> String {
    let answer = rotate(world, "stage", &json!({ "purpose": purpose, "reason": "a year has passed" })).await;
    answer.is(201)["key_id"].as_str().unwrap().to_owned()
}

fn step(purpose: &str, id: &str, force: bool) -> Value {
    json!({ "purpose": purpose, "key_id": id, "reason": "a year has passed", "force": force })
}

/// The phases of the keys of a purpose, in their order.
async fn phases(world: &World, purpose: &str) -> Vec<(String, String)> {
    let all = world.get("/api/v1/admin/keys").admin().send().await;
    let sets = all.is(200)["sets"].as_array().unwrap().clone();
    let set = sets.into_iter().find(|set| set["purpose"] == purpose).unwrap();
    let text = |key: &Value, name: &str| key[name].as_str().unwrap().to_owned();
    set["keys"].as_array().unwrap().iter().map(|key| (text(key, "key_id"), text(key, "phase"))).collect()
}

/// The keys as another replica reads them.
async fn read(world: &World) -> Keys {
    let trust = &world.services.trust;
    Keys::read(&trust.secrets, &world.services.reads, &trust.domain).await.unwrap()
}

#[tokio::test]
async fn a_task_key_goes_through_its_phases_and_whoever_slept_through_all_of_it_follows_the_chain() {
    let world = World::new().await;
    let bundled = VerifierSet::from_env_value(&world.services.trust.bundled_verifier_keys()).unwrap();
    let [(first, phase)] = phases(&world, "task_signing").await.try_into().unwrap();
    assert_eq!(phase, "active");
    let mut active = first.clone();
    for _ in 0..3 {
        let next = staged(&world, "task_signing").await;
        rotate(&world, "activate", &step("task_signing", &next, false)).await.is(200);
        let early = rotate(&world, "retire", &step("task_signing", &active, false)).await;
        assert!(early.refused(409, "state_conflict")["until"].is_string());
        rotate(&world, "retire", &step("task_signing", &active, true)).await.is(200);
        active = next;
    }
    let keys = read(&world).await;
    let sets = keys.task.sets_after(0);
    assert_eq!(sets.iter().map(|set| set.version).collect::<Vec<_>>(), (1..=9).collect::<Vec<_>>());
    let mut agent = Verifiers::trusting(bundled).unwrap();
    assert_eq!(agent.follow(&sets), Ok(true));
    assert_eq!(agent.version(), 9);
    assert_eq!((agent.current().keys.len(), agent.current().keys[0].status), (1, KeyStatus::Active));
    assert_eq!(agent.current().keys[0].key_id, active);
    // One that was set up in the middle passes over what was before it.
    let mut young = Verifiers::trusting(VerifierSet { version: 0, ..agent.current().clone() }).unwrap();
    assert!(young.follow(&sets).is_ok());
    // The private halves of what is retired are nowhere.
    for name in keys.forsaken(chrono::Utc::now()) {
        world.services.trust.secrets.destroy(&name).await.unwrap();
    }
    assert_eq!(world.services.trust.secrets.list("task_signing/").await.unwrap().len(), 1);
    assert_eq!(read(&world).await.task.sets_after(8).len(), 1, "it is read without them");
}

#[tokio::test]
async fn an_authority_is_trusted_before_it_certifies_and_as_long_as_a_node_needs_it() {
    let world = World::new().await;
    world.sku("h100", 1).await;
    let node = world.active_node("h100", 1).await;
    let [(first, _)] = phases(&world, "node_ca").await.try_into().unwrap();
    let second = staged(&world, "node_ca").await;
    let keys = read(&world).await;
    assert_eq!(keys.node.bundle_pem().matches("BEGIN CERTIFICATE").count(), 2, "both are trusted");
    rotate(&world, "activate", &step("node_ca", &second, false)).await.is(200);
    let refused = rotate(&world, "retire", &step("node_ca", &first, false)).await;
    let details = refused.refused(409, "state_conflict");
    assert_eq!((&details["dependents"], &details["nodes"][0]["node_id"]), (&json!(1), &json!(node)));
    let forced = rotate(&world, "retire", &step("node_ca", &first, true)).await;
    assert_eq!(forced.is(200)["cut_off"][0]["node_id"], json!(node));
    assert_eq!(phases(&world, "node_ca").await, [(first, "retired".into()), (second, "active".into())]);
    let keys = read(&world).await;
    assert_eq!(keys.node.bundle_pem().matches("BEGIN CERTIFICATE").count(), 1);
}

#[tokio::test]
async fn a_rotation_is_asked_once_however_often_it_is_sent_and_audited_once() {
    let world = World::new().await;
    let body = json!({ "purpose": "node_ca", "reason": "a year has passed" });
    let ask = || world.post("/api/v1/admin/keys/stage").admin().key("once").json(&body);
    let (first, again) = (ask().send().await, ask().send().await);
    assert_eq!(first.is(201)["key_id"], again.is(201)["key_id"]);
    assert!(again.is_replayed());
    let log = world.get("/api/v1/admin/audit-log?action=keys.stage").admin().send().await;
    let rows = log.is(200)["items"].as_array().unwrap().clone();
    assert_eq!((rows.len(), &rows[0]["metadata"]["purpose"]), (1, &json!("node_ca")));
}

#[tokio::test]
async fn what_cannot_be_done_with_a_key_says_what_can() {
    let world = World::new().await;
    world.set_policy(Key::KeysTaskGrace, 3600);
    let [(first, _)] = phases(&world, "task_signing").await.try_into().unwrap();
    let second = staged(&world, "task_signing").await;
    let mut lines = Vec::new();
    for (name, body) in [
        ("stage", json!({ "purpose": "task_signing", "reason": "again" })),
        ("activate", step("task_signing", "nobody", false)),
        ("activate", step("task_signing", &first, false)),
        ("retire", step("task_signing", &first, true)),
        ("activate", step("task_signing", "not an id", false)),
        ("activate", json!({ "purpose": "at_rest", "key_id": "a", "reason": "r" })),
        ("stage", json!({ "purpose": "task_signing" })),
    ] {
        let line = rotate(&world, name, &body).await.line();
        lines.push(without_ids(&line.replace(&first, "<first>").replace(&second, "<second>")));
    }
    lines.push(world.get("/api/v1/admin/keys").user("ann").send().await.line());
    insta::assert_snapshot!(lines.join("\n"));
}
