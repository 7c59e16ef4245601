//! Notifications by e-mail: one message at a time is submitted to a mail server (RFC 6409), which the operators name.
//!
//! Each mail has a connection of its own. A connection that is dropped in the middle of a response cannot be reused, and a pool could hand
//! it to the next mail, which would then read the responses to the one before.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use lettre::Address;
use lettre::message::header::{ContentType, Date, HeaderName, HeaderValue, MIME_VERSION_1_0};
use lettre::message::{Mailbox, Message};
use lettre::transport::smtp;
use lettre::transport::smtp::authentication::{Credentials, Mechanism};
use lettre::transport::smtp::client::{AsyncSmtpConnection, Certificate, TlsParameters};
use lettre::transport::smtp::commands::{Data, Mail as MailFrom, Rcpt};
use lettre::transport::smtp::extension::{ClientId, Extension, MailBodyParameter, MailParameter};
use lettre::transport::smtp::response::{Category, Detail};
use percent_encoding::percent_decode_str;
use reqwest::Url;
use rustls::pki_types::ServerName;
use secrecy::{ExposeSecret as _, SecretString};
use thiserror::Error;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout, timeout_at};

use super::SendFailure;
use crate::outbound::email_address::{is_plain, recipient, written};
use text::Notification;

mod text;

/// For a mail, from the resolution of the server's name to its acceptance.
const SEND_TIMEOUT: Duration = Duration::from_secs(15);
/// For the server's answer to a farewell. The mail is delivered or refused by then.
const QUIT_TIMEOUT: Duration = Duration::from_secs(1);
/// Connections of a process to the server at once.
const MAX_CONNECTIONS: usize = 4;

/// The mail server, and the sender's address.
#[derive(Clone, Debug)]
pub struct MailConfig {
    /// `smtps://user:password@host:465`, or `smtp://user:password@host:587?tls=required` for STARTTLS. User and password are
    /// percent-encoded. Without TLS only a server on this machine is used.
    pub url: SecretString,
    /// The sender's mailbox, as `GPUaaS <no-reply@example.com>`.
    pub from: String,
    /// Authorities for the server's certificate in PEM, beside the system's.
    pub authorities_pem: Option<String>,
    /// Where users reach the public API: mails name it, and its host greets the server.
    pub public_url: String,
}

/// Why there is no mailer. No message quotes the URL, which may contain a password.
#[derive(Debug, Error)]
pub enum MailConfigError {
    #[error("the URL of the mail server {0}")]
    Url(&'static str),
    #[error("the sender {0:?} is no mailbox such as GPUaaS <no-reply@example.com>, with an address in ASCII")]
    From(String),
    #[error("the certificates of the mail server's authorities cannot be used")]
    Authorities(#[source] smtp::Error),
}

/// A mail to an endpoint: what is the same in every attempt to deliver it.
#[derive(Clone, Copy, Debug)]
pub struct Mail<'a> {
    /// The event's id.
    pub message_id: &'a str,
    pub endpoint_id: &'a str,
    /// The notification: a CloudEvent in JSON.
    pub body: &'a str,
}

/// Sends mails. Its clones share the bound on connections.
#[derive(Clone)]
pub struct Mailer(Arc<Submission>);

impl fmt::Debug for Mailer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mailer").field("from", &self.0.from).finish_non_exhaustive()
    }
}

struct Submission {
    server: Server,
    from: Mailbox,
    public_url: String,
    permits: Semaphore,
}

struct Server {
    host: String,
    port: u16,
    security: Security,
    credentials: Option<Credentials>,
    /// How this client calls itself (RFC 5321, section 4.1.1.1).
    client: ClientId,
}

enum Security {
    /// TLS from the first byte (RFC 8314).
    Tls(TlsParameters),
    /// A connection in clear that has to be upgraded (RFC 3207).
    StartTls(TlsParameters),
    /// To this machine alone.
    Clear,
}

impl Mailer {
    /// # Errors
    /// Where the URL, the sender or the authorities cannot be used.
    pub fn new(config: &MailConfig) -> Result<Self, MailConfigError> {
        let from =
            config.from.parse::<Mailbox>().ok().filter(|from| is_plain(&from.email) && written(&from.email).is_ascii());
        let from = from.ok_or_else(|| MailConfigError::From(config.from.chars().take(200).collect()))?;
        let server = Server::parse(config)?;
        let permits = Semaphore::new(MAX_CONNECTIONS);
        Ok(Self(Arc::new(Submission { server, from, public_url: config.public_url.clone(), permits })))
    }

