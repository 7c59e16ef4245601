//! Protections of the login to the web console against browsers that send what is not theirs, and against a provider that issues other tokens.

use super::console_login::{Browser, SESSION, expect_no_login, location, with_console};
use super::harness::TestRequest;
use crate::auth::browser_session::{SessionFault, presented};
use axum::http::{HeaderMap, HeaderValue, Method, header};
use chrono::Utc;
use domain::browser_session::BrowserSession;
use domain::policy::PolicyKey;
use local_servers::identity::browser_login::LoginFaults;
use reqwest::Url;
use secrecy::ExposeSecret as _;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

fn access_token_with(claim: &str, value: &str) -> LoginFaults {
    LoginFaults { access_token: [(claim.to_owned(), json!(value))].into(), ..LoginFaults::default() }
}

#[tokio::test]
async fn cookie_of_another_secret_opens_no_session() {
    let (provider, api) = with_console().await;
    let victim = Browser::logged_in(&api, &provider, "user").await;
    let thief = Browser::logged_in(&api, &provider, "user2").await;
    let secret = thief.cookies[SESSION].rsplit_once('.').unwrap().0.to_owned();
    // The id of a session is in lists and logs.
    let id = victim.cookies[SESSION].rsplit_once('.').unwrap().1.to_owned();
    let cookies = [(SESSION.to_owned(), format!("{secret}.{id}"))].into();
    let forged = Browser { cookies, ..Browser::new(&api, &provider) };
    let refused = forged.get("/api/v1/me").send().await;
    assert_eq!(refused.refused(401, "session_ended")["reason"], "unknown");
}

#[tokio::test]
async fn each_login_has_secrets_of_its_own_in_a_cookie_that_no_script_reads() {
    let (_provider, api) = with_console().await;
    let mut seen = BTreeSet::new();
    for _ in 0..2 {
        let begun = api.get("/console/login").send().await;
        begun.is(302);
        let cookie = begun.headers["set-cookie"].to_str().unwrap();
        let parts = ["__Host-gpuaas-login=", "; Path=/;", "; Secure", "; HttpOnly", "; SameSite=Lax", "; Max-Age=3600"];
        for part in parts {
            assert!(cookie.contains(part), "{part} in {cookie}");
        }
        assert_eq!(begun.headers["referrer-policy"], "no-referrer");
        assert_eq!(begun.headers["cache-control"], "no-store");
        let at: Url = location(&begun).parse().unwrap();
        let asked: BTreeMap<_, _> = at.query_pairs().into_owned().collect();
        assert_eq!(asked["code_challenge_method"], "S256");
        for name in ["state", "nonce", "code_challenge"] {
            assert!(asked[name].len() >= 43, "{name} has fewer than 256 bits: {}", asked[name]);
            assert!(seen.insert(asked[name].clone()), "{name} is not its own");
        }
    }
}

#[tokio::test]
async fn login_does_not_go_on_in_a_session_that_was_planted() {
    let (provider, api) = with_console().await;
    let attacker = Browser::logged_in(&api, &provider, "user2").await;
    let mut victim = Browser { cookies: attacker.cookies.clone(), ..Browser::new(&api, &provider) };
    let done = victim.log_in("user").await;
    done.is(303);
    assert_eq!(done.headers["referrer-policy"], "no-referrer");
    assert_ne!(victim.cookies[SESSION], attacker.cookies[SESSION]);
    for (browser, username) in [(&victim, "user"), (&attacker, "user2")] {
        assert_eq!(browser.get("/api/v1/me").send().await.is(200)["username"], username);
    }
}

#[tokio::test]
async fn access_token_for_another_audience_is_no_login() {
    expect_no_login(access_token_with("aud", "another-api")).await;
}

/// A login whose refresh brings an access token with these claims ends.
async fn expect_end_by_refresh(faults: LoginFaults) {
    let (provider, api) = with_console().await;
    provider.set_login_faults(LoginFaults { token_seconds: Some(2), ..LoginFaults::default() });
    let browser = Browser::logged_in(&api, &provider, "user").await;
    tokio::time::sleep(Duration::from_millis(2_100)).await;
    provider.set_login_faults(faults);
    let refused = browser.get("/api/v1/me").send().await;
    assert_eq!(refused.refused(401, "session_ended")["reason"], "provider_refused", "{}", refused.body);
    provider.set_login_faults(LoginFaults::default());
    let admin = provider.token_of("admin").unwrap();
    let listed = api.get("/api/v1/admin/browser-sessions?state=active").by(admin.expose_secret()).send().await;
    assert_eq!(listed.is(200)["items"], json!([]), "the login is over");
}

