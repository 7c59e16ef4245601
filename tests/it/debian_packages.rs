//! The Debian packages on a Debian that systemd has booted: made by `deploy/package` from the metadata that releases have and from the programs
//! under test, put into a signed repository, and installed from there as the book (`operator/install.md`) says, word by word.

mod interrupted;
mod new_operator;
mod programs;
mod repository;

use crate::external_tools::{root, run};
use crate::node_pages::{Shell, blocks};
use crate::systemd_installation::{AGENT, Installation, UNIT};
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, Uri};
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use tests::systemd_container::DiskFile;

const PAGE: &str = "install.md";
const FIRST: &str = concat!(env!("CARGO_PKG_VERSION"), "-1");
const SECOND: &str = concat!(env!("CARGO_PKG_VERSION"), "-2");
const SETTINGS: &str = "/etc/gpuaas/gpuaas.env";
/// The names of the key that the machine trusts, and of one that it does not know.
const KEY: &str = "packages";
const ANOTHER_KEY: &str = "another";
const WITHIN: Duration = Duration::from_secs(120);

/// Packages in a folder, and the repository of some of them.
struct Repository {
    folder: tempfile::TempDir,
    url: String,
}

impl Repository {
    /// Serves an empty folder as any static web server does.
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("apt")).unwrap();
        let files = Router::new().fallback(file).with_state(folder.path().join("apt"));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, files).await });
        let it = Self { folder, url };
        for name in [KEY, ANOTHER_KEY] {
            run(it.shell(&format!(
                "export GNUPGHOME=$PWD/gnupg-{name} && mkdir -m 700 $GNUPGHOME && \
                 gpg --batch --quiet --passphrase '' --quick-generate-key {name} ed25519 sign never && \
                 gpg --batch --quiet --export-secret-keys > {name}.key && gpgconf --kill all",
            )))
            .await;
        }
        it
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn shell(&self, command: &str) -> Command {
        let mut shell = Command::new("bash");
        shell.args(["-euc", command]).current_dir(self.folder.path());
        shell
    }

    /// `deploy/package`, with a folder's name below this one for each of the arguments that begin with `@`.
    fn package(&self, arguments: &[&str]) -> Command {
        let mut package = Command::new(root().join("deploy/package"));
        for argument in arguments {
            match argument.strip_prefix('@') {
                Some(name) => package.arg(self.path(name)),
                None => package.arg(argument),
            };
        }
        package
    }

    /// Packages the programs under test.
    async fn build(&self, to: &str, version: &str, packages: &[&str]) {
        run(self.build_command(to, version, packages)).await;
    }

    fn build_command(&self, to: &str, version: &str, packages: &[&str]) -> Command {
        let test = std::env::current_exe().unwrap();
        let gpuaas = local_servers::private_files::find_sibling(&test, "gpuaas").unwrap();
        let mut build = self.package(&["deb", "--out", to, "--version", version, "--programs"]);
        build.arg(gpuaas.parent().unwrap()).args(packages);
        build
    }

    /// A release changes the template of the settings.
    async fn change_template(&self, folder: &str, package: &str) {
        run(self.shell(&format!(
            "deb=$(echo {folder}/{package}_*.deb) && dpkg-deb --raw-extract $deb changed && \
             for template in changed/usr/share/{package}/*.env; do echo '# A setting of this release.' >> $template; done && \
             dpkg-deb -Zgzip -z1 --root-owner-group --build changed $deb && rm -r changed",
        )))
        .await;
    }

    async fn publish(&self, packages: &str) {
        self.publish_signed_by(KEY, packages).await;
    }

    async fn publish_signed_by(&self, key: &str, packages: &str) {
        let key = format!("@{key}.key");
        run(self.package(&["repository", "--to", "@apt", "--packages", packages, "--key", &key])).await;
    }

    /// The packages in a folder, with their digests.
    fn digests(&self, folder: &str) -> BTreeMap<String, String> {
        let entries = std::fs::read_dir(self.path(folder)).unwrap().map(Result::unwrap);
        let digest = |path: &Path| hex::encode(Sha256::digest(std::fs::read(path).unwrap()));
        entries.map(|entry| (entry.file_name().into_string().unwrap(), digest(&entry.path()))).collect()
    }
}

