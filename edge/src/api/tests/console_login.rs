//! The login to the web console, as a browser sees it, and what is not a login.

use super::harness::{ApiHarness, TestRequest, TestResponse};
use axum::http::Method;
use local_servers::identity::IdentityProvider;
use local_servers::identity::browser_login::{LoginFaults, RegisteredConsole};
use reqwest::Url;
use secrecy::ExposeSecret as _;
use serde_json::{Value, json};
use std::collections::BTreeMap;

pub(super) const SESSION: &str = "__Host-gpuaas-session";
pub(super) const ORIGIN: &str = "https://api.gpu.example";

/// A provider at which the console is registered.
pub(super) async fn provider() -> IdentityProvider {
    let provider = IdentityProvider::start().await.unwrap();
    provider.register_console(RegisteredConsole { url: ORIGIN.to_owned(), ca_pem: String::new() });
    provider
}

/// Such a provider, and a harness with it.
pub(super) async fn with_console() -> (IdentityProvider, ApiHarness) {
    let provider = provider().await;
    let api = ApiHarness::with_console(&provider).await;
    (provider, api)
}

/// A browser with its cookies.
pub(super) struct Browser<'a> {
    pub(super) api: &'a ApiHarness,
    pub(super) provider: &'a IdentityProvider,
    pub(super) cookies: BTreeMap<String, String>,
}

impl<'a> Browser<'a> {
    pub(super) fn new(api: &'a ApiHarness, provider: &'a IdentityProvider) -> Self {
        Self { api, provider, cookies: BTreeMap::new() }
    }

    /// A browser that is logged in.
    pub(super) async fn logged_in(api: &'a ApiHarness, provider: &'a IdentityProvider, username: &str) -> Self {
        let mut browser = Self::new(api, provider);
        browser.log_in(username).await.is(303);
        browser
    }

    /// Begins a login, and returns where the provider is.
    pub(super) async fn begin(&mut self, return_to: &str) -> Url {
        let query = Url::parse_with_params("https://x/console/login", [("return_to", return_to)]).unwrap();
        let answer = self.api.get(&format!("/console/login?{}", query.query().unwrap())).send().await;
        answer.is(302);
        self.store_cookies(&answer);
        location(&answer).parse().unwrap()
    }

    /// Fills in the provider's form, and returns the path to which the browser is sent back.
    pub(super) async fn authenticate(&self, at: &Url, username: &str) -> String {
        let password = self.provider.person(username).unwrap().password;
        let form = [("username", username), ("password", password.expose_secret())];
        let http = reqwest::Client::builder().redirect(reqwest::redirect::Policy::none()).build().unwrap();
        let answer = http.post(at.clone()).form(&form).send().await.unwrap();
        let back = answer.headers()["location"].to_str().unwrap().to_owned();
        back.strip_prefix(ORIGIN).expect("it leads back").to_owned()
    }

    pub(super) async fn call_back(&mut self, path: &str) -> TestResponse {
        let answer = self.with_cookies(self.api.get(path)).send().await;
        self.store_cookies(&answer);
        answer
    }

    pub(super) async fn log_in(&mut self, username: &str) -> TestResponse {
        let at = self.begin("/console/").await;
        let back = self.authenticate(&at, username).await;
        self.call_back(&back).await
    }

    pub(super) fn store_cookies(&mut self, answer: &TestResponse) {
        for cookie in answer.headers.get_all("set-cookie") {
            let (name, value) = cookie.to_str().unwrap().split(';').next().unwrap().split_once('=').unwrap();
            match value {
                "" => self.cookies.remove(name),
                value => self.cookies.insert(name.to_owned(), value.to_owned()),
            };
        }
    }

