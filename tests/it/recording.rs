//! Recordings of terminals: complete or with marked gaps, readable for their owner and administrators alone, and
//! played back by a third-party player.

use crate::external_tools::{python_program, root, run};
use reqwest::Method;
use reqwest::header::{CACHE_CONTROL, CONTENT_TYPE};
use serde::Deserialize;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tests::cluster::client::{ApiResponse, send_request};
use tests::cluster::fake_agent::FakeAgent;
use tests::cluster::terminal::Terminal;
use tests::cluster::{AllocationHandle, NodeHandle, TestCluster, WAIT_TIMEOUT, id_of};
use uuid::Uuid;
use wire::recording::{CHUNK_MAX, Frame, FrameContent, RecordingEnd};

const RATE: &str = "rate_limit.terminal_token_requests_per_minute";
const ENABLED: &str = "terminal.recording_enabled";
const MODE: &str = "terminal.recording_mode";
const MAX_SESSION_MIB: &str = "terminal.recording_max_session_mib";
/// The smallest spool that an agent accepts: a MiB for each session.
const SMALL_SPOOL: [&str; 2] = ["--recording-spool-mib", "8"];

/// A cluster in which `user` has an active allocation on a node whose agent has these flags.
async fn start_with_allocation(
    replicas: usize,
    mode: &str,
    flags: &[&str],
) -> (TestCluster, NodeHandle, AllocationHandle) {
    let mut cluster = TestCluster::builder().replicas(replicas).policy(RATE, 1000).policy(MODE, mode).start().await;
    let node = cluster.node_with("h100", flags).await;
    let allocation = cluster.rent_active("h100", 1).await;
    (cluster, node, allocation)
}

/// The output of a player.
#[derive(Debug, Deserialize)]
struct Playback {
    header: Value,
    output: String,
    sizes: Vec<String>,
    markers: Vec<String>,
    in_order: bool,
    screen: Vec<String>,
    colours: Vec<Vec<String>>,
}

impl Playback {
    /// The numbers of the lines `line-1`, `line-2` and so on in the output.
    fn lines(&self) -> Vec<u32> {
        let lines = self.output.lines().filter_map(|line| line.strip_prefix("line-"));
        lines.filter_map(|number| number.trim_end().parse().ok()).collect()
    }
}

async fn download(cluster: &TestCluster, session: Uuid) -> ApiResponse {
    let answer = cluster.user.get(&format!("/api/v1/recordings/{session}/asciicast")).await;
    assert_eq!(answer.status.as_u16(), 200, "{answer}");
    answer
}

async fn play(cluster: &TestCluster, session: Uuid) -> Playback {
    let answer = download(cluster, session).await;
    assert_eq!(answer.headers[CONTENT_TYPE], "application/x-asciicast");
    assert_eq!(answer.headers[CACHE_CONTROL], "no-store");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("session.cast");
    std::fs::write(&path, &answer.text).unwrap();
    let mut player = Command::new(python_program("python"));
    player.arg(root().join("tests/it/recording/play.py")).arg(&path);
    let played: Playback = serde_json::from_str(&run(player).await).expect("the player says what it shows");
    assert!(played.in_order);
    played
}

