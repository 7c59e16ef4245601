//! `gpuaas dev`, which `deploy/up` runs: a restart continues with the state of the last run.

use crate::browser::Browser;
use crate::external_identity_provider::read_login_url;
use crate::external_tools::tools;
use local_servers::ports::claim_port;
use local_servers::process::{ChildProcess, Launch, tail};
use local_servers::{identity, private_files};
use secrecy::{ExposeSecret as _, SecretString};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};
use supervisors::dev::api::{DevApi, https_client, log_in};
use tests::cluster::TestCluster;
use wire::bundle::Variables;

const UP: &str = "Up until Ctrl-C";
const UP_WITHIN: Duration = Duration::from_secs(180);
/// Each of its processes has its time, one after the other.
const DOWN_WITHIN: Duration = Duration::from_secs(120);

/// A development environment in a folder of its own, whose tenants are no users of this machine.
struct DevEnvironment {
    folder: tempfile::TempDir,
    starts: usize,
    process: Option<ChildProcess>,
}

impl DevEnvironment {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), starts: 0, process: None }
    }

    fn log(&self) -> std::path::PathBuf {
        self.folder.path().join(format!("start-{}.log", self.starts))
    }

    fn launch(&mut self, flags: &[&str]) -> ChildProcess {
        self.starts += 1;
        let program = private_files::find_sibling(&std::env::current_exe().unwrap(), "gpuaas").unwrap();
        let launch = Launch::new("gpuaas dev", program, self.log())
            .arguments(["dev", "--sandbox", "--dir"])
            .argument(self.folder.path().join("dev"))
            .arguments(flags)
            .variable("GPUAAS_TOOLS_DIR", tools())
            .stop_signal(nix::sys::signal::Signal::SIGINT);
        launch.spawn().unwrap()
    }

    /// Starts it and waits until it is up. Returns its output.
    async fn up(&mut self, flags: &[&str]) -> String {
        self.process = Some(self.launch(flags));
        let until = Instant::now() + UP_WITHIN;
        loop {
            let output = std::fs::read_to_string(self.log()).unwrap_or_default();
            if output.contains(UP) {
                return output;
            }
            let process = self.process.as_mut().unwrap();
            assert!(process.is_running() && Instant::now() < until, "{}", tail(&self.log(), 40));
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// The variables of `.dev/env`, without those that differ from start to start.
    fn variables(&self) -> Vec<(String, String)> {
        let text = std::fs::read_to_string(self.folder.path().join("dev/env")).unwrap();
        let plain: String =
            text.lines().filter_map(|line| line.strip_prefix("export ")).map(|line| line.to_owned() + "\n").collect();
        let variables = Variables::parse(&plain).unwrap();
        let names = plain.lines().filter_map(|line| line.split_once('=')).map(|(name, _)| name);
        let stored = names.filter(|name| !name.starts_with("SVC_REPLICA_PID"));
        stored.map(|name| (name.to_owned(), variables.get(name).unwrap().to_owned())).collect()
    }

    /// Keeps the ports of the environment from other tests while it does not run: it has the same ones at its next start.
    fn claim_ports(&self) {
        let text = std::fs::read_to_string(self.folder.path().join("dev/kept.json")).unwrap();
        let saved: BTreeMap<String, String> = serde_json::from_str(&text).unwrap();
        let ports = saved.iter().filter(|(name, _)| name.contains("port")).filter_map(|(_, value)| value.parse().ok());
        let claimed = ports.filter(|port| claim_port(*port).unwrap()).count();
        assert!(claimed >= 8, "{claimed} of {:?}", saved.keys());
    }

    async fn user(&self) -> DevApi {
        let variables = self.variables();
        let get = |name: &str| variables.iter().find(|(known, _)| known == name).unwrap().1.clone();
        let (secret, password): (SecretString, SecretString) =
            (get("SVC_CLIENT_SECRET").into(), get("SVC_USER_PASSWORD").into());
        let client = (identity::CLIENT_ID, &secret);
        let token = log_in(&get("SVC_AUTH_URL"), identity::REALM, client, ("user", &password)).await.unwrap();
        let http = https_client(Path::new(&get("SVC_CA_BUNDLE_PATH"))).unwrap();
        DevApi::new(http, &get("SVC_BASE_URL"), token)
    }
}

/// What the environment has printed behind this name.
fn printed<'a>(output: &'a str, name: &str) -> &'a str {
    let lines = output.lines().filter_map(|line| line.trim_start().strip_prefix(name));
    let values: Vec<_> = lines.filter(|rest| rest.starts_with(' ')).map(str::trim).collect();
    assert_eq!(values.len(), 1, "{name} is printed once: {output}");
    values[0]
}

async fn expect_state(user: &DevApi, path: &str, state: &str) -> Value {
    user.wait_for(path, state, Duration::from_secs(60), |found| Ok((found["state"] == state).then(|| found.clone())))
        .await
        .unwrap()
}

