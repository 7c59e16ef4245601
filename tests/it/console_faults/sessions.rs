//! Logins that end, or wait, under an open tab.

use super::{Browser, SUBMIT, page};
use local_servers::identity::browser_login::LoginFaults;
use reqwest::Method;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tests::cluster::{TestCluster, WAIT_TIMEOUT};

const READ_AGAIN: &str = "main button[aria-label='Read again']";

#[tokio::test(flavor = "multi_thread")]
async fn login_that_ends_or_waits_is_shown_and_no_form_is_lost() {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    let mut browser = Browser::start(&[]).await;
    browser.log_in_to_console(&cluster, "user").await;
    form_is_sent_once_after_a_login_in_a_small_window(&cluster, &mut browser).await;
    secret_that_is_shown_once_is_nowhere_else(&mut cluster, &mut browser).await;
    login_that_gpuctl_ends_is_refused_at_the_next_answer(&cluster, &mut browser).await;
    callback_of_an_earlier_login_opens_nothing(&cluster, &mut browser).await;
    stolen_cookie_is_refused_by_every_replica_after_the_logout(&mut cluster, &mut browser).await;
    role_that_was_revoked_is_not_offered_after_the_next_answer(&cluster, &mut browser).await;
    page_says_that_the_identity_provider_is_away_and_goes_on_afterwards(&cluster, &mut browser).await;
    browser.expect_no_complaint().await;
    browser.close().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_administrators_on_one_policy_have_one_effect_and_the_later_sees_both_values() {
    let mut cluster = TestCluster::start().await;
    let mut browser = Browser::start(&[]).await;
    browser.log_in_to_console(&cluster, "admin").await;
    browser.open(&page(&cluster, "/policies?key=allocation.max_concurrent_per_user")).await;
    browser.click("button:text('Set a value')").await;
    browser.fill("[role=dialog] input[name=value]", "30").await;
    browser.fill("[role=dialog] input[name=reason]", "more room").await;
    let faster = json!({ "key": "allocation.max_concurrent_per_user", "value": 25, "reason": "less room" });
    cluster.second_admin.post("/api/v1/admin/policy-values", &faster).await.created();
    browser.click(SUBMIT).await;
    browser.expect_text("[role=dialog] .conflict", "The value is 25").await;
    browser.expect_text("[role=dialog] .conflict", "You want 30").await;
    let path = "/api/v1/admin/policy-values?key=allocation.max_concurrent_per_user";
    let values = |listed: &Value| -> Vec<i64> {
        listed["items"].as_array().expect("a list").iter().filter_map(|it| it["value"].as_i64()).collect()
    };
    assert!(
        !values(&cluster.admin.get(path).await.ok()).contains(&30),
        "the faster one's value was overwritten unseen"
    );
    browser.click("button:text('Continue from 25')").await;
    browser.click(SUBMIT).await;
    cluster.admin.wait_until(path, "30 is written", |listed| values(listed).contains(&30)).await;

    // A bootstrap script holds a token, and is shown once.
    let node = cluster.register("h100").await;
    browser.open(&page(&cluster, &format!("/nodes/{}", node.id))).await;
    browser.click("button:text('Set-up command')").await;
    browser.click(SUBMIT).await;
    browser.expect_text("[role=dialog]", "This is the only time that it is shown.").await;
    let script =
        browser.run("() => document.querySelector('[role=dialog] details code').textContent", json!(null)).await;
    let token = token_in(script.as_str().expect("a script"), "gpuenr_");
    cluster.register_secret("a token in a bootstrap script", &token);
    browser.click("[role=dialog] button:text('Close')").await;
    browser.expect_nowhere(&token).await;
    browser.reload().await;
    browser.expect_text("main", "Set-up command").await;
    browser.expect_nowhere(&token).await;
    browser.expect_no_complaint().await;
    browser.close().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_administrators_on_one_sku_have_one_effect_and_the_later_sees_both_values() {
    let mut cluster = TestCluster::start().await;
    cluster.register("h100").await;
    let sku = async || {
        let listed = cluster.admin.get("/api/v1/admin/skus").await.ok();
        listed["items"].as_array().expect("a list").iter().find(|it| it["name"] == "h100").expect("the SKU").clone()
    };
    let before = sku().await;
    let path = format!("/api/v1/admin/skus/{}", before["id"].as_str().expect("an id"));
    let regions = before["allowed_regions"][0].as_str().expect("a region").to_owned();

    let mut browser = Browser::start(&[]).await;
    browser.log_in_to_console(&cluster, "admin").await;
    browser.open(&page(&cluster, "/skus")).await;
    browser.click("tr:has-text('h100') button:text('Change')").await;
    browser.fill("[role=dialog] input[name=regions]", &format!("{regions}, eu-9")).await;
    let price = json!({ "price": { "currency": before["price"]["currency"], "amount_minor_per_gpu_hour": 777 } });
    cluster.second_admin.request_until_final(Method::PATCH, &path, Some(&price)).await.ok();
    // The stream of events brings the change, or the refusal of what is based on the earlier version does.
    browser.expect_text("[role=dialog] .problem", "it is 7.77, and was").await;
    assert_eq!(sku().await["price"]["amount_minor_per_gpu_hour"], 777, "it was not overwritten unseen");
    browser.click("button:text('Take the new values')").await;
    browser.click(SUBMIT).await;
    let has_both = |it: &Value| it["price"]["amount_minor_per_gpu_hour"] == 777 && it["allowed_regions"][1] == "eu-9";
    cluster.admin.wait_until(&path, "both changes are there", has_both).await;
    browser.expect_no_complaint().await;
    browser.close().await;
    cluster.shutdown().await;
}

/// The part of the text that begins so.
fn token_in(text: &str, prefix: &str) -> String {
    let begin = text.find(prefix).unwrap_or_else(|| panic!("{prefix} is not in {text}"));
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    text[begin..].chars().take_while(|c| is_part(*c)).collect()
}

/// The active logins of this user, as an administrator sees them.
async fn active_logins(cluster: &TestCluster, username: &str) -> Vec<Value> {
    let user = cluster.identity.person(username).expect("the person can log in").id;
    let listed = cluster.admin.get(&format!("/api/v1/admin/browser-sessions?state=active&user_id={user}")).await.ok();
    listed["items"].as_array().expect("a list").clone()
}

async fn form_is_sent_once_after_a_login_in_a_small_window(cluster: &TestCluster, browser: &mut Browser) {
    browser.open(&page(cluster, "/service-accounts")).await;
    browser.click("button:text('Create')").await;
    browser.fill("[role=dialog] input[name=name]", "typed-before").await;
    for login in active_logins(cluster, "user").await {
        let end = format!("/api/v1/admin/browser-sessions/{}/end", login["id"].as_str().expect("an id"));
        cluster.admin.post(&end, &json!({ "reason": "a test" })).await.ok();
    }
    browser.click(SUBMIT).await;
    browser.expect_text("[role=dialog]", "Your session has ended").await;
    let typed = browser.run("() => document.querySelector('[role=dialog] input[name=name]').value", json!(null)).await;
    assert_eq!(typed, "typed-before");
    // The identity provider knows its user, and asks for nothing: the window closes by itself.
    browser.click("[role=dialog] .banner button.primary").await;
    let until = Instant::now() + WAIT_TIMEOUT;
    while browser.popup_text().await.is_some() {
        assert!(Instant::now() < until, "the small window stays: {:?}", browser.popup_text().await);
        tokio::time::sleep(super::POLL_INTERVAL).await;
    }
    browser.expect_text("tbody", "typed-before").await;
    let listed = cluster.user.get("/api/v1/service-accounts").await.ok();
    assert_eq!(listed["items"].as_array().map(Vec::len), Some(1), "{listed}");
}

async fn secret_that_is_shown_once_is_nowhere_else(cluster: &mut TestCluster, browser: &mut Browser) {
    browser.click("tbody button:text('New key')").await;
    browser.click(SUBMIT).await;
    browser.expect_text("[role=dialog]", "This is the only time").await;
    let secret = browser
        .run("() => document.querySelector('[role=dialog] [aria-label=\"client secret\"]').textContent", json!(null))
        .await;
    let secret = secret.as_str().expect("a secret").to_owned();
    assert!(secret.len() > 20, "{}", secret.len());
    // The final checks look for it in all logs.
    cluster.register_secret("a key of a service account that a page has shown", &secret);
    browser.click("[role=dialog] button:text('Close')").await;
    browser.expect_nowhere(&secret).await;
    browser.open(&page(cluster, "/money")).await;
    browser.back().await;
    browser.expect_text("tbody", "typed-before").await;
    browser.expect_nowhere(&secret).await;
}

async fn login_that_gpuctl_ends_is_refused_at_the_next_answer(cluster: &TestCluster, browser: &mut Browser) {
    browser.open(&page(cluster, "/sessions")).await;
    browser.expect_text("main tbody", "this browser").await;
    let gpuctl = cluster.logged_in("user").await;
    let listed = gpuctl.run(&["sessions", "list", "--state", "active", "--output", "json"]).await.json();
    let logins = listed["items"].as_array().expect("a list");
    assert_eq!(logins.len(), 1, "{listed}");
    let id = logins[0]["id"].as_str().expect("an id");
    // Those of others are not in one's reach.
    let other = cluster.logged_in("user2").await;
    other.run(&["sessions", "end", id]).await.failed(5);
    other.run(&["sessions", "kill", id, "--reason", "a test"]).await.failed(4);
    let ended = gpuctl.run(&["sessions", "end", id]).await.ok();
    assert!(ended.contains("ended_by_user"), "{ended}");
    browser.click(READ_AGAIN).await;
    browser.expect_text("main", "Your session has ended").await;
    let admin = cluster.logged_in("admin").await;
    let all = admin.run(&["sessions", "list", "--all", "--state", "ended"]).await.ok();
    assert!(all.contains(id), "{all}");
}

async fn callback_of_an_earlier_login_opens_nothing(cluster: &TestCluster, browser: &mut Browser) {
    let asked = browser.activity().await.asked;
    let callback = asked.iter().rfind(|url| url.contains("/console/callback?")).expect("a login has come back").clone();
    assert_eq!(browser.open(&callback).await, 400);
    assert!(active_logins(cluster, "user").await.is_empty());
}

async fn stolen_cookie_is_refused_by_every_replica_after_the_logout(cluster: &mut TestCluster, browser: &mut Browser) {
    // The identity provider still has its own login, so its form does not come.
    browser.open(&page(cluster, "/sessions")).await;
    browser.click("main a.primary").await;
    browser.expect_text("main tbody", "this browser").await;
    let cookies = browser.cookies().await;
    let cookie = cookies.iter().find(|pair| pair.starts_with("__Host-gpuaas-session=")).expect("a cookie").clone();
    cluster.register_secret("the cookie of a browser", cookie.split_once('=').expect("a value").1);
    let thief = |replica: usize| {
        let base = cluster.replicas[replica].public_url();
        let client = tests::cluster::client::Client::new(cluster.authority.certificate_path(), &base, None);
        client.by_cookie(&cookie, &cluster.settings.public_url)
    };
    thief(0).get("/api/v1/me").await.ok();
    browser.click("text=Log out").await;
    browser.expect_text("main", "Log in").await;
    for replica in [0, 1] {
        let refused = thief(replica).get("/api/v1/me").await;
        refused.expect_error(401, "session_ended");
    }
    assert!(!browser.cookies().await.iter().any(|pair| pair.starts_with("__Host-gpuaas-session=")));
}

async fn role_that_was_revoked_is_not_offered_after_the_next_answer(cluster: &TestCluster, browser: &mut Browser) {
    cluster.bind("user2", "auditor").await;
    browser.go_to("auditor", "main").await;
    browser.log_in_to_console(cluster, "user2").await;
    browser.open(&page(cluster, "/audit")).await;
    browser.expect_text("main tbody", "platform_roles.bind").await;
    let subject = cluster.identity.person("user2").expect("the person can log in").id;
    let binding = format!("/api/v1/admin/platform-roles/bindings?subject={subject}&role=auditor&reason=a-test");
    cluster.admin.delete(&binding).await.ok();
    browser.click(READ_AGAIN).await;
    browser.expect_text("main", "This page needs the role admin or auditor").await;
    browser.expect_gone("nav a:text-is('Audit log')").await;
}

async fn page_says_that_the_identity_provider_is_away_and_goes_on_afterwards(
    cluster: &TestCluster,
    browser: &mut Browser,
) {
    browser.go_to("brief", "main").await;
    cluster.identity.set_login_faults(LoginFaults { token_seconds: Some(8), ..LoginFaults::default() });
    browser.log_in_to_console(cluster, "user").await;
    cluster.identity.set_login_faults(LoginFaults { is_away: true, ..LoginFaults::default() });
    tokio::time::sleep(Duration::from_secs(8)).await;
    browser.click("nav a:text-is('SSH keys')").await;
    browser.expect_text("main", "The identity provider cannot be reached").await;
    browser.expect_text("main", "Your login is not lost").await;
    cluster.identity.set_login_faults(LoginFaults::default());
    let until = Instant::now() + WAIT_TIMEOUT;
    while browser.text_of("main").await.is_some_and(|text| text.contains("cannot be reached")) {
        browser
            .run(
                "() => [...document.querySelectorAll('button')].find(it => it.textContent === 'Try again')?.click()",
                json!(null),
            )
            .await;
        assert!(Instant::now() < until, "the page does not go on");
        tokio::time::sleep(super::POLL_INTERVAL).await;
    }
    browser.expect_text("main h1", "SSH keys").await;
    assert_eq!(active_logins(cluster, "user").await.len(), 1);
}
