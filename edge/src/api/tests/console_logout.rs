//! The end of a login to the web console: by its user, by administrators, and by the identity provider.

use super::console_login::{Browser, SESSION, location, provider, with_console};
use super::harness::{ApiHarness, TestResponse};
use axum::http::Method;
use domain::browser_session::{BrowserSession, Instruction, Maintenance};
use local_servers::identity::IdentityProvider;
use local_servers::identity::browser_login::CONSOLE_CLIENT_ID;
use secrecy::ExposeSecret as _;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use uuid::Uuid;

const EVENT: &str = "http://schemas.openid.net/event/backchannel-logout";

#[track_caller]
fn expect_ended(answer: &TestResponse, reason: &str) {
    assert_eq!(answer.refused(401, "session_ended")["reason"], reason, "{}", answer.body);
}

#[tokio::test]
async fn stolen_cookie_is_refused_after_the_logout() {
    let (provider, api) = with_console().await;
    let browser = Browser::logged_in(&api, &provider, "user").await;
    let thief = Browser { cookies: browser.cookies.clone(), ..Browser::new(&api, &provider) };
    thief.get("/api/v1/me").send().await.is(200);
    let answer = browser.post("/console/logout").send().await;
    assert_eq!(answer.is(200), &json!({"logout_url": "/console/logout"}));
    let cleared = answer.headers["set-cookie"].to_str().unwrap();
    assert!(cleared.starts_with(&format!("{SESSION}=;")) && cleared.contains("Max-Age=0"), "{cleared}");
    expect_ended(&thief.get("/api/v1/me").send().await, "logged_out");
    expect_ended(&thief.post("/api/v1/ssh-keys").json(&json!({})).send().await, "logged_out");
    let again = browser.post("/console/logout").send().await;
    assert_eq!((again.status, &again.body["code"]), (401, &json!("session_ended")));
}

/// The browser's tab goes there.
async fn navigate(browser: &mut Browser<'_>, path: &str) -> TestResponse {
    let request = browser.get(path).header("sec-fetch-mode", "navigate").header("sec-fetch-dest", "document");
    let answer = request.send().await;
    browser.store_cookies(&answer);
    answer
}

#[tokio::test]
async fn logout_takes_the_id_token_to_the_provider_past_every_script() {
    let (provider, api) = with_console().await;
    let mut browser = Browser::logged_in(&api, &provider, "user").await;
    let answer = browser.post("/console/logout").send().await;
    let readable = format!("{}", answer.is(200));
    assert!(!readable.contains("eyJ") && !readable.contains("id_token"), "{readable}");
    let cookies: Vec<_> = answer.headers.get_all("set-cookie").iter().map(|line| line.to_str().unwrap()).collect();
    let pending = cookies.iter().find(|line| line.starts_with("__Host-gpuaas-logout=")).expect("a sealed logout");
    for part in ["; Path=/;", "; Secure", "; HttpOnly", "; SameSite=Strict", "; Max-Age=60"] {
        assert!(pending.contains(part), "{part} in {pending}");
    }
    assert!(!pending.contains("eyJ"), "the ID token is readable in the browser");
    browser.store_cookies(&answer);
    // A script's request is refused, whatever it does with redirects.
    for (mode, destination) in [("cors", "empty"), ("no-cors", "empty"), ("navigate", "iframe")] {
        let request =
            browser.get("/console/logout").header("sec-fetch-mode", mode).header("sec-fetch-dest", destination);
        let refused = request.send().await;
        assert_eq!((refused.status, &refused.body["code"]), (403, &json!("forbidden")), "{}", refused.body);
        assert!(!refused.headers.contains_key("location"));
    }
    let gone = navigate(&mut browser, "/console/logout").await;
    gone.is(303);
    let url = reqwest::Url::parse(location(&gone)).unwrap();
    assert!(url.as_str().starts_with(&provider.issuer()), "{url}");
    let asked: std::collections::BTreeMap<_, _> = url.query_pairs().into_owned().collect();
    assert_eq!(asked["client_id"], CONSOLE_CLIENT_ID);
    for name in ["post_logout_redirect_uri", "logout_uri"] {
        assert_eq!(asked[name], "https://api.gpu.example/console/");
    }
    assert!(asked["id_token_hint"].starts_with("eyJ"));
    assert_eq!(gone.headers["referrer-policy"], "no-referrer");
    assert_eq!(gone.headers["cache-control"], "no-store");
    // The provider accepts the hint, and sends the browser back.
    let http = reqwest::Client::builder().redirect(reqwest::redirect::Policy::none()).build().unwrap();
    let back = http.get(url).send().await.unwrap();
    assert_eq!(back.headers()["location"], "https://api.gpu.example/console/");
    // Once: a later navigation leads to the console, and ends nothing at the provider.
    assert_eq!(location(&navigate(&mut browser, "/console/logout").await), "/console/");
    assert!(browser.cookies.is_empty(), "{:?}", browser.cookies.keys());
}

