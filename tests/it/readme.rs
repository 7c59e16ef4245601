//! The README's recipes for operators, followed word by word: taken out of its text, and run in a shell where it is to be read.

use crate::browser::Browser;
use crate::gpuctl::serving;
use crate::ssh::Door;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use supervisors::dev::environment::EnvironmentFile;
use supervisors::dev::process::free_port;
use tests::world::gpuctl::OnScreen;
use tests::world::{PATIENCE, World};
use tokio::process::Command;

/// A recipe begins with its name, in bold; the code below it, up to the next one, is the recipe's.
const BY_HAND: [&str; 4] =
    ["## The main job by hand", "**A kind of machine,", "**A node, with its bootstrap bundle.**", "**Its agent,**"];
const IN_TROUBLE: [&str; 4] = [
    "## When a node is in trouble",
    "**A lost agent key.**",
    "**An expired certificate.**",
    "**A node moved behind a proxy**",
];
const CA_ROTATION: &str = "**CA rotation.**";
const IN_A_BROWSER: [&str; 2] = ["**Renting it.**", "**A terminal in the browser.**"];
const BY_SSH: [&str; 2] = ["## The main job by hand", "**Coming in by SSH,**"];
const BY_COMMAND_LINE: [&str; 6] =
    ["## By command line", "**Renting.**", "**A terminal,**", "**Recordings.**", "**SSH,**", "**Administrators**"];
const PAYING: [&str; 2] = ["## By command line", "**Paying in `deploy/up`.**"];

/// What `deploy/up` gives its replicas, and tells in `.dev/env`.
const REFRESH: (&str, &str) =
    ("INTERNAL_JWKS_REFRESH_TOKEN", "0707070707070707070707070707070707070707070707070707070707070707");

/// As long as all of it may take.
const WITHIN: Duration = Duration::from_secs(300);

fn checkout() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// The shell code of a recipe.
fn recipe(readme: &str, name: &str) -> String {
    let is_next = |line: &str| line.starts_with("**") || line.starts_with("## ");
    let mut lines = readme.lines().skip_while(|line| !line.starts_with(name));
    assert!(lines.next().is_some(), "README.md has no {name:?} any more");
    let (mut code, mut is_code) = (String::new(), false);
    for line in lines.take_while(|line| !is_next(line)) {
        match line {
            "```sh" => is_code = true,
            "```" => is_code = false,
            line if is_code => code.extend([line, "\n"]),
            _ => {}
        }
    }
    assert!(!code.is_empty(), "{name:?} says nothing to do");
    code
}

/// Recipes one after the other, each under its name.
fn recipes(readme: &str, names: &[&str]) -> String {
    names.iter().map(|name| format!("echo '--- {name}'\n{}", recipe(readme, name))).collect()
}

/// What a checkout in which `deploy/up` runs is to a shell.
struct Followed {
    folder: tempfile::TempDir,
    _env: EnvironmentFile,
}

impl Followed {
    fn path(&self) -> &Path {
        self.folder.path()
    }
}

fn followed(world: &World) -> Followed {
    let folder = tempfile::tempdir().unwrap();
    let built = world.settings.executable.parent().unwrap().to_owned();
    fs::create_dir_all(folder.path().join("target")).unwrap();
    fs::create_dir_all(folder.path().join(".dev/run")).unwrap();
    symlink(built, folder.path().join("target/debug")).unwrap();
    symlink(checkout().join("deploy"), folder.path().join("deploy")).unwrap();
    let tools = std::env::var_os("GPUAAS_TOOLS_DIR").map_or_else(|| checkout().join(".dev/tools"), PathBuf::from);
    symlink(tools, folder.path().join(".dev/tools")).unwrap();
    let (settings, replicas) = (&world.settings, &world.replicas);
    let env = supervisors::dev::variables(settings, replicas, &world.identity, &world.nats, &world.postgres).unwrap();
    let _env = env.write(&folder.path().join(".dev/env")).unwrap();
    Followed { folder, _env }
}

