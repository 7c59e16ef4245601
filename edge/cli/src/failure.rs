//! Why a command did not do what it was asked: for people on standard error, for scripts as JSON there and as the exit code.

use crate::routes;
use crate::text::plain;
use reqwest::StatusCode;
use serde_json::{Value, json};
use std::fmt::{self, Write as _};
use std::time::Duration;

/// The exit codes. A number that was given out keeps its meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// Nothing of the below: a fault of this program or of this machine.
    Failed = 1,
    /// The command line, or a value in it, cannot be acted on as it is.
    Usage = 2,
    /// Nobody is logged in, or the login has ended.
    LoggedOut = 3,
    /// Whoever is logged in may not do this.
    Forbidden = 4,
    /// There is no such thing, or not for this caller.
    NotFound = 5,
    /// The service refuses, as things stand: a conflict, no capacity, no money.
    Refused = 6,
    /// Too many requests, for longer than was worth waiting.
    RateLimited = 7,
    /// The service failed, or could not do it at the moment.
    Server = 8,
    /// The service, the identity provider or the node cannot be reached.
    Network = 9,
    /// It did not come about in the time that it was given.
    TooLate = 10,
}

impl Ended {
    pub(crate) const fn code(self) -> u8 {
        self as u8
    }
}

/// One failure.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) ended: Ended,
    pub(crate) message: String,
    /// What to do next.
    pub(crate) next: Option<String>,
    /// What the service said, where it was the one that refused.
    pub(crate) answer: Option<Box<Refusal>>,
}

/// The service's own words (its error envelope).
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Refusal {
    pub(crate) status: u16,
    pub(crate) code: String,
    pub(crate) correlation_id: String,
    pub(crate) details: Value,
    pub(crate) retry_after: Option<Duration>,
}

impl Failure {
    pub(crate) fn new(ended: Ended, message: impl Into<String>) -> Self {
        Self { ended, message: message.into(), next: None, answer: None }
    }

    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::new(Ended::Usage, message)
    }

    pub(crate) fn network(message: impl Into<String>, cause: impl std::error::Error) -> Self {
        Self::new(Ended::Network, format!("{}: {}", message.into(), chain(&cause)))
    }

    #[must_use]
    pub(crate) fn next(mut self, next: impl Into<String>) -> Self {
        self.next = Some(next.into());
        self
    }

    /// A refusal of the service.
    pub(crate) fn of_answer(status: StatusCode, body: &Value, retry_after: Option<Duration>) -> Self {
        let text = |name: &str| body[name].as_str().unwrap_or_default();
        let (code, message) = (text("code"), text("message"));
        if code.is_empty() {
            return Self::new(Ended::Server, format!("the server answered {status}, and not as this service does"))
                .next("Check the address of the server: `gpuctl whoami` shows it.");
        }
        let ended = match (status.as_u16(), code) {
            (401, _) => Ended::LoggedOut,
            (403, _) => Ended::Forbidden,
            (404, _) => Ended::NotFound,
            (402 | 409 | 412 | 422, _) => Ended::Refused,
            (429, _) => Ended::RateLimited,
            (500.., _) => Ended::Server,
            (_, _) => Ended::Usage,
        };
        let refusal = Refusal {
            status: status.as_u16(),
            code: code.to_owned(),
            correlation_id: text("correlation_id").to_owned(),
            details: body["details"].clone(),
            retry_after,
        };
        let next = next_after(&refusal).map(str::to_owned);
        Self { ended, message: routes::for_people(message), next, answer: Some(Box::new(refusal)) }
    }

    /// The service's code, where it refused.
    pub(crate) fn code(&self) -> &str {
        self.answer.as_ref().map_or("", |answer| &answer.code)
    }

    /// As scripts read it.
    pub(crate) fn to_json(&self) -> Value {
        let mut error = json!({ "message": self.message, "exit_code": self.ended.code(), "next": self.next });
        if let Some(answer) = &self.answer {
            error["code"] = json!(answer.code);
            error["status"] = json!(answer.status);
            error["correlation_id"] = json!(answer.correlation_id);
            error["details"] = answer.details.clone();
        }
        json!({ "error": error })
    }
}

