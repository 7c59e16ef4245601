//! How exact the rate limit of a cluster is: one caller at five times their limit, at three replicas at once, for five minutes. What is
//! admitted is compared with what the limit allows, burst + rate × time, and has to be within 1 % of it. A second caller within their
//! limit shows that other callers are not affected by the first.

use anyhow::ensure;
use futures::future::try_join_all;
use local_servers::identity::DemoUser;
use secrecy::ExposeSecret as _;
use std::time::{Duration, Instant};
use tests::bench::http_client::{BenchClient, Request};
use tests::bench::{BenchReport, MeasurementPlan, PairedSamples, block_on, conclude, release_build, rounded};
use tests::cluster::TestCluster;

const REPLICAS: usize = 3;
/// Connections of the caller over the limit to each replica.
const AT_ONCE: usize = 4;
/// Requests a minute: the burst, and the rate.
const LIMIT: u32 = 600;
/// The request rate as a multiple of the limit.
const HASTE: u32 = 5;
/// The duration for which the target is set; `BENCH_SECONDS` shortens a trial run.
const SECONDS: f64 = 300.0;
/// The tolerated deviation from the limit.
const WITHIN: f64 = 0.01;
/// Requests a second of the caller within the limit.
const PATIENT: f64 = 2.0;

fn main() -> anyhow::Result<()> {
    block_on(async {
        let during = MeasurementPlan::of_seconds(SECONDS)?.each;
        let cluster = TestCluster::builder()
            .own_postgres()
            .binaries(&release_build()?)
            .replicas(REPLICAS)
            .policy("rate_limit.api_requests_per_minute", LIMIT)
            .variable("RUST_LOG", "warn")
            .start()
            .await;
        cluster.wait_for_balanced_shards().await;
        let measured = measure(&cluster, during).await;
        conclude(cluster, measured).await
    })
}

async fn measure(cluster: &TestCluster, during: Duration) -> anyhow::Result<BenchReport> {
    let (hasty, patient) = (token_of(cluster, "hasty")?, token_of(cluster, "patient")?);
    let mut callers = Vec::new();
    for number in 0..REPLICAS * AT_ONCE {
        callers.push(connect(cluster, number % REPLICAS).await?);
    }
    let mut others = connect(cluster, 0).await?;
    let unasked = fail_open(cluster).await?;

    let began = Instant::now();
    let per_second = f64::from(LIMIT) / 60.0 * f64::from(HASTE) / callers.len() as f64;
    let asking = callers.iter_mut().enumerate().map(|(number, caller)| {
        let ahead = Duration::from_secs_f64(number as f64 / per_second / (REPLICAS * AT_ONCE) as f64);
        ask(caller, &hasty, began + ahead, began + during, per_second)
    });
    let (of_hasty, of_patient) =
        tokio::try_join!(try_join_all(asking), ask(&mut others, &patient, began, began + during, PATIENT))?;
    let elapsed = began.elapsed().as_secs_f64();

    let asked: u32 = of_hasty.iter().map(|count| count.asked).sum();
    let admitted = f64::from(of_hasty.iter().map(|count| count.admitted).sum::<u32>());
    let expected = f64::from(LIMIT) + f64::from(LIMIT) / 60.0 * elapsed;
    let offered = f64::from(asked) / elapsed / (f64::from(LIMIT) / 60.0);
    // With fewer requests than this, the burst alone would have admitted all.
    ensure!(f64::from(asked) > 1.5 * expected, "{asked} requests are too few to show anything");
    let mut turns = PairedSamples::default();
    turns.round(admitted, expected);
    let aim = |met: bool| if met { "met" } else { "missed" };
    Ok(BenchReport::new("limiter", "admitted", "burst + rate x time", &turns)
        .metric("deviation_percent", rounded((admitted / expected - 1.0) * 100.0))
        .metric("seconds", rounded(elapsed))
        .metric("asked", asked)
        .metric("asked_times_the_limit", rounded(offered))
        .metric("let_in_unasked", fail_open(cluster).await? - unasked)
        .metric("refused_of_another_caller_within_their_limit", of_patient.asked - of_patient.admitted)
        .metric("aim_within_1_percent", aim((admitted / expected - 1.0).abs() <= WITHIN))
        .condition("replicas", REPLICAS)
        .condition("limit", format!("{LIMIT} a minute, asked for {HASTE} times"))
        .condition("seconds_of_the_aim", SECONDS)
        .condition("connections", callers.len()))
}

fn token_of(cluster: &TestCluster, name: &str) -> anyhow::Result<String> {
    cluster.identity.admit(DemoUser::new(name, &["user"]));
    Ok(cluster.identity.token_of(name)?.expose_secret().to_owned())
}

async fn connect(cluster: &TestCluster, replica: usize) -> anyhow::Result<BenchClient> {
    BenchClient::connect(&cluster.replicas[replica].public_url(), cluster.authority.certificate_path()).await
}

struct Count {
    asked: u32,
    admitted: u32,
}

/// Sends requests at a fixed rate; delayed ones are caught up with.
async fn ask(
    caller: &mut BenchClient,
    token: &str,
    from: Instant,
    until: Instant,
    per_second: f64,
) -> anyhow::Result<Count> {
    let (request, mut count) = (Request::get("/api/v1/skus", token), Count { asked: 0, admitted: 0 });
    let mut due = from;
    while due < until {
        tokio::time::sleep_until(due.into()).await;
        match caller.status_of(&request).await? {
            200 => count.admitted += 1,
            429 => {}
            status => anyhow::bail!("a request was answered {status}"),
        }
        count.asked += 1;
        due += Duration::from_secs_f64(1.0 / per_second);
    }
    Ok(count)
}

/// The number of requests that the replicas admitted without a reply of the rate cell's owner.
async fn fail_open(cluster: &TestCluster) -> anyhow::Result<u64> {
    let mut sum = 0;
    for index in 0..REPLICAS {
        let stats = cluster.operator_at(index).get("/metrics").await;
        let line = stats.text.lines().find(|line| line.starts_with("api_ratelimit_fail_open_total{group=\"api\"}"));
        let value = line.and_then(|line| line.rsplit(' ').next()).unwrap_or("0");
        sum += value.parse::<u64>()?;
    }
    Ok(sum)
}
