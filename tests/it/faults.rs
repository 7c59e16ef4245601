//! Whatever dies, and whenever: nothing acknowledged is lost, no GPU is held twice, every saga ends.

use nix::sys::signal::Signal;
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tests::world::{OnboardedNode, PATIENCE, REGION, Rented, World, id_of};

/// Every commit of one rental, in the order of the saga.
const STEPS: [(&str, &str); 11] = [
    ("allocation", "request"),
    ("tenant", "admit"),
    ("node", "reserve"),
    ("allocation", "reserved"),
    ("node", "provision"),
    ("node", "report"),
    ("allocation", "provisioned"),
    ("allocation", "release"),
    ("node", "clean"),
    ("allocation", "cleaned"),
    ("tenant", "forget"),
];

#[tokio::test(flavor = "multi_thread")]
async fn a_control_plane_of_one_replica_may_die_between_any_two_steps_of_the_saga() {
    let mut world = World::start().await;
    let node = world.node("h100").await;
    world.slow_commits_by(Duration::from_millis(60)).await;
    for (kind, command) in STEPS {
        die_after(&mut world, &node, kind, command, |_| 0, true).await;
    }
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_replicas_either_may_die_between_any_two_steps_of_the_saga() {
    let mut world = World::plan().replicas(2).start().await;
    let node = world.node("h100").await;
    world.slow_commits_by(Duration::from_millis(60)).await;
    for (turn, (kind, command)) in STEPS.into_iter().enumerate() {
        // The other one carries the saga on; the dead one comes back for the next round.
        die_after(&mut world, &node, kind, command, |_| turn % 2, false).await;
    }
    world.end().await;
}

/// Rents and gives back; kills a replica as soon as that step is committed.
async fn die_after(
    world: &mut World,
    node: &OnboardedNode,
    kind: &str,
    command: &str,
    victim: impl Fn(&World) -> usize,
    at_once: bool,
) {
    let before = world.steps_so_far(kind, command).await;
    let user = world.user.clone();
    let story = tokio::spawn(async move {
        let wanted = json!({ "sku": "h100", "region_code": REGION, "gpu_count": 4 });
        let allocation = Rented::new(id_of(&user.post("/api/v1/allocations", &wanted).await.created()), user);
        allocation.expect_state("active").await;
        allocation.release().await;
        allocation.expect_state("released").await;
        allocation
    });
    let until = Instant::now() + PATIENCE;
    while world.steps_so_far(kind, command).await == before {
        assert!(Instant::now() < until, "{kind} {command} was never committed");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let victim = victim(world);
    world.kill9_replica(victim);
    world.expect_every_gpu_held_once().await;
    if at_once {
        world.restart_replica(victim).await;
    }
    let allocation = story.await.unwrap_or_else(|error| panic!("after the death at {kind} {command}: {error}"));
    if !at_once {
        world.restart_replica(victim).await;
    }
    assert_eq!(
        world.states_of(allocation.id).await,
        ["requested", "provisioning", "active", "releasing", "released"],
        "after the death at {kind} {command}"
    );
    node.expect_all_free().await;
    world.expect_settled().await;
    world.expect_every_gpu_held_once().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_dies_between_effect_and_result_finishes_what_it_began_once() {
    let mut world = World::start().await;
    let node = world.node_with("h100", &["--simulate-provision-delay-ms", "700"]).await;
    let allocation = world.rent("h100", 2).await;
    allocation.expect_state("provisioning").await;
    let written = || journal_text(&world, &node).unwrap_or_default();
    expect("the task is begun", || written().contains("\"started\"")).await;
    // The effect happens, and its result reaches nobody.
    world.signal_replica(0, Signal::SIGSTOP);
    let home = world.agent_folder(&node).join(format!("state/allocations/{}/home", allocation.id));
    expect("the tenant has a home", || home.is_dir()).await;
    expect("the effect is noted", || written().contains("\"done\"")).await;
    assert!(!written().contains("\"reported\""), "{}", written());
    world.kill9_agent(&node);
    world.signal_replica(0, Signal::SIGCONT);
    world.restart_agent(&node);
    allocation.expect_state("active").await;
    let begun = journal_text(&world, &node).unwrap().matches("\"event\":\"started\"").count();
    assert!(begun <= 1, "the effect was begun {begun} times");
    allocation.release().await;
    allocation.expect_state("released").await;
    node.expect_all_free().await;
    world.end().await;
}

/// The agent's journal, which is not there before its first task.
fn journal_text(world: &World, node: &OnboardedNode) -> Option<String> {
    std::fs::read_to_string(world.agent_folder(node).join("state/journal.jsonl")).ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_dies_in_the_middle_of_its_effect_begins_it_again() {
    let mut world = World::start().await;
    let node = world.node_with("h100", &["--simulate-provision-delay-ms", "3000"]).await;
    let allocation = world.rent("h100", 2).await;
    expect("the task is begun", || journal_text(&world, &node).unwrap_or_default().contains("\"started\"")).await;
    world.kill9_agent(&node);
    world.restart_agent(&node);
    allocation.expect_state("active").await;
    allocation.release().await;
    allocation.expect_state("released").await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nats_may_die_in_the_middle_and_come_back() {
    let mut world = World::plan().replicas(2).start().await;
    let node = world.node_with("h100", &["--simulate-provision-delay-ms", "1000"]).await;
    let allocation = world.rent("h100", 2).await;
    allocation.expect_state("provisioning").await;
    world.nats.kill9();
    tokio::time::sleep(Duration::from_secs(4)).await;
    world.nats.start_again().await.unwrap();
    allocation.expect_state("active").await;
    world.nats.kill9();
    let answer = world.user.post(&format!("{}/release", allocation.path()), &json!({})).await;
    // It is taken as soon as somebody who owns it can be asked, at the latest when the bus is back.
    assert_eq!(answer.status.as_u16(), 202, "{answer}");
    world.nats.start_again().await.unwrap();
    allocation.expect_state("released").await;
    node.expect_all_free().await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lone_replica_serves_on_without_nats() {
    let mut world = World::start().await;
    let node = world.node("h100").await;
    world.nats.kill9();
    let allocation = world.rent("h100", 2).await;
    allocation.expect_state("active").await;
    allocation.release().await;
    allocation.expect_state("released").await;
    node.expect_all_free().await;
    world.nats.start_again().await.unwrap();
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres_may_die_in_the_middle_and_come_back() {
    let mut world = World::plan().replicas(2).start().await;
    let node = world.node_with("h100", &["--simulate-provision-delay-ms", "1500"]).await;
    let allocation = world.rent("h100", 2).await;
    allocation.expect_state("provisioning").await;
    world.postgres.kill9();
    tokio::time::sleep(Duration::from_secs(2)).await;
    world.postgres.start_again().await.unwrap();
    allocation.expect_state("active").await;
    let acknowledged = world.history_of(allocation.id).await.len();
    world.postgres.kill9();
    world.postgres.start_again().await.unwrap();
    assert!(world.history_of(allocation.id).await.len() >= acknowledged, "nothing acknowledged is lost");
    allocation.release().await;
    allocation.expect_state("released").await;
    node.expect_all_free().await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn however_often_postgres_goes_away_under_load_nobody_is_parked_for_it() {
    let mut world = World::plan().replicas(2).start().await;
    let node = world.node_with("h100", &["--simulate-provision-delay-ms", "500"]).await;
    let key = json!({ "name": "stormy", "public_key": tests::world::ssh_public_key("stormy") });
    let key = id_of(&world.user.post("/api/v1/ssh-keys", &key).await.created());
    let calm = Arc::new(AtomicBool::new(false));
    let storm: Vec<_> = (0..8)
        .map(|n| {
            let (user, admin, calm) = (world.user.clone(), world.admin.clone(), Arc::clone(&calm));
            let (default, node) = (format!("/api/v1/ssh-keys/{key}/default"), node.path());
            tokio::spawn(async move {
                // Whatever is answered: what is asked for stands in the way of nobody.
                while !calm.load(Ordering::Relaxed) {
                    let port = json!({ "port": 22 + n });
                    let _ = user.try_send(user.request(reqwest::Method::POST, &default)).await;
                    let _ = admin.try_send(admin.request(reqwest::Method::PATCH, &node).json(&port)).await;
                }
            })
        })
        .collect();
    for _ in 0..3 {
        let allocation = world.rent("h100", 2).await;
        world.postgres.kill9();
        tokio::time::sleep(Duration::from_millis(1500)).await;
        world.postgres.start_again().await.unwrap();
        allocation.expect_state("active").await;
        world.postgres.kill9();
        tokio::time::sleep(Duration::from_millis(1500)).await;
        world.postgres.start_again().await.unwrap();
        allocation.release().await;
        allocation.expect_state("released").await;
    }
    calm.store(true, Ordering::Relaxed);
    futures::future::join_all(storm).await;
    node.expect_all_free().await;
    // Nothing is parked, and nobody was woken: the end of the world looks.
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_node_is_offline_keeps_its_allocation_and_comes_back() {
    let mut world = World::plan().policy("node.offline_after_seconds", 10).start().await;
    let node = world.node("h100").await;
    let allocation = world.rent("h100", 2).await;
    allocation.expect_state("active").await;
    world.lose_agent(&node);
    node.expect_state("offline").await;
    assert_eq!(allocation.get().await["state"], "active", "silence alone releases nothing");
    let other = json!({ "sku": "h100", "region_code": REGION, "gpu_count": 1 });
    let refused = world.other_user.once(reqwest::Method::POST, "/api/v1/allocations", Some(&other)).await;
    refused.refused(409, "insufficient_capacity");
    world.find_agent(&node);
    node.expect_state("active").await;
    allocation.release().await;
    allocation.expect_state("released").await;
    world.end().await;
}

async fn expect(what: &str, holds: impl Fn() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < until, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
