//! `gpuaas support-bundle` while the service runs, while Postgres hangs, while nothing answers, and on a full disk.

use crate::doctor::{EnvFile, gpuaas};
use flate2::read::GzDecoder;
use local_servers::private_files;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use secrecy::ExposeSecret as _;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use tests::cluster::TestCluster;
use tests::skipped_tests::report_skipped;
use uuid::Uuid;

/// The files of an archive, by their names in its folder.
struct OpenedBundle {
    files: BTreeMap<String, String>,
}

impl OpenedBundle {
    fn read(path: &Path) -> Self {
        let mut archive = tar::Archive::new(GzDecoder::new(std::fs::File::open(path).unwrap()));
        let mut files = BTreeMap::new();
        for entry in archive.entries().unwrap() {
            let mut entry = entry.unwrap();
            let name = entry.path().unwrap().iter().skip(1).collect::<PathBuf>().display().to_string();
            let mut text = String::new();
            entry.read_to_string(&mut text).unwrap();
            files.insert(name, text);
        }
        Self { files }
    }

    fn json(&self, name: &str) -> Value {
        let text =
            self.files.get(name).unwrap_or_else(|| panic!("no {name}: {:?}, {}", self.files.keys(), self.manifest()));
        serde_json::from_str(text).unwrap_or_else(|error| panic!("{name}: {error}: {text}"))
    }

    fn manifest(&self) -> Value {
        serde_json::from_str(&self.files["manifest.json"]).unwrap()
    }

    fn omission(&self, name: &str) -> String {
        let manifest = self.manifest();
        let omission = manifest["omissions"].as_array().unwrap().iter().find(|it| it["file"] == name);
        omission.unwrap_or_else(|| panic!("{name} is not omitted: {manifest:#}"))["reason"].as_str().unwrap().to_owned()
    }

    #[track_caller]
    fn expect_without(&self, secret: &str, what: &str) {
        for (name, text) in &self.files {
            assert!(!text.contains(secret), "{name} has {what}");
        }
    }
}

/// Makes a bundle; the status, what was printed, and the archive.
async fn bundle(settings: &EnvFile, output: &Path, more: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(gpuaas());
    command.args(["support-bundle", "--env-file"]).arg(settings.write()).arg("--output").arg(output).args(more);
    command.env_clear();
    let output = tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap();
    let printed = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&printed).into_owned())
}

async fn made(settings: &EnvFile, output: &Path, more: &[&str]) -> OpenedBundle {
    let (code, printed) = bundle(settings, output, more).await;
    assert_eq!(code, Some(0), "{printed}");
    assert_eq!(std::fs::metadata(output).unwrap().permissions().mode() & 0o777, 0o600);
    OpenedBundle::read(output)
}

fn canary(what: &str) -> String {
    format!("Canary{what}{}", Uuid::new_v4().simple())
}

fn password(url: &secrecy::SecretString) -> String {
    reqwest::Url::parse(url.expose_secret()).unwrap().password().unwrap().to_owned()
}

/// The same with another server, where nothing listens, as of an installation of several.
fn with_another_server(url: &secrecy::SecretString) -> String {
    let parsed = reqwest::Url::parse(url.expose_secret()).unwrap();
    let server = format!("{}:{}", parsed.host_str().unwrap(), parsed.port().unwrap());
    url.expose_secret().replacen(&server, &format!("{server},127.0.0.1:9"), 1)
}

/// The settings of a replica with every secret that a setting can have, and a log with each of them.
struct Canaries {
    settings: EnvFile,
    secrets: Vec<String>,
    log: PathBuf,
}