    fn with_cookies<'b>(&self, request: TestRequest<'b>) -> TestRequest<'b> {
        let pairs: Vec<_> = self.cookies.iter().map(|(name, value)| format!("{name}={value}")).collect();
        if pairs.is_empty() { request } else { request.header("cookie", &pairs.join("; ")) }
    }

    /// A request of a page of ours.
    pub(super) fn call(&self, method: Method, path: &str) -> TestRequest<'a> {
        let is_safe = method == Method::GET;
        let request = self.with_cookies(self.api.call(method, path)).header("sec-fetch-site", "same-origin");
        if is_safe { request } else { request.header("origin", ORIGIN) }
    }

    pub(super) fn get(&self, path: &str) -> TestRequest<'a> {
        self.call(Method::GET, path)
    }

    pub(super) fn post(&self, path: &str) -> TestRequest<'a> {
        self.call(Method::POST, path)
    }
}

pub(super) fn location(answer: &TestResponse) -> &str {
    answer.headers["location"].to_str().unwrap()
}

/// The sessions of all users.
async fn sessions(api: &ApiHarness, provider: &IdentityProvider) -> Vec<Value> {
    let token = provider.token_of("admin").unwrap();
    let page = api.get("/api/v1/admin/browser-sessions").by(token.expose_secret()).send().await;
    page.is(200)["items"].as_array().unwrap().clone()
}

/// A login with these mistakes of the provider is refused, and opens no session.
pub(super) async fn expect_no_login(faults: LoginFaults) {
    let (provider, api) = with_console().await;
    provider.set_login_faults(faults);
    let mut browser = Browser::new(&api, &provider);
    let refused = browser.log_in("user").await;
    assert_eq!((refused.status, &refused.body["code"]), (401, &json!("unauthenticated")), "{}", refused.body);
    assert!(!browser.cookies.contains_key(SESSION));
    assert!(sessions(&api, &provider).await.is_empty());
}

fn id_token_with(claim: &str, value: &str) -> LoginFaults {
    LoginFaults { id_token: [(claim.to_owned(), json!(value))].into(), ..LoginFaults::default() }
}

#[tokio::test]
async fn login_gives_the_browser_one_strict_cookie_and_no_token() {
    let (provider, api) = with_console().await;
    let mut browser = Browser::new(&api, &provider);
    let at = browser.begin("/console/nodes?state=active").await;
    let asked: BTreeMap<_, _> = at.query_pairs().into_owned().collect();
    assert_eq!((asked["response_type"].as_str(), asked["code_challenge_method"].as_str()), ("code", "S256"));
    let back = browser.authenticate(&at, "user").await;
    let answer = browser.call_back(&back).await;
    answer.is(303);
    assert_eq!(location(&answer), "/console/nodes?state=active");
    let cookies: Vec<_> = answer.headers.get_all("set-cookie").iter().map(|line| line.to_str().unwrap()).collect();
    assert_eq!(cookies.len(), 2, "the session's, and the end of the login's: {cookies:?}");
    for part in ["__Host-gpuaas-session=gpubrs_", "; Path=/;", "; Secure", "; HttpOnly", "; SameSite=Strict"] {
        assert!(cookies[0].contains(part), "{part} in {}", cookies[0]);
    }
    assert!(!cookies[0].contains("eyJ"), "a token is in the cookie");
    assert_eq!(answer.headers["cache-control"], "no-store");
    assert_eq!(browser.cookies.keys().collect::<Vec<_>>(), [SESSION]);

    let me = browser.get("/api/v1/me").send().await.is(200).clone();
    let person = provider.person("user").unwrap();
    assert_eq!((&me["user_id"], &me["username"]), (&json!(person.id.to_string()), &json!("user")));
    let permissions = me["permissions"].as_array().unwrap();
    assert!(permissions.contains(&json!("rent")) && !permissions.contains(&json!("manage_nodes")), "{me}");
    let listed = browser.get("/api/v1/me/sessions").send().await.is(200)["items"][0].clone();
    assert_eq!((&listed["id"], &listed["is_current"]), (&me["session"]["id"], &json!(true)));
    let dump = api.database_dump();
    let secret = browser.cookies[SESSION].split('.').next().unwrap();
    assert!(!dump.contains(secret) && !dump.contains("eyJhbGciOiJFUzI1NiI"), "a secret is stored as it is");
}