#[tokio::test]
async fn refresh_to_the_tokens_of_another_user_ends_the_login() {
    expect_end_by_refresh(access_token_with("sub", "another-user")).await;
}

#[tokio::test]
async fn refresh_to_a_token_that_is_not_accepted_ends_the_login() {
    expect_end_by_refresh(access_token_with("aud", "another-api")).await;
}

#[tokio::test]
async fn requests_without_a_login_are_rate_limited_by_address() {
    let (_provider, api) = with_console().await;
    api.set_policy(PolicyKey::RateLimitAuthenticationFailures, 10);
    let garbage = "logout_token=a.b.c".to_owned();
    let send = async |route: u8, last: u8| {
        let request: TestRequest<'_> = match route {
            0 => api.get("/console/login"),
            1 => api.get("/console/callback?code=x&state=y"),
            _ => {
                let post = api.call(Method::POST, "/console/backchannel-logout").raw(garbage.clone());
                post.header("content-type", "application/x-www-form-urlencoded")
            }
        };
        request.from([192, 0, 2, last]).send().await.status
    };
    for (route, expected) in [(0, 302), (1, 400), (2, 400)] {
        for _ in 0..10 {
            assert_eq!(send(route, route).await, expected, "{route}");
        }
        assert_eq!(send(route, route).await, 429, "{route}");
        assert_eq!(send(route, 200 + route).await, expected, "another address");
    }
}

#[tokio::test]
async fn oversized_parameters_of_a_callback_are_not_passed_on() {
    let (provider, api) = with_console().await;
    let mut browser = Browser::new(&api, &provider);
    let at = browser.begin("/console/").await;
    let back = browser.authenticate(&at, "user").await;
    let code = back.split_once("code=").unwrap().1.split('&').next().unwrap().to_owned();
    let refused = browser.call_back(&back.replace(&code, &"c".repeat(4097))).await;
    assert_eq!((refused.status, &refused.body["code"]), (401, &json!("unauthenticated")), "{}", refused.body);
    assert!(refused.body["message"].as_str().unwrap().contains("sent no code"), "{}", refused.body);
    let refused = browser.call_back(&format!("/console/callback?code=x&state={}", "s".repeat(4097))).await;
    assert_eq!((refused.status, &refused.body["code"]), (400, &json!("invalid_request")), "{}", refused.body);
}

#[tokio::test]
async fn place_of_a_login_is_bounded_and_one_line() {
    let (provider, api) = with_console().await;
    let mut browser = Browser::new(&api, &provider);
    let at = browser.begin("/console/").await;
    let back = browser.authenticate(&at, "user").await;
    let (name, value) = browser.cookies.first_key_value().expect("the login's cookie");
    let agent = format!("a\tb{}", "c".repeat(1000));
    let request = api.get(&back).header("cookie", &format!("{name}={value}")).header("user-agent", &agent);
    let done = request.send().await;
    done.is(303);
    browser.store_cookies(&done);
    let listed = browser.get("/api/v1/me/sessions").send().await;
    let shown = listed.is(200)["items"][0]["user_agent"].as_str().unwrap().to_owned();
    assert_eq!((shown.len(), shown.contains('\t')), (256, false), "{shown}");
}

#[tokio::test]
async fn sealed_tokens_of_one_session_open_in_no_other() {
    let (provider, api) = with_console().await;
    let reader = api.app.authenticator.browser_sessions().unwrap();
    let stored = async |browser: &Browser<'_>| {
        let line = HeaderValue::from_str(&format!("{SESSION}={}", browser.cookies[SESSION])).unwrap();
        let headers: HeaderMap = [(header::COOKIE, line)].into_iter().collect();
        reader.session(&presented(&headers).unwrap(), Utc::now()).await.unwrap()
    };
    let first = stored(&Browser::logged_in(&api, &provider, "user").await).await;
    let second = stored(&Browser::logged_in(&api, &provider, "user2").await).await;
    assert!(reader.open(&first).is_ok());
    let swapped = BrowserSession { tokens_enc: second.tokens_enc, ..first };
    assert!(matches!(reader.open(&swapped), Err(SessionFault::Sealed(_))), "a row has the tokens of another one");
}

#[tokio::test]
async fn id_token_without_a_claim_that_binds_it_is_refused() {
    let null =
        |claim: &str| LoginFaults { id_token: [(claim.to_owned(), Value::Null)].into(), ..LoginFaults::default() };
    for claim in ["exp", "iat", "sub", "aud"] {
        expect_no_login(null(claim)).await;
    }
}
