//! The page with a terminal, in a real Chromium: whoever has a browser and an access token has a shell on what they rent.

use crate::browser::Browser;
use crate::tool::{root, run};
use axum::Router;
use axum::response::Html;
use axum::routing::get;
use secrecy::ExposeSecret as _;
use serde_json::json;
use std::net::SocketAddr;
use std::process::Command;
use tests::world::line::Line;
use tests::world::{Rented, World};
use tokio::net::TcpListener;

/// A world in which `user` has an active allocation.
async fn rented() -> (World, Rented) {
    let mut world = World::start().await;
    world.node("h100").await;
    let allocation = world.rent("h100", 1).await;
    allocation.expect_state("active").await;
    (world, allocation)
}

fn page_of(world: &World, allocation: &Rented) -> String {
    format!("{}/terminal/{}", world.stranger().base(), allocation.id)
}

fn access_token(world: &mut World) -> String {
    let token = world.identity.token_of("user").expect("the provider signs").expose_secret().to_owned();
    world.keep_secret("an access token given to the page", &token);
    token
}

/// The page, signed in and connected, with a shell that says nothing of its own.
async fn connected(browser: &mut Browser, world: &mut World, allocation: &Rented) {
    assert_eq!(browser.open(&page_of(world, allocation)).await, 200);
    let token = access_token(world);
    browser.fill("#token", &token).await;
    browser.click("#sign-in button").await;
    browser.reads("#state", "Connected").await;
    browser.enter("PS1='ready> '; clear; echo be''gun").await;
    browser.draws("begun").await;
}

