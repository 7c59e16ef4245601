//! Watching notifications over a WebSocket, and broadcasting announcements. Nothing is stored for disconnected clients: after a gap the
//! user reads the current state.

use crate::api::Api;
use crate::failure::{ExitStatus, Failure};
use crate::http_client;
use crate::printable::cell;
use crate::websocket::{self, Socket, WebSocketRequest};
use futures::StreamExt as _;
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue, SEC_WEBSOCKET_PROTOCOL};
use secrecy::{ExposeSecret as _, SecretString};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tokio_tungstenite::tungstenite::Message;

const PATH: &str = "/api/v1/notifications/ws";
const PROTOCOL: &str = "gpu.notifications.v1";

/// The server sends a ping every 15 s.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(45);
/// How long a lost connection is retried.
const RETRY_FOR: Duration = Duration::from_secs(60);
const FIRST_RETRY_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_RETRY_PAUSE: Duration = Duration::from_secs(5);

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Shows notifications as they come.
    Watch {
        /// End after so many.
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
        count: Option<u64>,
        /// Only those of a type that begins so, such as billing.
        #[arg(long, value_name = "PREFIX")]
        r#type: Option<String>,
    },
    /// Administrators: sends a notification to all connected clients.
    Broadcast {
        message: String,
        #[arg(long, value_enum, default_value_t)]
        severity: Severity,
    },
}

#[derive(Clone, Copy, Debug, Default, clap::ValueEnum)]
pub(crate) enum Severity {
    #[default]
    Info,
    Warning,
    Critical,
}

pub(crate) async fn run(command: Command, api: &Api) -> Result<(), Failure> {
    match command {
        Command::Watch { count, r#type } => {
            NotificationWatcher { api, prefix: r#type.unwrap_or_default(), left: count, greeted: false }.run().await
        }
        Command::Broadcast { message, severity } => {
            let severity = format!("{severity:?}").to_lowercase();
            let body = json!({ "severity": severity, "message": message });
            let announced = api.post("/api/v1/admin/notifications/broadcast", &body).await?;
            api.out.done(&announced, "Sent to all connected clients.")
        }
    }
}

/// Why a connection ended.
enum StreamEnd {
    /// The requested number of notifications has arrived.
    Done,
    /// It is worth a retry.
    Lost(Failure),
    /// The token has expired; a renewed one may work.
    Stale(Failure),
}

struct NotificationWatcher<'a> {
    api: &'a Api,
    prefix: String,
    left: Option<u64>,
    greeted: bool,
}

