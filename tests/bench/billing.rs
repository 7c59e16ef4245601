//! A window of many accounts at once: how long it takes until each has charged its running allocations, with everything that the
//! service writes of it (double entry, snapshot under its version, history, deadline), against an UPDATE of a balance for each event by
//! pgbench, in turns: all of one row, and spread over as many rows as there are accounts.
//!
//! Ours is the part of a replica that does it, as it runs there: the worker, the mailboxes, the loader and the committer, on a clock that
//! is put on by a window each round. Every account is due at the same moment and asleep, which is the worst case. Beside it stand how the
//! cost grows with the number of allocations, and what somebody who asks for something meanwhile waits.
//!
//! `BENCH_ALLOCATIONS` (100,000) are compared, `BENCH_MOST` (1,000,000) is what the cost is followed up to; ten belong to an account.

#[path = "billing/baseline.rs"]
mod baseline;
#[path = "billing/ours.rs"]
mod ours;

use anyhow::ensure;
use baseline::{Baseline, Rows};
use ours::Ours;
use tests::bench::postgres::{self, Postgres};
use tests::bench::{Plan, Report, Turns, fewer, median, rounded};

/// Running allocations of one account.
const OF_ONE: usize = 10;

const HOT_RATIO: f64 = 20.0;
const SPREAD_RATIO: f64 = 3.0;
const WINDOW_SECONDS: f64 = 2.0;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let plan = Plan::from_environment()?;
    let allocations = fewer("BENCH_ALLOCATIONS")?.unwrap_or(100_000);
    let most = fewer("BENCH_MOST")?.unwrap_or(1_000_000);
    ensure!(allocations >= OF_ONE, "at least an account is needed");
    let server = Postgres::start()?;
    let ours = Ours::prepare(server.database("ours").await?, allocations / OF_ONE).await?;
    let theirs = Baseline::prepare(&server, allocations / OF_ONE).await?;
    server.age().await?;

    let (mut hot, mut spread) = (Turns::default(), Turns::default());
    let mut seconds = Vec::new();
    for _ in 0..plan.rounds {
        let window = ours.window().await?.as_secs_f64();
        let rate = allocations as f64 / window;
        hot.round(rate, theirs.load(Rows::One, plan.each).await?);
        spread.round(rate, theirs.load(Rows::Spread, plan.each).await?);
        seconds.push(window);
    }
    let alone = ours.asking(plan.each).await?;
    let beside = ours.asking_beside_a_window().await?;
    let version: String = ours.server_version().await?;
    let batch = ours.batch_mean();
    ours.check().await?;

    let aim = |met: bool| if met { "met" } else { "missed" };
    let mut report = Report::new("billing", "postings/s", "pgbench, an UPDATE each, of one row", &hot)
        .figure("window_s", rounded(median(&seconds)))
        .figure("window_max_s", rounded(seconds.iter().copied().fold(0.0, f64::max)))
        .figure("spread_rows_updates_per_s", rounded(spread.baseline()))
        .figure("ratio_to_spread_rows", rounded(spread.ratio()))
        .figure("aim_20_times_a_hot_row", aim(hot.ratio() >= HOT_RATIO))
        .figure("aim_3_times_spread_rows", aim(spread.ratio() >= SPREAD_RATIO))
        .figure("aim_window_under_2_s", aim(median(&seconds) < WINDOW_SECONDS))
        .figure("batch_mean_transitions", rounded(batch))
        .figure("command_alone_p50_ms", rounded(alone.p50))
        .figure("command_alone_p99_ms", rounded(alone.p99))
        .figure("command_beside_p50_ms", rounded(beside.p50))
        .figure("command_beside_p99_ms", rounded(beside.p99));
    let mut grown = vec![(allocations, median(&seconds))];
    for size in [allocations / 10, most].into_iter().filter(|size| *size >= OF_ONE && *size != allocations) {
        let ours = Ours::prepare(server.database(&format!("ours_{size}")).await?, size / OF_ONE).await?;
        // The first warms what the others had warm.
        ours.window().await?;
        grown.push((size, ours.window().await?.as_secs_f64()));
        ours.check().await?;
    }
    grown.sort_unstable_by_key(|(size, _)| *size);
    for (size, seconds) in &grown {
        report = report
            .figure(format!("window_of_{size}_s"), rounded(*seconds))
            .figure(format!("window_of_{size}_us_each"), rounded(seconds * 1e6 / *size as f64));
    }
    report = report
        .condition("postgres", version)
        .condition("fsync", "on")
        .condition("synchronous_commit", "on")
        .condition("link", "socket, for both")
        .condition("allocations", allocations)
        .condition("accounts", allocations / OF_ONE)
        .condition("pgbench", format!("{} clients, prepared", baseline::CLIENTS))
        .condition("rounds", plan.rounds)
        .condition("seconds_each", plan.each.as_secs_f64());
    for (name, value) in postgres::SETTINGS {
        report = report.condition(name, value);
    }
    report.publish()
}
