//! What requests with an `Idempotency-Key` write and read: one commit, whose row has all that a repetition is answered from.

use super::billing::{adjust, metered, opened};
use super::harness::{ANNS_KEY, ApiHarness, PlacementOutcome, TestRequest, TestResponse};
use domain::AllocationId;
use domain::allocation::{Allocation, Fact};
use domain::billing_account::{self, BillingAccount};
use serde_json::json;
use test_host::CapturedLog;
use uuid::Uuid;

/// The response, and what was sent to Postgres for it of what concerns commands or writes: a commit, or the statement's first words.
async fn commands_and_writes(request: TestRequest<'_>) -> (TestResponse, Vec<String>) {
    let (log, guard) = CapturedLog::of_statements();
    let response = request.send().await;
    drop(guard);
    let statements = log.statements();
    assert!(
        statements.iter().any(|statement| statement.contains("FOR SHARE")),
        "no commit was captured: {statements:?}"
    );
    let concerns = |statement: &&String| {
        // A connection that was idle is asked whether its session takes writes.
        let is_read =
            statement.starts_with("SHOW") || statement.starts_with("SELECT") && !statement.contains("FOR UPDATE");
        !is_read || statement.contains("FROM command")
    };
    let named = |statement: &String| match statement.split_whitespace().take(3).collect::<Vec<_>>().join(" ") {
        head if head == "-- One batch" => "commit".to_owned(),
        head => head,
    };
    (response, statements.iter().filter(concerns).map(named).collect())
}

async fn rentable(api: &ApiHarness) -> domain::NodeId {
    api.sku("h100x4", 4).await;
    let node = api.active_node("h100x4", 4).await;
    api.set_placement(PlacementOutcome::On(node));
    node
}

fn rent<'a>(api: &'a ApiHarness, key: &str) -> TestRequest<'a> {
    api.post("/api/v1/allocations").user("ann").key(key).json(&json!({"sku": "h100x4", "gpu_count": 1}))
}

fn id_of(response: &TestResponse) -> Uuid {
    response.body["id"].as_str().unwrap().parse().unwrap()
}

/// The commit of a request, and that of its placement by the saga, which may be logged after the response.
#[track_caller]
fn are_commits(statements: &[String]) {
    assert!(statements.len() <= 2 && statements.iter().all(|it| it == "commit"), "{statements:?}");
}

#[track_caller]
fn is_replay(again: &TestResponse, first: &TestResponse) {
    assert!(again.is_replayed() && !first.is_replayed(), "{}", again.body);
    assert_eq!((again.status, &again.body), (first.status, &first.body));
    assert_eq!(again.headers.get("etag"), first.headers.get("etag"));
}

#[tokio::test]
async fn keyed_rental_and_its_release_read_no_command_and_write_nothing_beside_their_commits() {
    let api = ApiHarness::new().await;
    let node = rentable(&api).await;
    let (created, statements) = commands_and_writes(rent(&api, "k")).await;
    assert_eq!(created.is(201)["state"], "provisioning");
    are_commits(&statements);
    let id = id_of(&created);
    api.ask_as_system::<Allocation>(id, Fact::Provisioned { node_id: node }).await;
    let path = format!("/api/v1/allocations/{id}/release");
    let (released, statements) = commands_and_writes(api.post(&path).user("ann").key("r")).await;
    assert_eq!(released.is(202)["state"], "releasing");
    assert_eq!(statements, ["commit"]);
}

#[tokio::test]
async fn keyed_choice_of_a_default_ssh_key_is_one_commit() {
    let api = ApiHarness::new().await;
    let add = |name: &str, key: &str| {
        let body = json!({"name": name, "public_key": key});
        api.post("/api/v1/ssh-keys").user("ann").json(&body).send()
    };
    add("laptop", ANNS_KEY).await.is(201);
    let other = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJdD7y3aLq454yWBdwLWbieU1ebz9/cu7/QEXn9OIeZJ";
    let key = add("desktop", other).await.is(201)["id"].as_str().unwrap().to_owned();
    let choose = || api.post(&format!("/api/v1/ssh-keys/{key}/default")).user("ann").key("k");
    let (chosen, statements) = commands_and_writes(choose()).await;
    assert_eq!(chosen.is(200)["is_default"], true);
    assert_eq!(statements, ["commit"]);
    is_replay(&choose().send().await, &chosen);
}

