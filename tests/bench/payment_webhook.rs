//! Accepted webhooks per second, against a plain handler in the same run that checks the same signature and does one INSERT for each event.
//! Ours stores each event sealed, with its history and reactions, and processes it while the next ones arrive: events of payments, of
//! which each is sent to its payment (here to none: the account is shared). A further metric are events without reactions.
//! Both ends use HTTP/1.1 over TLS on persistent connections, each as a process of its own.

use anyhow::{Context, ensure};
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use edge::payment_processor::signature::WebhookSecrets;
use edge::payment_webhook::PATH;
use futures::future::{join_all, try_join_all};
use hdrhistogram::Histogram;
use secrecy::ExposeSecret as _;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sqlx::postgres::{PgPool, PgPoolOptions};
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tests::bench::http_client::{BenchClient, Request};
use tests::bench::{BenchReport, MeasurementPlan, PairedSamples, median, programs, rounded, tls_listener};
use tests::cluster::TestCluster;
use tests::cluster::fake_processor::{FakeProcessor, SECRET, event, signature};
use tokio::sync::Mutex;

const VARIABLE: &str = "BENCH_WEBHOOK_BASELINE";
/// Connections, with one event in flight on each.
const AT_ONCE: usize = 64;
const AIM_PER_SECOND: f64 = 2_000.0;
/// The timeout until all events are processed.
const DRAINED_WITHIN: Duration = Duration::from_secs(120);

/// The number of events so far, of both, so that each is unique.
static NUMBER: AtomicU64 = AtomicU64::new(0);

fn main() -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        match std::env::var(VARIABLE) {
            Ok(settings) => serve(serde_json::from_str(&settings)?).await,
            Err(_) => run().await,
        }
    })
}

async fn run() -> anyhow::Result<()> {
    let plan = MeasurementPlan::from_environment()?;
    let fake_processor = FakeProcessor::start().await;
    let cluster = TestCluster::builder().own_postgres().binaries(&programs()?).variable("RUST_LOG", "warn");
    let cluster = fake_processor.configure(cluster).start().await;
    match measure(&cluster, plan).await {
        Ok(report) => {
            cluster.shutdown().await;
            report.publish()
        }
        // A failed benchmark keeps the cluster's folder and prints its path.
        Err(error) => panic!("{error:?}"),
    }
}

async fn measure(cluster: &TestCluster, plan: MeasurementPlan) -> anyhow::Result<BenchReport> {
    let plain = Baseline::start(cluster).await?;
    let url = cluster.replicas[0].webhook_url();
    let ours = connect(url.strip_suffix(PATH).context("a webhook URL ends with its path")?, cluster).await?;
    let theirs = connect(&plain.url, cluster).await?;
    for callers in [&ours, &theirs] {
        load(callers, PAYMENT, Duration::from_secs(1)).await?;
    }
    drained(cluster).await?;
    let mut turns = PairedSamples::default();
    let (mut worked, mut kept, mut p50, mut p99) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for _ in 0..plan.rounds {
        let began = Instant::now();
        let (rate, taken) = load(&ours, PAYMENT, plan.each).await?;
        drained(cluster).await?;
        worked.push(taken as f64 / began.elapsed().as_secs_f64());
        turns.round(rate, load(&theirs, PAYMENT, plan.each).await?.0);
        kept.push(load(&ours, OF_NO_CONSEQUENCE, plan.each).await?.0);
        let times = paced(&ours, plan.each, rate / 2.0).await?;
        p50.push(times.value_at_quantile(0.5) as f64 / 1000.0);
        p99.push(times.value_at_quantile(0.99) as f64 / 1000.0);
        drained(cluster).await?;
    }
    let met = |rate: f64| if rate >= AIM_PER_SECOND { "met" } else { "missed" };
    let kept = median(&kept);
    Ok(BenchReport::new("payment_webhook", "events/s", "a plain axum handler and an INSERT", &turns)
        .metric("taken_in_and_worked_on_per_second", rounded(median(&worked)))
        .metric("p50_ms_at_half_load", rounded(median(&p50)))
        .metric("p99_ms_at_half_load", rounded(median(&p99)))
        .metric("of_no_consequence_per_second", rounded(kept))
        .metric("aim_2000_per_second", met(turns.ours()))
        .metric("aim_2000_per_second_of_no_consequence", met(kept))
        .condition("replicas", 1)
        .condition("connections", AT_ONCE)
        .condition("body_bytes", body(0, PAYMENT).len()))
}

/// An event of a payment.
const PAYMENT: &str = "payment_intent.succeeded";
const OF_NO_CONSEQUENCE: &str = "invoice.updated";

/// An event of typical size.
fn body(number: u64, event_type: &str) -> String {
    let lines: Vec<Value> = (0..12)
        .map(|line| json!({ "id": format!("il_{number}_{line}"), "amount": 1_000 + line, "currency": "usd", "description": "one of a dozen lines" }))
        .collect();
    let object = json!({
        "id": format!("pi_{number}"), "amount": 12_066, "currency": "usd", "status": "succeeded", "lines": { "data": lines },
    });
    event(&format!("evt_{number}"), event_type, &object)
}

fn next(event_type: &str) -> Request {
    let body = body(NUMBER.fetch_add(1, Ordering::Relaxed), event_type);
    Request::signed(PATH, &signature("v1", 0, &body), &body)
}

