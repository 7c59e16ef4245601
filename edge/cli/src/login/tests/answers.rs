//! Answers of identity providers as they write them, and the faults of the gateways before them.

use super::provider::{ClientConfig, Provider, Renewal};
use super::*;
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER};
use std::collections::VecDeque;
use std::sync::Mutex as StdMutex;

/// An answer: its status and body.
type Scripted = (u16, String);

/// A provider whose token endpoint gives these answers, the last one again and again.
#[derive(Clone)]
struct ScriptedProvider {
    answers: Arc<StdMutex<VecDeque<Scripted>>>,
    forms: Arc<StdMutex<Vec<String>>>,
    device: Value,
}

impl ScriptedProvider {
    async fn serve(device: Value, answers: impl IntoIterator<Item = Scripted>) -> (Self, String) {
        let answers = Arc::new(StdMutex::new(answers.into_iter().collect()));
        let provider = Self { answers, forms: Arc::default(), device };
        let routes = Router::new()
            .route("/token", post(token))
            .route("/device", post(async |State(it): State<Self>| Json(it.device)))
            .with_state(provider.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, routes).await });
        (provider, url)
    }

    fn sent(&self, form: &str) -> usize {
        self.forms.lock().unwrap().iter().filter(|sent| sent.contains(form)).count()
    }
}

async fn token(State(it): State<ScriptedProvider>, form: String) -> Response {
    it.forms.lock().unwrap().push(form);
    let mut answers = it.answers.lock().unwrap();
    let (status, body) = if answers.len() > 1 { answers.pop_front().unwrap() } else { answers[0].clone() };
    let html = body.starts_with('<');
    let media_type = if html { "text/html" } else { "application/json" };
    let status = StatusCode::from_u16(status).unwrap();
    let mut answer = (status, [(CONTENT_TYPE, media_type)], body).into_response();
    // A page is a proxy's, which names no time.
    if !html {
        answer.headers_mut().insert(RETRY_AFTER, "0".parse().unwrap());
    }
    answer
}

fn client(url: &str) -> Provider {
    let config =
        ClientConfig { client_id: "gpuctl".to_owned(), client_secret: None, scopes: Vec::new(), resource: None };
    Provider::new(reqwest::Client::new(), &format!("{url}/token"), config).unwrap()
}

/// Grants as providers write them, each for about an hour.
fn grants() -> Vec<Value> {
    vec![
        json!({ "access_token": "access-1", "refresh_token": "refresh-1", "token_type": "Bearer", "expires_in": "3599" }),
        json!({ "access_token": "access-1", "refresh_token": "refresh-1", "token_type": "bearer", "expires_in": 3599.5 }),
        json!({ "access_token": "access-1", "refresh_token": "refresh-1", "expires_in": "3599.5" }),
        json!({ "access_token": "access-1", "refresh_token": "refresh-1", "scope": ["openid", "email"], "expires_in": 3599 }),
    ]
}

const HTML: &str = "<html><h1>502 Bad Gateway</h1></html>";

fn device(interval: Value) -> Value {
    json!({
        "device_code": "the-device", "user_code": "ABCD", "verification_url": "https://id.example/device",
        "expires_in": "300", "interval": interval,
    })
}

fn is_about_an_hour(granted: &TokenGrant) -> bool {
    let left = granted.expires_at.unwrap() - Utc::now();
    (TimeDelta::seconds(3580)..=TimeDelta::seconds(3600)).contains(&left)
}

#[tokio::test]
async fn login_by_password_or_device_takes_each_form_of_an_answer() {
    for grant in grants() {
        let (_, url) = ScriptedProvider::serve(device(json!("1")), [(200, grant.to_string())]).await;
        let password = "secret".to_owned().into();
        for granted in [
            client(&url).by_password("ann", &password).await,
            client(&url).by_device(&format!("{url}/device"), OUT).await,
        ] {
            let granted = granted.unwrap_or_else(|failure| panic!("{grant}: {failure}"));
            assert!(is_about_an_hour(&granted) && granted.refresh_token.is_some(), "{grant}");
        }
    }
}

#[tokio::test]
async fn faults_between_device_polls_do_not_end_the_login() {
    let pending = || (400, json!({ "error": "authorization_pending" }).to_string());
    let faults = [
        (502, HTML.to_owned()),
        (503, String::new()),
        (429, "{}".to_owned()),
        (500, json!({ "status": 500, "error": "Internal Server Error" }).to_string()),
        (200, HTML.to_owned()),
        (403, HTML.to_owned()),
        (404, "default backend - 404".to_owned()),
        (302, String::new()),
        (403, json!({ "message": "Forbidden" }).to_string()),
        (404, json!({ "status": 404, "error": "Not Found", "path": "/token" }).to_string()),
    ];
    let logins = faults.into_iter().map(|fault| async move {
        let answers = [pending(), fault.clone(), (200, grants()[0].to_string())];
        let (provider, url) = ScriptedProvider::serve(device(json!(1)), answers).await;
        let granted = client(&url).by_device(&format!("{url}/device"), OUT).await;
        let granted = granted.unwrap_or_else(|failure| panic!("{fault:?}: {failure}"));
        assert_eq!((granted.access_token.expose_secret(), provider.sent("the-device")), ("access-1", 3), "{fault:?}");
    });
    futures::future::join_all(logins).await;
}

