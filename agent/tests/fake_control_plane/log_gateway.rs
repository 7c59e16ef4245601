//! The log gateway of the fake control plane: the node's token for it, and pushes.
// The tests of the agent itself have no collector.
#![allow(dead_code)]

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use chrono::TimeDelta;
use serde_json::Value;
use wire::SecretToken;
use wire::log_gateway_access::LogTokenAnswer;

use super::{Shared, refuse};

pub const PATH: &str = "/internal/v1/node-logs/loki/api/v1/push";

/// A push with its answer.
pub struct Push {
    pub at: Instant,
    pub lines: Vec<String>,
    pub status: StatusCode,
}

/// The status of a push of these lines, and its `Retry-After` in seconds.
pub type Answer = Box<dyn FnMut(&[String]) -> (StatusCode, Option<u32>) + Send>;

#[derive(Default)]
pub struct FakeLogGateway {
    pub pushes: Vec<Push>,
    /// How many tokens were issued. Only the latest one is valid.
    pub tokens: usize,
    /// Without one, every push is accepted.
    pub answer: Option<Answer>,
    /// A proxy in front makes the answers to refused pushes: pages.
    pub refuses_with_pages: bool,
}

impl FakeLogGateway {
    pub fn always(&mut self, status: StatusCode) {
        self.answer = Some(Box::new(move |_| (status, None)));
    }

    /// The lines of accepted pushes, in order.
    pub fn accepted(&self) -> Vec<&str> {
        let accepted = self.pushes.iter().filter(|push| push.status.is_success());
        accepted.flat_map(|push| &push.lines).map(String::as_str).collect()
    }
}

pub(super) async fn token(State(shared): State<Arc<Shared>>) -> Response {
    let mut gateway = shared.log_gateway.lock().unwrap();
    gateway.tokens += 1;
    let token = SecretToken::new(format!("log-token-{}", gateway.tokens));
    Json(LogTokenAnswer { token, expires_at: shared.now() + TimeDelta::hours(1) }).into_response()
}

pub(super) async fn push(State(shared): State<Arc<Shared>>, headers: HeaderMap, Json(body): Json<Value>) -> Response {
    let streams = body["streams"].as_array().unwrap();
    let values = streams.iter().flat_map(|stream| stream["values"].as_array().unwrap());
    let lines: Vec<String> = values.map(|value| value[1].as_str().unwrap().to_owned()).collect();
    let mut gateway = shared.log_gateway.lock().unwrap();
    let is_valid = headers[header::AUTHORIZATION] == format!("Bearer log-token-{}", gateway.tokens);
    let (status, retry_after) = match &mut gateway.answer {
        _ if !is_valid => (StatusCode::UNAUTHORIZED, None),
        Some(answer) => answer(&lines),
        None => (StatusCode::NO_CONTENT, None),
    };
    gateway.pushes.push(Push { at: Instant::now(), lines, status });
    let mut response = match status.is_success() {
        true => status.into_response(),
        false if gateway.refuses_with_pages => (status, Html("<html></html>")).into_response(),
        false => refuse(status, "refused", ""),
    };
    if let Some(seconds) = retry_after {
        response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
    }
    response
}