    /// Submits a mail to one address, and returns when the server has accepted it.
    ///
    /// # Errors
    /// [`SendFailure::is_final`] where the server refuses this recipient or this message permanently, or where no mail can be addressed to
    /// it. Everything else may succeed at the next attempt, a refusal of the sender and other configuration errors of the operators included.
    pub async fn send(&self, to: &str, mail: &Mail<'_>) -> Result<(), SendFailure> {
        let to = recipient(to).ok_or_else(|| SendFailure::permanent("that is no address that mail can be sent to"))?;
        let message = self.0.message(&to, mail)?.formatted();
        let until = Instant::now() + SEND_TIMEOUT;
        let attempt = timeout_at(until, async {
            let place = self.0.permits.acquire().await.map_err(|_| SendFailure::temporary("the service ends"))?;
            let mut connection = self.0.server.connect().await?;
            let outcome = self.0.submit(&mut connection, &to, &message).await;
            Ok((place, connection, outcome))
        });
        match attempt.await {
            Ok(Ok((_place, mut connection, outcome))) => {
                // The outcome is certain: the response to QUIT changes nothing.
                let _ = timeout(QUIT_TIMEOUT, connection.quit()).await;
                outcome
            }
            Ok(Err(undelivered)) => Err(undelivered),
            Err(_) => {
                let seconds = SEND_TIMEOUT.as_secs();
                Err(SendFailure::temporary(&format!("the mail server has not taken the mail within {seconds} seconds")))
            }
        }
    }

    /// Connects as for a mail, with TLS and the user's password, and sends none.
    ///
    /// # Errors
    /// Why no mail could be sent.
    pub async fn check_connection(&self) -> Result<(), SendFailure> {
        let mut connection = self.0.server.connect().await?;
        let _ = timeout(QUIT_TIMEOUT, connection.quit()).await;
        Ok(())
    }
}

impl Submission {
    /// The same bytes in every attempt.
    fn message(&self, to: &Address, mail: &Mail<'_>) -> Result<Message, SendFailure> {
        let unreadable = || SendFailure::permanent("the notification cannot be read");
        let notification: Notification = serde_json::from_str(mail.body).map_err(|_| unreadable())?;
        let letter = text::letter(&notification, mail.endpoint_id, &self.public_url);
        let seconds = u64::try_from(notification.time.timestamp()).ok().filter(|seconds| *seconds <= LAST_SECOND);
        let date = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds.ok_or_else(unreadable)?);
        let id = format!("<{}.{}@{}>", mail.message_id, mail.endpoint_id, self.from.email.domain());
        // RFC 3834, section 5: no vacation responder answers.
        let automatic = HeaderName::new_from_ascii_str("Auto-Submitted");
        let message = Message::builder()
            .from(self.from.clone())
            .to(Mailbox::new(None, to.clone()))
            .subject(letter.subject)
            .header(Date::new(date))
            .message_id(Some(id))
            .raw_header(HeaderValue::new(automatic, "auto-generated".to_owned()))
            .header(MIME_VERSION_1_0)
            .header(ContentType::TEXT_PLAIN)
            .body(letter.text);
        message.map_err(|_| unreadable())
    }

    /// The transaction of RFC 5321, section 3.3, a command at a time: the meaning of a refusal depends on the command.
    async fn submit(
        &self,
        connection: &mut AsyncSmtpConnection,
        to: &Address,
        message: &[u8],
    ) -> Result<(), SendFailure> {
        let mut parameters = Vec::new();
        if !message.is_ascii() || !written(to).is_ascii() {
            if !connection.server_info().supports_feature(Extension::SmtpUtfEight) {
                return Err(SendFailure::permanent("the mail server accepts addresses in ASCII only"));
            }
            // RFC 6531, section 3.6.
            parameters = vec![MailParameter::SmtpUtfEight, MailParameter::Body(MailBodyParameter::EightBitMime)];
        }
        let sender = connection.command(MailFrom::new(Some(self.from.email.clone()), parameters)).await;
        sender.map_err(|error| sender_refused(&error))?;
        let recipient = connection.command(Rcpt::new(to.clone(), Vec::new())).await;
        recipient.map_err(|error| refused("the recipient", &error))?;
        let data = connection.command(Data).await;
        data.map_err(|error| refused("the message", &error))?;
        let taken = connection.message(message).await;
        taken.map(|_| ()).map_err(|error| refused("the message", &error))
    }
}

/// The last time that a `Date` header can express (RFC 5322, section 3.3): 9999-12-31T23:59:59Z.
const LAST_SECOND: u64 = 253_402_300_799;