async fn file(State(folder): State<PathBuf>, uri: Uri) -> Result<Vec<u8>, StatusCode> {
    let path = uri.path().trim_start_matches('/');
    if path.split('/').any(|part| part == "..") {
        return Err(StatusCode::BAD_REQUEST);
    }
    tokio::fs::read(folder.join(path)).await.map_err(|_| StatusCode::NOT_FOUND)
}

/// A machine with the repository, and with what an administrator brings.
struct Site {
    it: Installation,
    repository: Repository,
}

impl Site {
    async fn new(image: &[DiskFile]) -> Option<Self> {
        let it = Installation::begin(&[], image).await?;
        let repository = Repository::new().await;
        let machine = &it.machine;
        // This repository is its only one.
        machine.run("rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/* && mkdir -p /srv/files /etc/apt/keyrings");
        it.write_certificate("/srv/files/chain.pem", "/srv/files/key.pem");
        it.write_authority("/srv/files/ca.pem");
        Some(Self { it, repository })
    }

    /// Runs the blocks below a heading of the page, in the order of the page.
    fn follow(&self, title: &str) -> Result<String, String> {
        self.it.machine.attempt(&self.commands(title))
    }

    /// The blocks below a heading of the page, for a shell that ends where one of them fails.
    fn commands(&self, title: &str) -> String {
        let url = &self.repository.url;
        let code: String = blocks(PAGE, title)
            .into_iter()
            .filter_map(|(shell, code)| (shell == Shell::Node).then_some(code))
            .collect();
        assert!(!code.is_empty(), "{PAGE} has nothing to run under {title:?}");
        format!("set -e; cd /srv/files; repository={url}; export DEBIAN_FRONTEND=noninteractive\n{code}")
    }

    /// The machine gets its packages from the repository, which has those of a folder.
    async fn add_repository(&self, packages: &str) {
        self.repository.publish(packages).await;
        let key = std::fs::read(self.repository.path("apt/gpuaas.asc")).unwrap();
        self.it.machine.write("/etc/apt/keyrings/gpuaas.asc", 0o644, &key);
        self.follow_to_the_end("Add the repository");
    }

    /// As [`follow`](Self::follow), and asserts that it succeeds.
    fn follow_to_the_end(&self, title: &str) -> String {
        let followed = self.follow(title);
        followed.unwrap_or_else(|printed| panic!("{title}: {printed}\n{}", self.it.machine.journal(UNIT)))
    }

    fn apt(&self, command: &str) {
        self.it.machine.run(&format!("DEBIAN_FRONTEND=noninteractive apt-get -y {command}"));
    }

    fn installed_version(&self, package: &str) -> String {
        self.it.machine.run(&format!("dpkg-query -W -f '${{Version}}' {package}"))
    }

    /// The process answers that it is ready, at once: the start of the unit has waited for it.
    async fn is_ready(&self) -> bool {
        let url = format!("http://{}/api/v1/readyz", self.it.listens.operations);
        reqwest::get(&url).await.is_ok_and(|answer| answer.status() == StatusCode::OK)
    }

