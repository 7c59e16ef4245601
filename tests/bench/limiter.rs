//! How exact the rate limit of a cluster is: one caller at five times their limit, at three replicas at once, for five minutes. What is
//! admitted is compared with what the limit allows, burst + rate × time, and has to be within 1 % of it. A second caller within their
//! limit shows that nobody else pays for the first.

use anyhow::ensure;
use futures::future::try_join_all;
use secrecy::ExposeSecret as _;
use std::time::{Duration, Instant};
use supervisors::dev::identity::Person;
use tests::bench::caller::{Caller, Request};
use tests::bench::{Plan, Report, Turns, release_build, rounded};
use tests::world::World;

const REPLICAS: usize = 3;
/// Connections of the hasty caller to each replica.
const AT_ONCE: usize = 4;
/// Requests a minute: the burst, and the rate.
const LIMIT: u32 = 600;
/// So many times the limit is asked for.
const HASTE: u32 = 5;
/// The aim is for so long; `BENCH_SECONDS` shortens a look.
const SECONDS: f64 = 300.0;
/// Of what the limit allows, so much may be missing or too much.
const WITHIN: f64 = 0.01;
/// Requests a second of the one who keeps to the limit.
const PATIENT: f64 = 2.0;

fn main() -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let during = Plan::of_seconds(SECONDS)?.each;
        let world = World::plan()
            .binaries(&release_build()?)
            .replicas(REPLICAS)
            .policy("rate_limit.api_requests_per_minute", LIMIT)
            .variable("RUST_LOG", "warn")
            .start()
            .await;
        world.settled().await;
        match measure(&world, during).await {
            Ok(report) => {
                world.end().await;
                report.publish()
            }
            // The world goes as it stands, and tells where it lies.
            Err(error) => panic!("{error:?}"),
        }
    })
}

async fn measure(world: &World, during: Duration) -> anyhow::Result<Report> {
    let (hasty, patient) = (token_of(world, "hasty")?, token_of(world, "patient")?);
    let mut callers = Vec::new();
    for number in 0..REPLICAS * AT_ONCE {
        callers.push(connect(world, number % REPLICAS).await?);
    }
    let mut others = connect(world, 0).await?;
    let unasked = fail_open(world).await?;

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
    // The burst is over when less than this was asked for, and nothing would have been limited.
    ensure!(f64::from(asked) > 1.5 * expected, "{asked} requests are too few to show anything");
    let mut turns = Turns::default();
    turns.round(admitted, expected);
    let aim = |met: bool| if met { "met" } else { "missed" };
    Ok(Report::new("limiter", "admitted", "burst + rate x time", &turns)
        .figure("deviation_percent", rounded((admitted / expected - 1.0) * 100.0))
        .figure("seconds", rounded(elapsed))
        .figure("asked", asked)
        .figure("asked_times_the_limit", rounded(offered))
        .figure("let_in_unasked", fail_open(world).await? - unasked)
        .figure("refused_of_another_caller_within_their_limit", of_patient.asked - of_patient.admitted)
        .figure("aim_within_1_percent", aim((admitted / expected - 1.0).abs() <= WITHIN))
        .condition("replicas", REPLICAS)
        .condition("limit", format!("{LIMIT} a minute, asked for {HASTE} times"))
        .condition("seconds_of_the_aim", SECONDS)
        .condition("connections", callers.len()))
}

fn token_of(world: &World, name: &str) -> anyhow::Result<String> {
    world.identity.admit(Person::new(name, &["user"]));
    Ok(world.identity.token_of(name)?.expose_secret().to_owned())
}

async fn connect(world: &World, replica: usize) -> anyhow::Result<Caller> {
    Caller::connect(&world.replicas[replica].public_url(), world.authority.certificate_path()).await
}

struct Count {
    asked: u32,
    admitted: u32,
}

/// Asks at a rate; what was held up is caught up with.
async fn ask(
    caller: &mut Caller,
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

/// How many requests the replicas let in without an answer of the quota's keeper.
async fn fail_open(world: &World) -> anyhow::Result<u64> {
    let mut sum = 0;
    for index in 0..REPLICAS {
        let stats = world.operator_at(index).get("/metrics").await;
        let line = stats.text.lines().find(|line| line.starts_with("api_ratelimit_fail_open_total{group=\"api\"}"));
        let value = line.and_then(|line| line.rsplit(' ').next()).unwrap_or("0");
        sum += value.parse::<u64>()?;
    }
    Ok(sum)
}
