//! A third-party identity provider (npm's `oidc-provider`, certified by the OpenID Foundation) logs users in: authorization
//! code with PKCE (RFC 7636), driven as a browser would, access tokens as JSON Web Tokens for a named resource (RFC 8707), claims
//! in other places than Keycloak has them.

use crate::browser::Browser as Chromium;
use crate::external_tools::installed;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use reqwest::header::{COOKIE, LOCATION, SET_COOKIE};
use reqwest::{Method, Response, Url, redirect};
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Stdio;
use tests::cluster::TestCluster;
use tests::cluster::client::Client;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use uuid::Uuid;

/// The resource identifier of the control plane.
const AUDIENCE: &str = "https://gpu.example/api";
const REDIRECT_URI: &str = "http://127.0.0.1/back";
/// The address of the console, as the provider knows it (`tests/oidc-provider/server.mjs`).
const CONSOLE: &str = "https://console.example";

/// The process of the provider.
struct ExternalProvider {
    issuer: String,
    _process: Child,
}

impl ExternalProvider {
    async fn start() -> Self {
        let installed = installed("oidc-provider");
        let mut process = Command::new("node")
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("oidc-provider/server.mjs"))
            .arg(installed)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("node starts");
        let mut output = BufReader::new(process.stdout.take().unwrap()).lines();
        let issuer = loop {
            let line = output.next_line().await.unwrap().expect("the provider says where it is");
            if line.starts_with("http://127.0.0.1:") {
                break line;
            }
        };
        // The output is read, since a process that writes to a closed pipe ends.
        tokio::spawn(async move { while let Ok(Some(_)) = output.next_line().await {} });
        Self { issuer, _process: process }
    }

    /// Logs a user in and returns their access token for `resource`.
    async fn log_in(&self, login: &str, resource: &str) -> String {
        let mut browser = Browser::default();
        let discovery: Value =
            serde_json::from_str(&browser.get(&format!("{}/.well-known/openid-configuration", self.issuer)).await.1)
                .unwrap();
        let endpoint = |name: &str| Url::parse(discovery[name].as_str().unwrap()).unwrap();
        let verifier = URL_SAFE_NO_PAD.encode(rand::random::<[u8; 32]>());
        let state = Uuid::new_v4().to_string();
        let mut at = endpoint("authorization_endpoint");
        at.query_pairs_mut().extend_pairs([
            ("client_id", "browser"),
            ("response_type", "code"),
            ("redirect_uri", REDIRECT_URI),
            ("scope", "openid gpu"),
            ("resource", resource),
            ("code_challenge", &URL_SAFE_NO_PAD.encode(Sha256::digest(&verifier))),
            ("code_challenge_method", "S256"),
            ("state", &state),
        ]);
        let back = browser.complete_login(at, login).await;
        let answered: BTreeMap<_, _> = back.query_pairs().into_owned().collect();
        assert_eq!((answered["state"].as_str(), answered["iss"].as_str()), (state.as_str(), self.issuer.as_str()));
        let form = [
            ("grant_type", "authorization_code"),
            ("code", &answered["code"]),
            ("redirect_uri", REDIRECT_URI),
            ("client_id", "browser"),
            ("code_verifier", &verifier),
        ];
        let (_, text) = browser.post(endpoint("token_endpoint").as_str(), &form).await;
        let tokens: Value = serde_json::from_str(&text).unwrap();
        tokens["access_token"].as_str().unwrap_or_else(|| panic!("no access token: {tokens}")).to_owned()
    }
}

/// A minimal browser: it stores cookies, fills in forms, and follows redirects step by step.
struct Browser {
    http: reqwest::Client,
    cookies: BTreeMap<String, String>,
}

impl Default for Browser {
    fn default() -> Self {
        let http = reqwest::Client::builder().redirect(redirect::Policy::none()).build().unwrap();
        Self { http, cookies: BTreeMap::new() }
    }
}

impl Browser {
    async fn get(&mut self, url: &str) -> (Option<String>, String) {
        let request = self.http.get(url);
        self.send(request).await
    }

