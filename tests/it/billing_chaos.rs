//! Money while everything dies in turn: users rent and give back, windows last a second, and replicas, Postgres and NATS are killed. In
//! the end the books add up, by the operator's own command, and no invariant was ever seen broken.

use crate::billing::{
    BALANCE, cost, dear_sku, expect_exact, expect_verified_by_the_program, owed, short_windows, wanted,
};
use reqwest::Method;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use tests::world::client::Client;
use tests::world::id_of;
use tests::world::tenants::Rented;

const REPLICAS: usize = 2;
const NODES: usize = 3;
/// So many rounds of deaths at least; more where a busy machine lets too few of those who rent come to run between them.
const ROUNDS: u64 = 2;
const MOST_ROUNDS: u64 = 8;
const COME_TO_RUN: usize = 3;

/// Rents and gives back, until it is enough, and answers what it had.
async fn rent_again_and_again(by: Client, enough: Arc<AtomicBool>, ran: Arc<AtomicUsize>) -> Vec<Rented> {
    let mut had = Vec::new();
    while !enough.load(Ordering::SeqCst) {
        let answer = by.insist(Method::POST, "/api/v1/allocations", Some(&wanted(1))).await;
        // Another has the machine; or it was not to be had while so much was dead.
        if !answer.status.is_success() {
            tokio::time::sleep(Duration::from_millis(200)).await;
            continue;
        }
        let rented = Rented::new(id_of(&answer.body), by.clone());
        had.push(rented.clone());
        if comes_to_run(&rented).await {
            tokio::time::sleep(Duration::from_millis(2_300)).await;
            ran.fetch_add(1, Ordering::SeqCst);
        }
        rented.release().await;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    had
}

/// Whether it is active within a few seconds; whoever has to wait for longer gives it back.
async fn comes_to_run(rented: &Rented) -> bool {
    for _ in 0..40 {
        if rented.get().await["state"] == "active" {
            return true;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    false
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_dies_while_money_moves_the_books_add_up() {
    let mut world = short_windows().replicas(REPLICAS).start().await;
    dear_sku(&mut world).await;
    for _ in 0..NODES {
        world.node("dear").await;
    }
    for user in ["user", "user2"] {
        world.credit(user, 90_000).await;
    }
    // One runs through it all.
    let lasting = world.rent("dear", 1).await;
    lasting.expect_state("active").await;
    let (enough, ran) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let people = [world.user.clone(), world.other_user.clone()];
    let rents = |by| tokio::spawn(rent_again_and_again(by, Arc::clone(&enough), Arc::clone(&ran)));
    let renting = people.clone().map(rents);

    for round in 0..MOST_ROUNDS {
        if round >= ROUNDS && ran.load(Ordering::SeqCst) >= COME_TO_RUN {
            break;
        }
        for replica in 0..REPLICAS {
            world.kill9_replica(replica);
            tokio::time::sleep(Duration::from_millis(700)).await;
            world.restart_replica(replica).await;
        }
        world.nats.kill9();
        tokio::time::sleep(Duration::from_millis(900)).await;
        world.nats.start_again().await.expect("NATS starts");
        world.postgres.kill9();
        tokio::time::sleep(Duration::from_millis(400 + 600 * (round % 2))).await;
        world.postgres.start_again().await.expect("Postgres starts");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    enough.store(true, Ordering::SeqCst);
    let mut had = Vec::new();
    for (by, renting) in people.iter().zip(renting) {
        had.push((by.clone(), renting.await.expect("nobody is refused for good")));
    }
    lasting.release().await;
    had[0].1.push(lasting);
    let mut paid_for = 0;
    for (by, had) in &had {
        let mut over = Vec::new();
        for rented in had {
            over.push((rented.id, by.wait_until(&rented.path(), "it is over", |it| it["state"] == "released").await));
        }
        by.wait_until(BALANCE, "nothing runs", |it| it["running"] == 0 && it["held_minor"] == 0).await;
        let all = expect_exact(by).await;
        for (id, released) in over {
            let expected = if released["active_at"].is_null() { 0 } else { owed(&released, 36_000) };
            assert_eq!(cost(&all, id), (expected, 0), "{released}");
            paid_for += usize::from(expected > 0);
        }
    }
    assert!(paid_for >= COME_TO_RUN, "only {paid_for} came to run");
    expect_verified_by_the_program(&world).await;
    for replica in &world.replicas {
        let page = reqwest::get(format!("{}/metrics", replica.operations_url())).await.expect("figures are shown");
        let page = page.text().await.expect("figures are text");
        let broken: Vec<_> = page.lines().filter(|line| line.starts_with("invariant_violations_total{")).collect();
        assert!(!broken.is_empty() && broken.iter().all(|line| line.ends_with(" 0")), "{broken:?}");
    }
    world.end().await;
}
