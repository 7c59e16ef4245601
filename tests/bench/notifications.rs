//! The latency of notifications with many subscribers: sockets of many users at one replica over TLS, each message to
//! all sockets of one user, at a fixed rate. Measured twice: from the event on its stream through the relay to the socket, and
//! from NATS to the socket. The baseline of the latter, in the same run: the same messages at the same rate to the same number of plain
//! subscribers of NATS, each with a TLS connection of its own. All subscribers run in this process.
//!
//! `BENCH_SOCKETS` sets a smaller number than 10,000, as does the limit of open files; `BENCH_SECONDS` shortens each measurement.

#[path = "notifications/nats_subscribers.rs"]
mod nats_subscribers;
#[path = "notifications/websocket_subscribers.rs"]
mod websocket_subscribers;

use anyhow::{Context, ensure};
use async_nats::HeaderMap;
use domain::billing_account::Holder;
use domain::notification::Channel;
use domain::{BillingAccountId, Event};
use hdrhistogram::Histogram;
use nats_subscribers::NatsSubscribers;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use supervisors::cluster::bus::Bus;
use tests::bench::memory::{resident_kib, slope};
use tests::bench::{BenchReport, MeasurementPlan, PairedSamples, count_from_env, programs, rounded};
use tests::cluster::TestCluster;
use tokio::time::{Instant, MissedTickBehavior, interval};
use uuid::Uuid;
use websocket_subscribers::{Latencies, WebSocketSubscribers};

const SOCKETS: usize = 10_000;
/// The number of sockets of each user, to which a message goes.
const OF_ONE_USER: usize = 10;
const A_SECOND: u64 = 1000;
/// The number of measurements, at evenly spaced counts of sockets.
const LOOKS: usize = 4;
/// The duration at each count for which the target is set.
const SECONDS: f64 = 15.0;
const SETTLES_IN: Duration = Duration::from_secs(3);
/// The time for messages in flight after the last one is published.
const REST: Duration = Duration::from_secs(2);
const AIM_MS: f64 = 100.0;

fn main() -> anyhow::Result<()> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?.block_on(run())
}

async fn run() -> anyhow::Result<()> {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most)?;
    let sockets = count_from_env("BENCH_SOCKETS")?.unwrap_or(SOCKETS).min(usize::try_from(most)?.saturating_sub(1000));
    let sockets = sockets.max(LOOKS * OF_ONE_USER) / (LOOKS * OF_ONE_USER) * (LOOKS * OF_ONE_USER);
    let during = MeasurementPlan::of_seconds(SECONDS)?.each;
    let cluster =
        TestCluster::builder().own_postgres().binaries(&programs()?).variable("RUST_LOG", "warn").start().await;
    match measure(&cluster, sockets, during).await {
        Ok(report) => {
            cluster.shutdown().await;
            report.publish()
        }
        // A failed benchmark keeps the cluster's folder and prints its path.
        Err(error) => panic!("{error:?}"),
    }
}

/// The results at one count of sockets.
struct Measurement {
    sockets: usize,
    from_event: Latencies,
    from_bus: Latencies,
    kib: f64,
}

async fn measure(cluster: &TestCluster, sockets: usize, during: Duration) -> anyhow::Result<BenchReport> {
    let users: Arc<[String]> = (0..sockets / OF_ONE_USER).map(|n| format!("listener-{n}")).collect();
    let bus = cluster.member_bus().await;
    let pid = cluster.replicas[0].pid().context("the replica has ended")?;
    let mut listeners = WebSocketSubscribers::at(cluster)?;
    let mut seen = Vec::new();
    for step in 1..=LOOKS {
        let count = sockets * step / LOOKS;
        listeners.grow_to(count, |n| &users[n / OF_ONE_USER]).await?;
        tokio::time::sleep(SETTLES_IN).await;
        listeners.expect_all_open()?;
        let kib = resident_kib(pid)?;
        let users = &users[..count / OF_ONE_USER];
        listeners.begin();
        let published = publish(&bus, MessageKind::Event, during, |n| event(&users[n % users.len()])).await?;
        let from_event = listeners.taken(published * OF_ONE_USER).await?;
        listeners.begin();
        let published =
            publish(&bus, MessageKind::Notification, during, |n| notification(&users[n % users.len()])).await?;
        let from_bus = listeners.taken(published * OF_ONE_USER).await?;
        seen.push(Measurement { sockets: count, from_event, from_bus, kib });
    }
    listeners.close().await;

    let mut plain = NatsSubscribers::at(cluster)?;
    plain.grow_to(sockets, |n| Channel::User(users[n / OF_ONE_USER].as_str().into()).subject()).await?;
    tokio::time::sleep(SETTLES_IN).await;
    plain.begin();
    let published = publish(&bus, MessageKind::Notification, during, |n| notification(&users[n % users.len()])).await?;
    let baseline = plain.taken(published * OF_ONE_USER).await?;
    plain.close();
    report(&seen, &baseline, during)
}

