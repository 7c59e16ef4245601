//! Limits of terminals: they give no access to other users or root, and are bounded in time, number and memory.

use crate::system_executor::{onboarded, rent};
use nix::sys::signal::Signal;
use reqwest::Method;
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};
use tests::cluster::terminal::Terminal;
use tests::cluster::{AllocationHandle, TestCluster, WAIT_TIMEOUT};
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::frame::Frame;
use tokio_tungstenite::tungstenite::protocol::frame::coding::{Data, OpCode};
use uuid::Uuid;

const SHORT: Duration = Duration::from_millis(200);

async fn rent_allocation(cluster: &mut TestCluster) -> (tests::cluster::NodeHandle, AllocationHandle) {
    let node = cluster.node("h100").await;
    let allocation = cluster.rent_active("h100", 1).await;
    (node, allocation)
}

async fn expect_closed(by: &tests::cluster::client::Client, session: Uuid) -> Value {
    let path = format!("/api/v1/admin/terminal-sessions/{session}");
    by.wait_until(&path, "the session is closed", |session| session["state"] == "closed").await
}

/// Runs a command in the terminal and returns its output, between two marks of the test.
async fn run_command(terminal: &mut Terminal, command: &str) -> String {
    let mark = format!("{:x}", rand::random::<u32>());
    let (first, last) = mark.split_at(mark.len() / 2);
    let before = terminal.shown.len();
    terminal.enter(&format!("echo {first}''{last}; {command}; echo {first}''{last}\n")).await;
    let until = Instant::now() + WAIT_TIMEOUT;
    loop {
        let text = String::from_utf8_lossy(&terminal.shown[before..]).into_owned();
        let parts: Vec<&str> = text.split(mark.as_str()).collect();
        if let [_, output, _] = parts.as_slice() {
            return output.replace('\r', "").trim().to_owned();
        }
        assert!(Instant::now() < until && terminal.closed.is_none(), "{command}: {text}");
        terminal.receive(SHORT).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn shell_runs_as_the_tenant_and_ends_with_the_allocation() {
    let mut cluster = TestCluster::start().await;
    let Some((node, mut machine)) = onboarded(&mut cluster).await else { return cluster.shutdown().await };
    let (allocation, active, user) = rent(&cluster, &node, 1).await;
    let (mut terminal, session) = cluster.terminal(allocation.id).await;
    terminal.enter("stty -echo; PS1=; PROMPT_COMMAND=\n").await;
    let uid = machine.run(&format!("id -u {user}")).trim().to_owned();
    assert_eq!(
        run_command(&mut terminal, "id -un; id -u; id -G; pwd; echo $HOME").await,
        format!("{user}\n{uid}\n{uid}\n/home/{user}\n/home/{user}")
    );
    // Neither the real, saved nor effective id is root's, and there are no capabilities.
    let status =
        run_command(&mut terminal, "grep -E '^(Uid|Gid|Groups|CapEff|CapPrm)' /proc/self/status | tr -s '\\t ' ' '")
            .await;
    let expected = format!("Uid: {uid} {uid} {uid} {uid}\nGid: {uid} {uid} {uid} {uid}");
    assert!(status.starts_with(&expected), "{status}");
    assert!(
        status.lines().filter(|line| line.starts_with("Cap")).all(|line| line.ends_with(" 0000000000000000")),
        "{status}"
    );
    assert_eq!(run_command(&mut terminal, "stat -c %U $(tty)").await, user);
    // The allowlist of sudo, and no other command.
    let may = run_command(&mut terminal, "sudo -n -l").await;
    let commands: Vec<&str> = may.lines().filter_map(|line| line.trim().strip_prefix("(root) NOPASSWD: ")).collect();
    assert_eq!(commands, ["/bin/sleep"], "{may}");
    assert_eq!(run_command(&mut terminal, "sudo -n id >/dev/null 2>&1 || echo refused").await, "refused");
    let held = active["devices"][0]["index"].as_u64().unwrap();
    let other = (held + 1) % 4;
    let opens =
        format!("for n in {held} {other}; do cat /dev/nvidia$n >/dev/null 2>&1 && echo opens || echo closed; done");
    assert_eq!(run_command(&mut terminal, &opens).await, "opens\nclosed");
    assert_eq!(run_command(&mut terminal, "env | grep -c -e SVC_ -e ENROLLMENT").await, "0");
    // If the machine has a slice for it, the shell is in it.
    if machine.view().at("/run/systemd/system").is_dir() {
        let cgroup = run_command(&mut terminal, "cat /proc/self/cgroup").await;
        assert!(cgroup.contains(&format!("user-{uid}.slice")), "{cgroup}");
    }
    terminal.enter("setsid sh -c 'trap \"\" HUP TERM; while :; do sleep 1; done' & disown; echo st''arted\n").await;
    terminal.expect_output("started").await;
    allocation.release().await;
    assert_eq!(terminal.close_code().await, 4403);
    allocation.expect_state("released").await;
    let closed = expect_closed(&cluster.admin, session).await;
    assert_eq!(closed["close_reason"], "allocation_ended", "{closed}");
    assert_eq!(machine.run(&format!("ps -o pid= -u {uid} || true")).trim(), "", "its processes are gone");
    assert!(machine.stop_agent().is_some_and(|status| status.success()));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn kill_or_stop_of_an_agent_ends_its_terminals_and_they_cannot_be_resumed() {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    let (node, allocation) = rent_allocation(&mut cluster).await;
    for kill in [true, false] {
        let (mut terminal, session) = cluster.terminal(allocation.id).await;
        terminal.enter("echo re''ady\n").await;
        terminal.expect_output("ready").await;
        let since = if kill {
            cluster.kill9_agent(&node);
            let since = Instant::now();
            cluster.restart_agent(&node);
            since
        } else {
            let since = Instant::now();
            cluster.restart_agent_with_flags(&node, &[]).await;
            since
        };
        assert_eq!(terminal.close_code().await, 1011, "{:?}", terminal.closed);
        eprintln!("closed {:?} after its agent was {}", since.elapsed(), if kill { "restarted" } else { "stopped" });
        let closed = expect_closed(&cluster.admin, session).await;
        assert_eq!(closed["close_reason"], "failed", "{closed}");
        let rows = cluster.audit_of(session).await;
        let (actor, action, metadata, _) = rows.last().unwrap();
        assert_eq!((actor, action.as_str()), (&format!("node:{}", node.id), "terminals.close"));
        assert_eq!(metadata["failure_code"], "agent_restarted", "{metadata}");
        cluster
            .request_terminal_token(&cluster.user, allocation.id, Some(session))
            .await
            .expect_error(409, "state_conflict");
    }
    // Another terminal opens.
    let (mut terminal, _) = cluster.terminal(allocation.id).await;
    terminal.enter("echo ag''ain\n").await;
    terminal.expect_output("again").await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn kill_of_a_replica_detaches_its_terminals_which_make_room() {
    let builder = TestCluster::builder().replicas(3).policy("terminal.sessions_per_allocation", 2);
    let mut cluster = builder.start().await;
    let (_, allocation) = rent_allocation(&mut cluster).await;
    let mut terminals = Vec::new();
    for replica in [0, 0] {
        let ticket = cluster.issue_terminal_token(&cluster.user.clone(), allocation.id, None).await;
        let mut terminal = cluster.gateway_at(replica).open(&ticket.token, None).await;
        terminal.attached().await;
        terminals.push((terminal, ticket.session));
    }
    let (user, admin) = (cluster.at_replica(1, "user"), cluster.at_replica(1, "admin"));
    cluster.request_terminal_token(&user, allocation.id, None).await.expect_error(409, "state_conflict");
    cluster.kill9_replica(0);
    for (_, session) in &terminals {
        let path = format!("/api/v1/admin/terminal-sessions/{session}");
        let detached = admin.wait_until(&path, "detached", |session| session["state"] == "detached").await;
        assert!(detached["detached_at"].is_string(), "{detached}");
    }
    // Each of them goes on where its user comes back, and makes room where another one is opened.
    let ticket = cluster.issue_terminal_token(&user, allocation.id, Some(terminals[1].1)).await;
    let mut back = cluster.gateway_at(1).open(&ticket.token, None).await;
    back.attached().await;
    let ticket = cluster.issue_terminal_token(&user, allocation.id, None).await;
    let mut third = cluster.gateway_at(2).open(&ticket.token, None).await;
    third.attached().await;
    assert_eq!(expect_closed(&admin, terminals[0].1).await["close_reason"], "displaced");
    cluster.restart_replica(0).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_sessions_are_bounded_by_policy_and_administrators_list_and_end_them() {
    let mut cluster = TestCluster::builder().replicas(2).policy("terminal.sessions_per_allocation", 3).start().await;
    let (_, allocation) = rent_allocation(&mut cluster).await;
    let path = format!("/api/v1/allocations/{}/terminal-tokens", allocation.id);
    let asking = (0..50).map(|n| {
        let (client, path) = (cluster.at_replica(n % 2, "user"), path.clone());
        tokio::spawn(async move { client.post(&path, &json!({})).await })
    });
    let answers = futures::future::join_all(asking.collect::<Vec<_>>()).await;
    let mut sessions = Vec::new();
    for answer in answers {
        let answer = answer.unwrap();
        match answer.status.as_u16() {
            201 => {
                cluster.register_secret("a terminal token", answer.body["token"].as_str().unwrap());
                sessions.push(answer.body["session_id"].as_str().unwrap().to_owned());
            }
            _ => {
                answer.expect_error(409, "state_conflict");
                assert_eq!(answer.body["details"]["policy_key"], "terminal.sessions_per_allocation", "{answer}");
            }
        }
    }
    assert!(sessions.len() >= 3, "{sessions:?}");

    let list = "/api/v1/admin/terminal-sessions?state=opened&limit=1";
    cluster.user.send_once(Method::GET, list, None).await.expect_error(403, "forbidden");
    let mut pages = Vec::new();
    let mut next = Some(list.to_owned());
    while let Some(path) = next {
        let page = cluster.admin.get(&path).await.ok();
        pages.extend(page["items"].as_array().unwrap().clone());
        next = page["next_page"].as_str().map(|token| format!("{list}&page_token={token}"));
    }
    // However many tokens were issued, no more than the limit are live: the unused ones made room.
    let listed: Vec<_> = pages.iter().map(|item| item["id"].as_str().unwrap().to_owned()).collect();
    assert!(
        (2..=3).contains(&listed.len()) && listed.iter().all(|id| sessions.contains(id)),
        "{listed:?} {sessions:?}"
    );
    let sessions = listed;
    let kill = format!("/api/v1/admin/terminal-sessions/{}/kill", sessions[0]);
    cluster.admin.post(&kill, &json!({ "reason": "a test wants it" })).await.ok();
    let rows = cluster.audit_of(sessions[0].parse().unwrap()).await;
    let (actor, action, metadata, correlation_id) = rows.last().unwrap();
    assert!(actor.starts_with("user:") && action == "terminals.kill" && !correlation_id.is_empty(), "{rows:?}");
    assert_eq!(metadata["reason"], "a test wants it");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_that_were_never_used_refuse_no_further_one() {
    let builder = TestCluster::builder().policy("terminal.sessions_per_allocation", 10);
    let mut cluster = builder.policy("rate_limit.terminal_token_requests_per_minute", 1000).start().await;
    let (_, allocation) = rent_allocation(&mut cluster).await;
    let user = cluster.user.clone();
    // One is in use: it stays.
    let (mut used, _) = cluster.terminal(allocation.id).await;
    let mut tickets = Vec::new();
    for _ in 0..12 {
        tickets.push(cluster.issue_terminal_token(&user, allocation.id, None).await);
    }
    let latest = tickets.pop().unwrap();
    let mut terminal = cluster.gateway().open(&latest.token, None).await;
    terminal.attached().await;
    used.enter("echo still-$((6 * 7))\n").await;
    used.expect_output("still-42").await;
    // The oldest has made room, and its token opens nothing.
    assert_eq!(expect_closed(&cluster.admin, tickets[0].session).await["close_reason"], "displaced");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn session_over_the_limit_evicts_the_oldest_detached_one_and_its_user_ends_others() {
    let mut cluster = TestCluster::builder().policy("terminal.sessions_per_allocation", 2).start().await;
    let (_, allocation) = rent_allocation(&mut cluster).await;
    let sessions = format!("/api/v1/allocations/{}/terminal-sessions", allocation.id);
    let detached = |id: Uuid| format!("/api/v1/admin/terminal-sessions/{id}");
    let mut closed_tabs = Vec::new();
    for _ in 0..2 {
        let (terminal, session) = cluster.terminal(allocation.id).await;
        drop(terminal);
        cluster.admin.wait_until(&detached(session), "detached", |session| session["state"] == "detached").await;
        closed_tabs.push(session);
    }
    // The limit is reached, and neither tab reconnects.
    let (mut terminal, session) = cluster.terminal(allocation.id).await;
    assert_eq!(expect_closed(&cluster.admin, closed_tabs[0]).await["close_reason"], "displaced");
    terminal.enter("echo still-$((6 * 7))\n").await;
    terminal.expect_output("still-42").await;
    let (second, _) = cluster.terminal(allocation.id).await;
    assert_eq!(expect_closed(&cluster.admin, closed_tabs[1]).await["close_reason"], "displaced");

    // A session with a connection is not evicted.
    let refused = cluster.request_terminal_token(&cluster.user.clone(), allocation.id, None).await;
    refused.expect_error(409, "state_conflict");
    let listed = cluster.user.get(&sessions).await.ok();
    let states: Vec<_> = listed["items"].as_array().unwrap().iter().map(|item| item["state"].clone()).collect();
    assert_eq!(states, ["attached", "attached"], "{listed}");

    // No other user can end it; its user can, and frees the quota at once.
    let path = format!("{sessions}/{session}");
    let other = cluster.other_user.clone();
    other.send_once(Method::DELETE, &path, None).await.expect_error(404, "not_found");
    let ended = cluster.user.send_once(Method::DELETE, &path, None).await.ok();
    assert_eq!((ended["state"].as_str(), ended["close_reason"].as_str()), (Some("closed"), Some("ended_by_user")));
    assert_eq!(terminal.close_code().await, 1000);
    let repeated = cluster.user.send_once(Method::DELETE, &path, None).await.ok();
    assert_eq!(repeated["close_reason"], "ended_by_user");
    let (third, _) = cluster.terminal(allocation.id).await;
    drop((second, third));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn detached_session_ends_with_its_shell_after_the_time_of_the_policy() {
    let mut cluster = TestCluster::builder().policy("terminal.detached_ttl_seconds", 3).start().await;
    let (_, allocation) = rent_allocation(&mut cluster).await;
    let (mut terminal, session) = cluster.terminal(allocation.id).await;
    let pid: i32 = run_command(&mut terminal, "echo $$").await.parse().unwrap();
    assert!(nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), None).is_ok(), "the shell runs on this machine");
    drop(terminal);
    assert_eq!(expect_closed(&cluster.admin, session).await["close_reason"], "detached_expired");
    let until = Instant::now() + WAIT_TIMEOUT;
    while nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), None).is_ok() {
        assert!(Instant::now() < until, "the shell {pid} runs on");
        tokio::time::sleep(SHORT).await;
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn session_ends_at_its_lifetime_while_the_gateway_of_its_user_is_stopped() {
    let mut cluster = TestCluster::builder().replicas(2).policy("terminal.session_max_ttl_seconds", 60).start().await;
    let (node, allocation) = rent_allocation(&mut cluster).await;
    let ticket = cluster.issue_terminal_token(&cluster.user.clone(), allocation.id, None).await;
    let mut terminal = cluster.gateway_at(0).open(&ticket.token, None).await;
    terminal.attached().await;
    terminal.enter("echo $$ > $HOME/shell; echo writ''ten\n").await;
    terminal.expect_output("written").await;
    cluster.signal_replica(0, Signal::SIGSTOP);
    let path = format!("/api/v1/admin/terminal-sessions/{}", ticket.session);
    let elsewhere = cluster.at_replica(1, "admin");
    let over = |session: &Value| session["state"] == "closed";
    // Its lifetime, and the time of a slow machine.
    let limit = Duration::from_secs(60) + WAIT_TIMEOUT;
    let closed = elsewhere.wait_within(limit, &path, "the session is over", over).await;
    assert_eq!(closed["close_reason"], "lifetime", "{closed}");
    let shell = cluster.agent_folder(&node).join(format!("state/allocations/{}/home/shell", allocation.id));
    let shell = std::fs::read_to_string(shell).unwrap();
    let until = Instant::now() + WAIT_TIMEOUT;
    while Path::new("/proc").join(shell.trim()).exists() {
        assert!(Instant::now() < until, "the shell {shell} lives on");
        tokio::time::sleep(SHORT).await;
    }
    cluster.signal_replica(0, Signal::SIGCONT);
    assert_eq!(terminal.close_code().await, 4408);
    cluster.wait_for_balanced_shards().await;
    cluster.shutdown().await;
}

/// Resident memory, in KiB.
fn memory_of(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn endless_output_to_a_stalled_reader_fills_neither_gateway_nor_agent() {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    let (node, allocation) = rent_allocation(&mut cluster).await;
    let mut terminals = Vec::new();
    for relayed in [false, true] {
        let (mut terminal, _) = cluster.terminal_joined(allocation.id, relayed).await;
        terminal.enter("yes\n").await;
        terminal.expect_output("y\r\ny\r\n").await;
        terminals.push(terminal);
    }
    // From here on nothing is read from the sockets.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let pids = [cluster.replicas[0].pid().unwrap(), cluster.replicas[1].pid().unwrap(), cluster.agent_pid(&node)];
    let before = pids.map(memory_of);
    tokio::time::sleep(Duration::from_secs(6)).await;
    let after = pids.map(memory_of);
    eprintln!("KiB of both replicas and the agent: {before:?}, then {after:?}");
    for (before, after) in before.into_iter().zip(after) {
        // `yes` to a fast reader produces this in a tenth of a second.
        assert!(after < before + 8 * 1024, "{before} KiB became {after} KiB");
    }
    drop(terminals);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn frames_of_a_gigabyte_and_endless_fragments_are_refused_at_their_start() {
    let mut cluster = TestCluster::start().await;
    let (_, allocation) = rent_allocation(&mut cluster).await;
    let replica = cluster.replicas[0].pid().unwrap();
    let (mut terminal, _) = cluster.terminal(allocation.id).await;
    let before = memory_of(replica);
    // A masked binary frame with a length of 1 GiB (RFC 6455, section 5.2).
    let mut huge = vec![0x82, 0xff];
    huge.extend_from_slice(&(1_u64 << 30).to_be_bytes());
    huge.extend_from_slice(&[1, 2, 3, 4]);
    terminal.send_raw(&huge).await;
    assert_eq!(terminal.close_code().await, 1009, "its length is enough");

    let (mut terminal, _) = cluster.terminal(allocation.id).await;
    let mut sent = 0;
    for n in 0..10_000 {
        let opcode = OpCode::Data(if n == 0 { Data::Binary } else { Data::Continue });
        let fragment = Frame::message(vec![b'x'; 4096], opcode, false);
        if terminal.send(Message::Frame(fragment)).await.is_err() {
            break;
        }
        sent += 4096;
    }
    assert!([1009, 1006].contains(&terminal.close_code().await), "{:?}", terminal.closed);
    let after = memory_of(replica);
    eprintln!("{sent} bytes of fragments were sent; the gateway has {before} KiB, then {after} KiB");
    assert!(after < before + 16 * 1024, "{before} KiB became {after} KiB");

    let (mut terminal, _) = cluster.terminal(allocation.id).await;
    let rubbish: String = (0_u8..128).map(char::from).collect();
    terminal.send(Message::Text(rubbish.into())).await.unwrap();
    assert_eq!(terminal.close_code().await, 1008);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn token_of_one_session_opens_no_other_session() {
    let mut cluster = TestCluster::start().await;
    let (_, allocation) = rent_allocation(&mut cluster).await;
    cluster.node("h100").await;
    let foreign =
        cluster.other_user.post("/api/v1/allocations", &json!({ "sku": "h100", "gpu_count": 1 })).await.created();
    let foreign = AllocationHandle::new(tests::cluster::id_of(&foreign), cluster.other_user.clone());
    foreign.expect_state("active").await;
    let mine = cluster.issue_terminal_token(&cluster.user.clone(), allocation.id, None).await;
    let theirs = cluster.issue_terminal_token(&cluster.other_user.clone(), foreign.id, None).await;
    let secret = mine.token.rsplit_once('.').unwrap().0;
    let crossed = format!("{secret}.{}", theirs.session.simple());
    assert_eq!(cluster.gateway().open(&crossed, None).await.close_code().await, 4401);
    // A session of another allocation cannot be resumed here.
    cluster
        .request_terminal_token(&cluster.user, allocation.id, Some(theirs.session))
        .await
        .expect_error(404, "not_found");
    // Neither token was consumed by it.
    for ticket in [mine, theirs] {
        cluster.gateway().open(&ticket.token, None).await.attached().await;
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn broken_event_stream_resumes_after_the_last_received_event() {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    let (_, allocation) = rent_allocation(&mut cluster).await;
    let path = format!("{}/events", allocation.path());
    let received_events = async |by: &tests::cluster::client::Client, after: Option<&str>, until: &str| {
        let mut request = by.request(Method::GET, &path);
        if let Some(after) = after {
            request = request.header("Last-Event-ID", after);
        }
        let mut answer = request.send().await.unwrap();
        assert_eq!(answer.status().as_u16(), 200);
        let mut text = String::new();
        // The connection is closed in the middle of the stream.
        while !text.contains(&format!("\"state\":\"{until}\"")) {
            let chunk = tokio::time::timeout(WAIT_TIMEOUT, answer.chunk()).await.expect("an event arrives").unwrap();
            text.push_str(std::str::from_utf8(&chunk.expect("it goes on")).unwrap());
        }
        let field = |name: &str| -> Vec<String> {
            text.lines().filter_map(|line| line.strip_prefix(name)).map(|value| value.trim().to_owned()).collect()
        };
        let states: Vec<String> = field("data:")
            .iter()
            .map(|data| serde_json::from_str::<Value>(data).unwrap()["state"].as_str().unwrap().to_owned())
            .collect();
        (field("id:"), states)
    };
    let (ids, states) = received_events(&cluster.at_replica(0, "user"), None, "active").await;
    assert_eq!(states, ["requested", "provisioning", "active"]);
    // Its replica is killed, events happen meanwhile, and another replica resumes the stream.
    cluster.kill9_replica(0);
    let elsewhere = cluster.at_replica(1, "user");
    allocation.seen_by(&elsewhere).release().await;
    let (more, rest) = received_events(&elsewhere, ids.last().map(String::as_str), "released").await;
    assert_eq!(rest, ["releasing", "released"]);
    let number = |id: &String| id.parse::<i64>().unwrap();
    assert!(number(&more[0]) > number(ids.last().unwrap()), "{ids:?} and {more:?}");
    cluster.restart_replica(0).await;
    cluster.shutdown().await;
}
