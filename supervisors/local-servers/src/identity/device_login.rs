//! The device login of the development identity provider (RFC 8628): `gpuctl` shows a code, which a person confirms in any browser.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Form, Json};
use rand::seq::IndexedRandom as _;
use secrecy::{ExposeSecret as _, SecretString};
use serde::Deserialize;
use serde_json::json;

use super::browser_login::{LoginClient, ProviderSession, WRONG_PASSWORD, form, issue, page, push};
use super::{Issuer, REALM, TokenRequest, no_such_realm, refusal, same};
use crate::private_files::random_hex;

pub(super) const DEVICE_GRANT: &str = "urn:ietf:params:oauth:grant-type:device_code";

const LIFE: Duration = Duration::from_secs(600);
/// How often a client may ask, in seconds.
const INTERVAL_SECONDS: u32 = 1;
/// The letters of a user code: no vowels, so that they spell nothing (section 6.1).
const LETTERS: &[u8; 20] = b"BCDFGHJKLMNPQRSTVWXZ";

/// The logins that devices have begun, in memory.
#[derive(Default)]
pub(super) struct DeviceLogins(Mutex<Vec<DeviceLogin>>);

struct DeviceLogin {
    device_code: String,
    user_code: String,
    begun_at: Instant,
    /// The person's session, once the code is confirmed.
    session: Option<ProviderSession>,
}

#[derive(Deserialize)]
pub(super) struct DevicePage {
    user_code: Option<String>,
}

#[derive(Deserialize)]
pub(super) struct DeviceConfirmation {
    user_code: String,
    username: String,
    password: SecretString,
}

impl DeviceLogins {
    /// The logins that can still be confirmed or taken.
    fn lock(&self) -> MutexGuard<'_, Vec<DeviceLogin>> {
        let mut logins = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        logins.retain(|login| login.begun_at.elapsed() < LIFE);
        logins
    }
}

/// Begins a login (section 3.1). The client authenticates as for a token.
pub(super) async fn authorize(
    State(issuer): State<Arc<Issuer>>,
    Path(realm): Path<String>,
    headers: HeaderMap,
    Form(request): Form<TokenRequest>,
) -> Response {
    if realm != REALM {
        return no_such_realm();
    }
    if issuer.client_of(&headers, &request) != Some(LoginClient::Gpuctl) {
        return refusal(StatusCode::UNAUTHORIZED, "invalid_client", "Unknown client, or a wrong client_secret");
    }
    let (device_code, user_code) = (random_hex(32), random_user_code());
    let uri = format!("{}/device", issuer.name());
    let answer = json!({
        "device_code": device_code,
        "user_code": user_code,
        "verification_uri": uri,
        "verification_uri_complete": format!("{uri}?user_code={user_code}"),
        "expires_in": LIFE.as_secs(),
        "interval": INTERVAL_SECONDS,
    });
    push(&mut issuer.devices.lock(), DeviceLogin { device_code, user_code, begun_at: Instant::now(), session: None });
    ([(header::CACHE_CONTROL, "no-store")], Json(answer)).into_response()
}

/// The page on which a code is confirmed (section 3.3).
pub(super) async fn show(Path(realm): Path<String>, Query(DevicePage { user_code }): Query<DevicePage>) -> Response {
    if realm != REALM {
        return no_such_realm();
    }
    page(StatusCode::OK, &code_form("", user_code.as_deref().unwrap_or_default()))
}

pub(super) async fn confirm(
    State(issuer): State<Arc<Issuer>>,
    Path(realm): Path<String>,
    Form(confirmation): Form<DeviceConfirmation>,
) -> Response {
    if realm != REALM {
        return no_such_realm();
    }
    let again = |why: &str| page(StatusCode::UNAUTHORIZED, &code_form(why, &confirmation.user_code));
    let Some(person) = issuer.authenticate(&confirmation.username, &confirmation.password) else {
        return again(WRONG_PASSWORD);
    };
    let user_code = normal_user_code(&confirmation.user_code);
    let mut logins = issuer.devices.lock();
    let found =
        logins.iter_mut().find(|login| login.session.is_none() && normal_user_code(&login.user_code) == user_code);
    let Some(login) = found else {
        return again("<p role=\"alert\">The code is unknown, confirmed already, or too old.</p>");
    };
    login.session = Some(issuer.logins.open_session(&person.username));
    page(StatusCode::OK, "<p>You are logged in. Close this page and go back to your terminal.</p>")
}

/// The tokens of a login whose code is confirmed (section 3.5).
pub(super) fn token(issuer: &Issuer, request: &TokenRequest) -> Response {
    let code = request.device_code.as_ref().map(SecretString::expose_secret).unwrap_or_default();
    let mut logins = issuer.devices.lock();
    let Some(at) = logins.iter().position(|login| same(&login.device_code, code)) else {
        return refusal(StatusCode::BAD_REQUEST, "expired_token", "The device code is unknown, used, or too old");
    };
    let Some(session) = logins[at].session.clone() else {
        return refusal(StatusCode::BAD_REQUEST, "authorization_pending", "The code is not confirmed yet");
    };
    logins.remove(at);
    drop(logins);
    issue(issuer, LoginClient::Gpuctl, session, None)
}

