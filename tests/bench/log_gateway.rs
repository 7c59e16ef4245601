//! How much the log gateway passes on, against nginx that passes the same bytes to the same store without reading them, in one run. Ours
//! verifies the node's token, asks the node's entity, decodes the batch and judges its labels. The aim is half of nginx or more, with flat
//! memory. The store is nginx too, and answers 204. All links are TLS with persistent connections.

use anyhow::{Context, ensure};
use futures::future::try_join_all;
use local_servers::pki::Authority;
use local_servers::ports::free_port;
use local_servers::private_files;
use local_servers::process::{ChildProcess, Launch};
use reqwest::Method;
use serde_json::json;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tests::bench::http_client::{BenchClient, Request};
use tests::bench::memory::resident_kib;
use tests::bench::{BenchReport, MeasurementPlan, PairedSamples, block_on, conclude, programs, rounded};
use tests::cluster::TestCluster;
use tests::cluster::fake_agent::FakeAgent;

const PUSH: &str = "/internal/v1/node-logs/loki/api/v1/push";
/// Connections, with one batch in flight on each.
const AT_ONCE: usize = 8;
const LINES: usize = 300;
const LINE_BYTES: usize = 200;
const AIM: f64 = 0.5;
/// Memory that may be added by the measurements, after a first load.
const FLAT_KIB: f64 = 16.0 * 1024.0;

fn main() -> anyhow::Result<()> {
    block_on(async {
        let plan = MeasurementPlan::from_environment()?;
        let nginx = Nginx::start()?;
        let mut cluster = TestCluster::builder()
            .own_postgres()
            .binaries(&programs()?)
            .variable("RUST_LOG", "warn")
            .variable("SVC_LOG_STORE_URL", &format!("https://localhost:{}", nginx.store))
            .variable("SVC_LOG_STORE_CA_PATH", &nginx.authority.certificate_path().display().to_string())
            .policy("rate_limit.node_log_pushes_per_minute", 100_000)
            .start()
            .await;
        let measured = measure(&mut cluster, &nginx, plan).await;
        conclude(cluster, measured).await
    })
}

async fn measure(cluster: &mut TestCluster, nginx: &Nginx, plan: MeasurementPlan) -> anyhow::Result<BenchReport> {
    cluster.offer_sku("h100", 1).await;
    let (node, bundle) = cluster.registered("h100").await;
    let agent = FakeAgent::enroll(&bundle, 1).await;
    let token = agent.send(Method::POST, "log-token", None).await.ok();
    let token = token["token"].as_str().context("there is a token")?.to_owned();
    let body = batch(&node.id.to_string());
    let request = Request::push(PUSH, &token, &body);
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..AT_ONCE {
        ours.push(BenchClient::connect(&localhost(&cluster.node_url())?, cluster.authority.certificate_path()).await?);
        let proxy = format!("https://localhost:{}", nginx.proxy);
        theirs.push(BenchClient::connect(&proxy, nginx.authority.certificate_path()).await?);
    }
    for clients in [&mut ours, &mut theirs] {
        load(clients, &request, Duration::from_secs(2)).await?;
    }
    let pid = cluster.replicas[0].pid().context("the replica has ended")?;
    let (before, mut turns) = (resident_kib(pid)?, PairedSamples::default());
    for _ in 0..plan.rounds {
        let megabytes = |batches: f64| batches * body.len() as f64 / 1e6;
        turns.round(
            megabytes(load(&mut ours, &request, plan.each).await?),
            megabytes(load(&mut theirs, &request, plan.each).await?),
        );
    }
    let grown = resident_kib(pid)? - before;
    let is = |met: bool| if met { "met" } else { "missed" };
    let report = BenchReport::new("log-gateway", "MB/s", "nginx", &turns);
    let aim = is(report.ratio >= AIM);
    Ok(report
        .metric("aim_half_of_nginx", aim)
        .metric("resident_before_kib", rounded(before))
        .metric("resident_grown_kib", rounded(grown))
        .metric("aim_flat_memory", is(grown < FLAT_KIB))
        .condition("batch_bytes", body.len())
        .condition("lines_per_batch", LINES)
        .condition("connections", AT_ONCE))
}

/// Batches a second.
async fn load(clients: &mut [BenchClient], request: &Request, during: Duration) -> anyhow::Result<f64> {
    let began = Instant::now();
    let all = try_join_all(clients.iter_mut().map(async |client: &mut BenchClient| {
        let mut count = 0_u32;
        while began.elapsed() < during {
            client.send(request).await?;
            count += 1;
        }
        anyhow::Ok(count)
    }));
    let count: u32 = all.await?.into_iter().sum();
    Ok(f64::from(count) / began.elapsed().as_secs_f64())
}

