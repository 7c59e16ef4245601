//! Terminals, as users meet them: a shell on what they rent, through a gateway and the agent's own stream, with everything real.

use nix::sys::signal::Signal;
use reqwest::Method;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tests::world::terminal::{Asking, Terminal};
use tests::world::{PATIENCE, Rented, World};
use tokio_tungstenite::tungstenite::Message;
use uuid::Uuid;

const SHORT: Duration = Duration::from_millis(200);

/// A world in which `user` has an active allocation.
async fn rented(replicas: usize) -> (World, Rented) {
    let mut world = World::plan().replicas(replicas).policy(RATE, 1000).start().await;
    world.node("h100").await;
    let allocation = world.rent("h100", 1).await;
    allocation.expect_state("active").await;
    (world, allocation)
}

const RATE: &str = "rate_limit.terminal_token_requests_per_minute";

async fn session_of(world: &World, session: Uuid) -> Value {
    world.admin.get(&format!("/api/v1/admin/terminal-sessions/{session}")).await.ok()
}

async fn expect_session(world: &World, session: Uuid, state: &str) -> Value {
    let path = format!("/api/v1/admin/terminal-sessions/{session}");
    world.admin.wait_until(&path, state, |session| session["state"] == state).await
}

/// A figure of all replicas together.
async fn counted(world: &World, name: &str) -> u64 {
    let mut sum = 0;
    for index in 0..world.replicas.len() {
        let page = world.operator_at(index).once(Method::GET, "/metrics", None).await.text;
        let line = page.lines().find(|line| line.starts_with(name) && line[name.len()..].starts_with(' '));
        sum += line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).unwrap_or(0.0) as u64;
    }
    sum
}

