//! `gpuctl`, as a user types it: against the whole service, in pipes and in a real terminal.

use nix::sys::signal::{Signal, kill};
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt as _;
use std::time::{Duration, Instant};
use tests::cluster::gpuctl::{Gpuctl, PtySession};
use tests::cluster::{REGION, TestCluster, WAIT_TIMEOUT, ssh_public_key};
use uuid::Uuid;

/// An active allocation of the user who is logged in.
async fn rent_active_allocation(gpuctl: &Gpuctl) -> String {
    let wanted = ["-o", "json", "-q", "allocations", "create", "--sku", "h100", "--region", REGION];
    let made = gpuctl.run(&wanted).await.json();
    assert_eq!(made["state"], "active", "{made}");
    made["id"].as_str().unwrap().to_owned()
}

/// A `gpuctl` terminal session in a pseudo-terminal, at the prompt of its shell.
async fn open_terminal(gpuctl: &Gpuctl, allocation: &str, more: &[&str]) -> PtySession {
    let mut screen = gpuctl.run_in_pty(&[&["terminal", allocation][..], more].concat(), 100, 30);
    // Waits for its prompt, which depends on the machine.
    screen.expect_any_output().await;
    screen.enter("PS1='ready> '; stty -echo; echo be''gun\r").await;
    screen.expect_output("begun").await;
    screen
}

