//! The shipped units of deploy/systemd with the real programs, on a Debian that systemd has booted, installed as
//! the book (`operator/install.md`) says, on Debian's own Postgres through its socket.

use crate::external_tools::{root, tools};
use local_servers::identity::{self, IdentityProvider};
use local_servers::nats::{NatsServer, NatsUser};
use local_servers::pki::Authority;
use local_servers::private_files;
use reqwest::StatusCode;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use supervisors::dev::api::{DevApi, https_client};
use supervisors::dev::replica::{ListenAddresses, member};
use tests::cluster::ssh_public_key;
use tests::systemd_container::{DiskFile, SystemdContainer};
use wire::bundle::BootstrapBundle;

const MEMBER: &str = "replica-1";
pub(crate) const UNIT: &str = "gpuaas.service";
pub(crate) const AGENT: &str = "gpuaas-agent.service";
const WITHIN: Duration = Duration::from_secs(120);

/// The container, and the services on this host.
pub(crate) struct Installation {
    pub(crate) machine: SystemdContainer,
    pub(crate) identity: IdentityProvider,
    nats: NatsServer,
    authority: Authority,
    pub(crate) listens: ListenAddresses,
    _folder: tempfile::TempDir,
}

impl Installation {
    /// A machine with these programs in `/usr/local/bin`, and with these files on its disk.
    pub(crate) async fn begin(programs: &[&str], image: &[DiskFile]) -> Option<Self> {
        let test = std::env::current_exe().unwrap();
        let programs: Vec<PathBuf> =
            programs.iter().map(|name| private_files::find_sibling(&test, name).unwrap()).collect();
        let machine = SystemdContainer::start_from(&tools(), &programs, image, None).expect("the container starts")?;
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::create(&folder.path().join("pki")).unwrap();
        let users =
            vec![NatsUser::operator("operator"), member(MEMBER, &supervisors::process_roles::ProcessRole::ALL.into())];
        let nats = NatsServer::start(&folder.path().join("nats"), &authority, users).await.unwrap();
        let identity = IdentityProvider::start().await.unwrap();
        let listens = ListenAddresses::on_free_ports().unwrap();
        Some(Self { machine, identity, nats, authority, listens, _folder: folder })
    }

    /// The files of an installation, and the database of the unit's user, who connects over the socket without a password.
    fn install(&self) {
        let units = root().join("deploy/systemd");
        for unit in [UNIT, AGENT] {
            let text = std::fs::read(units.join(unit)).unwrap();
            self.machine.write(&format!("/etc/systemd/system/{unit}"), 0o644, &text);
        }
        self.machine.run("install -d -m 0755 /etc/gpuaas");
        let key = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
        self.machine.write("/etc/gpuaas/kek", 0o600, format!("key first {key}\nactive first\n").as_bytes());
        self.write_certificate("/etc/gpuaas/tls.pem", "/etc/gpuaas/tls.key");
        self.write_authority("/etc/gpuaas/ca.pem");
        self.machine.run("cd / && runuser -u postgres -- createuser gpuaas");
        self.machine.run("cd / && runuser -u postgres -- createdb --owner gpuaas gpuaas");
        self.machine.run("systemctl daemon-reload");
    }

    /// The server's certificate and its key as these files.
    pub(crate) fn write_certificate(&self, chain: &str, key: &str) {
        let certificate = self.authority.server_certificate("control-plane").unwrap();
        self.machine.write(chain, 0o644, &std::fs::read(certificate.certificate_path).unwrap());
        self.machine.write(key, 0o600, &std::fs::read(certificate.key_path).unwrap());
    }

    /// The authority of the server's certificate.
    pub(crate) fn write_authority(&self, path: &str) {
        self.machine.write(path, 0o644, self.authority.certificate_pem().as_bytes());
    }

