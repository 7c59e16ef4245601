//! Terminals as users see them: a shell of an allocation, through a gateway and the agent's stream, with real processes.

use nix::sys::signal::Signal;
use reqwest::Method;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tests::cluster::terminal::{Terminal, TerminalRequest};
use tests::cluster::{AllocationHandle, TestCluster, WAIT_TIMEOUT};
use tokio_tungstenite::tungstenite::Message;
use uuid::Uuid;

const SHORT: Duration = Duration::from_millis(200);

/// A cluster in which `user` has an active allocation.
async fn start_with_allocation(replicas: usize) -> (TestCluster, AllocationHandle) {
    let mut cluster = TestCluster::builder().replicas(replicas).policy(RATE, 1000).start().await;
    cluster.node("h100").await;
    let allocation = cluster.rent_active("h100", 1).await;
    (cluster, allocation)
}

const RATE: &str = "rate_limit.terminal_token_requests_per_minute";

async fn session_of(cluster: &TestCluster, session: Uuid) -> Value {
    cluster.admin.get(&format!("/api/v1/admin/terminal-sessions/{session}")).await.ok()
}

async fn expect_session(cluster: &TestCluster, session: Uuid, state: &str) -> Value {
    let path = format!("/api/v1/admin/terminal-sessions/{session}");
    cluster.admin.wait_until(&path, state, |session| session["state"] == state).await
}

async fn wait_for_prompt(terminal: &mut Terminal) {
    terminal.enter("PS1='ready> '; stty -echo; echo be''gun\n").await;
    terminal.expect_output("begun").await;
}

