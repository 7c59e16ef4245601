//! The README's recipes for operators, followed word by word: taken out of its text, and run in a shell where it is to be read.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use supervisors::dev::process::free_port;
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

#[tokio::test(flavor = "multi_thread")]
async fn the_operators_recipes_hold_word_by_word() {
    let plan =
        World::plan().replicas(3).policy("keys.renewal_spread_seconds", 1).policy("node.offline_after_seconds", 10);
    let plan =
        plan.variable("SVC_NODE_CLIENT_IDENTITY", "rfc9440").variable("SVC_NODE_TRUSTED_PROXIES", "127.0.0.2/32");
    let world = plan.variable("INTERNAL_JWKS_REFRESH_TOKEN", &hex::encode([7; 32])).start().await;

    // What a checkout in which `deploy/up` runs is to a shell.
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

    let readme = fs::read_to_string(checkout().join("README.md")).unwrap();
    let rotation = recipe(&readme, CA_ROTATION);
    let mut script = "trap 'kill \"$agent\" \"$(cat \"$ingress/pid\")\"' EXIT\n".to_owned();
    for name in BY_HAND.into_iter().chain(IN_TROUBLE) {
        script.extend([&format!("echo '--- {name}'\n"), recipe(&readme, name).as_str()]);
    }
    script.push_str("echo '--- CA rotation'\n");
    script.push_str(&rotation);
    script
        .push_str("target/debug/gpuaas keys list; kill \"$agent\"; wait \"$agent\"; start_agent; told '\"polling\"'\n");
    script.push_str("echo '--- all of it'; see | answer state; ! grep -e '\"recovered\"' \"$here/agent.log\"\n");
    // Another test may have the port.
    let port = format!("127.0.0.1:{}", free_port().unwrap());
    let script = script.replace("127.0.0.1:9443", &port);

    let mut shell = Command::new("bash");
    shell.arg("-c").arg(&script).current_dir(folder.path()).stdin(Stdio::null()).kill_on_drop(true);
    let log = folder.path().join("transcript");
    let said = fs::File::create(&log).unwrap();
    shell.stdout(said.try_clone().unwrap()).stderr(said);
    let ended = tokio::time::timeout(WITHIN, shell.status()).await;
    let transcript = fs::read_to_string(&log).unwrap();
    let agent_log = fs::read_to_string(folder.path().join(".dev/run/by-hand/agent.log")).unwrap_or_default();
    assert!(ended.is_ok_and(|ended| ended.unwrap().success()), "{transcript}\n{agent_log}");

    let after = |title: &str| transcript.split_once(title).unwrap_or_else(|| panic!("no {title}: {transcript}")).1;
    assert!(after("**A lost agent key").contains("the agent ended with 3"), "{transcript}");
    assert!(after("**A node moved").trim_start().contains("active"), "{transcript}");
    assert!(after("--- CA rotation").contains("retired"), "{transcript}");
    assert!(after("--- all of it").contains("active"), "{transcript}");
    for failed in ["curl: (", "not found", "Traceback", "No such file"] {
        assert!(!transcript.contains(failed), "{failed}:\n{transcript}");
    }
    let moved = fs::read_to_string(folder.path().join(".dev/run/by-hand/agent.env")).unwrap();
    assert!(moved.contains(&format!("SVC_API_URL='https://{port}'")), "it polls through the proxy");
    tokio::time::timeout(PATIENCE, world.end()).await.unwrap();
}
