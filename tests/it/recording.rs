//! Recordings of terminals: what was shown, all of it or with what is missing marked, read by its owner and administrators alone, and
//! played back by a player that somebody else wrote.

use crate::tool::{python_program, root, run};
use reqwest::Method;
use reqwest::header::{CACHE_CONTROL, CONTENT_TYPE};
use serde::Deserialize;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tests::world::client::{Answer, answer_to};
use tests::world::hand::HandAgent;
use tests::world::terminal::Terminal;
use tests::world::{OnboardedNode, PATIENCE, Rented, World, id_of};
use uuid::Uuid;
use wire::recording::{CHUNK_MOST, Ended, Frame, What};

const RATE: &str = "rate_limit.terminal_token_requests_per_minute";
const ENABLED: &str = "terminal.recording_enabled";
const MODE: &str = "terminal.recording_mode";
const LONGEST: &str = "terminal.recording_max_session_mib";
/// The least that an agent may be given: a MiB for each session.
const SMALL_SPOOL: [&str; 2] = ["--recording-spool-mib", "8"];

/// A world in which `user` has an active allocation on a node whose agent has these flags.
async fn rented(replicas: usize, mode: &str, flags: &[&str]) -> (World, OnboardedNode, Rented) {
    let mut world = World::plan().replicas(replicas).policy(RATE, 1000).policy(MODE, mode).start().await;
    let node = world.node_with("h100", flags).await;
    let allocation = world.rent("h100", 1).await;
    allocation.expect_state("active").await;
    (world, node, allocation)
}

/// What a player shows.
#[derive(Debug, Deserialize)]
struct Played {
    header: Value,
    output: String,
    sizes: Vec<String>,
    markers: Vec<String>,
    in_order: bool,
    screen: Vec<String>,
    colours: Vec<Vec<String>>,
}

impl Played {
    /// The numbers of the lines `line-1`, `line-2` and so on, as they were shown.
    fn lines(&self) -> Vec<u32> {
        let lines = self.output.lines().filter_map(|line| line.strip_prefix("line-"));
        lines.filter_map(|number| number.trim_end().parse().ok()).collect()
    }
}

async fn download(world: &World, session: Uuid) -> Answer {
    let answer = world.user.get(&format!("/api/v1/recordings/{session}/asciicast")).await;
    assert_eq!(answer.status.as_u16(), 200, "{answer}");
    answer
}

async fn play(world: &World, session: Uuid) -> Played {
    let answer = download(world, session).await;
    assert_eq!(answer.headers[CONTENT_TYPE], "application/x-asciicast");
    assert_eq!(answer.headers[CACHE_CONTROL], "no-store");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("session.cast");
    std::fs::write(&path, &answer.text).unwrap();
    let mut player = Command::new(python_program("python"));
    player.arg(root().join("tests/it/recording/play.py")).arg(&path);
    let played: Played = serde_json::from_str(&run(player).await).expect("the player says what it shows");
    assert!(played.in_order);
    played
}