fn batch(node_id: &str) -> String {
    let line = |number: usize| {
        let text = format!("{{\"level\":\"INFO\",\"message\":\"line {number}\",\"padding\":\"");
        let padding = "x".repeat(LINE_BYTES - text.len() - 2);
        [(1_700_000_000_000_000_000_u64 + number as u64).to_string(), format!("{text}{padding}\"}}")]
    };
    let labels = json!({
        "service": "node-agent", "component": "agent", "source": "journald", "systemd_unit": "gpuaas-agent.service",
        "host_role": "worker_compute", "host_name": "rack7-3", "node_id": node_id,
    });
    json!({"streams": [{"stream": labels, "values": (0..LINES).map(line).collect::<Vec<_>>()}]}).to_string()
}

/// The same address, by the name that certificates have.
fn localhost(url: &str) -> anyhow::Result<String> {
    let (_, port) = url.rsplit_once(':').context("the URL has a port")?;
    Ok(format!("https://localhost:{port}"))
}

/// nginx as the store and, on another port, as the baseline in front of it.
struct Nginx {
    store: u16,
    proxy: u16,
    authority: Authority,
    _process: ChildProcess,
    _folder: tempfile::TempDir,
}

impl Nginx {
    fn start() -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new().prefix("gpuaas-nginx-").tempdir()?;
        let authority = Authority::create(&folder.path().join("pki"))?;
        let certificate = authority.server_certificate("nginx")?;
        let (store, proxy) = (free_port()?, free_port()?);
        let path = folder.path().join("nginx.conf");
        std::fs::write(&path, configuration(folder.path(), &authority, &certificate, store, proxy))?;
        let launch = Launch::new("nginx", program()?, folder.path().join("log"));
        let launch = launch.argument("-p").argument(folder.path()).argument("-e").argument(folder.path().join("error"));
        let mut process = launch.argument("-c").argument(path).spawn()?;
        let until = Instant::now() + Duration::from_secs(10);
        while TcpStream::connect(("127.0.0.1", proxy)).is_err() {
            let is_up = process.exit_status().is_none() && Instant::now() < until;
            ensure!(is_up, "nginx does not start: {}", process.log_tail());
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(Self { store, proxy, authority, _process: process, _folder: folder })
    }
}

fn configuration(
    folder: &Path,
    authority: &Authority,
    certificate: &local_servers::pki::ServerCertificate,
    store: u16,
    proxy: u16,
) -> String {
    let at = folder.display();
    let (chain, key) = (certificate.certificate_path.display(), certificate.key_path.display());
    let ca = authority.certificate_path().display();
    let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .iter()
        .map(|name| format!("    {name}_temp_path {at}/{name};\n"))
        .collect();
    format!(
        "daemon off;\npid {at}/pid;\nworker_processes 1;\nevents {{ worker_connections 1024; }}\nhttp {{\n    access_log off;\n\
         {temporary}    keepalive_requests 100000000;\n    client_max_body_size 8m;\n    client_body_buffer_size 2m;\n\
         \x20   ssl_certificate {chain};\n    ssl_certificate_key {key};\n\
         \x20   upstream store {{ server 127.0.0.1:{store}; keepalive 64; keepalive_requests 100000000; }}\n\
         \x20   server {{ listen 127.0.0.1:{store} ssl; location / {{ return 204; }} }}\n\
         \x20   server {{\n        listen 127.0.0.1:{proxy} ssl;\n        location / {{\n            proxy_pass https://store;\n\
         \x20           proxy_http_version 1.1;\n            proxy_set_header Connection \"\";\n            proxy_ssl_verify on;\n\
         \x20           proxy_ssl_name localhost;\n            proxy_ssl_trusted_certificate {ca};\n        }}\n    }}\n}}\n"
    )
}

fn program() -> anyhow::Result<PathBuf> {
    let tools = std::env::var_os("GPUAAS_TOOLS_DIR").map(PathBuf::from);
    let own = tools.map(|tools| tools.join("debian/usr/sbin/nginx"));
    let found = private_files::find_programs("nginx").into_iter().chain(own).find(|path| path.is_file());
    found.context("there is no nginx: deploy/bench and `deploy/test --tools` install it")
}
