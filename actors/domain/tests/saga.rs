//! The machines together: nodes, allocations and tenants in a world whose messages come late, twice and in any order, whose agents
//! fail, and whose people change their minds. Whatever happens, the invariants hold after every step; and once everybody
//! behaves, every saga ends and nothing is left behind.
//!
//! One run is decided by its list of moves. The long run makes its moves from one seed and prints it: `SAGA_SEED=7 cargo test -p domain`.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "saga/agent.rs"]
mod agent;
#[path = "saga/bus.rs"]
mod bus;
#[path = "saga/moves.rs"]
mod moves;
#[path = "saga/settle.rs"]
mod settle;
#[path = "saga/world.rs"]
mod world;

use domain::Machine as _;
use moves::{Move, Moves};
use proptest::prelude::*;
use world::{Delivery, World};

fn live(delivery: Delivery, moves: &[Move]) -> World {
    let mut world = World::new(delivery);
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
    fn every_saga_ends_where_an_events_command_is_applied_once(moves in prop::collection::vec(any::<Move>(), 0..160)) {
        live(Delivery::Once, &moves);
    }

    #[test]
    fn every_saga_ends_where_nothing_keeps_a_command_from_coming_twice(
        moves in prop::collection::vec(any::<Move>(), 0..160)
    ) {
        live(Delivery::Again, &moves);
    }

    #[test]
    fn every_saga_ends_where_events_are_lost(moves in prop::collection::vec(any::<Move>(), 0..160)) {
        live(Delivery::Lossy, &moves);
    }
}

#[test]
fn an_event_that_is_lost_costs_seconds_and_not_the_deadline() {
    let subjects = [
        "provisioning.requested",
        "node.devices_reserved",
        "provisioning.started",
        "node.tenant_ready",
        "provisioning.release_requested",
        "node.tenant_gone",
        "provisioning.released",
    ];
    for subject in subjects {
        let mut world = World::new(Delivery::Once);
        let begin = world.now;
        world.make(Move::Request { user: 0, gpus: 1, queue: 1, wish: 0 });
        world.settle_losing(subject);
        let took = (world.now - begin).num_seconds();
        let seen: Vec<_> = world.history(0).collect();
        assert_eq!(seen, ["requested", "provisioning", "active", "releasing", "released"], "{subject}");
        assert!((5..60).contains(&took), "{subject}: {took} s, and a deadline is 120 s or more");
    }
}

#[test]
fn a_change_of_keys_reaches_the_machine_though_what_was_said_of_it_is_lost() {
    for subject in ["provisioning.logins_stale", "provisioning.logins_changed", "node.logins_written"] {
        let mut world = World::new(Delivery::Once);
        world.make(Move::ChangeKeys { user: 0, how: 0 });
        world.make(Move::Request { user: 0, gpus: 0, queue: 1, wish: 0 });
        world.make(Move::DeliverAll);
        world.make(Move::ChangeKeys { user: 0, how: 0 });
        world.make(Move::ChangeKeys { user: 0, how: 5 });
        world.settle_losing(subject);
    }
}

#[test]
fn a_long_life_from_one_seed_leaves_nothing_behind() {
    let seed = option_env!("SAGA_SEED").and_then(|seed| seed.parse().ok()).unwrap_or(20_261_121);
    eprintln!("SAGA_SEED={seed}");
    for (n, delivery) in [Delivery::Once, Delivery::Again, Delivery::Lossy].into_iter().enumerate() {
        let mut moves = Moves::from_seed(seed + n as u64);
        for _ in 0..6 {
            let part: Vec<_> = moves.by_ref().take(1500).collect();
            live(delivery, &part);
        }
    }
}

#[test]
fn in_a_calm_world_a_rental_is_had_and_given_back() {
    let mut world = World::new(Delivery::Once);
    world.make(Move::Request { user: 0, gpus: 1, queue: 0, wish: 0 });
    world.settle();
    let seen: Vec<_> = world.history(0).collect();
    assert_eq!(seen, ["requested", "provisioning", "active", "releasing", "released"]);
}

#[test]
fn a_placement_and_an_order_that_arrive_after_the_end_leave_no_tenant_behind() {
    let mut world = World::new(Delivery::Again);
    world.make(Move::Request { user: 0, gpus: 0, queue: 1, wish: 0 });
    let id = *world.allocations.keys().next().unwrap();
    world.deliver_a("provisioning.requested", true);
    world.deliver_a("node.devices_reserved", false);
    world.deliver_a("provisioning.started", true);
    world.release(id);
    world.deliver_a("provisioning.release_requested", false);
    (0..2).for_each(|node| world.make(Move::Diligent { node, luck: agent::LUCKY }));
    world.deliver_a("node.tenant_gone", false);
    assert_eq!(world.allocations[&id].state(), "released");

    // Everything once more, and nobody knows that it is over.
    world.deliver_a("provisioning.requested", false);
    world.deliver_a("provisioning.started", false);
    (0..2).for_each(|node| world.make(Move::Poll { node }));
    world.check();
    world.settle();
}

#[test]
fn the_worlds_moves_reach_every_corner() {
    let mut reached = std::collections::BTreeSet::new();
    for seed in 0..24 {
        let delivery = if seed % 2 == 0 { Delivery::Once } else { Delivery::Again };
        let moves: Vec<_> = Moves::from_seed(seed).take(400).collect();
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