impl NotificationWatcher<'_> {
    async fn run(mut self) -> Result<(), Failure> {
        let mut lost_at: Option<Instant> = None;
        let mut pause = FIRST_RETRY_PAUSE;
        loop {
            let token = self.api.session().token().await?;
            let end = match self.connect(&token).await {
                Ok(socket) => {
                    (lost_at, pause) = (None, FIRST_RETRY_PAUSE);
                    self.listen(socket).await?
                }
                Err(failure) => retryable(failure)?,
            };
            let failure = match end {
                StreamEnd::Done => return Ok(()),
                StreamEnd::Stale(failure) if !self.api.session().renew(&token).await? => return Err(failure),
                StreamEnd::Stale(failure) | StreamEnd::Lost(failure) => failure,
            };
            if lost_at.get_or_insert_with(Instant::now).elapsed() > RETRY_FOR {
                return Err(failure);
            }
            let asked = failure.answer.as_ref().and_then(|answer| answer.retry_after);
            tokio::time::sleep(asked.unwrap_or(pause).min(RETRY_FOR)).await;
            pause = (pause * 2).min(LONGEST_RETRY_PAUSE);
        }
    }

    async fn connect(&self, token: &SecretString) -> Result<Socket, Failure> {
        let url = http_client::address(&self.api.at(PATH))?;
        let mut bearer = HeaderValue::from_str(&format!("Bearer {}", token.expose_secret()))
            .map_err(|_| Failure::usage("your access token cannot be sent"))?;
        bearer.set_sensitive(true);
        let protocol = HeaderValue::from_static(PROTOCOL);
        let headers = HeaderMap::from_iter([(AUTHORIZATION, bearer), (SEC_WEBSOCKET_PROTOCOL, protocol)]);
        websocket::open(
            self.api,
            WebSocketRequest { what: "channel of notifications", url, protocol: PROTOCOL, headers },
        )
        .await
    }

    async fn listen(&mut self, mut socket: Socket) -> Result<StreamEnd, Failure> {
        let cut = |why: String| {
            StreamEnd::Lost(Failure::new(ExitStatus::Network, format!("notifications are cut off: {why}")))
        };
        loop {
            let message = match tokio::time::timeout(SILENCE_TIMEOUT, socket.next()).await {
                Err(_) => return Ok(cut("silence".to_owned())),
                Ok(None) => return Ok(cut("it ended".to_owned())),
                Ok(Some(Err(error))) => return Ok(cut(error.to_string())),
                Ok(Some(Ok(message))) => message,
            };
            match message {
                Message::Text(text) => {
                    let notification: Value = serde_json::from_str(&text)
                        .map_err(|_| Failure::unusable_answer("a message of the server is not a notification"))?;
                    if self.print(&notification)? {
                        return Ok(StreamEnd::Done);
                    }
                }
                Message::Close(frame) => {
                    let (code, reason) =
                        frame.map_or((1005, String::new()), |frame| (frame.code.into(), cell(&json!(&*frame.reason))));
                    return self.end_of_close_code(code, reason);
                }
                Message::Binary(_) | Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => {}
            }
        }
    }

    fn end_of_close_code(&self, code: u16, reason: String) -> Result<StreamEnd, Failure> {
        match code {
            4401 | 4408 => Ok(StreamEnd::Stale(
                Failure::new(ExitStatus::LoggedOut, "your access token has ended").next("Log in again: gpuctl login"),
            )),
            4403 => {
                Err(Failure::new(ExitStatus::Forbidden, format!("your access to notifications has ended: {reason}")))
            }
            4429 => {
                Err(Failure::new(ExitStatus::Refused, "you have as many connections for notifications as one may have")
                    .next("Close another one first."))
            }
            _ => {
                if code == 4413 {
                    self.api.out.notice("You were too slow: notifications were lost.");
                }
                Ok(StreamEnd::Lost(Failure::new(
                    ExitStatus::Network,
                    format!("notifications are cut off: {code} {reason}"),
                )))
            }
        }
    }

    /// Whether it was the last that the user wanted.
    fn print(&mut self, notification: &Value) -> Result<bool, Failure> {
        let kind = notification["type"].as_str().unwrap_or_default();
        if kind == "notifications.ready" {
            let channels = cell(&notification["data"]["channels"]);
            let (word, until) =
                (if self.greeted { "Again listening" } else { "Listening" }, cell(&notification["data"]["expires_at"]));
            self.greeted = true;
            self.api.out.notice(&format!("{word} to {channels}, until {until} by this token."));
            return Ok(false);
        }
        if kind.starts_with("notifications.") || !kind.starts_with(&self.prefix) {
            return Ok(false);
        }
        if self.api.out.is_json() {
            self.api.out.line(&notification.to_string())?;
        } else {
            self.api.out.line(&line(notification))?;
        }
        self.left = self.left.map(|left| left - 1);
        Ok(self.left == Some(0))
    }
}

/// Whether a failed connection is worth a retry.
fn retryable(failure: Failure) -> Result<StreamEnd, Failure> {
    match failure.exit_status {
        ExitStatus::Network | ExitStatus::Server | ExitStatus::RateLimited => Ok(StreamEnd::Lost(failure)),
        ExitStatus::LoggedOut => Ok(StreamEnd::Stale(failure)),
        ExitStatus::Failed
        | ExitStatus::Usage
        | ExitStatus::Forbidden
        | ExitStatus::NotFound
        | ExitStatus::Refused
        | ExitStatus::TooLate => Err(failure),
    }
}

/// The time, type, subject and data of a notification on one line.
fn line(notification: &Value) -> String {
    let data = notification["data"].as_object();
    let of = notification["subject"].as_str().and_then(|subject| subject.split_once('/')).map_or("", |(_, id)| id);
    // The subject is already on the line.
    let more = data.into_iter().flatten().filter(|(_, value)| value.as_str() != Some(of));
    let more: Vec<_> = more.map(|(name, value)| format!("{}={}", cell(&json!(name)), cell(value))).collect();
    let [time, kind, subject] = ["time", "type", "subject"].map(|name| cell(&notification[name]));
    format!("{time}  {kind:<28}  {subject}  {}", more.join(" ")).trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notification_is_one_line_without_control_characters() {
        let notification = json!({
            "time": "2026-11-22T01:02:03.456Z", "type": "node.state_changed", "subject": "node/0198",
            "data": { "node_id": "0198", "from_state": "active", "state": "offline", "reason": "a\u{1b}[2J\nb" },
        });
        assert_eq!(
            line(&notification),
            "2026-11-22 01:02:03Z  node.state_changed            node/0198  from_state=active reason=a\u{fffd}[2J b state=offline"
        );
    }
}
