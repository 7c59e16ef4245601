//! The recipes of the book (`deploy/docs/src`), run word by word: the commands are taken out of its pages and run in a shell in a checkout.

use crate::browser::Browser;
use crate::gpuctl::serving;
use crate::ssh_access::SshNode;
use local_servers::ports::free_port;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use supervisors::dev::environment::EnvironmentFile;
use tests::cluster::TestCluster;
use tests::cluster::gpuctl::PtySession;
use tests::cluster::updatable_agent::{UpdatableFleet, digest};
use tokio::process::Command;

/// A recipe: a page of the book and a heading of it. The shell code below the heading, up to the next one, is the recipe's.
pub(crate) type Recipe = (&'static str, &'static str);

const ONBOARDING: [Recipe; 4] = [
    ("start/first-rental.md", "Prepare a shell"),
    ("start/first-rental.md", "Offer a SKU"),
    ("start/first-rental.md", "Register a node"),
    ("start/first-rental.md", "Start its agent"),
];
const TROUBLESHOOTING: [Recipe; 4] = [
    ("operator/troubleshooting.md", "Prepare the shell"),
    ("operator/troubleshooting.md", "A lost agent key"),
    ("operator/troubleshooting.md", "An expired certificate"),
    ("operator/troubleshooting.md", "A node moved behind a proxy"),
];
const CA_ROTATION: Recipe = ("operator/keys.md", "Rotate the node CA");
const IN_A_BROWSER: [Recipe; 2] =
    [("start/first-rental.md", "Rent GPUs"), ("start/first-rental.md", "Open a terminal in a browser")];
const BY_SSH: [Recipe; 2] = [("start/first-rental.md", "Prepare a shell"), ("start/first-rental.md", "Log in by SSH")];
const BY_COMMAND_LINE: [Recipe; 6] = [
    ("user/login.md", "Log in"),
    ("user/renting.md", "Rent"),
    ("user/terminals.md", "From the command line"),
    ("user/recordings.md", "Play a recording"),
    ("user/ssh-keys.md", "Log in"),
    ("operator/administration.md", "By command line"),
];
const ROLLING_OUT: [Recipe; 2] =
    [("operator/updates.md", "Roll out an update"), ("operator/updates.md", "Pause, resume, abort")];
const HELD_NODES: [Recipe; 1] = [("operator/updates.md", "Nodes in quarantine")];
const PAYING: [Recipe; 2] = [("user/login.md", "Log in"), ("user/billing.md", "Pay in a development environment")];

/// What `deploy/up` gives its replicas, and tells in `.dev/env`.
pub(crate) const REFRESH: (&str, &str) =
    ("INTERNAL_JWKS_REFRESH_TOKEN", "0707070707070707070707070707070707070707070707070707070707070707");

/// As long as all of it may take.
const WITHIN: Duration = Duration::from_secs(450);
/// The final checks, which wait themselves, and the ends of three replicas, one after the other.
const ENDS_WITHIN: Duration = Duration::from_secs(180);

fn checkout() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// The shell code of a recipe.
pub(crate) fn recipe((page, title): Recipe) -> String {
    let text = fs::read_to_string(checkout().join("deploy/docs/src").join(page)).unwrap();
    let mut lines = text.lines().skip_while(|line| line.strip_prefix("## ") != Some(title));
    assert!(lines.next().is_some(), "{page} has no heading {title:?}");
    let (mut code, mut is_code) = (String::new(), false);
    for line in lines.take_while(|line| !line.starts_with("## ")) {
        match line {
            "```sh" => is_code = true,
            "```" => is_code = false,
            line if is_code => code.extend([line, "\n"]),
            _ => {}
        }
    }
    assert!(!code.is_empty(), "{page} has no commands under {title:?}");
    code
}

/// The README's commands that make and add an SSH key.
fn key_of_the_readme() -> String {
    let text = fs::read_to_string(checkout().join("README.md")).unwrap();
    let lines: Vec<&str> = text.lines().filter(|line| line.contains(".dev/run/gpuctl")).collect();
    assert_eq!(lines.len(), 3, "{lines:?}");
    lines.join("\n")
}

