//! Logging in and out, and the session of the logged-in user.

pub(crate) mod login_store;
mod loopback;
mod oauth_answer;
pub(crate) mod provider;
mod provider_discovery;

use crate::failure::{ExitStatus, Failure, with_profile};
use crate::output::{Column, Output};
use crate::{Connection, http_client, text_encoding, variable};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use chrono::{DateTime, TimeDelta, Utc};
use login_store::{Login, Store};
use loopback::RedirectAddress;
use provider::{ClientConfig, Prompt, Provider, ProviderMetadata, Renewal, TokenGrant, discover};
use provider_discovery::Resource;
use reqwest::Url;
use secrecy::{ExposeSecret as _, SecretString};
use serde_json::{Value, json};
use std::io::{self, BufRead as _, IsTerminal as _};
use std::time::Duration;
use tokio::sync::Mutex;

/// A token that expires within this time is renewed before it is used.
const RENEW_BEFORE_END: TimeDelta = TimeDelta::seconds(20);
const MAX_PASSWORD_BYTES: u64 = 4096;
/// How often, and at which pauses, the store is read for a login that another process has renewed.
const SUCCESSOR_LOOKS: u32 = 10;
const SUCCESSOR_PAUSE: Duration = Duration::from_millis(100);

const IDENTITY: [Column; 12] = [
    ("server", "/server"),
    ("issuer", "/issuer"),
    ("profile", "/profile"),
    ("user id", "/user_id"),
    ("name", "/name"),
    ("roles", "/roles"),
    ("platform roles", "/platform_roles"),
    ("organisation", "/org_id"),
    ("project", "/project_id"),
    ("plan", "/plan"),
    ("token ends", "/token_expires_at"),
    ("is renewed", "/renewable"),
];

/// Of a service account: it acts for the user, its owner.
const SERVICE_ACCOUNT_IDENTITY: [Column; 11] = [
    ("server", "/server"),
    ("issuer", "/issuer"),
    ("profile", "/profile"),
    ("service account", "/service_account_id"),
    ("acts for", "/user_id"),
    ("roles", "/roles"),
    ("organisation", "/org_id"),
    ("project", "/project_id"),
    ("plan", "/plan"),
    ("token ends", "/token_expires_at"),
    ("is renewed", "/renewable"),
];

/// How to log in.
#[derive(Debug, clap::Args)]
pub(crate) struct LoginArgs {
    /// The identity provider, exactly as it names itself; the server's own where it is left out. [env: SVC_OIDC_ISSUER]
    #[arg(long, value_name = "URL")]
    issuer: Option<String>,
    /// The client id at the provider; the one that the server names where it is left out. [env: SVC_CLIENT_ID]
    #[arg(long, value_name = "ID")]
    client_id: Option<String>,
    /// The client's secret, where it has one. [env: SVC_CLIENT_SECRET]
    #[arg(long, value_name = "SECRET")]
    client_secret: Option<SecretString>,
    /// A scope to request; may be given again.
    #[arg(long = "scope", value_name = "SCOPE", default_values = ["openid", OFFLINE_ACCESS])]
    scopes: Vec<String>,
    /// The resource that the tokens are for, where the provider requires it (RFC 8707).
    #[arg(long, value_name = "URI")]
    resource: Option<String>,
    /// With the code that is shown, confirmed on any other device.
    #[arg(long, conflicts_with_all = ["browser", "username"])]
    device: bool,
    /// In a browser on this machine.
    #[arg(long, conflicts_with = "username")]
    browser: bool,
    /// Show the browser's address, and open none.
    #[arg(long)]
    no_open: bool,
    /// What the provider asks you for in the browser: `consent` where it renews a login only then.
    #[arg(long, value_enum, value_name = "WHAT", conflicts_with_all = ["device", "username"])]
    prompt: Option<Prompt>,
    /// The address of this machine that the provider sends your browser back to, where it admits registered ones alone:
    /// `http://localhost:8400/callback`.
    #[arg(long, value_name = "URI", conflicts_with_all = ["device", "username"])]
    redirect_uri: Option<RedirectAddress>,
    /// With a password, as this user: at a development provider.
    #[arg(long, value_name = "NAME")]
    username: Option<String>,
    /// Read the password from standard input and not from the terminal.
    #[arg(long, requires = "username")]
    password_stdin: bool,
    /// As a service account: the client id that `service-accounts add-key` printed. Its secret is asked for, or --client-secret.
    #[arg(long, value_name = "CLIENT-ID", conflicts_with_all = ["issuer", "client_id", "device", "browser", "prompt", "redirect_uri", "username"])]
    service_account: Option<String>,
    /// Read the service account's secret from standard input and not from the terminal.
    #[arg(long, requires = "service_account")]
    secret_stdin: bool,
}

