//! The public API under load, against a plain handler in the same run that verifies the same token and does the same one read or write
//! of SQL: reading a user's SSH keys (one read), and making one of them the default (one write; ours with its history, idempotency record
//! and policy). Both ends use HTTP/1.1 over TLS on persistent connections, each as a process of its own; the client's cost is negligible.
//!
//! Further metrics: reading an allocation, which its owner serves from memory, and the latency of writes at half of the maximal rate.

#[path = "api/baseline.rs"]
mod baseline;

use anyhow::{Context, ensure};
use baseline::Baseline;
use futures::future::{join_all, try_join_all};
use hdrhistogram::Histogram;
use local_servers::identity::DemoUser;
use secrecy::ExposeSecret as _;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tests::bench::http_client::{BenchClient, Request};
use tests::bench::{
    BenchReport, MeasurementPlan, PairedSamples, block_on, conclude, median, raise_open_files, release_build, rounded,
};
use tests::cluster::client::Client;
use tests::cluster::{TestCluster, id_of};
use tokio::sync::Mutex;
use uuid::Uuid;

/// Users with a connection each.
const AT_ONCE: usize = 32;
/// The targets: the share of the plain handler's rate that ours has to reach.
const GET_AIM: f64 = 0.70;
const POST_AIM: f64 = 0.50;
const P99_AIM_MS: f64 = 50.0;

fn main() -> anyhow::Result<()> {
    block_on(async {
        match Baseline::asked_for()? {
            Some(settings) => baseline::serve(settings).await,
            None => run().await,
        }
    })
}

async fn run() -> anyhow::Result<()> {
    let plan = MeasurementPlan::from_environment()?;
    raise_open_files()?;
    let cluster = TestCluster::builder()
        .own_postgres()
        .binaries(&release_build()?)
        .policy("rate_limit.api_requests_per_minute", 1_000_000)
        .variable("RUST_LOG", "warn")
        .start()
        .await;
    let measured = measure(&cluster, plan).await;
    conclude(cluster, measured).await
}

async fn measure(cluster: &TestCluster, plan: MeasurementPlan) -> anyhow::Result<BenchReport> {
    let users = Users::prepare(cluster).await?;
    let plain = Baseline::start(cluster, &users.names()).await?;

    let ours = users.connect(&cluster.replicas[0].public_url(), cluster).await?;
    let theirs = users.connect(&plain.url, cluster).await?;
    let [mut get, mut post] = [PairedSamples::default(), PairedSamples::default()];
    let (mut remembered, mut p50, mut p99) = (Vec::new(), Vec::new(), Vec::new());
    for callers in [&ours, &theirs] {
        // Warm-up: connections, prepared statements, keys.
        load(callers, Duration::from_secs(1), User::keys).await?;
        load(callers, Duration::from_secs(1), User::make_default).await?;
    }
    for _ in 0..plan.rounds {
        get.round(load(&ours, plan.each, User::keys).await?, load(&theirs, plan.each, User::keys).await?);
        let most = load(&ours, plan.each, User::make_default).await?;
        post.round(most, load(&theirs, plan.each, User::make_default).await?);
        remembered.push(load(&ours, plan.each, User::allocation).await?);
        let times = paced(&ours, plan.each, most / 2.0).await?;
        p50.push(times.value_at_quantile(0.5) as f64 / 1000.0);
        p99.push(times.value_at_quantile(0.99) as f64 / 1000.0);
    }

    let aim = |met: bool| if met { "met" } else { "missed" };
    Ok(BenchReport::new("api", "GET/s", "a plain axum handler", &get)
        .metric("post_per_second", rounded(post.ours()))
        .metric("post_baseline_per_second", rounded(post.baseline()))
        .metric("post_ratio", rounded(post.ratio()))
        .metric("get_from_memory_per_second", rounded(median(&remembered)))
        .metric("post_p50_ms_at_half_load", rounded(median(&p50)))
        .metric("post_p99_ms_at_half_load", rounded(median(&p99)))
        .metric("aim_get_ratio_0.70", aim(get.ratio() >= GET_AIM))
        .metric("aim_post_ratio_0.50", aim(post.ratio() >= POST_AIM))
        .metric("aim_post_p99_under_50_ms_at_half_load", aim(median(&p99) < P99_AIM_MS))
        .condition("replicas", 1)
        .condition("users", AT_ONCE)
        .condition("connection", "kept alive; TLS, HTTP/1.1; one for each user, on both ends")
        .condition("get", "GET /api/v1/ssh-keys, two keys")
        .condition("post", "POST /api/v1/ssh-keys/{id}/default, another key each time, with an Idempotency-Key"))
}

/// The users and their resources.
struct Users(Vec<User>);

#[derive(Clone)]
struct User {
    name: String,
    token: String,
    keys: [Uuid; 2],
    allocation: Uuid,
}

/// A user with a connection.
struct UserConnection {
    user: User,
    caller: Mutex<BenchClient>,
}

