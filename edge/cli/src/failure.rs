//! Failures of commands: as text on standard error for people, as JSON there and as the exit code for scripts.

pub(crate) use failures::chain;

use crate::argument_names::SelectedCommand;
use crate::printable::plain;
use crate::{Arguments, DEFAULT_PROFILE, amount, argument_names, routes};
use clap::CommandFactory as _;
use reqwest::StatusCode;
use serde_json::{Value, json};
use std::fmt;
use std::time::Duration;

/// The exit codes. A number never changes its meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExitStatus {
    /// None of the below: a fault of this program or of this machine.
    Failed = 1,
    /// The command line, or a value in it, cannot be acted on as it is.
    Usage = 2,
    /// No login, or an expired one.
    LoggedOut = 3,
    /// The caller is not authorized.
    Forbidden = 4,
    /// The resource does not exist, or not for this caller.
    NotFound = 5,
    /// The service refuses in the current state: a conflict, no capacity, no money.
    Refused = 6,
    /// Too many requests, for longer than was worth waiting.
    RateLimited = 7,
    /// The service failed, or could not do it at the moment.
    Server = 8,
    /// The service, the identity provider or the node cannot be reached.
    Network = 9,
    /// It did not happen before the timeout.
    TooLate = 10,
}

impl ExitStatus {
    pub(crate) const fn code(self) -> u8 {
        self as u8
    }
}

/// One failure.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) exit_status: ExitStatus,
    pub(crate) message: String,
    /// What to do next.
    pub(crate) next: Option<String>,
    /// The service's error response, where the service refused.
    pub(crate) answer: Option<Box<ErrorResponse>>,
}

/// The service's error envelope.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ErrorResponse {
    pub(crate) status: u16,
    pub(crate) code: String,
    pub(crate) correlation_id: String,
    pub(crate) details: Value,
    pub(crate) retry_after: Option<Duration>,
}

impl ErrorResponse {
    /// The field at fault.
    fn field(&self) -> Option<&str> {
        self.details["field"].as_str()
    }
}

