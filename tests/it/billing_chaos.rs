//! Billing under crashes: users rent and release, windows last a second, and replicas, Postgres and NATS are killed in turn. In
//! the end the ledger is balanced, by the operator's own command, and no invariant violation was counted.

use crate::billing::{
    BALANCE, allocation_request, cost, expect_exact, expect_ledger_verify_succeeds, expected_cost, expensive_sku,
    short_windows,
};
use reqwest::Method;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tests::cluster::client::Client;
use tests::cluster::resource_handles::AllocationHandle;
use tests::cluster::{WAIT_TIMEOUT, id_of};

const REPLICAS: usize = 2;
const NODES: usize = 3;
/// The minimum of rounds of crashes; there are more if too few allocations become active between them on a busy machine.
const ROUNDS: u64 = 2;
const MOST_ROUNDS: u64 = 8;
const COME_TO_RUN: usize = 3;

/// Rents and releases until it is stopped, and returns the allocations.
async fn rent_repeatedly(by: Client, enough: Arc<AtomicBool>, ran: Arc<AtomicUsize>) -> Vec<AllocationHandle> {
    let mut had = Vec::new();
    while !enough.load(Ordering::SeqCst) {
        let answer = by.request_until_final(Method::POST, "/api/v1/allocations", Some(&allocation_request(1))).await;
        // Another user has the machine, or it was not available during the crashes.
        if !answer.status.is_success() {
            tokio::time::sleep(Duration::from_millis(200)).await;
            continue;
        }
        let rented = AllocationHandle::new(id_of(&answer.body), by.clone());
        had.push(rented.clone());
        if becomes_active(&rented).await {
            tokio::time::sleep(Duration::from_millis(2_300)).await;
            ran.fetch_add(1, Ordering::SeqCst);
        }
        rented.release().await;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    had
}

/// Whether it is active within a few seconds; otherwise the caller releases it.
async fn becomes_active(rented: &AllocationHandle) -> bool {
    for _ in 0..40 {
        if rented.get().await["state"] == "active" {
            return true;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    false
}

#[tokio::test(flavor = "multi_thread")]
async fn ledger_is_balanced_after_replicas_postgres_and_nats_are_killed() {
    let mut cluster = short_windows().replicas(REPLICAS).own_postgres().start().await;
    expensive_sku(&mut cluster).await;
    for _ in 0..NODES {
        cluster.node("dear").await;
    }
    for user in ["user", "user2"] {
        cluster.credit(user, 90_000).await;
    }
    // One allocation runs through all of it.
    let lasting = cluster.rent_active("dear", 1).await;
    let (enough, ran) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let people = [cluster.user.clone(), cluster.other_user.clone()];
    let rents = |by| tokio::spawn(rent_repeatedly(by, Arc::clone(&enough), Arc::clone(&ran)));
    let renting = people.clone().map(rents);

    for round in 0..MOST_ROUNDS {
        if round >= ROUNDS && ran.load(Ordering::SeqCst) >= COME_TO_RUN {
            break;
        }
        for replica in 0..REPLICAS {
            cluster.kill9_replica(replica);
            tokio::time::sleep(Duration::from_millis(700)).await;
            cluster.restart_replica(replica).await;
        }
        cluster.nats.kill9();
        tokio::time::sleep(Duration::from_millis(900)).await;
        cluster.nats.start_again().await.expect("NATS starts");
        cluster.postgres.kill9().await;
        tokio::time::sleep(Duration::from_millis(400 + 600 * (round % 2))).await;
        cluster.postgres.start_again().await;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    // A machine that is too slow for it between the crashes has some time without any.
    let until = Instant::now() + 2 * WAIT_TIMEOUT;
    while ran.load(Ordering::SeqCst) < COME_TO_RUN && Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    enough.store(true, Ordering::SeqCst);
    let mut had = Vec::new();
    for (by, renting) in people.iter().zip(renting) {
        had.push((by.clone(), renting.await.expect("no user is refused permanently")));
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
            let expected = if released["active_at"].is_null() { 0 } else { expected_cost(&released, 36_000) };
            assert_eq!(cost(&all, id), (expected, 0), "{released}");
            paid_for += usize::from(expected > 0);
        }
    }
    assert!(paid_for >= COME_TO_RUN, "only {paid_for} came to run");
    expect_ledger_verify_succeeds(&cluster).await;
    for replica in 0..cluster.replicas.len() {
        let page = cluster.metrics_of(replica).await;
        assert_eq!(page.value("invariant_violations_total", &[]), Some(0.0), "{}", page.text);
    }
    cluster.shutdown().await;
}