impl Users {
    /// Creates users with two keys each and a refused allocation: there is neither money nor a node for it.
    async fn prepare(cluster: &TestCluster) -> anyhow::Result<Self> {
        let sku = json!({
            "name": "none-there", "gpu": {"vendor": "NVIDIA", "model": "H100", "memory_mib": 81920, "count": 8},
            "cpu": {"model": "any", "cores": 2}, "memory_mib": 4096, "storage_gib": 10,
            "allowed_regions": ["test-1"], "price": {"currency": "USD", "amount_minor_per_gpu_hour": 250},
        });
        let sku = cluster.admin.post("/api/v1/admin/skus", &sku).await.created();
        cluster.activate(id_of(&sku)).await;
        let prepared = (0..AT_ONCE).map(|number| async move {
            let name = format!("caller-{number}");
            cluster.identity.admit(DemoUser::new(&name, &["user"]));
            let token = cluster.identity.token_of(&name)?.expose_secret().to_owned();
            let client = cluster.at_replica(0, &name);
            let keys = try_join_all([0, 1].map(|n| add_key(&client, number * 2 + n))).await?;
            let wanted = json!({"sku": "none-there", "gpu_count": 1});
            let refused = client.post("/api/v1/allocations", &wanted).await;
            let allocation = refused.body["details"]["allocation_id"].as_str().context("no allocation was made")?;
            let allocation = allocation.parse()?;
            anyhow::Ok(User { name, token, keys: [keys[0], keys[1]], allocation })
        });
        Ok(Self(try_join_all(prepared).await?))
    }

    fn names(&self) -> Vec<(String, [Uuid; 2])> {
        self.0.iter().map(|user| (user.name.clone(), user.keys)).collect()
    }

    async fn connect(&self, base: &str, cluster: &TestCluster) -> anyhow::Result<Vec<UserConnection>> {
        let connected = self.0.iter().map(|user| async move {
            let caller = BenchClient::connect(base, cluster.authority.certificate_path()).await?;
            anyhow::Ok(UserConnection { user: user.clone(), caller: Mutex::new(caller) })
        });
        try_join_all(connected).await
    }
}

async fn add_key(client: &Client, number: usize) -> anyhow::Result<Uuid> {
    let key = ed25519_dalek::SigningKey::from_bytes(&rand::random()).verifying_key();
    let mut blob = Vec::new();
    for part in [b"ssh-ed25519".as_slice(), key.as_bytes()] {
        blob.extend_from_slice(&u32::try_from(part.len())?.to_be_bytes());
        blob.extend_from_slice(part);
    }
    use base64::Engine as _;
    let text = format!("ssh-ed25519 {}", base64::engine::general_purpose::STANDARD.encode(blob));
    let body = json!({"name": format!("key {number}"), "public_key": text});
    let added: Value = client.post("/api/v1/ssh-keys", &body).await.created();
    Ok(id_of(&added))
}

impl User {
    fn keys(&self, _: usize) -> Request {
        Request::get("/api/v1/ssh-keys", &self.token)
    }

    fn allocation(&self, _: usize) -> Request {
        Request::get(&format!("/api/v1/allocations/{}", self.allocation), &self.token)
    }

    fn make_default(&self, turn: usize) -> Request {
        let key = self.keys[turn % 2];
        Request::post(&format!("/api/v1/ssh-keys/{key}/default"), &self.token)
    }
}

/// Responses per second to all users at once, each sending the next request after the response.
async fn load(
    callers: &[UserConnection],
    during: Duration,
    request: impl Fn(&User, usize) -> Request + Copy,
) -> anyhow::Result<f64> {
    let began = Instant::now();
    let one = async |connected: &UserConnection| {
        let mut caller = connected.caller.lock().await;
        let mut done = 0_usize;
        while began.elapsed() < during {
            caller.send(&request(&connected.user, done)).await?;
            done += 1;
        }
        anyhow::Ok(done)
    };
    let mut done = 0;
    for of_one in join_all(callers.iter().map(one)).await {
        done += of_one?;
    }
    ensure!(done > 0, "nothing was answered");
    Ok(done as f64 / began.elapsed().as_secs_f64())
}

/// Latencies of writes at a fixed rate, in microseconds from the time when each was due: requests behind a slow one count as slow.
async fn paced(callers: &[UserConnection], during: Duration, per_second: f64) -> anyhow::Result<Histogram<u64>> {
    let began = Instant::now();
    let interval = Duration::from_secs_f64(callers.len() as f64 / per_second.max(1.0));
    let one = async |(number, connected): (usize, &UserConnection)| {
        let mut caller = connected.caller.lock().await;
        let mut times = Histogram::<u64>::new(3)?;
        let mut due = began + interval.mul_f64(number as f64 / AT_ONCE as f64);
        for turn in 0.. {
            tokio::time::sleep_until(due.into()).await;
            if began.elapsed() >= during {
                break;
            }
            caller.send(&connected.user.make_default(turn)).await?;
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
