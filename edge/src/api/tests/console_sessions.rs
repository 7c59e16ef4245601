//! Requests by the cookie of a login to the web console: which pages may cause them, and the tokens behind it.

use super::console_login::{Browser, ORIGIN, provider, with_console};
use super::harness::ApiHarness;
use axum::http::Method;
use domain::browser_session::REFRESH_LEASE;
use domain::policy::PolicyKey;
use futures::future::join_all;
use local_servers::identity::browser_login::LoginFaults;
use secrecy::ExposeSecret as _;
use serde_json::json;
use std::time::{Duration, Instant};

/// Longer than any test takes on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

fn tokens_of(seconds: i64) -> LoginFaults {
    LoginFaults { token_seconds: Some(seconds), ..LoginFaults::default() }
}

/// A browser whose access token has ended.
async fn with_ended_token<'a>(
    api: &'a ApiHarness,
    provider: &'a local_servers::identity::IdentityProvider,
) -> Browser<'a> {
    provider.set_login_faults(tokens_of(2));
    let browser = Browser::logged_in(api, provider, "user").await;
    tokio::time::sleep(Duration::from_millis(2_100)).await;
    provider.set_login_faults(LoginFaults::default());
    browser
}

#[tokio::test]
async fn post_of_a_foreign_page_is_refused() {
    let (provider, api) = with_console().await;
    let browser = Browser::logged_in(&api, &provider, "user").await;
    let cookie = format!("{}={}", super::console_login::SESSION, browser.cookies[super::console_login::SESSION]);
    // Each of the two headers suffices.
    let foreign = [
        ("https://evil.example", "cross-site"),
        ("https://other.gpu.example", "same-site"),
        (ORIGIN, "cross-site"),
        ("https://evil.example", "same-origin"),
    ];
    for (origin, site) in foreign {
        for path in ["/api/v1/service-accounts", "/console/logout"] {
            let request = api.post(path).header("cookie", &cookie).header("origin", origin);
            let refused = request.header("sec-fetch-site", site).json(&json!({"name": "x"})).send().await;
            assert_eq!((refused.status, &refused.body["code"]), (403, &json!("forbidden")), "{path}: {}", refused.body);
        }
    }
    let without = api.post("/api/v1/service-accounts").header("cookie", &cookie).json(&json!({"name": "x"}));
    without.send().await.refused(403, "forbidden");
    browser.post("/api/v1/service-accounts").json(&json!({"name": "x"})).send().await.is(201);
}

#[tokio::test]
async fn websocket_of_a_foreign_page_is_refused() {
    let (provider, api) = with_console().await;
    let browser = Browser::logged_in(&api, &provider, "user").await;
    let cookie = format!("{}={}", super::console_login::SESSION, browser.cookies[super::console_login::SESSION]);
    let connect = |origin: Option<&str>| {
        let request = api.get("/api/v1/notifications/ws").header("cookie", &cookie).header("upgrade", "websocket");
        let request = request.header("connection", "upgrade").header("sec-websocket-version", "13");
        let request = request.header("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==");
        let request = request.header("sec-websocket-protocol", "gpu.notifications.v1");
        match origin {
            Some(origin) => request.header("origin", origin),
            None => request,
        }
    };
    connect(Some("https://evil.example")).send().await.refused(403, "forbidden");
    connect(None).send().await.refused(403, "forbidden");
    // One of ours gets as far as this harness has a connection to upgrade.
    let own = connect(Some(ORIGIN)).send().await;
    assert_eq!(own.body["code"], "upgrade_required", "{}", own.body);
}

#[tokio::test]
async fn cookie_adds_nothing_to_a_bearer_token() {
    let (provider, api) = with_console().await;
    let admin = Browser::logged_in(&api, &provider, "admin").await;
    let user = provider.token_of("user").unwrap();
    let with_both = admin.get("/api/v1/me").by(user.expose_secret()).send().await;
    assert_eq!((&with_both.is(200)["username"], &with_both.body["session"]), (&json!("user"), &json!(null)));
    admin.get("/api/v1/admin/nodes").by(user.expose_secret()).send().await.refused(403, "forbidden");
    admin.get("/api/v1/me").by("garbage").send().await.refused(401, "unauthenticated");
    // A token needs no origin.
    let cookie = admin.cookies[super::console_login::SESSION].clone();
    let request = api.get("/api/v1/me").header("cookie", &format!("{}={cookie}", super::console_login::SESSION));
    request.by(user.expose_secret()).send().await.is(200);
}