async fn prompt(terminal: &mut Terminal) {
    terminal.enter("PS1='ready> '; stty -echo; echo be''gun\n").await;
    terminal.shows("begun").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_types_on_what_they_rent_resizes_it_and_learns_how_it_ended() {
    let (mut world, allocation) = rented(1).await;
    let (mut terminal, session) = world.terminal(allocation.id).await;
    terminal.enter("echo it is $((6 * 7))\n").await;
    terminal.shows("it is 42").await;
    terminal.control(&json!({ "type": "resize", "columns": 132, "rows": 43 })).await;
    terminal.enter("stty size\n").await;
    terminal.shows("43 132").await;
    terminal.control(&json!({ "type": "ping" })).await;
    terminal.told("pong").await;
    // The tenant's own environment, and nothing of the agent's.
    terminal.enter("echo \"secrets=$(env | grep -c -e SVC_ -e ENROLLMENT) of $GPUAAS_ALLOCATION_ID\"\n").await;
    terminal.shows(&format!("secrets=0 of {}", allocation.id)).await;
    assert_eq!(session_of(&world, session).await["state"], "attached");
    terminal.enter("exit 7\n").await;
    assert_eq!(terminal.told("exit").await["code"], 7);
    assert_eq!(terminal.close_code().await, 1000);
    let closed = expect_session(&world, session, "closed").await;
    assert_eq!(
        (closed["close_reason"].as_str(), closed["exit"]["code"].as_i64()),
        (Some("exited"), Some(7)),
        "{closed}"
    );
    let actions: Vec<String> = world.audit_of(session).await.into_iter().map(|(_, action, ..)| action).collect();
    assert_eq!(actions, ["terminals.open", "terminals.attach", "terminals.close"]);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn user_and_node_on_two_replicas_are_joined_over_the_bus() {
    let (mut world, allocation) = rented(2).await;
    // The agent's stream ends at one of the two; one of these users is at the other.
    for replica in 0..2 {
        let ticket = world.ticket(&world.user.clone(), allocation.id, None).await;
        let mut terminal = world.gateway_at(replica).open(&ticket.token, None).await;
        terminal.attached().await;
        for other in 0..4 {
            terminal.enter(&format!("echo round{other}-$((40 + {other}))\n")).await;
            terminal.shows(&format!("round{other}-{}", 40 + other)).await;
        }
        terminal.enter("exit\n").await;
        assert_eq!(terminal.close_code().await, 1000);
    }
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_goes_on_after_the_replica_that_served_it_was_killed_and_loses_nothing() {
    let (mut world, allocation) = rented(3).await;
    let ticket = world.ticket(&world.user.clone(), allocation.id, None).await;
    let mut terminal = world.gateway_at(0).open(&ticket.token, None).await;
    terminal.attached().await;
    prompt(&mut terminal).await;
    terminal.enter("for i in $(seq 1 400); do echo line-$i; sleep 0.01; done; echo all''done\n").await;
    terminal.shows("line-20\r").await;
    world.kill9_replica(0);
    while terminal.closed.is_none() {
        terminal.hear(SHORT).await;
    }
    let (position, mut shown) = (terminal.position, terminal.shown.clone());
    let elsewhere = world.at_replica(1, "user");
    let until = Instant::now() + PATIENCE;
    let again = loop {
        let answer = world.try_ticket(&elsewhere, allocation.id, Some(ticket.session)).await;
        if answer.status.as_u16() == 201 {
            break answer.body["token"].as_str().unwrap().to_owned();
        }
        assert!(Instant::now() < until, "{answer}");
        tokio::time::sleep(SHORT).await;
    };
    let mut terminal = world.gateway_at(1).open(&again, Some(position)).await;
    let attached = terminal.attached().await;
    assert_eq!(
        (attached["position"].as_u64(), attached["lost_bytes"].as_u64()),
        (Some(position), Some(0)),
        "{attached}"
    );
    terminal.shows("alldone").await;
    shown.extend(&terminal.shown);
    let lines: Vec<String> =
        String::from_utf8_lossy(&shown).lines().filter(|line| line.starts_with("line-")).map(str::to_owned).collect();
    let expected: Vec<String> = (1..=400).map(|i| format!("line-{i}")).collect();
    assert_eq!(lines, expected);
    world.restart_replica(0).await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_replica_with_the_nodes_stream_is_killed_and_the_user_at_another_hardly_notices() {
    let (mut world, allocation) = rented(2).await;
    let (mut terminal, streams_at) = world.terminal_joined(allocation.id, true).await;
    prompt(&mut terminal).await;
    world.kill9_replica(streams_at);
    let until = Instant::now() + PATIENCE;
    let mut n = 0;
    while !terminal.text().contains("still-here") {
        assert!(Instant::now() < until && terminal.closed.is_none(), "{:?}: {}", terminal.closed, terminal.text());
        n += 1;
        terminal.enter(&format!("echo still''-here {n}\n")).await;
        terminal.hear(Duration::from_millis(500)).await;
    }
    world.restart_replica(streams_at).await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_program_said_last_is_kept_for_a_user_who_was_cut_off_unnoticed() {
    let (mut world, allocation) = rented(2).await;
    for relayed in [false, true] {
        let (mut terminal, _) = world.terminal_joined(allocation.id, relayed).await;
        prompt(&mut terminal).await;
        let session = terminal.session();
        let position = terminal.position;
        // From here on nothing is taken off the socket, and it stays open: so it looks where a network is gone.
        terminal.enter("sleep 0.5; seq 1 3000; echo ma''de; exit 5\n").await;
        tokio::time::sleep(Duration::from_secs(3)).await;
        let ticket = world.ticket(&world.user.clone(), allocation.id, Some(session)).await;
        let mut again = world.gateway().open(&ticket.token, Some(position)).await;
        assert_eq!(again.told("exit").await["code"], 5);
        assert_eq!(again.close_code().await, 1000);
        let lines: Vec<u32> = again.text().lines().filter_map(|line| line.parse().ok()).collect();
        assert_eq!(lines, (1..=3000).collect::<Vec<_>>());
        assert!(again.text().contains("made"));
        drop(terminal);
    }
    world.end().await;
}

/// So many bytes a slow reader reads between two pauses.
const SLOWLY: u64 = 4096;

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_reader_hears_a_program_out_that_has_long_ended() {
    let (mut world, allocation) = rented(1).await;
    for acknowledges in [false, true] {
        let ticket = world.ticket(&world.user.clone(), allocation.id, None).await;
        let mut terminal = world.gateway_at(0).receiving(4096).open(&ticket.token, None).await;
        terminal.attached().await;
        prompt(&mut terminal).await;
        terminal.enter("seq 1 30000; exit 6\n").await;
        let mut paused_at = terminal.position;
        let until = Instant::now() + 2 * PATIENCE;
        while terminal.closed.is_none() {
            assert!(Instant::now() < until, "it never ends");
            terminal.hear(PATIENCE).await;
            // By bytes: into how many messages the output is cut is up to the machine's load.
            if terminal.position >= paused_at + SLOWLY {
                paused_at = terminal.position;
                tokio::time::sleep(2 * SHORT).await;
            }
            if acknowledges && terminal.closed.is_none() {
                let _ = terminal.send(ack(terminal.position)).await;
            }
        }
        assert_eq!((terminal.close_code().await, terminal.told("exit").await["code"].as_i64()), (1000, Some(6)));
        let lines: Vec<u32> = terminal.text().lines().filter_map(|line| line.parse().ok()).collect();
        assert_eq!(lines.last(), Some(&30_000));
        assert_eq!(lines.len(), 30_000);
    }
    world.end().await;
}

fn ack(position: u64) -> Message {
    Message::Text(json!({ "type": "ack", "position": position }).to_string().into())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_connection_is_taken_up_again_and_a_second_one_puts_out_the_first() {
    let (mut world, allocation) = rented(1).await;
    let (mut terminal, session) = world.terminal(allocation.id).await;
    prompt(&mut terminal).await;
    let position = terminal.position;
    drop(terminal);
    expect_session(&world, session, "detached").await;
    let ticket = world.ticket(&world.user.clone(), allocation.id, Some(session)).await;
    let mut second = world.gateway().open(&ticket.token, Some(position)).await;
    assert_eq!(second.attached().await["attachment"], 2);
    second.enter("echo again-$((1 + 1))\n").await;
    second.shows("again-2").await;
    let ticket = world.ticket(&world.user.clone(), allocation.id, Some(session)).await;
    // From the beginning: what is kept is shown once more.
    let mut third = world.gateway().open(&ticket.token, Some(0)).await;
    third.shows("again-2").await;
    assert_eq!(second.close_code().await, 4409);
    third.control(&json!({ "type": "exit" })).await;
    assert!(third.told("exit").await["signal"].is_i64());
    assert_eq!(third.close_code().await, 1000);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_who_stops_stops_the_program_and_nothing_grows() {
    let (mut world, allocation) = rented(1).await;
    let (mut terminal, _) = world.terminal(allocation.id).await;
    prompt(&mut terminal).await;
    terminal.control(&json!({ "type": "ack", "position": terminal.position })).await;
    terminal.enter("(yes | tee >(wc -c > $HOME/written) >/dev/null) & yes\n").await;
    let begun = terminal.position;
    // It reads, and acknowledges nothing.
    let until = Instant::now() + Duration::from_secs(4);
    while Instant::now() < until {
        terminal.hear(SHORT).await;
    }
    let held = terminal.position - begun;
    assert!(held > 1000 && held <= 2 * wire::terminal::OUTPUT_WINDOW, "{held} bytes came unacknowledged");
    assert!(!terminal.hear(Duration::from_millis(500)).await, "the program waits");
    // It acknowledges, and more comes.
    terminal.control(&json!({ "type": "ack", "position": terminal.position })).await;
    let before = terminal.position;
    while terminal.position == before {
        assert!(terminal.hear(PATIENCE).await, "nothing more comes");
    }
    // What is typed goes past all of it.
    terminal.enter("\u{3}").await;
    terminal.enter("kill %1; echo st''opped\n").await;
    let until = Instant::now() + PATIENCE;
    while !terminal.text().contains("stopped") {
        assert!(Instant::now() < until, "it never stops");
        terminal.control(&json!({ "type": "ack", "position": terminal.position })).await;
        terminal.hear(SHORT).await;
    }
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_fifty_sockets_with_one_token_one_opens_and_the_others_are_counted() {
    let (mut world, allocation) = rented(2).await;
    let ticket = world.ticket(&world.user.clone(), allocation.id, None).await;
    let opening = (0..50).map(|n| {
        let (gateway, token) = (world.gateway_at(n % 2), ticket.token.clone());
        tokio::spawn(async move {
            let mut terminal = gateway.open(&token, None).await;
            while terminal.closed.is_none() && terminal.told.is_empty() {
                terminal.hear(SHORT).await;
            }
            terminal
        })
    });
    let terminals = futures::future::join_all(opening.collect::<Vec<_>>()).await;
    let mut open = 0;
    for terminal in terminals {
        match terminal.unwrap().closed {
            None => open += 1,
            Some((code, _)) => assert_eq!(code, 4401),
        }
    }
    assert_eq!(open, 1);
    assert_eq!(counted(&world, "terminal_token_consumed_ok_total").await, 1);
    assert_eq!(counted(&world, "terminal_token_replay_rejected_total").await, 49);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_may_not_connect_is_told_so_and_gets_nothing() {
    let (mut world, allocation) = rented(1).await;
    let path = format!("/api/v1/allocations/{}/terminal-tokens", allocation.id);
    // Nobody but the allocation's user gets a token, not even an administrator.
    for by in [&world.other_user, &world.admin] {
        by.once(Method::POST, &path, Some(&json!({}))).await.refused(404, "not_found");
    }
    let ticket = world.ticket(&world.user.clone(), allocation.id, None).await;
    let foreign = json!({ "session_id": ticket.session });
    world.other_user.once(Method::POST, &path, Some(&foreign)).await.refused(404, "not_found");
    world.user.once(Method::POST, &path, Some(&json!({ "session_id": Uuid::nil() }))).await.refused(404, "not_found");
    let waiting = json!({ "sku": "h100", "region_code": tests::world::REGION, "gpu_count": 8, "queue_seconds": 60 });
    let waiting = world.user.post("/api/v1/allocations", &waiting).await.created();
    let waiting = tests::world::id_of(&waiting);
    world.try_ticket(&world.user, waiting, None).await.refused(409, "state_conflict");

    let gateway = world.gateway();
    let token = Some(ticket.token.clone());
    let asked = async |asking: Asking| gateway.ask(&asking).await.err().expect("no upgrade");
    let (status, body) =
        asked(Asking { token: token.clone(), origin: Some("https://evil.example".into()), ..Asking::default() }).await;
    assert_eq!((status, body["code"].as_str()), (403, Some("forbidden")));
    assert_eq!(
        (body["details"]["service"].as_str(), body["details"]["route"].as_str()),
        (Some("terminal-gateway"), Some("/ws/v1/terminal"))
    );
    let in_url = Asking { query: Some(format!("token={}", ticket.token)), ..Asking::default() };
    assert_eq!(asked(in_url).await.0, 400);
    let (status, body) = asked(Asking::default()).await;
    assert_eq!((status, body["code"].as_str()), (401, Some("token_invalid")));
    let answer = world.stranger().once(Method::GET, "/ws/v1/terminal", None).await;
    answer.refused(426, "upgrade_required");
    for wrong in
        ["x".to_owned(), ticket.token.replace("gputrm_", "gpuenr_"), ticket.token.replacen("gputrm_", "gputrm_A", 1)]
    {
        let mut terminal = gateway.open(&wrong, None).await;
        assert_eq!(terminal.close_code().await, 4401, "{wrong}");
    }
    // A page of the service's own, and the token is still good.
    let own = Asking { token, origin: Some(world.user.base().to_owned()), ..Asking::default() };
    let mut terminal = gateway.ask(&own).await.unwrap_or_else(|refused| panic!("{refused:?}"));
    terminal.attached().await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_and_an_administrator_close_terminals_at_once() {
    let (mut world, allocation) = rented(2).await;
    let (mut first, session) = world.terminal(allocation.id).await;
    let (mut second, _) = world.terminal(allocation.id).await;
    prompt(&mut first).await;
    let kill = format!("/api/v1/admin/terminal-sessions/{session}/kill");
    world.user.once(Method::POST, &kill, Some(&json!({ "reason": "no" }))).await.refused(403, "forbidden");
    world.admin.once(Method::POST, &kill, Some(&json!({}))).await.refused(400, "invalid_request");
    let killed = world.admin.post(&kill, &json!({ "reason": "a test wants it" })).await.ok();
    assert_eq!(
        (killed["state"].as_str(), killed["close_reason"].as_str()),
        (Some("closed"), Some("killed")),
        "{killed}"
    );
    assert_eq!(first.close_code().await, 4403);
    world.try_ticket(&world.user, allocation.id, Some(session)).await.refused(409, "state_conflict");

    let unused = world.ticket(&world.user.clone(), allocation.id, None).await;
    allocation.release().await;
    assert_eq!(second.close_code().await, 4403);
    assert_eq!(world.gateway().open(&unused.token, None).await.close_code().await, 4403);
    world.try_ticket(&world.user, allocation.id, None).await.refused(409, "state_conflict");
    allocation.expect_state("released").await;
    let listed = world.admin.get("/api/v1/admin/terminal-sessions?state=closed").await.ok();
    assert_eq!(listed["items"].as_array().unwrap().len(), 3, "{listed}");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_that_is_too_old_opens_nothing_and_its_session_is_closed() {
    let mut world = World::plan().policy("terminal.token_ttl_seconds", 5).start().await;
    world.node("h100").await;
    let allocation = world.rent("h100", 1).await;
    allocation.expect_state("active").await;
    let ticket = world.ticket(&world.user.clone(), allocation.id, None).await;
    let closed = expect_session(&world, ticket.session, "closed").await;
    assert_eq!(closed["close_reason"], "never_attached", "{closed}");
    assert_eq!(world.gateway().open(&ticket.token, None).await.close_code().await, 4401);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_ends_at_its_lifetime_though_the_agent_has_stopped() {
    let mut world = World::plan().policy("terminal.session_max_ttl_seconds", 60).start().await;
    let node = world.node("h100").await;
    let allocation = world.rent("h100", 1).await;
    allocation.expect_state("active").await;
    let (mut terminal, session) = world.terminal(allocation.id).await;
    prompt(&mut terminal).await;
    terminal.enter("echo $$ > $HOME/shell; echo writ''ten\n").await;
    terminal.shows("written").await;
    world.lose_agent(&node);
    let until = Instant::now() + Duration::from_secs(75);
    while terminal.closed.is_none() {
        assert!(Instant::now() < until, "it lives for ever");
        terminal.hear(Duration::from_secs(1)).await;
    }
    assert_eq!(terminal.close_code().await, 4408);
    assert_eq!(expect_session(&world, session, "closed").await["close_reason"], "lifetime");
    world.find_agent(&node);
    let home = world.agent_folder(&node).join("state/allocations").join(allocation.id.to_string()).join("home/shell");
    let shell = std::fs::read_to_string(&home).unwrap_or_else(|error| panic!("{}: {error}", home.display()));
    let until = Instant::now() + PATIENCE;
    while std::path::Path::new("/proc").join(shell.trim()).exists() {
        assert!(Instant::now() < until, "the shell {shell} lives on");
        tokio::time::sleep(SHORT).await;
    }
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_messages_end_their_own_connection_and_nothing_else() {
    let (mut world, allocation) = rented(1).await;
    let (mut good, _) = world.terminal(allocation.id).await;
    prompt(&mut good).await;
    let rubbish: [(&str, Message, u16); 4] = [
        ("a frame of a megabyte", Message::Binary(vec![b'x'; 1 << 20].into()), 1009),
        ("control that is no JSON", Message::Text("\u{0}\u{1}rubbish".into()), 1008),
        ("control of no known type", Message::Text(r#"{"type":"sudo"}"#.into()), 1008),
        ("a size that is none", Message::Text(r#"{"type":"resize","columns":-1,"rows":70000}"#.into()), 1008),
    ];
    for (what, message, code) in rubbish {
        let (mut terminal, _) = world.terminal(allocation.id).await;
        let _ = terminal.send(message).await;
        let closed = terminal.close_code().await;
        // Who sends more than is read may be cut off before the frame with the code comes through.
        assert!(closed == code || (code == 1009 && closed == 1006), "{what}: {closed}");
    }
    let (mut flooding, _) = world.terminal(allocation.id).await;
    for _ in 0..2000 {
        if flooding.send(Message::Ping(Vec::new().into())).await.is_err() {
            break;
        }
    }
    assert!([1008, 1006].contains(&flooding.close_code().await), "{:?}", flooding.closed);
    good.enter("echo not harmed\n").await;
    good.shows("not harmed").await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_revokes_a_nodes_certificates_closes_its_terminals_at_once() {
    let mut world = World::plan().replicas(2).start().await;
    let node = world.node("h100").await;
    let allocation = world.rent("h100", 1).await;
    allocation.expect_state("active").await;
    let mut terminals = Vec::new();
    for relayed in [false, true] {
        terminals.push(world.terminal_joined(allocation.id, relayed).await.0);
    }
    let stolen = json!({ "reason": "stolen", "revoke_current_certificate": true });
    let (bundle, _) = world.reissue(&node, &stolen).await;
    for mut terminal in terminals {
        assert_eq!(terminal.close_code().await, 4403);
        let closed = expect_session(&world, terminal.session(), "closed").await;
        assert_eq!(closed["close_reason"], "killed", "{closed}");
        world.try_ticket(&world.user, allocation.id, Some(terminal.session())).await.refused(409, "state_conflict");
    }
    // Once the node has shown anew who it is, as the restart command has it do, another opens.
    world.kill9_agent(&node);
    for file in ["node.key", "node.pem"] {
        std::fs::remove_file(world.agent_folder(&node).join(file)).unwrap();
    }
    world.install(&node, &bundle).await;
    let (mut terminal, _) = world.terminal(allocation.id).await;
    terminal.enter("echo ag''ain\n").await;
    terminal.shows("again").await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_hangs_does_not_keep_its_user_from_another() {
    let (mut world, allocation) = rented(2).await;
    let ticket = world.ticket(&world.user.clone(), allocation.id, None).await;
    let mut terminal = world.gateway_at(0).open(&ticket.token, None).await;
    terminal.attached().await;
    prompt(&mut terminal).await;
    let position = terminal.position;
    world.signal_replica(0, Signal::SIGSTOP);
    let elsewhere = world.at_replica(1, "user");
    let until = Instant::now() + PATIENCE;
    let again = loop {
        let answer = world.try_ticket(&elsewhere, allocation.id, Some(ticket.session)).await;
        if answer.status.as_u16() == 201 {
            break answer.body["token"].as_str().unwrap().to_owned();
        }
        assert!(Instant::now() < until, "{answer}");
        tokio::time::sleep(SHORT).await;
    };
    let mut second = world.gateway_at(1).open(&again, Some(position)).await;
    second.attached().await;
    second.enter("echo on-$((1 + 2))\n").await;
    second.shows("on-3").await;
    world.signal_replica(0, Signal::SIGCONT);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn where_the_policy_wants_it_a_connection_comes_again_with_a_new_token_and_loses_nothing() {
    let mut world = World::plan().policy("terminal.reauthorize_after_seconds", 1).start().await;
    world.node("h100").await;
    let allocation = world.rent("h100", 1).await;
    allocation.expect_state("active").await;
    let (mut terminal, session) = world.terminal(allocation.id).await;
    prompt(&mut terminal).await;
    terminal.enter("kept=yes; echo sa''id\n").await;
    terminal.shows("said").await;
    assert_eq!(terminal.close_code().await, 1012, "who was let in long ago shows anew that they are");
    // Whoever has an access token that holds goes on; who has none gets no token.
    let gone = world.stranger().as_bearer("eyJhbGciOiJub25lIn0.e30.");
    world.try_ticket(&gone, allocation.id, Some(session)).await.refused(401, "unauthenticated");
    let ticket = world.ticket(&world.user.clone(), allocation.id, Some(session)).await;
    let mut again = world.gateway().open(&ticket.token, Some(terminal.position)).await;
    assert_eq!(again.attached().await["lost_bytes"], 0);
    again.enter("echo still-$kept\n").await;
    again.shows("still-yes").await;
    world.end().await;
}
