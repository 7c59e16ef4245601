//! The state machines together: a simulation of nodes, allocations and tenants with messages that arrive late, twice and in any order,
//! failing agents, and users who change their requests. The invariants hold after every step; and once no more faults occur, every saga
//! ends and nothing is left behind.
//!
//! One run is determined by its list of steps. The long run takes its steps from one seed and prints it:
//! `SAGA_SEED=7 cargo test -p domain`.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "saga/agent.rs"]
mod agent;
#[path = "saga/bus.rs"]
mod bus;
#[path = "saga/convergence.rs"]
mod convergence;
#[path = "../../../tests/test-host/src/node_fixture.rs"]
#[allow(dead_code, unreachable_pub, reason = "it is written for tests of other crates, too")]
mod node_fixture;
#[path = "saga/simulation.rs"]
mod simulation;
#[path = "saga/steps.rs"]
mod steps;

use chrono::TimeDelta;
use domain::Machine as _;
use domain::choreography::rental;
use proptest::prelude::*;
use simulation::{Delivery, Simulation};
use steps::{RandomSteps, SimulationStep};

fn live(delivery: Delivery, moves: &[SimulationStep]) -> Simulation {
    let mut world = Simulation::new(delivery);
    for step in moves {
        world.make(*step);
        world.check();
    }
    world.settle();
    world
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, max_shrink_iters: 4096, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_saga_ends_with_commands_applied_once(moves in prop::collection::vec(any::<SimulationStep>(), 0..160)) {
        live(Delivery::Once, &moves);
    }

    #[test]
    fn every_saga_ends_with_duplicate_commands(
        moves in prop::collection::vec(any::<SimulationStep>(), 0..160)
    ) {
        live(Delivery::Again, &moves);
    }

    #[test]
    fn every_saga_ends_with_lost_events(moves in prop::collection::vec(any::<SimulationStep>(), 0..160)) {
        live(Delivery::Lossy, &moves);
    }
}

#[test]
fn undisturbed_rental_has_the_commits_and_deadlines_of_its_table_in_order() {
    let mut world = Simulation::new(Delivery::Once);
    world.commits.clear();
    let mut rows = rental::COMMITS.iter();
    // The commits since the last look are the next rows, and the allocation has the deadline of the last of them.
    let mut look = |world: &mut Simulation| {
        let made = std::mem::take(&mut world.commits);
        let is_row =
            |(entity, command)| rental::COMMITS.iter().any(|row| (row.entity, row.command) == (entity, command));
        for commit in made.into_iter().filter(|commit| is_row(*commit)) {
            let row = rows.next().unwrap_or_else(|| panic!("{commit:?} is one commit more than the table has"));
            assert_eq!((row.entity, row.command), commit);
            let id = *world.allocations.keys().next().unwrap();
            match row.deadline {
                None => assert_eq!(world.allocations[&id].deadline(), None, "{commit:?}"),
                Some(deadline) => {
                    let (left, allowed) = world.time_left(id, deadline.policy);
                    assert_eq!(left, Some(allowed), "{commit:?}");
                }
            }
        }
    };
    let mut deliver = |world: &mut Simulation| {
        look(world);
        while !world.bus_is_empty() {
            world.deliver(0, false);
            look(world);
        }
    };
    world.make(SimulationStep::Request { user: 0, gpus: 1, queue: 1, wish: 0 });
    deliver(&mut world);
    (0..2).for_each(|node| world.make(SimulationStep::Diligent { node, luck: agent::LUCKY }));
    deliver(&mut world);
    let id = *world.allocations.keys().next().unwrap();
    world.release(id);
    deliver(&mut world);
    (0..2).for_each(|node| world.make(SimulationStep::Diligent { node, luck: agent::LUCKY }));
    deliver(&mut world);
    let left: Vec<_> = rows.map(|row| (row.entity, row.command)).collect();
    assert!(left.is_empty(), "the rental ended before {left:?}");
}

#[test]
fn lost_event_delays_a_saga_by_seconds() {
    // The first two lead to no commit, and the end of the use has its start too.
    const DELAY_NOTHING: [&str; 3] = ["provisioning.active", "terminal.unwanted", "billing.usage_changed"];
    let events = rental::COMMITS.iter().flat_map(|commit| commit.events).map(|row| row.subject);
    for subject in events.filter(|subject| !DELAY_NOTHING.contains(subject)) {
        let mut world = Simulation::new(Delivery::Once);
        let begin = world.now;
        world.make(SimulationStep::Request { user: 0, gpus: 1, queue: 1, wish: 0 });
        world.settle_losing(subject);
        let took = (world.now - begin).num_seconds();
        let seen: Vec<_> = world.history(0).collect();
        assert_eq!(seen, ["requested", "provisioning", "active", "releasing", "released"], "{subject}");
        assert!((5..60).contains(&took), "{subject}: {took} s, and a deadline is 120 s or more");
    }
}

#[test]
fn key_change_reaches_the_machine_although_events_are_lost() {
    for subject in ["provisioning.logins_stale", "provisioning.logins_changed", "node.logins_written"] {
        let mut world = Simulation::new(Delivery::Once);
        world.make(SimulationStep::ChangeKeys { user: 0, how: 0 });
        world.make(SimulationStep::Request { user: 0, gpus: 0, queue: 1, wish: 0 });
        world.make(SimulationStep::DeliverAll);
        world.make(SimulationStep::ChangeKeys { user: 0, how: 0 });
        world.make(SimulationStep::ChangeKeys { user: 0, how: 5 });
        world.settle_losing(subject);
    }
}

