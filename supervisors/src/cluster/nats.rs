//! The connection to NATS.

use anyhow::Context;
use async_nats::{Client, ConnectOptions};
use secrecy::{ExposeSecret, SecretString};
use std::path::Path;
use std::time::Duration;

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

/// Connects in the background: without NATS the control plane serves what it can. `name` is the member's; its answers arrive at
/// `_INBOX.NAME.>`.
///
/// # Errors
/// Where the URL or the CA file is unusable.
pub async fn connect(url: &SecretString, ca: Option<&Path>, name: &str) -> anyhow::Result<Client> {
    let url = ServerUrl::parse(url.expose_secret())?;
    let mut options = ConnectOptions::new()
        .name(name)
        // Answers arrive at this member's own inboxes: its credentials admit no others.
        .custom_inbox_prefix(inbox_of(name))
        .retry_on_initial_connect()
        .ping_interval(Duration::from_secs(2))
        .connection_timeout(Duration::from_secs(3))
        .request_timeout(Some(Duration::from_secs(10)))
        .reconnect_delay_callback(|attempt| Duration::from_millis((50 << attempt.min(5)).min(1000)))
        .event_callback(|event| async move {
            match event {
                async_nats::Event::Connected => tracing::info!("connected to NATS"),
                async_nats::Event::Disconnected => tracing::warn!("lost the connection to NATS"),
                other => tracing::warn!(event = %other, "NATS: {other}"),
            }
        });
    if let (Some(user), Some(password)) = (url.user, url.password) {
        options = options.user_and_password(user, password);
    }
    if let Some(ca) = ca {
        options = options.add_root_certificates(ca.to_owned()).require_tls(true);
    }
    options.connect(url.server).await.context("NATS: the options are unusable")
}

/// The parts of a NATS URL: the client takes credentials separately, and they must not appear in its log.
struct ServerUrl {
    server: String,
    user: Option<String>,
    password: Option<String>,
}

impl ServerUrl {
    fn parse(text: &str) -> anyhow::Result<Self> {
        let mut url = reqwest::Url::parse(text)
            .context("SVC_NATS_URL is no URL; it must look like tls://user:password@nats.example:4222")?;
        if !["tls", "nats"].contains(&url.scheme()) || !url.has_host() {
            anyhow::bail!("SVC_NATS_URL must begin with tls:// or nats:// and name a host");
        }
        let user = Some(url.username()).filter(|user| !user.is_empty()).map(decoded).transpose()?;
        let password = url.password().map(decoded).transpose()?;
        if url.set_username("").is_err() || url.set_password(None).is_err() {
            anyhow::bail!("SVC_NATS_URL must begin with tls:// or nats:// and name a host");
        }
        Ok(Self { server: url.to_string(), user, password })
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

    #[test]
    fn credentials_are_removed_from_the_url_and_decoded() -> anyhow::Result<()> {
        let parts = ServerUrl::parse("tls://replica%2D1:a%40b%3A%2Fc@nats.example:4222")?;
        assert_eq!(parts.server, "tls://nats.example:4222");
        assert_eq!((parts.user.as_deref(), parts.password.as_deref()), (Some("replica-1"), Some("a@b:/c")));
        assert!(ServerUrl::parse("tls://a:%FF@nats.example").is_err());
        Ok(())
    }
}