/// A token by which the second replica continues the session.
async fn token_elsewhere(cluster: &TestCluster, allocation: Uuid, session: Uuid) -> String {
    let elsewhere = cluster.at_replica(1, "user");
    let until = Instant::now() + WAIT_TIMEOUT;
    loop {
        let answer = cluster.request_terminal_token(&elsewhere, allocation, Some(session)).await;
        if answer.status.as_u16() == 201 {
            return answer.body["token"].as_str().unwrap().to_owned();
        }
        assert!(Instant::now() < until, "{answer}");
        tokio::time::sleep(SHORT).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn terminal_takes_input_resizes_and_reports_its_exit() {
    let (mut cluster, allocation) = start_with_allocation(1).await;
    let (mut terminal, session) = cluster.terminal(allocation.id).await;
    terminal.enter("echo it is $((6 * 7))\n").await;
    terminal.expect_output("it is 42").await;
    terminal.control(&json!({ "type": "resize", "columns": 132, "rows": 43 })).await;
    terminal.enter("stty size\n").await;
    terminal.expect_output("43 132").await;
    terminal.control(&json!({ "type": "ping" })).await;
    terminal.expect_control("pong").await;
    // The tenant's own environment, and nothing of the agent's.
    terminal.enter("echo \"secrets=$(env | grep -c -e SVC_ -e ENROLLMENT) of $GPUAAS_ALLOCATION_ID\"\n").await;
    terminal.expect_output(&format!("secrets=0 of {}", allocation.id)).await;
    assert_eq!(session_of(&cluster, session).await["state"], "attached");
    terminal.enter("exit 7\n").await;
    assert_eq!(terminal.expect_control("exit").await["code"], 7);
    assert_eq!(terminal.close_code().await, 1000);
    let closed = expect_session(&cluster, session, "closed").await;
    assert_eq!(
        (closed["close_reason"].as_str(), closed["exit"]["code"].as_i64()),
        (Some("exited"), Some(7)),
        "{closed}"
    );
    let actions: Vec<String> = cluster.audit_of(session).await.into_iter().map(|(_, action, ..)| action).collect();
    assert_eq!(actions, ["terminals.open", "terminals.attach", "terminals.close"]);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn user_and_node_at_different_replicas_are_connected_over_nats() {
    let (mut cluster, allocation) = start_with_allocation(2).await;
    // The agent's stream ends at one of the two replicas; one of these users is at the other.
    for replica in 0..2 {
        let ticket = cluster.issue_terminal_token(&cluster.user.clone(), allocation.id, None).await;
        let mut terminal = cluster.gateway_at(replica).open(&ticket.token, None).await;
        terminal.attached().await;
        for other in 0..4 {
            terminal.enter(&format!("echo round{other}-$((40 + {other}))\n")).await;
            terminal.expect_output(&format!("round{other}-{}", 40 + other)).await;
        }
        terminal.enter("exit\n").await;
        assert_eq!(terminal.close_code().await, 1000);
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn session_survives_a_kill_of_its_replica_without_loss() {
    let (mut cluster, allocation) = start_with_allocation(3).await;
    let ticket = cluster.issue_terminal_token(&cluster.user.clone(), allocation.id, None).await;
    let mut terminal = cluster.gateway_at(0).open(&ticket.token, None).await;
    terminal.attached().await;
    wait_for_prompt(&mut terminal).await;
    terminal.enter("for i in $(seq 1 400); do echo line-$i; sleep 0.01; done; echo all''done\n").await;
    terminal.expect_output("line-20\r").await;
    cluster.kill9_replica(0);
    while terminal.closed.is_none() {
        terminal.receive(SHORT).await;
    }
    let (position, mut shown) = (terminal.position, terminal.shown.clone());
    let repeated = token_elsewhere(&cluster, allocation.id, ticket.session).await;
    let mut terminal = cluster.gateway_at(1).open(&repeated, Some(position)).await;
    let attached = terminal.attached().await;
    assert_eq!(
        (attached["position"].as_u64(), attached["lost_bytes"].as_u64()),
        (Some(position), Some(0)),
        "{attached}"
    );
    terminal.expect_output("alldone").await;
    shown.extend(&terminal.shown);
    let lines: Vec<String> =
        String::from_utf8_lossy(&shown).lines().filter(|line| line.starts_with("line-")).map(str::to_owned).collect();
    let expected: Vec<String> = (1..=400).map(|i| format!("line-{i}")).collect();
    assert_eq!(lines, expected);
    cluster.restart_replica(0).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn session_survives_a_kill_of_the_replica_with_the_stream_of_the_node() {
    let (mut cluster, allocation) = start_with_allocation(2).await;
    let (mut terminal, streams_at) = cluster.terminal_joined(allocation.id, true).await;
    wait_for_prompt(&mut terminal).await;
    cluster.kill9_replica(streams_at);
    let until = Instant::now() + WAIT_TIMEOUT;
    let mut n = 0;
    while !terminal.text().contains("still-here") {
        assert!(Instant::now() < until && terminal.closed.is_none(), "{:?}: {}", terminal.closed, terminal.text());
        n += 1;
        terminal.enter(&format!("echo still''-here {n}\n")).await;
        terminal.receive(Duration::from_millis(500)).await;
    }
    cluster.restart_replica(streams_at).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn last_output_is_buffered_for_a_user_whose_connection_was_lost() {
    let (mut cluster, allocation) = start_with_allocation(2).await;
    for relayed in [false, true] {
        let (mut terminal, _) = cluster.terminal_joined(allocation.id, relayed).await;
        wait_for_prompt(&mut terminal).await;
        let session = terminal.session();
        let position = terminal.position;
        // From here on nothing is read from the socket, and it stays open, as when the network is gone.
        terminal.enter("sleep 0.5; seq 1 3000; echo ma''de; exit 5\n").await;
        tokio::time::sleep(Duration::from_secs(3)).await;
        let ticket = cluster.issue_terminal_token(&cluster.user.clone(), allocation.id, Some(session)).await;
        let mut repeated = cluster.gateway().open(&ticket.token, Some(position)).await;
        assert_eq!(repeated.expect_control("exit").await["code"], 5);
        assert_eq!(repeated.close_code().await, 1000);
        let lines: Vec<u32> = repeated.text().lines().filter_map(|line| line.parse().ok()).collect();
        assert_eq!(lines, (1..=3000).collect::<Vec<_>>());
        assert!(repeated.text().contains("made"));
        drop(terminal);
    }
    cluster.shutdown().await;
}

/// The number of bytes that a slow reader reads between two pauses.
const SLOWLY: u64 = 4096;

#[tokio::test(flavor = "multi_thread")]
async fn slow_reader_receives_all_output_of_an_exited_program() {
    let (mut cluster, allocation) = start_with_allocation(1).await;
    for acknowledges in [false, true] {
        let ticket = cluster.issue_terminal_token(&cluster.user.clone(), allocation.id, None).await;
        let mut terminal = cluster.gateway_at(0).receiving(4096).open(&ticket.token, None).await;
        terminal.attached().await;
        wait_for_prompt(&mut terminal).await;
        terminal.enter("seq 1 30000; exit 6\n").await;
        let mut paused_at = terminal.position;
        let until = Instant::now() + 2 * WAIT_TIMEOUT;
        while terminal.closed.is_none() {
            assert!(Instant::now() < until, "it never ends");
            terminal.receive(WAIT_TIMEOUT).await;
            // Counted in bytes: the number of messages depends on the machine's load.
            if terminal.position >= paused_at + SLOWLY {
                paused_at = terminal.position;
                tokio::time::sleep(2 * SHORT).await;
            }
            if acknowledges && terminal.closed.is_none() {
                let _ = terminal.send(ack(terminal.position)).await;
            }
        }
        assert_eq!(
            (terminal.close_code().await, terminal.expect_control("exit").await["code"].as_i64()),
            (1000, Some(6))
        );
        let lines: Vec<u32> = terminal.text().lines().filter_map(|line| line.parse().ok()).collect();
        assert_eq!(lines.last(), Some(&30_000));
        assert_eq!(lines.len(), 30_000);
    }
    cluster.shutdown().await;
}

fn ack(position: u64) -> Message {
    Message::Text(json!({ "type": "ack", "position": position }).to_string().into())
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_connection_is_resumed_and_a_second_one_replaces_the_first() {
    let (mut cluster, allocation) = start_with_allocation(1).await;
    let (mut terminal, session) = cluster.terminal(allocation.id).await;
    wait_for_prompt(&mut terminal).await;
    let position = terminal.position;
    drop(terminal);
    expect_session(&cluster, session, "detached").await;
    let ticket = cluster.issue_terminal_token(&cluster.user.clone(), allocation.id, Some(session)).await;
    let mut second = cluster.gateway().open(&ticket.token, Some(position)).await;
    assert_eq!(second.attached().await["attachment"], 2);
    second.enter("echo again-$((1 + 1))\n").await;
    second.expect_output("again-2").await;
    let ticket = cluster.issue_terminal_token(&cluster.user.clone(), allocation.id, Some(session)).await;
    // From the beginning: the buffered output is sent again.
    let mut third = cluster.gateway().open(&ticket.token, Some(0)).await;
    third.expect_output("again-2").await;
    assert_eq!(second.close_code().await, 4409);
    third.control(&json!({ "type": "exit" })).await;
    assert!(third.expect_control("exit").await["signal"].is_i64());
    assert_eq!(third.close_code().await, 1000);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reader_that_stops_blocks_the_program_and_no_buffer_grows() {
    let (mut cluster, allocation) = start_with_allocation(1).await;
    let (mut terminal, _) = cluster.terminal(allocation.id).await;
    wait_for_prompt(&mut terminal).await;
    terminal.control(&json!({ "type": "ack", "position": terminal.position })).await;
    terminal.enter("(yes | tee >(wc -c > $HOME/written) >/dev/null) & yes\n").await;
    let started = terminal.position;
    // It reads, and acknowledges nothing, until the program waits.
    let until = Instant::now() + WAIT_TIMEOUT;
    loop {
        let is_quiet = !terminal.receive(Duration::from_secs(3)).await;
        let held = terminal.position - started;
        assert!(held <= 2 * wire::terminal::OUTPUT_WINDOW, "{held} bytes came unacknowledged");
        if is_quiet && held >= wire::terminal::OUTPUT_WINDOW / 2 {
            break;
        }
        let late = Instant::now() >= until || terminal.closed.is_some();
        assert!(!late, "{held} bytes of a window came, then nothing: {:?}", terminal.closed);
    }
    // It acknowledges, and receives more.
    terminal.control(&json!({ "type": "ack", "position": terminal.position })).await;
    let before = terminal.position;
    while terminal.position == before {
        assert!(terminal.receive(WAIT_TIMEOUT).await, "nothing more comes");
    }
    // Input overtakes all of it.
    terminal.enter("\u{3}").await;
    terminal.enter("kill %1; echo st''opped\n").await;
    let until = Instant::now() + WAIT_TIMEOUT;
    while !terminal.text().contains("stopped") {
        assert!(Instant::now() < until, "it never stops");
        terminal.control(&json!({ "type": "ack", "position": terminal.position })).await;
        terminal.receive(SHORT).await;
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_of_fifty_sockets_with_one_token_opens_and_the_others_are_counted() {
    let (mut cluster, allocation) = start_with_allocation(2).await;
    let ticket = cluster.issue_terminal_token(&cluster.user.clone(), allocation.id, None).await;
    let opening = (0..50).map(|n| {
        let (gateway, token) = (cluster.gateway_at(n % 2), ticket.token.clone());
        tokio::spawn(async move {
            let mut terminal = gateway.open(&token, None).await;
            while terminal.closed.is_none() && terminal.unread.is_empty() {
                terminal.receive(SHORT).await;
            }
            terminal
        })
    });
    let terminals = futures::future::join_all(opening.collect::<Vec<_>>()).await;
    let mut open = 0;
    for terminal in terminals {
        match terminal.unwrap().closed {
            None => open += 1,
            Some((code, reason)) => assert_eq!(code, 4401, "{reason}"),
        }
    }
    assert_eq!(open, 1);
    for (name, expected) in [("terminal_token_consumed_ok_total", 1.0), ("terminal_token_replay_rejected_total", 49.0)]
    {
        let until = Instant::now() + WAIT_TIMEOUT;
        while cluster.metric_total(name, &[]).await < expected && Instant::now() < until {
            tokio::time::sleep(SHORT).await;
        }
        assert_eq!(cluster.metric_total(name, &[]).await, expected, "{name}");
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unauthorized_terminal_connection_is_refused_with_a_reason() {
    let (mut cluster, allocation) = start_with_allocation(1).await;
    let path = format!("/api/v1/allocations/{}/terminal-tokens", allocation.id);
    // The allocation's user alone gets a token, not even an administrator does.
    for by in [&cluster.other_user, &cluster.admin] {
        by.send_once(Method::POST, &path, Some(&json!({}))).await.expect_error(404, "not_found");
    }
    let ticket = cluster.issue_terminal_token(&cluster.user.clone(), allocation.id, None).await;
    let foreign = json!({ "session_id": ticket.session });
    cluster.other_user.send_once(Method::POST, &path, Some(&foreign)).await.expect_error(404, "not_found");
    cluster
        .user
        .send_once(Method::POST, &path, Some(&json!({ "session_id": Uuid::nil() })))
        .await
        .expect_error(404, "not_found");
    let waiting = json!({ "sku": "h100", "region_code": tests::cluster::REGION, "gpu_count": 8, "queue_seconds": 60 });
    let waiting = cluster.user.post("/api/v1/allocations", &waiting).await.created();
    let waiting = tests::cluster::id_of(&waiting);
    cluster.request_terminal_token(&cluster.user, waiting, None).await.expect_error(409, "state_conflict");

    let gateway = cluster.gateway();
    let token = Some(ticket.token.clone());
    let asked = async |asking: TerminalRequest| gateway.connect(&asking).await.err().expect("no upgrade");
    let (status, body) = asked(TerminalRequest {
        token: token.clone(),
        origin: Some("https://evil.example".into()),
        ..TerminalRequest::default()
    })
    .await;
    assert_eq!((status, body["code"].as_str()), (403, Some("forbidden")));
    assert_eq!(
        (body["details"]["service"].as_str(), body["details"]["route"].as_str()),
        (Some("terminal-gateway"), Some("/ws/v1/terminal"))
    );
    let in_url = TerminalRequest { query: Some(format!("token={}", ticket.token)), ..TerminalRequest::default() };
    assert_eq!(asked(in_url).await.0, 400);
    let (status, body) = asked(TerminalRequest::default()).await;
    assert_eq!((status, body["code"].as_str()), (401, Some("token_invalid")));
    let answer = cluster.anonymous_client().send_once(Method::GET, "/ws/v1/terminal", None).await;
    answer.expect_error(426, "upgrade_required");
    for wrong in
        ["x".to_owned(), ticket.token.replace("gputrm_", "gpuenr_"), ticket.token.replacen("gputrm_", "gputrm_A", 1)]
    {
        let mut terminal = gateway.open(&wrong, None).await;
        assert_eq!(terminal.close_code().await, 4401, "{wrong}");
    }
    // A page of the service's own origin; the token is still valid.
    let own = TerminalRequest { token, origin: Some(cluster.user.base().to_owned()), ..TerminalRequest::default() };
    let mut terminal = gateway.connect(&own).await.unwrap_or_else(|refused| panic!("{refused:?}"));
    terminal.attached().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn release_and_administrator_close_terminals_at_once() {
    let (mut cluster, allocation) = start_with_allocation(2).await;
    let (mut first, session) = cluster.terminal(allocation.id).await;
    let (mut second, _) = cluster.terminal(allocation.id).await;
    wait_for_prompt(&mut first).await;
    let kill = format!("/api/v1/admin/terminal-sessions/{session}/kill");
    cluster.user.send_once(Method::POST, &kill, Some(&json!({ "reason": "no" }))).await.expect_error(403, "forbidden");
    cluster.admin.send_once(Method::POST, &kill, Some(&json!({}))).await.expect_error(400, "invalid_request");
    let killed = cluster.admin.post(&kill, &json!({ "reason": "a test wants it" })).await.ok();
    assert_eq!(
        (killed["state"].as_str(), killed["close_reason"].as_str()),
        (Some("closed"), Some("killed")),
        "{killed}"
    );
    assert_eq!(first.close_code().await, 4403);
    cluster
        .request_terminal_token(&cluster.user, allocation.id, Some(session))
        .await
        .expect_error(409, "state_conflict");

    let unused = cluster.issue_terminal_token(&cluster.user.clone(), allocation.id, None).await;
    allocation.release().await;
    assert_eq!(second.close_code().await, 4403);
    assert_eq!(cluster.gateway().open(&unused.token, None).await.close_code().await, 4403);
    cluster.request_terminal_token(&cluster.user, allocation.id, None).await.expect_error(409, "state_conflict");
    allocation.expect_state("released").await;
    let closed = "/api/v1/admin/terminal-sessions?state=closed";
    let are_three = |listed: &Value| listed["items"].as_array().unwrap().len() == 3;
    cluster.admin.wait_until(closed, "three sessions are closed", are_three).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_token_opens_nothing_and_its_session_is_closed() {
    let mut cluster = TestCluster::builder().policy("terminal.token_ttl_seconds", 5).start().await;
    cluster.node("h100").await;
    let allocation = cluster.rent_active("h100", 1).await;
    let ticket = cluster.issue_terminal_token(&cluster.user.clone(), allocation.id, None).await;
    let closed = expect_session(&cluster, ticket.session, "closed").await;
    assert_eq!(closed["close_reason"], "never_attached", "{closed}");
    assert_eq!(cluster.gateway().open(&ticket.token, None).await.close_code().await, 4401);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn session_ends_at_its_lifetime_while_its_agent_is_stopped() {
    let mut cluster = TestCluster::builder().policy("terminal.session_max_ttl_seconds", 60).start().await;
    let node = cluster.node("h100").await;
    let allocation = cluster.rent_active("h100", 1).await;
    let (mut terminal, session) = cluster.terminal(allocation.id).await;
    wait_for_prompt(&mut terminal).await;
    terminal.enter("echo $$ > $HOME/shell; echo writ''ten\n").await;
    terminal.expect_output("written").await;
    cluster.lose_agent(&node);
    // Its lifetime, and the time of a slow machine.
    let until = Instant::now() + Duration::from_secs(60) + WAIT_TIMEOUT;
    while terminal.closed.is_none() {
        assert!(Instant::now() < until, "it lives for ever");
        terminal.receive(Duration::from_secs(1)).await;
    }
    assert_eq!(terminal.close_code().await, 4408);
    assert_eq!(expect_session(&cluster, session, "closed").await["close_reason"], "lifetime");
    cluster.resume_agent(&node);
    let home = cluster.agent_folder(&node).join("state/allocations").join(allocation.id.to_string()).join("home/shell");
    let shell = std::fs::read_to_string(&home).unwrap_or_else(|error| panic!("{}: {error}", home.display()));
    let until = Instant::now() + WAIT_TIMEOUT;
    while std::path::Path::new("/proc").join(shell.trim()).exists() {
        assert!(Instant::now() < until, "the shell {shell} lives on");
        tokio::time::sleep(SHORT).await;
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_messages_close_their_own_connection_and_no_other() {
    let (mut cluster, allocation) = start_with_allocation(1).await;
    let (mut good, _) = cluster.terminal(allocation.id).await;
    wait_for_prompt(&mut good).await;
    let rubbish: [(&str, Message, u16); 4] = [
        ("a frame of a megabyte", Message::Binary(vec![b'x'; 1 << 20].into()), 1009),
        ("control that is no JSON", Message::Text("\u{0}\u{1}rubbish".into()), 1008),
        ("control of no known type", Message::Text(r#"{"type":"sudo"}"#.into()), 1008),
        ("a size that is none", Message::Text(r#"{"type":"resize","columns":-1,"rows":70000}"#.into()), 1008),
    ];
    for (what, message, code) in rubbish {
        let (mut terminal, _) = cluster.terminal(allocation.id).await;
        let _ = terminal.send(message).await;
        let closed = terminal.close_code().await;
        // A client that sends more than is read may be disconnected before the close frame arrives.
        assert!(closed == code || (code == 1009 && closed == 1006), "{what}: {closed}");
    }
    let (mut flooding, _) = cluster.terminal(allocation.id).await;
    for _ in 0..2000 {
        if flooding.send(Message::Ping(Vec::new().into())).await.is_err() {
            break;
        }
    }
    assert!([1008, 1006].contains(&flooding.close_code().await), "{:?}", flooding.closed);
    good.enter("echo not harmed\n").await;
    good.expect_output("not harmed").await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn revocation_of_node_certificates_closes_its_terminals_at_once() {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    let node = cluster.node("h100").await;
    let allocation = cluster.rent_active("h100", 1).await;
    let mut terminals = Vec::new();
    for relayed in [false, true] {
        terminals.push(cluster.terminal_joined(allocation.id, relayed).await.0);
    }
    let stolen = json!({ "reason": "stolen", "revoke_current_certificate": true });
    let (bundle, _) = cluster.reissue(&node, &stolen).await;
    for mut terminal in terminals {
        assert_eq!(terminal.close_code().await, 4403);
        let closed = expect_session(&cluster, terminal.session(), "closed").await;
        assert_eq!(closed["close_reason"], "killed", "{closed}");
        cluster
            .request_terminal_token(&cluster.user, allocation.id, Some(terminal.session()))
            .await
            .expect_error(409, "state_conflict");
    }
    // Once the node has enrolled again, as by the restart command, another terminal opens.
    cluster.kill9_agent(&node);
    for file in ["node.key", "node.pem"] {
        std::fs::remove_file(cluster.agent_folder(&node).join(file)).unwrap();
    }
    cluster.install(&node, &bundle).await;
    let (mut terminal, _) = cluster.terminal(allocation.id).await;
    terminal.enter("echo ag''ain\n").await;
    terminal.expect_output("again").await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn hanging_gateway_does_not_block_its_user_at_another() {
    let (mut cluster, allocation) = start_with_allocation(2).await;
    let ticket = cluster.issue_terminal_token(&cluster.user.clone(), allocation.id, None).await;
    let mut terminal = cluster.gateway_at(0).open(&ticket.token, None).await;
    terminal.attached().await;
    wait_for_prompt(&mut terminal).await;
    let position = terminal.position;
    cluster.signal_replica(0, Signal::SIGSTOP);
    let repeated = token_elsewhere(&cluster, allocation.id, ticket.session).await;
    let mut second = cluster.gateway_at(1).open(&repeated, Some(position)).await;
    second.attached().await;
    second.enter("echo on-$((1 + 2))\n").await;
    second.expect_output("on-3").await;
    cluster.signal_replica(0, Signal::SIGCONT);
    cluster.shutdown().await;
}

/// Less than the interval of the gateway's looks at it, and more than a slow node needs until its stream is there.
const REAUTHORIZED_AFTER: u32 = 10;

#[tokio::test(flavor = "multi_thread")]
async fn reconnection_with_a_new_token_as_policy_demands_loses_nothing() {
    let mut cluster =
        TestCluster::builder().policy("terminal.reauthorize_after_seconds", REAUTHORIZED_AFTER).start().await;
    cluster.node("h100").await;
    let allocation = cluster.rent_active("h100", 1).await;
    let (mut terminal, session) = cluster.terminal(allocation.id).await;
    // All input at once: on a slow machine the connection may be closed before the answer to a first line.
    terminal.enter("PS1='ready> '; stty -echo; kept=yes; echo sa''id\n").await;
    assert_eq!(terminal.close_code().await, 1012, "a long connection must authenticate again");
    // A user with a valid access token reconnects; one without gets no terminal token.
    let gone = cluster.anonymous_client().as_bearer("eyJhbGciOiJub25lIn0.e30.");
    cluster.request_terminal_token(&gone, allocation.id, Some(session)).await.expect_error(401, "unauthenticated");
    let ticket = cluster.issue_terminal_token(&cluster.user.clone(), allocation.id, Some(session)).await;
    let mut repeated = cluster.gateway().open(&ticket.token, Some(terminal.position)).await;
    assert_eq!(repeated.attached().await["lost_bytes"], 0);
    repeated.enter("echo still-$kept\n").await;
    while !repeated.text().contains("still-yes") && repeated.closed.is_none() {
        repeated.receive(SHORT).await;
    }
    let shown = format!("{}{}", terminal.text(), repeated.text());
    let shown = if repeated.closed.is_some() {
        // Closed again before the answer, which the next connection shows.
        let ticket = cluster.issue_terminal_token(&cluster.user.clone(), allocation.id, Some(session)).await;
        let mut third = cluster.gateway().open(&ticket.token, Some(repeated.position)).await;
        assert_eq!(third.attached().await["lost_bytes"], 0);
        third.expect_output("still-yes").await;
        shown + &third.text()
    } else {
        shown
    };
    assert!(shown.contains("said") && shown.contains("still-yes"), "{shown}");
    cluster.shutdown().await;
}
