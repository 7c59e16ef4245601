//! Logins against a scripted identity provider.

mod answers;
mod stores;

use super::*;
use crate::api::Api;
use crate::output::OutputFormat;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const OUT: Output = Output { format: OutputFormat::Json, quiet: true };

/// Renews `refresh-N` into `access-N+1` and `refresh-N+1`, once each, and accepts the newest access token alone.
#[derive(Clone, Default)]
struct Rotating(Arc<AtomicU64>);

impl Rotating {
    async fn serve(&self) -> String {
        let routes = Router::new()
            .route("/token", post(renew))
            .route("/api/v1/service-accounts/token", post(issue))
            .route("/api/v1/things", get(things))
            .with_state(self.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, routes).await });
        url
    }

    fn renewed(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

async fn renew(State(Rotating(count)): State<Rotating>, form: String) -> Response {
    let number = count.load(Ordering::SeqCst);
    if !form.contains("grant_type=refresh_token") || !form.contains(&format!("refresh_token=refresh-{number}")) {
        return (StatusCode::BAD_REQUEST, Json(json!({ "error": "invalid_grant" }))).into_response();
    }
    count.store(number + 1, Ordering::SeqCst);
    Json(json!({
        "access_token": format!("access-{}", number + 1),
        "refresh_token": format!("refresh-{}", number + 1),
        "token_type": "Bearer", "expires_in": 600,
    }))
    .into_response()
}

async fn things(State(Rotating(count)): State<Rotating>, headers: HeaderMap) -> Response {
    let holds = format!("Bearer access-{}", count.load(Ordering::SeqCst));
    if headers["authorization"] == holds.as_str() {
        return Json(json!({ "items": [] })).into_response();
    }
    let refused =
        json!({ "code": "unauthenticated", "message": "It has ended.", "correlation_id": "c", "details": {} });
    (StatusCode::UNAUTHORIZED, Json(refused)).into_response()
}

#[test]
fn service_account_is_shown_with_the_user_that_it_acts_for() {
    let titles = |me: Value| identity_columns(&me).iter().map(|(title, _)| *title).collect::<Vec<_>>();
    let person = titles(json!({ "user_id": "ann", "service_account_id": null }));
    assert!(person.contains(&"user id") && !person.contains(&"service account"), "{person:?}");
    let program = titles(json!({ "user_id": "ann", "service_account_id": "0198" }));
    assert!(program.contains(&"service account") && program.contains(&"acts for"), "{program:?}");
    assert!(!program.contains(&"user id") && !program.contains(&"platform roles"), "{program:?}");
}

fn stored_session(folder: &Path, server: &str, expires_in: i64) -> (Store, Login) {
    let store = Store::new(folder.to_owned(), "default").unwrap();
    let login = Login {
        server: server.to_owned(),
        ca_bundle: None,
        issuer: server.to_owned(),
        token_endpoint: format!("{server}/token"),
        revocation_endpoint: None,
        client_id: "gpuctl".to_owned(),
        client_secret: None,
        access_token: "access-0".to_owned().into(),
        refresh_token: Some("refresh-0".to_owned().into()),
        service_account: false,
        expires_at: Some(Utc::now() + TimeDelta::seconds(expires_in)),
    };
    store.write(&login).unwrap();
    (store, login)
}

fn api(store: &Store, login: &Login) -> Api {
    let session = Session::stored(store.clone(), login.clone(), OUT);
    Api::new(http_client::address(&login.server).unwrap(), None, session, None, OUT).unwrap()
}

#[tokio::test]
async fn expired_token_is_renewed_once_by_concurrent_processes() {
    let provider = Rotating::default();
    let server = provider.serve().await;
    let folder = tempfile::tempdir().unwrap();
    let (store, login) = stored_session(folder.path(), &server, -5);
    // Ten concurrent commands, each with the login that it read at its start.
    let apis: Vec<Api> = (0..10).map(|_| api(&store, &login)).collect();
    let asked = futures::future::join_all(apis.iter().map(|api| api.get("/api/v1/things", &[]))).await;
    for answer in asked {
        answer.unwrap();
    }
    assert_eq!(provider.renewed(), 1);
    let now = store.read().unwrap().unwrap();
    assert_eq!(now.access_token.expose_secret(), "access-1");
    assert_eq!(now.refresh_token.unwrap().expose_secret(), "refresh-1");
}

#[tokio::test]
async fn refused_token_is_renewed_and_the_call_is_retried() {
    let provider = Rotating::default();
    let server = provider.serve().await;
    let folder = tempfile::tempdir().unwrap();
    let (store, login) = stored_session(folder.path(), &server, 600);
    let revoked_elsewhere = Login { access_token: "access-revoked".to_owned().into(), ..login };
    store.write(&revoked_elsewhere).unwrap();
    api(&store, &revoked_elsewhere).get("/api/v1/things", &[]).await.unwrap();
    assert_eq!(provider.renewed(), 1);
}

#[tokio::test]
async fn login_that_cannot_be_renewed_asks_to_log_in() {
    let provider = Rotating::default();
    let server = provider.serve().await;
    let folder = tempfile::tempdir().unwrap();
    let (store, login) = stored_session(folder.path(), &server, -5);
    let spent = Login { refresh_token: Some("refresh-9".to_owned().into()), ..login.clone() };
    let none = Login { refresh_token: None, ..login };
    for ended in [spent, none] {
        store.write(&ended).unwrap();
        let failure = api(&store, &ended).get("/api/v1/things", &[]).await.unwrap_err();
        assert_eq!(failure.exit_status, ExitStatus::LoggedOut, "{failure}");
        assert!(failure.next.as_deref().unwrap_or_default().contains("gpuctl login"), "{failure}");
    }
}

#[tokio::test]
async fn token_is_not_sent_to_the_server_of_another_login() {
    let provider = Rotating::default();
    let server = provider.serve().await;
    let folder = tempfile::tempdir().unwrap();
    let (store, login) = stored_session(folder.path(), &server, -5);
    let api = api(&store, &login);
    store.write(&Login { server: "https://elsewhere.example".to_owned(), ..login }).unwrap();
    let failure = api.get("/api/v1/things", &[]).await.unwrap_err();
    assert_eq!((failure.exit_status, provider.renewed()), (ExitStatus::LoggedOut, 0), "{failure}");
}

#[test]
fn opaque_token_can_be_shown() {
    let part = |claims: &Value| URL_SAFE_NO_PAD.encode(claims.to_string());
    let whole = json!({ "sub": "u-1", "preferred_username": "ann", "exp": 1_800_000_000, "realm_access": { "roles": ["user"] } });
    let shown = claims(&format!("e30.{}.c2ln", part(&whole)).into());
    assert_eq!((shown["user_id"].as_str(), shown["roles"][0].as_str()), (Some("u-1"), Some("user")));
    for opaque in ["", "opaque", "a.b.c", &format!("x.{}.y", part(&json!([1])))] {
        assert_eq!(claims(&opaque.to_owned().into())["user_id"], Value::Null, "{opaque}");
    }
}

#[test]
fn login_is_bound_to_one_server() {
    assert!(same_server("https://gpu.example", "https://gpu.example:443/"));
    assert!(!same_server("https://gpu.example", "https://gpu.example.evil"));
    assert!(!same_server("https://gpu.example", "https://gpu.example:8443"));
    assert!(!same_server("nonsense", "nonsense"));
}

/// Issues `program-N` for the right key of a service account, and accepts the newest token.
async fn issue(State(Rotating(count)): State<Rotating>, headers: HeaderMap, form: String) -> Response {
    let basic = base64::engine::general_purpose::STANDARD.encode("sa-key:its-secret");
    let knows = headers.get("authorization").is_some_and(|given| *given == format!("Basic {basic}"));
    if !knows || !form.contains("grant_type=client_credentials") {
        let details = json!({ "error": "invalid_client" });
        let refused = json!({ "code": "unauthenticated", "message": "No.", "correlation_id": "c", "details": details });
        return (StatusCode::UNAUTHORIZED, Json(refused)).into_response();
    }
    let number = count.fetch_add(1, Ordering::SeqCst) + 1;
    Json(json!({ "access_token": format!("access-{number}"), "token_type": "Bearer", "expires_in": 600 }))
        .into_response()
}

#[tokio::test]
async fn service_account_logs_in_with_its_key_and_renews_its_token() {
    let issuer = Rotating::default();
    let server = issuer.serve().await;
    let folder = tempfile::tempdir().unwrap();
    let store = Store::new(folder.path().to_owned(), "default").unwrap();
    let log_in = async |secret: &str| {
        let command_line = ["gpuctl", "login", "--service-account", "sa-key", "--client-secret", secret];
        let arguments = <crate::Arguments as clap::Parser>::try_parse_from(command_line).unwrap();
        let (server, store) = (Some(server.clone()), store.clone());
        let connection = Connection { server, ca_bundle: None, token: None, key: None, store, out: OUT };
        crate::execute(arguments.command, connection).await
    };
    assert_eq!(log_in("wrong").await.unwrap_err().exit_status, ExitStatus::LoggedOut);
    assert!(store.read().unwrap().is_none());
    log_in("its-secret").await.unwrap();

    let mut login = store.read().unwrap().unwrap();
    assert_eq!((login.access_token.expose_secret(), login.is_renewable()), ("access-1", true));
    login.expires_at = Some(Utc::now() - TimeDelta::seconds(5));
    store.write(&login).unwrap();
    api(&store, &login).get("/api/v1/things", &[]).await.unwrap();
    assert_eq!(issuer.renewed(), 2);
}

fn login_args(options: &[&str]) -> Result<LoginArgs, clap::Error> {
    let line = [&["gpuctl", "login"], options].concat();
    let arguments = <crate::Arguments as clap::Parser>::try_parse_from(line)?;
    let crate::Command::Login(args) = arguments.command else { panic!("another command") };
    Ok(args)
}

#[test]
fn login_without_a_refresh_token_says_how_to_get_one() {
    let notice = |options: &[&str], method: LoginMethod| login_args(options).unwrap().notice_without_renewal(&method);
    let browser = || LoginMethod::Browser("https://id.example/authorize".to_owned());
    let device = LoginMethod::Device("https://id.example/device".to_owned());
    assert!(notice(&[], browser()).unwrap().contains("gpuctl login --prompt consent"));
    for (options, method) in [(&["--prompt", "consent"][..], browser()), (&[], device)] {
        let notice = notice(options, method).unwrap();
        assert!(notice.contains("operator") && !notice.contains("--prompt"), "{notice}");
    }
    // It was not asked for.
    assert_eq!(notice(&["--scope", "openid"], browser()), None);
    assert_eq!(notice(&[], LoginMethod::Password("ann".to_owned())), None);
    assert!(login_args(&["--prompt", "none"]).is_err() && login_args(&["--prompt", "consent", "--device"]).is_err());
}

#[test]
fn description_of_a_provider_whose_optional_fields_have_other_forms_is_used_without_them() {
    let found: ProviderMetadata = serde_json::from_value(json!({
        "issuer": "i", "token_endpoint": "t", "authorization_endpoint": "a", "device_authorization_endpoint": "",
        "revocation_endpoint": null, "grant_types_supported": "authorization_code",
    }))
    .unwrap();
    assert!(
        matches!(login_args(&[]).unwrap().login_method(&found), Ok(LoginMethod::Browser(endpoint)) if endpoint == "a")
    );
}

#[test]
fn registered_redirect_address_is_for_the_browser_on_this_machine_alone() {
    let registered = ["--redirect-uri", "http://localhost:8400/callback"];
    let found = |browser: Option<&str>| -> ProviderMetadata {
        let addresses = json!({ "issuer": "i", "token_endpoint": "t", "device_authorization_endpoint": "d", "authorization_endpoint": browser });
        serde_json::from_value(addresses).unwrap()
    };
    let args = login_args(&registered).unwrap();
    assert!(matches!(args.login_method(&found(Some("b"))), Ok(LoginMethod::Browser(endpoint)) if endpoint == "b"));
    assert!(args.login_method(&found(None)).is_err());
    for other in [&["--device"][..], &["--username", "ann"]] {
        assert!(login_args(&[&registered[..], other].concat()).is_err(), "{other:?}");
    }
    assert!(login_args(&["--redirect-uri", "https://gpu.example/callback"]).is_err());
}

#[test]
fn secret_is_one_line_of_standard_input_without_its_ends() {
    let read = |bytes: &[u8]| secret_of(bytes, PASSWORD_STDIN).map(|secret| secret.expose_secret().to_owned());
    for line in ["s ecret\n", "s ecret\r\n", "s ecret", "\u{feff}s ecret\r\n", "s ecret\nand more"] {
        assert_eq!(read(line.as_bytes()).unwrap(), "s ecret", "{line:?}");
    }
    let utf_16: Vec<u8> = "\u{feff}secret\r\n".encode_utf16().flat_map(u16::to_le_bytes).collect();
    for bad in [&b""[..], b"\n", b"\r\n", &[b'x'; 5000], b"\xE4\n", &utf_16] {
        let failure = read(bad).unwrap_err();
        let next = failure.next.clone().unwrap_or_default();
        assert!(failure.exit_status == ExitStatus::Usage && next.contains(PASSWORD_STDIN), "{failure}");
        assert!(!failure.message.contains("secret\r"), "{failure}");
    }
}
