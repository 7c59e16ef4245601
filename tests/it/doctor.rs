//! `gpuaas doctor` beside real servers with real faults.

use axum::http::{HeaderMap, StatusCode};
use local_servers::pki::Authority;
use local_servers::postgres::PostgresOptions;
use local_servers::private_files;
use local_servers::test_database::TestDatabase;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use secrecy::ExposeSecret as _;
use serde_json::{Value, json};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tests::cluster::{TestCluster, WAIT_TIMEOUT};

pub(crate) fn gpuaas() -> PathBuf {
    private_files::find_sibling(&std::env::current_exe().unwrap(), "gpuaas").unwrap()
}

/// The settings of a replica, as an environment file, which a test alters.
pub(crate) struct EnvFile {
    pub(crate) path: PathBuf,
    settings: Vec<(String, String)>,
}

impl EnvFile {
    /// Those of the first replica of a cluster.
    pub(crate) fn of(cluster: &TestCluster, folder: &Path) -> Self {
        let (settings, listens) = (&cluster.settings, cluster.replicas[0].listens());
        let path = |path: &Path| path.display().to_string();
        let settings = [
            ("SVC_DATABASE_URL", settings.database_url.expose_secret().to_owned()),
            ("SVC_DATABASE_CA_PATH", path(&settings.database_ca_path)),
            ("SVC_NATS_URL", cluster.nats.url("replica-1").unwrap().expose_secret().to_owned()),
            ("SVC_NATS_CA_PATH", path(&settings.ca_path)),
            ("SVC_KEK_FILE", path(&settings.key_ring_path)),
            ("SVC_PUBLIC_LISTEN", listens.public.to_string()),
            ("SVC_NODE_LISTEN", listens.node.to_string()),
            ("SVC_WEBHOOK_LISTEN", listens.webhook.to_string()),
            ("SVC_OPERATIONS_LISTEN", listens.operations.to_string()),
            ("INTERNAL_STATS_TOKEN", settings.stats_token.expose_secret().to_owned()),
            ("SVC_PUBLIC_URL", settings.public_url.clone()),
            ("SVC_NODE_PUBLIC_URL", settings.node_public_url.clone()),
            ("SVC_TLS_CERT_PATH", path(&settings.certificate.certificate_path)),
            ("SVC_TLS_KEY_PATH", path(&settings.certificate.key_path)),
            ("SVC_TLS_CA_PATH", path(&settings.ca_path)),
            ("SVC_OIDC_ISSUER", settings.issuer.clone()),
            ("SVC_OIDC_AUDIENCE", settings.audience.clone()),
            ("SVC_MEMBER_NAME", "replica-1".to_owned()),
        ];
        Self::new(folder, settings.map(|(name, value)| (name.to_owned(), value)).to_vec())
    }

    pub(crate) fn new(folder: &Path, settings: Vec<(String, String)>) -> Self {
        Self { path: folder.join("gpuaas.env"), settings }
    }