#[tokio::test]
async fn logout_that_was_not_begun_or_is_a_minute_old_leads_to_the_console() {
    let (provider, api) = with_console().await;
    let mut browser = Browser::logged_in(&api, &provider, "user").await;
    assert_eq!(location(&navigate(&mut browser, "/console/logout").await), "/console/");
    browser.get("/api/v1/me").send().await.is(200);
    let answer = browser.post("/console/logout").send().await;
    browser.store_cookies(&answer);
    let mut forged = Browser { cookies: browser.cookies.clone(), ..Browser::new(&api, &provider) };
    forged.cookies.insert("__Host-gpuaas-logout".to_owned(), "AAAA".to_owned());
    assert_eq!(location(&navigate(&mut forged, "/console/logout").await), "/console/");
    api.stop_clock_at(&(chrono::Utc::now() + chrono::TimeDelta::seconds(61)).to_rfc3339());
    assert_eq!(location(&navigate(&mut browser, "/console/logout").await), "/console/");
}

#[tokio::test]
async fn user_ends_another_login_of_theirs_and_an_administrator_anyones() {
    let (provider, api) = with_console().await;
    let first = Browser::logged_in(&api, &provider, "user").await;
    let second = Browser::logged_in(&api, &provider, "user").await;
    let other = Browser::logged_in(&api, &provider, "user2").await;
    let id_of = async |browser: &Browser<'_>| {
        browser.get("/api/v1/me").send().await.is(200)["session"]["id"].as_str().unwrap().to_owned()
    };
    let (first_id, other_id) = (id_of(&first).await, id_of(&other).await);
    second.post(&format!("/api/v1/me/sessions/{other_id}/end")).send().await.refused(404, "not_found");
    let ended = second.post(&format!("/api/v1/me/sessions/{first_id}/end")).send().await;
    assert_eq!((&ended.is(200)["state"], &ended.body["end_reason"]), (&json!("ended"), &json!("ended_by_user")));
    expect_ended(&first.get("/api/v1/me").send().await, "ended_by_user");
    let active = second.get("/api/v1/me/sessions?state=active").send().await;
    assert_eq!(active.is(200)["items"].as_array().unwrap().len(), 1);

    let end = format!("/api/v1/admin/browser-sessions/{other_id}/end");
    second.post(&end).json(&json!({"reason": "x"})).send().await.refused(403, "forbidden");
    let admin = provider.token_of("admin").unwrap();
    let reason = json!({"reason": "a stolen laptop"});
    api.post(&end).by(admin.expose_secret()).json(&reason).send().await.is(200);
    expect_ended(&other.get("/api/v1/me").send().await, "ended_by_administrator");
    let log = api.get("/api/v1/admin/audit-log?action=browser_sessions.end").by(admin.expose_secret()).send().await;
    assert_eq!(log.is(200)["items"][0]["metadata"]["reason"], "a stolen laptop", "{}", log.body);
}

#[tokio::test]
async fn login_above_the_limit_ends_the_oldest() {
    let (provider, api) = with_console().await;
    api.set_policy(domain::policy::PolicyKey::AuthBrowserSessionsPerUser, 1);
    let first = Browser::logged_in(&api, &provider, "user").await;
    let second = Browser::logged_in(&api, &provider, "user").await;
    expect_ended(&first.get("/api/v1/me").send().await, "displaced");
    second.get("/api/v1/me").send().await.is(200);
}