/// The recording, once the node has said that nothing follows.
pub(crate) async fn complete(world: &World, session: Uuid) -> Value {
    let path = format!("/api/v1/recordings/{session}");
    let until = Instant::now() + 2 * PATIENCE;
    loop {
        let answer = world.user.get(&path).await;
        if answer.status.as_u16() == 200 && answer.body["complete"] == true {
            return answer.body;
        }
        assert!(Instant::now() < until, "{answer}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// A shell that echoes nothing and says that it is ready.
async fn prompt(terminal: &mut Terminal) {
    terminal.enter("PS1='ready> '; stty -echo; echo be''gun\n").await;
    terminal.shows("begun").await;
}

fn home(world: &World, node: &OnboardedNode, allocation: &Rented) -> PathBuf {
    world.agent_folder(node).join("state/allocations").join(allocation.id.to_string()).join("home")
}

async fn appears(path: &std::path::Path) {
    let until = Instant::now() + PATIENCE;
    while !path.exists() {
        assert!(Instant::now() < until, "{} never appears", path.display());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_terminal_showed_plays_back_with_its_sizes_and_colours_and_without_what_was_only_typed() {
    const PASSWORD: &str = "correct horse battery staple";
    let (mut world, _, allocation) = rented(1, "best-effort", &[]).await;
    world.keep_secret("a password that was typed and not shown", PASSWORD);
    let ticket = world.ticket(&world.user.clone(), allocation.id, None).await;
    let mut terminal = world.gateway().open(&ticket.token, None).await;
    assert_eq!(terminal.attached().await["recording"], "best-effort", "the user is told");
    prompt(&mut terminal).await;
    terminal.control(&json!({ "type": "resize", "columns": 100, "rows": 30 })).await;
    terminal.enter("stty size\n").await;
    terminal.shows("30 100").await;
    terminal.enter("clear; printf 'a \\033[31mred\\033[0m word \\342\\202\\254\\n'; read -rs secret; echo \"${#secret} typed\"\n").await;
    terminal.shows("word").await;
    terminal.enter(&format!("{PASSWORD}\n")).await;
    terminal.shows("28 typed").await;
    terminal.enter("unset secret; exit 3\n").await;
    assert_eq!(terminal.close_code().await, 1000);

    let recording = complete(&world, ticket.session).await;
    assert_eq!((recording["lost_bytes"].as_u64(), &recording["user_id"].is_string()), (Some(0), &true), "{recording}");
    let played = play(&world, ticket.session).await;
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
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn neither_a_killed_replica_nor_a_killed_agent_costs_what_was_shown() {
    let (mut world, node, allocation) = rented(2, "strict", &[]).await;
    let ticket = world.ticket(&world.user.clone(), allocation.id, None).await;
    let mut terminal = world.gateway_at(1).open(&ticket.token, None).await;
    assert_eq!(terminal.attached().await["recording"], "strict");
    prompt(&mut terminal).await;
    terminal.enter("for i in $(seq 1 4000); do echo line-$i; sleep 0.005; done\n").await;
    terminal.shows("line-100\r").await;
    world.kill9_replica(0);
    terminal.shows("line-700\r").await;
    world.kill9_agent(&node);
    while terminal.hear(Duration::from_millis(500)).await {}
    let shown = terminal.text();
    drop(terminal);
    world.restart_agent(&node);
    complete(&world, ticket.session).await;
    let played = play(&world, ticket.session).await;
    assert!(
        played.output.starts_with(&shown),
        "{} bytes were shown, {} are recorded",
        shown.len(),
        played.output.len()
    );
    let lines = played.lines();
    assert_eq!(lines, (1..=u32::try_from(lines.len()).unwrap()).collect::<Vec<_>>());
    assert_eq!(played.markers, ["the node's agent ended here, and the session with it"]);
    world.restart_replica(0).await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_control_plane_that_was_away_gets_the_rest_in_its_order() {
    let (mut world, node, allocation) = rented(1, "best-effort", &[]).await;
    let (mut terminal, session) = world.terminal(allocation.id).await;
    prompt(&mut terminal).await;
    terminal.enter("for i in $(seq 1 3000); do echo line-$i; sleep 0.001; done; touch ~/done\n").await;
    terminal.shows("line-50\r").await;
    world.kill9_replica(0);
    appears(&home(&world, &node, &allocation).join("done")).await;
    world.restart_replica(0).await;
    leave(&mut world, &allocation, session).await;
    assert_eq!(complete(&world, session).await["lost_bytes"], 0);
    let played = play(&world, session).await;
    assert_eq!(played.lines(), (1..=3000).collect::<Vec<_>>());
    assert!(played.markers.is_empty(), "{:?}", played.markers);
    world.end().await;
}

/// The user comes back to their session, and ends it.
async fn leave(world: &mut World, allocation: &Rented, session: Uuid) {
    let ticket = world.ticket(&world.user.clone(), allocation.id, Some(session)).await;
    let mut terminal = world.gateway().open(&ticket.token, None).await;
    terminal.attached().await;
    terminal.enter("exit\n").await;
    assert_eq!(terminal.close_code().await, 1000);
}

/// More than a session's part of the small spool, and a word when it is done.
const MUCH: &str = "for i in $(seq 1 30000); do echo line-$i; echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done; touch ~/done\n";

#[tokio::test(flavor = "multi_thread")]
async fn with_a_full_spool_and_best_effort_the_program_goes_on_and_the_gap_is_marked() {
    let (mut world, node, allocation) = rented(1, "best-effort", &SMALL_SPOOL).await;
    let (mut terminal, session) = world.terminal(allocation.id).await;
    prompt(&mut terminal).await;
    terminal.enter(MUCH).await;
    terminal.shows("line-20\r").await;
    world.kill9_replica(0);
    appears(&home(&world, &node, &allocation).join("done")).await;
    world.restart_replica(0).await;
    leave(&mut world, &allocation, session).await;
    let recording = complete(&world, session).await;
    let lost = recording["lost_bytes"].as_u64().unwrap();
    assert!(lost > 0, "{recording}");
    let played = play(&world, session).await;
    let gaps = played.markers.iter().filter(|marker| marker.contains("bytes are missing")).count();
    assert!(gaps > 0, "{:?}", played.markers);
    let lines = played.lines();
    // A gap begins and ends within lines, and what is left of these two may read as any number.
    let out_of_order = lines.windows(2).filter(|pair| pair[0] > pair[1]).count();
    assert!(lines.len() < 30_000 && out_of_order <= gaps, "{} lines, {out_of_order} out of order", lines.len());
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_full_spool_and_strict_the_program_waits_and_nothing_is_missing() {
    let (mut world, node, allocation) = rented(1, "strict", &SMALL_SPOOL).await;
    let (mut terminal, session) = world.terminal(allocation.id).await;
    prompt(&mut terminal).await;
    terminal.enter(MUCH).await;
    terminal.shows("line-20\r").await;
    world.kill9_replica(0);
    let done = home(&world, &node, &allocation).join("done");
    let spool = world.agent_folder(&node).join("state/recordings").join(session.to_string());
    tokio::time::sleep(Duration::from_secs(6)).await;
    let spooled: u64 = std::fs::read_dir(&spool).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum();
    assert!(!done.exists() && spooled <= 1 << 20, "the program waits; {spooled} bytes are in the spool");
    world.restart_replica(0).await;
    appears(&done).await;
    leave(&mut world, &allocation, session).await;
    assert_eq!(complete(&world, session).await["lost_bytes"], 0);
    assert_eq!(play(&world, session).await.lines(), (1..=30_000).collect::<Vec<_>>());
    assert!(!spool.exists(), "what is sent is gone");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_switches_recording_off_and_on_in_the_middle_and_the_user_is_told() {
    let (mut world, _, allocation) = rented(1, "best-effort", &[]).await;
    let (mut terminal, session) = world.terminal(allocation.id).await;
    prompt(&mut terminal).await;
    terminal.enter("echo fir''st\n").await;
    terminal.shows("first").await;
    world.set_policy(ENABLED, false).await;
    assert_eq!(terminal.told("recording").await["mode"], "off");
    terminal.enter("echo sec''ond\n").await;
    terminal.shows("second").await;
    world.set_policy(MODE, "strict").await;
    world.set_policy(ENABLED, true).await;
    assert_eq!(terminal.told("recording").await["mode"], "strict");
    terminal.enter("echo thi''rd; exit\n").await;
    assert_eq!(terminal.close_code().await, 1000);
    complete(&world, session).await;
    let played = play(&world, session).await;
    let has = |word: &str| played.output.contains(word);
    assert!(has("first") && !has("second") && has("third"), "{}", played.output);
    assert_eq!(played.markers, ["recording is off from here", "recording goes on from here"]);
    let actions: Vec<String> = world.audit_of(session).await.into_iter().map(|(_, action, ..)| action).collect();
    assert_eq!(actions.iter().filter(|action| *action == "terminals.change_recording").count(), 2, "{actions:?}");

    // One that begins without is not recorded at all, and says so.
    world.set_policy(ENABLED, false).await;
    let ticket = world.ticket(&world.user.clone(), allocation.id, None).await;
    let mut silent = world.gateway().open(&ticket.token, None).await;
    assert_eq!(silent.attached().await["recording"], "off");
    silent.enter("exit\n").await;
    assert_eq!(silent.close_code().await, 1000);
    world.user.get(&format!("/api/v1/recordings/{}", ticket.session)).await.refused(404, "not_found");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stranger_learns_of_no_recording_and_whoever_reads_one_is_written_down_first() {
    let (mut world, _, allocation) = rented(1, "best-effort", &[]).await;
    let (mut terminal, session) = world.terminal(allocation.id).await;
    terminal.enter("exit\n").await;
    assert_eq!(terminal.close_code().await, 1000);
    complete(&world, session).await;
    let paths = [
        format!("/api/v1/recordings/{session}"),
        format!("/api/v1/recordings/{session}/asciicast"),
        format!("/api/v1/allocations/{}/recordings", allocation.id),
    ];
    for path in &paths {
        world.other_user.once(Method::GET, path, None).await.refused(404, "not_found");
        world.stranger().once(Method::GET, path, None).await.refused(401, "unauthenticated");
    }
    world.user.once(Method::GET, "/api/v1/admin/recordings", None).await.refused(403, "forbidden");
    for by in [&world.user, &world.admin] {
        let listed = by.get(&paths[2]).await.ok();
        assert_eq!(listed["items"][0]["id"], session.to_string(), "{listed}");
        assert_eq!(by.get(&paths[1]).await.status.as_u16(), 200);
    }
    let all = world.admin.get(&format!("/api/v1/admin/recordings?allocation_id={}", allocation.id)).await.ok();
    assert_eq!(all["items"].as_array().unwrap().len(), 1, "{all}");
    let readers: Vec<String> = world
        .audit_of(session)
        .await
        .into_iter()
        .filter(|(_, action, ..)| action == "terminals.read_recording")
        .map(|(actor, ..)| actor)
        .collect();
    let subject = |name: &str| format!("user:{}", world.identity.person(name).unwrap().id);
    assert_eq!(readers, [subject("user"), subject("admin")], "each read once, and no refusal");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_longest_that_is_raised_holds_for_a_session_that_had_reached_it_and_strict_ends_one_that_has() {
    let (mut world, _, allocation) = rented(1, "best-effort", &[]).await;
    world.set_policy(LONGEST, 1).await;
    let (mut terminal, session) = world.terminal(allocation.id).await;
    prompt(&mut terminal).await;
    terminal.enter("head -c 1500000 /dev/zero | tr '\\0' x; echo; echo past the e''nd\n").await;
    terminal.shows("past the end").await;
    assert_eq!(terminal.told("recording").await["mode"], "off");
    world.set_policy(LONGEST, 2).await;
    assert_eq!(terminal.told("recording").await["mode"], "best-effort");
    terminal.enter("echo recorded a''gain\n").await;
    terminal.shows("recorded again").await;
    terminal.enter("head -c 1500000 /dev/zero | tr '\\0' x; echo; echo past it a''gain\n").await;
    terminal.shows("past it again").await;
    assert_eq!(terminal.told("recording").await["mode"], "off");
    world.set_policy(MODE, "strict").await;
    assert_eq!(terminal.close_code().await, 1000, "nothing more is shown that is not recorded");
    let recording = complete(&world, session).await;
    assert!(recording["lost_bytes"].as_u64().unwrap() > 400_000, "{recording}");
    let played = play(&world, session).await;
    let has = |words: &str| played.output.contains(words);
    assert!(!has("past the end") && has("recorded again") && !has("past it again"));
    let gaps = played.markers.iter().filter(|marker| marker.contains("bytes are missing")).count();
    assert!(gaps > 0, "{:?}", played.markers);
    world.end().await;
}

fn chunk(frames: &[(u64, What)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    frames.iter().for_each(|(micros, what)| Frame { micros: *micros, what: what.clone() }.write(&mut bytes));
    bytes
}

async fn send(agent: &HandAgent, session: Uuid, seq: &str, frames: Vec<u8>) -> Answer {
    let path = format!("terminals/{session}/recording/{seq}");
    let request = agent.request(Method::PUT, &path).header(CONTENT_TYPE, "application/octet-stream").body(frames);
    answer_to(request).await.expect("an answer")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hostile_agent_adds_nothing_but_the_next_chunk_of_its_own_living_recordings() {
    let mut world = World::plan().policy(RATE, 1000).policy(LONGEST, 1).start().await;
    let mut agents = Vec::new();
    for _ in 0..2 {
        let node = world.register("h100").await;
        let bundle = world.bundle(&node).await;
        let agent = Arc::new(HandAgent::onboard(&bundle, 8).await);
        agents.push((node, tokio::spawn(Arc::clone(&agent).serve()), agent));
    }
    let node_of = |(node, ..): &(OnboardedNode, tokio::task::JoinHandle<()>, Arc<HandAgent>)| node.id;
    let body =
        json!({ "sku": "h100", "region_code": tests::world::REGION, "gpu_count": 1, "node_id": node_of(&agents[0]) });
    let allocation = id_of(&world.user.post("/api/v1/allocations", &body).await.created());
    world.user.wait_until(&format!("/api/v1/allocations/{allocation}"), "active", |it| it["state"] == "active").await;
    let session = world.ticket(&world.user.clone(), allocation, None).await.session;
    let (own, other) = (&agents[0].2, &agents[1].2);

    let begin = chunk(&[(0, What::Begin { columns: 80, rows: 24 }), (1, What::Output(b"shown".to_vec()))]);
    let output = |text: &str| chunk(&[(2, What::Output(text.as_bytes().to_vec()))]);
    send(other, session, "0", begin.clone()).await.refused(404, "not_found");
    send(own, Uuid::nil(), "0", begin.clone()).await.refused(404, "not_found");
    send(own, session, "1", output("early")).await.refused(409, "state_conflict");
    send(own, session, "0", output("no beginning")).await.refused(400, "invalid_request");
    send(own, session, "0", b"rubbish".to_vec()).await.refused(400, "invalid_request");
    send(own, session, "0", Vec::new()).await.refused(400, "invalid_request");
    send(own, session, "-1", begin.clone()).await.refused(400, "invalid_request");
    send(own, session, "0", vec![0; CHUNK_MOST + 1]).await.refused(413, "payload_too_large");
    own.send(Method::PUT, &format!("terminals/{session}/recording/0"), Some(&json!({})))
        .await
        .refused(415, "unsupported_media_type");
    assert_eq!(send(own, session, "0", begin.clone()).await.ok()["recorded"], "new");
    assert_eq!(send(own, session, "0", begin.clone()).await.ok()["recorded"], "already");
    send(own, session, "0", chunk(&[(0, What::Begin { columns: 1, rows: 1 })])).await.refused(409, "state_conflict");
    send(own, session, "2", output("late")).await.refused(409, "state_conflict");
    let full = "x".repeat(60_000);
    let mut seq = 1;
    let answer = loop {
        let answer = send(own, session, &seq.to_string(), output(&full)).await;
        if !answer.status.is_success() {
            break answer;
        }
        seq += 1;
    };
    answer.refused(413, "payload_too_large");
    assert_eq!(seq - 1, (1 << 20) / full.len(), "a MiB, and no more");
    let end = chunk(&[(3, What::End(Ended::Session))]);
    send(own, session, &seq.to_string(), end).await.ok();
    send(own, session, &(seq + 1).to_string(), output("after the end")).await.refused(409, "state_conflict");
    let played = play(&world, session).await;
    assert!(played.output.starts_with("shown") && !played.output.contains("early"), "{} bytes", played.output.len());

    // Once its user's recordings together are over what there is room for, nothing more is taken for the time being.
    world.set_policy("terminal.recording_max_user_mib", 1).await;
    let second = world.ticket(&world.user.clone(), allocation, None).await.session;
    send(own, second, "0", begin).await.ok();
    send(own, second, "1", output(&full)).await.ok();
    let answer = send(own, second, "2", output(&full)).await;
    answer.refused(503, "service_unavailable");
    assert!(answer.headers.contains_key("retry-after"));
    world.set_policy("terminal.recording_max_user_mib", 100).await;
    send(own, second, "2", output(&full)).await.ok();
    agents.iter().for_each(|(_, serving, _)| serving.abort());
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recording_is_deleted_when_it_is_as_old_as_its_policy_lets_it_be() {
    let (mut world, _, allocation) = rented(1, "best-effort", &[]).await;
    let mut sessions = Vec::new();
    for _ in 0..2 {
        let (mut terminal, session) = world.terminal(allocation.id).await;
        terminal.enter("exit\n").await;
        assert_eq!(terminal.close_code().await, 1000);
        complete(&world, session).await;
        sessions.push(session);
    }
    let (old, young) = (sessions[0], sessions[1]);
    // As if it had been made long ago.
    world.kill9_replica(0);
    sqlx::query(
        "UPDATE entity SET body = jsonb_set(body, '{phase,at}', to_jsonb(to_char(now() - interval '31 days', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"')))
         WHERE id = $1",
    )
    .bind(old)
    .execute(&world.pool)
    .await
    .unwrap();
    world.seal(old).await;
    sqlx::query("UPDATE recording SET created_at = created_at - interval '31 days' WHERE session_id = $1")
        .bind(old)
        .execute(&world.pool)
        .await
        .unwrap();
    world.restart_replica(0).await;
    let until = Instant::now() + 2 * PATIENCE;
    while world.user.get(&format!("/api/v1/recordings/{old}")).await.status.as_u16() != 404 {
        assert!(Instant::now() < until, "it is kept for ever");
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    let chunks = "SELECT count(*) FROM recording_chunk WHERE session_id = $1";
    let left: i64 = sqlx::query_scalar(chunks).bind(old).fetch_one(&world.pool).await.unwrap();
    assert_eq!(left, 0);
    let forgotten =
        world.audit_of(old).await.into_iter().filter(|(_, action, ..)| action == "terminals.forget_recording");
    assert_eq!(forgotten.count(), 1);
    assert_eq!(play(&world, young).await.markers.len(), 0);
    world.end().await;
}
