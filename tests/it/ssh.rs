//! Who may log in, as users meet it: real keys, a real ssh, and a real sshd on a machine that is thrown away.

use crate::system_executor::{GPUS, onboarded, rent_with, start};
use reqwest::Method;
use serde_json::{Value, json};
use std::process::Command;
use std::time::{Duration, Instant};
use tests::not_run::not_run;
use tests::world::machine::Machine;
use tests::world::{OnboardedNode, PATIENCE, REGION, Rented, World, id_of, ssh_public_key};
use uuid::Uuid;

/// A user of SSH with a key of their own, and what they know of hosts.
pub(crate) struct Client {
    folder: tempfile::TempDir,
}

impl Client {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut made = Command::new("ssh-keygen");
        made.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(folder.path().join("key"));
        assert!(made.status().unwrap().success());
        Self { folder }
    }

    pub(crate) fn public_key(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("key.pub")).unwrap().trim().to_owned()
    }

    /// Runs a command there, where it is let in.
    pub(crate) fn run(&self, port: u64, login: &str, command: &str) -> Result<String, String> {
        let known = format!("UserKnownHostsFile={}", self.folder.path().join("known").display());
        let mut ssh = Command::new("ssh");
        ssh.args(["-F", "none", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=accept-new", "-o", &known]);
        ssh.args(["-o", "ConnectTimeout=10", "-o", "IdentitiesOnly=yes", "-p", &port.to_string(), "-i"]);
        let ran = ssh.arg(self.folder.path().join("key")).arg(login).arg(command).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        if ran.status.success() { Ok(text(&ran.stdout)) } else { Err(text(&ran.stderr)) }
    }

    /// The host key that it met, as it would show it.
    pub(crate) fn met(&self) -> String {
        let printed = Command::new("ssh-keygen").arg("-lf").arg(self.folder.path().join("known")).output().unwrap();
        String::from_utf8(printed.stdout).unwrap().split_whitespace().nth(1).unwrap().to_owned()
    }
}

/// A node that users reach by SSH.
pub(crate) struct Door {
    pub(crate) node: OnboardedNode,
    pub(crate) machine: Machine,
    pub(crate) port: u64,
}

impl Door {
    /// `None` where a test cannot have one: it is said, and the test is left out.
    pub(crate) async fn open(world: &mut World) -> Option<Self> {
        let (node, mut machine) = onboarded(world).await?;
        if !supervisors::dev::agents::has_sshd() {
            not_run("a login by SSH needs openssh-server");
            return None;
        }
        machine.stop_agent();
        let port = u64::from(supervisors::dev::process::free_port().unwrap());
        let mut door = Self { node, machine, port };
        door.start_agent();
        let reached = json!({ "host": "127.0.0.1", "port": port });
        let reached = world.admin.request(Method::PATCH, &door.node.path()).json(&reached);
        world.admin.send(reached).await.ok();
        door.node.expect_state("active").await;
        Some(door)
    }

    fn start_agent(&mut self) {
        start(&mut self.machine, &[("SVC_NODE_AGENT_SSH_LISTEN", &format!("127.0.0.1:{}", self.port))]);
    }

    /// Waits until this user of SSH is let in, or is not any more.
    async fn lets_in(&self, client: &Client, user: &str, wanted: bool) {
        let (login, until) = (format!("{user}@127.0.0.1"), Instant::now() + PATIENCE);
        loop {
            let ran = client.run(self.port, &login, "true");
            if ran.is_ok() == wanted {
                return;
            }
            assert!(Instant::now() < until, "{wanted}: {ran:?}");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// Ends everything in order.
    async fn end(mut self, world: World) {
        assert!(self.machine.stop_agent().is_some_and(|status| status.success()));
        world.end().await;
    }
}

/// Registers the client's key as `user`.
async fn register(world: &World, name: &str, public_key: &str) -> Uuid {
    let key = json!({ "name": name, "public_key": public_key });
    id_of(&world.user.post("/api/v1/ssh-keys", &key).await.created())
}

async fn make_default(world: &World, key: Uuid) {
    world.user.post(&format!("/api/v1/ssh-keys/{key}/default"), &json!({})).await.ok();
}

async fn choose(world: &World, allocation: &Rented, keys: &Value) -> tests::world::client::Answer {
    let request = world.user.request(Method::PUT, &format!("{}/ssh-keys", allocation.path()));
    world.user.send(request.json(&json!({ "ssh_key_ids": keys }))).await
}

async fn written(world: &World, allocation: &Rented) -> Value {
    let is_written = |seen: &Value| seen["ssh"]["keys_written"] == true;
    world.user.wait_until(&allocation.path(), "the node has written the keys", is_written).await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_users_new_key_logs_in_and_the_removed_one_does_not_any_more() {
    let mut world = World::start().await;
    let Some(mut door) = Door::open(&mut world).await else { return world.end().await };
    let (old, new) = (Client::new(), Client::new());
    let old_key = register(&world, "old", &old.public_key()).await;
    // No key is named: it follows the default.
    let wanted = json!({ "sku": "h100x4", "region_code": REGION, "gpu_count": 1, "node_id": door.node.id });
    let allocation =
        Rented::new(id_of(&world.user.post("/api/v1/allocations", &wanted).await.created()), world.user.clone());
    let user = allocation.expect_state("active").await["ssh"]["username"].as_str().unwrap().to_owned();
    door.lets_in(&old, &user, true).await;
    // What lies in the home is the user's affair, and nobody else's.
    let login = format!("{user}@127.0.0.1");
    let before = std::fs::read(door.machine.view().at("/etc/ssh/moduli")).ok();
    old.run(door.port, &login, "rm -rf ~/.ssh; ln -s /etc/ssh ~/.ssh").unwrap();

    let new_key = register(&world, "new", &new.public_key()).await;
    assert!(new.run(door.port, &login, "true").is_err(), "a further key opens nothing until it is chosen");
    make_default(&world, new_key).await;
    door.lets_in(&new, &user, true).await;
    door.lets_in(&old, &user, false).await;
    let seen = written(&world, &allocation).await;
    assert_eq!(seen["ssh"]["key_fingerprints"].as_array().unwrap().len(), 1, "{seen}");
    assert!(!door.machine.view().at("/etc/ssh/authorized_keys").exists(), "nothing is written through the user's link");
    assert_eq!(std::fs::read(door.machine.view().at("/etc/ssh/moduli")).ok(), before);

    // A key that is deleted is out, and the other one inherits.
    world.user.delete(&format!("/api/v1/ssh-keys/{new_key}")).await;
    door.lets_in(&new, &user, false).await;
    door.lets_in(&old, &user, true).await;
    // The agent is away while wishes come and go: the last one holds.
    door.machine.kill9_agent();
    choose(&world, &allocation, &json!([])).await.ok();
    let third = register(&world, "third", &new.public_key()).await;
    choose(&world, &allocation, &json!([third])).await.ok();
    door.start_agent();
    door.lets_in(&new, &user, true).await;
    door.lets_in(&old, &user, false).await;
    written(&world, &allocation).await;
    // A choice of its own is left alone by the default, until it is taken back.
    make_default(&world, old_key).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(new.run(door.port, &login, "true").is_ok());
    choose(&world, &allocation, &Value::Null).await.ok();
    door.lets_in(&old, &user, true).await;
    door.lets_in(&new, &user, false).await;

    let actions: Vec<String> = world.audit_of(allocation.id).await.into_iter().map(|(_, action, ..)| action).collect();
    assert_eq!(actions.iter().filter(|action| *action == "ssh_keys.choose").count(), 3, "{actions:?}");
    let log = world.admin.get("/api/v1/admin/audit-log?action=ssh_keys.reconcile").await.ok();
    let rows = log["items"].as_array().unwrap();
    assert!(!rows.is_empty() && rows.iter().all(|row| row["metadata"]["result"] == "ok"), "{log}");
    assert!(
        rows.iter().all(|row| row["actor"] == format!("node:{}", door.node.id) && row["correlation_id"].is_string()),
        "{log}"
    );
    allocation.release().await;
    allocation.expect_state("released").await;
    assert!(old.run(door.port, &login, "true").unwrap_err().contains("Permission denied"));
    door.end(world).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_allocations_on_one_node_one_ends_and_the_keys_of_the_other_stay() {
    let mut world = World::start().await;
    let Some(door) = Door::open(&mut world).await else { return world.end().await };
    let (ann, bob) = (Client::new(), Client::new());
    let (first, _, first_user) = rent_with(&world, &door.node, 1, &ann.public_key()).await;
    let (second, _, second_user) = rent_with(&world, &door.node, GPUS - 1, &bob.public_key()).await;
    door.lets_in(&ann, &first_user, true).await;
    door.lets_in(&bob, &second_user, true).await;
    assert!(ann.run(door.port, &format!("{second_user}@127.0.0.1"), "true").is_err(), "a key opens its own alone");
    first.release().await;
    first.expect_state("released").await;
    door.lets_in(&ann, &first_user, false).await;
    door.lets_in(&bob, &second_user, true).await;
    // And they can still be changed.
    choose(&world, &second, &json!([])).await.ok();
    door.lets_in(&bob, &second_user, false).await;
    choose(&world, &first, &json!([])).await.refused(409, "state_conflict");
    second.release().await;
    second.expect_state("released").await;
    door.end(world).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_of_keys_reaches_a_node_that_was_silent_and_the_last_wish_wins() {
    let mut world = World::plan().replicas(2).start().await;
    let node = world.node("h100").await;
    let keys = [ssh_public_key("a"), ssh_public_key("b"), ssh_public_key("c")];
    let mut ids = Vec::new();
    for (n, key) in keys.iter().enumerate() {
        ids.push(register(&world, &format!("key {n}"), key).await);
    }
    let allocation = world.rent("h100", 1).await;
    allocation.expect_state("active").await;
    let file = world.agent_folder(&node).join(format!("state/allocations/{}/authorized_keys", allocation.id));
    let without_comment = |n: usize| keys[n].rsplit_once(' ').unwrap().0.to_owned() + "\n";
    assert_eq!(std::fs::read_to_string(&file).unwrap(), without_comment(0));
    world.lose_agent(&node);
    for wish in [json!([ids[1]]), json!([ids[1], ids[2]]), json!([]), json!([ids[2]])] {
        let chosen = choose(&world, &allocation, &wish).await.ok();
        assert_eq!(chosen["ssh"]["keys_written"], false, "{chosen}");
    }
    world.find_agent(&node);
    written(&world, &allocation).await;
    assert_eq!(std::fs::read_to_string(&file).unwrap(), without_comment(2));
    // Killed in the middle of a change, it goes on with it.
    choose(&world, &allocation, &json!([ids[0], ids[1]])).await.ok();
    world.kill9_agent(&node);
    world.restart_agent(&node);
    written(&world, &allocation).await;
    assert_eq!(std::fs::read_to_string(&file).unwrap(), without_comment(0) + &without_comment(1));
    // A replica dies, and a deleted key goes all the same.
    world.kill9_replica(0);
    let elsewhere = world.at_replica(1, "user");
    elsewhere.delete(&format!("/api/v1/ssh-keys/{}", ids[0])).await;
    let until = Instant::now() + PATIENCE;
    while std::fs::read_to_string(&file).unwrap() != without_comment(1) {
        assert!(Instant::now() < until, "the deleted key still opens it");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    world.restart_replica(0).await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn gpuctl_comes_in_by_ssh_pins_the_host_key_and_hands_on_the_exit_status() {
    let mut world = World::start().await;
    let Some(Door { node, mut machine, .. }) = Door::open(&mut world).await else { return world.end().await };
    // The host key is told with the agent's first word.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let ann = Client::new();
    let gpuctl = world.logged_in("user").await;
    let identity = ann.folder.path().join("key").display().to_string();
    gpuctl.run(&["ssh-keys", "add", &format!("{identity}.pub"), "--default"]).await.ok();
    let wanted = ["-o", "json", "-q", "allocations", "create", "--sku", "h100x4", "--node", &node.id.to_string()];
    let made = gpuctl.run(&wanted).await.json();
    let (id, user) = (made["id"].as_str().unwrap(), made["ssh"]["username"].as_str().unwrap());
    let ssh = ["ssh", id, "-i", &identity, "--ssh-arg=-oBatchMode=yes", "--ssh-arg=-Fnone", "--"];
    let ran = gpuctl.run(&[&ssh[..], &["id", "-un"]].concat()).await;
    assert_eq!(ran.ok().trim(), user);
    assert_eq!(gpuctl.run(&[&ssh[..], &["exit", "7"]].concat()).await.code, 7);
    let config = gpuctl.run(&["ssh", id, "-i", &identity, "--print-config"]).await.ok();
    let written = gpuctl.home().join("config");
    std::fs::write(&written, config).unwrap();
    let by_config = Command::new("ssh")
        .args(["-F", written.to_str().unwrap(), "-o", "BatchMode=yes", &format!("gpu-{id}"), "true"])
        .output()
        .unwrap();
    assert!(by_config.status.success(), "{by_config:?}");

    // The keys are chosen anew, and the machine follows.
    let shown = gpuctl.run(&["-o", "json", "allocations", "ssh-keys", id, "--default"]).await.json();
    assert_eq!(shown["ssh"]["key_fingerprints"].as_array().map(Vec::len), Some(1), "{shown}");

    // Another host key than the one that the service names: nobody is logged in there.
    let known = gpuctl.folder().join("known_hosts").join(id);
    assert!(std::fs::read_to_string(&known).unwrap().starts_with(&format!("gpu-{id} ssh-ed25519 ")));
    std::fs::remove_file(&known).unwrap();
    machine.stop_agent();
    machine.run("cd /var/lib/gpuaas-agent/ssh && ssh-keygen -q -t ed25519 -N '' -f other && mv other host_key && rm host_key.pub other.pub");
    let door = machine.run("cat /var/lib/gpuaas-agent/ssh/sshd_config");
    machine.run(&format!("cat > /run/in-between <<'END'\n{door}\nEND\n/usr/sbin/sshd -f /run/in-between -o PidFile=/run/in-between.pid >/dev/null 2>&1"));
    let refused = gpuctl.run(&[&ssh[..], &["true"]].concat()).await.failed(6);
    assert!(refused.contains("host key"), "{refused}");
    assert!(!known.exists());
    machine.run("kill $(cat /run/in-between.pid)");
    machine.run("rm /var/lib/gpuaas-agent/ssh/host_key*");
    start(&mut machine, &[]);
    gpuctl.run(&["allocations", "release", id]).await.ok();
    gpuctl.run(&[&ssh[..], &["true"]].concat()).await.failed(6);
    assert!(machine.stop_agent().is_some_and(|status| status.success()));
    world.end().await;
}
