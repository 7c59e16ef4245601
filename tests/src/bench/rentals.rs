//! Rentals by simulated users on simulated nodes: whole cycles of renting and releasing.

use crate::cluster::client::Client;
use crate::cluster::fake_agent::FakeAgent;
use crate::cluster::{CREDIT, REGION, TestCluster, id_of};
use anyhow::{Context, ensure};
use futures::future::join_all;
use hdrhistogram::Histogram;
use local_servers::identity::DemoUser;
use secrecy::ExposeSecret as _;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// The SKU that is rented.
pub const SKU: &str = "h100";

/// Simulated nodes that execute their tasks at once.
pub struct SimulatedNodes {
    serving: Vec<tokio::task::JoinHandle<()>>,
}

impl SimulatedNodes {
    /// Registers and enrolls `nodes` nodes of `gpus` GPUs, of the SKU [`SKU`].
    pub async fn onboard(cluster: &mut TestCluster, nodes: usize, gpus: u32) -> Self {
        cluster.offer_sku(SKU, gpus).await;
        let mut bundles = Vec::with_capacity(nodes);
        for _ in 0..nodes {
            let node = cluster.register(SKU).await;
            bundles.push(cluster.bundle(&node).await);
        }
        let mut serving = Vec::with_capacity(nodes);
        for some in bundles.chunks(8) {
            let agents = join_all(some.iter().map(|bundle| FakeAgent::enroll(bundle, gpus))).await;
            serving.extend(agents.into_iter().map(|agent| tokio::spawn(Arc::new(agent).serve())));
        }
        let active = "/api/v1/admin/nodes?limit=200";
        let all =
            |nodes: &Value| nodes["items"].as_array().is_some_and(|it| it.iter().all(|node| node["state"] == "active"));
        cluster.admin.wait_until(active, "all nodes are active", all).await;
        Self { serving }
    }

    /// Stops the agents.
    pub fn leave(&self) {
        for agent in &self.serving {
            agent.abort();
        }
    }
}

/// The users, one for each concurrent cycle: the requests of one user go to one entity, and so are sequential.
pub struct Tenants {
    http: reqwest::Client,
    base: String,
    tokens: Vec<String>,
    /// GPUs of each allocation.
    gpus: u32,
}

/// One measurement.
#[derive(Clone, Debug)]
pub struct RentalLoad {
    pub p50_ms: f64,
    pub p99_ms: f64,
    pub cycles_per_second: f64,
    pub cycles: usize,
}

impl Tenants {
    /// `count` users with credit, who rent `gpus` GPUs at a time.
    ///
    /// # Errors
    /// If one cannot be admitted.
    pub async fn of(cluster: &TestCluster, count: usize, gpus: u32) -> anyhow::Result<Self> {
        let ca = std::fs::read(cluster.authority.certificate_path())?;
        let http = reqwest::Client::builder()
            .tls_certs_only(reqwest::Certificate::from_pem_bundle(&ca)?)
            .no_proxy()
            .timeout(Duration::from_secs(30))
            .build()?;
        let mut tokens = Vec::new();
        for number in 0..count {
            let name = format!("tenant-{number}");
            cluster.identity.admit(DemoUser::new(&name, &["user"]));
            cluster.credit(&name, CREDIT).await;
            tokens.push(cluster.identity.token_of(&name)?.expose_secret().to_owned());
        }
        let client: Client = cluster.at_replica(0, "user");
        Ok(Self { http, base: client.base().to_owned(), tokens, gpus })
    }

    /// Runs concurrent cycles for a while, each: rent, wait for `active`, release, wait for `released`.
    ///
    /// # Errors
    /// If a request is refused, or an allocation does not get on.
    pub async fn cycles(&self, at_once: usize, during: Duration) -> anyhow::Result<RentalLoad> {
        let done = &AtomicUsize::new(0);
        let began = Instant::now();
        let one = |token: usize| async move {
            let token = &self.tokens[token];
            let mut times = Vec::new();
            while began.elapsed() < during {
                times.push(self.cycle(token).await?);
                done.fetch_add(1, Ordering::Relaxed);
            }
            anyhow::Ok(times)
        };
        let measured = join_all((0..at_once).map(one)).await;
        let took = began.elapsed();
        let mut to_active = Histogram::<u64>::new_with_bounds(1, 120_000_000, 3)?;
        for times in measured {
            for time in times? {
                to_active.record(u64::try_from(time.as_micros())?.max(1))?;
            }
        }
        let cycles = done.load(Ordering::Relaxed);
        let millis = |quantile: f64| to_active.value_at_quantile(quantile) as f64 / 1000.0;
        Ok(RentalLoad {
            p50_ms: millis(0.5),
            p99_ms: millis(0.99),
            cycles_per_second: cycles as f64 / took.as_secs_f64(),
            cycles,
        })
    }

    /// Runs one cycle and returns the time until `active`. One event stream of the allocation reports all its states.
    async fn cycle(&self, token: &str) -> anyhow::Result<Duration> {
        let began = Instant::now();
        let wanted = json!({ "sku": SKU, "region_code": REGION, "gpu_count": self.gpus });
        let created = self.post(token, "/api/v1/allocations", &wanted).await?;
        let path = format!("/api/v1/allocations/{}", id_of(&created));
        let url = format!("{}{path}/events", self.base);
        let mut response = self.http.get(url).bearer_auth(token).send().await?.error_for_status()?;
        let mut received = String::new();
        wait_for_event("active", &mut response, &mut received).await.with_context(|| path.clone())?;
        let took = began.elapsed();
        self.post(token, &format!("{path}/release"), &json!({})).await?;
        wait_for_event("released", &mut response, &mut received).await.with_context(|| path.clone())?;
        Ok(took)
    }

    async fn post(&self, token: &str, path: &str, body: &Value) -> anyhow::Result<Value> {
        let request = self.http.post(format!("{}{path}", self.base)).bearer_auth(token);
        let answer = request.header("Idempotency-Key", Uuid::new_v4().to_string()).json(body).send().await?;
        let (status, text) = (answer.status(), answer.text().await?);
        ensure!(status.is_success(), "POST {path}: {status} {text}");
        Ok(serde_json::from_str(&text)?)
    }
}

/// Reads the event stream until this state.
async fn wait_for_event(state: &str, response: &mut reqwest::Response, received: &mut String) -> anyhow::Result<()> {
    let wanted = format!("\"state\":\"{state}\"");
    while !received.contains(&wanted) {
        let more =
            tokio::time::timeout(Duration::from_secs(60), response.chunk()).await.context("nothing for 60 s")??;
        let more = more.with_context(|| format!("the stream ended without {state}: {received}"))?;
        received.push_str(&String::from_utf8_lossy(&more));
    }
    Ok(())
}