    async fn post(&mut self, url: &str, form: &[(&str, &str)]) -> (Option<String>, String) {
        let request = self.http.post(url).form(form);
        self.send(request).await
    }

    /// The target of a redirect, or the page.
    async fn send(&mut self, request: reqwest::RequestBuilder) -> (Option<String>, String) {
        let cookies: Vec<_> = self.cookies.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let answer = request.header(COOKIE, cookies.join("; ")).send().await.unwrap();
        self.store_cookies(&answer);
        let status = answer.status();
        let leads_to = answer.headers().get(LOCATION).map(|value| value.to_str().unwrap().to_owned());
        let text = answer.text().await.unwrap();
        assert!(status.is_success() || status.is_redirection(), "{status}: {text}");
        (leads_to, text)
    }

    fn store_cookies(&mut self, answer: &Response) {
        for cookie in answer.headers().get_all(SET_COOKIE) {
            let (name, value) = cookie.to_str().unwrap().split(';').next().unwrap().split_once('=').unwrap();
            if value.is_empty() {
                self.cookies.remove(name);
            } else {
                self.cookies.insert(name.to_owned(), value.to_owned());
            }
        }
    }

    /// Logs in, consents, and returns the redirect URL with the code.
    async fn complete_login(&mut self, begin: Url, login: &str) -> Url {
        match self.submit_forms(begin, login, REDIRECT_URI).await {
            LoginOutcome::Redirected(url) => url,
            LoginOutcome::Page(page) => panic!("no form that asks for anything: {page}"),
        }
    }

    /// Submits form after form, until it is redirected back.
    async fn expect_redirect(&mut self, begin: Url, login: &str, back: &str) -> Url {
        match self.submit_forms(begin, login, back).await {
            LoginOutcome::Redirected(url) => url,
            LoginOutcome::Page(page) => panic!("no form that asks for anything: {page}"),
        }
    }

    /// Submits form after form, until it is redirected back or there are no more forms.
    async fn submit_forms(&mut self, begin: Url, login: &str, back: &str) -> LoginOutcome {
        let mut at = begin;
        let mut answer = self.get(at.as_str()).await;
        for _ in 0..16 {
            let (leads_to, page) = answer;
            if let Some(leads_to) = leads_to {
                at = at.join(&leads_to).unwrap();
                if at.as_str().starts_with(back) {
                    return LoginOutcome::Redirected(at);
                }
                answer = self.get(at.as_str()).await;
            } else if page.contains("<form") {
                at = at.join(attribute(&page, "action")).unwrap();
                let fields = fields(&page, login);
                let form: Vec<_> = fields.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
                answer = self.post(at.as_str(), &form).await;
            } else {
                return LoginOutcome::Page(page);
            }
        }
        panic!("the log-in does not end; it stands at {at}");
    }
}

enum LoginOutcome {
    Redirected(Url),
    Page(String),
}

/// The fields of a form, filled in.
fn fields(page: &str, login: &str) -> Vec<(String, String)> {
    let inputs = page.split("<input").skip(1).map(|rest| rest.split('>').next().unwrap());
    let filled = inputs.filter(|input| input.contains("name=\"")).map(|input| {
        let name = attribute(input, "name");
        let value = match name {
            "login" => login,
            "password" => "any",
            _ => attribute(input, "value"),
        };
        (name.to_owned(), value.to_owned())
    });
    filled.collect()
}

fn attribute<'a>(page: &'a str, name: &str) -> &'a str {
    let rest = page.split_once(&format!("{name}=\"")).unwrap_or_else(|| panic!("no {name} in {page}")).1;
    rest.split_once('"').unwrap().0
}

/// A cluster whose second replica trusts the external provider; the first trusts the cluster's own, which the set-up needs.
async fn start_cluster(foreign: &ExternalProvider) -> TestCluster {
    start_cluster_with(foreign, &[]).await
}