/// What a person does next, where the service's own message, made for callers of the API, leaves that open.
fn next_after(refusal: &Refusal) -> Option<&'static str> {
    Some(match refusal.code.as_str() {
        "unauthenticated" => "Log in again: gpuctl login",
        "forbidden" => "`gpuctl whoami` shows who you are and your roles; an administrator can give you another one.",
        "not_found" => "Look the id up: `gpuctl <noun> list` shows what there is for you.",
        "insufficient_capacity" => "Ask for fewer GPUs or another region, or wait in line with --queue 10m.",
        "concurrency_limit_exceeded" => "Release one first: gpuctl allocations list --state active",
        "idempotency_key_reused" => "That key belongs to another request; leave --idempotency-key out.",
        "service_unavailable" | "overloaded" | "idempotency_in_progress" => "Try again in a moment.",
        "rate_limited" => "Wait as long as it says, then ask again.",
        _ => return None,
    })
}

/// `one: its cause: that one's cause`.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let said = cause.to_string();
        if !text.contains(&said) {
            let _ = write!(text, ": {said}");
        }
        source = cause.source();
    }
    text
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error: {}", plain(&self.message))?;
        if let Some(answer) = &self.answer {
            write!(f, "\n  code: {} ({})", plain(&answer.code), answer.status)?;
            write!(f, "\n  correlation id: {}", plain(&answer.correlation_id))?;
        }
        if let Some(next) = &self.next {
            write!(f, "\n  next: {}", plain(next))?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn refused(status: u16, code: &str) -> Failure {
        let body = json!({
            "code": code, "message": "The server's own words.", "correlation_id": "c-7", "details": { "service": "api" },
        });
        Failure::of_answer(StatusCode::from_u16(status).unwrap(), &body, None)
    }

    #[test]
    fn every_refusal_has_the_exit_code_of_its_class() {
        let table = [
            (400, "invalid_request", 2),
            (401, "unauthenticated", 3),
            (402, "insufficient_balance", 6),
            (403, "forbidden", 4),
            (404, "not_found", 5),
            (409, "state_conflict", 6),
            (413, "payload_too_large", 2),
            (422, "idempotency_key_reused", 6),
            (429, "rate_limited", 7),
            (500, "internal_error", 8),
            (502, "upstream_error", 8),
            (503, "overloaded", 8),
        ];
        for (status, code, ended) in table {
            assert_eq!(refused(status, code).ended.code(), ended, "{status} {code}");
        }
    }

    #[test]
    fn a_refusal_quotes_the_server_and_says_what_to_do_next() {
        insta::assert_snapshot!(refused(409, "insufficient_capacity"), @r"
        error: The server's own words.
          code: insufficient_capacity (409)
          correlation id: c-7
          next: Ask for fewer GPUs or another region, or wait in line with --queue 10m.
        ");
        insta::assert_json_snapshot!(refused(404, "not_found").to_json(), @r#"
        {
          "error": {
            "code": "not_found",
            "correlation_id": "c-7",
            "details": {
              "service": "api"
            },
            "exit_code": 5,
            "message": "The server's own words.",
            "next": "Look the id up: `gpuctl <noun> list` shows what there is for you.",
            "status": 404
          }
        }
        "#);
    }

    #[test]
    fn an_answer_of_something_else_is_no_refusal_of_the_service() {
        let failure = Failure::of_answer(StatusCode::BAD_GATEWAY, &json!("<html>"), None);
        assert_eq!((failure.ended, failure.answer), (Ended::Server, None));
    }

    #[test]
    fn what_a_server_says_cannot_move_the_cursor() {
        let body = json!({ "code": "x", "message": "a\u{1b}[2Jb\r\nc", "correlation_id": "\u{7}" });
        let shown = Failure::of_answer(StatusCode::CONFLICT, &body, None).to_string();
        assert!(!shown.contains(['\u{1b}', '\r', '\u{7}']), "{shown:?}");
    }
}