    async fn wait_for_restart(&self, unit: &str, before: &str) {
        let until = Instant::now() + WITHIN;
        while self.it.machine.property(unit, "NRestarts") == before {
            assert!(Instant::now() < until, "{unit} is not restarted\n{}", self.it.machine.journal(unit));
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn packages_install_upgrade_and_go_as_the_book_says() {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let Some(site) = Site::new(&[]).await else { return };
    let (machine, repository) = (&site.it.machine, &site.repository);
    repository.build("@first", FIRST, &[]).await;
    expect_no_errors_of_lintian(repository).await;
    site.add_repository("@first").await;

    // Installed, and neither enabled nor started: it has no settings.
    site.apt("install gpuaas");
    assert_eq!(site.installed_version("gpuaas"), FIRST);
    assert_eq!(machine.run("gpuaas --version").trim(), concat!("gpuaas ", env!("CARGO_PKG_VERSION")));
    assert_eq!(machine.attempt("systemctl is-enabled gpuaas").unwrap_or_else(|it| it).lines().next(), Some("disabled"));
    assert_eq!(machine.property(UNIT, "ActiveState"), "inactive");
    assert_eq!(machine.run(&format!("stat -c %U:%a {SETTINGS}")).trim(), "root:600");

    // A setting that is missing: the start fails, once, and names it.
    let settings = site.it.settings();
    let incomplete: Vec<_> = settings.iter().filter(|(name, _)| *name != "SVC_NATS_URL").cloned().collect();
    site.it.write_settings("/srv/files/gpuaas.env", &incomplete);
    site.follow_to_the_end("Use a database on the same machine");
    site.follow("Install a replica").unwrap_err();
    site.it.expect_failed_for_good(UNIT, "78").await;
    assert_eq!(machine.journal(UNIT).matches("SVC_NATS_URL is not set").count(), 1, "{}", machine.journal(UNIT));

    // A setting that is refused by the system, too.
    let with_low_port = |(name, value): &(&'static str, String)| match *name {
        "SVC_OPERATIONS_LISTEN" => (*name, "127.0.0.1:99".to_owned()),
        _ => (*name, value.clone()),
    };
    site.it.write_settings("/srv/files/gpuaas.env", &settings.iter().map(with_low_port).collect::<Vec<_>>());
    site.follow("Install a replica").unwrap_err();
    site.it.expect_failed_for_good(UNIT, "78").await;
    assert!(machine.journal(UNIT).contains("SVC_OPERATIONS_LISTEN: cannot listen on 127.0.0.1:99"));

    // Following the page twice is no fault.
    site.it.write_settings("/srv/files/gpuaas.env", &settings);
    let ring = machine.run("cat /etc/gpuaas/kek");
    site.follow_to_the_end("Install a replica");
    assert!(site.is_ready().await, "{}", machine.journal(UNIT));
    assert_eq!(machine.run("cat /etc/gpuaas/kek"), ring, "the key ring is made once");
    site.expect_diagnoses();
    site.expect_watchdog().await;

    upgrade(&site).await;
    killed_upgrades(&site).await;
    the_agents_package(&site).await;
    remove_and_purge(&site, &ring).await;
}

impl Site {
    /// Root looks at the database, whose socket admits the service's user alone, while the service runs and while it does not.
    fn expect_diagnoses(&self) {
        let machine = &self.it.machine;
        for (state, service) in [("start", "is ready"), ("stop", "gpuaas.service is enabled and does not run")] {
            machine.run(&format!("systemctl {state} gpuaas"));
            let found = machine.run("gpuaas doctor || true");
            assert!(found.contains(service), "{found}");
            for named in ["fsync and full_page_writes are on", "the key ring opens what this database has sealed"] {
                assert!(found.contains(named), "{state}: {named}: {found}");
            }
            let made = machine
                .run("rm -f /srv/bundle.tar.gz && gpuaas support-bundle --anonymous --output /srv/bundle.tar.gz");
            assert!(!made.contains("without database/"), "{state}: {made}");
            let listed = machine.run("tar --list --file /srv/bundle.tar.gz");
            for file in ["database/overdue.json", "database/members.json", "log.jsonl"] {
                assert!(listed.contains(file), "{state}: {listed}");
            }
            assert!(!listed.contains("names.json"), "{listed}");
        }
        machine.run("systemctl start gpuaas");
    }

    /// A process that makes no progress is killed and started again.
    async fn expect_watchdog(&self) {
        let machine = &self.it.machine;
        for (unit, seconds) in [(UNIT, 30), (AGENT, 60)] {
            let text = std::fs::read_to_string(root().join("deploy/systemd").join(unit)).unwrap();
            assert!(text.contains(&format!("\nWatchdogSec={seconds}s\n")), "{unit} has no watchdog");
        }
        machine.run(&format!("mkdir -p /run/systemd/system/{UNIT}.d"));
        machine.write(&format!("/run/systemd/system/{UNIT}.d/watchdog.conf"), 0o644, b"[Service]\nWatchdogSec=12s\n");
        machine.run("systemctl daemon-reload && systemctl restart gpuaas");
        // Longer than its period: it is fed. The period is longer than the pauses of a busy machine.
        tokio::time::sleep(Duration::from_secs(14)).await;
        assert_eq!(machine.property(UNIT, "NRestarts"), "0", "{}", machine.journal(UNIT));
        machine.run(&format!("kill -STOP {}", machine.property(UNIT, "MainPID")));
        self.wait_for_restart(UNIT, "0").await;
        machine.expect_property(UNIT, "ActiveState", "active").await;
        assert!(machine.journal(UNIT).contains("Watchdog timeout"), "{}", machine.journal(UNIT));
        machine
            .run(&format!("rm -r /run/systemd/system/{UNIT}.d && systemctl daemon-reload && systemctl restart gpuaas"));
    }
}

/// `lintian` has no errors, and every override has its reason.
async fn expect_no_errors_of_lintian(repository: &Repository) {
    let lintian = repository.shell("lintian --allow-root --fail-on error --tag-display-limit 0 first/*.deb");
    let printed = run(lintian).await;
    assert!(!printed.lines().any(|line| line.starts_with("E:")), "{printed}");
}

async fn upgrade(site: &Site) {
    let (machine, repository) = (&site.it.machine, &site.repository);
    repository.build("@second", SECOND, &["gpuaas", "gpuaas-agent"]).await;
    for package in ["gpuaas", "gpuaas-agent"] {
        repository.change_template("second", package).await;
    }
    repository.publish("@second").await;
    let (pid, settings) = (machine.property(UNIT, "MainPID"), machine.run(&format!("cat {SETTINGS}")));
    machine.run("chmod 0751 /etc/gpuaas");
    let reloaded = site.follow_to_the_end("Change settings");
    assert!(reloaded.lines().any(|line| line == "reloaded"), "{reloaded}");
    site.follow_to_the_end("Upgrade");
    assert_eq!(site.installed_version("gpuaas"), SECOND);
    assert_ne!(machine.property(UNIT, "MainPID"), pid, "the new program is started");
    assert!(site.is_ready().await, "{}", machine.journal(UNIT));
    assert_eq!(machine.run(&format!("cat {SETTINGS}")), settings);
    assert_eq!(
        machine.run("stat -c %a /etc/gpuaas && chmod 0755 /etc/gpuaas").trim(),
        "751",
        "the administrator's mode"
    );
    // Installed again, and back to the version before, which the repository has kept.
    site.apt("install --reinstall gpuaas");
    site.apt(&format!("install --allow-downgrades gpuaas={FIRST}"));
    assert_eq!(site.installed_version("gpuaas"), FIRST);
    assert!(site.is_ready().await, "{}", machine.journal(UNIT));
    // A release that does not start: the page's commands fail, and the service's own say why.
    machine.run(&format!("cp -p {SETTINGS} /srv/settings && sed -i s/^SVC_NATS_URL/SVC_NATS_ADDRESS/ {SETTINGS}"));
    site.follow("Upgrade").unwrap_err();
    assert_eq!(site.installed_version("gpuaas"), SECOND);
    let failed = machine.attempt("gpuaas doctor").unwrap_err();
    assert!(failed.contains("gpuaas.service has failed: exit-code, exit status 78"), "{failed}");
    machine.run(&format!("mv /srv/settings {SETTINGS} && systemctl restart gpuaas"));
    assert!(site.is_ready().await, "{}", machine.journal(UNIT));
    site.apt(&format!("install --allow-downgrades gpuaas={FIRST}"));
    // What was altered on the way, or is signed by another key, is not installed.
    let list = repository.path("apt/dists/stable/InRelease");
    let signed = std::fs::read_to_string(&list).unwrap();
    let update = "rm -rf /var/lib/apt/lists/* && apt-get -o APT::Update::Error-Mode=any update";
    std::fs::write(&list, signed.replace("Origin: gpuaas", "Origin: another")).unwrap();
    let printed = machine.attempt(update).unwrap_err();
    assert!(printed.contains("BADSIG") || printed.contains("not signed"), "{printed}");
    repository.publish_signed_by(ANOTHER_KEY, "@second").await;
    let printed = machine.attempt(update).unwrap_err();
    assert!(printed.contains("NO_PUBKEY") || printed.contains("not signed"), "{printed}");
    repository.publish("@second").await;
    machine.run("apt-get update");
}

/// `dpkg` is killed while it unpacks, while it configures, and while the replica restarts.
async fn killed_upgrades(site: &Site) {
    let machine = &site.it.machine;
    machine.run(&format!("cd /srv/files && apt-get download gpuaas={SECOND}"));
    for pause in ["0.03", "0.3", "1"] {
        machine.run(&format!(
            "dpkg --install /srv/files/gpuaas_{SECOND}_*.deb >/dev/null 2>&1 & sleep {pause}; kill -KILL $! || true; wait"
        ));
        site.follow_to_the_end("Finish an interrupted upgrade");
        assert_eq!(machine.run("dpkg --audit"), "", "after {pause} s");
        site.apt(&format!("install gpuaas={SECOND}"));
        assert_eq!(site.installed_version("gpuaas"), SECOND, "after {pause} s");
        assert!(site.is_ready().await, "after {pause} s: {}", machine.journal(UNIT));
        site.apt(&format!("install --allow-downgrades gpuaas={FIRST}"));
    }
}

async fn the_agents_package(site: &Site) {
    let machine = &site.it.machine;
    site.apt(&format!("install gpuaas-agent={FIRST}"));
    let profile = "grep -l pam_namespace /etc/pam.d/common-session";
    machine.run(profile);
    machine.attempt("systemctl enable --now gpuaas-agent").unwrap_err();
    site.it.expect_failed_for_good(AGENT, "2").await;
    assert!(machine.journal(AGENT).contains("/etc/gpuaas/agent.env is not there"), "{}", machine.journal(AGENT));
    site.it.enroll_an_agent().await;
    assert_eq!(machine.property(AGENT, "WatchdogUSec"), "1min");
    machine.run("echo SVC_NODE_LOG_COLLECTOR_ENABLED=1 > /etc/gpuaas/log-collector.env");
    machine.run("rm /etc/gpuaas/telemetry-edge.env");
    let pid = machine.property(AGENT, "MainPID");
    site.apt("install gpuaas-agent");
    assert_eq!(site.installed_version("gpuaas-agent"), SECOND);
    machine.run("grep -q ENABLED=1 /etc/gpuaas/log-collector.env && test ! -e /etc/gpuaas/telemetry-edge.env");
    assert_ne!(machine.property(AGENT, "MainPID"), pid, "the new program is started");
    machine.expect_property(AGENT, "ActiveState", "active").await;
    site.apt("remove gpuaas-agent");
    assert_eq!(machine.property(AGENT, "ActiveState"), "inactive");
    machine.attempt(profile).unwrap_err();
    machine.run("test -s /etc/gpuaas/agent.env && test -d /var/lib/gpuaas-agent");
    // While a tenant's user is there, the uids that were in use stay known.
    machine.run("useradd --uid 200100 gpu-tenant");
    site.apt("purge gpuaas-agent");
    machine.run("test -d /var/lib/gpuaas-agent && userdel gpu-tenant");
    site.apt("install gpuaas-agent");
    site.apt("purge gpuaas-agent");
    machine.run(
        "test ! -e /var/lib/gpuaas-agent && test ! -e /etc/gpuaas/agent.env && test ! -e /etc/gpuaas/log-collector.env",
    );
}

/// Removed, it leaves its settings, and purged, the key ring, without which the database cannot be read.
async fn remove_and_purge(site: &Site, ring: &str) {
    let machine = &site.it.machine;
    site.apt("remove gpuaas");
    assert_eq!(machine.property(UNIT, "ActiveState"), "inactive");
    assert!(!site.is_ready().await);
    machine.run(&format!("test -s {SETTINGS} && test ! -e /usr/bin/gpuaas"));
    site.apt("install gpuaas");
    machine.run("systemctl enable --now gpuaas");
    assert!(site.is_ready().await, "{}", machine.journal(UNIT));
    for _ in 0..2 {
        site.apt("purge gpuaas");
    }
    machine.run(&format!("test ! -e {SETTINGS} && test ! -e /etc/systemd/system/multi-user.target.wants/{UNIT}"));
    assert_eq!(machine.run("cat /etc/gpuaas/kek"), ring);
    assert_eq!(machine.property(UNIT, "LoadState"), "not-found");
}