/// The same, with more variables of the second replica.
async fn start_cluster_with(foreign: &ExternalProvider, more: &[(&str, &str)]) -> TestCluster {
    let variables = [
        ("SVC_OIDC_ISSUER", foreign.issuer.as_str()),
        ("SVC_OIDC_AUDIENCE", AUDIENCE),
        ("SVC_OIDC_ALGORITHMS", "ES256"),
        ("SVC_OIDC_CLAIM_USER_ID", "uid"),
        ("SVC_OIDC_CLAIM_ROLES", "https://gpu.example/roles"),
        ("SVC_OIDC_CLAIM_ORG_ID", "tenancy.org"),
        ("SVC_OIDC_CLAIM_PROJECT_ID", "tenancy.project"),
    ];
    let builder = variables
        .iter()
        .chain(more)
        .fold(TestCluster::builder().replicas(2), |builder, (name, value)| builder.variable_of(1, name, value));
    let mut cluster = builder.start().await;
    cluster.admin = cluster.at_replica(0, "admin");
    cluster.user = cluster.at_replica(0, "user");
    cluster.offer_sku("h100", 8).await;
    cluster
}

#[tokio::test(flavor = "multi_thread")]
async fn external_identity_provider_logs_users_in() {
    let foreign = ExternalProvider::start().await;
    let mut cluster = start_cluster(&foreign).await;
    let at = cluster.replicas[1].public_url();
    let bearer = |token: String| Client::new(cluster.authority.certificate_path(), &at, Some(token));
    let (user_token, admin_token) =
        (foreign.log_in("ann", AUDIENCE).await, foreign.log_in("admin-root", AUDIENCE).await);
    let (user, admin) = (bearer(user_token.clone()), bearer(admin_token.clone()));

    let skus = user.get("/api/v1/skus").await.ok();
    assert_eq!(skus["items"][0]["name"], "h100", "{skus}");
    user.send_once(Method::GET, "/api/v1/admin/nodes", None).await.expect_error(403, "forbidden");
    admin.get("/api/v1/admin/nodes").await.ok();

    // The identity is taken from the configured claims.
    let account = user.post("/api/v1/service-accounts", &serde_json::json!({ "name": "ci" })).await.created();
    assert_eq!(account["owner_user_id"], "foreign:ann");
    assert_eq!((&account["org_id"], &account["project_id"]), (&"acme".into(), &"p1".into()));
    assert_eq!(account["plan"], Value::Null);

    // A token of the same provider for another resource is refused, as is one of another provider.
    let elsewhere = foreign.log_in("ann", "https://elsewhere.example/api").await;
    let answer = bearer(elsewhere).send_once(Method::GET, "/api/v1/skus", None).await;
    answer.expect_error(401, "unauthenticated");
    let own = cluster.at_replica(1, "user").send_once(Method::GET, "/api/v1/skus", None).await;
    own.expect_error(401, "unauthenticated");
    bearer(user_token.clone()).send_once(Method::GET, "/api/v1/skus", None).await.ok();
    cluster.register_secret("a token of the foreign provider", &user_token);
    cluster.register_secret("a token of the foreign provider", &admin_token);
    cluster.shutdown().await;
}

/// The same, where the second replica serves the console.
async fn start_with_console(foreign: &ExternalProvider) -> TestCluster {
    let settings = [
        ("SVC_PUBLIC_URL", CONSOLE),
        ("SVC_OIDC_CONSOLE_CLIENT_ID", "console"),
        ("SVC_OIDC_CONSOLE_CLIENT_SECRET", "a secret of one test, long enough for any of them"),
        ("SVC_OIDC_CONSOLE_SCOPE", "openid gpu"),
        ("SVC_OIDC_CONSOLE_RESOURCE", AUDIENCE),
    ];
    start_cluster_with(foreign, &settings).await
}

