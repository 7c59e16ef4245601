//! What happens to what is yours, as it happens. Nothing is kept for who does not listen: whoever was away reads what is true.

use crate::api::Api;
use crate::failure::{Ended, Failure};
use crate::socket::{self, Asked, Socket};
use crate::text::cell;
use crate::web;
use futures::StreamExt as _;
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue, SEC_WEBSOCKET_PROTOCOL};
use secrecy::{ExposeSecret as _, SecretString};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tokio_tungstenite::tungstenite::Message;

const PATH: &str = "/api/v1/notifications/ws";
const PROTOCOL: &str = "gpu.notifications.v1";

/// The server asks every 15 s whether somebody is there.
const SILENT_AFTER: Duration = Duration::from_secs(45);
/// For how long a connection that was lost is looked for.
const PATIENCE: Duration = Duration::from_secs(60);
const PAUSE_FIRST: Duration = Duration::from_millis(200);
const PAUSE_LAST: Duration = Duration::from_secs(5);

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
    /// Administrators: says something to everybody who listens at this moment.
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
            Watching { api, prefix: r#type.unwrap_or_default(), left: count, greeted: false }.run().await
        }
        Command::Broadcast { message, severity } => {
            let severity = format!("{severity:?}").to_lowercase();
            let body = json!({ "severity": severity, "message": message });
            let said = api.post("/api/v1/admin/notifications/broadcast", &body).await?;
            api.out.done(&said, "Said to everybody who listens.")
        }
    }
}

/// Why a connection is over.
enum Over {
    /// As many as were wanted have come.
    Done,
    /// It is worth another attempt.
    Lost(Failure),
    /// The token does not hold any more: with another it goes on.
    Stale(Failure),
}

struct Watching<'a> {
    api: &'a Api,
    prefix: String,
    left: Option<u64>,
    greeted: bool,
}