#[test]
fn evacuated_allocation_is_released_although_the_event_is_lost() {
    for subject in ["node.evacuation_due", "provisioning.release_requested", "node.tenant_gone"] {
        let mut world = Simulation::new(Delivery::Once);
        world.make(SimulationStep::Request { user: 0, gpus: 1, queue: 1, wish: 0 });
        world.make(SimulationStep::DeliverAll);
        (0..2).for_each(|node| world.make(SimulationStep::Diligent { node, luck: agent::LUCKY }));
        world.make(SimulationStep::DeliverAll);
        let nodes: Vec<_> = world.agents.keys().copied().collect();
        nodes.into_iter().for_each(|id| world.heartbeat_with_finding(id));
        world.to_be_lost = Some(subject);
        for _ in 0..40 {
            world.pass(TimeDelta::seconds(5));
            world.deliver_but_what_is_lost();
            (0..2).for_each(|node| world.make(SimulationStep::Diligent { node, luck: agent::LUCKY }));
            world.deliver_but_what_is_lost();
        }
        assert_eq!(world.to_be_lost, None, "nothing of that subject was published");
        let seen: Vec<_> = world.history(0).collect();
        assert_eq!(seen, ["requested", "provisioning", "active", "releasing", "released"], "{subject}");
    }
}

#[test]
fn long_seeded_run_leaves_nothing_behind() {
    let seed = option_env!("SAGA_SEED").and_then(|seed| seed.parse().ok()).unwrap_or(20_261_121);
    eprintln!("SAGA_SEED={seed}");
    for (n, delivery) in [Delivery::Once, Delivery::Again, Delivery::Lossy].into_iter().enumerate() {
        let mut moves = RandomSteps::from_seed(seed + n as u64);
        for _ in 0..6 {
            let part: Vec<_> = moves.by_ref().take(1500).collect();
            live(delivery, &part);
        }
    }
}

#[test]
fn allocation_is_provisioned_and_released_without_faults() {
    let mut world = Simulation::new(Delivery::Once);
    world.make(SimulationStep::Request { user: 0, gpus: 1, queue: 0, wish: 0 });
    world.settle();
    let seen: Vec<_> = world.history(0).collect();
    assert_eq!(seen, ["requested", "provisioning", "active", "releasing", "released"]);
}

#[test]
fn late_placement_and_task_leave_no_tenant_behind() {
    let mut world = Simulation::new(Delivery::Again);
    world.make(SimulationStep::Request { user: 0, gpus: 0, queue: 1, wish: 0 });
    let id = *world.allocations.keys().next().unwrap();
    world.deliver_a("provisioning.requested", true);
    world.deliver_a("node.devices_reserved", false);
    world.deliver_a("provisioning.started", true);
    world.release(id);
    world.deliver_a("provisioning.release_requested", false);
    (0..2).for_each(|node| world.make(SimulationStep::Diligent { node, luck: agent::LUCKY }));
    world.deliver_a("node.tenant_gone", false);
    assert_eq!(world.allocations[&id].state(), "released");

    // All messages are delivered again, after the end.
    world.deliver_a("provisioning.requested", false);
    world.deliver_a("provisioning.started", false);
    (0..2).for_each(|node| world.make(SimulationStep::Poll { node }));
    world.check();
    world.settle();
}

#[test]
fn random_steps_reach_every_state() {
    let mut reached = std::collections::BTreeSet::new();
    for seed in 0..48 {
        let delivery = if seed % 2 == 0 { Delivery::Once } else { Delivery::Again };
        let moves: Vec<_> = RandomSteps::from_seed(seed).take(400).collect();
        reached.extend(live(delivery, &moves).reached);
    }
    let corners = [
        "allocation requested",
        "allocation provisioning",
        "allocation active",
        "allocation releasing",
        "allocation release_failed",
        "allocation released",
        "node registered",
        "node bootstrap-issued",
        "node enrolling",
        "node active",
        "node offline",
        "node draining",
        "node quarantined",
        "node retired",
        "node removing",
        "node removed",
        "node fenced",
        "node validated",
        "tenant over quota",
        "hold reserved",
        "hold provisioning",
        "hold ready",
        "hold setup_failed",
        "hold releasing",
        "hold release_failed",
        "hold abandoned",
        "event provisioning.reservation_unwanted",
        "event provisioning.release_exhausted",
        "event provisioning.release_forced",
        "event provisioning.failed",
        "event node.tenant_remains",
        "event node.tenant_faulted",
        "event node.evacuation_begun",
        "event node.evacuation_due",
        "event billing.allocation_metered",
        "event billing.allocation_uncovered",
        "event billing.balance_depleted",
        "event billing.balance_low",
        "billing_account depleted",
        "account without money",
        "posting usage",
        "posting usage_credit",
        "posting write_off",
        "event provisioning.logins_stale",
        "event provisioning.logins_changed",
        "event node.logins_written",
    ];
    let missed: Vec<_> = corners.into_iter().filter(|corner| !reached.contains(*corner)).collect();
    assert!(missed.is_empty(), "never reached: {missed:?}");
}