/// The methods of logging in.
enum LoginMethod {
    Browser(String),
    Device(String),
    Password(String),
}

pub(crate) async fn login(args: LoginArgs, connection: &Connection) -> Result<(), Failure> {
    let server = connection.login_server()?;
    // Before the user approves a login that could not be stored.
    drop(connection.store.reserve()?);
    let login = match &args.service_account {
        Some(client) => as_service_account(client, &args, &server, connection).await?,
        None => as_person(&args, &server, connection).await?,
    };
    let lock = connection.store.lock(connection.out);
    connection.store.write(&login)?;
    drop(lock);
    let identity = identity_of(&login, connection.store.profile());
    let name = [&identity["name"], &identity["user_id"]]
        .into_iter()
        .find_map(Value::as_str)
        .unwrap_or("an unnamed user")
        .to_owned();
    connection.out.done(&identity, &format!("Logged in at {server} as {}.", crate::printable::plain(&name)))
}

/// The server is contacted first, so that a mistyped address is found before a password is entered.
async fn as_person(args: &LoginArgs, server: &Url, connection: &Connection) -> Result<Login, Failure> {
    let ca_bundle = connection.ca_bundle()?;
    let issuer = args.issuer.clone().or_else(|| variable("SVC_OIDC_ISSUER"));
    let Resource { issuer, client_id } = provider_discovery::discover(server, issuer, ca_bundle.as_deref()).await?;
    let client_id = args.client_id.clone().or_else(|| variable("SVC_CLIENT_ID")).unwrap_or(client_id);
    let client_secret = args.client_secret.clone().or_else(|| variable("SVC_CLIENT_SECRET").map(SecretString::from));
    let (http, found) = discover(&issuer, ca_bundle.as_deref()).await?;
    let config = ClientConfig {
        client_id: client_id.clone(),
        client_secret: client_secret.clone(),
        scopes: args.scopes.clone(),
        resource: args.resource.clone(),
    };
    let provider = Provider::new(http, &found.token_endpoint, config)?;
    let method = args.login_method(&found)?;
    let without_renewal = args.notice_without_renewal(&method);
    let granted = match method {
        LoginMethod::Password(username) => {
            provider.by_password(&username, &secret("Password: ", args.password_stdin, PASSWORD_STDIN)?).await?
        }
        LoginMethod::Device(endpoint) => provider.by_device(&endpoint, connection.out).await?,
        LoginMethod::Browser(endpoint) => {
            let registered = args.redirect_uri.as_ref();
            provider.by_browser(&endpoint, &issuer, args.prompt, registered, !args.no_open, connection.out).await?
        }
    };
    let TokenGrant { access_token, refresh_token, expires_at } = granted;
    if refresh_token.is_none()
        && let Some(notice) = without_renewal
    {
        connection.out.notice(&with_profile(notice, connection.store.profile()));
    }
    Ok(Login {
        server: server.to_string(),
        ca_bundle,
        issuer,
        token_endpoint: found.token_endpoint,
        revocation_endpoint: found.revocation_endpoint,
        client_id,
        // Needed again only to refresh the login.
        client_secret: client_secret.filter(|_| refresh_token.is_some()),
        service_account: false,
        expires_at: expires_at.or_else(|| end_of(&access_token)),
        access_token,
        refresh_token,
    })
}

async fn as_service_account(
    client: &str,
    args: &LoginArgs,
    server: &Url,
    connection: &Connection,
) -> Result<Login, Failure> {
    let ca_bundle = connection.ca_bundle()?;
    let client_secret = match &args.client_secret {
        Some(secret) => secret.clone(),
        None => secret("Client secret: ", args.secret_stdin, SECRET_STDIN)?,
    };
    // The control plane itself issues these tokens.
    let token_endpoint = format!("{}/api/v1/service-accounts/token", server.as_str().trim_end_matches('/'));
    let http = provider::http(server.as_str(), ca_bundle.as_deref())?;
    let config = ClientConfig {
        client_id: client.to_owned(),
        client_secret: Some(client_secret.clone()),
        scopes: Vec::new(),
        resource: None,
    };
    let granted = Provider::new(http, &token_endpoint, config)?.by_client_credentials().await?;
    Ok(Login {
        server: server.to_string(),
        ca_bundle,
        issuer: server.to_string(),
        token_endpoint,
        revocation_endpoint: None,
        client_id: client.to_owned(),
        client_secret: Some(client_secret),
        service_account: true,
        expires_at: granted.expires_at.or_else(|| end_of(&granted.access_token)),
        access_token: granted.access_token,
        refresh_token: None,
    })
}