impl Server {
    fn parse(config: &MailConfig) -> Result<Self, MailConfigError> {
        use MailConfigError::Url as Wrong;
        let url = Url::parse(config.url.expose_secret()).map_err(|_| Wrong("cannot be read"))?;
        let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']).to_owned();
        let name = ServerName::try_from(host.as_str()).map_err(|_| Wrong("has no host"))?;
        if !matches!(url.path(), "" | "/") || url.fragment().is_some() {
            return Err(Wrong("has more than a scheme, a user, a host, a port and `tls`"));
        }
        let is_required = match url.query() {
            None => false,
            Some("tls=required") => true,
            Some(_) => return Err(Wrong("has a query other than `tls=required`")),
        };
        let is_here = match &name {
            ServerName::IpAddress(address) => IpAddr::from(*address).is_loopback(),
            _ => host.eq_ignore_ascii_case("localhost"),
        };
        let (security, port) = match url.scheme() {
            "smtps" => (Security::Tls(tls(&host, config)?), 465),
            "smtp" if is_required => (Security::StartTls(tls(&host, config)?), 587),
            "smtp" if is_here => (Security::Clear, 25),
            "smtp" => {
                return Err(Wrong(
                    "would send mails in clear to another machine; add `?tls=required`, or use smtps://",
                ));
            }
            _ => return Err(Wrong("must begin with smtps:// or smtp://")),
        };
        let credentials =
            credentials(&url).ok_or(Wrong("names a user without a password, or text that is not UTF-8"))?;
        Ok(Self { port: url.port().unwrap_or(port), host, security, credentials, client: client(&config.public_url) })
    }

    async fn connect(&self) -> Result<AsyncSmtpConnection, SendFailure> {
        let broken = |error: smtp::Error| SendFailure::temporary(&format!("no connection to the mail server: {error}"));
        let tls = match &self.security {
            Security::Tls(tls) => Some(tls.clone()),
            Security::StartTls(_) | Security::Clear => None,
        };
        let address = (self.host.as_str(), self.port);
        let connecting = AsyncSmtpConnection::connect_tokio1(address, Some(SEND_TIMEOUT), &self.client, tls, None);
        let mut connection = connecting.await.map_err(broken)?;
        if let Security::StartTls(tls) = &self.security {
            connection.starttls(tls.clone(), &self.client).await.map_err(broken)?;
        }
        if let Some(credentials) = &self.credentials {
            // A server may quote what it received: only the code of its response is shown.
            let admitted = connection.auth(&[Mechanism::Plain, Mechanism::Login], credentials).await;
            admitted.map_err(|error| {
                // Nothing was sent: some providers' servers take tokens alone, and a relay may know its clients by their addresses.
                if error.is_client() {
                    log_refusal("the login", &error);
                    return SendFailure::temporary("the mail server offers no login by password (AUTH PLAIN or LOGIN)");
                }
                let code = error.status().map(|code| format!(" ({code})")).unwrap_or_default();
                if error.is_permanent() {
                    log_refusal("the login", &error);
                }
                SendFailure::temporary(&format!("the mail server refuses the login{code}"))
            })?;
        }
        Ok(connection)
    }
}

/// The server's certificate must be valid for the host, by the system's authorities or the configured ones.
fn tls(host: &str, config: &MailConfig) -> Result<TlsParameters, MailConfigError> {
    let mut parameters = TlsParameters::builder(host.to_owned());
    if let Some(pem) = &config.authorities_pem {
        let authorities = Certificate::from_pem(pem.as_bytes()).map_err(MailConfigError::Authorities)?;
        parameters = parameters.add_root_certificate(authorities);
    }
    parameters.build().map_err(MailConfigError::Authorities)
}

/// `None` where they are incomplete.
fn credentials(url: &Url) -> Option<Option<Credentials>> {
    let decoded = |text: &str| percent_decode_str(text).decode_utf8().map(|text| text.into_owned()).ok();
    match (url.username(), url.password()) {
        ("", None) => Some(None),
        ("", Some(_)) | (_, None) => None,
        (user, Some(password)) => Some(Some(Credentials::new(decoded(user)?, decoded(password)?))),
    }
}

/// The public API's host, as a name or an address literal.
fn client(public_url: &str) -> ClientId {
    let host = Url::parse(public_url).ok().and_then(|url| url.host_str().map(str::to_owned)).unwrap_or_default();
    match host.trim_matches(['[', ']']).parse() {
        Ok(IpAddr::V4(address)) => ClientId::Ipv4(address),
        Ok(IpAddr::V6(address)) => ClientId::Ipv6(address),
        Err(_) if host.is_empty() => ClientId::default(),
        Err(_) => ClientId::Domain(host),
    }
}