impl Failure {
    pub(crate) fn new(exit_status: ExitStatus, message: impl Into<String>) -> Self {
        Self { exit_status, message: message.into(), next: None, answer: None }
    }

    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::new(ExitStatus::Usage, message)
    }

    /// An answer of the service that this program cannot use: the sentence says what it is not.
    pub(crate) fn unusable_answer(message: impl Into<String>) -> Self {
        Self::new(ExitStatus::Server, message).next(
            "Install the gpuctl of the service's release; where that is no help, report it to the service's operator.",
        )
    }

    pub(crate) fn network(message: impl Into<String>, cause: impl std::error::Error) -> Self {
        Self::new(ExitStatus::Network, format!("{}: {}", message.into(), chain(&cause)))
    }

    #[must_use]
    pub(crate) fn next(mut self, next: impl Into<String>) -> Self {
        self.next = Some(next.into());
        self
    }

    /// The failure for an error response of the service.
    pub(crate) fn of_answer(status: StatusCode, body: &Value, retry_after: Option<Duration>) -> Self {
        let text = |name: &str| body[name].as_str().unwrap_or_default();
        let (code, message) = (text("code"), text("message"));
        if code.is_empty() {
            return Self::of_foreign_answer(status);
        }
        let exit_status = match (status.as_u16(), code) {
            (401, _) => ExitStatus::LoggedOut,
            (403, _) => ExitStatus::Forbidden,
            (404, _) => ExitStatus::NotFound,
            (402 | 409 | 412 | 422, _) => ExitStatus::Refused,
            (429, _) => ExitStatus::RateLimited,
            (500.., _) => ExitStatus::Server,
            (_, _) => ExitStatus::Usage,
        };
        let response = ErrorResponse {
            status: status.as_u16(),
            code: code.to_owned(),
            correlation_id: text("correlation_id").to_owned(),
            details: body["details"].clone(),
            retry_after,
        };
        let next = remedy(&response).map(str::to_owned);
        Self { exit_status, message: routes::for_people(message), next, answer: Some(Box::new(response)) }
    }

    /// The failure for an answer that is not the service's: it is of a proxy before it, or of another server.
    fn of_foreign_answer(status: StatusCode) -> Self {
        let proxy = "a proxy or a firewall before the server answered";
        let (exit_status, message, next) = match status.as_u16() {
            429 => (
                ExitStatus::RateLimited,
                format!("{proxy} {status}: it takes no more requests for now"),
                "Try again in a moment.",
            ),
            _ if is_passing(status) => (
                ExitStatus::Server,
                format!("{proxy} {status}: the server is overloaded, or being restarted"),
                "Try again in a moment.",
            ),
            401 | 403 | 407 | 451 | 511 => (
                ExitStatus::Server,
                format!("{proxy} {status}: it does not let the request through"),
                "Ask the operator of the firewall or of the service to let gpuctl through.",
            ),
            413 | 414 | 431 => (
                ExitStatus::Server,
                format!("{proxy} {status}: the request is too long for it"),
                "Send less at once, or ask the operator of the service to raise the limit.",
            ),
            _ => (
                ExitStatus::Server,
                format!("the server answered {status}, and not as this service does"),
                "Check the address of the server: `gpuctl whoami` shows it.",
            ),
        };
        Self::new(exit_status, message).next(next)
    }

    /// The failure in terms of the command line that the user gave: its arguments in the place of the API's fields, times in the place of
    /// seconds, and the command that lists what was not found.
    #[must_use]
    pub(crate) fn for_command(mut self, command: &SelectedCommand) -> Self {
        let Some(answer) = &self.answer else { return self };
        let is_time = answer.field().is_some_and(|field| field.ends_with("seconds"));
        self.message = argument_names::with_argument_names(&self.message, &command.leaf);
        if is_time {
            self.message = argument_names::with_times(&self.message);
        }
        if self.next.as_deref() == Some(LOOK_IT_UP)
            && let Some(list) = &command.list
        {
            self.next = Some(format!("Look its id up: `{list}` shows what there is for you."));
        }
        self
    }

    /// The failure whose next step is for the profile that the user named.
    #[must_use]
    pub(crate) fn of_profile(mut self, profile: &str) -> Self {
        self.next = self.next.map(|next| with_profile(&next, profile));
        self
    }

    /// The service's refusal of an amount, with the amounts of its message in the currency.
    #[must_use]
    pub(crate) fn in_currency(mut self, currency: &str) -> Self {
        let names_amount = self.answer.as_ref().is_some_and(|answer| answer.field() == Some("amount_minor"));
        if self.answer.is_some() && (names_amount || self.message.contains(amount::MINOR_UNITS)) {
            self.message = amount::amounts_in_message(&self.message, currency);
        }
        self
    }

    /// The service's code, where it refused.
    pub(crate) fn code(&self) -> &str {
        self.answer.as_ref().map_or("", |answer| &answer.code)
    }

    /// The failure as JSON, for scripts.
    pub(crate) fn to_json(&self) -> Value {
        let mut error = json!({ "message": self.message, "exit_code": self.exit_status.code(), "next": self.next });
        if let Some(answer) = &self.answer {
            error["code"] = json!(answer.code);
            error["status"] = json!(answer.status);
            error["correlation_id"] = json!(answer.correlation_id);
            error["details"] = answer.details.clone();
        }
        json!({ "error": error })
    }
}

/// The text with the profile in each command line of this program that it names.
pub(crate) fn with_profile(text: &str, profile: &str) -> String {
    if profile == DEFAULT_PROFILE {
        return text.to_owned();
    }
    let program = Arguments::command();
    let mut parts = text.split("gpuctl ");
    let before = parts.next().unwrap_or_default().to_owned();
    parts.fold(before, |shown, rest| {
        let command = rest.split(|c: char| !c.is_ascii_lowercase() && c != '-').next().unwrap_or_default();
        let profile = program.find_subcommand(command).map(|_| format!("--profile {profile} ")).unwrap_or_default();
        format!("{shown}gpuctl {profile}{rest}")
    })
}