#[tokio::test]
async fn device_login_that_the_user_denies_ends_at_once() {
    // Entra ID has a code of its own.
    for code in ["access_denied", "authorization_declined"] {
        let denied = (400, json!({ "error": code, "error_description": null }).to_string());
        let (provider, url) = ScriptedProvider::serve(device(json!(1)), [denied]).await;
        let failure = client(&url).by_device(&format!("{url}/device"), OUT).await.err().unwrap();
        assert_eq!((failure.exit_status, provider.sent("the-device")), (ExitStatus::LoggedOut, 1), "{failure}");
    }
}

#[tokio::test]
async fn login_by_password_is_sent_again_after_a_passing_fault() {
    for status in [502, 404] {
        let answers = [(status, HTML.to_owned()), (200, grants()[0].to_string())];
        let (provider, url) = ScriptedProvider::serve(Value::Null, answers).await;
        client(&url).by_password("ann", &"secret".to_owned().into()).await.unwrap();
        assert_eq!(provider.sent("grant_type=password"), 2, "{status}");
    }
}

#[tokio::test]
async fn page_of_a_firewall_in_place_of_the_provider_is_named_with_its_status() {
    let (provider, url) = ScriptedProvider::serve(Value::Null, [(403, HTML.to_owned())]).await;
    let failure = client(&url).by_password("ann", &"secret".to_owned().into()).await.err().unwrap();
    assert_eq!((failure.exit_status, provider.sent("grant_type=password")), (ExitStatus::Server, 1), "{failure}");
    assert!(failure.message.contains("firewall") && failure.message.contains("403"), "{failure}");
}

#[tokio::test]
async fn renewal_stores_the_rotated_token_of_each_form_of_an_answer() {
    for grant in grants() {
        let (provider, url) = ScriptedProvider::serve(Value::Null, [(200, grant.to_string())]).await;
        let folder = tempfile::tempdir().unwrap();
        let (store, login) = stored_session(folder.path(), &url, -5);
        let session = Session::stored(store.clone(), login, OUT);
        assert_eq!(session.token().await.unwrap().expose_secret(), "access-1", "{grant}");
        let now = store.read().unwrap().unwrap();
        assert_eq!(now.refresh_token.unwrap().expose_secret(), "refresh-1", "{grant}");
        assert_eq!(provider.sent("refresh-0"), 1);
    }
}

#[tokio::test]
async fn spent_refresh_token_is_not_sent_again() {
    for (status, body) in [
        // It grants something that is no token here: the refresh token is spent all the same.
        (200, json!({ "id_token": "x", "expires_in": "3599" })),
        (200, json!({ "access_token": ["access-1"], "token_type": "Bearer" })),
        (400, json!({ "error": "invalid_grant" })),
        (200, json!({ "error": "invalid_grant" })),
        // Dex and Zitadel, and a provider that takes it for an access token.
        (
            400,
            json!({ "error": "invalid_request", "error_description": "Refresh token is invalid or has already been claimed by another client." }),
        ),
        (400, json!({ "error": "invalid_request", "error_description": "Errors.User.RefreshToken.Invalid" })),
        (401, json!({ "error": "invalid_token" })),
    ] {
        let (provider, url) = ScriptedProvider::serve(Value::Null, [(status, body.to_string())]).await;
        let folder = tempfile::tempdir().unwrap();
        let (store, _) = stored_session(folder.path(), &url, -5);
        for _ in 0..2 {
            let login = store.read().unwrap().unwrap();
            let failure = Session::stored(store.clone(), login, OUT).token().await.unwrap_err();
            assert!(failure.next.as_deref().unwrap_or_default().contains("gpuctl login"), "{body}: {failure}");
        }
        assert_eq!(provider.sent("refresh-0"), 1, "{body}");
    }
}

