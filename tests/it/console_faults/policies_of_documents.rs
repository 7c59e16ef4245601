//! The content security policies of all documents that a browser is given, and what a script of a page could read.

use super::Browser;
use crate::openapi::with_responses;
use reqwest::Method;
use reqwest::header::{ACCEPT, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName};
use serde_json::{Value, json};
use std::time::Instant;
use tests::cluster::{TestCluster, WAIT_TIMEOUT};

/// Documents of the console, which are not in the API's description.
const OF_CONSOLE: [&str; 5] =
    ["/", "/console/", "/console/nodes", "/console/logged-in", "/console/callback?error=access_denied&state=x"];

/// Makes a style sheet and a style attribute by script, as libraries do, and returns the colours that follow.
const STYLES_OF_A_SCRIPT: &str = "() => { const sheet = document.createElement('style'); document.head.append(sheet); \
     sheet.textContent = '#of-sheet { color: rgb(1, 2, 3) }'; const made = [0, 1].map(() => document.createElement('p')); \
     made[0].id = 'of-sheet'; made[1].setAttribute('style', 'color: rgb(4, 5, 6)'); document.body.append(...made); \
     const colours = made.map(it => getComputedStyle(it).color); [sheet, ...made].forEach(it => it.remove()); return colours; }";

/// The same by markup, as it would be injected.
const STYLES_OF_MARKUP: &str = "() => { const room = document.createElement('div'); document.body.append(room); \
     try { room.innerHTML = '<style>#of-sheet { color: rgb(1, 2, 3) }</style><p id=of-sheet></p><p style=\"color: rgb(4, 5, 6)\"></p>'; } \
     catch { return 'refused'; } const colours = [...room.querySelectorAll('p')].map(it => getComputedStyle(it).color); room.remove(); \
     return colours.some(it => ['rgb(1, 2, 3)', 'rgb(4, 5, 6)'].includes(it)) ? 'applied' : 'refused'; }";

