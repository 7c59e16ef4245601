//! The rotation of the service's own keys by an operator.

use super::harness::{ApiHarness, TestResponse, without_ids};
use crate::trust::current_keys::Keys;
use domain::policy::PolicyKey;
use serde_json::{Value, json};
use wire::Verifiers;
use wire::verifier_set::{KeyStatus, VerifierSet};

async fn rotate(api: &ApiHarness, step: &str, body: &Value) -> TestResponse {
    api.post(&format!("/api/v1/admin/keys/{step}")).admin().json(body).send().await
}

async fn staged(api: &ApiHarness, purpose: &str) -> String {
    let answer = rotate(api, "stage", &json!({ "purpose": purpose, "reason": "a year has passed" })).await;
    answer.is(201)["key_id"].as_str().unwrap().to_owned()
}

fn step(purpose: &str, id: &str, force: bool) -> Value {
    json!({ "purpose": purpose, "key_id": id, "reason": "a year has passed", "force": force })
}

/// The phases of the keys of a purpose, in their order.
async fn phases(api: &ApiHarness, purpose: &str) -> Vec<(String, String)> {
    let all = api.get("/api/v1/admin/keys").admin().send().await;
    let sets = all.is(200)["sets"].as_array().unwrap().clone();
    let set = sets.into_iter().find(|set| set["purpose"] == purpose).unwrap();
    let text = |key: &Value, name: &str| key[name].as_str().unwrap().to_owned();
    set["keys"].as_array().unwrap().iter().map(|key| (text(key, "key_id"), text(key, "phase"))).collect()
}

/// The keys as another replica reads them.
async fn read(api: &ApiHarness) -> Keys {
    let trust = &api.app.trust;
    Keys::read(&trust.secrets, &api.app.reads, &trust.domain).await.unwrap()
}

#[tokio::test]
async fn task_key_passes_its_phases_and_an_agent_that_missed_them_follows_the_chain() {
    let api = ApiHarness::new().await;
    let bundled = VerifierSet::from_env_value(&api.app.trust.bundled_verifier_keys()).unwrap();
    let [(first, phase)] = phases(&api, "task_signing").await.try_into().unwrap();
    assert_eq!(phase, "active");
    let mut active = first.clone();
    for _ in 0..3 {
        let next = staged(&api, "task_signing").await;
        rotate(&api, "activate", &step("task_signing", &next, false)).await.is(200);
        let early = rotate(&api, "retire", &step("task_signing", &active, false)).await;
        assert!(early.refused(409, "state_conflict")["until"].is_string());
        rotate(&api, "retire", &step("task_signing", &active, true)).await.is(200);
        active = next;
    }
    let keys = read(&api).await;
    let sets = keys.task.sets_after(0);
    assert_eq!(sets.iter().map(|set| set.version).collect::<Vec<_>>(), (1..=9).collect::<Vec<_>>());
    let mut agent = Verifiers::trusting(bundled).unwrap();
    assert_eq!(agent.follow(&sets), Ok(true));
    assert_eq!(agent.version(), 9);
    assert_eq!((agent.current().keys.len(), agent.current().keys[0].status), (1, KeyStatus::Active));
    assert_eq!(agent.current().keys[0].key_id, active);
    // An agent that was set up during the rotation skips the earlier links of the chain.
    let mut young = Verifiers::trusting(VerifierSet { version: 0, ..agent.current().clone() }).unwrap();
    assert!(young.follow(&sets).is_ok());
    // The private halves of retired keys are destroyed.
    for name in keys.orphaned_secrets(chrono::Utc::now()) {
        api.app.trust.secrets.destroy(&name).await.unwrap();
    }
    assert_eq!(api.app.trust.secrets.list("task_signing/").await.unwrap().len(), 1);
    assert_eq!(read(&api).await.task.sets_after(8).len(), 1, "it is read without them");
}

#[tokio::test]
async fn authority_is_trusted_before_it_certifies_and_while_a_node_depends_on_it() {
    let api = ApiHarness::new().await;
    api.sku("h100", 1).await;
    let node = api.active_node("h100", 1).await;
    let [(first, _)] = phases(&api, "node_ca").await.try_into().unwrap();
    let second = staged(&api, "node_ca").await;
    let keys = read(&api).await;
    assert_eq!(keys.node.bundle_pem().matches("BEGIN CERTIFICATE").count(), 2, "both are trusted");
    rotate(&api, "activate", &step("node_ca", &second, false)).await.is(200);
    let refused = rotate(&api, "retire", &step("node_ca", &first, false)).await;
    let details = refused.refused(409, "state_conflict");
    assert_eq!((&details["dependents"], &details["nodes"][0]["node_id"]), (&json!(1), &json!(node)));
    let forced = rotate(&api, "retire", &step("node_ca", &first, true)).await;
    assert_eq!(forced.is(200)["cut_off"][0]["node_id"], json!(node));
    assert_eq!(phases(&api, "node_ca").await, [(first, "retired".into()), (second, "active".into())]);
    let keys = read(&api).await;
    assert_eq!(keys.node.bundle_pem().matches("BEGIN CERTIFICATE").count(), 1);
}

#[tokio::test]
async fn repeated_rotation_is_executed_and_audited_once() {
    let api = ApiHarness::new().await;
    let body = json!({ "purpose": "node_ca", "reason": "a year has passed" });
    let ask = || api.post("/api/v1/admin/keys/stage").admin().key("once").json(&body);
    let (first, again) = (ask().send().await, ask().send().await);
    assert_eq!(first.is(201)["key_id"], again.is(201)["key_id"]);
    assert!(again.is_replayed());
    let log = api.get("/api/v1/admin/audit-log?action=keys.stage").admin().send().await;
    let rows = log.is(200)["items"].as_array().unwrap().clone();
    assert_eq!((rows.len(), &rows[0]["metadata"]["purpose"]), (1, &json!("node_ca")));
}

#[tokio::test]
async fn refused_key_operation_names_the_possible_ones() {
    let api = ApiHarness::new().await;
    api.set_policy(PolicyKey::KeysTaskGrace, 3600);
    let [(first, _)] = phases(&api, "task_signing").await.try_into().unwrap();
    let second = staged(&api, "task_signing").await;
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
        let line = rotate(&api, name, &body).await.line();
        lines.push(without_ids(&line.replace(&first, "<first>").replace(&second, "<second>")));
    }
    lines.push(api.get("/api/v1/admin/keys").user("ann").send().await.line());
    insta::assert_snapshot!(lines.join("\n"));
}