#[tokio::test]
async fn refresh_token_outlives_a_refusal_of_its_client_and_a_page_of_a_proxy() {
    for (status, body) in [
        (401, json!({ "error": "invalid_client" }).to_string()),
        (400, json!({ "error": "unauthorized_client" }).to_string()),
        (400, json!({ "error": "unsupported_grant_type" }).to_string()),
        (500, json!({ "error": "invalid_request" }).to_string()),
        (403, HTML.to_owned()),
        (404, HTML.to_owned()),
    ] {
        let answers = [(status, body.clone()), (200, grants()[0].to_string())];
        let (provider, url) = ScriptedProvider::serve(Value::Null, answers).await;
        let folder = tempfile::tempdir().unwrap();
        let (store, login) = stored_session(folder.path(), &url, -5);
        let failure = Session::stored(store.clone(), login, OUT).token().await.unwrap_err();
        assert_eq!(provider.sent("refresh-0"), 1, "{body}: {failure}");
        if !body.starts_with('{') {
            assert!(
                failure.exit_status == ExitStatus::Server && failure.message.contains(&status.to_string()),
                "{failure}"
            );
        }
        let is_of_client = body.contains("client\"") || body.contains("grant_type");
        let next = failure.next.clone().unwrap_or_default();
        assert_eq!(next.contains("--client-id"), is_of_client, "{body}: {failure}");
        let session = Session::stored(store.clone(), store.read().unwrap().unwrap(), OUT);
        assert_eq!(session.token().await.unwrap().expose_secret(), "access-1", "{body}");
    }
}

#[tokio::test]
async fn refresh_token_is_sent_again_only_where_the_provider_has_not_processed_it() {
    // A proxy answers 503, too, where it has lost the request: without a time to wait for, it may have been processed.
    for (status, body, sent) in [(429, HTML, 2), (503, "{}", 2), (503, HTML, 1), (502, HTML, 1), (500, HTML, 1)] {
        let answers = [(status, body.to_owned()), (200, grants()[0].to_string())];
        let (provider, url) = ScriptedProvider::serve(Value::Null, answers).await;
        let renewed = client(&url).renew(&"refresh-0".to_owned().into()).await;
        assert_eq!(provider.sent("refresh-0"), sent, "{status} {body}");
        match renewed {
            Ok(Renewal::Granted(_)) => assert_eq!(sent, 2, "{status} {body}"),
            // The login stays as it is: the next command tries it again.
            Err(failure) => assert_eq!((failure.exit_status, sent), (ExitStatus::Server, 1), "{failure}"),
            Ok(Renewal::Spent(failure)) => panic!("{status} {body}: {failure}"),
        }
    }
}

/// A server whose documents have these answers, the last one again and again.
async fn documents(answers: impl IntoIterator<Item = Scripted>) -> String {
    let answers: Arc<StdMutex<VecDeque<Scripted>>> = Arc::new(StdMutex::new(answers.into_iter().collect()));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let server = url.clone();
    let answer = move || async move {
        let mut answers = answers.lock().unwrap();
        let (status, body) = if answers.len() > 1 { answers.pop_front().unwrap() } else { answers[0].clone() };
        (StatusCode::from_u16(status).unwrap(), body.replace("SERVER", &server))
    };
    tokio::spawn(async move { axum::serve(listener, Router::new().fallback(answer)).await });
    url
}

/// The description of a provider, and of a server of this service.
const DESCRIPTION: &str = r#"{"issuer": "SERVER", "token_endpoint": "SERVER/token", "resource": "SERVER", "authorization_servers": ["SERVER"]}"#;

async fn discovered(url: &str) -> [Result<(), Failure>; 2] {
    let server = http_client::address(url).unwrap();
    let resource = provider_discovery::discover(&server, None, None);
    let (resource, metadata) = tokio::join!(resource, discover(url, None));
    [resource.map(drop), metadata.map(drop)]
}

#[tokio::test]
async fn descriptions_are_asked_for_again_while_their_servers_restart() {
    for (status, body) in [(502, HTML), (503, ""), (504, HTML), (429, "{}")] {
        let again = (status, body.to_owned());
        let url = documents([again.clone(), again, (200, DESCRIPTION.to_owned())]).await;
        for result in discovered(&url).await {
            result.unwrap_or_else(|failure| panic!("{status}: {failure}"));
        }
    }
}

#[tokio::test]
async fn server_that_stays_away_is_no_mistake_in_the_address() {
    let url = documents([(503, HTML.to_owned())]).await;
    for failure in discovered(&url).await.map(Result::unwrap_err) {
        let next = failure.next.clone().unwrap_or_default();
        assert!(failure.exit_status == ExitStatus::Server && next.contains("Try again"), "{failure}");
    }
}

#[tokio::test]
async fn description_with_a_byte_order_mark_is_read_and_a_page_is_refused_at_once() {
    let url = documents([(200, format!("\u{feff}{DESCRIPTION}"))]).await;
    for result in discovered(&url).await {
        result.unwrap();
    }
    for (status, body) in [(200, HTML.to_owned()), (404, HTML.to_owned()), (200, "x".repeat(600_000))] {
        let began = std::time::Instant::now();
        let url = documents([(status, body)]).await;
        for failure in discovered(&url).await.map(Result::unwrap_err) {
            let next = failure.next.clone().unwrap_or_default();
            assert!(failure.exit_status == ExitStatus::Usage && next.contains("--"), "{status}: {failure}");
        }
        assert!(began.elapsed() < Duration::from_secs(5), "{status}: {:?}", began.elapsed());
    }
}