/// Recipes one after the other, each under its page and title.
fn recipes(recipes: &[Recipe]) -> String {
    recipes.iter().map(|&(page, title)| format!("echo '--- {page}: {title}'\n{}", recipe((page, title)))).collect()
}

/// What a checkout in which `deploy/up` runs is to a shell.
pub(crate) struct Followed {
    folder: tempfile::TempDir,
    _env: EnvironmentFile,
}

impl Followed {
    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }
}

pub(crate) fn followed(cluster: &TestCluster) -> Followed {
    let folder = tempfile::tempdir().unwrap();
    let built = cluster.settings.executable.parent().unwrap().to_owned();
    fs::create_dir_all(folder.path().join("target")).unwrap();
    fs::create_dir_all(folder.path().join(".dev/run")).unwrap();
    symlink(built, folder.path().join("target/debug")).unwrap();
    symlink(checkout().join("deploy"), folder.path().join("deploy")).unwrap();
    let tools = std::env::var_os("GPUAAS_TOOLS_DIR").map_or_else(|| checkout().join(".dev/tools"), PathBuf::from);
    symlink(tools, folder.path().join(".dev/tools")).unwrap();
    let (settings, replicas) = (&cluster.settings, &cluster.replicas);
    let env = supervisors::dev::variables(settings, replicas, &cluster.identity, &cluster.nats).unwrap();
    let _env = env.write(&folder.path().join(".dev/env")).unwrap();
    Followed { folder, _env }
}

/// Runs a script in the checkout, and returns whether it succeeded and its output.
pub(crate) async fn transcript(script: &str, folder: &Path) -> (bool, String) {
    let mut shell = Command::new("bash");
    shell.arg("-c").arg(script).current_dir(folder).stdin(Stdio::null()).kill_on_drop(true);
    // Logins of a recipe lie beside it.
    shell.env("XDG_CONFIG_HOME", folder);
    let log = folder.join("transcript");
    let output = fs::File::create(&log).unwrap();
    shell.stdout(output.try_clone().unwrap()).stderr(output);
    let ended = tokio::time::timeout(WITHIN, shell.status()).await;
    (ended.is_ok_and(|ended| ended.unwrap().success()), fs::read_to_string(&log).unwrap())
}

