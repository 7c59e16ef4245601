//! Leases and reconciliation watermarks.

use chrono::{TimeDelta, Utc};
use domain::id::MemberId;
use local_servers::test_database::TestDatabase;
use persistence::{Lease, Leases};
use std::time::Duration;
use uuid::Uuid;

const LONG: Duration = Duration::from_secs(60);

/// The leases of a process of its own.
fn member(db: &TestDatabase) -> Leases {
    Leases::new(db.pool.clone(), MemberId(Uuid::new_v4()))
}

async fn acquired(leases: &Leases, name: &str, lasts: Duration) -> Option<Lease> {
    leases.acquire(name, lasts).await.unwrap()
}

async fn names(db: &TestDatabase) -> Vec<String> {
    sqlx::query_scalar("SELECT name FROM turn ORDER BY name").fetch_all(&db.pool).await.unwrap()
}

#[tokio::test]
async fn concurrent_acquisitions_of_a_lease_have_one_winner_until_release() {
    let db = TestDatabase::fresh().await;
    let members: Vec<_> = (0..8).map(|_| member(&db)).collect();
    let at_once = futures::future::join_all(members.iter().map(|leases| acquired(leases, "a", LONG))).await;
    let mut held: Vec<_> = members.iter().zip(at_once).filter_map(|(leases, lease)| Some((leases, lease?))).collect();
    assert_eq!(held.len(), 1);
    let (holder, lease) = held.remove(0);
    holder.release(lease).await.unwrap();
    assert!(acquired(&members[0], "a", LONG).await.is_some());
}

#[tokio::test]
async fn a_lease_lapses_once_another_member_has_watched_it_for_as_long_as_it_lasts() {
    let db = TestDatabase::fresh().await;
    let (ann, bob) = (member(&db), member(&db));
    let lasts = Duration::from_millis(300);
    let _held = acquired(&ann, "a", lasts).await.unwrap();
    assert!(acquired(&bob, "a", LONG).await.is_none());
    tokio::time::sleep(lasts + Duration::from_millis(50)).await;
    assert!(acquired(&bob, "a", LONG).await.is_some());
    assert!(acquired(&ann, "a", LONG).await.is_none(), "it is another's, and lasts longer");
}

#[tokio::test]
async fn a_holder_whose_lease_lapsed_cannot_release_its_successors() {
    let db = TestDatabase::fresh().await;
    let (ann, bob) = (member(&db), member(&db));
    let lapsed = acquired(&ann, "a", Duration::ZERO).await.unwrap();
    let successors = acquired(&bob, "a", LONG).await.unwrap();
    ann.release(lapsed).await.unwrap();
    assert!(acquired(&ann, "a", LONG).await.is_none(), "bob holds it");
    bob.release(successors).await.unwrap();
    let own = acquired(&ann, "a", Duration::ZERO).await.unwrap();
    let own_later = acquired(&ann, "a", LONG).await.unwrap();
    ann.release(own).await.unwrap();
    assert_eq!(names(&db).await, ["a"], "an earlier lease of the same process is not the later one");
    ann.release(own_later).await.unwrap();
    assert!(names(&db).await.is_empty());
}

#[tokio::test]
async fn a_step_of_the_databases_clock_ends_no_lease() {
    let db = TestDatabase::fresh().await;
    let (ann, bob) = (member(&db), member(&db));
    let _held = acquired(&ann, "a", LONG).await.unwrap();
    // The clock is set a day ahead: what was stored is a day old.
    sqlx::query("UPDATE turn SET until = until - interval '1 day'").execute(&db.pool).await.unwrap();
    assert!(acquired(&bob, "a", LONG).await.is_none());
    bob.delete_expired().await.unwrap();
    assert!(acquired(&bob, "a", LONG).await.is_none());
}

#[tokio::test]
async fn a_lease_of_the_release_before_lapses_by_its_time() {
    let db = TestDatabase::fresh().await;
    let leases = member(&db);
    for (name, until) in [("over", "-1 second"), ("held", "1 minute")] {
        sqlx::query("INSERT INTO turn (name, until) VALUES ($1, clock_timestamp() + $2::interval)")
            .bind(name)
            .bind(until)
            .execute(&db.pool)
            .await
            .unwrap();
    }
    assert!(acquired(&leases, "over", LONG).await.is_some());
    assert!(acquired(&leases, "held", LONG).await.is_none());
}

#[tokio::test]
async fn leases_that_were_never_released_are_deleted_after_a_month() {
    let db = TestDatabase::fresh().await;
    let leases = member(&db);
    for name in ["old", "new"] {
        let _held = acquired(&leases, name, LONG).await.unwrap();
    }
    sqlx::query("UPDATE turn SET until = until - interval '31 days' WHERE name = 'old'")
        .execute(&db.pool)
        .await
        .unwrap();
    leases.delete_expired().await.unwrap();
    assert_eq!(names(&db).await, ["new"]);
}

#[tokio::test]
async fn reconciliation_watermark_never_moves_back() {
    let db = TestDatabase::fresh().await;
    let leases = member(&db);
    assert_eq!(leases.reconciled_until("theirs").await.unwrap(), None);
    let now = chrono::DurationRound::duration_trunc(Utc::now(), TimeDelta::microseconds(1)).unwrap();
    for until in [now, now - TimeDelta::hours(1)] {
        leases.store_reconciled_until("theirs", until).await.unwrap();
        assert_eq!(leases.reconciled_until("theirs").await.unwrap(), Some(now));
    }
    assert_eq!(leases.reconciled_until("others'").await.unwrap(), None);
}