#[tokio::test]
async fn repetitions_get_the_first_answer_after_the_allocation_has_changed() {
    let api = ApiHarness::new().await;
    let node = rentable(&api).await;
    let first = rent(&api, "k").send().await;
    first.is(201);
    let id = id_of(&first);
    api.ask_as_system::<Allocation>(id, Fact::Provisioned { node_id: node }).await;
    is_replay(&rent(&api, "k").send().await, &first);
    // The same where the first repetition, on another replica, has not stored its response.
    api.lose_responses().await;
    api.post(&format!("/api/v1/allocations/{id}/release")).user("ann").send().await.is(202);
    api.ask_as_system::<Allocation>(id, Fact::Cleaned { node_id: node, attempt: 1 }).await;
    is_replay(&rent(&api, "k").send().await, &first);
    let other = api.post("/api/v1/allocations").user("ann").key("k").json(&json!({"sku": "h100x4", "gpu_count": 2}));
    other.send().await.refused(422, "idempotency_key_reused");
}

#[tokio::test]
async fn queued_rental_is_replayed_as_queued_after_it_was_placed() {
    let api = ApiHarness::new().await;
    let node = rentable(&api).await;
    api.set_placement(PlacementOutcome::NoCapacity);
    let queue = || {
        let body = json!({"sku": "h100x4", "gpu_count": 1, "queue_seconds": 60});
        api.post("/api/v1/allocations").user("ann").key("q").json(&body)
    };
    let (first, statements) = commands_and_writes(queue()).await;
    assert_eq!(first.is(201)["state"], "requested");
    are_commits(&statements);
    let placed = domain::allocation::Placement {
        devices: Vec::new(),
        host: "gpu-17.internal".into(),
        port: 22,
        user_name: "u".into(),
        region_code: "eu-1".into(),
        host_fingerprint: None,
    };
    api.ask_as_system::<Allocation>(id_of(&first), Fact::Reserved { node_id: node, placed }).await;
    is_replay(&queue().send().await, &first);
}

#[tokio::test]
async fn release_is_replayed_with_the_cost_of_its_time_after_the_last_charge() {
    let api = ApiHarness::new().await;
    let node = rentable(&api).await;
    let account = opened(&api).await;
    adjust(&api, account, "k", json!(3_600)).await.is(201);
    let id = id_of(&rent(&api, "k").send().await);
    api.ask_as_system::<Allocation>(id, Fact::Provisioned { node_id: node }).await;
    let from = chrono::Utc::now() - chrono::TimeDelta::seconds(125);
    metered(&api, account, AllocationId(id), from).await;
    let release = || api.post(&format!("/api/v1/allocations/{id}/release")).user("ann").key("r").send();
    let first = release().await;
    assert_eq!(first.is(202)["cost_to_date_minor"], 120);
    let until = Some(from + chrono::TimeDelta::seconds(150));
    let usage = billing_account::Instruction::MeterUsage { allocation_id: AllocationId(id), from: Some(from), until };
    api.ask_as_system::<BillingAccount>(account, usage).await;
    api.ask_as_system::<Allocation>(id, Fact::Cleaned { node_id: node, attempt: 1 }).await;
    let shown = api.get(&format!("/api/v1/allocations/{id}")).user("ann").send().await;
    assert_eq!(shown.is(200)["cost_to_date_minor"], 150);
    for _ in 0..2 {
        is_replay(&release().await, &first);
    }
}

/// A member of the release before this one stores the response itself, and neither what was resolved nor the version of the first answer.
#[tokio::test]
async fn rows_of_the_release_before_are_replayed() {
    let api = ApiHarness::new().await;
    let node = rentable(&api).await;
    let first = rent(&api, "k").send().await;
    let id = id_of(&first);
    first.is(201);
    api.ask_as_system::<Allocation>(id, Fact::Provisioned { node_id: node }).await;
    let release = || api.post(&format!("/api/v1/allocations/{id}/release")).user("ann").key("r").send();
    release().await.is(202);
    let stored = json!({"given": {"status": 201, "etag": "\"7\"", "body": r#"{"as": "it was"}"#}});
    api.store_response_of(id, "request", &stored).await;
    api.forget_what_was_resolved().await;
    let repeated = rent(&api, "k").send().await;
    assert_eq!((repeated.is(201), repeated.is_replayed()), (&json!({"as": "it was"}), true));
    assert_eq!(repeated.headers["etag"], "\"7\"");
    // Its commit without a response: the process ended before it.
    let released = release().await;
    assert_eq!((&released.is(202)["state"], released.is_replayed()), (&json!("releasing"), true));
    assert_eq!(release().await.body, released.body);
}