#[tokio::test]
async fn callback_replayed_opens_no_second_session() {
    let (provider, api) = with_console().await;
    provider.set_login_faults(LoginFaults { codes_are_reusable: true, ..LoginFaults::default() });
    let mut browser = Browser::new(&api, &provider);
    let at = browser.begin("/console/").await;
    let before = browser.cookies.clone();
    let back = browser.authenticate(&at, "user").await;
    browser.call_back(&back).await.is(303);
    // In the browser the login's cookie is gone.
    let refused = browser.call_back(&back).await;
    assert_eq!((refused.status, &refused.body["code"]), (400, &json!("invalid_request")), "{}", refused.body);
    // One who has copied it completes the login no second time.
    let mut thief = Browser { cookies: before, ..Browser::new(&api, &provider) };
    let refused = thief.call_back(&back).await;
    assert_eq!((refused.status, &refused.body["code"]), (409, &json!("state_conflict")), "{}", refused.body);
    assert!(!thief.cookies.contains_key(SESSION));
    assert_eq!(sessions(&api, &provider).await.len(), 1);
}

#[tokio::test]
async fn callback_of_another_state_is_refused() {
    let (provider, api) = with_console().await;
    let mut browser = Browser::new(&api, &provider);
    let at = browser.begin("/console/").await;
    let back = browser.authenticate(&at, "user").await;
    // A login that an attacker began: their code, in the victim's browser, which has begun another.
    let mut victim = Browser::new(&api, &provider);
    victim.begin("/console/").await;
    for path in [back.clone(), back.replace("state=", "state=x"), "/console/callback?code=x".to_owned()] {
        let refused = victim.call_back(&path).await;
        assert_eq!((refused.status, &refused.body["code"]), (400, &json!("invalid_request")), "{}", refused.body);
    }
    assert!(sessions(&api, &provider).await.is_empty());
}

#[tokio::test]
async fn id_token_of_another_nonce_is_refused() {
    expect_no_login(id_token_with("nonce", "another")).await;
}

#[tokio::test]
async fn id_token_of_another_issuer_is_refused() {
    expect_no_login(id_token_with("iss", "https://other.example")).await;
}

#[tokio::test]
async fn code_of_another_client_is_refused() {
    expect_no_login(id_token_with("aud", "another-client")).await;
}

#[tokio::test]
async fn id_token_of_another_user_than_the_access_token_is_refused() {
    expect_no_login(id_token_with("sub", "another-user")).await;
}

#[tokio::test]
async fn response_of_another_issuer_is_refused() {
    let (provider, api) = with_console().await;
    let mut browser = Browser::new(&api, &provider);
    let at = browser.begin("/console/").await;
    let back = browser.authenticate(&at, "user").await;
    let issuer = back.split('&').find(|part| part.starts_with("iss=")).unwrap().to_owned();
    for path in [back.replace(&issuer, "iss=https%3A%2F%2Fother.example"), back.replace(&format!("&{issuer}"), "")] {
        let refused = browser.call_back(&path).await;
        assert_eq!((refused.status, &refused.body["code"]), (401, &json!("unauthenticated")), "{}", refused.body);
    }
    assert!(sessions(&api, &provider).await.is_empty());
}

#[tokio::test]
async fn login_redirects_to_no_other_site() {
    let (provider, api) = with_console().await;
    for return_to in ["https://evil.example/", "//evil.example/console/", "/\\evil.example/console/", "/api/v1/me"] {
        let mut browser = Browser::new(&api, &provider);
        let at = browser.begin(return_to).await;
        let back = browser.authenticate(&at, "user").await;
        assert_eq!(location(&browser.call_back(&back).await), "/console/", "{return_to}");
    }
}

#[tokio::test]
async fn refused_login_is_a_page_for_a_browser_and_an_envelope_for_a_program() {
    let (_provider, api) = with_console().await;
    let path = "/console/callback?error=access_denied&state=x";
    let program = api.get(path).send().await;
    assert_eq!((program.status, &program.body["code"]), (400, &json!("invalid_request")));
    let page = api.get(path).header("accept", "text/html,application/xhtml+xml").response().await;
    assert_eq!(
        (page.status().as_u16(), page.headers()["content-type"].to_str().unwrap()),
        (400, "text/html; charset=utf-8")
    );
    assert!(page.headers()["content-security-policy"].to_str().unwrap().starts_with("default-src 'none'"));
    let html = axum::body::to_bytes(page.into_body(), 1 << 20).await.unwrap();
    assert!(String::from_utf8_lossy(&html).contains("href=\"/console/login\""));
}