impl LoginArgs {
    /// What to say where the provider gives no refresh token although one was asked for. A password at a development provider brings none.
    fn notice_without_renewal(&self, method: &LoginMethod) -> Option<&'static str> {
        if !self.scopes.iter().any(|scope| scope == OFFLINE_ACCESS) {
            return None;
        }
        match method {
            LoginMethod::Password(_) => None,
            LoginMethod::Browser(_) if self.prompt != Some(Prompt::Consent) => Some(
                "The identity provider gave no refresh token, so this login is not renewed. Some providers give one only where they ask for your \
                 consent: gpuctl login --prompt consent",
            ),
            LoginMethod::Browser(_) | LoginMethod::Device(_) => Some(
                "The identity provider gave no refresh token, so this login is not renewed: log in again when it has ended. The service's operator \
                 can let the provider give one.",
            ),
        }
    }

    fn login_method(&self, found: &ProviderMetadata) -> Result<LoginMethod, Failure> {
        let lacks = |what: &str| Failure::usage(format!("this identity provider offers no {what}"));
        if let Some(username) = &self.username {
            return Ok(LoginMethod::Password(username.clone()));
        }
        let device = found.device_authorization_endpoint.clone().map(LoginMethod::Device);
        let browser = found.authorization_endpoint.clone().map(LoginMethod::Browser);
        if self.device {
            return device.ok_or_else(|| {
                lacks("log-in by device code").next("Log in with a browser on this machine: gpuctl login --browser")
            });
        }
        if self.browser || self.prompt.is_some() || self.redirect_uri.is_some() {
            return browser
                .ok_or_else(|| lacks("log-in in a browser").next("Log in with a code: gpuctl login --device"));
        }
        let (first, second) = if has_display() { (browser, device) } else { (device, browser) };
        first.or(second).ok_or_else(|| {
            let next = if found.grant_types_supported.iter().flatten().any(|grant| grant == "password") {
                "Log in with a password: gpuctl login --username NAME"
            } else {
                "Ask the service's operator how to log in."
            };
            lacks("log-in in a browser or by device code").next(next)
        })
    }
}

/// The scope by which providers issue refresh tokens (OpenID Connect Core 1.0, section 11).
const OFFLINE_ACCESS: &str = "offline_access";

fn has_display() -> bool {
    cfg!(target_os = "macos") || ["DISPLAY", "WAYLAND_DISPLAY"].iter().any(|name| std::env::var_os(name).is_some())
}

/// The options that read a secret from standard input.
const PASSWORD_STDIN: &str = "--password-stdin";
const SECRET_STDIN: &str = "--secret-stdin";

/// Reads a secret: a line of standard input, or from the terminal without echo.
fn secret(prompt: &str, from_stdin: bool, option: &str) -> Result<SecretString, Failure> {
    if from_stdin {
        return secret_of(io::stdin().lock(), option);
    }
    if !io::stdin().is_terminal() {
        return Err(Failure::usage("there is no terminal to ask for the secret in")
            .next(format!("Give it on standard input, with {option}.")));
    }
    let asked = rpassword::prompt_password(prompt);
    asked.map(SecretString::from).map_err(|error| {
        Failure::usage(format!("no secret can be read from the terminal: {error}"))
            .next(format!("Give it on standard input, with {option}."))
    })
}

/// The secret in the first line.
fn secret_of(lines: impl io::BufRead, option: &str) -> Result<SecretString, Failure> {
    let next = format!("Write it as one line to standard input, which {option} reads.");
    let unread = |why: &str| Failure::usage(format!("no secret can be read from standard input: {why}")).next(&next);
    let mut line = Vec::new();
    let read = lines.take(MAX_PASSWORD_BYTES + 1).read_until(b'\n', &mut line);
    read.map_err(|error| unread(&error.to_string()))?;
    if line.len() as u64 > MAX_PASSWORD_BYTES {
        return Err(unread(&format!("its first line is over {MAX_PASSWORD_BYTES} bytes")));
    }
    let text = text_encoding::decoded(line).ok_or_else(|| unread("it is no text in UTF-8"))?;
    match text.trim_end_matches(['\n', '\r']) {
        "" => Err(unread("its first line is empty")),
        // Of UTF-16 a line is half of a character too short.
        secret if secret.contains('\0') => Err(unread("it is no text in UTF-8")),
        secret => Ok(secret.to_owned().into()),
    }
}