#[tokio::test(flavor = "multi_thread")]
async fn user_logs_in_rents_watches_and_releases_by_command_line() {
    let mut cluster = TestCluster::start().await;
    cluster.node("h100").await;
    let gpuctl = cluster.gpuctl();
    assert!(gpuctl.run(&["whoami"]).await.failed(3).contains("gpuctl login"));
    let output = cluster.log_in(&gpuctl, "user").await.ok();
    assert!(output.contains("as user"), "{output}");
    // The server's address is enough: the server names the identity provider and the client.
    let address_alone = cluster.gpuctl().without("SVC_OIDC_ISSUER").without("SVC_CLIENT_ID");
    cluster.log_in(&address_alone, "user").await.ok();
    let stored = gpuctl.folder().join("default.json");
    assert_eq!(std::fs::metadata(&stored).unwrap().permissions().mode() & 0o777, 0o600);
    let login: Value = serde_json::from_slice(&std::fs::read(&stored).unwrap()).unwrap();
    cluster.register_secret("the token of a login", login["access_token"].as_str().unwrap());
    let who = gpuctl.run(&["-o", "json", "whoami"]).await.json();
    assert_eq!((who["name"].as_str(), &who["roles"]), (Some("user"), &json!(["user"])), "{who}");

    let key_file = gpuctl.home().join("key.pub");
    std::fs::write(&key_file, ssh_public_key("ann@laptop")).unwrap();
    let added = gpuctl.run(&["ssh-keys", "add", key_file.to_str().unwrap(), "--default"]).await.ok();
    assert!(added.contains("ann@laptop") && added.contains("SHA256:"), "{added}");
    let skus = gpuctl.run(&["skus", "list"]).await.ok();
    assert!(skus.starts_with("NAME") && skus.contains("h100") && skus.contains(REGION), "{skus}");

    // Without a terminal, progress is one line for each step.
    let created = gpuctl.run(&["allocations", "create", "--sku", "h100", "--gpus", "2"]).await;
    let steps: Vec<&str> = ["requested", "provisioning", "active"]
        .into_iter()
        .filter(|state| created.err.contains(&format!(": {state}, ")))
        .collect();
    assert_eq!(steps, ["requested", "provisioning", "active"], "{created:?}");
    assert!(created.err.contains("gpuctl terminal"), "{created:?}");
    let shown = created.ok();
    let id = shown.lines().next().unwrap().split_whitespace().nth(1).unwrap().to_owned();
    id.parse::<Uuid>().unwrap_or_else(|error| panic!("{error}: {shown}"));

    let listed = gpuctl.run(&["-o", "json", "allocations", "list", "--state", "active"]).await.json();
    assert_eq!((&listed["items"][0]["id"], &listed["items"][0]["gpu_count"]), (&json!(id), &json!(2)), "{listed}");
    let table = gpuctl.run(&["allocations", "ls"]).await.ok();
    assert_eq!(table.lines().count(), 2, "{table}");
    assert!(!table.contains("USER"), "{table}");
    let of_all = cluster.logged_in("admin").await.run(&["allocations", "ls"]).await.ok();
    let owner = who["user_id"].as_str().unwrap();
    assert!(of_all.contains("USER") && of_all.contains(owner) && of_all.contains(&id), "{of_all}");
    let by_prefix = gpuctl.run(&["-o", "json", "allocations", "show", &id[..13]]).await.json();
    assert_eq!(by_prefix["id"], json!(id));
    // Its node runs tenants in a sandbox.
    let no_ssh = gpuctl.run(&["ssh", &id, "--", "true"]).await.failed(6);
    assert!(no_ssh.contains("no SSH host key") && no_ssh.contains(&format!("gpuctl terminal {id}")), "{no_ssh}");
    let history = gpuctl.run(&["-o", "json", "allocations", "events", &id]).await.json();
    assert_eq!(history["items"].as_array().unwrap().last().unwrap()["state"], "active", "{history}");

    // `--follow` shows the release to its end, without a prompt.
    let follows = gpuctl.command(&["-o", "json", "allocations", "events", "--follow", &id]).spawn().unwrap();
    let released = gpuctl.run(&["-o", "json", "-q", "allocations", "release", &id]).await.json();
    assert_eq!(released["state"], "released", "{released}");
    let followed = follows.wait_with_output().await.unwrap();
    let states: Vec<Value> = String::from_utf8(followed.stdout)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["state"].clone())
        .collect();
    assert!(followed.status.success() && states.last() == Some(&json!("released")), "{states:?}");

    assert!(!gpuctl.run(&["allocations", "ls"]).await.ok().contains(&id), "what has ended is hidden");
    assert!(gpuctl.run(&["allocations", "ls", "--all"]).await.ok().contains(&id));

    assert_eq!(gpuctl.run(&["logout"]).await.ok().trim(), "Logged out.");
    assert!(!stored.exists());
    gpuctl.run(&["allocations", "list"]).await.failed(3);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn allocations_and_nodes_are_named_labelled_and_found_by_command_line() {
    let mut cluster = TestCluster::start().await;
    // One for each of the two allocations.
    let node = cluster.node("h100").await;
    cluster.node("h100").await;
    let user = cluster.logged_in("user").await;
    let other = rent_active_allocation(&user).await;
    let named = ["--name", "train 7", "--label", "env=dev", "--label", "example.com/team=ml"];
    let wanted = ["-o", "json", "-q", "allocations", "create", "--sku", "h100", "--region", REGION];
    let made = user.run(&[&wanted[..], &named].concat()).await.json();
    let id = made["id"].as_str().unwrap().to_owned();
    assert_eq!(
        (&made["name"], &made["labels"]["env"], &made["state"]),
        (&json!("train 7"), &json!("dev"), &json!("active"))
    );
    let found = async |selector: &[&str]| {
        let list = ["-o", "json", "allocations", "list"];
        gpuctl_items(&user.run(&[&list, selector].concat()).await.json())
    };
    assert_eq!(found(&["-l", "env=dev", "--label", "example.com/team"]).await, [id.as_str()]);
    assert_eq!(found(&["--name", "train 7", "--all"]).await, [id.as_str()]);
    assert_eq!(found(&["--label", "env=prod"]).await, Vec::<String>::new());
    assert!(user.run(&["allocations", "ls", "-l", "a=b=c"]).await.failed(2).contains("label"));
    let table = user.run(&["allocations", "ls"]).await.ok();
    assert!(table.lines().next().unwrap().contains("NAME") && table.contains("train 7"), "{table}");

    let change = ["allocations", "set", "train 7", "--name", "serve", "--label", "env=prod"];
    let shown = user.run(&[&change[..], &["--remove-label", "example.com/team"]].concat()).await.ok();
    assert!(shown.contains("serve") && shown.contains("env=prod") && !shown.contains("team"), "{shown}");
    assert_eq!(found(&["-l", "env=prod"]).await, [id.as_str()]);
    user.run(&["allocations", "set", &other, "--name", "serve"]).await.ok();
    assert!(user.run(&["allocations", "show", "serve"]).await.failed(2).contains("fits 2 allocations"));
    user.run(&["allocations", "set", &other, "--no-name"]).await.ok();

    let admin = cluster.logged_in("admin").await;
    let node_id = node.id.to_string();
    admin.run(&["nodes", "set", &node_id, "--name", "rack 7", "--label", "row=b"]).await.ok();
    let nodes = admin.run(&["-o", "json", "nodes", "list", "-l", "row", "--name", "rack 7"]).await.json();
    assert_eq!(gpuctl_items(&nodes), [node_id.as_str()]);
    assert!(admin.run(&["nodes", "show", "rack 7"]).await.ok().contains("row=b"));
    assert!(admin.run(&["allocations", "ls", "--name", "serve"]).await.ok().contains(&id));
    for allocation in [&id, &other] {
        user.run(&["allocations", "release", allocation]).await.ok();
    }
    assert_eq!(user.run(&["-o", "json", "allocations", "show", &id]).await.json()["name"], "serve");
    user.run(&["allocations", "set", &id, "--name", "late"]).await.failed(6);
    node.expect_state("active").await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn user_manages_the_billing_account_by_command_line() {
    let mut cluster = TestCluster::start().await;
    cluster.node("h100").await;
    let gpuctl = cluster.logged_in("user").await;
    let balance = gpuctl.run(&["-o", "json", "billing", "balance"]).await.json();
    let (minor, currency) = (balance["balance_minor"].as_i64().unwrap(), balance["currency"].as_str().unwrap());
    let amount = format!("{}.{:02} {currency}", minor / 100, minor % 100);
    let shown = gpuctl.run(&["billing", "balance"]).await.ok();
    assert!(shown.contains(&amount) && shown.contains("open"), "{shown}");
    let ledger = gpuctl.run(&["billing", "ledger", "--kind", "credit", "--limit", "1"]).await.ok();
    assert!(ledger.starts_with("NUMBER") && ledger.contains("credit") && ledger.contains(currency), "{ledger}");
    let estimate = ["-o", "json", "billing", "estimate", "--sku", "h100", "--gpus", "2", "--for", "3h"];
    let estimate = gpuctl.run(&estimate).await.json();
    let hourly = estimate["minor_per_hour"].as_i64().unwrap();
    assert_eq!(
        (&estimate["cost_micro"], &estimate["is_covered"]),
        (&json!(3_000_000 * hourly), &json!(true)),
        "{estimate}"
    );

    let never = gpuctl.run(&["billing", "estimate", "--sku", "h100", "--gpus", "9"]).await.failed(6);
    assert!(never.contains("no node can ever hold 9 GPUs") && never.contains("--gpus 8"), "{never}");
    let covered = ["billing", "estimate", "--sku", "h100", "--for", "1h"];
    assert!(gpuctl.run(&covered).await.ok().contains("covered to the end"));

    let months = gpuctl.run(&["-o", "json", "billing", "statements"]).await.json();
    let month = months["items"][0]["month"].as_str().unwrap();
    assert_eq!(months["items"][0]["closing_minor"], balance["balance_minor"], "{months}");
    let statement = gpuctl.run(&["billing", "statement", month]).await.ok();
    assert!(statement.contains("CHANGE") && statement.contains(&amount), "{statement}");
    let file = gpuctl.home().join("it.pdf");
    let to_file = ["billing", "statement", month, "--as", "pdf", "--to", file.to_str().unwrap()];
    assert!(gpuctl.run(&to_file).await.ok().contains("bytes"));
    assert!(std::fs::read(&file).unwrap().starts_with(b"%PDF-"));
    assert!(gpuctl.run(&to_file).await.failed(2).contains("it.pdf"), "what is there stays");
    let csv = gpuctl.run(&["billing", "statement", month, "--as", "csv", "--to", "-"]).await.ok();
    assert!(csv.starts_with("\u{feff}line,number,at,") && csv.lines().last().unwrap().starts_with("closing,"), "{csv}");
    gpuctl.run(&["billing", "statement", "1999-12", "--as", "csv"]).await.failed(2);
    gpuctl.run(&["billing", "accounts"]).await.failed(4);

    let account = balance["id"].as_str().unwrap();
    let admin = cluster.logged_in("admin").await;
    let accounts = admin.run(&["billing", "accounts", "--limit", "1000"]).await.ok();
    assert!(accounts.contains(account), "{accounts}");
    let theirs = admin.run(&["billing", "ledger", "--account", account, "--limit", "1"]).await.ok();
    assert!(theirs.contains(currency), "{theirs}");
    assert!(admin.run(&["billing", "balance", "--account", account]).await.ok().contains("opened"));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_show_the_message_of_the_server_and_a_distinct_exit_code() {
    let mut cluster = TestCluster::start().await;
    cluster.node("h100").await;
    let gpuctl = cluster.logged_in("user").await;
    let nobody = Uuid::now_v7().to_string();

    assert!(gpuctl.run(&["allocations", "show", "not-an-id"]).await.failed(5).contains("gpuctl allocations list"));
    let usage = gpuctl.run(&["allocations", "create"]).await.failed(2);
    assert!(
        usage.contains("--sku") && !usage.contains("--server"),
        "what the environment sets is in no usage line: {usage}"
    );
    assert!(gpuctl.run(&[]).await.failed(2).contains("allocations"), "the help of a bare call");
    gpuctl.run(&["allocations", "list", "--state", "nonsense"]).await.failed(2);
    let forbidden = gpuctl.run(&["nodes", "list"]).await.failed(4);
    assert!(forbidden.contains("forbidden (403)") && forbidden.contains("correlation id: "), "{forbidden}");
    let unknown = gpuctl.run(&["-o", "json", "allocations", "show", &nobody]).await.failed(5);
    let unknown: Value = serde_json::from_str(&unknown).unwrap();
    assert_eq!(
        (&unknown["error"]["code"], &unknown["error"]["exit_code"]),
        (&json!("not_found"), &json!(5)),
        "{unknown}"
    );
    assert_eq!(
        unknown["error"]["next"], "Look its id up: `gpuctl allocations list` shows what there is for you.",
        "{unknown}"
    );
    let usage = gpuctl.run(&["-o", "json", "nodes", "drain", "gpu-1"]).await.failed(2);
    let usage: Value = serde_json::from_str(&usage).unwrap();
    assert!(usage["error"]["next"].as_str().unwrap().contains("gpuctl nodes retire NODE --drain"), "{usage}");
    let state = gpuctl.run(&["allocations", "list", "--state", "nonsense"]).await.failed(2);
    assert!(state.contains("`--state` must be one of") && !state.contains("variant"), "{state}");
    let full = gpuctl.run(&["allocations", "create", "--sku", "h100", "--gpus", "8", "--no-wait"]).await;
    full.ok();
    let refused = gpuctl.run(&["allocations", "create", "--sku", "h100", "--gpus", "8"]).await.failed(6);
    assert!(refused.contains("insufficient_capacity (409)") && refused.contains("--queue"), "{refused}");
    // The same key, another request.
    let once = [
        "--idempotency-key",
        "mine",
        "allocations",
        "create",
        "--sku",
        "h100",
        "--queue",
        "600s",
        "--no-wait",
        "--gpus",
    ];
    let first = gpuctl.run(&[&["-o", "json"][..], &once, &["1"]].concat()).await.json();
    let repeated = gpuctl.run(&[&["-o", "json"][..], &once, &["1"]].concat()).await.json();
    assert_eq!(first["id"], repeated["id"]);
    let reused = gpuctl.run(&[&once[..], &["2"]].concat()).await.failed(6);
    assert!(reused.contains("idempotency_key_reused"), "{reused}");
    let waiting = first["id"].as_str().unwrap();
    let early = gpuctl.run(&["ssh", waiting, "--", "true"]).await.failed(6);
    assert!(early.contains("only an active one"), "{early}");
    let no_terminal = gpuctl.run(&["terminal", waiting]).await.failed(2);
    assert!(no_terminal.contains("gpuctl ssh"), "{no_terminal}");
    let late =
        gpuctl.run(&["allocations", "create", "--sku", "h100", "--gpus", "8", "--queue", "600s", "--timeout", "1s"]);
    let late = late.await.failed(10);
    assert!(late.contains("--follow"), "{late}");

    // In a terminal progress is one line; Ctrl-C stops the waiting, not the request.
    let line = ["allocations", "create", "--sku", "h100", "--gpus", "8", "--queue", "600s"];
    let mut screen = gpuctl.run_in_pty(&line, 120, 30);
    screen.expect_output(": requested, ").await;
    screen.enter("\u{3}").await;
    assert_eq!(screen.wait_for_exit().await.code(), Some(130), "{}", screen.text());
    assert!(screen.text().contains("goes on without being watched"), "{}", screen.text());

    // A token is sent to its own server alone, and one that is not reachable is an error.
    let elsewhere = gpuctl.run(&["--server", "https://127.0.0.1:9", "skus", "list"]).await.failed(3);
    assert!(elsewhere.contains("not at https://127.0.0.1:9"), "{elsewhere}");
    let away = cluster.gpuctl_at("https://127.0.0.1:9").with("SVC_ACCESS_TOKEN", "a-token");
    assert!(away.run(&["skus", "list"]).await.failed(9).contains("cannot be reached"));
    // A server that the configured authority did not sign.
    let other = gpuctl.home().join("other.pem");
    std::fs::copy(authority_of_another(gpuctl.home()), &other).unwrap();
    let distrusted = gpuctl.run(&["--ca-bundle", other.to_str().unwrap(), "skus", "list"]).await.failed(9);
    assert!(distrusted.contains("certificate") && distrusted.contains("--ca-bundle"), "{distrusted}");
    // An expired login without a refresh token; a wrong password; an invalid token.
    let stored = gpuctl.folder().join("default.json");
    let mut login: Value = serde_json::from_slice(&std::fs::read(&stored).unwrap()).unwrap();
    login["expires_at"] = json!("2026-01-01T00:00:00Z");
    std::fs::write(&stored, login.to_string()).unwrap();
    assert!(gpuctl.run(&["skus", "list"]).await.failed(3).contains("gpuctl login"));
    let wrong = gpuctl.run_with(&["login", "--username", "user", "--password-stdin"], "wrong\n").await.failed(3);
    assert!(wrong.contains("Invalid user credentials"), "{wrong}");
    let forged = cluster.gpuctl().with("SVC_ACCESS_TOKEN", "no-token");
    assert!(forged.run(&["skus", "list"]).await.failed(3).contains("unauthenticated (401)"));

    for allocation in gpuctl_items(&cluster.user.get("/api/v1/allocations").await.ok()) {
        let path = format!("/api/v1/allocations/{allocation}/release");
        cluster.user.post(&path, &json!({})).await.accepted();
    }
    cluster.shutdown().await;
}

fn gpuctl_items(list: &Value) -> Vec<String> {
    list["items"].as_array().unwrap().iter().map(|item| item["id"].as_str().unwrap().to_owned()).collect()
}

fn authority_of_another(folder: &std::path::Path) -> std::path::PathBuf {
    let authority = local_servers::pki::Authority::create(&folder.join("pki")).expect("an authority can be made");
    authority.certificate_path().to_owned()
}

/// Takes back a value that lies ahead, and not the one in force.
async fn take_back_a_scheduled_value(gpuctl: &Gpuctl) {
    const KEY: &str = "terminal.token_ttl_seconds";
    let reason = ["--plan", "scheduled", "--reason", "a test wants it"];
    let later = (chrono::Utc::now() + chrono::TimeDelta::days(30)).to_rfc3339();
    let ahead = ["--effective-at", later.as_str()];
    gpuctl.run(&[&["policy", "set", KEY, "90"][..], &reason].concat()).await.ok();
    gpuctl.run(&[&["policy", "set", KEY, "100"][..], &reason, &ahead].concat()).await.ok();
    let listed = async || {
        let list = ["-o", "json", "policy", "list", "--key", KEY, "--plan", "scheduled"];
        let page = gpuctl.run(&list).await.json();
        let values = page["items"].as_array().expect("a list").iter().filter_map(|it| it["value"].as_i64());
        values.collect::<std::collections::BTreeSet<_>>()
    };
    assert_eq!(listed().await, [90, 100].into());
    let other = [&["policy", "unset", KEY][..], &reason, &ahead, &["--old-value", "90"]].concat();
    gpuctl.run(&other).await.failed(6);
    gpuctl.run(&[&["policy", "unset", KEY][..], &reason, &ahead, &["--old-value", "100"]].concat()).await.ok();
    assert_eq!(listed().await, [90].into());
    gpuctl.run(&[&["policy", "unset", KEY][..], &reason].concat()).await.ok();
}

#[tokio::test(flavor = "multi_thread")]
async fn administrators_inspect_and_control_the_service_by_command_line() {
    let mut cluster = TestCluster::start().await;
    let node = cluster.node("h100").await;
    let gpuctl = cluster.logged_in("admin").await;
    let id = node.id.to_string();
    let listed = gpuctl.run(&["nodes", "list", "--state", "active"]).await.ok();
    assert!(listed.contains(&id) && listed.contains(&node.name), "{listed}");
    let set = ["policy", "set", "terminal.token_ttl_seconds", "120", "--plan", "trial", "--reason", "a test wants it"];
    assert!(gpuctl.run(&set).await.ok().contains("120"));
    let holds = ["-o", "json", "policy", "resolve", "terminal.token_ttl_seconds", "--plan", "trial"];
    let until = Instant::now() + WAIT_TIMEOUT;
    let mut held = gpuctl.run(&holds).await.json();
    while held["value"] != 120 && Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(100)).await;
        held = gpuctl.run(&holds).await.json();
    }
    assert_eq!((&held["value"], &held["source"]), (&json!(120), &json!("plan")), "{held}");
    let bad = gpuctl.run(&["policy", "set", "billing.window_seconds", "0", "--reason", "too small"]).await.failed(2);
    assert!(bad.contains("policy_out_of_bounds"), "{bad}");
    let taken = ["policy", "unset", "terminal.token_ttl_seconds", "--plan", "trial", "--reason", "a test wants it"];
    gpuctl.run(&taken).await.ok();
    take_back_a_scheduled_value(&gpuctl).await;
    assert!(gpuctl.run(&["policy", "catalog"]).await.ok().contains("billing.window_seconds"));

    let away = ["-o", "json", "nodes", "quarantine", &id, "--reason", "a look"];
    assert_eq!(gpuctl.run(&away).await.json()["state"], "quarantined");
    let back = ["-o", "json", "nodes", "release-quarantine", &id, "--reason", "looked at"];
    gpuctl.run(&back).await.ok();
    let rows = gpuctl.run(&["audit", "list", "--target", &id, "--action", "nodes.quarantine"]).await.ok();
    assert!(rows.contains("nodes.quarantine") && rows.contains("a look"), "{rows}");
    let tree = gpuctl.run(&["tree"]).await.ok();
    assert!(tree.contains("replica-1") && tree.contains("node: "), "{tree}");
    // Nothing is restarted without a confirmation; the node is named by its host, the worker by its member.
    let entity = format!("node/{id}");
    assert!(gpuctl.run(&["restart", &entity]).await.failed(2).contains("--yes"));
    gpuctl.run(&["restart", &entity, "--reason", "a test wants it", "--yes"]).await.ok();
    let worker = ["restart", "metrics", "--member", "replica-1", "--reason", "a test wants it", "--yes"];
    assert!(gpuctl.run(&worker).await.ok().contains("is restarted"));
    assert!(gpuctl.run(&["entity", &entity]).await.ok().contains("active"));
    assert!(gpuctl.run(&["cluster"]).await.ok().contains("replica-1"));
    assert!(gpuctl.run(&["overview"]).await.ok().contains("h100"));
    let bind = ["roles", "bind", "user-7", "auditor", "--reason", "a test wants it"];
    gpuctl.run(&bind).await.ok();
    assert!(gpuctl.run(&["roles", "list"]).await.ok().contains("user-7"));
    let away = gpuctl.run(&["nodes", "remove", &id, "--reason", "a test wants it", "--yes"]).await;
    assert_ne!(away.code, 0, "an active node is not removed");

    // A service account of the administrator logs in with its own key, and reads the tree.
    let account = gpuctl.run(&["-o", "json", "service-accounts", "create", "ci", "--role", "admin"]).await.json();
    let account = account["id"].as_str().unwrap();
    let key = gpuctl.run(&["-o", "json", "service-accounts", "add-key", account]).await.json();
    let secret = key["client_secret"].as_str().unwrap();
    cluster.register_secret("the secret of a service account", secret);
    let program = cluster.gpuctl();
    let client = key["client_id"].as_str().unwrap();
    let typed = format!("{secret}\n");
    program.run_with(&["login", "--service-account", client, "--secret-stdin"], &typed).await.ok();
    assert!(program.run(&["tree"]).await.ok().contains("replica-1"));
    gpuctl.run(&["service-accounts", "delete", "ci", "--yes"]).await.ok();
    program.run(&["tree"]).await.failed(3);
    assert!(gpuctl.run(&["nodes", "tasks", &id]).await.ok().contains("Ended:"));
    assert!(gpuctl.run(&["completions", "bash"]).await.ok().contains("gpuctl"));
    // What the completion script of the shell runs at the TAB key.
    let mut completes = gpuctl.command(&["--", "gpuctl", "nodes", "show", &id[..4]]);
    completes.env("GPUCTL_COMPLETE", "bash").env("_CLAP_COMPLETE_INDEX", "3").env("_CLAP_IFS", "\n");
    let offered = completes.output().await.unwrap();
    assert!(String::from_utf8(offered.stdout).unwrap().contains(&id), "the node's id is offered");
    node.expect_state("active").await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn gpuctl_terminal_takes_input_resizes_and_returns_the_exit_status() {
    let mut cluster = TestCluster::start().await;
    cluster.node("h100").await;
    let gpuctl = cluster.logged_in("user").await;
    let allocation = rent_active_allocation(&gpuctl).await;
    let mut screen = open_terminal(&gpuctl, &allocation, &[]).await;
    assert!(screen.is_raw());
    screen.enter("stty size; tty | grep -c pts\r").await;
    screen.expect_output("30 100").await;
    screen.resize(132, 43);
    // The input may arrive before the size.
    screen.enter("until stty size | grep '43 1''32'; do sleep 0.1; done\r").await;
    screen.expect_output("43 132").await;
    // Control characters go to the shell.
    screen.enter("sleep 1000\r").await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    screen.enter("\u{3}").await;
    screen.enter("echo went-on-$((40 + 2))\r").await;
    screen.expect_output("went-on-42").await;
    // More than all buffers in between take.
    screen.enter("seq 1 200000 | tail -c 900000; echo th''rough\r").await;
    screen.expect_output("through").await;
    assert!(screen.text().contains("199999\r\n200000\r\n"));
    screen.enter("exit 7\r").await;
    assert_eq!(screen.wait_for_exit().await.code(), Some(7), "{}", screen.text());
    assert!(!screen.is_raw());

    // A shell that a signal ends: its exit status is that of shells.
    let mut screen = open_terminal(&gpuctl, &allocation, &[]).await;
    screen.enter("kill -9 $$\r").await;
    assert_eq!(screen.wait_for_exit().await.code(), Some(137));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn detached_shell_keeps_running_and_a_signal_restores_the_terminal_modes() {
    let mut cluster = TestCluster::start().await;
    cluster.node("h100").await;
    let gpuctl = cluster.logged_in("user").await;
    let allocation = rent_active_allocation(&gpuctl).await;
    let mut screen = open_terminal(&gpuctl, &allocation, &[]).await;
    screen.enter("kept=of-before; echo not a ~. here\r").await;
    screen.expect_output("not a ~. here").await;
    screen.enter("~?").await;
    screen.expect_output("leave; the shell runs on").await;
    // Sequences that query the terminal, and that set its modes.
    let asks = r"printf '\033[6n\033]11;?\007\033[?2004hask%s\n' ed";
    screen.enter(&format!("\r{asks}\r")).await;
    screen.expect_output("asked").await;
    assert!(screen.text().contains("\u{1b}[6n") && screen.text().contains("\u{1b}]11;?"), "a live question is asked");
    screen.enter("\r~.").await;
    assert_eq!(screen.wait_for_exit().await.code(), Some(0));
    let text = screen.text();
    let session = text.rsplit("--session ").next().unwrap().trim().to_owned();
    session.parse::<Uuid>().unwrap_or_else(|error| panic!("{error}: {text}"));

    let listed = gpuctl.run(&["-o", "json", "terminal", "sessions", "list", &allocation]).await.json();
    assert_eq!(gpuctl_items(&listed), std::slice::from_ref(&session), "it is found by who rents, too");
    cluster.logged_in("user2").await.run(&["terminal", "sessions", "list", &allocation]).await.failed(5);

    let mut screen = gpuctl.run_in_pty(&["terminal", &allocation, "--session", &session], 80, 24);
    // Earlier output is shown again, without its queries.
    screen.expect_output("not a ~. here").await;
    screen.expect_output("asked").await;
    let repeated = screen.text();
    assert!(
        !repeated.contains("\u{1b}[6n") && !repeated.contains("\u{1b}]11;?") && repeated.contains("\u{1b}[?2004hasked"),
        "{repeated:?}"
    );
    // From then on queries of the program are passed on again.
    tokio::time::sleep(Duration::from_secs(1)).await;
    screen.enter("printf '\\033[5nnow%s\\n' heard\r").await;
    screen.expect_output("\u{1b}[5nnowheard").await;
    screen.enter("echo \"$kept-$((1 + 1))\"\r").await;
    screen.expect_output("of-before-2").await;
    kill(screen.pid(), Signal::SIGTERM).unwrap();
    assert_eq!(screen.wait_for_exit().await.code(), Some(128 + 15));
    assert!(!screen.is_raw(), "the terminal is the user's again");
    assert!(screen.text().contains("\u{1b}[?25h"), "what a program may have left on is off");
    assert!(screen.text().contains(&format!("--session {session}")), "{}", screen.text());

    // Another connection replaces this one; the shell continues.
    let mut screen = gpuctl.run_in_pty(&["terminal", &allocation, "--session", &session], 80, 24);
    screen.expect_output("of-before-2").await;
    let mut other = gpuctl.run_in_pty(&["terminal", &allocation, "--session", &session], 80, 24);
    other.expect_output("of-before-2").await;
    assert_eq!(screen.wait_for_exit().await.code(), Some(6));
    assert!(screen.text().contains("4409") && screen.text().contains(&format!("--session {session}")));
    drop(other);

    // Nor does the session end if the reconnection fails.
    let back = ["terminal", &allocation, "--session", &session, "--reconnect-for", "1s"];
    let mut screen = gpuctl.run_in_pty(&back, 80, 24);
    screen.expect_output("of-before-2").await;
    cluster.kill9_replica(0);
    let code = screen.wait_for_exit().await.code().unwrap();
    assert!(matches!(code, 8 | 9) && screen.text().contains(&format!("--session {session}")), "{}", screen.text());
    cluster.restart_replica(0).await;

    // An allocation that is released while its terminal is open.
    let mut screen = gpuctl.run_in_pty(&["terminal", &allocation, "--session", &session], 80, 24);
    screen.expect_output("of-before-2").await;
    gpuctl.run(&["allocations", "release", &allocation]).await.ok();
    assert_eq!(screen.wait_for_exit().await.code(), Some(6));
    assert!(screen.text().contains("was released"), "{}", screen.text());
    assert!(!screen.is_raw());
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_for_a_terminal_shows_the_reason_and_can_be_cancelled() {
    let mut cluster = TestCluster::start().await;
    let node = cluster.node("h100").await;
    // A server that accepts connections and sends nothing.
    let hangs = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let gpuctl =
        cluster.gpuctl_at(&format!("http://{}", hangs.local_addr().unwrap())).with("SVC_ACCESS_TOKEN", "a-token");
    let mut screen = gpuctl.run_in_pty(&["terminal", &Uuid::now_v7().to_string()], 80, 24);
    screen.expect_output("waiting for the service (Ctrl-C leaves)").await;
    screen.enter("typed too early\u{3}").await;
    assert_eq!(screen.wait_for_exit().await.code(), Some(130), "{}", screen.text());
    assert!(!screen.is_raw() && !screen.text().contains("runs on"), "{}", screen.text());

    // A service that accepts the connection, and has no stream of the node.
    let gpuctl = cluster.logged_in("user").await;
    let allocation = rent_active_allocation(&gpuctl).await;
    let mut attached = open_terminal(&gpuctl, &allocation, &[]).await;
    cluster.kill9_agent(&node);
    let mut screen = gpuctl.run_in_pty(&["terminal", &allocation], 80, 24);
    screen.expect_output("waiting for the node (Ctrl-C leaves)").await;
    screen.enter("\u{3}").await;
    assert_eq!(screen.wait_for_exit().await.code(), Some(130), "{}", screen.text());
    assert!(screen.text().contains("--session "), "{}", screen.text());
    // A terminal that was attached before.
    attached.expect_output("the node is not in contact; waiting for it (~. leaves)").await;
    attached.enter("\r~.").await;
    assert_eq!(attached.wait_for_exit().await.code(), Some(0), "{}", attached.text());
    cluster.restart_agent(&node);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn gpuctl_terminal_session_survives_a_kill_of_its_replica() {
    let mut cluster = TestCluster::builder().replicas(3).start().await;
    cluster.node("h100").await;
    let gpuctl = cluster.logged_in("user").await;
    let allocation = rent_active_allocation(&gpuctl).await;
    let mut screen = open_terminal(&gpuctl, &allocation, &[]).await;
    screen.enter("for i in $(seq 1 300); do echo line-$i; sleep 0.02; done; echo all''done\r").await;
    screen.expect_output("line-20\r").await;
    let serving = serving(&cluster).await;
    cluster.kill9_replica(serving);
    // Input that is typed without a connection, or on the new one, is delivered.
    screen.expect_output("alldone").await;
    let lines: Vec<String> =
        screen.text().lines().filter(|line| line.starts_with("line-")).map(|line| line.trim().to_owned()).collect();
    let expected: Vec<String> = (1..=300).map(|i| format!("line-{i}")).collect();
    assert_eq!(lines, expected);
    screen.enter("exit 3\r").await;
    assert_eq!(screen.wait_for_exit().await.code(), Some(3), "{}", screen.text());
    cluster.restart_replica(serving).await;
    cluster.shutdown().await;
}

/// A player that was paused before the last output of a recording, which comes three seconds after the one before. On a busy machine the
/// key may come later than that, and is pressed in another player; one that does not pause shows the last output each time.
async fn paused_player(gpuctl: &Gpuctl, recording: &str) -> PtySession {
    for _ in 0..5 {
        let mut player = gpuctl.run_in_pty(&["recordings", "play", recording], 100, 30);
        player.expect_output("begun").await;
        player.enter(" ").await;
        player.read_output(Duration::from_secs(4)).await;
        while player.read_output(Duration::from_secs(4)).await {}
        if !player.text().contains("comeagain") {
            return player;
        }
    }
    panic!("the player is never paused")
}

#[tokio::test(flavor = "multi_thread")]
async fn recorded_user_is_notified_and_recordings_are_listed_saved_and_played_back() {
    let mut cluster = TestCluster::start().await;
    cluster.node("h100").await;
    let gpuctl = cluster.logged_in("user").await;
    let allocation = rent_active_allocation(&gpuctl).await;
    let mut screen = gpuctl.run_in_pty(&["terminal", &allocation], 100, 30);
    let notice = "is recorded by the service (policy terminal.recording_enabled, mode best-effort)";
    screen.expect_output(notice).await;
    screen.enter("PS1='ready> '; stty -echo; echo be''gun\r").await;
    screen.expect_output("begun").await;
    let hostile = r"printf '\033]0;owned\007\033]52;c;b3duZWQ=\007\033[6n\033[31mcome%s\033[0m\n' again";
    screen.enter(&format!("sleep 3; {hostile}; exit\r")).await;
    assert!(screen.wait_for_exit().await.success());

    let until = Instant::now() + WAIT_TIMEOUT;
    let recording = loop {
        let listed = gpuctl.run(&["-o", "json", "recordings", "list", &allocation]).await.json();
        match listed["items"].as_array().unwrap().as_slice() {
            [one] if one["complete"] == true => break one["id"].as_str().unwrap().to_owned(),
            _ => assert!(Instant::now() < until, "{listed}"),
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    };
    let shown = gpuctl.run(&["recordings", "show", &recording]).await.ok();
    assert!(shown.contains(&allocation) && shown.contains("complete"), "{shown}");

    let file = gpuctl.home().join("kept.cast");
    let keep = ["recordings", "download", &recording, "--to", file.to_str().unwrap()];
    gpuctl.run(&keep).await.ok();
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    gpuctl.run(&keep).await.failed(2);
    let stored = std::fs::read_to_string(&file).unwrap();
    let streamed = gpuctl.run(&["recordings", "download", &recording, "--to", "-"]).await.ok();
    assert!(stored == streamed && stored.contains("comeagain"), "{streamed}");
    gpuctl.run(&["recordings", "play", &recording]).await.failed(2);

    // Played at four times the speed; the player only draws.
    let began = Instant::now();
    let mut player = gpuctl.run_in_pty(&["recordings", "play", &recording, "--speed", "4"], 80, 24);
    player.expect_output("comeagain").await;
    assert!(player.wait_for_exit().await.success(), "{}", player.text());
    assert!(began.elapsed() > Duration::from_millis(600), "it is played at its own pace");
    let text = player.text();
    assert!(text.contains("\u{1b}[31mcomeagain\u{1b}[0m"), "{text:?}");
    assert!(!text.contains("owned") && !text.contains("b3du") && !text.contains("\u{1b}[6n"), "{text:?}");
    assert!(!player.is_raw());
    // It can be paused and left.
    let mut player = paused_player(&gpuctl, &recording).await;
    player.enter("q").await;
    assert!(player.wait_for_exit().await.success() && !player.is_raw(), "{}", player.text());

    let other = cluster.logged_in("user2").await;
    other.run(&["recordings", "download", &recording]).await.failed(5);
    other.run(&["recordings", "list", "--all"]).await.failed(4);
    let admin = cluster.logged_in("admin").await;
    let all = admin.run(&["-o", "json", "recordings", "list", "--all"]).await.json();
    assert_eq!(all["items"][0]["id"], json!(recording), "{all}");
    cluster.shutdown().await;
}

/// The replica with the user's connection.
pub(crate) async fn serving(cluster: &TestCluster) -> usize {
    let until = Instant::now() + WAIT_TIMEOUT;
    loop {
        for index in 0..cluster.replicas.len() {
            if cluster.metrics_of(index).await.number("terminal_connections") == 1.0 {
                return index;
            }
        }
        assert!(Instant::now() < until, "no replica has a terminal's connection");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
