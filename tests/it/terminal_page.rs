//! The terminal page, in a real Chromium: an access token opens a shell of an allocation.

use crate::browser::Browser;
use crate::external_tools::{root, run};
use axum::Router;
use axum::response::Html;
use axum::routing::get;
use secrecy::ExposeSecret as _;
use serde_json::json;
use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};
use tests::cluster::flaky_link::FlakyLink;
use tests::cluster::{AllocationHandle, TestCluster, WAIT_TIMEOUT};
use tokio::net::TcpListener;

/// A cluster in which `user` has an active allocation.
async fn start_with_allocation() -> (TestCluster, AllocationHandle) {
    let mut cluster = TestCluster::start().await;
    cluster.node("h100").await;
    let allocation = cluster.rent_active("h100", 1).await;
    (cluster, allocation)
}

fn page_of(cluster: &TestCluster, allocation: &AllocationHandle) -> String {
    format!("{}/terminal/{}", cluster.anonymous_client().base(), allocation.id)
}

fn access_token(cluster: &mut TestCluster) -> String {
    let token = cluster.identity.token_of("user").expect("the provider signs").expose_secret().to_owned();
    cluster.register_secret("an access token given to the page", &token);
    token
}

/// Gives the page an access token, which is in its memory alone.
async fn sign_in(browser: &mut Browser, cluster: &mut TestCluster) {
    let token = access_token(cluster);
    browser.fill("#token", &token).await;
    browser.click("#sign-in button").await;
    browser.expect_text("#state", "Connected").await;
    let stored = "() => JSON.stringify([{ ...sessionStorage }, { ...localStorage }, window.name, history.state, document.cookie])";
    let stored = browser.run(stored, json!(null)).await;
    assert!(
        !stored.as_str().expect("a text").contains("eyJ"),
        "another page of the service could read the token: {stored}"
    );
}

/// Signs in and connects the page, with a shell that prints nothing on its own.
async fn connected(browser: &mut Browser, cluster: &mut TestCluster, allocation: &AllocationHandle) {
    assert_eq!(browser.open(&page_of(cluster, allocation)).await, 200);
    sign_in(browser, cluster).await;
    browser.enter("PS1='ready> '; clear; echo be''gun").await;
    browser.expect_screen("begun").await;
}