/// What to do where the service does not find something; [`Failure::for_command`] adds the command that lists it.
const LOOK_IT_UP: &str = "Look its id up.";

/// What the user can do next, where the service's message, written for API clients, does not say it.
fn remedy(response: &ErrorResponse) -> Option<&'static str> {
    Some(match response.code.as_str() {
        "unauthenticated" => "Log in again: gpuctl login",
        "forbidden" => {
            "`gpuctl whoami` shows who you are and your roles; an administrator gives roles of the platform, the identity provider the role admin."
        }
        "not_found" => LOOK_IT_UP,
        "insufficient_capacity" => "Ask for fewer GPUs or another region, or wait in line with --queue 10m.",
        "concurrency_limit_exceeded" => "Release one first: gpuctl allocations list --state active",
        "idempotency_key_reused" => "That key belongs to another request; leave --idempotency-key out.",
        "service_unavailable" | "overloaded" | "idempotency_in_progress" => "Try again in a moment.",
        "rate_limited" => "Wait as long as it says, then ask again.",
        _ => return None,
    })
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

/// Whether the status is that of a server which is overloaded or being restarted, or of a proxy before such a one: the same request may
/// succeed in a moment.
pub(crate) fn is_passing(status: StatusCode) -> bool {
    let is_permanent = matches!(
        status,
        StatusCode::NOT_IMPLEMENTED
            | StatusCode::HTTP_VERSION_NOT_SUPPORTED
            | StatusCode::NETWORK_AUTHENTICATION_REQUIRED
    );
    let is_busy = matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_EARLY);
    is_busy || (status.is_server_error() && !is_permanent)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(status: u16, code: &str) -> Failure {
        let body = json!({
            "code": code, "message": "The server's own words.", "correlation_id": "c-7", "details": { "service": "api" },
        });
        Failure::of_answer(StatusCode::from_u16(status).unwrap(), &body, None)
    }

    #[test]
    fn every_error_status_has_its_exit_code() {
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
        for (status, code, exit_status) in table {
            assert_eq!(refused(status, code).exit_status.code(), exit_status, "{status} {code}");
        }
    }

    #[test]
    fn failure_quotes_the_server_and_names_the_next_step() {
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
            "next": "Look its id up.",
            "status": 404
          }
        }
        "#);
    }

    #[test]
    fn next_step_is_for_the_profile_of_the_command() {
        let ended = || Failure::new(ExitStatus::LoggedOut, "your login has ended").next("Log in again: gpuctl login");
        assert_eq!(ended().of_profile("default").next.unwrap(), "Log in again: gpuctl login");
        assert_eq!(ended().of_profile("staging").next.unwrap(), "Log in again: gpuctl --profile staging login");
        assert_eq!(Failure::usage("x").of_profile("staging").next, None);
        for (next, shown) in [
            ("It goes on: gpuctl billing payment 7", "It goes on: gpuctl --profile staging billing payment 7"),
            (
                "Try `gpuctl whoami`, then gpuctl ssh a -- ls",
                "Try `gpuctl --profile staging whoami`, then gpuctl --profile staging ssh a -- ls",
            ),
            ("Install gpuctl where you are.", "Install gpuctl where you are."),
            ("Confirm it on the command line: --yes", "Confirm it on the command line: --yes"),
        ] {
            assert_eq!(Failure::usage("x").next(next).of_profile("staging").next.unwrap(), shown);
        }
    }

    #[test]
    fn response_without_the_envelope_is_a_server_failure() {
        let failure = Failure::of_answer(StatusCode::BAD_GATEWAY, &json!("<html>"), None);
        assert_eq!((failure.exit_status, failure.answer), (ExitStatus::Server, None));
    }

    #[test]
    fn server_message_cannot_move_the_cursor() {
        let body = json!({ "code": "x", "message": "a\u{1b}[2Jb\r\nc", "correlation_id": "\u{7}" });
        let shown = Failure::of_answer(StatusCode::CONFLICT, &body, None).to_string();
        assert!(!shown.contains(['\u{1b}', '\r', '\u{7}']), "{shown:?}");
    }
}