impl Canaries {
    /// With the secrets of the cluster and these ones.
    fn plant(cluster: &TestCluster, folder: &Path, more: &[&str]) -> Self {
        let names = [
            "INTERNAL_JWKS_REFRESH_TOKEN",
            "SVC_PAYMENTS_SECRET_KEY",
            "SVC_PAYMENTS_WEBHOOK_SECRETS",
            "MAAS_API_TOKEN",
            "OTEL_EXPORTER_OTLP_HEADERS",
            "SVC_SMTP_URL",
        ];
        let canaries = names.map(|name| (name, canary(&name.replace('_', ""))));
        let values: Vec<(&str, String)> = canaries
            .iter()
            .map(|(name, canary)| {
                let value = match *name {
                    "SVC_SMTP_URL" => format!("smtp://ann:{canary}@localhost:9"),
                    "SVC_PAYMENTS_WEBHOOK_SECRETS" => format!("{canary},other-{canary}"),
                    "MAAS_API_TOKEN" => format!("consumerkey0:tokenkey0000:{canary}"),
                    "OTEL_EXPORTER_OTLP_HEADERS" => format!("authorization=Bearer%20{canary}"),
                    _ => canary.clone(),
                };
                (*name, value)
            })
            .collect();
        let mut values: Vec<(&str, &str)> = values.iter().map(|(name, value)| (*name, value.as_str())).collect();
        // A processor that refuses connections at once.
        values.push(("SVC_PAYMENTS_API_BASE", "http://127.0.0.1:9"));
        let database = with_another_server(&cluster.settings.database_url);
        let nats = with_another_server(&cluster.nats.url("replica-1").unwrap());
        values.extend([("SVC_DATABASE_URL", database.as_str()), ("SVC_NATS_URL", nats.as_str())]);
        let settings = EnvFile::of(cluster, folder).with(&values);
        let mut secrets: Vec<String> = canaries.iter().map(|(_, canary)| canary.clone()).collect();
        secrets.extend([
            password(&cluster.settings.database_url),
            password(&cluster.nats.url("replica-1").unwrap()),
            cluster.settings.stats_token.expose_secret().to_owned(),
        ]);
        secrets.extend(more.iter().map(|secret| (*secret).to_owned()));
        let ring = std::fs::read_to_string(&cluster.settings.key_ring_path).unwrap();
        secrets.extend(ring.lines().filter_map(|line| line.strip_prefix("key ")?.split(' ').nth(1).map(str::to_owned)));
        let key = std::fs::read_to_string(&cluster.settings.certificate.key_path).unwrap();
        secrets.push(key.lines().nth(1).unwrap().to_owned());
        assert!(secrets.len() >= 11 + more.len() && secrets.iter().all(|secret| secret.len() >= 16), "{secrets:?}");
        let lines: String = secrets
            .iter()
            .map(|secret| format!("{{\"message\":\"a defect logged {secret}\",\"user_id\":\"ann\"}}\n"))
            .collect();
        let log = folder.join("service.log");
        std::fs::write(&log, &lines).unwrap();
        Self { settings, secrets, log }
    }

    fn log(&self) -> &str {
        self.log.to_str().unwrap()
    }

    /// No file of the bundle has one of them.
    #[track_caller]
    fn expect_none_in(&self, opened: &OpenedBundle) {
        for (secret, number) in self.secrets.iter().zip(0..) {
            opened.expect_without(secret, &format!("secret {number}"));
        }
    }