/// Asserts that the page made no errors, dialogs, windows or requests to other hosts.
async fn expect_well_behaved(browser: &mut Browser, base: &str) {
    let seen = browser.activity().await;
    assert!(seen.complaints.is_empty() && seen.dialogs.is_empty() && seen.windows == 0, "{seen:?}");
    let host = base.trim_start_matches("https://");
    for url in &seen.asked {
        let own = ["https://", "wss://"].iter().any(|scheme| url.starts_with(&format!("{scheme}{host}/")));
        assert!(own || url.starts_with("data:"), "the page asks {url}");
        assert!(!url.contains("gputrm_") && !url.contains("eyJ"), "a token stands in {url}");
    }
    assert!(seen.asked.iter().any(|url| url.starts_with("wss://")), "{seen:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn access_token_opens_a_shell_in_a_browser() {
    let (mut cluster, allocation) = start_with_allocation().await;
    let mut browser = Browser::start(&[]).await;
    let page = page_of(&cluster, &allocation);

    // Without a valid token the page shows the sign-in form and no terminal.
    browser.open(&page).await;
    assert_eq!(browser.text_of("#screen").await, None);
    browser.fill("#token", "eyJhbGciOiJub25lIn0.e30.").await;
    browser.click("#sign-in button").await;
    browser.expect_text("#state", "does not hold").await;
    assert!(browser.text_of("#sign-in").await.is_some());

    connected(&mut browser, &mut cluster, &allocation).await;
    browser.enter("echo it is $((6 * 7)) on $GPUAAS_ALLOCATION_ID").await;
    browser.expect_screen(&format!("it is 42 on {}", allocation.id)).await;

    // A colour of a program's own is a style attribute, which the policy refuses in markup.
    browser.enter("printf '\\033[38;2;10;20;30mtr''ue colour\\033[0m\\n'").await;
    browser.expect_screen("true colour").await;
    let colour = "() => getComputedStyle([...document.querySelectorAll('.xterm-rows span')].find(it => it.textContent.includes('true colour'))).color";
    assert_eq!(browser.run(colour, json!(null)).await, "rgb(10, 20, 30)");

    // The program has the size of the page.
    let size = async |browser: &mut Browser, name: &str| {
        browser.enter(&format!("echo {name}-i''s `stty size | tr ' ' x`.")).await;
        browser.expect_screen(&format!("{name}-is ")).await;
        let screen = browser.screen().await;
        let found = screen.rsplit_once(&format!("{name}-is ")).and_then(|(_, rest)| rest.split_once('.'));
        let (rows, columns) = found.and_then(|(size, _)| size.split_once('x')).expect("a size");
        (rows.parse::<u32>().unwrap(), columns.parse::<u32>().unwrap())
    };
    let before = size(&mut browser, "first").await;
    browser.resize(1400, 900).await;
    // The page fits the terminal a moment after its own size has changed, and the program learns of it after that.
    let until = Instant::now() + WAIT_TIMEOUT;
    for attempt in 0.. {
        let after = size(&mut browser, &format!("second{attempt}")).await;
        if after.0 > before.0 && after.1 > before.1 {
            break;
        }
        assert!(Instant::now() < until, "{before:?} {after:?}");
    }

    // After a reload the page resumes the session, and shows its earlier output.
    browser.enter("remembered=yes; echo no''ted").await;
    browser.expect_screen("noted").await;
    browser.reload().await;
    sign_in(&mut browser, &mut cluster).await;
    browser.expect_screen("noted").await;
    // For half a second after that the page takes no input.
    tokio::time::sleep(Duration::from_secs(1)).await;
    browser.enter("echo still re''membered=$remembered").await;
    browser.expect_screen("still remembered=yes").await;

    browser.enter("exit 7").await;
    browser.expect_text("#state", "The program ended with 7").await;
    browser.expect_text("#next", "Open a new session").await;
    browser.click("#next").await;
    browser.expect_text("#state", "Connected").await;
    browser.enter("echo an''other one, re''membered=$remembered.").await;
    browser.expect_screen("another one, remembered=.").await;

    // The keyboard focus can leave the terminal, to the button that ends the session.
    browser.press("Control+F6").await;
    browser.press("Enter").await;
    browser.expect_text("#state", "The program was ended").await;

    assert_eq!(
        (browser.url().await, browser.title().await),
        (page, format!("Terminal {} · gpuaas", &allocation.id.to_string()[..8]))
    );
    expect_well_behaved(&mut browser, cluster.anonymous_client().base()).await;

    // Signing out removes everything from the tab's storage.
    browser.click("#forget").await;
    browser.expect_text("#sign-in", "Who are you?").await;
    assert_eq!(browser.run("() => sessionStorage.length", json!(null)).await, 0);
    browser.close().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn page_lists_open_sessions_resumes_one_and_ends_another() {
    let (mut cluster, allocation) = start_with_allocation().await;
    let detached = |id: uuid::Uuid| format!("/api/v1/admin/terminal-sessions/{id}");
    let mut tabs = Vec::new();
    for name in ["first", "second"] {
        let (mut terminal, session) = cluster.terminal(allocation.id).await;
        terminal.enter(&format!("tab={name}; echo be''gun\n")).await;
        terminal.expect_output("begun").await;
        drop(terminal);
        cluster.admin.wait_until(&detached(session), "detached", |session| session["state"] == "detached").await;
        tabs.push(session);
    }
    let mut browser = Browser::start(&[]).await;
    connected(&mut browser, &mut cluster, &allocation).await;
    browser.click("#sessions summary").await;
    browser.expect_text("#sessions-count", "(3)").await;
    browser.expect_text(&format!("[data-session='{}']", tabs[0]), "no browser is connected. It ends in").await;
    browser.click(&format!("[data-session='{}'] button:text('End')", tabs[0])).await;
    browser.expect_text("#sessions-count", "(2)").await;
    let ended = cluster.admin.get(&detached(tabs[0])).await.ok();
    assert_eq!(ended["close_reason"], "ended_by_user", "{ended}");

    browser.click(&format!("[data-session='{}'] button:text('Resume')", tabs[1])).await;
    browser.expect_text(&format!("[data-session='{}']", tabs[1]), "shown here").await;
    browser.click("#screen").await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    browser.enter("echo it is the $tab tab").await;
    browser.expect_screen("it is the second tab").await;
    expect_well_behaved(&mut browser, cluster.anonymous_client().base()).await;
    browser.close().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn page_that_loses_its_connection_reconnects_without_a_lost_byte() {
    let (mut cluster, allocation) = start_with_allocation().await;
    let public: SocketAddr = cluster.public.address();
    let line = FlakyLink::to(public).await.unwrap();
    // The page has the service's own address, and reaches it over a link that can be cut.
    let over_the_line = format!("--host-resolver-rules=MAP {public} {}", line.address());
    let mut browser = Browser::start(&[over_the_line]).await;
    connected(&mut browser, &mut cluster, &allocation).await;
    // No row is full: a terminal that is resized while its cursor is behind the last column draws over that column.
    let count =
        "for i in $(seq 1 500); do printf %s, $i; [ $((i % 25)) -gt 0 ] || echo; sleep 0.01; done; echo all''done";
    browser.enter(count).await;
    browser.expect_screen("40,41,").await;
    line.cut();
    browser.expect_text("#state", "Reconnecting").await;
    // Between two waits it tries to connect, and shows neither.
    browser.expect_text("#countdown", "in ").await;
    browser.expect_text("#next", "Reconnect now").await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    line.restore();
    browser.expect_text("#state", "Connected").await;
    browser.expect_screen("alldone").await;
    let expected: String = (1..=500).map(|i| format!("{i},")).collect();
    let screen = browser.screen().await;
    assert!(screen.contains(&format!("{expected}alldone")), "{screen}");
    // And once more.
    line.cut();
    browser.expect_text("#state", "Reconnecting").await;
    line.restore();
    browser.expect_text("#state", "Connected").await;
    browser.enter("echo ba''ck").await;
    browser.expect_screen("back").await;
    browser.close().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_program_output_is_drawn_and_executes_nothing() {
    let (mut cluster, allocation) = start_with_allocation().await;
    let mut browser = Browser::start(&[]).await;
    connected(&mut browser, &mut cluster, &allocation).await;
    let title = browser.title().await;
    // A title; a link with another target than its text; the clipboard; the size and position of a window; the title, reported as input.
    for hostile in [
        r"printf '\033]0;owned\007\033]2;owned\007'",
        r"printf '\033]8;;https://evil.example/\033\\a link of this page\033]8;;\033\\\n'",
        r"printf '\033]52;c;b3duZWQ=\007\033[8;5;5t\033[3;0;0t\033[21t'",
        r"printf '<img src=x onerror=document.title=1><script>document.title=2</script><a href=//evil.example>x</a>\n'",
        r"printf '\033[?1049h\033[2J\033[?1049l\033#8\033c'; echo sur''vived",
    ] {
        browser.enter(hostile).await;
    }
    browser.expect_screen("survived").await;
    browser.enter(r"clear; printf '\033]8;;https://evil.example/\033\\link\033]8;;\033\\\n<b id=bold>not markup</b>\n'; echo en''ded").await;
    browser.expect_screen("ended").await;
    browser.expect_screen("<b id=bold>not markup</b>").await;
    // The position of the link.
    browser.click_at("#screen", 30, 16).await;
    let markup = browser.markup("#screen").await;
    for tag in ["<b id", "<img", "<script", "<a "] {
        assert!(!markup.contains(tag), "{tag} came out of the program");
    }
    assert_eq!(browser.title().await, title);
    browser.click("#screen").await;
    browser.enter("echo still-$((40 + 2))").await;
    browser.expect_screen("still-42").await;
    expect_well_behaved(&mut browser, cluster.anonymous_client().base()).await;
    browser.close().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn page_shows_that_its_session_was_taken_over_and_that_the_allocation_is_gone() {
    let (mut cluster, allocation) = start_with_allocation().await;
    let mut browser = Browser::start(&[]).await;
    connected(&mut browser, &mut cluster, &allocation).await;
    let stored = browser.run("() => Object.values(sessionStorage)", json!(null)).await;
    let session = stored.as_array().unwrap().iter().find_map(|value| value.as_str()?.parse().ok()).expect("a session");
    let ticket = cluster.issue_terminal_token(&cluster.user.clone(), allocation.id, Some(session)).await;
    let mut elsewhere = cluster.gateway().open(&ticket.token, None).await;
    elsewhere.attached().await;
    browser.expect_text("#state", "open in another place").await;
    browser.expect_text("#next", "Go on here").await;
    browser.click("#next").await;
    browser.expect_text("#state", "Connected").await;
    assert_eq!(elsewhere.close_code().await, 4409);

    allocation.release().await;
    browser.expect_text("#state", "released").await;
    allocation.expect_state("released").await;
    browser.click("#next").await;
    browser.expect_text("#next", "Open a new session").await;
    browser.click("#next").await;
    browser.expect_text("#state", "An allocation that is released has no terminal").await;
    browser.close().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn page_of_another_origin_opens_no_terminal_and_embeds_none() {
    let (mut cluster, allocation) = start_with_allocation().await;
    let foreign = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let origin = format!("http://{}", foreign.local_addr().unwrap());
    let serving = axum::serve(foreign, Router::new().route("/", get(|| async { Html("<!doctype html><p>foreign") })));
    let serving = tokio::spawn(serving.into_future());
    let mut browser = Browser::start(&[]).await;
    browser.open(&origin).await;

    let ticket = cluster.issue_terminal_token(&cluster.user.clone(), allocation.id, None).await;
    let base = cluster.anonymous_client().base().to_owned();
    let gateway = format!("{}/ws/v1/terminal", base.replace("https://", "wss://"));
    let opens = "({ url, token }) => new Promise(done => { \
        const socket = new WebSocket(url, ['gpu.terminal.v1', `token.${token}`]); \
        socket.onopen = () => done('open'); socket.onclose = event => done(event.code); })";
    let how = browser.run(opens, json!({ "url": gateway, "token": ticket.token })).await;
    assert_eq!(how, 1006, "a page of another origin");
    // The token was not consumed by that.
    cluster.gateway().open(&ticket.token, None).await.attached().await;

    let asks = "path => fetch(path, { method: 'POST', headers: { authorization: 'Bearer x' } }).then(() => 'answered', () => 'refused')";
    let tokens = format!("{base}/api/v1/allocations/{}/terminal-tokens", allocation.id);
    assert_eq!(browser.run(asks, json!(tokens)).await, "refused");

    let frames = "url => new Promise(done => { const frame = document.createElement('iframe'); frame.onload = done; \
        frame.src = url; document.body.append(frame); }).then(() => null)";
    browser.run(frames, json!(page_of(&cluster, &allocation))).await;
    let seen = browser.activity().await;
    assert!(seen.complaints.iter().any(|line| line.contains("frame-ancestors")), "{seen:?}");
    assert!(!seen.asked.iter().any(|url| url.contains("/terminal/assets/")), "the page was begun: {seen:?}");
    browser.close().await;
    serving.abort();
    cluster.shutdown().await;
}

#[tokio::test]
async fn unit_tests_of_the_page_pass() {
    let mut tests = Command::new("node");
    tests.arg("--test").current_dir(root().join("edge/terminal-page"));
    let output = run(tests).await;
    assert!(output.contains("pass ") && !output.contains("\n# pass 0"), "{output}");
}
