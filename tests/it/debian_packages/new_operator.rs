//! An operator who has a bare Debian, the repository and the book: Postgres, NATS, a replica and a node come from the pages alone, up to a rented
//! node. Then the installation is broken in one way after the other, and doctor alone has to explain each.

use super::{FIRST, SETTINGS, Site, UNIT, WITHIN};
use crate::external_tools::run;
use crate::node_pages::driver;
use crate::systemd_installation::AGENT;
use local_servers::ports::free_port;
use local_servers::private_files::{find_programs, random_hex};
use serde_json::{Value, json};
use std::process::Command;
use std::time::Instant;
use tests::cluster::{CREDIT, CURRENCY, REGION, sku_body};

const NATS: &str = "nats-server.service";
const SKU: &str = "h100x1";
/// The tests' machine decides what these find.
const OF_THE_MACHINE: [&str; 2] = ["open-files", "disks"];

/// A way to break an installation, what doctor has to say of it, and the repair.
struct Breakage {
    break_it: String,
    check: &'static str,
    summary: &'static str,
    action: &'static str,
    repair: String,
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_end_with_a_rented_node_and_doctor_alone_explains_what_breaks_the_installation() {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let Some(site) = Site::new(&driver()).await else { return };
    site.repository.build("@first", FIRST, &["gpuaas", "gpuaas-agent"]).await;
    site.add_repository("@first").await;
    site.follow_to_the_end("Use a database on the same machine");
    let nats = set_nats_up(&site).await;
    // The settings of the page, and free ports of the machine that the test shares.
    let mut settings = site.it.settings();
    settings.retain(|(name, _)| *name != "SVC_MEMBER_NAME");
    settings.iter_mut().filter(|(name, _)| *name == "SVC_NATS_URL").for_each(|(_, value)| value.clone_from(&nats));
    site.it.write_settings("/srv/files/gpuaas.env", &settings);
    site.follow_to_the_end("Install a replica");
    assert!(site.is_ready().await, "{}", site.it.machine.journal(UNIT));
    let report = site.diagnose("gpuaas");
    assert_eq!(errors(&report), Vec::<String>::new(), "{report:#}");

    bring_a_node_in(&site).await;
    rent_and_release(&site).await;
    for breakage in breakages() {
        expect_explained(&site, &breakage).await;
    }
    expect_faults_of_the_agent_explained(&site);
}

/// NATS as the page sets it up, from a package as its releases have: the program alone. Returns the setting of the replica.
async fn set_nats_up(site: &Site) -> String {
    let machine = &site.it.machine;
    let program = find_programs("nats-server").into_iter().next().expect("nats-server is installed");
    let mut ask = Command::new(&program);
    ask.arg("--version");
    let version = run(ask).await.trim().rsplit_once('v').unwrap().1.to_owned();
    run(site.repository.shell(&format!(
        "architecture=$(dpkg --print-architecture) && mkdir -p nats/DEBIAN nats/usr/bin release && cp -L {program} nats/usr/bin/nats-server && \
         printf 'Package: nats-server\\nVersion: {version}\\nArchitecture: %s\\nMaintainer: a <a@nats.example>\\nDescription: NATS\\n' $architecture \
         > nats/DEBIAN/control && dpkg-deb -Zgzip -z1 --root-owner-group --build nats release/nats-server-v{version}-$architecture.deb && \
         cd release && sha256sum *.deb > SHA256SUMS && echo '{absent}  nats-server-v{version}-other.deb' >> SHA256SUMS",
        program = program.display(),
        absent = "0".repeat(64),
    )))
    .await;
    for entry in std::fs::read_dir(site.repository.path("release")).unwrap() {
        let entry = entry.unwrap();
        let to = format!("/srv/files/{}", entry.file_name().to_str().unwrap());
        machine.write(&to, 0o644, &std::fs::read(entry.path()).unwrap());
    }
    site.it.write_certificate("/srv/files/nats.pem", "/srv/files/nats.key");
    let (port, password) = (free_port().unwrap(), random_hex(16));
    // The machine has the network of the tests, in which the page's port may be taken.
    let commands = site.commands("Set NATS up").replace(":4222\n", &format!(":{port}\n"));
    let set_up = machine.attempt(&format!("version={version}; password={password}\n{commands}"));
    set_up.unwrap_or_else(|printed| panic!("{printed}\n{}", machine.journal(NATS)));
    assert_eq!(
        machine.run("stat -c %U:%G:%a /etc/nats/nats.conf /etc/nats/server.key"),
        "root:nats:640\nnats:root:600\n"
    );
    format!("tls://replica-1:{password}@localhost:{port}")
}

/// The agent's Debian package, and the script of the node.
async fn bring_a_node_in(site: &Site) {
    let (machine, admin) = (&site.it.machine, site.it.api("admin"));
    site.apt("install gpuaas-agent");
    let node = site.it.new_node(&sku_body(SKU, 1)).await;
    let issued = admin.post(&format!("{node}/bootstrap-script"), &json!({ "format": "script" })).await.unwrap();
    machine.write("/srv/bootstrap.sh", 0o600, issued["script"].as_str().unwrap().as_bytes());
    machine.run("sh /srv/bootstrap.sh");
    let is_active = |node: &Value| Ok((node["state"] == "active").then_some(()));
    let active = admin.wait_for(&node, "the node is active", WITHIN, is_active).await;
    active.unwrap_or_else(|error| panic!("{error:#}\n{}", machine.journal(AGENT)));
}

async fn rent_and_release(site: &Site) {
    let (admin, user) = (site.it.api("admin"), site.it.api("user"));
    let role = json!({
        "subject": site.it.identity.person("admin").unwrap().id, "role": "billing_operations", "reason": "a test",
    });
    admin.post("/api/v1/admin/platform-roles/bindings", &role).await.unwrap();
    let account = json!({ "user_id": site.it.identity.person("user").unwrap().id, "currency": CURRENCY });
    let account = admin.post("/api/v1/admin/billing/accounts", &account).await.unwrap();
    let credit = json!({ "amount_minor": CREDIT, "currency": CURRENCY, "reason": "a test" });
    let adjustments = format!("/api/v1/admin/billing/accounts/{}/adjustments", account["id"].as_str().unwrap());
    admin.post(&adjustments, &credit).await.unwrap();
    let wanted = json!({ "sku": SKU, "region_code": REGION, "gpu_count": 1 });
    let rented = user.post("/api/v1/allocations", &wanted).await.unwrap();
    let path = format!("/api/v1/allocations/{}", rented["id"].as_str().unwrap());
    for state in ["active", "released"] {
        let is_so = |allocation: &Value| Ok((allocation["state"] == state).then_some(()));
        let reached = user.wait_for(&path, state, WITHIN, is_so).await;
        reached.unwrap_or_else(|error| panic!("{error:#}\n{}", site.it.machine.journal(AGENT)));
        if state == "active" {
            assert!(site.it.machine.run("getent passwd").contains("\ngpu-"), "the tenant has a user on the machine");
            user.post(&format!("{path}/release"), &json!({})).await.unwrap();
        }
    }
}

/// What operators do to a replica.
fn breakages() -> Vec<Breakage> {
    let breakage = |break_it: &str, check, summary, action, repair: &str| Breakage {
        break_it: break_it.to_owned(),
        check,
        summary,
        action,
        repair: repair.to_owned(),
    };
    let changed = |file: &str, change: &str| format!("cp -p {file} /srv/before && {change}");
    let back = |file: &str| format!("mv /srv/before {file}");
    let restart_nats = format!("systemctl restart {NATS}");
    vec![
        breakage(
            &changed(
                "/etc/nsswitch.conf",
                "sed -i '/^passwd:/s/ systemd//' /etc/nsswitch.conf && systemctl restart postgresql",
            ),
            "postgres",
            "Postgres' socket refuses the service's user",
            "libnss-systemd",
            &format!("{} && systemctl restart postgresql", back("/etc/nsswitch.conf")),
        ),
        breakage(
            &changed(
                "/etc/gpuaas/tls.key",
                "openssl genpkey -quiet -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out /etc/gpuaas/tls.key",
            ),
            "settings",
            "SVC_TLS_CERT_PATH and SVC_TLS_KEY_PATH cannot be used together",
            "correct it",
            &back("/etc/gpuaas/tls.key"),
        ),
        breakage(
            &changed(
                "/etc/gpuaas/kek",
                "printf 'key first %s\\nactive first\\n' \"$(head -c 32 /dev/urandom | base64)\" > /etc/gpuaas/kek",
            ),
            "postgres",
            "the key ring does not fit the database",
            "use the key ring of this database",
            &back("/etc/gpuaas/kek"),
        ),
        breakage(
            &changed(SETTINGS, &format!("sed -i 's/:[0-9a-f]*@localhost/:another@localhost/' {SETTINGS}")),
            "nats",
            "no connection to NATS: ",
            "correct user and password in SVC_NATS_URL",
            &back(SETTINGS),
        ),
        breakage(
            &changed(
                "/etc/nats/replica-1.permissions",
                &format!(
                    "echo '{{\"publish\": {{\"allow\": [\"$JS.API.>\"]}}, \"subscribe\": {{\"allow\": [\"_INBOX.>\"]}}}}' \
                     > /etc/nats/replica-1.permissions && {restart_nats}"
                ),
            ),
            "nats",
            "NATS refuses the user replica-1",
            "nats-permissions",
            &format!("{} && {restart_nats}", back("/etc/nats/replica-1.permissions")),
        ),
        breakage(
            "cd / && runuser -u postgres -- psql --quiet -c 'ALTER DATABASE gpuaas OWNER TO postgres' gpuaas",
            "postgres",
            "the user may not make tables in the schema public",
            "OWNER TO",
            "cd / && runuser -u postgres -- psql --quiet -c 'ALTER DATABASE gpuaas OWNER TO gpuaas' gpuaas",
        ),
        breakage(
            &format!(
                "systemctl stop gpuaas && port=$(sed -n 's/^SVC_PUBLIC_LISTEN=.*://p' {SETTINGS}) && systemd-run --quiet --unit=squatter \
                 python3 -m http.server --bind 127.0.0.1 $port && until ss -ltn | grep -q \":$port \"; do sleep 0.1; done"
            ),
            "ports",
            "SVC_PUBLIC_LISTEN: ",
            "stop python3",
            "systemctl stop squatter",
        ),
    ]
}

async fn expect_explained(site: &Site, breakage: &Breakage) {
    let (machine, Breakage { check, summary, action, .. }) = (&site.it.machine, breakage);
    machine.run(&breakage.break_it);
    machine.run("systemctl restart --no-block gpuaas");
    // What the service does meanwhile is another finding.
    let until = Instant::now() + WITHIN;
    let report = loop {
        let report = site.diagnose("gpuaas");
        if findings(&report, check).iter().any(|found| found["summary"].as_str().unwrap().starts_with(summary)) {
            break report;
        }
        assert!(Instant::now() < until, "{check} does not say {summary:?}: {report:#}");
    };
    let found = findings(&report, check).into_iter().find(|it| it["summary"].as_str().unwrap().starts_with(summary));
    let found = found.unwrap();
    assert_eq!(found["level"], "error", "{found:#}");
    assert!(found["action"].as_str().unwrap().contains(action), "{found:#}");
    let misleading: Vec<_> = errors(&report)
        .into_iter()
        .filter(|error| ![*check, "service"].contains(&error.split(':').next().unwrap()))
        .collect();
    assert_eq!(misleading, Vec::<String>::new(), "of {summary:?}");

    machine.run(&breakage.repair);
    machine.run("systemctl restart gpuaas");
    let report = site.diagnose("gpuaas");
    assert_eq!(errors(&report), Vec::<String>::new(), "after {summary:?}: {report:#}\n{}", machine.journal(UNIT));
}

/// A stopped agent, and a file of which a line was lost.
fn expect_faults_of_the_agent_explained(site: &Site) {
    let machine = &site.it.machine;
    let service = |summary: &str, action: &str| {
        let report = site.diagnose("gpuaas-agent --executor system");
        let [found] = &findings(&report, "service")[..] else { panic!("{report:#}") };
        let has = |name: &str, text: &str| found[name].as_str().is_some_and(|it| it.contains(text));
        assert!(has("summary", summary) && has("action", action), "{found:#}");
        report
    };
    let report = site.diagnose("gpuaas-agent --executor system");
    assert_eq!(errors(&report), Vec::<String>::new(), "{report:#}");
    machine.run("systemctl stop gpuaas-agent");
    service("is enabled and does not run", "systemctl start gpuaas-agent.service");

    machine.run("cp -p /etc/gpuaas/agent.env /srv/before && sed -i /^SVC_NODE_ID=/d /etc/gpuaas/agent.env");
    machine.attempt("systemctl restart gpuaas-agent").unwrap_err();
    let report = service("has failed: exit-code, exit status 2", "the settings that the other findings name");
    assert!(errors(&report).iter().any(|error| error.starts_with("settings: SVC_NODE_ID")), "{report:#}");
    machine.run("mv /srv/before /etc/gpuaas/agent.env && systemctl restart gpuaas-agent");
}

impl Site {
    /// The report of a doctor on the machine.
    fn diagnose(&self, program: &str) -> Value {
        let printed = self.it.machine.run(&format!("{program} doctor --output json || true"));
        serde_json::from_str(&printed).unwrap_or_else(|error| panic!("{error}: {printed}"))
    }
}

fn findings<'a>(report: &'a Value, check: &str) -> Vec<&'a Value> {
    let checks = report["checks"].as_array().unwrap();
    let of_check = checks.iter().filter(|it| it["check"] == check);
    of_check.flat_map(|it| it["findings"].as_array().unwrap()).collect()
}

/// The errors, as `check: summary`, but for those of the tests' machine.
fn errors(report: &Value) -> Vec<String> {
    let checks = report["checks"].as_array().unwrap().iter().filter_map(|it| Some((it["check"].as_str()?, it)));
    let judged = checks.filter(|(check, _)| !OF_THE_MACHINE.contains(check));
    let errors = judged.flat_map(|(check, it)| {
        let errors = it["findings"].as_array().unwrap().iter().filter(|found| found["level"] == "error");
        errors.map(move |found| format!("{check}: {}", found["summary"].as_str().unwrap()))
    });
    errors.collect()
}
