//! The page that plays recordings back, in a real Chromium: for the user of the terminal and
//! administrators alone.

use crate::browser::Browser;
use crate::recording::complete;
use secrecy::ExposeSecret as _;
use serde_json::json;
use tests::cluster::{AllocationHandle, TestCluster};
use uuid::Uuid;

/// A recorded session of `user`, whose output contains markup and scripts.
async fn start_with_recording() -> (TestCluster, AllocationHandle, Uuid) {
    let mut cluster = TestCluster::start().await;
    cluster.node("h100").await;
    let allocation = cluster.rent_active("h100", 1).await;
    let (mut terminal, session) = cluster.terminal(allocation.id).await;
    terminal.enter("PS1='ready> '; stty -echo; echo be''gun\n").await;
    terminal.expect_output("begun").await;
    terminal.enter("printf '\\033]0;owned\\007<img src=x onerror=document.title=1><b id=bold>markup</b>\\n'\n").await;
    terminal.enter("printf 'a \\033[31mred\\033[0m word \\342\\202\\254 play''ed back\\n'; exit\n").await;
    assert_eq!(terminal.close_code().await, 1000);
    complete(&cluster, session).await;
    (cluster, allocation, session)
}

fn token_of(cluster: &mut TestCluster, username: &str) -> String {
    let token = cluster.identity.token_of(username).expect("the provider signs").expose_secret().to_owned();
    cluster.register_secret("an access token given to the page", &token);
    token
}

async fn sign_in(browser: &mut Browser, token: &str) {
    browser.fill("#token", token).await;
    browser.click("#sign-in button").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn recording_plays_back_in_a_browser_for_its_user_and_administrators_alone() {
    let (mut cluster, allocation, session) = start_with_recording().await;
    let base = cluster.anonymous_client().base().to_owned();
    let page = format!("{base}/recordings/{session}");
    for username in ["user2", "user", "admin"] {
        let token = token_of(&mut cluster, username);
        let mut browser = Browser::start(&[]).await;
        assert_eq!(browser.open(&page).await, 200);
        sign_in(&mut browser, &token).await;
        if username == "user2" {
            browser.expect_text("#state", "no such recording, or not for you").await;
            assert_eq!(browser.text_of("#about").await, None);
            browser.close().await;
            continue;
        }
        browser.expect_text("#facts", &allocation.id.to_string()).await;
        browser.expect_text("#facts", "yes").await;
        let title = browser.title().await;
        browser.click("#play").await;
        browser.expect_text("#player", "word € played back").await;
        browser.expect_text("#player", "<b id=bold>markup</b>").await;
        browser.expect_text("#state", "The end").await;

        let seen = browser.activity().await;
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
        browser.expect_text("#sign-in", "Who are you?").await;
        assert_eq!(browser.run("() => sessionStorage.length", json!(null)).await, 0);
        browser.close().await;
    }
    // Both downloads are audited, with their actors.
    let log = cluster.admin.get("/api/v1/admin/audit-log?action=terminals.read_recording").await.ok();
    assert_eq!(log["items"].as_array().map(Vec::len), Some(2), "{log}");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn terminal_page_shows_that_it_is_recorded_and_links_to_the_recording() {
    let (mut cluster, allocation, _) = start_with_recording().await;
    let token = token_of(&mut cluster, "user");
    let base = cluster.anonymous_client().base().to_owned();
    let mut browser = Browser::start(&[]).await;
    browser.open(&format!("{base}/terminal/{}", allocation.id)).await;
    assert_eq!(browser.text_of("#recording").await, None, "no terminal is connected");
    sign_in(&mut browser, &token).await;
    browser.expect_text("#recording", "Recorded by the service").await;
    let link = "() => { const { href, title } = document.getElementById('recording'); return { href, title }; }";
    let found = browser.run(link, json!(null)).await;
    let title = found["title"].as_str().unwrap();
    assert!(title.contains("policy terminal.recording_enabled, mode best-effort"), "{title}");
    let href = found["href"].as_str().unwrap().to_owned();
    assert!(href.starts_with(&format!("{base}/recordings/")), "{href}");

    // Disabled during the session, the page shows that.
    browser.expect_text("#state", "Connected").await;
    browser.enter("echo be''fore").await;
    browser.expect_screen("before").await;
    cluster.set_policy("terminal.recording_enabled", false).await;
    browser.expect_text("#recording", "Not recorded").await;
    cluster.set_policy("terminal.recording_enabled", true).await;
    browser.expect_text("#recording", "Recorded by the service").await;
    browser.enter("exit").await;
    browser.expect_text("#state", "The program ended").await;
    // The page of the link, to which the terminal's page gives no token.
    let session: Uuid = href.rsplit('/').next().unwrap().parse().unwrap();
    complete(&cluster, session).await;
    browser.open(&href).await;
    sign_in(&mut browser, &token).await;
    browser.click("#play").await;
    browser.expect_text("#player", "before").await;
    browser.close().await;
    cluster.shutdown().await;
}