pub(crate) async fn logout(connection: &Connection) -> Result<(), Failure> {
    let lock = connection.store.lock(connection.out);
    // A login that cannot be read is removed too.
    let login = connection.store.read().ok().flatten();
    let removed = connection.store.remove();
    drop(lock);
    // It is revoked at the provider, whether or not the file could be removed.
    if let Some(login) = &login
        && let Some(endpoint) = &login.revocation_endpoint
    {
        let token = login.refresh_token.as_ref().unwrap_or(&login.access_token);
        let revoked = match Provider::of(login) {
            Ok(provider) => provider.revoke(endpoint, token).await,
            Err(failure) => Err(failure),
        };
        if let Err(failure) = revoked {
            connection
                .out
                .notice(&format!("The tokens could not be revoked at the identity provider: {}", failure.message));
        }
    }
    let was_logged_in = removed.map_err(|failure| {
        failure.next(
            "The login was revoked where the identity provider allows it; remove the file, which still has its tokens.",
        )
    })?;
    let sentence = if was_logged_in { "Logged out." } else { "There was no login." };
    connection.out.done(&json!({ "logged_out": was_logged_in }), sentence)
}

/// Shows who is logged in, as the service sees it.
pub(crate) async fn whoami(connection: &Connection) -> Result<(), Failure> {
    let login = connection.login()?;
    let api = connection.api()?;
    let me = api.get("/api/v1/me", &[]).await?;
    let login = match login {
        // It may have been renewed by the request.
        Some(_) => connection.login()?,
        None => None,
    };
    let mut identity = match login {
        Some(login) => identity_of(&login, connection.store.profile()),
        None => {
            let token = api.session().token().await?;
            let mut identity = claims(&token);
            identity["server"] = json!(connection.named_server()?.to_string());
            identity["renewable"] = json!(false);
            identity
        }
    };
    // What the service says of the caller takes precedence over the token's claims.
    for field in
        ["user_id", "roles", "platform_roles", "auth_kind", "service_account_id", "org_id", "project_id", "plan"]
    {
        identity[field] = me[field].clone();
    }
    connection.out.show(&identity, identity_columns(&identity))
}

fn identity_columns(identity: &Value) -> &'static [Column] {
    if identity["service_account_id"].is_string() { &SERVICE_ACCOUNT_IDENTITY } else { &IDENTITY }
}

fn identity_of(login: &Login, profile: &str) -> Value {
    let mut identity = claims(&login.access_token);
    identity["server"] = json!(login.server);
    identity["issuer"] = json!(login.issuer);
    identity["profile"] = json!(profile);
    identity["token_expires_at"] = json!(login.expires_at);
    identity["renewable"] = json!(login.is_renewable());
    identity
}

/// The claims of the token, where they can be read here. They are shown and never trusted: the service verifies the token.
fn claims(token: &SecretString) -> Value {
    let claims = payload(token).unwrap_or_default();
    let text = |names: &[&str]| names.iter().find_map(|name| claims[*name].as_str()).map(str::to_owned);
    json!({
        "user_id": text(&["sub"]),
        "name": text(&["preferred_username", "name", "email"]),
        "roles": claims["realm_access"]["roles"].clone(),
        "org_id": text(&["org_id"]),
        "project_id": text(&["project_id"]),
        "plan": text(&["plan"]),
        "token_expires_at": end_of(token),
    })
}

fn payload(token: &SecretString) -> Option<Value> {
    let payload = token.expose_secret().split('.').nth(1)?;
    serde_json::from_slice(&URL_SAFE_NO_PAD.decode(payload).ok()?).ok()
}

fn end_of(token: &SecretString) -> Option<DateTime<Utc>> {
    DateTime::from_timestamp(oauth_answer::seconds(&payload(token)?["exp"])?.try_into().ok()?, 0)
}

/// The tokens of the logged-in user.
pub(crate) enum Session {
    /// A token that the user gave, used as it is.
    AccessToken(SecretString),
    StoredLogin {
        store: Store,
        login: Box<Mutex<Login>>,
        out: Output,
    },
}

impl Session {
    pub(crate) fn stored(store: Store, login: Login, out: Output) -> Self {
        Self::StoredLogin { store, login: Box::new(Mutex::new(login)), out }
    }