    pub(crate) fn settings(&self) -> Vec<(&'static str, String)> {
        let ListenAddresses { public, node, webhook, operations } = self.listens;
        vec![
            ("SVC_DATABASE_URL", "postgres:///gpuaas?host=/run/postgresql&user=gpuaas".to_owned()),
            ("SVC_NATS_URL", secrecy::ExposeSecret::expose_secret(&self.nats.url(MEMBER).unwrap()).to_owned()),
            ("SVC_NATS_CA_PATH", "/etc/gpuaas/ca.pem".to_owned()),
            ("SVC_TLS_CA_PATH", "/etc/gpuaas/ca.pem".to_owned()),
            ("SVC_MEMBER_NAME", MEMBER.to_owned()),
            ("SVC_PUBLIC_URL", format!("https://{public}")),
            ("SVC_NODE_PUBLIC_URL", format!("https://{node}")),
            ("SVC_PUBLIC_LISTEN", public.to_string()),
            ("SVC_NODE_LISTEN", node.to_string()),
            ("SVC_WEBHOOK_LISTEN", webhook.to_string()),
            ("SVC_OPERATIONS_LISTEN", operations.to_string()),
            ("SVC_OIDC_ISSUER", self.identity.issuer()),
            ("SVC_OIDC_AUDIENCE", identity::AUDIENCE.to_owned()),
        ]
    }

