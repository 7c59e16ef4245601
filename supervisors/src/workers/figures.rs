//! Reads now and then what is too dear to be read at each scrape.

use super::reactor::consumer_name;
use crate::cluster::bus::Bus;
use crate::figures::{Lag, ProcessFigures};
use actors::Host;
use async_nats::jetstream;
use domain::event::Stream;
use persistence::Reads;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{MissedTickBehavior, interval, timeout};

const TURN: Duration = Duration::from_secs(5);

/// Balances are compared with the ledger once in so many turns: each account is looked at.
const TURNS_OF_THE_LEDGER: usize = 12;

/// How long JetStream may take to say how far a consumer is.
const ANSWERED_WITHIN: Duration = Duration::from_secs(2);

/// Reads, turn by turn.
///
/// # Errors
/// Never; what cannot be read keeps its last value, and its age shows.
pub async fn run(figures: Arc<ProcessFigures>, host: Arc<Host>, reads: Reads, bus: Bus) -> anyhow::Result<()> {
    let mut turn = interval(TURN);
    turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for turns in (0..TURNS_OF_THE_LEDGER).cycle() {
        turn.tick().await;
        let shards: Vec<_> = host.terms().iter().map(|term| term.shard).collect();
        match tokio::try_join!(reads.standing(&shards), reads.pending(&shards)) {
            Ok((standing, pending)) => figures.stands(&standing, &pending),
            Err(error) => tracing::warn!(error = %error, "could not read the figures"),
        }
        // Not the first: no shard has come yet.
        if turns == 1 {
            match reads.ledger_difference(&shards).await {
                Ok(micro) => figures.ledger_differs(micro),
                Err(error) => tracing::warn!(error = %error, "could not compare balances with the ledger"),
            }
        }
        for stream in Stream::ALL {
            // Said every few seconds otherwise; the lost connection was said once.
            if let (true, Ok(Ok(lag))) = (bus.is_connected(), timeout(ANSWERED_WITHIN, lag(&bus, stream)).await) {
                figures.lags(stream, lag);
            }
        }
    }
    Ok(())
}

/// What the consumer has not been given, and what it was given and has not settled.
async fn lag(bus: &Bus, stream: Stream) -> anyhow::Result<Lag> {
    let context = jetstream::new(bus.client().clone());
    let consumer: jetstream::consumer::PullConsumer =
        context.get_consumer_from_stream(consumer_name(stream), stream.name()).await?;
    let info = consumer.cached_info();
    Ok(Lag { waiting: info.num_pending, under_way: info.num_ack_pending as u64 })
}
