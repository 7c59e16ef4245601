//! Keeps the policy values that this process remembers true (specification, *Events*).
//!
//! A written value is said on `policy.invalidate.<key>`, and every process reads anew at once. What is said can be lost: so all of it is
//! read now and then, and when the bus is back, too. Values that lie ahead are read with the others and need no word when their time comes.

use crate::cluster::bus::Bus;
use crate::world::Here;
use futures::StreamExt;
use persistence::Reads;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, MissedTickBehavior, interval};

/// What is remembered is never older: the specification allows 60 s.
const KEPT: Duration = Duration::from_secs(20);

/// How often it is looked whether the bus is back.
const TURN: Duration = Duration::from_secs(1);

/// Many writes that come together are one reading.
const PAUSE: Duration = Duration::from_millis(20);

/// Reads when told to, and when what is remembered is old.
///
/// # Errors
/// Never; while Postgres cannot be read the values of before hold.
pub async fn keep(here: Arc<Here>, reads: Reads, bus: Bus) -> anyhow::Result<()> {
    let mut turn = interval(TURN);
    turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut read_at, mut was_connected) = (Instant::now(), false);
    loop {
        tokio::select! {
            () = here.policy_written.notified() => {}
            _ = turn.tick() => {
                let is_connected = bus.is_connected();
                let is_back = is_connected && !was_connected;
                was_connected = is_connected;
                if !is_back && read_at.elapsed() < KEPT {
                    continue;
                }
            }
        }
        match reads.policy_book().await {
            Ok(book) => {
                here.learn(book);
                read_at = Instant::now();
            }
            Err(error) => tracing::warn!(error = %error, "could not read the policy values"),
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Hears that a value was written, by whichever member.
///
/// # Errors
/// Where the subscription ends.
pub async fn listen(here: Arc<Here>, bus: Bus) -> anyhow::Result<()> {
    let mut words = bus.events("policy.invalidate.>").await?;
    // What was said before is not heard any more.
    here.policy_written.notify_one();
    while words.next().await.is_some() {
        here.policy_written.notify_one();
    }
    anyhow::bail!("the subscription ended")
}