/// Follows a script where the checkout is, and says whether it went well and what it said.
async fn transcript(script: &str, folder: &Path) -> (bool, String) {
    let mut shell = Command::new("bash");
    shell.arg("-c").arg(script).current_dir(folder).stdin(Stdio::null()).kill_on_drop(true);
    // Logins of a recipe lie beside it.
    shell.env("XDG_CONFIG_HOME", folder);
    let log = folder.join("transcript");
    let said = fs::File::create(&log).unwrap();
    shell.stdout(said.try_clone().unwrap()).stderr(said);
    let ended = tokio::time::timeout(WITHIN, shell.status()).await;
    (ended.is_ok_and(|ended| ended.unwrap().success()), fs::read_to_string(&log).unwrap())
}

/// Not every command that fails ends a script.
fn expect_no_failure(transcript: &str) {
    for failed in ["curl: (", "not found", "Traceback", "No such file"] {
        assert!(!transcript.contains(failed), "{failed}:\n{transcript}");
    }
}

fn readme() -> String {
    fs::read_to_string(checkout().join("README.md")).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_operators_recipes_hold_word_by_word() {
    let plan =
        World::plan().replicas(3).policy("keys.renewal_spread_seconds", 1).policy("node.offline_after_seconds", 10);
    let plan =
        plan.variable("SVC_NODE_CLIENT_IDENTITY", "rfc9440").variable("SVC_NODE_TRUSTED_PROXIES", "127.0.0.2/32");
    let world = plan.variable(REFRESH.0, REFRESH.1).start().await;

    let folder = followed(&world);
    let readme = readme();
    let rotation = recipe(&readme, CA_ROTATION);
    let mut script = "trap 'kill \"$agent\" \"$(cat \"$ingress/pid\")\"' EXIT\n".to_owned();
    script.push_str(&recipes(&readme, &[BY_HAND, IN_TROUBLE].concat()));
    script.push_str("echo '--- CA rotation'\n");
    script.push_str(&rotation);
    script.push_str(
        "gpuctl --profile admin keys list; kill \"$agent\"; wait \"$agent\"; start_agent; told '\"polling\"'\n",
    );
    script.push_str("echo '--- all of it'; see | answer state; ! grep -e '\"recovered\"' \"$here/agent.log\"\n");
    // Another test may have the port.
    let port = format!("127.0.0.1:{}", free_port().unwrap());
    let script = script.replace("127.0.0.1:9443", &port);

    let (went_well, transcript) = transcript(&script, folder.path()).await;
    let agent_log = fs::read_to_string(folder.path().join(".dev/run/by-hand/agent.log")).unwrap_or_default();
    assert!(went_well, "{transcript}\n{agent_log}");

    let after = |title: &str| transcript.split_once(title).unwrap_or_else(|| panic!("no {title}: {transcript}")).1;
    assert!(after("**A lost agent key").contains("the agent ended with 3"), "{transcript}");
    assert!(after("**A node moved").trim_start().contains("active"), "{transcript}");
    assert!(after("--- CA rotation").contains("retired"), "{transcript}");
    assert!(after("--- all of it").contains("active"), "{transcript}");
    expect_no_failure(&transcript);
    let moved = fs::read_to_string(folder.path().join(".dev/run/by-hand/agent.env")).unwrap();
    assert!(moved.contains(&format!("SVC_API_URL='https://{port}'")), "it polls through the proxy");
    tokio::time::timeout(PATIENCE, world.end()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn by_command_line_a_user_rents_has_a_terminal_that_outlives_its_replica_sees_it_again_and_comes_in_by_ssh() {
    let mut world = World::plan().replicas(3).variable(REFRESH.0, REFRESH.1).start().await;
    // Without root nobody comes in by SSH: that is said, and this left out.
    let Some(mut door) = Door::open(&mut world).await else { return world.end().await };
    // The host key is told with the agent's first word.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let folder = followed(&world);
    let script = format!("set -eu\n{}echo all''followed\n", recipes(&readme(), &BY_COMMAND_LINE));
    let home = folder.path().display().to_string();
    let mut screen = OnScreen::of("bash", &["-c", &script], folder.path(), &[("HOME", &home)]);

    screen.shows("--- **A terminal").await;
    screen.shows("is recorded by the service (policy terminal.recording_enabled, mode best-effort)").await;
    screen.enter("PS1='ready> '; stty -echo; echo it is $((6 * 7)) for $USER\r").await;
    screen.shows("it is 42 for gpu").await;
    screen.enter("for i in $(seq 1 200); do echo line-$i; sleep 0.02; done; echo all''done\r").await;
    screen.shows("line-20\r").await;
    let killed = serving(&world).await;
    world.kill9_replica(killed);
    screen.shows("alldone").await;
    screen.enter("exit\r").await;

    screen.shows("--- **Recordings").await;
    screen.shows("session.cast has ").await;
    screen.shows("--- **SSH").await;
    screen.shows("uid=").await;
    screen.shows("allfollowed").await;
    let ended = screen.ends().await;
    let text = screen.text();
    assert!(ended.success(), "{text}");
    let (live, again) = text.split_once("--- **Recordings").unwrap();
    let expected: Vec<String> = (1..=200).map(|i| format!("line-{i}")).collect();
    for shown in [live, again] {
        let lines: Vec<&str> = shown.lines().map(str::trim).filter(|line| line.starts_with("line-")).collect();
        assert_eq!(lines, expected, "{text}");
    }
    assert!(again.contains("Host gpu-") && again.contains("released"), "{text}");
    let cast = fs::read_to_string(folder.path().join(".dev/run/gpuctl/session.cast")).unwrap();
    assert!(cast.starts_with("{") && cast.contains("line-200"), "{cast:.200}");

    world.restart_replica(killed).await;
    // The same without `gpuctl`, where the main job by hand has left its folder.
    let script = format!("mkdir -p .dev/run/by-hand\n{}", recipes(&readme(), &BY_SSH));
    let (went_well, transcript) = transcript(&script, folder.path()).await;
    let came_in = ["\"ssh\":{", "uid=", "(ED25519)", "releasing"].iter().all(|word| transcript.contains(word));
    assert!(went_well && came_in, "{transcript}");
    expect_no_failure(&transcript);
    assert!(door.machine.stop_agent().is_some_and(|status| status.success()));
    tokio::time::timeout(PATIENCE, world.end()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn by_command_line_a_user_pays_in_and_has_a_part_of_it_back() {
    let mut world = World::plan().penniless().with_processor().variable(REFRESH.0, REFRESH.1).start().await;
    let folder = followed(&world);
    let script = format!("set -eu\nexport HOME=$PWD\n{}", recipes(&readme(), &PAYING));
    let (went_well, transcript) = transcript(&script, folder.path()).await;
    assert!(went_well && transcript.contains("deposit") && transcript.contains("refund"), "{transcript}");
    expect_no_failure(&transcript);
    assert_eq!(world.balance_micro().await, 1_500_000_000);
    let secret = world.outside().all("payment_intents").await[0]["client_secret"].clone();
    world.keep_secret("a client secret", secret.as_str().unwrap());
    tokio::time::timeout(PATIENCE, world.end()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_address_and_the_token_that_the_readme_prints_open_a_terminal_in_a_browser() {
    let world = World::plan().replicas(3).variable(REFRESH.0, REFRESH.1).start().await;
    let folder = followed(&world);
    let names = [&BY_HAND[..], &IN_A_BROWSER].concat();
    let script = format!("trap 'kill \"$agent\"' EXIT\n{}read -r _\n", recipes(&readme(), &names));
    let home = folder.path().display().to_string();
    let mut screen = OnScreen::of("bash", &["-c", &script], folder.path(), &[("HOME", &home)]);
    screen.shows("token:   ey").await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    screen.look(Duration::from_millis(200)).await;
    let text = screen.text();
    let said = |name: &str| {
        let line = text.lines().rev().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name} {text}"));
        line[name.len()..].trim().to_owned()
    };
    let mut browser = Browser::start(&[]).await;
    assert_eq!(browser.open(&said("address:")).await, 200);
    browser.fill("#token", &said("token:")).await;
    browser.click("#sign-in button").await;
    browser.reads("#state", "Connected").await;
    browser.enter("echo it is $((6 * 7))").await;
    browser.draws("it is 42").await;
    browser.end().await;
    screen.enter("\r").await;
    assert!(screen.ends().await.success(), "{}", screen.text());
    tokio::time::timeout(PATIENCE, world.end()).await.unwrap();
}