/// The documents of the API's description, each with an id that nothing has.
async fn described_documents(cluster: &TestCluster) -> Vec<String> {
    let described = cluster.anonymous_client().get("/api/v1/openapi.json").await.ok();
    let id = uuid::Uuid::now_v7().to_string();
    let paths = described["paths"].as_object().expect("paths").iter();
    let responses = |item: &Value| with_responses(&described, &item["get"])["responses"].clone();
    let is_document = |item: &Value| responses(item)["200"]["content"].get("text/html").is_some();
    let filled = |path: &str| {
        path.split('/').map(|part| if part.starts_with('{') { id.as_str() } else { part }).collect::<Vec<_>>().join("/")
    };
    paths.filter(|(_, item)| is_document(item)).map(|(path, _)| filled(path)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn no_document_runs_or_applies_what_is_inline_and_no_script_reaches_a_token() {
    let mut cluster = TestCluster::builder().with_processor().start().await;
    let mut documents = described_documents(&cluster).await;
    assert_eq!(documents.len(), 5, "{documents:?}");
    documents.extend(OF_CONSOLE.map(str::to_owned));
    for path in &documents {
        expect_strict_policy(&cluster, path).await;
    }
    let mut browser = Browser::start(&[]).await;
    for path in &documents {
        expect_no_violation(&cluster, &mut browser, path).await;
    }
    browser.go_to("user", "main").await;
    no_script_reaches_a_token(&mut cluster, &mut browser).await;
    browser.close().await;
    cluster.shutdown().await;
}

async fn expect_strict_policy(cluster: &TestCluster, path: &str) {
    let client = cluster.anonymous_client();
    let answer = client.send(client.request(Method::GET, path).header(ACCEPT, "text/html")).await;
    let header = |name: HeaderName| answer.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    assert!(header(CONTENT_TYPE).starts_with("text/html"), "{path} is no document: {answer}");
    let policy = header(CONTENT_SECURITY_POLICY).to_owned();
    assert!(policy.starts_with("default-src 'none'"), "{path}: {policy}");
    assert!(policy.contains("frame-ancestors 'none'") && policy.contains("base-uri 'none'"), "{path}: {policy}");
    assert!(!policy.contains("'unsafe-"), "{path}: {policy}");
    // A document without a script in it needs no exception. Data is no script.
    let scripts = answer.text.split("<script").skip(1).map(|script| script.split('>').next().unwrap_or_default());
    assert!(
        scripts.into_iter().all(|tag| tag.contains("src=") || tag.contains("application/json")),
        "{path} has an inline script"
    );
}

/// Asserts that the page does nothing that its policy forbids, and that its policy forbids styles in markup.
async fn expect_no_violation(cluster: &TestCluster, browser: &mut Browser, path: &str) {
    let earlier = browser.activity().await.complaints.len();
    browser.open(&format!("{}{path}", cluster.anonymous_client().base())).await;
    let is_of_others = !OF_CONSOLE.contains(&path) && path != "/billing/returned";
    if path == "/api/v1/docs" {
        browser.expect_text("body", "/api/v1/me").await;
    }
    if is_of_others {
        let colours = browser.run(STYLES_OF_A_SCRIPT, json!(null)).await;
        assert_eq!(colours, json!(["rgb(1, 2, 3)", "rgb(4, 5, 6)"]), "{path}");
    }
    let complaints = browser.activity().await.complaints.split_off(earlier);
    assert!(complaints.is_empty(), "{path}: {complaints:#?}");
    assert_eq!(browser.run(STYLES_OF_MARKUP, json!(null)).await, "refused", "{path}");
}

/// A script of the console reads its storage, the answers that the session's requests get, and the logout's.
async fn no_script_reaches_a_token(cluster: &mut TestCluster, browser: &mut Browser) {
    browser.log_in_to_console(cluster, "user").await;
    let secret = browser.cookies().await.join("; ");
    let secret = secret.split("__Host-gpuaas-session=").nth(1).expect("a cookie").split(';').next().unwrap().to_owned();
    cluster.register_secret("the cookie of a browser", &secret);
    let mut readable = browser.readable().await;
    let reads = "async ([method, path, redirect]) => { try { const answer = await fetch(path, { method, redirect }); \
                 return answer.url + JSON.stringify([...answer.headers]) + await answer.text(); } catch (error) { return String(error); } }";
    for (method, path, redirect) in [
        ("GET", "/api/v1/me", "follow"),
        ("GET", "/api/v1/me/sessions", "follow"),
        ("GET", "/console/", "follow"),
        ("GET", "/api/v1/service-accounts", "follow"),
        ("GET", "/console/login", "manual"),
        ("GET", "/console/login", "follow"),
        ("POST", "/console/logout", "follow"),
        ("GET", "/console/logout", "manual"),
        ("GET", "/console/logout", "follow"),
    ] {
        let read = browser.run(reads, json!([method, path, redirect])).await;
        let read = read.as_str().expect("an answer");
        if method == "POST" {
            assert!(read.contains("{\"logout_url\":\"/console/logout\"}"), "{read}");
        }
        readable.push_str(read);
    }
    // The page after the logout, and what its addresses were.
    readable.push_str(&browser.readable().await);
    let timing = "() => JSON.stringify(performance.getEntries().map(entry => entry.name))";
    readable.push_str(browser.run(timing, json!(null)).await.as_str().expect("a text"));
    for token in [secret.as_str(), "gpubrs_", "__Host-", "eyJ", "refresh_token", "id_token"] {
        assert!(!readable.contains(token), "a script of the page can read {token}");
    }
    // The tab itself goes to the provider with the ID token, and comes back.
    let leaves = "() => { setTimeout(() => location.assign('/console/logout'), 0); return null; }";
    browser.run(leaves, json!(null)).await;
    let until = Instant::now() + WAIT_TIMEOUT;
    while !browser.activity().await.asked.iter().any(|url| url.contains("id_token_hint=eyJ")) {
        assert!(Instant::now() < until, "the provider was given no hint");
        tokio::time::sleep(super::POLL_INTERVAL).await;
    }
    browser.expect_text("main", "Log in").await;
    assert!(browser.url().await.ends_with("/console/"), "{}", browser.url().await);
    assert!(!browser.readable().await.contains("eyJ"));
}
