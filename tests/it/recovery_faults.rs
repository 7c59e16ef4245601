//! Whatever dies in the middle of an enrollment, a recovery, a rotation or a release: a machine is never shut out, and a tenant never half there.

use serde_json::json;
use std::fs;
use std::time::{Duration, Instant};
use tests::world::{OnboardedNode, PATIENCE, REGION, Rented, World, id_of};

#[derive(Clone, Copy, Debug)]
enum Victim {
    Postgres,
    Nats,
    ControlPlane,
    Agent,
}

const VICTIMS: [Victim; 4] = [Victim::Postgres, Victim::Nats, Victim::ControlPlane, Victim::Agent];

async fn committed(world: &World, command: &str, before: i64) {
    let until = Instant::now() + PATIENCE;
    while world.steps_so_far("node", command).await == before {
        assert!(Instant::now() < until, "{command} was never committed");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// kill -9, and back after a moment.
async fn dies(world: &mut World, victim: Victim, node: &OnboardedNode) {
    match victim {
        Victim::Postgres => {
            world.postgres.kill9();
            tokio::time::sleep(Duration::from_millis(300)).await;
            world.postgres.start_again().await.unwrap();
        }
        Victim::Nats => {
            world.nats.kill9();
            tokio::time::sleep(Duration::from_millis(300)).await;
            world.nats.start_again().await.unwrap();
        }
        Victim::ControlPlane => {
            world.kill9_replica(0);
            world.restart_replica(0).await;
        }
        Victim::Agent => {
            world.kill9_agent(node);
            world.restart_agent(node);
        }
    }
}

async fn rent(world: &World, node: &OnboardedNode) -> Rented {
    let wanted = json!({ "sku": "h100", "region_code": REGION, "gpu_count": 1, "node_id": node.id });
    let allocation =
        Rented::new(id_of(&world.user.post("/api/v1/allocations", &wanted).await.created()), world.user.clone());
    allocation.expect_state("active").await;
    allocation
}

async fn returned(allocation: &Rented, node: &OnboardedNode) {
    allocation.expect_state("released").await;
    node.expect_all_free().await;
}

async fn world() -> World {
    let world = World::start().await;
    world.slow_commits_by(Duration::from_millis(40)).await;
    world
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_is_enrolled_whoever_dies_in_the_middle() {
    let mut world = world().await;
    for victim in VICTIMS {
        let before = world.steps_so_far("node", "enroll").await;
        let node = world.register("h100").await;
        let bundle = world.bundle(&node).await;
        world.start_agent(&node.name, &bundle);
        committed(&world, "enroll", before).await;
        dies(&mut world, victim, &node).await;
        let seen = node.expect_state("active").await;
        assert_eq!(seen["state_reason"]["code"], "first_poll", "{victim:?}: {seen}");
        let allocation = rent(&world, &node).await;
        allocation.release().await;
        returned(&allocation, &node).await;
    }
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_identity_is_recovered_whoever_dies_in_the_middle_and_nobody_is_taken_for_a_clone() {
    let mut world = world().await;
    let node = world.node("h100").await;
    for victim in VICTIMS {
        let before = world.steps_so_far("node", "recover").await;
        let folder = world.agent_folder(&node);
        world.kill9_agent(&node);
        for file in ["node.key", "node.pem"] {
            fs::remove_file(folder.join(file)).unwrap();
        }
        world.restart_agent(&node);
        committed(&world, "recover", before).await;
        dies(&mut world, victim, &node).await;
        let allocation = rent(&world, &node).await;
        allocation.release().await;
        returned(&allocation, &node).await;
        assert_eq!(node.get().await["state"], "active", "{victim:?}");
    }
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_is_cleaned_up_whoever_dies_in_the_middle() {
    let mut world = world().await;
    let node = world.node("h100").await;
    for (victim, step) in VICTIMS.into_iter().flat_map(|victim| [(victim, "clean"), (victim, "report")]) {
        let allocation = rent(&world, &node).await;
        let before = world.steps_so_far("node", step).await;
        allocation.release().await;
        committed(&world, step, before).await;
        dies(&mut world, victim, &node).await;
        returned(&allocation, &node).await;
        world.expect_every_gpu_held_once().await;
    }
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_authority_is_rotated_whoever_dies_in_the_middle_and_no_node_is_shut_out() {
    let plan = World::plan().policy("keys.renewal_spread_seconds", 1).policy("node.offline_after_seconds", 10);
    let mut world = plan.start().await;
    world.slow_commits_by(Duration::from_millis(40)).await;
    let node = world.node("h100").await;
    for victim in VICTIMS {
        let step = async |world: &World, step: &str, key: Option<&str>| {
            let mut body = json!({ "purpose": "node_ca", "reason": "a test wants it" });
            if let Some(key) = key {
                body["key_id"] = key.into();
            }
            world.admin.post(&format!("/api/v1/admin/keys/{step}"), &body).await
        };
        let keys = world.admin.get("/api/v1/admin/keys").await.ok();
        let set = keys["sets"].as_array().unwrap().iter().find(|set| set["purpose"] == "node_ca").unwrap();
        let old = set["keys"].as_array().unwrap().iter().find(|key| key["phase"] == "active").unwrap();
        let old = old["key_id"].as_str().unwrap().to_owned();
        let new = step(&world, "stage", None).await.created()["key_id"].as_str().unwrap().to_owned();
        let before = world.steps_so_far("node", "renew").await;
        step(&world, "activate", Some(&new)).await.ok();
        committed(&world, "renew", before).await;
        dies(&mut world, victim, &node).await;
        let until = Instant::now() + PATIENCE;
        loop {
            let retired = step(&world, "retire", Some(&old)).await;
            if retired.status.is_success() {
                break;
            }
            assert!(Instant::now() < until, "{victim:?}: {retired}");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        let allocation = rent(&world, &node).await;
        allocation.release().await;
        returned(&allocation, &node).await;
        assert_eq!(node.get().await["state"], "active", "{victim:?}");
    }
    // Not even one that died before it had stored what it was given: until it shows that, the old one is needed.
    assert!(!world.agent_log(&node).contains("\"recovered\""), "nobody was cut off");
    world.end().await;
}