#[test]
fn programs_print_their_name_and_version() {
    let this = std::env::current_exe().unwrap();
    for name in ["gpuaas", "gpuctl", "gpuaas-agent"] {
        let program = private_files::find_sibling(&this, name).unwrap();
        let printed = std::process::Command::new(program).arg("--version").output().unwrap();
        assert!(printed.status.success(), "{printed:?}");
        assert_eq!(String::from_utf8_lossy(&printed.stdout), format!("{name} {}\n", env!("CARGO_PKG_VERSION")));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn restart_keeps_data_addresses_and_passwords() {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let mut environment = DevEnvironment::new();
    let output = environment.up(&["--gpus", "2"]).await;
    for next in ["/api/v1/docs", "dev/env", "gpuctl login"] {
        assert!(output.contains(next), "{next}: {output}");
    }
    let before = environment.variables();
    let user = environment.user().await;
    let sku = user.get("/api/v1/skus").await.unwrap()["items"][0]["name"].clone();
    let rented = user.post("/api/v1/allocations", &json!({ "sku": sku, "gpu_count": 1 })).await.unwrap();
    let path = format!("/api/v1/allocations/{}", rented["id"].as_str().unwrap());
    expect_state(&user, &path, "active").await;
    let entries = async |user: &DevApi| user.get("/api/v1/billing/ledger?limit=200").await.unwrap()["items"].clone();
    let ledger = entries(&user).await;

    // A second one in the same folder is refused, with what to do.
    let mut second = environment.launch(&[]);
    let until = Instant::now() + UP_WITHIN;
    while second.is_running() {
        assert!(Instant::now() < until, "{}", tail(&environment.log(), 5));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(tail(&environment.log(), 5).contains("--dir"), "{}", tail(&environment.log(), 5));

    for crash in [false, true] {
        let running = environment.process.as_mut().unwrap();
        if crash {
            running.kill9();
        } else {
            running.stop(DOWN_WITHIN).await;
        }
        environment.claim_ports();
        let output = environment.up(&[]).await;
        assert!(output.contains("node-1 is in contact again"), "{output}");
        assert_eq!(environment.variables(), before, "crash: {crash}");
        let user = environment.user().await;
        expect_state(&user, &path, "active").await;
        let now = entries(&user).await;
        let is_there = |entry: &Value| now.as_array().unwrap().iter().any(|found| found == entry);
        assert!(ledger.as_array().unwrap().iter().all(is_there), "{ledger} is not in {now}");
    }
    // Its agent continues, too.
    let user = environment.user().await;
    user.post(&format!("{path}/release"), &json!({})).await.unwrap();
    expect_state(&user, &path, "released").await;

    environment.process.as_mut().unwrap().stop(DOWN_WITHIN).await;
    environment.up(&["--fresh"]).await;
    let missing = environment.user().await.get(&path).await.unwrap_err().to_string();
    assert!(missing.contains("404"), "{missing}");
    assert_ne!(environment.variables(), before);
    environment.process.as_mut().unwrap().stop(DOWN_WITHIN).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn printed_address_and_password_suffice_to_top_up_in_a_browser() {
    let mut environment = DevEnvironment::new();
    let output = environment.up(&["--gpus", "1"]).await;
    let console = printed(&output, "web console");
    let password: SecretString = printed(&output, "user2").strip_prefix("password ").unwrap().to_owned().into();
    let mut browser = Browser::start(&[]).await;
    browser.log_in_at(console, "user2", &password).await;
    browser.click("nav a[href='/console/money']").await;
    browser.expect_text("main dl", "$100.00").await;

    browser.click("text=Top up…").await;
    browser.fill("[role=dialog] input", "20.00").await;
    browser.click("[role=dialog] button[type=submit]").await;
    browser.expect_text("#confirm", "Pay $20.00").await;
    // A card that is declined, and then another one.
    browser.choose("#card select", "Visa ending in 3184: is declined").await;
    browser.click("#confirm").await;
    browser.expect_text("#state", "You can try again").await;
    browser.choose("#card select", "Visa ending in 4242: pays").await;
    browser.click("#confirm").await;
    // The page leads back to the console, which shows the deposit.
    browser.expect_text("main dl", "$120.00").await;
    assert!(browser.url().await.starts_with(console), "{}", browser.url().await);

    let seen = browser.activity().await;
    assert!(seen.complaints.is_empty() && seen.dialogs.is_empty() && seen.windows == 0, "{seen:?}");
    browser.close().await;
    environment.process.as_mut().unwrap().stop(DOWN_WITHIN).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn gpuctl_logs_in_at_the_development_provider_by_browser_and_by_device_code() {
    let mut cluster = TestCluster::start().await;
    // The address alone: the server names the provider and a client without a secret.
    let gpuctl = cluster.gpuctl().without("SVC_OIDC_ISSUER").without("SVC_CLIENT_ID").without("SVC_CLIENT_SECRET");
    let password = cluster.identity.person("user").unwrap().password;
    let stored = gpuctl.folder().join("default.json");
    let mut browser = Browser::start(&[]).await;
    for way in [&["login", "--browser", "--no-open"][..], &["login", "--device"]] {
        let mut logging_in = gpuctl.command(way).spawn().unwrap();
        browser.open(read_login_url(&mut logging_in).await.as_str()).await;
        browser.fill("input[name=username]", "user").await;
        browser.fill("input[name=password]", password.expose_secret()).await;
        browser.click("button").await;
        browser.expect_text("body", "You are logged in").await;
        let ended = logging_in.wait_with_output().await.unwrap();
        assert!(ended.status.success(), "{way:?}: {ended:?}");
        let login: Value = serde_json::from_slice(&std::fs::read(&stored).unwrap()).unwrap();
        for token in ["access_token", "refresh_token"] {
            cluster.register_secret(&format!("the {token} of a login"), login[token].as_str().unwrap());
        }
        let who = gpuctl.run(&["-o", "json", "whoami"]).await.json();
        assert_eq!((&who["name"], &who["renewable"]), (&json!("user"), &json!(true)), "{way:?}: {who}");
        gpuctl.run(&["logout"]).await.ok();
    }
    browser.close().await;
    cluster.shutdown().await;
}