/// It did what a page may, and no more.
async fn expect_well_behaved(browser: &mut Browser, base: &str) {
    let seen = browser.seen().await;
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
async fn with_a_browser_and_an_access_token_a_user_has_a_shell_on_what_they_rent() {
    let (mut world, allocation) = rented().await;
    let mut browser = Browser::start(&[]).await;
    let page = page_of(&world, &allocation);

    // Whoever is not known is asked again; nothing of the terminal is there.
    browser.open(&page).await;
    assert_eq!(browser.shown("#screen").await, None);
    browser.fill("#token", "eyJhbGciOiJub25lIn0.e30.").await;
    browser.click("#sign-in button").await;
    browser.reads("#state", "does not hold").await;
    assert!(browser.shown("#sign-in").await.is_some());

    connected(&mut browser, &mut world, &allocation).await;
    browser.enter("echo it is $((6 * 7)) on $GPUAAS_ALLOCATION_ID").await;
    browser.draws(&format!("it is 42 on {}", allocation.id)).await;

    // The program's size is the page's.
    let size = async |browser: &mut Browser, name: &str| {
        browser.enter(&format!("echo {name}-i''s `stty size | tr ' ' x`.")).await;
        browser.draws(&format!("{name}-is ")).await;
        let screen = browser.screen().await;
        let found = screen.rsplit_once(&format!("{name}-is ")).and_then(|(_, rest)| rest.split_once('.'));
        let (rows, columns) = found.and_then(|(size, _)| size.split_once('x')).expect("a size");
        (rows.parse::<u32>().unwrap(), columns.parse::<u32>().unwrap())
    };
    let before = size(&mut browser, "first").await;
    browser.resize(1400, 900).await;
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    let after = size(&mut browser, "second").await;
    assert!(after.0 > before.0 && after.1 > before.1, "{before:?} {after:?}");

    // Loaded anew, the page goes on with the session, and shows what was there.
    browser.enter("remembered=yes").await;
    browser.reload().await;
    browser.reads("#state", "Connected").await;
    browser.draws("second-is").await;
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    browser.enter("echo still re''membered=$remembered").await;
    browser.draws("still remembered=yes").await;

    browser.enter("exit 7").await;
    browser.reads("#state", "The program ended with 7").await;
    browser.reads("#next", "Open a new session").await;
    browser.click("#next").await;
    browser.reads("#state", "Connected").await;
    browser.enter("echo an''other one, re''membered=$remembered.").await;
    browser.draws("another one, remembered=.").await;

    // The keyboard leads out of the terminal, to the button that ends the session.
    browser.press("Control+F6").await;
    browser.press("Enter").await;
    browser.reads("#state", "The program was ended").await;

    assert_eq!(
        (browser.url().await, browser.title().await),
        (page, format!("Terminal {}", &allocation.id.to_string()[..8]))
    );
    expect_well_behaved(&mut browser, world.stranger().base()).await;

    // Whoever signs out leaves nothing in the tab.
    browser.click("#forget").await;
    browser.reads("#sign-in", "Who are you?").await;
    assert_eq!(browser.run("() => sessionStorage.length", json!(null)).await, 0);
    browser.end().await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn page_lists_open_sessions_resumes_one_and_ends_another() {
    let (mut world, allocation) = rented().await;
    let detached = |id: uuid::Uuid| format!("/api/v1/admin/terminal-sessions/{id}");
    let mut tabs = Vec::new();
    for name in ["first", "second"] {
        let (mut terminal, session) = world.terminal(allocation.id).await;
        terminal.enter(&format!("tab={name}; echo be''gun\n")).await;
        terminal.shows("begun").await;
        drop(terminal);
        world.admin.wait_until(&detached(session), "detached", |session| session["state"] == "detached").await;
        tabs.push(session);
    }
    let mut browser = Browser::start(&[]).await;
    connected(&mut browser, &mut world, &allocation).await;
    browser.click("#sessions summary").await;
    browser.reads("#sessions-count", "(3)").await;
    browser.reads(&format!("[data-session='{}']", tabs[0]), "nobody is connected. It ends in").await;
    browser.click(&format!("[data-session='{}'] button:text('End')", tabs[0])).await;
    browser.reads("#sessions-count", "(2)").await;
    let ended = world.admin.get(&detached(tabs[0])).await.ok();
    assert_eq!(ended["close_reason"], "ended_by_user", "{ended}");

    browser.click(&format!("[data-session='{}'] button:text('Resume')", tabs[1])).await;
    browser.reads(&format!("[data-session='{}']", tabs[1]), "shown here").await;
    browser.click("#screen").await;
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    browser.enter("echo it is the $tab tab").await;
    browser.draws("it is the second tab").await;
    expect_well_behaved(&mut browser, world.stranger().base()).await;
    browser.end().await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_that_loses_its_connection_comes_back_without_a_byte_lost() {
    let (mut world, allocation) = rented().await;
    let public: SocketAddr = world.public.address();
    let line = Line::to(public).await.unwrap();
    // The page has the service's own address, and reaches it over a line that can be cut.
    let over_the_line = format!("--host-resolver-rules=MAP {public} {}", line.address());
    let mut browser = Browser::start(&[over_the_line]).await;
    connected(&mut browser, &mut world, &allocation).await;
    // No line is full: a terminal that is resized while its cursor waits behind the last column draws over that one.
    let count =
        "for i in $(seq 1 500); do printf %s, $i; [ $((i % 25)) -gt 0 ] || echo; sleep 0.01; done; echo all''done";
    browser.enter(count).await;
    browser.draws("40,41,").await;
    line.cut();
    browser.reads("#state", "Reconnecting").await;
    assert!(browser.shown("#countdown").await.is_some_and(|text| text.starts_with("in ")));
    assert_eq!(browser.shown("#next").await.as_deref(), Some("Reconnect now"));
    tokio::time::sleep(std::time::Duration::from_secs(2)).await;
    line.mend();
    browser.reads("#state", "Connected").await;
    browser.draws("alldone").await;
    let expected: String = (1..=500).map(|i| format!("{i},")).collect();
    let screen = browser.screen().await;
    assert!(screen.contains(&format!("{expected}alldone")), "{screen}");
    // And once more.
    line.cut();
    browser.reads("#state", "Reconnecting").await;
    line.mend();
    browser.reads("#state", "Connected").await;
    browser.enter("echo ba''ck").await;
    browser.draws("back").await;
    browser.end().await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_a_program_writes_is_drawn_and_does_nothing() {
    let (mut world, allocation) = rented().await;
    let mut browser = Browser::start(&[]).await;
    connected(&mut browser, &mut world, &allocation).await;
    let title = browser.title().await;
    // A title; a link that leads elsewhere than it says; the clipboard; the size and place of a window; the title, to be typed by the terminal.
    for hostile in [
        r"printf '\033]0;owned\007\033]2;owned\007'",
        r"printf '\033]8;;https://evil.example/\033\\a link of this page\033]8;;\033\\\n'",
        r"printf '\033]52;c;b3duZWQ=\007\033[8;5;5t\033[3;0;0t\033[21t'",
        r"printf '<img src=x onerror=document.title=1><script>document.title=2</script><a href=//evil.example>x</a>\n'",
        r"printf '\033[?1049h\033[2J\033[?1049l\033#8\033c'; echo sur''vived",
    ] {
        browser.enter(hostile).await;
    }
    browser.draws("survived").await;
    browser.enter(r"clear; printf '\033]8;;https://evil.example/\033\\link\033]8;;\033\\\n<b id=bold>not markup</b>\n'; echo en''ded").await;
    browser.draws("ended").await;
    browser.draws("<b id=bold>not markup</b>").await;
    // Where the link is drawn.
    browser.click_at("#screen", 30, 16).await;
    let markup = browser.markup("#screen").await;
    for tag in ["<b id", "<img", "<script", "<a "] {
        assert!(!markup.contains(tag), "{tag} came out of the program");
    }
    assert_eq!(browser.title().await, title);
    browser.click("#screen").await;
    browser.enter("echo still-$((40 + 2))").await;
    browser.draws("still-42").await;
    expect_well_behaved(&mut browser, world.stranger().base()).await;
    browser.end().await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_says_who_took_its_session_and_that_the_allocation_is_gone() {
    let (mut world, allocation) = rented().await;
    let mut browser = Browser::start(&[]).await;
    connected(&mut browser, &mut world, &allocation).await;
    let kept = browser.run("() => Object.values(sessionStorage)", json!(null)).await;
    let session = kept.as_array().unwrap().iter().find_map(|value| value.as_str()?.parse().ok()).expect("a session");
    let ticket = world.ticket(&world.user.clone(), allocation.id, Some(session)).await;
    let mut elsewhere = world.gateway().open(&ticket.token, None).await;
    elsewhere.attached().await;
    browser.reads("#state", "open in another place").await;
    browser.reads("#next", "Go on here").await;
    browser.click("#next").await;
    browser.reads("#state", "Connected").await;
    assert_eq!(elsewhere.close_code().await, 4409);

    allocation.release().await;
    browser.reads("#state", "released").await;
    allocation.expect_state("released").await;
    browser.click("#next").await;
    browser.reads("#next", "Open a new session").await;
    browser.click("#next").await;
    browser.reads("#state", "An allocation that is released has no terminal").await;
    browser.end().await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_of_another_origin_opens_no_terminal_and_shows_none() {
    let (mut world, allocation) = rented().await;
    let foreign = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let origin = format!("http://{}", foreign.local_addr().unwrap());
    let serving = axum::serve(foreign, Router::new().route("/", get(|| async { Html("<!doctype html><p>foreign") })));
    let serving = tokio::spawn(serving.into_future());
    let mut browser = Browser::start(&[]).await;
    browser.open(&origin).await;

    let ticket = world.ticket(&world.user.clone(), allocation.id, None).await;
    let base = world.stranger().base().to_owned();
    let gateway = format!("{}/ws/v1/terminal", base.replace("https://", "wss://"));
    let opens = "({ url, token }) => new Promise(done => { \
        const socket = new WebSocket(url, ['gpu.terminal.v1', `token.${token}`]); \
        socket.onopen = () => done('open'); socket.onclose = event => done(event.code); })";
    let how = browser.run(opens, json!({ "url": gateway, "token": ticket.token })).await;
    assert_eq!(how, 1006, "a page of another origin");
    // Nothing was spent by that.
    world.gateway().open(&ticket.token, None).await.attached().await;

    let asks = "path => fetch(path, { method: 'POST', headers: { authorization: 'Bearer x' } }).then(() => 'answered', () => 'refused')";
    let tokens = format!("{base}/api/v1/allocations/{}/terminal-tokens", allocation.id);
    assert_eq!(browser.run(asks, json!(tokens)).await, "refused");

    let frames = "url => new Promise(done => { const frame = document.createElement('iframe'); frame.onload = done; \
        frame.src = url; document.body.append(frame); }).then(() => null)";
    browser.run(frames, json!(page_of(&world, &allocation))).await;
    let seen = browser.seen().await;
    assert!(seen.complaints.iter().any(|line| line.contains("frame-ancestors")), "{seen:?}");
    assert!(!seen.asked.iter().any(|url| url.contains("/terminal/assets/")), "the page was begun: {seen:?}");
    browser.end().await;
    serving.abort();
    world.end().await;
}

#[tokio::test]
async fn the_page_s_own_tests_pass() {
    let mut tests = Command::new("node");
    tests.arg("--test").current_dir(root().join("edge/terminal-page"));
    let said = run(tests).await;
    assert!(said.contains("pass ") && !said.contains("\n# pass 0"), "{said}");
}
