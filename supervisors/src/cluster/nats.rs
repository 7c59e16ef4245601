//! The connection to NATS.

use anyhow::Context;
use async_nats::{Client, ConnectOptions, ServerAddr};
use secrecy::{ExposeSecret, SecretString};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The most servers of one URL.
const SERVERS_MAX: usize = 8;

/// Whether [`connect`] can use this URL.
///
/// # Errors
/// Names the fault without quoting the URL: it may hold a password.
pub fn check_url(url: &str) -> anyhow::Result<()> {
    ServerUrl::parse(url).map(drop)
}

/// The prefix of the subjects for answers to the member `name`: two tokens, for every name.
#[must_use]
pub fn inbox_of(name: &str) -> String {
    let is_plain = |character: &char| character.is_ascii_alphanumeric() || matches!(character, '-' | '_');
    let token: String = name.chars().map(|character| if is_plain(&character) { character } else { '_' }).collect();
    format!("_INBOX.{token}")
}

/// The inbox of the member `name` that connects with this URL: that of its user, to whom the server's permissions belong. Members of one user
/// share it; each of their subjects has the member's id or a random one.
#[must_use]
pub fn inbox_through(url: &SecretString, name: &str) -> String {
    let user = ServerUrl::parse(url.expose_secret()).ok().and_then(|url| url.user);
    inbox_of(user.as_deref().unwrap_or(name))
}

/// Connects in the background: without NATS the control plane serves what it can. `name` is the member's; its answers arrive at its inbox
/// ([`inbox_through`]).
///
/// # Errors
/// Where the URL or the CA file is unusable.
pub async fn connect(url: &SecretString, ca: Option<&Path>, name: &str) -> anyhow::Result<Client> {
    let (options, servers) = options(url, ca, name)?;
    let options = options
        .retry_on_initial_connect()
        .ping_interval(Duration::from_secs(2))
        .reconnect_delay_callback(|attempt| Duration::from_millis((50 << attempt.min(5)).min(1000)))
        .event_callback(|event| async move {
            match event {
                async_nats::Event::Connected => tracing::info!("connected to NATS"),
                async_nats::Event::Disconnected => tracing::warn!("lost the connection to NATS"),
                // The client was dropped.
                async_nats::Event::Closed => tracing::debug!("the connection to NATS was closed"),
                other => tracing::warn!(event = %other, "NATS: {other}"),
            }
        });
    options.connect(servers).await.context("NATS: the options are unusable")
}

/// Errors that a server has sent to one connection, such as refused subjects. Those over the bound are dropped.
#[derive(Clone, Debug, Default)]
pub struct ServerErrors(Arc<Mutex<Vec<String>>>);

impl ServerErrors {
    const MOST: usize = 100;

    fn add(&self, error: String) {
        let mut errors = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if errors.len() < Self::MOST {
            errors.push(error);
        }
    }