/// A logout token of a user, with some claims changed.
fn logout_token(provider: &IdentityProvider, changes: &Value) -> String {
    let now = chrono::Utc::now().timestamp();
    let mut claims = json!({
        "iss": provider.issuer(), "aud": CONSOLE_CLIENT_ID, "sub": provider.person("user").unwrap().id, "iat": now,
        "exp": now + 120, "jti": "one", "events": { EVENT: {} },
    });
    for (name, value) in changes.as_object().unwrap() {
        claims[name] = value.clone();
    }
    provider.mint(&claims).unwrap().expose_secret().to_owned()
}

async fn send_logout(api: &ApiHarness, token: &str) -> TestResponse {
    let request = api.call(Method::POST, "/console/backchannel-logout");
    let request = request.header("content-type", "application/x-www-form-urlencoded");
    request.raw(format!("logout_token={token}")).send().await
}

/// A logout token with these changes is refused and ends no login; one without them ends it.
async fn expect_no_logout(changes: Value) {
    let (provider, api) = with_console().await;
    let browser = Browser::logged_in(&api, &provider, "user").await;
    let refused = send_logout(&api, &logout_token(&provider, &changes)).await;
    assert_eq!((refused.status, &refused.body["code"]), (400, &json!("invalid_request")), "{}", refused.body);
    browser.get("/api/v1/me").send().await.is(200);
    send_logout(&api, &logout_token(&provider, &json!({}))).await.is(200);
    expect_ended(&browser.get("/api/v1/me").send().await, "provider_logout");
}

#[tokio::test]
async fn forged_logout_token_ends_nothing() {
    let (provider, forger) = (provider().await, provider().await);
    let api = ApiHarness::with_console(&provider).await;
    let browser = Browser::logged_in(&api, &provider, "user").await;
    // The claims are right; the key is not the provider's.
    let right = json!({"iss": provider.issuer(), "sub": provider.person("user").unwrap().id});
    let forged = logout_token(&forger, &right);
    for token in [forged.as_str(), "", "a.b.c"] {
        let refused = send_logout(&api, token).await;
        assert_eq!((refused.status, &refused.body["code"]), (400, &json!("invalid_request")), "{}", refused.body);
    }
    browser.get("/api/v1/me").send().await.is(200);
}

#[tokio::test]
async fn logout_token_without_its_event_ends_nothing() {
    expect_no_logout(json!({"events": {}})).await;
}

#[tokio::test]
async fn id_token_is_no_logout_token() {
    expect_no_logout(json!({"nonce": "n"})).await;
}

#[tokio::test]
async fn logout_token_for_another_client_ends_nothing() {
    expect_no_logout(json!({"aud": "another"})).await;
}

#[tokio::test]
async fn logout_token_ends_one_login_or_all_of_a_user() {
    let (provider, api) = with_console().await;
    let (first, second) =
        (Browser::logged_in(&api, &provider, "user").await, Browser::logged_in(&api, &provider, "user").await);
    let other = Browser::logged_in(&api, &provider, "user2").await;
    // The subject alone: all of that user.
    send_logout(&api, &logout_token(&provider, &json!({}))).await.is(200);
    for ended in [&first, &second] {
        expect_ended(&ended.get("/api/v1/me").send().await, "provider_logout");
    }
    other.get("/api/v1/me").send().await.is(200);
}

#[tokio::test]
async fn replayed_logout_token_is_refused_and_ends_no_later_login() {
    let (provider, api) = with_console().await;
    let first = Browser::logged_in(&api, &provider, "user").await;
    let token = logout_token(&provider, &json!({}));
    send_logout(&api, &token).await.is(200);
    expect_ended(&first.get("/api/v1/me").send().await, "provider_logout");
    let second = Browser::logged_in(&api, &provider, "user").await;
    let refused = send_logout(&api, &token).await;
    assert_eq!((refused.status, &refused.body["code"]), (400, &json!("invalid_request")), "{}", refused.body);
    second.get("/api/v1/me").send().await.is(200);
}