/// The meaning of a refusal of the recipient or the message.
fn refused(what: &str, error: &smtp::Error) -> SendFailure {
    use std::error::Error as _;
    let why = refusal(what, error);
    let answer = error.source().map(ToString::to_string).unwrap_or_default();
    match error.status().filter(|_| error.is_permanent()).map(|code| refusal_subject(code, &answer)) {
        Some(RefusalSubject::Mail) => SendFailure::permanent(&why),
        Some(RefusalSubject::Service) => {
            log_refusal(what, error);
            SendFailure::temporary(&why)
        }
        None => SendFailure::temporary(&why),
    }
}

/// The meaning of a refusal of the sender.
fn sender_refused(error: &smtp::Error) -> SendFailure {
    let what = "the sender";
    if error.is_permanent() {
        log_refusal(what, error);
    }
    SendFailure::temporary(&refusal(what, error))
}

/// Tells operators of what they alone can correct. The server's text, which may quote the recipient, is for the endpoint's owner alone.
fn log_refusal(what: &str, error: &smtp::Error) {
    use std::error::Error as _;
    let code = error.status().map(|code| code.to_string()).unwrap_or_default();
    let enhanced = error.source().and_then(|answer| enhanced_code(&answer.to_string()));
    let enhanced_code = enhanced.map(|(subject, detail)| format!("5.{subject}.{detail}")).unwrap_or_default();
    tracing::warn!(
        what,
        code,
        enhanced_code,
        "the mail server does not take mails of this service: compare SVC_SMTP_FROM and SVC_SMTP_URL with what it allows its sender"
    );
}

/// What a permanent refusal is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RefusalSubject {
    /// This recipient or this message: a retry is refused, too.
    Mail,
    /// The service's sender, login or limits, or the server itself: operators can correct that, and no mail is lost meanwhile.
    Service,
}

/// Words of a refusal of the sender, where the enhanced status code does not say it.
const ABOUT_SENDER: [&str; 15] = [
    "send as",
    "client host",
    "dmarc",
    "sender",
    "relay",
    "not verified",
    "unverified",
    "identit",
    "from address",
    "from header",
    "permission",
    "authenticat",
    "sending limit",
    "sending quota",
    "rate limit",
];

/// RFC 5321, section 4.2: 55z is the mail system's refusal of the request, and 501 one of the address. Other permanent codes concern the
/// connection or the session (authentication among them). An enhanced status code tells more (RFC 3463, section 3): 5.1 is about an address,
/// 5.2 about the mailbox, 5.6 about the content; 5.3, 5.4 and 5.7 are about systems, routes, limits and permissions. Of these, 5.3.4 is a
/// message that is too large, 5.4.1 is Exchange Online's code of a mailbox that does not exist, and 5.7.1 is that of closed lists and of
/// unsolicited mail as well as of a refused sender, which the text names.
fn refusal_subject(code: smtp::response::Code, answer: &str) -> RefusalSubject {
    let is_of_request = match code.category {
        Category::MailSystem => true,
        Category::Syntax => code.detail == Detail::One,
        Category::Information | Category::Connections | Category::Unspecified3 | Category::Unspecified4 => false,
    };
    if !is_of_request {
        return RefusalSubject::Service;
    }
    match enhanced_code(answer) {
        // 5.1.7 and 5.1.8 are about the sender's address; 5.2.252 is Exchange Online's code of a sender that the login may not send as.
        Some((1, 7 | 8) | (2, 252) | (3, 0..=3 | 5..) | (4 | 7, 0 | 2..)) => RefusalSubject::Service,
        Some((1 | 2 | 6, _) | (3, 4)) => RefusalSubject::Mail,
        Some(_) | None => {
            let answer = answer.to_ascii_lowercase();
            let is_about_sender = ABOUT_SENDER.iter().any(|words| answer.contains(words));
            if is_about_sender { RefusalSubject::Service } else { RefusalSubject::Mail }
        }
    }
}

/// Subject and detail of the enhanced status code with which a permanent refusal begins (RFC 2034, section 4).
fn enhanced_code(answer: &str) -> Option<(u16, u16)> {
    let mut numbers = answer.split_whitespace().next()?.strip_prefix("5.")?.split('.').map(str::parse);
    match (numbers.next()?, numbers.next()?, numbers.next()) {
        (Ok(subject), Ok(detail), None) => Some((subject, detail)),
        _ => None,
    }
}

fn refusal(what: &str, error: &smtp::Error) -> String {
    use std::error::Error as _;
    match (error.status(), error.source()) {
        (Some(code), Some(answer)) => format!("the mail server refused {what}: {code} {answer}"),
        (Some(code), None) => format!("the mail server refused {what}: {code}"),
        (None, _) => format!("the connection to the mail server broke at {what}: {error}"),
    }
}

#[cfg(test)]
mod tests;