/// Not every command that fails ends a script.
fn expect_no_failure(transcript: &str) {
    for failed in ["curl: (", "not found", "Traceback", "No such file"] {
        assert!(!transcript.contains(failed), "{failed}:\n{transcript}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_operators_recipes_hold_word_by_word() {
    let plan = TestCluster::builder()
        .replicas(3)
        .policy("keys.renewal_spread_seconds", 1)
        .policy("node.offline_after_seconds", 10);
    let plan =
        plan.variable("SVC_NODE_CLIENT_IDENTITY", "rfc9440").variable("SVC_NODE_TRUSTED_PROXIES", "127.0.0.2/32");
    let cluster = plan.variable(REFRESH.0, REFRESH.1).start().await;

    let folder = followed(&cluster);
    let rotation = recipe(CA_ROTATION);
    let mut script = "trap 'kill \"$agent\" \"$(cat \"$ingress/pid\")\"' EXIT\n".to_owned();
    script.push_str(&recipes(&[ONBOARDING, TROUBLESHOOTING].concat()));
    script.push_str("echo '--- CA rotation'\n");
    script.push_str(&rotation);
    script.push_str(
        "gpuctl --profile admin keys list; kill \"$agent\"; wait \"$agent\"; start_agent; wait_log '\"polling\"'\n",
    );
    script.push_str("echo '--- all of it'; see | answer state; ! grep -e '\"recovered\"' \"$here/agent.log\"\n");
    // Another test may have the port.
    let port = format!("127.0.0.1:{}", free_port().unwrap());
    let script = script.replace("127.0.0.1:9443", &port);

    let (went_well, transcript) = transcript(&script, folder.path()).await;
    let agent_log = fs::read_to_string(folder.path().join(".dev/run/by-hand/agent.log")).unwrap_or_default();
    assert!(went_well, "{transcript}\n{agent_log}");

    let after = |title: &str| transcript.split_once(title).unwrap_or_else(|| panic!("no {title}: {transcript}")).1;
    assert!(after("troubleshooting.md: A lost agent key").contains("the agent ended with 3"), "{transcript}");
    assert!(after("troubleshooting.md: A node moved behind a proxy").trim_start().contains("active"), "{transcript}");
    assert!(after("--- CA rotation").contains("retired"), "{transcript}");
    assert!(after("--- all of it").contains("active"), "{transcript}");
    expect_no_failure(&transcript);
    let moved = fs::read_to_string(folder.path().join(".dev/run/by-hand/agent.env")).unwrap();
    assert!(moved.contains(&format!("SVC_API_URL='https://{port}'")), "it polls through the proxy");
    tokio::time::timeout(ENDS_WITHIN, cluster.shutdown()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn user_rents_resumes_a_terminal_after_a_replica_died_and_logs_in_by_ssh() {
    let mut cluster = TestCluster::builder().replicas(3).variable(REFRESH.0, REFRESH.1).start().await;
    // Without root there is no SSH login: the script says so and leaves this out.
    let Some(mut door) = SshNode::open(&mut cluster).await else { return cluster.shutdown().await };
    // The agent reports the host key with its first message, which no answer of the API shows.
    tokio::time::sleep(Duration::from_secs(5)).await;
    let folder = followed(&cluster);
    // The README's block and the book's are followed one after the other.
    let (log_in, rest) = BY_COMMAND_LINE.split_at(1);
    let (log_in, key, rest) = (recipes(log_in), key_of_the_readme(), recipes(rest));
    let script = format!("set -eu\n{log_in}{key}\n{rest}echo all''followed\n");
    let home = folder.path().display().to_string();
    let mut screen = PtySession::of("bash", &["-c", &script], folder.path(), &[("HOME", &home)]);

    screen.expect_output("--- user/renting.md").await;
    screen.expect_output("--- user/terminals.md").await;
    screen.expect_output("is recorded by the service (policy terminal.recording_enabled, mode best-effort)").await;
    screen.enter("PS1='ready> '; stty -echo; echo it is $((6 * 7)) for $USER\r").await;
    screen.expect_output("it is 42 for gpu").await;
    screen.enter("for i in $(seq 1 200); do echo line-$i; sleep 0.02; done; echo all''done\r").await;
    screen.expect_output("line-20\r").await;
    let killed = serving(&cluster).await;
    cluster.kill9_replica(killed);
    screen.expect_output("alldone").await;
    screen.enter("exit\r").await;

    screen.expect_output("--- user/recordings.md").await;
    screen.expect_output("session.cast has ").await;
    screen.expect_output("--- user/ssh-keys.md").await;
    screen.expect_output("uid=").await;
    screen.expect_output("allfollowed").await;
    let ended = screen.wait_for_exit().await;
    let text = screen.text();
    assert!(ended.success(), "{text}");
    let (live, again) = text.split_once("--- user/recordings.md").unwrap();
    let expected: Vec<String> = (1..=200).map(|i| format!("line-{i}")).collect();
    for shown in [live, again] {
        let lines: Vec<&str> = shown.lines().map(str::trim).filter(|line| line.starts_with("line-")).collect();
        assert_eq!(lines, expected, "{text}");
    }
    assert!(again.contains("Host gpu-") && again.contains("released"), "{text}");
    let cast = fs::read_to_string(folder.path().join(".dev/run/gpuctl/session.cast")).unwrap();
    assert!(cast.starts_with("{") && cast.contains("line-200"), "{cast:.200}");

    cluster.restart_replica(killed).await;
    // The same without `gpuctl`, where the first rental by hand has left its folder.
    let script = format!("mkdir -p .dev/run/by-hand\n{}", recipes(&BY_SSH));
    let (went_well, transcript) = transcript(&script, folder.path()).await;
    let came_in = ["\"ssh\":{", "uid=", "(ED25519)", "releasing"].iter().all(|word| transcript.contains(word));
    assert!(went_well && came_in, "{transcript}");
    expect_no_failure(&transcript);
    assert!(door.machine.stop_agent().is_some_and(|status| status.success()));
    tokio::time::timeout(ENDS_WITHIN, cluster.shutdown()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn by_command_line_a_user_pays_in_and_has_a_part_of_it_back() {
    let mut cluster =
        TestCluster::builder().without_credit().with_processor().variable(REFRESH.0, REFRESH.1).start().await;
    let folder = followed(&cluster);
    let script = format!("set -eu\nexport HOME=$PWD\n{}", recipes(&PAYING));
    let (went_well, transcript) = transcript(&script, folder.path()).await;
    assert!(went_well && transcript.contains("deposit") && transcript.contains("refund"), "{transcript}");
    expect_no_failure(&transcript);
    assert_eq!(cluster.balance_micro().await, 1_500_000_000);
    let secret = cluster.processor_client().all("payment_intents").await[0]["client_secret"].clone();
    cluster.register_secret("a client secret", secret.as_str().unwrap());
    tokio::time::timeout(ENDS_WITHIN, cluster.shutdown()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn by_command_line_an_operator_rolls_out_an_update_pauses_it_resumes_it_and_aborts_it() {
    let mut cluster = TestCluster::builder().variable(REFRESH.0, REFRESH.1).start().await;
    let fleet = UpdatableFleet::start(&mut cluster, "h100", 3, 0).await;
    let folder = followed(&cluster);
    let log_in =
        "printf '%s\\n' \"$SVC_ADMIN_PASSWORD\" | gpuctl login --username \"$SVC_ADMIN_USERNAME\" --password-stdin";
    let given = format!(". .dev/env\nPATH=$PWD/target/debug:$PATH\nDIGEST={} SKU=h100\n{log_in}", digest('a'));
    let script = format!("set -eu\n{given}\n{}", recipes(&ROLLING_OUT));
    let (went_well, transcript) = transcript(&script, folder.path()).await;
    assert!(went_well, "{transcript}");
    expect_no_failure(&transcript);
    assert!(transcript.contains("paused") && transcript.contains("abort"), "{transcript}");
    fleet.shared.finish(3);
    let is_aborted = |list: &serde_json::Value| list["items"][0]["state"] == "aborted";
    let list = cluster.admin.wait_until("/api/v1/admin/rollouts", "it is aborted", is_aborted).await;
    assert!(list["items"][0]["updated"].as_u64() < Some(2), "no more than the canary: {list}");

    let script = format!("set -eu\n{given}\n{}", recipes(&HELD_NODES));
    let (went_well, transcript) = self::transcript(&script, folder.path()).await;
    assert!(went_well && transcript.contains("with held nodes"), "{transcript}");
    tokio::time::timeout(ENDS_WITHIN, cluster.shutdown()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn printed_address_and_token_open_a_terminal_in_a_browser() {
    let cluster = TestCluster::builder().replicas(3).variable(REFRESH.0, REFRESH.1).start().await;
    let folder = followed(&cluster);
    let names = [&ONBOARDING[..], &IN_A_BROWSER].concat();
    let script = format!("trap 'kill \"$agent\"' EXIT\n{}read -r _\n", recipes(&names));
    let home = folder.path().display().to_string();
    let mut screen = PtySession::of("bash", &["-c", &script], folder.path(), &[("HOME", &home)]);
    // Each part has its time.
    for (page, title) in &names {
        screen.expect_output(&format!("--- {page}: {title}")).await;
    }
    let is_whole = |shown: &str| shown.rsplit_once("token:   ey").is_some_and(|(_, rest)| rest.contains('\n'));
    screen.wait_for("the line of the token", is_whole).await;
    let text = screen.text();
    let printed = |name: &str| {
        let line = text.lines().rev().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name} {text}"));
        line[name.len()..].trim().to_owned()
    };
    let mut browser = Browser::start(&[]).await;
    assert_eq!(browser.open(&printed("address:")).await, 200);
    browser.fill("#token", &printed("token:")).await;
    browser.click("#sign-in button").await;
    browser.expect_text("#state", "Connected").await;
    browser.enter("echo it is $((6 * 7))").await;
    browser.expect_screen("it is 42").await;
    browser.close().await;
    screen.enter("\r").await;
    assert!(screen.wait_for_exit().await.success(), "{}", screen.text());
    tokio::time::timeout(ENDS_WITHIN, cluster.shutdown()).await.unwrap();
}