    /// The log is there, and has something in the place of each of them.
    #[track_caller]
    fn expect_redacted_log(&self, opened: &OpenedBundle) {
        let log = &opened.files["log.jsonl"];
        assert_eq!(log.matches("a defect logged [redacted]").count(), self.secrets.len(), "{log}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bundle_of_a_running_cluster_has_its_state_and_no_secret_and_can_be_anonymous() {
    let mut cluster = TestCluster::start().await;
    let node = cluster.node("h100").await;
    let parked = "INSERT INTO parked (entity, kind, shard, reason) SELECT id, kind, shard, 'a test of ann@example.com' FROM entity WHERE kind = 'node'";
    sqlx::query(parked).execute(&cluster.pool).await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let token = cluster.identity.token_of("admin").unwrap();
    let token_file = folder.path().join("token");
    private_files::write_private(&token_file, token.expose_secret().as_bytes()).unwrap();
    let canaries = Canaries::plant(&cluster, folder.path(), &[token.expose_secret()]);
    let settings = &canaries.settings;

    let more = ["--token-file", token_file.to_str().unwrap(), "--log-file", canaries.log()];
    let opened = made(settings, &folder.path().join("bundle.tar.gz"), &more).await;
    canaries.expect_none_in(&opened);
    canaries.expect_redacted_log(&opened);
    let omissions = opened.manifest()["omissions"].clone();
    assert_eq!(omissions, serde_json::json!([]), "everything answers");
    let shown = opened.json("settings.json");
    assert_eq!(shown["settings"]["MAAS_API_TOKEN"], "[redacted]");
    assert_eq!(shown["settings"]["SVC_MEMBER_NAME"], "replica-1");
    assert!(shown["settings"]["SVC_DATABASE_URL"].as_str().unwrap().starts_with("postgres://127.0.0.1:"), "{shown:#}");
    assert_eq!(opened.json("database/parked.json")[0]["entity"], node.id.to_string());
    assert_eq!(opened.json("database/history.json")[0]["kind"], "node");
    assert_eq!(opened.json("database/members.json")[0]["name"], "replica-1");
    assert_eq!(opened.json("streams.json")["streams"]["NODES"]["stream"]["config"]["name"], "NODES");
    assert_eq!(opened.json("doctor.json")["program"], "gpuaas");
    assert_eq!(opened.json("process/readiness.json")["ready"], true);
    assert_eq!(opened.json("cluster/members.json")["members"][0]["name"], "replica-1");
    assert!(opened.files["cluster/tree.json"].contains("outbox"), "{}", opened.files["cluster/tree.json"]);
    assert!(opened.files["process/metrics.txt"].contains("shards_owned 256"));
    assert!(opened.json("database/activity.json").as_array().unwrap().len() > 1);
    assert!(!opened.files.contains_key("database/names.json"));

    // The same one, without names.
    let more = [&more[..], &["--anonymous"]].concat();
    let anonymous = made(settings, &folder.path().join("anonymous.tar.gz"), &more).await;
    assert_eq!(anonymous.manifest()["anonymous"], true);
    canaries.expect_none_in(&anonymous);
    for (name, what) in [
        (node.id.to_string(), "the node's id"),
        ("replica-1".to_owned(), "the member's name"),
        ("ann@example.com".to_owned(), "an address"),
        ("\"ann\"".to_owned(), "a user"),
    ] {
        anonymous.expect_without(&name, what);
    }
    let entity = anonymous.json("database/parked.json")[0]["entity"].as_str().unwrap().to_owned();
    assert!(entity.starts_with("id-"), "{entity}");
    assert_eq!(anonymous.json("database/history.json")[0]["entity"], entity.as_str(), "the same one in each file");
    assert!(!anonymous.files.contains_key("database/names.json"));
    sqlx::query("DELETE FROM parked").execute(&cluster.pool).await.unwrap();
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bundle_is_made_while_postgres_hangs_and_while_nothing_answers_at_all() {
    let mut cluster = TestCluster::builder().own_postgres().start().await;
    let folder = tempfile::tempdir().unwrap();
    let canaries = Canaries::plant(&cluster, folder.path(), &[]);
    let settings = &canaries.settings;
    let postgres = Pid::from_raw(i32::try_from(cluster.postgres.pid()).unwrap());
    kill(postgres, Signal::SIGSTOP).unwrap();
    let hanging = made(settings, &folder.path().join("hanging.tar.gz"), &["--log-file", canaries.log()]).await;
    kill(postgres, Signal::SIGCONT).unwrap();
    assert!(hanging.omission("database/parked.json").contains("cannot be reached"), "{:#}", hanging.manifest());
    assert!(hanging.files["process/metrics.txt"].contains("shards_owned"));
    assert_eq!(hanging.json("streams.json")["streams"]["NODES"]["stream"]["config"]["name"], "NODES");
    assert!(hanging.files["doctor.json"].contains("cannot be reached"));
    canaries.expect_none_in(&hanging);
    canaries.expect_redacted_log(&hanging);
    assert!(hanging.omission("cluster/tree.json").contains("--token-file"));

    // The service, the database and the bus are gone.
    cluster.replicas[0].stop().await;
    let gone = [canary("Database"), canary("Bus")];
    let database = format!("postgres://gpuaas:{}@127.0.0.1:9/gpuaas", gone[0]);
    let nats = format!("nats://replica-1:{}@127.0.0.1:9", gone[1]);
    let nothing = settings.with(&[
        ("SVC_DATABASE_URL", &database),
        ("SVC_NATS_URL", &nats),
        ("SVC_OIDC_ISSUER", "http://127.0.0.1:9"),
    ]);
    let opened = made(&nothing, &folder.path().join("nothing.tar.gz"), &["--log-file", "/nowhere"]).await;
    assert!(opened.omission("log.jsonl").contains("/nowhere"));
    canaries.expect_none_in(&opened);
    for secret in &gone {
        opened.expect_without(secret, "the password of a server that is gone");
    }
    let files: Vec<_> = opened.files.keys().map(String::as_str).collect();
    assert_eq!(files, ["doctor.json", "machine.json", "manifest.json", "settings.json"]);
    let omissions = opened.manifest()["omissions"].as_array().unwrap().len();
    assert!(omissions >= 18, "{:#}", opened.manifest());
    assert_eq!(opened.json("doctor.json")["level"], "error");
    cluster.replicas[0].start_again().await.unwrap();
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn full_disk_is_named_and_leaves_no_half_of_a_bundle() {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk");
    std::fs::create_dir(&disk).unwrap();
    let small = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    if mount(Some("none"), &disk, Some("tmpfs"), small, Some("size=64k")).is_err() {
        return report_skipped("it needs root, for a small file system of its own");
    }
    let log = folder.path().join("service.log");
    // It does not compress.
    std::fs::write(&log, (0..20_000).map(|_| format!("{}\n", Uuid::new_v4())).collect::<String>()).unwrap();
    let settings = EnvFile::new(folder.path(), Vec::new());
    let (code, printed) = bundle(&settings, &disk.join("bundle.tar.gz"), &["--log-file", log.to_str().unwrap()]).await;
    let left: Vec<_> = std::fs::read_dir(&disk).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    umount2(&disk, MntFlags::MNT_DETACH).unwrap();
    assert!(code == Some(1) && printed.contains("no space is left there; name a file on another disk"), "{printed}");
    assert!(left.is_empty(), "{left:?}");
    // Elsewhere it fits, and is not overwritten.
    let output = folder.path().join("bundle.tar.gz");
    made(&settings, &output, &["--log-file", log.to_str().unwrap()]).await;
    let (code, printed) = bundle(&settings, &output, &[]).await;
    assert!(code == Some(1) && printed.contains("exists; name another file"), "{printed}");
}