fn random_user_code() -> String {
    let mut random = rand::rng();
    let mut letters = (0..8).filter_map(|_| LETTERS.choose(&mut random)).map(|letter| char::from(*letter));
    let half: String = letters.by_ref().take(4).collect();
    format!("{half}-{}", letters.collect::<String>())
}

/// A code as a person types it: in any case, with or without its dash.
fn normal_user_code(typed: &str) -> String {
    typed.chars().filter(char::is_ascii_alphanumeric).map(|letter| letter.to_ascii_uppercase()).collect()
}

fn code_form(message: &str, user_code: &str) -> String {
    let typed = user_code.chars().filter(|letter| letter.is_ascii_alphanumeric() || *letter == '-').take(16);
    let value: String = typed.collect();
    let field = format!(
        "<p><label>Code that gpuctl shows<br><input name=\"user_code\" value=\"{value}\" autocomplete=\"off\" required></label></p>"
    );
    form(message, &field)
}

#[cfg(test)]
mod tests {
    use super::super::{CLIENT_ID, IdentityProvider};
    use super::*;
    use serde_json::Value;

    struct Device {
        provider: IdentityProvider,
        http: reqwest::Client,
    }

    impl Device {
        async fn post(&self, path: &str, fields: &[(&str, &str)]) -> (u16, String) {
            let answer = self.http.post(format!("{}{path}", self.provider.issuer())).form(fields).send().await.unwrap();
            (answer.status().as_u16(), answer.text().await.unwrap())
        }

        async fn begin(&self) -> Value {
            let (_, text) = self.post("/protocol/openid-connect/auth/device", &[("client_id", CLIENT_ID)]).await;
            serde_json::from_str(&text).unwrap()
        }

        /// The error of a token request, or nothing.
        async fn token(&self, begun: &Value) -> Option<String> {
            let code = begun["device_code"].as_str().unwrap();
            let fields = [("grant_type", DEVICE_GRANT), ("client_id", CLIENT_ID), ("device_code", code)];
            let (status, text) = self.post("/protocol/openid-connect/token", &fields).await;
            let answer: Value = serde_json::from_str(&text).unwrap();
            assert_eq!(status == 200, answer["access_token"].is_string(), "{answer}");
            answer["error"].as_str().map(str::to_owned)
        }

        async fn confirm(&self, user_code: &str, password: &str) -> u16 {
            let fields = [("user_code", user_code), ("username", "user"), ("password", password)];
            self.post("/device", &fields).await.0
        }
    }

    #[tokio::test]
    async fn confirmed_code_holds_once_for_the_device_that_began() {
        let there = Device { provider: IdentityProvider::start().await.unwrap(), http: reqwest::Client::new() };
        let (_, refused) = there.post("/protocol/openid-connect/auth/device", &[("client_id", "other")]).await;
        assert!(refused.contains("invalid_client"), "{refused}");
        // With its secret, as where the variables of the environment are set.
        for (secret, expected) in [(there.provider.client_secret().expose_secret(), 200), ("wrong", 401)] {
            let at = format!("{}/protocol/openid-connect/auth/device", there.provider.issuer());
            let request = there.http.post(at).basic_auth(CLIENT_ID, Some(secret)).form(&[("scope", "openid")]);
            assert_eq!(request.send().await.unwrap().status().as_u16(), expected);
        }
        let (begun, other) = (there.begin().await, there.begin().await);
        let user_code = begun["user_code"].as_str().unwrap();
        let page = reqwest::get(begun["verification_uri_complete"].as_str().unwrap()).await.unwrap();
        assert!(page.text().await.unwrap().contains(user_code));
        let password = there.provider.person("user").unwrap().password;
        assert_eq!(there.token(&begun).await.as_deref(), Some("authorization_pending"));
        assert_eq!(there.confirm(user_code, "wrong").await, 401);
        assert_eq!(there.confirm("BBBB-BBBB", password.expose_secret()).await, 401);
        assert_eq!(there.token(&begun).await.as_deref(), Some("authorization_pending"));
        // As it is typed from another screen.
        let typed = user_code.to_lowercase().replace('-', " ");
        assert_eq!(there.confirm(&typed, password.expose_secret()).await, 200);
        assert_eq!(there.confirm(user_code, password.expose_secret()).await, 401, "a code is confirmed once");
        assert_eq!(there.token(&other).await.as_deref(), Some("authorization_pending"));
        assert_eq!(there.token(&begun).await, None);
        assert_eq!(there.token(&begun).await.as_deref(), Some("expired_token"), "a code is used once");
    }

    #[tokio::test]
    async fn code_in_an_address_is_no_markup() {
        let provider = IdentityProvider::start().await.unwrap();
        let at = format!("{}/device?user_code=%22%3E%3Cscript%3E", provider.issuer());
        let page = reqwest::get(at).await.unwrap().text().await.unwrap();
        assert!(page.contains("value=\"script\"") && !page.contains("<script"), "{page}");
    }
}