/// The recording, once the node has completed it.
pub(crate) async fn complete(cluster: &TestCluster, session: Uuid) -> Value {
    let path = format!("/api/v1/recordings/{session}");
    let until = Instant::now() + 2 * WAIT_TIMEOUT;
    loop {
        let answer = cluster.user.get(&path).await;
        if answer.status.as_u16() == 200 && answer.body["complete"] == true {
            return answer.body;
        }
        assert!(Instant::now() < until, "{answer}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Waits for a shell without echo that has printed that it is ready.
async fn wait_for_prompt(terminal: &mut Terminal) {
    terminal.enter("PS1='ready> '; stty -echo; echo be''gun\n").await;
    terminal.expect_output("begun").await;
}

fn home(cluster: &TestCluster, node: &NodeHandle, allocation: &AllocationHandle) -> PathBuf {
    cluster.agent_folder(node).join("state/allocations").join(allocation.id.to_string()).join("home")
}

/// A program with thousands of steps makes it.
async fn wait_for_file(path: &std::path::Path) {
    let until = Instant::now() + 3 * WAIT_TIMEOUT;
    while !path.exists() {
        assert!(Instant::now() < until, "{} never appears", path.display());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn recording_plays_back_output_sizes_and_colours_without_unechoed_input() {
    const PASSWORD: &str = "correct horse battery staple";
    let (mut cluster, _, allocation) = start_with_allocation(1, "best-effort", &[]).await;
    cluster.register_secret("a password that was typed and not shown", PASSWORD);
    let ticket = cluster.issue_terminal_token(&cluster.user.clone(), allocation.id, None).await;
    let mut terminal = cluster.gateway().open(&ticket.token, None).await;
    assert_eq!(terminal.attached().await["recording"], "best-effort", "the user is notified");
    wait_for_prompt(&mut terminal).await;
    terminal.control(&json!({ "type": "resize", "columns": 100, "rows": 30 })).await;
    terminal.enter("stty size\n").await;
    terminal.expect_output("30 100").await;
    terminal.enter("clear; printf 'a \\033[31mred\\033[0m word \\342\\202\\254\\n'; read -rs secret; echo \"${#secret} typed\"\n").await;
    terminal.expect_output("word").await;
    terminal.enter(&format!("{PASSWORD}\n")).await;
    terminal.expect_output("28 typed").await;
    terminal.enter("unset secret; exit 3\n").await;
    assert_eq!(terminal.close_code().await, 1000);

    let recording = complete(&cluster, ticket.session).await;
    assert_eq!((recording["lost_bytes"].as_u64(), &recording["user_id"].is_string()), (Some(0), &true), "{recording}");
    let played = play(&cluster, ticket.session).await;
    assert_eq!(
        (&played.header["version"], &played.header["width"], &played.header["height"]),
        (&json!(2), &json!(80), &json!(24))
    );
    assert_eq!(played.output, terminal.text(), "what was shown, and nothing else");
    assert!(!played.output.contains(PASSWORD));
    assert_eq!((played.sizes.as_slice(), played.markers.len()), (["100x30".to_owned()].as_slice(), 0));
    let row = played.screen.iter().position(|line| line.contains("a red word €")).expect("it is on the screen");
    assert_eq!(
        (played.colours[row][2].as_str(), played.colours[row][0].as_str(), played.screen.len()),
        ("red", "default", 30)
    );
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn recording_is_complete_after_replica_and_agent_are_killed() {
    let (mut cluster, node, allocation) = start_with_allocation(2, "strict", &[]).await;
    let ticket = cluster.issue_terminal_token(&cluster.user.clone(), allocation.id, None).await;
    let mut terminal = cluster.gateway_at(1).open(&ticket.token, None).await;
    assert_eq!(terminal.attached().await["recording"], "strict");
    wait_for_prompt(&mut terminal).await;
    terminal.enter("for i in $(seq 1 4000); do echo line-$i; sleep 0.005; done\n").await;
    terminal.expect_output("line-100\r").await;
    cluster.kill9_replica(0);
    terminal.expect_output("line-700\r").await;
    cluster.kill9_agent(&node);
    while terminal.receive(Duration::from_millis(500)).await {}
    let shown = terminal.text();
    drop(terminal);
    cluster.restart_agent(&node);
    complete(&cluster, ticket.session).await;
    let played = play(&cluster, ticket.session).await;
    assert!(
        played.output.starts_with(&shown),
        "{} bytes were shown, {} are recorded",
        shown.len(),
        played.output.len()
    );
    let lines = played.lines();
    assert_eq!(lines, (1..=u32::try_from(lines.len()).unwrap()).collect::<Vec<_>>());
    assert_eq!(played.markers, ["the node's agent ended here, and the session with it"]);
    cluster.restart_replica(0).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn recording_chunks_arrive_in_order_after_a_control_plane_outage() {
    let (mut cluster, node, allocation) = start_with_allocation(1, "best-effort", &[]).await;
    let (mut terminal, session) = cluster.terminal(allocation.id).await;
    wait_for_prompt(&mut terminal).await;
    terminal.enter("for i in $(seq 1 3000); do echo line-$i; sleep 0.001; done; touch ~/done\n").await;
    terminal.expect_output("line-50\r").await;
    cluster.kill9_replica(0);
    wait_for_file(&home(&cluster, &node, &allocation).join("done")).await;
    cluster.restart_replica(0).await;
    end_session(&mut cluster, &allocation, session).await;
    assert_eq!(complete(&cluster, session).await["lost_bytes"], 0);
    let played = play(&cluster, session).await;
    assert_eq!(played.lines(), (1..=3000).collect::<Vec<_>>());
    assert!(played.markers.is_empty(), "{:?}", played.markers);
    cluster.shutdown().await;
}

/// The user resumes their session and ends it.
async fn end_session(cluster: &mut TestCluster, allocation: &AllocationHandle, session: Uuid) {
    let ticket = cluster.issue_terminal_token(&cluster.user.clone(), allocation.id, Some(session)).await;
    let mut terminal = cluster.gateway().open(&ticket.token, None).await;
    terminal.attached().await;
    terminal.enter("exit\n").await;
    assert_eq!(terminal.close_code().await, 1000);
}

/// More output than a session's part of the small spool, once there is a file `go`, and a file at its end.
const LONG_OUTPUT: &str = "echo wai''ting; until [ -e ~/go ]; do sleep 0.1; done; for i in $(seq 1 30000); do echo line-$i; echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done; touch ~/done\n";

#[tokio::test(flavor = "multi_thread")]
async fn full_spool_in_best_effort_mode_lets_the_program_continue_and_marks_the_gap() {
    let (mut cluster, node, allocation) = start_with_allocation(1, "best-effort", &SMALL_SPOOL).await;
    let (mut terminal, session) = cluster.terminal(allocation.id).await;
    wait_for_prompt(&mut terminal).await;
    terminal.enter(LONG_OUTPUT).await;
    terminal.expect_output("waiting").await;
    cluster.kill9_replica(0);
    std::fs::write(home(&cluster, &node, &allocation).join("go"), "").unwrap();
    wait_for_file(&home(&cluster, &node, &allocation).join("done")).await;
    cluster.restart_replica(0).await;
    end_session(&mut cluster, &allocation, session).await;
    let recording = complete(&cluster, session).await;
    let lost = recording["lost_bytes"].as_u64().unwrap();
    assert!(lost > 0, "{recording}");
    let played = play(&cluster, session).await;
    let gaps = played.markers.iter().filter(|marker| marker.contains("bytes are missing")).count();
    assert!(gaps > 0, "{:?}", played.markers);
    let lines = played.lines();
    // A gap starts and ends within lines, and the rest of these two may read as any number.
    let out_of_order = lines.windows(2).filter(|pair| pair[0] > pair[1]).count();
    assert!(lines.len() < 30_000 && out_of_order <= gaps, "{} lines, {out_of_order} out of order", lines.len());
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn full_spool_in_strict_mode_blocks_the_program_and_loses_nothing() {
    let (mut cluster, node, allocation) = start_with_allocation(1, "strict", &SMALL_SPOOL).await;
    let (mut terminal, session) = cluster.terminal(allocation.id).await;
    wait_for_prompt(&mut terminal).await;
    terminal.enter(LONG_OUTPUT).await;
    terminal.expect_output("waiting").await;
    cluster.kill9_replica(0);
    std::fs::write(home(&cluster, &node, &allocation).join("go"), "").unwrap();
    let done = home(&cluster, &node, &allocation).join("done");
    let spool = cluster.agent_folder(&node).join("state/recordings").join(session.to_string());
    tokio::time::sleep(Duration::from_secs(6)).await;
    let spooled: u64 = std::fs::read_dir(&spool).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum();
    assert!(!done.exists() && spooled <= 1 << 20, "the program waits; {spooled} bytes are in the spool");
    cluster.restart_replica(0).await;
    wait_for_file(&done).await;
    end_session(&mut cluster, &allocation, session).await;
    assert_eq!(complete(&cluster, session).await["lost_bytes"], 0);
    assert_eq!(play(&cluster, session).await.lines(), (1..=30_000).collect::<Vec<_>>());
    assert!(!spool.exists(), "what is sent is gone");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn policy_switches_recording_during_a_session_and_the_user_is_notified() {
    let (mut cluster, _, allocation) = start_with_allocation(1, "best-effort", &[]).await;
    let (mut terminal, session) = cluster.terminal(allocation.id).await;
    wait_for_prompt(&mut terminal).await;
    terminal.enter("echo fir''st\n").await;
    terminal.expect_output("first").await;
    cluster.set_policy(ENABLED, false).await;
    assert_eq!(terminal.expect_control("recording").await["mode"], "off");
    terminal.enter("echo sec''ond\n").await;
    terminal.expect_output("second").await;
    cluster.set_policy(MODE, "strict").await;
    cluster.set_policy(ENABLED, true).await;
    assert_eq!(terminal.expect_control("recording").await["mode"], "strict");
    terminal.enter("echo thi''rd; exit\n").await;
    assert_eq!(terminal.close_code().await, 1000);
    complete(&cluster, session).await;
    let played = play(&cluster, session).await;
    let has = |word: &str| played.output.contains(word);
    assert!(has("first") && !has("second") && has("third"), "{}", played.output);
    assert_eq!(played.markers, ["recording is off from here", "recording goes on from here"]);
    let actions: Vec<String> = cluster.audit_of(session).await.into_iter().map(|(_, action, ..)| action).collect();
    assert_eq!(actions.iter().filter(|action| *action == "terminals.change_recording").count(), 2, "{actions:?}");

    // A session that starts without recording is not recorded at all, and reports that.
    cluster.set_policy(ENABLED, false).await;
    let ticket = cluster.issue_terminal_token(&cluster.user.clone(), allocation.id, None).await;
    let mut silent = cluster.gateway().open(&ticket.token, None).await;
    assert_eq!(silent.attached().await["recording"], "off");
    silent.enter("exit\n").await;
    assert_eq!(silent.close_code().await, 1000);
    cluster.user.get(&format!("/api/v1/recordings/{}", ticket.session)).await.expect_error(404, "not_found");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn recording_is_hidden_from_other_users_and_every_read_is_audited() {
    let (mut cluster, _, allocation) = start_with_allocation(1, "best-effort", &[]).await;
    let (mut terminal, session) = cluster.terminal(allocation.id).await;
    terminal.enter("exit\n").await;
    assert_eq!(terminal.close_code().await, 1000);
    complete(&cluster, session).await;
    let paths = [
        format!("/api/v1/recordings/{session}"),
        format!("/api/v1/recordings/{session}/asciicast"),
        format!("/api/v1/allocations/{}/recordings", allocation.id),
    ];
    for path in &paths {
        cluster.other_user.send_once(Method::GET, path, None).await.expect_error(404, "not_found");
        cluster.anonymous_client().send_once(Method::GET, path, None).await.expect_error(401, "unauthenticated");
    }
    cluster.user.send_once(Method::GET, "/api/v1/admin/recordings", None).await.expect_error(403, "forbidden");
    for by in [&cluster.user, &cluster.admin] {
        let listed = by.get(&paths[2]).await.ok();
        assert_eq!(listed["items"][0]["id"], session.to_string(), "{listed}");
        assert_eq!(by.get(&paths[1]).await.status.as_u16(), 200);
    }
    let all = cluster.admin.get(&format!("/api/v1/admin/recordings?allocation_id={}", allocation.id)).await.ok();
    assert_eq!(all["items"].as_array().unwrap().len(), 1, "{all}");
    let readers: Vec<String> = cluster
        .audit_of(session)
        .await
        .into_iter()
        .filter(|(_, action, ..)| action == "terminals.read_recording")
        .map(|(actor, ..)| actor)
        .collect();
    let subject = |name: &str| format!("user:{}", cluster.identity.person(name).unwrap().id);
    assert_eq!(readers, [subject("user"), subject("admin")], "each read once, and no refusal");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn raised_size_limit_resumes_a_recording_and_strict_mode_ends_a_session_at_its_limit() {
    let (mut cluster, _, allocation) = start_with_allocation(1, "best-effort", &[]).await;
    cluster.set_policy(MAX_SESSION_MIB, 1).await;
    let (mut terminal, session) = cluster.terminal(allocation.id).await;
    wait_for_prompt(&mut terminal).await;
    terminal.enter("head -c 1500000 /dev/zero | tr '\\0' x; echo; echo past the e''nd\n").await;
    terminal.expect_output("past the end").await;
    assert_eq!(terminal.expect_control("recording").await["mode"], "off");
    cluster.set_policy(MAX_SESSION_MIB, 2).await;
    assert_eq!(terminal.expect_control("recording").await["mode"], "best-effort");
    terminal.enter("echo recorded a''gain\n").await;
    terminal.expect_output("recorded again").await;
    terminal.enter("head -c 1500000 /dev/zero | tr '\\0' x; echo; echo past it a''gain\n").await;
    terminal.expect_output("past it again").await;
    assert_eq!(terminal.expect_control("recording").await["mode"], "off");
    cluster.set_policy(MODE, "strict").await;
    assert_eq!(terminal.close_code().await, 1000, "nothing more is shown that is not recorded");
    let recording = complete(&cluster, session).await;
    assert!(recording["lost_bytes"].as_u64().unwrap() > 400_000, "{recording}");
    let played = play(&cluster, session).await;
    let has = |words: &str| played.output.contains(words);
    assert!(!has("past the end") && has("recorded again") && !has("past it again"));
    let gaps = played.markers.iter().filter(|marker| marker.contains("bytes are missing")).count();
    assert!(gaps > 0, "{:?}", played.markers);
    cluster.shutdown().await;
}

fn chunk(frames: &[(u64, FrameContent)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    frames.iter().for_each(|(micros, what)| Frame { micros: *micros, what: what.clone() }.write(&mut bytes));
    bytes
}

async fn send(agent: &FakeAgent, session: Uuid, seq: &str, frames: Vec<u8>) -> ApiResponse {
    let path = format!("terminals/{session}/recording/{seq}");
    let request = agent.request(Method::PUT, &path).header(CONTENT_TYPE, "application/octet-stream").body(frames);
    send_request(request).await.expect("an answer")
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_agent_can_only_append_the_next_chunk_of_its_own_open_recordings() {
    let mut cluster = TestCluster::builder().policy(RATE, 1000).policy(MAX_SESSION_MIB, 1).start().await;
    let mut agents = Vec::new();
    for _ in 0..2 {
        let (node, bundle) = cluster.registered("h100").await;
        let agent = Arc::new(FakeAgent::onboard(&bundle, 8).await);
        agents.push((node, tokio::spawn(Arc::clone(&agent).serve()), agent));
    }
    let node_of = |(node, ..): &(NodeHandle, tokio::task::JoinHandle<()>, Arc<FakeAgent>)| node.id;
    let body =
        json!({ "sku": "h100", "region_code": tests::cluster::REGION, "gpu_count": 1, "node_id": node_of(&agents[0]) });
    let allocation = id_of(&cluster.user.post("/api/v1/allocations", &body).await.created());
    cluster.user.wait_until(&format!("/api/v1/allocations/{allocation}"), "active", |it| it["state"] == "active").await;
    let session = cluster.issue_terminal_token(&cluster.user.clone(), allocation, None).await.session;
    let (own, other) = (&agents[0].2, &agents[1].2);

    let begin =
        chunk(&[(0, FrameContent::Begin { columns: 80, rows: 24 }), (1, FrameContent::Output(b"shown".to_vec()))]);
    let output = |text: &str| chunk(&[(2, FrameContent::Output(text.as_bytes().to_vec()))]);
    send(other, session, "0", begin.clone()).await.expect_error(404, "not_found");
    send(own, Uuid::nil(), "0", begin.clone()).await.expect_error(404, "not_found");
    send(own, session, "1", output("early")).await.expect_error(409, "state_conflict");
    send(own, session, "0", output("no beginning")).await.expect_error(400, "invalid_request");
    send(own, session, "0", b"rubbish".to_vec()).await.expect_error(400, "invalid_request");
    send(own, session, "0", Vec::new()).await.expect_error(400, "invalid_request");
    send(own, session, "-1", begin.clone()).await.expect_error(400, "invalid_request");
    send(own, session, "0", vec![0; CHUNK_MAX + 1]).await.expect_error(413, "payload_too_large");
    own.send(Method::PUT, &format!("terminals/{session}/recording/0"), Some(&json!({})))
        .await
        .expect_error(415, "unsupported_media_type");
    assert_eq!(send(own, session, "0", begin.clone()).await.ok()["recorded"], "new");
    assert_eq!(send(own, session, "0", begin.clone()).await.ok()["recorded"], "already");
    send(own, session, "0", chunk(&[(0, FrameContent::Begin { columns: 1, rows: 1 })]))
        .await
        .expect_error(409, "state_conflict");
    send(own, session, "2", output("late")).await.expect_error(409, "state_conflict");
    let full = "x".repeat(60_000);
    let mut seq = 1;
    let answer = loop {
        let answer = send(own, session, &seq.to_string(), output(&full)).await;
        if !answer.status.is_success() {
            break answer;
        }
        seq += 1;
    };
    answer.expect_error(413, "payload_too_large");
    assert_eq!(seq - 1, (1 << 20) / full.len(), "a MiB, and no more");
    let end = chunk(&[(3, FrameContent::End(RecordingEnd::Session))]);
    send(own, session, &seq.to_string(), end).await.ok();
    send(own, session, &(seq + 1).to_string(), output("after the end")).await.expect_error(409, "state_conflict");
    let played = play(&cluster, session).await;
    assert!(played.output.starts_with("shown") && !played.output.contains("early"), "{} bytes", played.output.len());

    // Once the recordings of a user exceed their quota, no more chunks are accepted for the time being.
    cluster.set_policy("terminal.recording_max_user_mib", 1).await;
    let second = cluster.issue_terminal_token(&cluster.user.clone(), allocation, None).await.session;
    send(own, second, "0", begin).await.ok();
    send(own, second, "1", output(&full)).await.ok();
    let answer = send(own, second, "2", output(&full)).await;
    answer.expect_error(503, "service_unavailable");
    assert!(answer.headers.contains_key("retry-after"));
    cluster.set_policy("terminal.recording_max_user_mib", 100).await;
    send(own, second, "2", output(&full)).await.ok();
    agents.iter().for_each(|(_, serving, _)| serving.abort());
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn recording_is_deleted_at_the_end_of_its_retention() {
    let (mut cluster, _, allocation) = start_with_allocation(1, "best-effort", &[]).await;
    let mut sessions = Vec::new();
    for _ in 0..2 {
        let (mut terminal, session) = cluster.terminal(allocation.id).await;
        terminal.enter("exit\n").await;
        assert_eq!(terminal.close_code().await, 1000);
        complete(&cluster, session).await;
        sessions.push(session);
    }
    let (old, young) = (sessions[0], sessions[1]);
    // The recording is backdated.
    cluster.kill9_replica(0);
    sqlx::query(
        "UPDATE entity SET body = jsonb_set(body, '{phase,at}', to_jsonb(to_char(now() - interval '31 days', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"')))
         WHERE id = $1",
    )
    .bind(old)
    .execute(&cluster.pool)
    .await
    .unwrap();
    cluster.seal(old).await;
    sqlx::query("UPDATE recording SET created_at = created_at - interval '31 days' WHERE session_id = $1")
        .bind(old)
        .execute(&cluster.pool)
        .await
        .unwrap();
    cluster.restart_replica(0).await;
    let until = Instant::now() + 2 * WAIT_TIMEOUT;
    while cluster.user.get(&format!("/api/v1/recordings/{old}")).await.status.as_u16() != 404 {
        assert!(Instant::now() < until, "it is kept for ever");
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    let chunks = "SELECT count(*) FROM recording_chunk WHERE session_id = $1";
    // It is not served from the end of its retention, and its chunks are deleted after that.
    while sqlx::query_scalar::<_, i64>(chunks).bind(old).fetch_one(&cluster.pool).await.unwrap() > 0 {
        assert!(Instant::now() < until, "its chunks are kept for ever");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let forgotten =
        cluster.audit_of(old).await.into_iter().filter(|(_, action, ..)| action == "terminals.forget_recording");
    assert_eq!(forgotten.count(), 1);
    assert_eq!(play(&cluster, young).await.markers.len(), 0);
    cluster.shutdown().await;
}
