//! The page that plays a recording back, in a real Chromium: what a terminal showed is seen again by whose terminal it was and by
//! administrators, and by nobody else.

use crate::browser::Browser;
use crate::recording::complete;
use secrecy::ExposeSecret as _;
use serde_json::json;
use tests::world::{Rented, World};
use uuid::Uuid;

/// A session of `user` that has shown some things, among them what would do more than show.
async fn recorded() -> (World, Rented, Uuid) {
    let mut world = World::start().await;
    world.node("h100").await;
    let allocation = world.rent("h100", 1).await;
    allocation.expect_state("active").await;
    let (mut terminal, session) = world.terminal(allocation.id).await;
    terminal.enter("PS1='ready> '; stty -echo; echo be''gun\n").await;
    terminal.shows("begun").await;
    terminal.enter("printf '\\033]0;owned\\007<img src=x onerror=document.title=1><b id=bold>markup</b>\\n'\n").await;
    terminal.enter("printf 'a \\033[31mred\\033[0m word \\342\\202\\254 play''ed back\\n'; exit\n").await;
    assert_eq!(terminal.close_code().await, 1000);
    complete(&world, session).await;
    (world, allocation, session)
}

fn token_of(world: &mut World, username: &str) -> String {
    let token = world.identity.token_of(username).expect("the provider signs").expose_secret().to_owned();
    world.keep_secret("an access token given to the page", &token);
    token
}

async fn sign_in(browser: &mut Browser, token: &str) {
    browser.fill("#token", token).await;
    browser.click("#sign-in button").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recording_plays_back_in_a_browser_for_its_user_and_administrators_and_nobody_else() {
    let (mut world, allocation, session) = recorded().await;
    let base = world.stranger().base().to_owned();
    let page = format!("{base}/recordings/{session}");
    for username in ["user2", "user", "admin"] {
        let token = token_of(&mut world, username);
        let mut browser = Browser::start(&[]).await;
        assert_eq!(browser.open(&page).await, 200);
        sign_in(&mut browser, &token).await;
        if username == "user2" {
            browser.reads("#state", "no such recording, or not for you").await;
            assert_eq!(browser.shown("#about").await, None);
            browser.end().await;
            continue;
        }
        browser.reads("#facts", &allocation.id.to_string()).await;
        browser.reads("#facts", "yes").await;
        let title = browser.title().await;
        browser.click("#play").await;
        browser.reads("#player", "word € played back").await;
        browser.reads("#player", "<b id=bold>markup</b>").await;
        browser.reads("#state", "The end").await;

        let seen = browser.seen().await;
        assert!(seen.complaints.is_empty() && seen.dialogs.is_empty() && seen.windows == 0, "{seen:?}");
        for url in &seen.asked {
            assert!(url.starts_with(&format!("{base}/")) || url.starts_with("data:"), "the page asks {url}");
            assert!(!url.contains("eyJ"), "a token stands in {url}");
        }
        let drawn = browser.markup("#player").await;
        assert!(!drawn.contains("<img") && !drawn.contains("<b id"), "markup came out of the recording");
        assert_eq!(browser.title().await, title);
        let makes = "(markup) => { try { document.createElement('template').innerHTML = markup; return true } catch { return false } }";
        for (markup, is_made) in [("<div class=\"ap-wrapper\"></div>", true), ("<img/onerror=alert(1) src=x>", false)] {
            assert_eq!(browser.run(makes, json!(markup)).await, is_made, "{markup}");
        }
        browser.click("#forget").await;
        browser.reads("#sign-in", "Who are you?").await;
        assert_eq!(browser.run("() => sessionStorage.length", json!(null)).await, 0);
        browser.end().await;
    }
    // Both readings were written down, and with them who read.
    let log = world.admin.get("/api/v1/admin/audit-log?action=terminals.read_recording").await.ok();
    assert_eq!(log["items"].as_array().map(Vec::len), Some(2), "{log}");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_has_a_terminal_in_a_browser_sees_that_it_is_recorded_and_is_led_to_the_recording() {
    let (mut world, allocation, _) = recorded().await;
    let token = token_of(&mut world, "user");
    let base = world.stranger().base().to_owned();
    let mut browser = Browser::start(&[]).await;
    browser.open(&format!("{base}/terminal/{}", allocation.id)).await;
    assert_eq!(browser.shown("#recording").await, None, "nobody is connected");
    sign_in(&mut browser, &token).await;
    browser.reads("#recording", "Recorded by the service").await;
    let link = "() => { const { href, title } = document.getElementById('recording'); return { href, title }; }";
    let told = browser.run(link, json!(null)).await;
    let title = told["title"].as_str().unwrap();
    assert!(title.contains("policy terminal.recording_enabled, mode best-effort"), "{title}");
    let href = told["href"].as_str().unwrap().to_owned();
    assert!(href.starts_with(&format!("{base}/recordings/")), "{href}");

    // Switched off in the middle, it says so.
    browser.reads("#state", "Connected").await;
    browser.enter("echo be''fore").await;
    browser.draws("before").await;
    world.set_policy("terminal.recording_enabled", false).await;
    browser.reads("#recording", "Not recorded").await;
    world.set_policy("terminal.recording_enabled", true).await;
    browser.reads("#recording", "Recorded by the service").await;
    browser.enter("exit").await;
    browser.reads("#state", "The program ended").await;
    // The page that the link leads to, in the same tab's trust.
    let session: Uuid = href.rsplit('/').next().unwrap().parse().unwrap();
    complete(&world, session).await;
    browser.open(&href).await;
    browser.click("#play").await;
    browser.reads("#player", "before").await;
    browser.end().await;
    world.end().await;
}