    /// The same, with these values in place of its own.
    pub(crate) fn with(&self, values: &[(&str, &str)]) -> Self {
        let mut settings = self.settings.clone();
        settings.retain(|(name, _)| values.iter().all(|(other, _)| other != name));
        settings.extend(values.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
        Self { path: self.path.clone(), settings }
    }

    pub(crate) fn write(&self) -> &Path {
        let lines: String = self.settings.iter().map(|(name, value)| format!("{name}='{value}'\n")).collect();
        private_files::write_private(&self.path, lines.as_bytes()).unwrap();
        &self.path
    }

    /// The exit status and the report.
    pub(crate) async fn examine(&self) -> (i32, Value) {
        self.write();
        let mut command = Command::new(gpuaas());
        command.args(["doctor", "--output", "json", "--env-file"]).arg(&self.path).env_clear();
        report_of(command).await
    }
}

impl EnvFile {
    /// Examines until exactly these problems are found: on a busy machine an answer may come too late, which is a problem, too.
    async fn examine_until(&self, expected: &[&str]) -> (i32, Value) {
        let until = Instant::now() + WAIT_TIMEOUT;
        loop {
            let (code, report) = self.examine().await;
            if problems(&report).0 == expected || Instant::now() > until {
                return (code, report);
            }
        }
    }
}

async fn report_of(mut command: Command) -> (i32, Value) {
    let output = tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    let report = serde_json::from_str(&printed).unwrap_or_else(|error| {
        panic!("{error}: {printed}{}", String::from_utf8_lossy(&output.stderr));
    });
    (output.status.code().unwrap(), report)
}

/// The findings of one check, as `level: summary`.
fn findings(report: &Value, check: &str) -> Vec<String> {
    let checks = report["checks"].as_array().unwrap();
    let check = checks.iter().find(|it| it["check"] == check).unwrap_or_else(|| panic!("no check {check}"));
    let shown = |it: &Value| format!("{}: {}", it["level"].as_str().unwrap(), it["summary"].as_str().unwrap());
    check["findings"].as_array().unwrap().iter().map(shown).collect()
}

#[track_caller]
pub(crate) fn expect(report: &Value, check: &str, begin: &str) {
    let found = findings(report, check);
    assert!(found.iter().any(|finding| finding.starts_with(begin)), "{check} has no {begin:?}: {found:#?}");
}

/// The problems but for those of the machine that the tests run on, which no test can set right: open files and disks. And the level of
/// these, as an exit status.
fn problems(report: &Value) -> (Vec<String>, i32) {
    let (mut problems, mut machine) = (Vec::new(), 0);
    for check in report["checks"].as_array().unwrap() {
        let name = check["check"].as_str().unwrap();
        for finding in findings(report, name) {
            let level = if finding.starts_with("ok: ") { 0 } else { 1 + i32::from(finding.starts_with("error: ")) };
            if ["open-files", "disks"].contains(&name) {
                machine = machine.max(level);
            } else if level > 0 {
                problems.push(finding);
            }
        }
    }
    (problems, machine)
}

/// Every problem says what to do.
fn expect_actions(report: &Value) {
    for check in report["checks"].as_array().unwrap() {
        for finding in check["findings"].as_array().unwrap() {
            let has_action = finding["action"].as_str().is_some_and(|action| action.len() > 10);
            assert_eq!(has_action, finding["level"] != "ok", "{finding}");
        }
    }
}

/// An expired certificate and its key, which fit.
fn expired_certificate(folder: &Path) -> (PathBuf, PathBuf) {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    (params.not_before, params.not_after) = (rcgen::date_time_ymd(2020, 1, 1), rcgen::date_time_ymd(2021, 1, 1));
    let (certificate, key_path) = (folder.join("expired.pem"), folder.join("expired.key"));
    std::fs::write(&certificate, params.self_signed(&key).unwrap().pem()).unwrap();
    private_files::write_private(&key_path, key.serialize_pem().as_bytes()).unwrap();
    (certificate, key_path)
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_finds_nothing_wrong_with_a_running_replica_and_names_each_fault_that_is_planted() {
    let archiving = ["archive_mode=on", "archive_command=true"].map(str::to_owned).to_vec();
    let options = PostgresOptions { settings: archiving, ..PostgresOptions::default() };
    let cluster = TestCluster::builder().postgres_with(options).start().await;
    let folder = tempfile::tempdir().unwrap();
    let whole = EnvFile::of(&cluster, folder.path());
    // A warning: the service runs, and something should be changed.
    let never = "warning: the database was never backed up by gpuaas-backup";
    let (code, report) = whole.examine_until(&[never]).await;
    expect_actions(&report);
    let (found, machine) = problems(&report);
    assert_eq!(found, [never]);
    assert_eq!(code, machine.max(1));
    let backup = "INSERT INTO backup_record (label, kind, completed_at, wal_stop) VALUES ('first', 'full', now(), '0')";
    sqlx::query(backup).execute(&cluster.pool).await.unwrap();
    let (code, report) = whole.examine_until(&[]).await;
    assert_eq!(problems(&report), (Vec::new(), machine));
    assert_eq!(code, machine, "0 on a machine with open files and space");
    for (check, begin) in [
        ("settings", "ok: 18 settings from"),
        ("service", "ok: the service at 127.0.0.1:"),
        ("certificates", "ok: SVC_TLS_CERT_PATH"),
        ("certificates", "ok: agents accept the server certificate for 127.0.0.1"),
        ("certificates", "ok: users accept the server certificate for 127.0.0.1"),
        ("presented-certificates", "ok: SVC_PUBLIC_LISTEN presents the certificate of "),
        ("presented-certificates", "ok: SVC_NODE_LISTEN presents the certificate of "),
        ("postgres", "ok: this machine's clock"),
        ("postgres", "ok: the schema is that of this release"),
        ("postgres", "ok: the key ring opens what this database has sealed"),
        ("nats", "ok: JetStream stores"),
        ("nats", "ok: the stream BILLING"),
        ("nats", "ok: this machine's clock"),
        ("nats", "ok: the user replica-1 may subscribe"),
        ("identity", &format!("ok: {} publishes", cluster.settings.issuer)),
        ("ports", "ok: SVC_PUBLIC_LISTEN"),
        ("mail", "ok: no mail server is configured"),
    ] {
        expect(&report, check, begin);
    }
    let ports = findings(&report, "ports");
    assert!(ports.iter().all(|finding| finding.contains("is held by gpuaas (process ")), "{ports:#?}");

    // Members that share a user of NATS, as those of a Deployment: the permissions are the user's.
    let (_, report) = whole.with(&[("SVC_MEMBER_NAME", "pod-7")]).examine().await;
    expect(&report, "nats", "ok: the user replica-1 may subscribe");

    // A certificate that was renewed and not taken up, and that is not for the host that users reach.
    let renewed =
        Authority::create(&folder.path().join("renewed")).unwrap().server_certificate("control-plane").unwrap();
    let other = whole.with(&[
        ("SVC_TLS_CERT_PATH", renewed.certificate_path.to_str().unwrap()),
        ("SVC_TLS_KEY_PATH", renewed.key_path.to_str().unwrap()),
        ("SVC_PUBLIC_URL", "https://gpuaas.example:8443"),
    ]);
    let (_, report) = other.examine().await;
    expect_actions(&report);
    expect(&report, "presented-certificates", "warning: SVC_PUBLIC_LISTEN presents another certificate than that of ");
    expect(
        &report,
        "certificates",
        "error: users refuse the server certificate for gpuaas.example, the host of SVC_PUBLIC_URL",
    );

    // The tests' shared Postgres is without fsync.
    let unsafe_database = TestDatabase::fresh().await;
    let elsewhere = whole.with(&[
        ("SVC_DATABASE_URL", unsafe_database.url().expose_secret()),
        ("SVC_DATABASE_CA_PATH", unsafe_database.ca_path().to_str().unwrap()),
    ]);
    let (code, report) = elsewhere.examine().await;
    assert_eq!(code, 2);
    expect(&report, "postgres", "error: fsync is off");
    expect(&report, "postgres", "error: full_page_writes is off");

    // All at once: no fault hides another one.
    let held = TcpListener::bind("127.0.0.1:0").unwrap();
    let (certificate, key) = expired_certificate(folder.path());
    let open = folder.path().join("open-kek");
    std::fs::copy(&cluster.settings.key_ring_path, &open).unwrap();
    std::fs::set_permissions(&open, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    let url = |url: &secrecy::SecretString| url.expose_secret().replacen("://", "://nobody-", 1);
    let (database, nats) = (url(&cluster.settings.database_url), url(&cluster.nats.url("replica-1").unwrap()));
    let faulty = whole.with(&[
        ("SVC_DATABASE_URL", &database),
        ("SVC_NATS_URL", &nats),
        ("SVC_OIDC_ISSUER", "http://127.0.0.1:9"),
        ("SVC_TLS_CERT_PATH", certificate.to_str().unwrap()),
        ("SVC_TLS_KEY_PATH", key.to_str().unwrap()),
        ("SVC_KEK_FILE", open.to_str().unwrap()),
        ("SVC_PUBLIC_LISTEN", &held.local_addr().unwrap().to_string()),
        ("SVC_NODE_LISTEN", "192.0.2.1:9443"),
        ("SVC_SMTP_URL", "smtp://localhost:9"),
        ("SVC_SMTP_FROM", "GPUaaS <no-reply@example.com>"),
        ("SVC_DATABSE_URL", "postgres:///x"),
        ("SVC_MIGRATE_ON_START", "yes"),
    ]);
    let (code, report) = faulty.examine().await;
    assert_eq!((code, report["level"].as_str()), (2, Some("error")));
    expect_actions(&report);
    for (check, begin) in [
        ("settings", "warning: SVC_DATABSE_URL is no setting of `gpuaas serve`; did you mean SVC_DATABASE_URL?"),
        ("settings", "error: SVC_MIGRATE_ON_START is \"yes\""),
        ("files", "warning: SVC_KEK_FILE"),
        ("certificates", "error: SVC_TLS_CERT_PATH"),
        ("certificates", "error: agents refuse the server certificate"),
        ("postgres", "error: the database at 127.0.0.1"),
        ("nats", "error: no connection to NATS: authorization violation"),
        ("identity", "error: the identity provider's keys cannot be read"),
        ("mail", "error: the mail server"),
        ("ports", "error: SVC_PUBLIC_LISTEN"),
        ("ports", "error: SVC_NODE_LISTEN: this machine has no address 192.0.2.1"),
    ] {
        expect(&report, check, begin);
    }
    let own = format!("(process {})", std::process::id());
    assert!(findings(&report, "ports")[0].ends_with(&own), "{:?}", findings(&report, "ports"));
    let secret = cluster.settings.stats_token.expose_secret();
    let password = reqwest::Url::parse(cluster.settings.database_url.expose_secret()).unwrap();
    let password = password.password().unwrap();
    assert!(!report.to_string().contains(secret) && !report.to_string().contains(password), "{report}");

    // A low limit of open files, of the command itself: the service of these ports does not run.
    let elsewhere = ["PUBLIC", "NODE", "OPERATIONS"].map(|name| (format!("SVC_{name}_LISTEN"), "127.0.0.1:0"));
    let elsewhere: Vec<(&str, &str)> = elsewhere.iter().map(|(name, value)| (name.as_str(), *value)).collect();
    let elsewhere = whole.with(&elsewhere);
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 500; exec \"$@\"", "sh"]).arg(gpuaas());
    command.args(["doctor", "--output", "json", "--env-file"]).arg(elsewhere.write()).env_clear();
    let (_, report) = report_of(command).await;
    expect(&report, "service", "ok: the service does not run here");
    expect(&report, "open-files", "error: this command may have 500 files open");
    expect(&report, "ports", "ok: SVC_PUBLIC_LISTEN: 127.0.0.1:0 is free");
    cluster.shutdown().await;
}

/// The settings of a replica that was never started.
fn settings_with(folder: &Path, own: &[(&str, &str)]) -> EnvFile {
    let authority = Authority::create(&folder.join("pki")).unwrap();
    let server = authority.server_certificate("control-plane").unwrap();
    let ring = folder.join("kek");
    if !ring.exists() {
        persistence::envelope_encryption::KeyRing::create(&ring).unwrap();
    }
    let path = |path: &Path| path.display().to_string();
    let settings = [
        ("SVC_NATS_URL", "nats://127.0.0.1:9".to_owned()),
        ("SVC_DATABASE_URL", "postgres://gpuaas@127.0.0.1:9/gpuaas".to_owned()),
        ("SVC_KEK_FILE", path(&ring)),
        ("SVC_TLS_CERT_PATH", path(&server.certificate_path)),
        ("SVC_TLS_KEY_PATH", path(&server.key_path)),
        ("SVC_TLS_CA_PATH", path(authority.certificate_path())),
        ("SVC_PUBLIC_URL", "https://127.0.0.1:8443".to_owned()),
        ("SVC_NODE_PUBLIC_URL", "https://127.0.0.1:9443".to_owned()),
        ("SVC_OIDC_ISSUER", "http://127.0.0.1:9".to_owned()),
        ("SVC_OIDC_AUDIENCE", "gpuaas".to_owned()),
    ];
    EnvFile::new(folder, settings.map(|(name, value)| (name.to_owned(), value)).to_vec()).with(own)
}

fn signal(pid: u32, signal: Signal) {
    kill(Pid::from_raw(i32::try_from(pid).unwrap()), signal).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn standby_and_hanging_postgres_are_findings() {
    let db = TestDatabase::alone().await;
    let folder = tempfile::tempdir().unwrap();
    let settings = settings_with(
        folder.path(),
        &[("SVC_DATABASE_URL", db.url().expose_secret()), ("SVC_DATABASE_CA_PATH", db.ca_path().to_str().unwrap())],
    );
    let (_, report) = settings.examine().await;
    expect(&report, "postgres", "ok: fsync and full_page_writes are on, synchronous_commit is on");
    expect(&report, "postgres", "ok: this server is a primary");
    expect(&report, "postgres", "warning: WAL is not archived");

    let data: String = sqlx::query_scalar("SHOW data_directory").fetch_one(&db.pool).await.unwrap();
    db.stop().await;
    std::fs::write(Path::new(&data).join("standby.signal"), "").unwrap();
    db.start_again().await;
    let (code, report) = settings.examine().await;
    assert_eq!(code, 2);
    let found = findings(&report, "postgres");
    assert!(found[0].starts_with("error: the database at") && found[0].contains("takes no writes"), "{found:?}");

    let pid = std::fs::read_to_string(Path::new(&data).join("postmaster.pid")).unwrap();
    let pid: u32 = pid.lines().next().unwrap().parse().unwrap();
    signal(pid, Signal::SIGSTOP);
    let (code, report) = settings.examine().await;
    signal(pid, Signal::SIGCONT);
    assert_eq!(code, 2);
    let found = findings(&report, "postgres");
    assert!(
        found[0].starts_with("error: the database at 127.0.0.1") && found[0].contains("cannot be reached"),
        "{found:?}"
    );
    expect(&report, "settings", "ok: ");
}

/// A server with a configuration of the test's own, on loopback and in clear.
struct OwnNats {
    child: Child,
    port: u16,
}

impl OwnNats {
    async fn start(more: &[&str]) -> Self {
        let program = private_files::find_programs("nats-server").into_iter().next().expect("nats-server is installed");
        let port = local_servers::ports::free_port().unwrap();
        let mut command = Command::new(program);
        command.args(["--addr", "127.0.0.1", "--port", &port.to_string()]).args(more);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let until = Instant::now() + WAIT_TIMEOUT;
        while tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_err() {
            assert!(Instant::now() < until, "nats-server does not start");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Self { child, port }
    }
}

impl Drop for OwnNats {
    fn drop(&mut self) {
        signal(self.child.id(), Signal::SIGCONT);
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nats_without_jetstream_with_narrow_permissions_and_hanging_are_findings() {
    let folder = tempfile::tempdir().unwrap();
    let at = |nats: &OwnNats, user: &str| {
        settings_with(folder.path(), &[("SVC_NATS_URL", &format!("nats://{user}127.0.0.1:{}", nats.port))])
    };
    let without = OwnNats::start(&[]).await;
    let (code, report) = at(&without, "").examine().await;
    assert_eq!(code, 2);
    expect(&report, "nats", "error: JetStream is not enabled for this account");
    expect(&report, "postgres", "error: the database at 127.0.0.1:9/gpuaas cannot be reached");

    signal(without.child.id(), Signal::SIGSTOP);
    let (code, report) = at(&without, "").examine().await;
    assert_eq!(code, 2);
    expect(&report, "nats", "error: no connection to NATS: ");

    let config = folder.path().join("narrow.conf");
    let store = folder.path().join("store");
    let permissions = r#"{ publish: ["$JS.API.INFO"], subscribe: ["_INBOX.narrow.>"] }"#;
    let text = format!(
        "max_payload: 65536\njetstream {{ store_dir: \"{}\" }}\nauthorization {{ users: [ {{ user: narrow, password: p4ssword, permissions: {permissions} }} ] }}\n",
        store.display()
    );
    std::fs::write(&config, text).unwrap();
    let narrow = OwnNats::start(&["--config", config.to_str().unwrap()]).await;
    let (_, report) = at(&narrow, "narrow:p4ssword@").examine().await;
    expect(&report, "nats", "error: max_payload is 65536 bytes");
    expect(&report, "nats", "ok: JetStream stores 0 MiB");
    expect(&report, "nats", "error: the stream NODES does not answer");
    expect(&report, "nats", "error: NATS refuses the user narrow: ");
    assert!(!report.to_string().contains("p4ssword"), "{report}");
}

/// A payment processor without payments, which admits one key. Returns its address.
async fn processor_that_admits(key: &'static str) -> String {
    let answer = move |headers: HeaderMap| async move {
        let is_admitted =
            headers.get("authorization").is_some_and(|it| it.as_bytes() == format!("Bearer {key}").as_bytes());
        let (status, code) = match is_admitted {
            true => (StatusCode::NOT_FOUND, "resource_missing"),
            false => (StatusCode::UNAUTHORIZED, "invalid_api_key"),
        };
        (status, axum::Json(json!({ "error": { "code": code, "message": "No such object or key." } })))
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, axum::Router::new().fallback(answer)).await });
    format!("http://{address}")
}

#[tokio::test(flavor = "multi_thread")]
async fn processor_that_answers_is_well_and_one_that_refuses_the_key_or_is_away_is_an_error() {
    const KEY: &str = "sk_test_0123456789abcdef";
    const OTHER: &str = "sk_test_of_another_account";
    let folder = tempfile::tempdir().unwrap();
    let processor = processor_that_admits(KEY).await;
    let with = |key: &str, base: &str| {
        let payments = [
            ("SVC_PAYMENTS_SECRET_KEY", key),
            ("SVC_PAYMENTS_WEBHOOK_SECRETS", "whsec_0123456789abcdef"),
            ("SVC_PAYMENTS_API_BASE", base),
        ];
        settings_with(folder.path(), &payments)
    };
    let (_, report) = with(KEY, &processor).examine().await;
    assert_eq!(findings(&report, "payments"), [format!("ok: the payment processor answers ({processor})")]);

    let (code, report) = with(OTHER, &processor).examine().await;
    assert_eq!(code, 2);
    expect_actions(&report);
    let refused = format!("error: the payment processor ({processor}) does not answer as it should: ");
    expect(&report, "payments", &refused);
    assert!(findings(&report, "payments")[0].contains("it does not admit SVC_PAYMENTS_SECRET_KEY"), "{report:#}");
    assert!(!report.to_string().contains(OTHER), "{report:#}");

    let (code, report) = with(KEY, "http://127.0.0.1:9").examine().await;
    assert_eq!(code, 2);
    expect(&report, "payments", "error: the payment processor (http://127.0.0.1:9) does not answer as it should: ");
}

#[tokio::test(flavor = "multi_thread")]
async fn agents_doctor_looks_at_the_node_and_the_control_plane_and_names_each_fault() {
    let mut cluster = TestCluster::start().await;
    let node = cluster.register("h100").await;
    let mut bundle = cluster.bundle(&node).await;
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    (bundle.ca_bundle_path, bundle.cert_path, bundle.key_path) = (at("ca.pem"), at("node.pem"), at("node.key"));
    bundle.node_cert_ca_bundle_path = at("node-ca.pem");
    let text = bundle.to_env_file().unwrap();
    let examine = async |text: String, mode: u32| {
        let file = folder.path().join("agent.env");
        std::fs::write(&file, text).unwrap();
        std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
        let program = private_files::find_sibling(&std::env::current_exe().unwrap(), "gpuaas-agent").unwrap();
        let mut command = Command::new(program);
        command.args(["doctor", "--output", "json", "--env-file"]).arg(&file).env_clear();
        command.env("SVC_NODE_AGENT_STATE_DIR", folder.path().join("state"));
        report_of(command).await
    };
    let (_, report) = examine(text.clone(), 0o600).await;
    expect_actions(&report);
    for (check, begin) in [
        ("settings", "ok: settings from"),
        ("certificates", "ok: the node is not enrolled; the first start enrolls it"),
        ("certificates", "ok: authorities of the control plane: 1"),
        ("control-plane", "ok: https://127.0.0.1"),
        ("control-plane", "ok: this machine's clock is"),
    ] {
        expect(&report, check, begin);
    }
    assert_eq!(findings(&report, "files").len(), 1, "{report:#}");
    assert!(!folder.path().join("ca.pem").exists() && !folder.path().join("state").exists(), "nothing is written");

    let faulty = format!("{text}SVC_NODE_AGENT_EXECUTER='system'\n");
    let (code, report) = examine(faulty.replace(&cluster.node_url(), "https://127.0.0.1:9"), 0o644).await;
    assert_eq!(code, 2);
    expect_actions(&report);
    expect(&report, "settings", "warning: SVC_NODE_AGENT_EXECUTER is no variable");
    expect(&report, "files", "warning: the environment file");
    expect(&report, "control-plane", "error: https://127.0.0.1:9: the control plane could not be reached");

    let untrusted = Authority::create(&folder.path().join("other")).unwrap();
    bundle.ca_bundle_pem = untrusted.certificate_pem().to_owned();
    bundle.ca_bundle_fingerprint = wire::bundle::fingerprint(&bundle.ca_bundle_pem);
    let (_, report) = examine(bundle.to_env_file().unwrap(), 0o600).await;
    expect(&report, "control-plane", "error: https://127.0.0.1");
    assert!(findings(&report, "control-plane")[0].contains("certificate is refused"), "{report:#}");

    let (code, report) = examine("SVC_API_URL='http://nodes.example'\n".to_owned(), 0o600).await;
    assert_eq!(code, 2);
    expect(&report, "settings", "error: SVC_NODE_ID is not set");
    expect(&report, "control-plane", "warning: not asked: the settings are incomplete");
    cluster.shutdown().await;
}
