//! A billing window of many accounts at once: the time until each has charged its running allocations, with everything that the
//! service writes of it (double entry, snapshot under its version, history, deadline), against an UPDATE of a balance for each event by
//! pgbench, in turns: all of one row, and spread over as many rows as there are accounts.
//!
//! Ours is the part of a replica that does it: the worker, the mailboxes, the loader and the committer, with a clock that
//! is set forward by a window each round. Every account is due at the same moment and passivated, which is the worst case. Further metrics
//! are the growth of the cost with the number of allocations, and the latency of other commands meanwhile.
//!
//! `BENCH_ALLOCATIONS` (100,000) are compared, the growth is measured up to `BENCH_MOST` (1,000,000); ten belong to an account.

#[path = "billing/accrual.rs"]
mod accrual;
#[path = "billing/baseline.rs"]
mod baseline;

use accrual::AccrualBench;
use anyhow::ensure;
use baseline::{Baseline, Rows};
use tests::bench::postgres::{self, Postgres};
use tests::bench::{BenchReport, MeasurementPlan, PairedSamples, count_from_env, median, rounded};

/// Running allocations of one account.
const OF_ONE: usize = 10;

const HOT_RATIO: f64 = 20.0;
const SPREAD_RATIO: f64 = 3.0;
const WINDOW_SECONDS: f64 = 2.0;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let plan = MeasurementPlan::from_environment()?;
    let allocations = count_from_env("BENCH_ALLOCATIONS")?.unwrap_or(100_000);
    let most = count_from_env("BENCH_MOST")?.unwrap_or(1_000_000);
    ensure!(allocations >= OF_ONE, "at least an account is needed");
    let server = Postgres::start().await?;
    let ours = AccrualBench::prepare(server.database("ours").await?, allocations / OF_ONE).await?;
    let theirs = Baseline::prepare(&server, allocations / OF_ONE).await?;
    server.age().await?;

    let (mut hot, mut spread) = (PairedSamples::default(), PairedSamples::default());
    let mut seconds = Vec::new();
    for _ in 0..plan.rounds {
        let window = ours.window().await?.as_secs_f64();
        let rate = allocations as f64 / window;
        hot.round(rate, theirs.load(Rows::One, plan.each).await?);
        spread.round(rate, theirs.load(Rows::Spread, plan.each).await?);
        seconds.push(window);
    }
    let alone = ours.measure_requests(plan.each).await?;
    let beside = ours.measure_requests_during_a_window().await?;
    let version: String = ours.server_version().await?;
    let batch = ours.batch_mean();
    ours.check().await?;

    let aim = |met: bool| if met { "met" } else { "missed" };
    let mut report = BenchReport::new("billing", "postings/s", "pgbench, an UPDATE each, of one row", &hot)
        .metric("window_s", rounded(median(&seconds)))
        .metric("window_max_s", rounded(seconds.iter().copied().fold(0.0, f64::max)))
        .metric("spread_rows_updates_per_s", rounded(spread.baseline()))
        .metric("ratio_to_spread_rows", rounded(spread.ratio()))
        .metric("aim_20_times_a_hot_row", aim(hot.ratio() >= HOT_RATIO))
        .metric("aim_3_times_spread_rows", aim(spread.ratio() >= SPREAD_RATIO))
        .metric("aim_window_under_2_s", aim(median(&seconds) < WINDOW_SECONDS))
        .metric("batch_mean_transitions", rounded(batch))
        .metric("command_alone_p50_ms", rounded(alone.p50))
        .metric("command_alone_p99_ms", rounded(alone.p99))
        .metric("command_beside_p50_ms", rounded(beside.p50))
        .metric("command_beside_p99_ms", rounded(beside.p99));
    let mut grown = vec![(allocations, median(&seconds))];
    for size in [allocations / 10, most].into_iter().filter(|size| *size >= OF_ONE && *size != allocations) {
        let ours = AccrualBench::prepare(server.database(&format!("ours_{size}")).await?, size / OF_ONE).await?;
        // The first window is the warm-up.
        ours.window().await?;
        grown.push((size, ours.window().await?.as_secs_f64()));
        ours.check().await?;
    }
    grown.sort_unstable_by_key(|(size, _)| *size);
    for (size, seconds) in &grown {
        report = report
            .metric(format!("window_of_{size}_s"), rounded(*seconds))
            .metric(format!("window_of_{size}_us_each"), rounded(seconds * 1e6 / *size as f64));
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
