//! Follows every link and opens every dialog of the console over the real service, for each role.

use super::{Browser, page};
use reqwest::{Method, Url};
use serde_json::{Value, json};
use std::collections::{BTreeSet, VecDeque};
use tests::cluster::TestCluster;

#[tokio::test(flavor = "multi_thread")]
async fn every_link_and_dialog_opens_without_a_message_for_every_role() {
    let mut cluster = TestCluster::start().await;
    cluster.node("h100").await;
    cluster.register("h100").await;
    cluster.rent_active("h100", 1).await;
    let account = cluster.user.post("/api/v1/service-accounts", &json!({ "name": "<b>robot</b>" })).await.created();
    let keys = format!("/api/v1/service-accounts/{}/keys", account["id"].as_str().expect("an id"));
    cluster.user.request_until_final(Method::POST, &keys, None).await.created();
    // The login is a request of its user; billing and health go on by themselves.
    let requests = async |cluster: &TestCluster| -> i64 {
        let changed = "SELECT count(*) FROM history WHERE kind <> 'browser_session' AND command_id IS NOT NULL \
                       AND actor NOT LIKE 'system:%' AND actor NOT LIKE 'node:%'";
        sqlx::query_scalar(changed).fetch_one(&cluster.pool).await.unwrap()
    };
    let before = requests(&cluster).await;
    let mut browser = Browser::start(&[]).await;
    // `admin` has platform roles beside the token's; `admin2`, who operates, has one.
    for (username, pages_at_least) in [("user", 9), ("admin", 16), ("admin2", 16)] {
        browser.go_to(username, "main").await;
        browser.log_in_to_console(&cluster, username).await;
        // Before the login a request is refused with 401, which the browser reports.
        let before_login = browser.activity().await.messages.len();
        let seen = walk(&cluster, &mut browser).await;
        assert!(seen.len() >= pages_at_least, "{username} has come to {seen:?}");
        let messages = browser.activity().await.messages.split_off(before_login);
        assert!(messages.is_empty(), "{username}: {messages:#?}");
    }
    assert_eq!(requests(&cluster).await, before, "a dialog that is closed sends nothing");
    let activity = browser.activity().await;
    assert!(activity.complaints.is_empty() && activity.dialogs.is_empty(), "{:?}", activity.complaints);
    browser.close().await;
    cluster.shutdown().await;
}

/// An address without what tells two of the same page apart.
fn page_of(url: &Url) -> String {
    let is_id = |part: &str| uuid::Uuid::try_parse(part).is_ok();
    let path: Vec<_> = url.path().split('/').map(|part| if is_id(part) { "ID" } else { part }).collect();
    let filters: BTreeSet<_> = url.query_pairs().map(|(name, _)| name.into_owned()).collect();
    format!("{} {filters:?}", path.join("/"))
}

/// The pages that links lead to.
async fn walk(cluster: &TestCluster, browser: &mut Browser) -> BTreeSet<String> {
    let start: Url = page(cluster, "/").parse().unwrap();
    let mut known = BTreeSet::from([page_of(&start)]);
    let mut waiting = VecDeque::from([start]);
    while let Some(url) = waiting.pop_front() {
        assert_eq!(browser.open(url.as_str()).await, 200, "{url}");
        browser.expect_loaded().await;
        let heading = browser.text_of("main h1").await.unwrap_or_default();
        assert!(
            !heading.is_empty() && !heading.contains("no such page") && !heading.contains("cannot be shown"),
            "{url}: {heading}"
        );
        assert_eq!(browser.text_of(".problem").await, None, "{url}");
        let links =
            browser.run("() => [...document.querySelectorAll('a[href]')].map(link => link.href)", json!(null)).await;
        for link in links.as_array().expect("a list").iter().filter_map(Value::as_str) {
            let link: Url = link.parse().expect("a link is an address");
            if link.path().starts_with("/console/") && link.fragment().is_none() && known.insert(page_of(&link)) {
                waiting.push_back(link);
            }
        }
        let labels = "() => [...new Set([...document.querySelectorAll('button[aria-haspopup=dialog]')].map(it => it.textContent))]";
        for label in browser.run(labels, json!(null)).await.as_array().expect("a list").iter().filter_map(Value::as_str)
        {
            let opens = "label => [...document.querySelectorAll('button[aria-haspopup=dialog]')].find(it => it.textContent === label).click()";
            browser.run(opens, json!(label)).await;
            browser.expect_shown("[role=dialog] .consequences").await;
            browser.close_dialog().await;
        }
    }
    known
}