/// The provider logs the user out after it has issued the tokens, and before the session is stored that could be ended.
#[tokio::test]
async fn logout_that_is_reported_while_a_login_is_completed_leaves_no_session() {
    let (provider, api) = with_console().await;
    let subject = |name: &str| json!({"sub": provider.person(name).unwrap().id});
    let later = json!({"iat": chrono::Utc::now().timestamp() + 5});
    send_logout(&api, &logout_token(&provider, &later)).await.is(200);
    let mut browser = Browser::new(&api, &provider);
    let refused = browser.log_in("user").await;
    assert_eq!((refused.status, &refused.body["code"]), (401, &json!("unauthenticated")), "{}", refused.body);
    assert!(refused.line().contains("has logged you out meanwhile"), "{}", refused.line());
    assert!(!browser.cookies.contains_key(SESSION));
    let admin = provider.token_of("admin").unwrap();
    let sessions = api.get("/api/v1/admin/browser-sessions").by(admin.expose_secret()).send().await;
    let ended = &sessions.is(200)["items"][0];
    assert_eq!((&ended["state"], &ended["end_reason"]), (&json!("ended"), &json!("provider_logout")), "{ended}");
    // It is the logout of this user alone, and of the logins until then.
    Browser::logged_in(&api, &provider, "user2").await.get("/api/v1/me").send().await.is(200);
    let earlier = json!({"iat": chrono::Utc::now().timestamp() - 5, "jti": "two"});
    let of_user2 = merged(&subject("user2"), &earlier);
    send_logout(&api, &logout_token(&provider, &of_user2)).await.is(200);
    Browser::logged_in(&api, &provider, "user2").await.get("/api/v1/me").send().await.is(200);
}

fn merged(one: &Value, other: &Value) -> Value {
    let fields = [one, other].map(|value| value.as_object().unwrap().clone());
    Value::Object(fields.into_iter().flatten().collect())
}

async fn session_id(browser: &Browser<'_>) -> Uuid {
    let me = browser.get("/api/v1/me").send().await;
    me.is(200)["session"]["id"].as_str().unwrap().parse().unwrap()
}

#[tokio::test]
async fn logout_token_that_has_ended_some_logins_ends_the_others_when_it_is_sent_again() {
    let (provider, api) = with_console().await;
    let (first, second) =
        (Browser::logged_in(&api, &provider, "user").await, Browser::logged_in(&api, &provider, "user").await);
    let token = logout_token(&provider, &json!({"iat": chrono::Utc::now().timestamp() + 2}));
    // The replica that received it first was killed after the first login.
    let token_sha256 = hex::encode(Sha256::digest("one"));
    let end = Instruction::EndByProvider { token_sha256, issued_at: chrono::Utc::now() };
    api.ask_as_system::<BrowserSession>(session_id(&first).await, end).await;
    expect_ended(&first.get("/api/v1/me").send().await, "provider_logout");
    send_logout(&api, &token).await.is(200);
    expect_ended(&second.get("/api/v1/me").send().await, "provider_logout");
    let refused = send_logout(&api, &token).await;
    assert_eq!((refused.status, &refused.body["code"]), (400, &json!("invalid_request")), "{}", refused.body);
}

#[tokio::test]
async fn login_that_cannot_be_read_keeps_no_other_from_being_ended() {
    let (provider, api) = with_console().await;
    let (first, second) =
        (Browser::logged_in(&api, &provider, "user").await, Browser::logged_in(&api, &provider, "user").await);
    api.make_oldest_session_unreadable().await;
    send_logout(&api, &logout_token(&provider, &json!({}))).await.is(200);
    for ended in [&first, &second] {
        expect_ended(&ended.get("/api/v1/me").send().await, "provider_logout");
    }
}

#[tokio::test]
async fn login_whose_tokens_cannot_be_opened_can_be_left() {
    let (provider, api) = with_console().await;
    let mut browser = Browser::logged_in(&api, &provider, "user").await;
    let id = session_id(&browser).await;
    let stored = crate::app_state::read_model::find::<BrowserSession>(&api.app, id).await.unwrap().unwrap().it;
    // The key that sealed them has left the ring.
    let lost = Maintenance::Reseal { before: stored.tokens_enc.unwrap(), tokens_enc: "AAAA".to_owned() };
    api.ask_as_system::<BrowserSession>(id, lost).await;
    assert_eq!(browser.get("/api/v1/me").send().await.status, 500);
    let answer = browser.post("/console/logout").send().await;
    assert_eq!(answer.is(200), &json!({"logout_url": "/console/logout"}));
    expect_ended(&browser.get("/api/v1/me").send().await, "logged_out");
    browser.store_cookies(&answer);
    // The provider is asked without a hint.
    let gone = navigate(&mut browser, "/console/logout").await;
    assert!(location(&gone).starts_with(&provider.issuer()) && !location(&gone).contains("id_token_hint"));
}