    /// Those received so far.
    #[must_use]
    pub fn received(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Connects at once or fails, for a command that looks at the server.
///
/// # Errors
/// Where the URL or the CA file is unusable, or the server does not accept the connection.
pub async fn connect_once(url: &SecretString, ca: Option<&Path>, name: &str) -> anyhow::Result<(Client, ServerErrors)> {
    let (options, servers) = options(url, ca, name)?;
    let errors = ServerErrors::default();
    let received = errors.clone();
    let options = options.event_callback(move |event| {
        if let async_nats::Event::ServerError(error) = event {
            received.add(error.to_string());
        }
        async {}
    });
    Ok((options.connect(servers).await?, errors))
}

/// The user that the URL names.
#[must_use]
pub fn user_of(url: &str) -> Option<String> {
    ServerUrl::parse(url).ok()?.user
}

fn options(url: &SecretString, ca: Option<&Path>, name: &str) -> anyhow::Result<(ConnectOptions, Vec<ServerAddr>)> {
    let inbox = inbox_through(url, name);
    let url = ServerUrl::parse(url.expose_secret())?;
    let mut options = ConnectOptions::new()
        .name(name)
        // Answers arrive at the inboxes of its user: its credentials admit no others.
        .custom_inbox_prefix(inbox)
        // A cluster's servers announce addresses that their certificates may not name.
        .ignore_discovered_servers()
        .connection_timeout(Duration::from_secs(3))
        .request_timeout(Some(Duration::from_secs(10)));
    if let (Some(user), Some(password)) = (url.user, url.password) {
        options = options.user_and_password(user, password);
    }
    if let Some(ca) = ca {
        options = options.add_root_certificates(ca.to_owned()).require_tls(true);
    }
    Ok((options, url.servers))
}

/// The parts of a NATS URL: the client takes credentials separately, and they must not appear in its log. Several servers are written with
/// commas, each a URL or, after the first, a host and port; the credentials are those of the first.
struct ServerUrl {
    servers: Vec<ServerAddr>,
    user: Option<String>,
    password: Option<String>,
}

impl ServerUrl {
    fn parse(text: &str) -> anyhow::Result<Self> {
        let texts: Vec<&str> = text.split(',').map(str::trim).collect();
        if texts.len() > SERVERS_MAX {
            anyhow::bail!("SVC_NATS_URL names {} servers; at most {SERVERS_MAX} are read", texts.len());
        }
        let mut read = Self { servers: Vec::new(), user: None, password: None };
        let mut scheme = String::new();
        for (number, text) in texts.into_iter().enumerate() {
            let full = if number > 0 && !text.contains("://") { format!("{scheme}://{text}") } else { text.to_owned() };
            let mut url = reqwest::Url::parse(&full)
                .context("SVC_NATS_URL is no URL; it must look like tls://user:password@nats.example:4222")?;
            if !["tls", "nats"].contains(&url.scheme()) || !url.has_host() {
                anyhow::bail!("SVC_NATS_URL must begin with tls:// or nats:// and name a host");
            }
            let user = Some(url.username()).filter(|user| !user.is_empty()).map(decoded).transpose()?;
            let password = url.password().map(decoded).transpose()?;
            if number == 0 {
                (scheme, read.user, read.password) = (url.scheme().to_owned(), user, password);
            } else if url.scheme() != scheme || user.is_some_and(|user| read.user != Some(user)) {
                anyhow::bail!(
                    "the servers of SVC_NATS_URL must have one scheme and one user: a member is one user of the cluster"
                );
            }
            if url.set_username("").is_err() || url.set_password(None).is_err() {
                anyhow::bail!("SVC_NATS_URL must begin with tls:// or nats:// and name a host");
            }
            let server = url.as_str().parse().context("SVC_NATS_URL is no URL of a NATS server")?;
            read.servers.push(server);
        }
        Ok(read)
    }
}

/// Decodes the `%XX` sequences of a URL.
fn decoded(part: &str) -> anyhow::Result<String> {
    let text = percent_encoding::percent_decode_str(part).decode_utf8();
    Ok(text.context("SVC_NATS_URL holds credentials that are no UTF-8")?.into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inbox_of_a_name_with_dots_or_wildcards_is_one_token() {
        assert_eq!(inbox_of("replica-1"), "_INBOX.replica-1");
        assert_eq!(inbox_of("host.example.>*"), "_INBOX.host_example___");
    }

    fn hosts(url: &ServerUrl) -> Vec<(String, u16)> {
        url.servers.iter().map(|server| (server.host().to_owned(), server.port())).collect()
    }

    #[test]
    fn several_servers_share_a_scheme_and_a_user() -> anyhow::Result<()> {
        for text in
            ["tls://m:p@one.example:4222,two.example:4223", "tls://m:p@one.example:4222, tls://m:p@two.example:4223"]
        {
            let parts = ServerUrl::parse(text)?;
            assert_eq!(hosts(&parts), [("one.example".to_owned(), 4222), ("two.example".to_owned(), 4223)]);
            assert_eq!((parts.user.as_deref(), parts.password.as_deref()), (Some("m"), Some("p")));
        }
        for wrong in [
            "tls://m@one.example,nats://two.example",
            "tls://m@one.example,tls://n@two.example",
            "tls://m@one.example,",
        ] {
            assert!(ServerUrl::parse(wrong).is_err(), "{wrong}");
        }
        assert!(ServerUrl::parse(&["tls://one.example"; SERVERS_MAX + 1].join(",")).is_err());
        Ok(())
    }

    #[test]
    fn inbox_is_that_of_the_user_and_without_one_that_of_the_member() {
        let through = |url: &str| inbox_through(&SecretString::from(url), "gpuaas-5d9c-x7k2p");
        assert_eq!(through("tls://gpuaas:hunter2@nats.example:4222"), "_INBOX.gpuaas");
        assert_eq!(through("tls://nats.example:4222"), "_INBOX.gpuaas-5d9c-x7k2p");
    }

    #[test]
    fn credentials_are_removed_from_the_url_and_decoded() -> anyhow::Result<()> {
        let parts = ServerUrl::parse("tls://replica%2D1:a%40b%3A%2Fc@nats.example:4222")?;
        assert_eq!(hosts(&parts), [("nats.example".to_owned(), 4222)]);
        assert_eq!((parts.user.as_deref(), parts.password.as_deref()), (Some("replica-1"), Some("a@b:/c")));
        assert!(ServerUrl::parse("tls://a:%FF@nats.example").is_err());
        Ok(())
    }
}