/// The kind of a published message; each kind is authenticated in its own way.
#[derive(Clone, Copy)]
enum MessageKind {
    Event,
    Notification,
}

/// Publishes messages at a fixed rate; delayed ones are caught up with. Returns their number.
async fn publish(
    bus: &Bus,
    kind: MessageKind,
    during: Duration,
    word: impl Fn(usize) -> anyhow::Result<(String, String)>,
) -> anyhow::Result<usize> {
    let began = Instant::now();
    let mut turn = interval(Duration::from_millis(1));
    turn.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut published = 0;
    while began.elapsed() < during {
        turn.tick().await;
        let due = usize::try_from(began.elapsed().as_micros() * u128::from(A_SECOND) / 1_000_000)?;
        while published < due {
            let (subject, message) = word(published)?;
            let mut headers = HeaderMap::new();
            match kind {
                MessageKind::Event => {
                    bus.stamp_event(&subject, &message, &mut headers);
                    bus.client().publish_with_headers(subject, headers, message.into()).await?;
                }
                MessageKind::Notification => {
                    ensure!(
                        bus.notify(subject, None, headers, message.into_bytes()).await,
                        "a notification did not leave"
                    );
                }
            }
            published += 1;
        }
    }
    bus.client().flush().await?;
    tokio::time::sleep(REST).await;
    Ok(published)
}

/// As the relay of the outbox publishes it.
fn event(user: &str) -> anyhow::Result<(String, String)> {
    let account_id = BillingAccountId(Uuid::new_v4());
    let event = Event::BalanceLow { account_id, holder: Holder::User(user.into()) };
    let message = json!({
        "specversion": "1.0", "id": Uuid::new_v4(), "source": "/gpuaas/shards/0", "type": event.subject(),
        "subject": event.about().to_string(), "time": chrono::Utc::now(), "datacontenttype": "application/json",
        "correlationid": "bench", "epoch": 1, "sequence": "00000000000000000001", "data": event,
    });
    Ok((event.subject().to_owned(), message.to_string()))
}

/// As the notification relay publishes it.
fn notification(user: &str) -> anyhow::Result<(String, String)> {
    let channel = Channel::User(user.into());
    let account_id = BillingAccountId(Uuid::new_v4());
    let about = edge::notifications::EventHeader {
        id: Uuid::new_v4(),
        kind: "billing.balance_low",
        subject: &format!("billing_account/{account_id}"),
        time: chrono::Utc::now(),
        correlation_id: "bench",
    };
    let data = domain::notification::NotificationDetails { account_id: Some(account_id), ..Default::default() };
    Ok((channel.subject(), edge::notifications::encoded(&about, &channel, &data)))
}

fn report(seen: &[Measurement], baseline: &Latencies, during: Duration) -> anyhow::Result<BenchReport> {
    let last = seen.last().context("nothing was measured")?;
    ensure!(
        last.from_bus.times.len() > 100 && baseline.times.len() > 100,
        "too little was received to report anything"
    );
    let ms = |times: &Histogram<u64>, quantile| rounded(times.value_at_quantile(quantile) as f64 / 1000.0);
    let mut turns = PairedSamples::default();
    turns.round(ms(&last.from_bus.times, 0.99), ms(&baseline.times, 0.99));
    let mut report = BenchReport::new("notifications", "p99 ms, bus to socket", "NATS to plain subscribers", &turns);
    for at in seen {
        let n = at.sockets;
        for (way, taken) in [("event", &at.from_event), ("bus", &at.from_bus)] {
            for (name, quantile) in [("p50", 0.5), ("p99", 0.99)] {
                report = report.metric(format!("{way}_to_socket_{name}_ms_at_{n}"), ms(&taken.times, quantile));
            }
            report = report.metric(format!("{way}_to_socket_missing_at_{n}"), taken.missing);
        }
    }
    let kib: Vec<(f64, f64)> = seen.iter().map(|at| (at.sockets as f64, at.kib)).collect();
    let p99 = ms(&last.from_event.times, 0.99);
    Ok(report
        .metric("max_ms_event_to_socket", ms(&last.from_event.times, 1.0))
        .metric("plain_p50_ms", ms(&baseline.times, 0.5))
        .metric("plain_missing", baseline.missing)
        .metric("kib_each_socket", rounded(slope(&kib)))
        .metric(
            "aim_p99_under_100_ms_from_event",
            if p99 < AIM_MS && last.from_event.missing == 0 { "met" } else { "missed" },
        )
        .condition("sockets", last.sockets)
        .condition("messages_a_second", A_SECOND)
        .condition("sockets_of_a_message", OF_ONE_USER)
        .condition("seconds", during.as_secs_f64())
        .condition("where", "replica, Postgres, NATS, publishers and subscribers share the machine")
        .condition("connection", "TLS 1.3, one for each who listens, in both"))
}