    pub(crate) fn write_settings(&self, path: &str, settings: &[(&'static str, String)]) {
        let text: String = settings.iter().map(|(name, value)| format!("{name}={value}\n")).collect();
        self.machine.write(path, 0o600, text.as_bytes());
    }

    async fn expect_ready(&self) {
        let url = format!("http://{}/api/v1/readyz", self.listens.operations);
        let until = Instant::now() + WITHIN;
        loop {
            let status = reqwest::get(&url).await.map(|answer| answer.status());
            if matches!(status, Ok(StatusCode::OK)) {
                return;
            }
            assert!(Instant::now() < until, "not ready: {status:?}\n{}", self.machine.journal(UNIT));
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// A client that has no connection yet.
    fn client(&self) -> reqwest::Client {
        let authority = reqwest::Certificate::from_pem(self.authority.certificate_pem().as_bytes()).unwrap();
        reqwest::Client::builder().tls_certs_only([authority]).tls_info(true).build().unwrap()
    }

    /// The certificate that the client was presented on the connection of its request.
    async fn presented(&self, client: &reqwest::Client) -> Vec<u8> {
        let url = format!("https://{}/api/v1/healthz", self.listens.public);
        let answer = client.get(url).send().await.unwrap();
        let connection = answer.extensions().get::<reqwest::tls::TlsInfo>().expect("it is TLS");
        let certificate = connection.peer_certificate().expect("a server has one").to_vec();
        answer.bytes().await.unwrap();
        certificate
    }

    /// What was refused at the last reload, by the metric.
    async fn refused_parts(&self) -> Vec<String> {
        let page =
            reqwest::get(format!("http://{}/metrics", self.listens.operations)).await.unwrap().text().await.unwrap();
        let parts = page.lines().filter_map(|line| line.strip_prefix("settings_reload_refused{part=\""));
        parts.filter_map(|rest| rest.strip_suffix("\"} 1")).map(str::to_owned).collect()
    }

    /// Asserts that the unit has failed with this status, once, and is not restarted.
    pub(crate) async fn expect_failed_for_good(&self, unit: &str, status: &str) {
        self.machine.expect_property(unit, "ActiveState", "failed").await;
        // Longer than either unit's `RestartSec`.
        tokio::time::sleep(Duration::from_secs(6)).await;
        let shown = ["ActiveState", "ExecMainStatus", "NRestarts"].map(|name| self.machine.property(unit, name));
        assert_eq!(shown, ["failed", status, "0"], "{}", self.machine.journal(unit));
    }

    pub(crate) fn api(&self, username: &str) -> DevApi {
        let http = https_client(self.authority.certificate_path()).unwrap();
        let token = self.identity.token_of(username).unwrap();
        DevApi::new(http, &format!("https://{}", self.listens.public), token)
    }

    /// Writes the bundle of a new node, and waits until its agent has reported what the machine has.
    pub(crate) async fn enroll_an_agent(&self) {
        let sku = json!({
            "name": "h100x1", "gpu": { "vendor": "NVIDIA", "model": "H100", "memory_mib": 81920, "count": 1 },
            "cpu": { "model": "any", "cores": 1 }, "memory_mib": 512, "storage_gib": 1, "interconnect": "none",
            "allowed_regions": ["here"], "price": { "currency": "USD", "amount_minor_per_gpu_hour": 250 },
        });
        let path = self.new_node(&sku).await;
        let issued = self.api("admin").post(&format!("{path}/enrollment-token"), &json!({})).await.unwrap();
        let bundle: BootstrapBundle = serde_json::from_value(issued["bootstrap_bundle"].clone()).unwrap();
        self.machine.write("/etc/gpuaas/agent.env", 0o600, bundle.to_env_file().unwrap().as_bytes());
        self.machine.run("systemctl restart gpuaas-agent");
        let seen = self
            .api("admin")
            .wait_for(&path, "the agent has reported what the machine has", WITHIN, |node: &Value| {
                Ok((node["state_reason"]["code"] == "inventory_mismatch").then(|| node.clone()))
            })
            .await;
        let seen = seen.unwrap_or_else(|error| panic!("{error:#}\n{}", self.machine.journal(AGENT)));
        assert_eq!(seen["state"], "enrolling", "{seen}");
        assert_eq!(self.machine.property(AGENT, "NRestarts"), "0");
    }

    /// The path of a new node of this SKU, which two administrators have activated.
    pub(crate) async fn new_node(&self, sku: &Value) -> String {
        let (admin, second) = (self.api("admin"), self.api("admin2"));
        let offered = admin.post("/api/v1/admin/skus", sku).await.unwrap();
        for (api, name, role) in [(&admin, "admin", "platform_operations"), (&second, "admin2", "inventory_owner")] {
            let subject = self.identity.person(name).unwrap().id;
            let binding = json!({ "subject": subject, "role": role, "reason": "a test" });
            admin.post("/api/v1/admin/platform-roles/bindings", &binding).await.unwrap();
            let path = format!("/api/v1/admin/skus/{}/activate", offered["id"].as_str().unwrap());
            api.post(&path, &json!({ "reason": "a test", "role": role })).await.unwrap();
        }
        let node = json!({
            "host": "node.internal", "port": 22, "ssh_username": "gpuaas", "ssh_public_key": ssh_public_key("a test"),
            "sku": sku["name"], "gpus_total": 1, "region_code": sku["allowed_regions"][0], "onboarding_mode": "manual",
            "probe": false,
        });
        let node = admin.post("/api/v1/admin/nodes", &node).await.unwrap();
        format!("/api/v1/admin/nodes/{}", node["id"].as_str().unwrap())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn shipped_units_start_the_real_programs_and_stay_failed_on_an_invalid_setting() {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let Some(it) = Installation::begin(&["gpuaas", "gpuaas-agent"], &[]).await else { return };
    it.install();
    let machine = &it.machine;

    // Without settings: every missing variable is named, once, and the unit is not restarted.
    machine.attempt("systemctl enable --now gpuaas").unwrap_or_default();
    it.expect_failed_for_good(UNIT, "78").await;
    let output = machine.journal(UNIT);
    for name in ["SVC_DATABASE_URL is not set", "SVC_NATS_URL is not set", "SVC_OIDC_ISSUER is not set"] {
        assert_eq!(output.matches(name).count(), 1, "{name}: {output}");
    }

    it.write_settings("/etc/gpuaas/gpuaas.env", &it.settings());
    machine.run("systemctl restart gpuaas");
    it.expect_ready().await;
    // As an unprivileged user of the unit's name, who can read the secrets through systemd alone.
    let pid = machine.property(UNIT, "MainPID");
    assert_eq!(machine.run(&format!("ps -o user= -p {pid}")).trim(), "gpuaas");
    assert_eq!(machine.run("stat -c %U:%a /etc/gpuaas/kek").trim(), "root:600");

    a_reload_takes_what_is_renewed_and_refuses_what_cannot_be_used(&it).await;

    // The unit waits for a database that is down.
    machine.run("systemctl stop postgresql@*");
    machine.attempt("systemctl restart gpuaas").unwrap_or_default();
    let until = Instant::now() + WITHIN;
    while machine.property(UNIT, "NRestarts") == "0" {
        assert!(Instant::now() < until, "{}", machine.journal(UNIT));
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let output = machine.journal(UNIT);
    assert!(output.contains("the database at /run/postgresql/gpuaas cannot be reached"), "{output}");
    assert!(output.contains("status=69"), "{output}");
    machine.run("systemctl start postgresql");
    it.expect_ready().await;

    the_agents_unit_enrolls(&it).await;

    // An invalid file is no reason for a restart, either.
    machine.write("/etc/gpuaas/tls.key", 0o600, b"no key\n");
    machine.attempt("systemctl restart gpuaas").unwrap_or_default();
    it.expect_failed_for_good(UNIT, "78").await;
    machine.run("rm /etc/gpuaas/kek");
    machine.attempt("systemctl restart gpuaas").unwrap_or_default();
    it.expect_failed_for_good(UNIT, "243").await;
}

/// `systemctl reload` on the running unit: no connection is closed, and its process stays.
async fn a_reload_takes_what_is_renewed_and_refuses_what_cannot_be_used(it: &Installation) {
    let machine = &it.machine;
    let (chain, key) = ("/etc/gpuaas/tls.pem", "/etc/gpuaas/tls.key");
    let pid = machine.property(UNIT, "MainPID");
    let connected = it.client();
    let first = it.presented(&connected).await;
    assert!(!machine.journal(UNIT).contains("\"DEBUG\""));

    // What a replica that someone has taken over could put there: files of root's are neither written nor given away.
    machine.write("/srv/of-root", 0o600, b"of root");
    machine.run("for name in .gpuaas.env gpuaas.env .tls.key tls.key; do ln -sfn /srv/of-root /run/gpuaas/$name; done");

    it.write_certificate(chain, key);
    let mut settings = it.settings();
    settings.push(("RUST_LOG", "info,edge=debug".to_owned()));
    it.write_settings("/etc/gpuaas/gpuaas.env", &settings);
    machine.run("systemctl reload gpuaas");
    assert_eq!(machine.run("stat -c %U:%a /srv/of-root; cat /srv/of-root"), "root:600\nof root");
    assert_eq!(
        machine
            .run("stat -c %F:%U:%a /run/gpuaas/tls.key /run/gpuaas/gpuaas.env")
            .matches("regular file:gpuaas:600")
            .count(),
        2
    );
    let renewed = it.presented(&it.client()).await;
    assert!(renewed != first, "a new connection is presented the new certificate");
    assert_eq!(it.presented(&connected).await, first, "the open connection stays");
    assert_eq!(machine.property(UNIT, "StatusText"), "reloaded");
    // Each request is a line of the new filter.
    let until = Instant::now() + WITHIN;
    while !machine.journal(UNIT).contains("\"level\":\"DEBUG\"") {
        assert!(Instant::now() < until, "the filter is not replaced: {}", machine.journal(UNIT));
        it.presented(&connected).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    assert_eq!(machine.run("stat -c %U:%a /run/gpuaas/tls.key").trim(), "gpuaas:600");

    // The key of another chain, a database that does not take the user, a line that is no setting.
    let whole = machine.run(&format!("cat {key}"));
    it.write_certificate("/etc/gpuaas/other.pem", key);
    settings[0].1 = settings[0].1.replace("user=gpuaas", "user=nobody");
    it.write_settings("/etc/gpuaas/gpuaas.env", &settings);
    machine.attempt("systemctl reload gpuaas").expect_err("the reload fails");
    assert_eq!(it.presented(&it.client()).await, renewed);
    let refused = "refused, and as it was before: certificate, database";
    assert_eq!(machine.property(UNIT, "StatusText"), refused, "{}", machine.journal(UNIT));
    assert_eq!(it.refused_parts().await, ["certificate", "database"]);
    let output = machine.journal(UNIT);
    assert!(output.contains("keys may not be consistent") || output.contains("KeyMismatch"), "{output}");
    assert!(output.contains(&format!("gpuaas: {refused}")), "the reload itself says it: {output}");
    machine.attempt("echo hunter2 >>/etc/gpuaas/gpuaas.env; systemctl reload gpuaas").expect_err("the reload fails");
    assert_eq!(it.refused_parts().await, ["certificate", "database", "logs"]);
    assert!(!machine.journal(UNIT).contains("hunter2"));

    machine.write(key, 0o600, whole.as_bytes());
    it.write_settings("/etc/gpuaas/gpuaas.env", &it.settings());
    machine.run("systemctl reload gpuaas");
    assert_eq!((it.refused_parts().await, it.presented(&it.client()).await), (Vec::new(), renewed));
    assert_eq!(machine.property(UNIT, "MainPID"), pid);
}

/// Without a GPU the agent enrolls, and its node waits for the GPUs of its SKU.
async fn the_agents_unit_enrolls(it: &Installation) {
    let machine = &it.machine;
    machine.attempt("systemctl enable --now gpuaas-agent").unwrap_or_default();
    it.expect_failed_for_good(AGENT, "2").await;
    assert!(machine.journal(AGENT).contains("/etc/gpuaas/agent.env is not there"), "{}", machine.journal(AGENT));
    it.enroll_an_agent().await;
}
