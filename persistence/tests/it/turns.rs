//! Turns, and up to when books were compared.

use crate::postgres::Database;
use chrono::{TimeDelta, Utc};
use persistence::Turns;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(60);

#[tokio::test]
async fn one_has_the_turn_until_its_time_is_up_or_it_is_given_back() {
    let db = Database::fresh().await;
    let turns = Turns::new(db.pool.clone());
    let at_once = futures::future::join_all((0..8).map(|_| turns.take("a", LONG))).await;
    assert_eq!(at_once.into_iter().filter(|taken| *taken.as_ref().unwrap()).count(), 1);
    assert!(turns.take("b", Duration::ZERO).await.unwrap());
    assert!(turns.take("b", LONG).await.unwrap(), "its time was up");
    turns.give_back("a").await.unwrap();
    assert!(turns.take("a", LONG).await.unwrap());
    sqlx::query("UPDATE turn SET until = until - interval '2 days' WHERE name = 'a'").execute(&db.pool).await.unwrap();
    turns.forget().await.unwrap();
    let left: Vec<String> = sqlx::query_scalar("SELECT name FROM turn").fetch_all(&db.pool).await.unwrap();
    assert_eq!(left, ["b"]);
}

#[tokio::test]
async fn what_was_compared_is_not_taken_back() {
    let db = Database::fresh().await;
    let turns = Turns::new(db.pool.clone());
    assert_eq!(turns.compared("theirs").await.unwrap(), None);
    let now = chrono::DurationRound::duration_trunc(Utc::now(), TimeDelta::microseconds(1)).unwrap();
    for until in [now, now - TimeDelta::hours(1)] {
        turns.keep_compared("theirs", until).await.unwrap();
        assert_eq!(turns.compared("theirs").await.unwrap(), Some(now));
    }
    assert_eq!(turns.compared("others'").await.unwrap(), None);
}