#[tokio::test(flavor = "multi_thread")]
async fn external_identity_provider_logs_users_in_to_the_console() {
    let foreign = ExternalProvider::start().await;
    let mut cluster = start_with_console(&foreign).await;
    let at = cluster.replicas[1].public_url();
    let console = Client::new(cluster.authority.certificate_path(), &at, None);
    // Redirects are not followed: the next one is the provider's.
    let authority = std::fs::read(cluster.authority.certificate_path()).unwrap();
    let http = reqwest::Client::builder()
        .tls_certs_only(reqwest::Certificate::from_pem_bundle(&authority).unwrap())
        .redirect(redirect::Policy::none())
        .build()
        .unwrap();
    let cookie_of = |answer: &Response, name: &str| {
        let mut lines = answer.headers().get_all(SET_COOKIE).iter().map(|line| line.to_str().unwrap().to_owned());
        let line = lines.find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no cookie {name}"));
        line.split(';').next().unwrap().to_owned()
    };
    let begun = http.get(format!("{at}/console/login?return_to=/console/nodes")).send().await.unwrap();
    let provider = Url::parse(begun.headers()[LOCATION].to_str().unwrap()).unwrap();
    let mut browser = Browser::default();
    let back = browser.expect_redirect(provider, "ann", CONSOLE).await;
    let back = back.as_str().replacen(CONSOLE, &at, 1);
    let done = http.get(back).header(COOKIE, cookie_of(&begun, "__Host-gpuaas-login")).send().await.unwrap();
    assert_eq!((done.status().as_u16(), done.headers()[LOCATION].to_str().unwrap()), (303, "/console/nodes"));
    let cookie = cookie_of(&done, "__Host-gpuaas-session");
    let me = console.by_cookie(&cookie, CONSOLE).get("/api/v1/me").await.ok();
    assert_eq!((&me["user_id"], &me["org_id"]), (&"foreign:ann".into(), &"acme".into()), "{me}");
    cluster.register_secret("the cookie of a login", cookie.split_once('=').unwrap().1);

    // The logout leads to the provider, which knows its user by the ID token, and back.
    let page =
        |request: reqwest::RequestBuilder| request.header("origin", CONSOLE).header("sec-fetch-site", "same-origin");
    let ended = page(http.post(format!("{at}/console/logout"))).header(COOKIE, &cookie).send().await.unwrap();
    let pending = cookie_of(&ended, "__Host-gpuaas-logout");
    let answered: Value = serde_json::from_str(&ended.text().await.unwrap()).unwrap();
    assert_eq!(answered, serde_json::json!({ "logout_url": "/console/logout" }));
    let navigation = page(http.get(format!("{at}/console/logout"))).header(COOKIE, &pending);
    let gone =
        navigation.header("sec-fetch-mode", "navigate").header("sec-fetch-dest", "document").send().await.unwrap();
    let logout = Url::parse(gone.headers()[LOCATION].to_str().unwrap()).unwrap();
    let hint = logout.query_pairs().find(|(name, _)| name == "id_token_hint").expect("a hint").1.into_owned();
    cluster.register_secret("an ID token of the foreign provider", &hint);
    let back = browser.expect_redirect(logout, "ann", CONSOLE).await;
    assert_eq!(back.as_str(), format!("{CONSOLE}/console/"));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn browser_logs_in_at_the_external_provider_and_its_logout_ends_the_login_there() {
    let foreign = ExternalProvider::start().await;
    let mut cluster = start_with_console(&foreign).await;
    let port = Url::parse(&cluster.replicas[1].public_url()).unwrap().port().unwrap();
    // The provider's pages name a font elsewhere, which is refused at once.
    let hosts = format!("MAP console.example:443 127.0.0.1:{port},MAP fonts.googleapis.com 127.0.0.1:1");
    let mut browser = Chromium::start(&[format!("--host-resolver-rules={hosts}")]).await;

    browser.open(&format!("{CONSOLE}/console/")).await;
    browser.expect_text("main", "Log in").await;
    browser.click("main a.primary").await;
    browser.fill("input[name=login]", "ann").await;
    browser.fill("input[name=password]", "any").await;
    browser.click("button[type=submit]").await;
    browser.expect_text("button[type=submit]", "Continue").await;
    browser.click("button[type=submit]").await;
    browser.expect_text("h1", "Overview").await;
    let cookies = browser.cookies().await;
    let session = cookies.iter().find_map(|cookie| cookie.strip_prefix("__Host-gpuaas-session="));
    cluster.register_secret("the cookie of a login", session.expect("a session's cookie"));

    // Without the provider's own session, its form asks for the password.
    browser.click("text=Log out").await;
    browser.expect_text("button[value=yes]", "sign me out").await;
    browser.click("button[value=yes]").await;
    browser.expect_text("main", "Log in").await;
    assert!(browser.url().await.starts_with(&format!("{CONSOLE}/console/")), "{}", browser.url().await);
    browser.click("main a.primary").await;
    browser.fill("input[name=password]", "any").await;

    let activity = browser.activity().await;
    assert!(activity.dialogs.is_empty(), "{activity:?}");
    browser.close().await;
    cluster.shutdown().await;
}

/// Reads the output of `gpuctl login` until it prints the URL to open.
pub(crate) async fn read_login_url(child: &mut Child) -> Url {
    let mut output = BufReader::new(child.stderr.take().expect("it speaks")).lines();
    let url = loop {
        let line = output.next_line().await.unwrap().expect("it says where to log in");
        if let Some(at) = line.find("http://") {
            break Url::parse(&line[at..]).unwrap();
        }
    };
    tokio::spawn(async move { while let Ok(Some(_)) = output.next_line().await {} });
    url
}

#[tokio::test(flavor = "multi_thread")]
async fn gpuctl_logs_in_by_browser_and_by_device_code_and_renews_its_token() {
    let foreign = ExternalProvider::start().await;
    let mut cluster = start_cluster(&foreign).await;
    let gpuctl = cluster
        .gpuctl_at(&cluster.replicas[1].public_url())
        .with("SVC_OIDC_ISSUER", &foreign.issuer)
        .with("SVC_CLIENT_ID", "gpuctl")
        .without("SVC_CLIENT_SECRET");
    let asks = ["--resource", AUDIENCE, "--scope", "openid", "--scope", "offline_access", "--scope", "gpu"];
    let stored = gpuctl.folder().join("default.json");
    let token = || {
        let login: Value = serde_json::from_slice(&std::fs::read(&stored).unwrap()).unwrap();
        login["access_token"].as_str().unwrap().to_owned()
    };
    // In a browser this provider issues refresh tokens after a consent alone.
    for way in [&["login", "--browser", "--no-open", "--prompt", "consent"][..], &["login", "--device"]] {
        let mut logging_in = gpuctl.command(&[way, &asks].concat()).spawn().unwrap();
        let at = read_login_url(&mut logging_in).await;
        let back = at.query_pairs().find(|(name, _)| name == "redirect_uri");
        let back = back.map_or_else(|| "nowhere:".to_owned(), |(_, value)| value.into_owned());
        let mut browser = Browser::default();
        match browser.submit_forms(at, "ann", &back).await {
            LoginOutcome::Redirected(url) => assert!(browser.get(url.as_str()).await.1.contains("You are logged in")),
            LoginOutcome::Page(page) => assert!(page.contains("Success"), "{page}"),
        }
        let ended = logging_in.wait_with_output().await.unwrap();
        assert!(ended.status.success(), "{way:?}: {ended:?}");
        let first = token();
        let who = gpuctl.run(&["-o", "json", "whoami"]).await.json();
        assert_eq!((who["user_id"].as_str(), &who["renewable"]), (Some("foreign:ann"), &true.into()), "{who}");
        // The provider's tokens for gpuctl expire so soon that the next command needs a new one.
        tokio::time::sleep(std::time::Duration::from_secs(4)).await;
        gpuctl.run(&["skus", "list"]).await.ok();
        assert_ne!(first, token());
        cluster.register_secret("a token of the foreign provider", &first);
        cluster.register_secret("a token of the foreign provider", &token());
        gpuctl.run(&["logout"]).await.ok();
    }
    cluster.shutdown().await;
}