    /// A token that is valid, as far as this process knows.
    pub(crate) async fn token(&self) -> Result<SecretString, Failure> {
        let login = match self {
            Self::AccessToken(token) => return Ok(token.clone()),
            Self::StoredLogin { login, .. } => login,
        };
        let (token, expires_at, renewable) = {
            let login = login.lock().await;
            (login.access_token.clone(), login.expires_at, login.is_renewable())
        };
        let left = expires_at.map(|at| at - Utc::now());
        match left {
            Some(left) if left < RENEW_BEFORE_END && renewable => {
                self.renew(&token).await?;
                Ok(login.lock().await.access_token.clone())
            }
            Some(left) if left < TimeDelta::zero() => {
                Err(Failure::new(ExitStatus::LoggedOut, "your login has ended").next("Log in again: gpuctl login"))
            }
            Some(_) | None => Ok(token),
        }
    }

    /// The token as it is stored. It is not renewed, and no other process is waited for.
    pub(crate) async fn stored_token(&self) -> Result<SecretString, Failure> {
        let login = match self {
            Self::AccessToken(token) => return Ok(token.clone()),
            Self::StoredLogin { login, .. } => login.lock().await,
        };
        if login.expires_at.is_some_and(|at| at < Utc::now()) {
            return Err(Failure::new(ExitStatus::LoggedOut, "the stored token has ended"));
        }
        Ok(login.access_token.clone())
    }

    /// Renews a token that was refused. `false` where it cannot be renewed.
    pub(crate) async fn renew(&self, token: &SecretString) -> Result<bool, Failure> {
        let Self::StoredLogin { store, login: stored, out } = self else { return Ok(false) };
        let mut mine = stored.lock().await;
        let (waiting, notices) = (store.clone(), *out);
        let lock = tokio::task::spawn_blocking(move || waiting.lock(notices)).await;
        let _lock = lock.map_err(|error| Failure::new(ExitStatus::Failed, error.to_string()))?;
        // Another process may have renewed it already, and the provider may treat the use of an old refresh token as theft.
        let Some(stored) = store.read()? else {
            return Err(
                Failure::new(ExitStatus::LoggedOut, "you have logged out meanwhile").next("Log in: gpuctl login")
            );
        };
        if stored.server != mine.server {
            let at = &stored.server;
            return Err(Failure::new(ExitStatus::LoggedOut, format!("you have logged in at {at} meanwhile"))
                .next("Repeat the command: it is for that server."));
        }
        let is_new = stored.access_token.expose_secret() != token.expose_secret();
        *mine = stored;
        if is_new {
            return Ok(true);
        }
        if !mine.is_renewable() {
            return Ok(false);
        }
        let room = match store.reserve() {
            Ok(room) => Some(room),
            // Its key is not spent by its use.
            Err(failure) if mine.service_account => {
                out.notice(&format!("The renewed token is for this command alone: {}", failure.message));
                None
            }
            Err(failure) => return Err(failure),
        };
        let granted = match &mine.refresh_token {
            _ if mine.service_account => Provider::of(&mine)?.by_client_credentials().await?,
            Some(refresh_token) => match Provider::of(&mine)?.renew(refresh_token).await? {
                Renewal::Granted(granted) => granted,
                Renewal::Spent(failure) => {
                    if let Some(successor) = successor(store, &mine).await? {
                        *mine = successor;
                        return Ok(true);
                    }
                    mine.refresh_token = None;
                    if let Some(room) = room {
                        room.store(&mine)?;
                    }
                    return Err(failure);
                }
            },
            None => return Ok(false),
        };
        let TokenGrant { access_token, refresh_token, expires_at } = granted;
        mine.expires_at = expires_at.or_else(|| end_of(&access_token));
        mine.access_token = access_token;
        mine.refresh_token = refresh_token.or_else(|| mine.refresh_token.clone());
        if let Some(room) = room
            && let Err(failure) = room.store(&mine)
        {
            out.notice(&format!(
                "Your login was renewed and could not be stored, so log in again: {}",
                failure.message
            ));
        }
        Ok(true)
    }
}

/// The login that another process has stored in place of one whose refresh token is spent: where a home has no locks, it is about to be
/// written.
async fn successor(store: &Store, spent: &Login) -> Result<Option<Login>, Failure> {
    for _ in 0..SUCCESSOR_LOOKS {
        let is_successor = |stored: &Login| {
            stored.server == spent.server && stored.access_token.expose_secret() != spent.access_token.expose_secret()
        };
        if let Some(stored) = store.read()?.filter(is_successor) {
            return Ok(Some(stored));
        }
        tokio::time::sleep(SUCCESSOR_PAUSE).await;
    }
    Ok(None)
}

/// Whether both addresses have the same origin.
pub(crate) fn same_server(one: &str, other: &str) -> bool {
    let origin = |text: &str| http_client::address(text).ok().map(|url| url.origin());
    origin(one).is_some() && origin(one) == origin(other)
}

#[cfg(test)]
mod tests;