/// The link of the page with which a login is refused.
async fn link_to_another_login(request: TestRequest<'_>) -> String {
    let page = request.header("accept", "text/html").response().await;
    assert!(page.status().is_client_error() || page.status().is_server_error(), "{}", page.status());
    let html = axum::body::to_bytes(page.into_body(), 1 << 20).await.unwrap();
    let html = String::from_utf8_lossy(&html).into_owned();
    let (_, link) = html.split_once("href=\"").unwrap();
    link.split('"').next().unwrap().to_owned()
}

#[tokio::test]
async fn login_after_one_that_failed_leads_where_that_was_to_lead() {
    let (provider, api) = with_console().await;
    let wanted = "/console/nodes?state=active&sort=\"<name>\"#top";
    let mut browser = Browser::new(&api, &provider);
    let at = browser.begin(wanted).await;
    let back = browser.authenticate(&at, "user").await;
    let failed = back.replace("code=", "error=access_denied&x=");
    for path in [failed.as_str(), "/console/callback?state=another&code=x"] {
        let link = link_to_another_login(browser.with_cookies(api.get(path))).await;
        let begun = api.get(&link).send().await;
        begun.is(302);
        let mut again = Browser::new(&api, &provider);
        again.store_cookies(&begun);
        let back = again.authenticate(&location(&begun).parse().unwrap(), "user").await;
        assert_eq!(location(&again.call_back(&back).await), "/console/nodes?state=active&sort=%22%3Cname%3E%22#top");
    }
    // A login that took too long has its cookie, too.
    api.advance_clock(chrono::TimeDelta::minutes(11));
    let link = link_to_another_login(browser.with_cookies(api.get(&back))).await;
    assert!(link.contains("return_to=%2Fconsole%2Fnodes"), "{link}");
}

#[tokio::test]
async fn link_of_a_login_that_failed_leads_to_no_other_site() {
    let api = ApiHarness::new().await;
    for wanted in ["https://evil.example/", "//evil.example/console/", "/api/v1/me"] {
        let query = Url::parse_with_params("https://x/console/login", [("return_to", wanted)]).unwrap();
        let link = link_to_another_login(api.get(&format!("/console/login?{}", query.query().unwrap()))).await;
        assert_eq!(link, "/console/login", "{wanted}");
    }
    let link = link_to_another_login(api.get("/console/login?return_to=/terminal/018f")).await;
    assert_eq!(link, "/console/login?return_to=%2Fterminal%2F018f");
    assert_eq!(link_to_another_login(api.get("/console/callback?state=x&code=y")).await, "/console/login");
}

#[tokio::test]
async fn providers_refusal_at_the_callback_is_logged_with_its_description_and_the_setting() {
    let (provider, api) = with_console().await;
    let (log, _guard) = test_host::CapturedLog::start();
    let mut browser = Browser::new(&api, &provider);
    let at = browser.begin("/console/").await;
    let back = browser.authenticate(&at, "user").await;
    let refusal = "error=invalid_scope&error_description=The+scope+%22gpu%22%0Ais+unknown&session_state=";
    let refused = browser.call_back(&back.replace("code=", refusal)).await;
    assert_eq!((refused.status, &refused.body["code"]), (401, &json!("unauthenticated")), "{}", refused.body);
    let log = log.text();
    assert!(log.contains("SVC_OIDC_CONSOLE_SCOPE") && log.contains("is unknown"), "{log}");
}

#[tokio::test]
async fn login_without_its_setting_names_the_setting() {
    let api = ApiHarness::new().await;
    let refused = api.get("/console/login").send().await;
    assert_eq!((refused.status, &refused.body["code"]), (503, &json!("service_unavailable")));
    assert!(refused.body["message"].as_str().unwrap().contains("SVC_OIDC_CONSOLE_CLIENT_ID"), "{}", refused.body);
}
