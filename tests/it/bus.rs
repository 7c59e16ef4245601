//! What members send each other over NATS: nobody else is believed, no clock has to agree, and an owner that dies is not waited for.

use async_nats::HeaderMap;
use chrono::TimeDelta;
use domain::allocation::{Allocation, Command};
use domain::authz::{Action, authorize};
use domain::{AllocationId, BillingAccountId, CommandId, EntityRef, Event, Machine, Principal};
use futures::StreamExt as _;
use nix::sys::signal::Signal;
use reqwest::Method;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tests::world::{OnboardedNode, Rented, World};
use uuid::Uuid;

/// How long a forged message gets to have an effect.
const A_WHILE: Duration = Duration::from_secs(2);

/// A takeover takes three seconds of silence and a turn; on a busy machine more.
const TAKEOVER: Duration = Duration::from_millis(6500);

#[tokio::test(flavor = "multi_thread")]
async fn message_of_a_stranger_on_nats_has_no_effect() {
    let mut world = World::plan().replicas(2).start().await;
    world.node("h100").await;
    let allocation = world.rent("h100", 1).await;
    allocation.expect_state("active").await;
    let bus = world.bus().await;

    // As a worker of the control plane, straight to the owner of the shard, and as an event that leads to the same.
    let command = forged::<Allocation>(allocation.id, &Command::Uncover, Action::Advance);
    let shard = format!("gpuaas.shard.{}", actors::place::shard_of(allocation.id));
    let answer = tokio::time::timeout(A_WHILE, bus.request(shard.clone(), command.into())).await;
    assert!(!matches!(answer, Ok(Ok(_))), "a stranger gets an answer: {answer:?}");
    let (account_id, allocation_id) = (BillingAccountId(Uuid::now_v7()), AllocationId(allocation.id));
    let event = Event::AllocationUncovered { account_id, allocation_id };
    let published = json!({ "id": Uuid::now_v7(), "correlationid": "forged", "data": event });
    bus.publish(event.subject(), published.to_string().into()).await.unwrap();
    // A question to all: to start a worker anew.
    let member = world.admin.get("/api/v1/admin/runtime/cluster").await.ok()["members"][0]["id"].clone();
    let question = json!({ "restart_worker": { "member": member, "worker": "policy" } });
    let answer = bus.request("gpuaas.runtime.ask", question.to_string().into());
    let answer = tokio::time::timeout(A_WHILE, answer).await;
    assert!(!matches!(answer, Ok(Ok(_))), "a stranger gets an answer: {answer:?}");
    tokio::time::sleep(A_WHILE).await;

    assert_eq!(allocation.get().await["state"], "active");
    assert!(restarts_of(&world, "policy").await.iter().all(|restarts| *restarts == 0));
    let refused = refused(&world, "unstamped").await;
    assert!(refused >= 3.0, "{refused} messages were refused");
    released(world, &allocation).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn command_that_is_recorded_and_sent_again_is_carried_out_once() {
    let mut world = World::plan().replicas(2).start().await;
    let (node, owner) = node_and_owner(&mut world).await;
    let bus = world.bus().await;
    let mut heard = bus.subscribe("gpuaas.shard.*").await.unwrap();
    bus.flush().await.unwrap();
    let path = format!("/api/v1/admin/nodes/{}/enrollment-token", node.id);
    world.at_replica(1 - owner, "admin").post(&path, &json!({})).await.created();
    let shard = format!("gpuaas.shard.{}", actors::place::shard_of(node.id));
    let of_the_node = |message: &async_nats::Message| {
        message.subject.as_str() == shard && message.payload.windows(11).any(|part| part == b"issue_token")
    };
    let recorded = loop {
        let message = tokio::time::timeout(A_WHILE, heard.next()).await.expect("the command goes over NATS").unwrap();
        if of_the_node(&message) {
            break message;
        }
    };
    let issued = async |world: &World| {
        world.history_of(node.id).await.into_iter().filter(|step| step.command == "issue_token").count()
    };
    let before = issued(&world).await;
    for headers in [recorded.headers.clone().unwrap(), HeaderMap::new()] {
        let subject = recorded.subject.clone();
        let again = bus.publish_with_reply_and_headers(subject, bus.new_inbox(), headers, recorded.payload.clone());
        again.await.unwrap();
        let reply = recorded.reply.clone().unwrap();
        let again = bus.publish_with_reply_and_headers(
            recorded.subject.clone(),
            reply,
            recorded.headers.clone().unwrap(),
            recorded.payload.clone(),
        );
        again.await.unwrap();
    }
    tokio::time::sleep(A_WHILE).await;
    assert_eq!(issued(&world).await, before);
    for reason in ["forged", "repeated", "unstamped"] {
        assert!(refused(&world, reason).await > 0.0, "{reason}");
    }
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replica_whose_clock_is_30_s_off_answers_every_request_and_says_so() {
    let mut world = World::plan().replicas(2).clock_of(1).start().await;
    let mut nodes = Vec::new();
    for _ in 0..8 {
        nodes.push(world.register("h100").await);
    }
    for off in [30, -30] {
        world.service_clock.as_ref().unwrap().put(TimeDelta::seconds(off));
        let seen = |report: &Value| {
            let offsets = report["members"].as_array().unwrap().iter().map(|it| it["clock_offset_ms"].as_i64());
            let offsets: Vec<_> = offsets.flatten().collect();
            offsets.len() == 2 && offsets.iter().any(|ms| (ms - off * 1000).abs() < 3000)
        };
        world.admin.wait_until("/api/v1/admin/runtime/cluster", "its clock is seen to be off", seen).await;
        for node in &nodes {
            let path = format!("/api/v1/admin/nodes/{}/enrollment-token", node.id);
            for replica in [0, 1] {
                let answer = world.at_replica(replica, "admin").once(Method::POST, &path, Some(&json!({}))).await;
                assert_eq!(answer.status, 201, "replica {replica}, {off} s: {answer}");
            }
        }
    }
    let page = metrics(&world, 1).await;
    let offset = page.lines().find_map(|line| line.strip_prefix("member_clock_offset_seconds ")).unwrap();
    assert!((offset.parse::<f64>().unwrap() + 30.0).abs() < 3.0, "{offset}");
    let warned = |line: &Value| line.to_string().contains("off Postgres' clock");
    assert!(world.replica_lines(1).iter().any(warned) && !world.replica_lines(0).iter().any(warned));
    world.service_clock.as_ref().unwrap().put(TimeDelta::zero());
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn request_in_flight_is_answered_after_the_takeover_when_its_owner_is_killed() {
    answered_after_the_takeover(Signal::SIGKILL).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn request_in_flight_is_answered_after_the_takeover_when_its_owner_hangs() {
    answered_after_the_takeover(Signal::SIGSTOP).await;
}

async fn answered_after_the_takeover(end: Signal) {
    let mut world = World::plan().replicas(2).start().await;
    // Of three nodes two have the same owner.
    let mut nodes = Vec::new();
    for _ in 0..3 {
        nodes.push(node_and_owner(&mut world).await);
    }
    let owner = usize::from(nodes.iter().filter(|(_, owner)| *owner == 1).count() >= 2);
    let of_owner: Vec<_> = nodes.iter().filter(|(_, by)| *by == owner).map(|(node, _)| node.id).collect();
    let other = world.at_replica(1 - owner, "admin");
    // It takes the commands and does nothing with them, so that they are in flight when it ends.
    world.signal_replica(owner, Signal::SIGSTOP);
    let began = Instant::now();
    let without_an_id = format!("/api/v1/admin/nodes/{}/enrollment-token", of_owner[0]);
    let with_an_id = format!("/api/v1/admin/nodes/{}/quarantine", of_owner[1]);
    let (empty, reason) = (json!({}), json!({ "reason": "it is watched" }));
    let both = async {
        tokio::join!(
            other.once(Method::POST, &without_an_id, Some(&empty)),
            other.once(Method::POST, &with_an_id, Some(&reason)),
        )
    };
    let ending = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        if end == Signal::SIGKILL {
            world.signal_replica(owner, Signal::SIGKILL);
        }
    };
    let ((issued, quarantined), ()) = tokio::join!(both, ending);
    assert!(issued.status.is_success(), "{issued}");
    assert!(quarantined.status.is_success(), "{quarantined}");
    assert!(began.elapsed() < TAKEOVER, "{:?}", began.elapsed());
    for (node, command) in [(of_owner[0], "issue_token"), (of_owner[1], "quarantine")] {
        let steps = world.history_of(node).await;
        assert_eq!(steps.iter().filter(|step| step.command == command).count(), 1, "{command}");
    }
    match end {
        Signal::SIGSTOP => world.signal_replica(owner, Signal::SIGCONT),
        _ => world.restart_replica(owner).await,
    }
    world.settled().await;
    world.end().await;
}

/// A node that has just been registered, and which replica owns it.
async fn node_and_owner(world: &mut World) -> (OnboardedNode, usize) {
    let node = world.register("h100").await;
    let owner = world.owner_of("node", node.id).await;
    (node, owner)
}

/// A command as a member of the release before sends it, on behalf of a worker.
fn forged<M: Machine>(id: Uuid, command: &M::Command, action: Action) -> Vec<u8> {
    let permit = authorize(&Principal::system("provisioning"), action).unwrap();
    let asked = actors::Asked::new(&permit, "forged", chrono::Utc::now() + TimeDelta::seconds(5));
    let key = actors::CommandKey::repeatable(CommandId(Uuid::new_v4()), [0; 32]);
    let entity = EntityRef { kind: M::KIND, id };
    json!({ "v": 1, "entity": entity, "asked": asked.once(key), "command": command }).to_string().into_bytes()
}

async fn metrics(world: &World, replica: usize) -> String {
    let url = format!("{}/metrics", world.replicas[replica].operations_url());
    reqwest::get(url).await.unwrap().text().await.unwrap()
}

/// How many messages the replicas have refused for this reason.
async fn refused(world: &World, reason: &str) -> f64 {
    let mut count = 0.0;
    for replica in 0..world.replicas.len() {
        let page = metrics(world, replica).await;
        let name = format!("member_messages_refused_total{{reason=\"{reason}\"}} ");
        let value = page.lines().find_map(|line| line.strip_prefix(name.as_str())).map(str::parse::<f64>);
        count += value.transpose().unwrap().unwrap_or(0.0);
    }
    count
}

async fn restarts_of(world: &World, worker: &str) -> Vec<u64> {
    let tree = world.admin.get("/api/v1/admin/runtime/tree").await.ok();
    let workers = tree["members"].as_array().unwrap().iter().flat_map(|member| member["workers"].as_array().unwrap());
    workers.filter(|it| it["name"] == worker).map(|it| it["restarts"].as_u64().unwrap()).collect()
}

async fn released(world: World, allocation: &Rented) {
    allocation.release().await;
    allocation.expect_state("released").await;
    world.end().await;
}