async fn connect(base: &str, cluster: &TestCluster) -> anyhow::Result<Vec<Mutex<BenchClient>>> {
    let ca = cluster.authority.certificate_path();
    let connecting = (0..AT_ONCE).map(|_| BenchClient::connect(base, ca));
    Ok(try_join_all(connecting).await?.into_iter().map(Mutex::new).collect())
}

/// Responses per second on all connections at once, and their number.
async fn load(callers: &[Mutex<BenchClient>], event_type: &str, during: Duration) -> anyhow::Result<(f64, u64)> {
    let began = Instant::now();
    let one = async |caller: &Mutex<BenchClient>| {
        let mut caller = caller.lock().await;
        let mut done = 0_u64;
        while began.elapsed() < during {
            caller.send(&next(event_type)).await?;
            done += 1;
        }
        anyhow::Ok(done)
    };
    let mut done = 0;
    for of_one in join_all(callers.iter().map(one)).await {
        done += of_one?;
    }
    ensure!(done > 0, "nothing was answered");
    Ok((done as f64 / began.elapsed().as_secs_f64(), done))
}

/// Latencies of events at a fixed rate, in microseconds from the time when each was due.
async fn paced(callers: &[Mutex<BenchClient>], during: Duration, per_second: f64) -> anyhow::Result<Histogram<u64>> {
    let began = Instant::now();
    let interval = Duration::from_secs_f64(callers.len() as f64 / per_second.max(1.0));
    let one = async |(number, caller): (usize, &Mutex<BenchClient>)| {
        let mut caller = caller.lock().await;
        let mut times = Histogram::<u64>::new(3)?;
        let mut due = began + interval.mul_f64(number as f64 / AT_ONCE as f64);
        while due.duration_since(began) < during {
            tokio::time::sleep_until(due.into()).await;
            caller.send(&next(PAYMENT)).await?;
            times.record(u64::try_from(due.elapsed().as_micros())?)?;
            due += interval;
        }
        anyhow::Ok(times)
    };
    let mut times = Histogram::<u64>::new(3)?;
    for of_one in join_all(callers.iter().enumerate().map(one)).await {
        times.add(of_one?)?;
    }
    Ok(times)
}

/// Waits until every event is processed.
async fn drained(cluster: &TestCluster) -> anyhow::Result<()> {
    let until = Instant::now() + DRAINED_WITHIN;
    loop {
        let statement = "SELECT EXISTS (SELECT 1 FROM entity WHERE kind = 'processor_event' AND state <> 'processed')";
        let waits: bool = sqlx::query_scalar(statement).fetch_one(&cluster.pool).await?;
        if !waits {
            return Ok(());
        }
        ensure!(Instant::now() < until, "events are not worked on within {DRAINED_WITHIN:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The plain handler's process.
struct Baseline {
    url: String,
    process: Child,
}

#[derive(Deserialize, Serialize)]
struct Settings {
    database: String,
    certificate: PathBuf,
    key: PathBuf,
}

impl Baseline {
    async fn start(cluster: &TestCluster) -> anyhow::Result<Self> {
        let table = "CREATE TABLE plain (id text PRIMARY KEY, body jsonb NOT NULL, received_at timestamptz NOT NULL DEFAULT now())";
        sqlx::query(table).execute(&cluster.pool).await?;
        let certificate = cluster.authority.server_certificate("plain")?;
        let settings = Settings {
            database: cluster.postgres.url().expose_secret().to_owned(),
            certificate: certificate.certificate_path,
            key: certificate.key_path,
        };
        let mut command = Command::new(std::env::current_exe()?);
        command.env(VARIABLE, serde_json::to_string(&settings)?).stdout(Stdio::piped());
        let mut process = command.spawn().context("the baseline does not start")?;
        let out = process.stdout.take().context("the baseline has no output")?;
        let mut port = String::new();
        BufReader::new(out).read_line(&mut port)?;
        Ok(Self { url: format!("https://127.0.0.1:{}", port.trim()), process })
    }
}

impl Drop for Baseline {
    fn drop(&mut self) {
        // It has no state to lose.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[derive(Clone)]
struct Plain {
    pool: PgPool,
    secrets: WebhookSecrets,
}

async fn serve(settings: Settings) -> anyhow::Result<()> {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let pool = PgPoolOptions::new().max_connections(16).connect(&settings.database).await?;
    let secrets = WebhookSecrets::new(&[SECRET.into()]).context("the secret is one")?;
    let router = Router::new().route(PATH, post(take)).with_state(Plain { pool, secrets });
    tls_listener::serve(router, &settings.certificate, &settings.key).await
}

async fn take(State(plain): State<Plain>, headers: HeaderMap, body: Bytes) -> Result<(), StatusCode> {
    let signature = headers.get("stripe-signature").and_then(|value| value.to_str().ok());
    let signature = signature.ok_or(StatusCode::BAD_REQUEST)?;
    plain.secrets.verify(signature, &body, chrono::Utc::now()).map_err(|_| StatusCode::BAD_REQUEST)?;
    let event: Value = serde_json::from_slice(&body).map_err(|_| StatusCode::BAD_REQUEST)?;
    let id = event["id"].as_str().ok_or(StatusCode::BAD_REQUEST)?;
    sqlx::query("INSERT INTO plain (id, body) VALUES ($1, $2) ON CONFLICT DO NOTHING")
        .bind(id)
        .bind(&event)
        .execute(&plain.pool)
        .await
        .map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    Ok(())
}