impl Watching<'_> {
    async fn run(mut self) -> Result<(), Failure> {
        let mut lost_at: Option<Instant> = None;
        let mut pause = PAUSE_FIRST;
        loop {
            let token = self.api.session().token().await?;
            let over = match self.connect(&token).await {
                Ok(socket) => {
                    (lost_at, pause) = (None, PAUSE_FIRST);
                    self.listen(socket).await?
                }
                Err(failure) => again(failure)?,
            };
            let failure = match over {
                Over::Done => return Ok(()),
                Over::Stale(failure) if !self.api.session().renew(&token).await? => return Err(failure),
                Over::Stale(failure) | Over::Lost(failure) => failure,
            };
            if lost_at.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
                return Err(failure);
            }
            let asked = failure.answer.as_ref().and_then(|answer| answer.retry_after);
            tokio::time::sleep(asked.unwrap_or(pause).min(PATIENCE)).await;
            pause = (pause * 2).min(PAUSE_LAST);
        }
    }

    async fn connect(&self, token: &SecretString) -> Result<Socket, Failure> {
        let url = web::address(&self.api.at(PATH))?;
        let mut bearer = HeaderValue::from_str(&format!("Bearer {}", token.expose_secret()))
            .map_err(|_| Failure::usage("your access token cannot be sent"))?;
        bearer.set_sensitive(true);
        let protocol = HeaderValue::from_static(PROTOCOL);
        let headers = HeaderMap::from_iter([(AUTHORIZATION, bearer), (SEC_WEBSOCKET_PROTOCOL, protocol)]);
        socket::open(self.api, Asked { what: "channel of notifications", url, protocol: PROTOCOL, headers }).await
    }

    async fn listen(&mut self, mut socket: Socket) -> Result<Over, Failure> {
        let cut = |why: String| Over::Lost(Failure::new(Ended::Network, format!("notifications are cut off: {why}")));
        loop {
            let message = match tokio::time::timeout(SILENT_AFTER, socket.next()).await {
                Err(_) => return Ok(cut("silence".to_owned())),
                Ok(None) => return Ok(cut("it ended".to_owned())),
                Ok(Some(Err(error))) => return Ok(cut(error.to_string())),
                Ok(Some(Ok(message))) => message,
            };
            match message {
                Message::Text(text) => {
                    let told: Value = serde_json::from_str(&text).map_err(|_| {
                        Failure::new(Ended::Server, "the server says something that is no notification")
                    })?;
                    if self.tell(&told)? {
                        return Ok(Over::Done);
                    }
                }
                Message::Close(frame) => {
                    let (code, reason) =
                        frame.map_or((1005, String::new()), |frame| (frame.code.into(), cell(&json!(&*frame.reason))));
                    return self.ended(code, reason);
                }
                Message::Binary(_) | Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => {}
            }
        }
    }

    fn ended(&self, code: u16, reason: String) -> Result<Over, Failure> {
        match code {
            4401 | 4408 => Ok(Over::Stale(
                Failure::new(Ended::LoggedOut, "your access token has ended").next("Log in again: gpuctl login"),
            )),
            4403 => Err(Failure::new(Ended::Forbidden, format!("you may not listen any more: {reason}"))),
            4429 => Err(Failure::new(Ended::Refused, "you have as many connections for notifications as one may have")
                .next("Close another one first.")),
            _ => {
                if code == 4413 {
                    self.api.out.say("You were too slow: notifications were lost.");
                }
                Ok(Over::Lost(Failure::new(Ended::Network, format!("notifications are cut off: {code} {reason}"))))
            }
        }
    }

    /// Whether it was the last that was wanted.
    fn tell(&mut self, told: &Value) -> Result<bool, Failure> {
        let kind = told["type"].as_str().unwrap_or_default();
        if kind == "notifications.ready" {
            let channels = cell(&told["data"]["channels"]);
            let (word, until) =
                (if self.greeted { "Again listening" } else { "Listening" }, cell(&told["data"]["expires_at"]));
            self.greeted = true;
            self.api.out.say(&format!("{word} to {channels}, until {until} by this token."));
            return Ok(false);
        }
        if kind.starts_with("notifications.") || !kind.starts_with(&self.prefix) {
            return Ok(false);
        }
        if self.api.out.is_json() {
            self.api.out.line(&told.to_string())?;
        } else {
            self.api.out.line(&line(told))?;
        }
        self.left = self.left.map(|left| left - 1);
        Ok(self.left == Some(0))
    }
}

/// What is safe to try again, and what is not.
fn again(failure: Failure) -> Result<Over, Failure> {
    match failure.ended {
        Ended::Network | Ended::Server | Ended::RateLimited => Ok(Over::Lost(failure)),
        Ended::LoggedOut => Ok(Over::Stale(failure)),
        Ended::Failed | Ended::Usage | Ended::Forbidden | Ended::NotFound | Ended::Refused | Ended::TooLate => {
            Err(failure)
        }
    }
}

/// When, what, of what, and what else is said of it.
fn line(told: &Value) -> String {
    let data = told["data"].as_object();
    let of = told["subject"].as_str().and_then(|subject| subject.split_once('/')).map_or("", |(_, id)| id);
    // What it happened to stands there already.
    let more = data.into_iter().flatten().filter(|(_, value)| value.as_str() != Some(of));
    let more: Vec<_> = more.map(|(name, value)| format!("{}={}", cell(&json!(name)), cell(value))).collect();
    let [time, kind, subject] = ["time", "type", "subject"].map(|name| cell(&told[name]));
    format!("{time}  {kind:<28}  {subject}  {}", more.join(" ")).trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notification_is_a_line_that_moves_no_cursor() {
        let told = json!({
            "time": "2026-11-22T01:02:03.456Z", "type": "node.state_changed", "subject": "node/0198",
            "data": { "node_id": "0198", "from_state": "active", "state": "offline", "reason": "a\u{1b}[2J\nb" },
        });
        assert_eq!(
            line(&told),
            "2026-11-22 01:02:03Z  node.state_changed            node/0198  from_state=active reason=a\u{fffd}[2J b state=offline"
        );
    }
}