#[tokio::test]
async fn all_requests_at_an_ended_token_cause_one_refresh() {
    let (provider, api) = with_console().await;
    let browser = with_ended_token(&api, &provider).await;
    let before = provider.refresh_calls();
    for answer in join_all((0..20).map(|_| browser.get("/api/v1/me").send())).await {
        answer.is(200);
    }
    assert_eq!(provider.refresh_calls() - before, 1);
}

#[tokio::test]
async fn login_outlives_an_outage_of_the_provider_and_says_why_it_waits() {
    let (provider, api) = with_console().await;
    let browser = with_ended_token(&api, &provider).await;
    provider.set_login_faults(LoginFaults { is_away: true, ..LoginFaults::default() });
    let waits = browser.get("/api/v1/me").send().await;
    assert_eq!(waits.refused(503, "service_unavailable")["reason"], "identity_provider_away", "{}", waits.body);
    provider.set_login_faults(LoginFaults::default());
    let end = Instant::now() + LIMIT;
    while browser.get("/api/v1/me").send().await.status != 200 {
        assert!(Instant::now() < end, "the login is lost");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test]
async fn login_outlives_a_database_that_is_down_for_longer_than_the_lease_of_a_refresh() {
    let provider = provider().await;
    let api = ApiHarness::with_console_and_own_postgres(&provider).await;
    let browser = with_ended_token(&api, &provider).await;
    let revoking = LoginFaults { reuse_ends_login: true, ..LoginFaults::default() };
    provider.set_login_faults(LoginFaults { refreshes_hang: true, ..revoking.clone() });
    let before = provider.refresh_calls();
    let outage = async {
        while provider.refresh_calls() == before {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        // The provider issues tokens that replace the spent ones, and they cannot be stored.
        api.kill_postgres().await;
        provider.set_login_faults(revoking.clone());
        tokio::time::sleep(Duration::from_secs(2)).await;
        api.advance_clock(REFRESH_LEASE * 2);
        api.start_postgres_again().await;
    };
    let (first, ()) = tokio::join!(browser.get("/api/v1/me").send(), outage);
    assert!(matches!(first.status, 200 | 503), "{}", first.body);
    // The tabs of the browser come before the replica that has the tokens sends them again.
    let end = Instant::now() + LIMIT;
    loop {
        let answers = join_all((0..4).map(|_| browser.get("/api/v1/me").send())).await;
        for answer in &answers {
            assert!(matches!(answer.status, 200 | 503), "the login is lost: {}", answer.body);
        }
        if answers.iter().all(|answer| answer.status == 200) {
            break;
        }
        assert!(Instant::now() < end, "{}", answers[0].body);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(provider.refresh_calls() - before, 1, "the spent refresh token was sent");
}

#[tokio::test]
async fn login_ends_where_the_provider_refuses_its_refresh() {
    let (provider, api) = with_console().await;
    let browser = with_ended_token(&api, &provider).await;
    // An administrator of the provider has ended the login there; its notice does not arrive here.
    let _ = provider.end_logins_of("user").await;
    let refused = browser.get("/api/v1/me").send().await;
    assert_eq!(refused.refused(401, "session_ended")["reason"], "provider_refused", "{}", refused.body);
    let admin = provider.token_of("admin").unwrap();
    let listed = api.get("/api/v1/admin/browser-sessions?state=ended").by(admin.expose_secret()).send().await;
    assert_eq!(listed.is(200)["items"][0]["end_reason"], "provider_refused");
}

#[tokio::test]
async fn idle_login_is_refused_before_its_entity_has_ended_it() {
    let (provider, api) = with_console().await;
    api.set_policy(PolicyKey::AuthBrowserSessionIdle, 60);
    let browser = Browser::logged_in(&api, &provider, "user").await;
    browser.get("/api/v1/me").send().await.is(200);
    api.stop_clock_at(&(chrono::Utc::now() + chrono::TimeDelta::seconds(120)).to_rfc3339());
    let refused = browser.call(Method::GET, "/api/v1/me").send().await;
    assert_eq!(refused.refused(401, "session_ended")["reason"], "idle", "{}", refused.body);
}
