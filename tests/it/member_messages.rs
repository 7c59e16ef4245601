//! Messages between members over NATS: they are authenticated, no clocks have to agree, and a crash of an owner delays no request for long.

use async_nats::HeaderMap;
use chrono::TimeDelta;
use domain::allocation::{Allocation, Fact};
use domain::authz::{Action, authorize};
use domain::{AllocationId, BillingAccountId, CommandId, EntityRef, Event, Machine, Principal};
use futures::StreamExt as _;
use nix::sys::signal::Signal;
use reqwest::Method;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tests::cluster::metrics_page::MetricsPage;
use tests::cluster::{AllocationHandle, NodeHandle, TestCluster, WAIT_TIMEOUT};
use uuid::Uuid;

/// The time that a forged message is given to have an effect.
const A_WHILE: Duration = Duration::from_secs(2);

/// A takeover takes three seconds without heartbeats and a heartbeat interval; on a busy machine more. A request whose command is not
/// resent then fails at its deadline of eight seconds.
const TAKEOVER: Duration = Duration::from_secs(20);

#[tokio::test(flavor = "multi_thread")]
async fn unauthenticated_message_on_nats_has_no_effect() {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    cluster.node("h100").await;
    let allocation = cluster.rent_active("h100", 1).await;
    let bus = cluster.bus().await;

    // As a worker of the control plane, directly to the owner of the shard, and as an event with the same reaction.
    let command = forged::<Allocation>(allocation.id, &Fact::Uncovered.into(), Action::Advance);
    let shard = format!("gpuaas.shard.{}", actors::sharding::shard_of(allocation.id));
    let answer = tokio::time::timeout(A_WHILE, bus.request(shard.clone(), command.into())).await;
    assert!(!matches!(answer, Ok(Ok(_))), "a stranger gets an answer: {answer:?}");
    let (account_id, allocation_id) = (BillingAccountId(Uuid::now_v7()), AllocationId(allocation.id));
    let event = Event::AllocationUncovered { account_id, allocation_id };
    let published = json!({ "id": Uuid::now_v7(), "correlationid": "forged", "data": event });
    bus.publish(event.subject(), published.to_string().into()).await.unwrap();
    // A request to all members: to restart a worker.
    let member = cluster.admin.get("/api/v1/admin/runtime/cluster").await.ok()["members"][0]["id"].clone();
    let question = json!({ "restart_worker": { "member": member, "worker": "policy" } });
    let answer = bus.request("gpuaas.runtime.ask", question.to_string().into());
    let answer = tokio::time::timeout(A_WHILE, answer).await;
    assert!(!matches!(answer, Ok(Ok(_))), "a stranger gets an answer: {answer:?}");
    tokio::time::sleep(A_WHILE).await;

    expect_refused_messages(&cluster, "unstamped", 3.0).await;
    assert_eq!(allocation.get().await["state"], "active");
    assert!(cluster.restarts_of("policy").await.values().all(|restarts| *restarts == 0));
    release_and_shut_down(cluster, &allocation).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replayed_command_is_executed_once() {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    let (node, owner) = node_and_owner(&mut cluster).await;
    let bus = cluster.bus().await;
    let mut messages = bus.subscribe("gpuaas.shard.*").await.unwrap();
    bus.flush().await.unwrap();
    let path = format!("/api/v1/admin/nodes/{}/enrollment-token", node.id);
    cluster.at_replica(1 - owner, "admin").post(&path, &json!({})).await.created();
    let shard = format!("gpuaas.shard.{}", actors::sharding::shard_of(node.id));
    let of_the_node = |message: &async_nats::Message| {
        message.subject.as_str() == shard && message.payload.windows(11).any(|part| part == b"issue_token")
    };
    let recorded = loop {
        let message =
            tokio::time::timeout(WAIT_TIMEOUT, messages.next()).await.expect("the command goes over NATS").unwrap();
        if of_the_node(&message) {
            break message;
        }
    };
    let issued = async |cluster: &TestCluster| {
        cluster.history_of(node.id).await.into_iter().filter(|step| step.command == "issue_token").count()
    };
    let before = issued(&cluster).await;
    for headers in [recorded.headers.clone().unwrap(), HeaderMap::new()] {
        let subject = recorded.subject.clone();
        let repeated = bus.publish_with_reply_and_headers(subject, bus.new_inbox(), headers, recorded.payload.clone());
        repeated.await.unwrap();
        let reply = recorded.reply.clone().unwrap();
        let repeated = bus.publish_with_reply_and_headers(
            recorded.subject.clone(),
            reply,
            recorded.headers.clone().unwrap(),
            recorded.payload.clone(),
        );
        repeated.await.unwrap();
    }
    for reason in ["forged", "repeated", "unstamped"] {
        expect_refused_messages(&cluster, reason, 1.0).await;
    }
    tokio::time::sleep(A_WHILE).await;
    assert_eq!(issued(&cluster).await, before);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replica_with_a_clock_30_s_off_answers_every_request_and_reports_the_skew() {
    let mut cluster = TestCluster::builder().replicas(2).clock_of(1).start().await;
    let mut nodes = Vec::new();
    for _ in 0..8 {
        nodes.push(cluster.register("h100").await);
    }
    for off in [30, -30] {
        cluster.service_clock.as_ref().unwrap().set_offset(TimeDelta::seconds(off));
        let seen = |report: &Value| {
            let offsets = report["members"].as_array().unwrap().iter().map(|it| it["clock_offset_ms"].as_i64());
            let offsets: Vec<_> = offsets.flatten().collect();
            offsets.len() == 2 && offsets.iter().any(|ms| (ms - off * 1000).abs() < 3000)
        };
        cluster.admin.wait_until("/api/v1/admin/runtime/cluster", "its clock is seen to be off", seen).await;
        for node in &nodes {
            let path = format!("/api/v1/admin/nodes/{}/enrollment-token", node.id);
            for replica in [0, 1] {
                let answer =
                    cluster.at_replica(replica, "admin").send_once(Method::POST, &path, Some(&json!({}))).await;
                assert_eq!(answer.status, 201, "replica {replica}, {off} s: {answer}");
            }
        }
    }
    // The answer to a heartbeat that takes long makes it less exact.
    let is_behind = |page: &MetricsPage| (page.number("member_clock_offset_seconds") + 30.0).abs() < 3.0;
    cluster.wait_for_metrics(1, is_behind).await;
    let warned = |line: &Value| line.to_string().contains("off Postgres' clock");
    assert!(cluster.replica_lines(1).iter().any(warned) && !cluster.replica_lines(0).iter().any(warned));
    cluster.service_clock.as_ref().unwrap().set_offset(TimeDelta::zero());
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn request_in_flight_is_answered_after_the_takeover_when_its_owner_is_killed() {
    expect_answer_after_takeover(Signal::SIGKILL).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn request_in_flight_is_answered_after_the_takeover_when_its_owner_hangs() {
    expect_answer_after_takeover(Signal::SIGSTOP).await;
}

async fn expect_answer_after_takeover(end: Signal) {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    // Of three nodes two have the same owner.
    let mut nodes = Vec::new();
    for _ in 0..3 {
        nodes.push(node_and_owner(&mut cluster).await);
    }
    let owner = usize::from(nodes.iter().filter(|(_, owner)| *owner == 1).count() >= 2);
    let of_owner: Vec<_> = nodes.iter().filter(|(_, by)| *by == owner).map(|(node, _)| node.id).collect();
    let other = cluster.at_replica(1 - owner, "admin");
    // It receives the commands and does not execute them, so that they are in flight when it ends.
    cluster.signal_replica(owner, Signal::SIGSTOP);
    let began = Instant::now();
    let without_an_id = format!("/api/v1/admin/nodes/{}/enrollment-token", of_owner[0]);
    let with_an_id = format!("/api/v1/admin/nodes/{}/quarantine", of_owner[1]);
    let (empty, reason) = (json!({}), json!({ "reason": "it is watched" }));
    let both = async {
        tokio::join!(
            other.send_once(Method::POST, &without_an_id, Some(&empty)),
            other.send_once(Method::POST, &with_an_id, Some(&reason)),
        )
    };
    let ending = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        if end == Signal::SIGKILL {
            cluster.signal_replica(owner, Signal::SIGKILL);
        }
    };
    let ((issued, quarantined), ()) = tokio::join!(both, ending);
    assert!(issued.status.is_success(), "{issued}");
    assert!(quarantined.status.is_success(), "{quarantined}");
    assert!(began.elapsed() < TAKEOVER, "{:?}", began.elapsed());
    for (node, command) in [(of_owner[0], "issue_token"), (of_owner[1], "quarantine")] {
        let steps = cluster.history_of(node).await;
        assert_eq!(steps.iter().filter(|step| step.command == command).count(), 1, "{command}");
    }
    match end {
        Signal::SIGSTOP => cluster.signal_replica(owner, Signal::SIGCONT),
        _ => cluster.restart_replica(owner).await,
    }
    cluster.wait_for_balanced_shards().await;
    cluster.shutdown().await;
}

/// A newly registered node, and the replica that owns it.
async fn node_and_owner(cluster: &mut TestCluster) -> (NodeHandle, usize) {
    let node = cluster.register("h100").await;
    let owner = cluster.owner_of("node", node.id).await;
    (node, owner)
}

/// A command as a member of the previous release sends it, on behalf of a worker.
fn forged<M: Machine>(id: Uuid, command: &M::Command, action: Action) -> Vec<u8> {
    let permit = authorize(&Principal::system("provisioning"), action).unwrap();
    let asked = actors::CommandContext::new(&permit, "forged", chrono::Utc::now() + TimeDelta::seconds(5));
    let key = actors::CommandKey::repeatable(CommandId(Uuid::new_v4()), [0; 32]);
    let entity = EntityRef { kind: M::KIND, id };
    json!({ "v": 1, "entity": entity, "asked": asked.with_key(key), "command": command }).to_string().into_bytes()
}

/// Waits until the replicas have refused this many messages for this reason.
async fn expect_refused_messages(cluster: &TestCluster, reason: &str, count: f64) {
    let until = Instant::now() + WAIT_TIMEOUT;
    loop {
        let refused = cluster.metric_total("member_messages_refused_total", &[("reason", reason)]).await;
        if refused >= count {
            return;
        }
        assert!(Instant::now() < until, "{reason}: {refused} messages were refused");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn release_and_shut_down(cluster: TestCluster, allocation: &AllocationHandle) {
    allocation.release_fully().await;
    cluster.shutdown().await;
}
