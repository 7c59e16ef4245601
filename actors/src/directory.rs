//! Finds an entity wherever it lives and asks it: here, or through the bus at the member that owns its shard.

mod limits;
mod places;

pub use limits::Unlimited;

use crate::ask::{Answer, Answered, AskError, Asked};
use crate::cells::Cells;
use crate::host::Host;
use crate::place::shard_of;
use crate::places::Places;
use crate::ports::{Remote, RemoteError};
use chrono::TimeDelta;
use domain::id::Visitor;
use domain::machine::Command as _;
use domain::{EntityRef, Machine, Permit, Shard};
use futures::FutureExt;
use futures::future::BoxFuture;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;
use telemetry::Trace;
use tracing::{Instrument as _, Span, error_span, field};
use uuid::Uuid;

/// The encoding between members. A member understands its own and the one before.
const VERSION: u16 = 1;

/// The pause before a command for a shard that nobody holds is sent again.
const RETRY: Duration = Duration::from_millis(25);

/// Asks any entity of the cluster.
#[derive(Clone)]
pub struct Directory {
    host: Arc<Host>,
    remote: Arc<dyn Remote>,
    /// How long a shard's owner is looked for, where that is less than a command's deadline.
    seeks_for: Option<TimeDelta>,
    /// Of the rate limits whose shards are here.
    cells: Arc<Cells>,
    /// What their owners have open.
    places: Arc<Places>,
}

/// A command on its way to another member.
#[derive(Serialize, Deserialize)]
struct Request {
    v: u16,
    entity: EntityRef,
    asked: Asked,
    command: serde_json::Value,
}

#[derive(Serialize, Deserialize)]
struct Response {
    v: u16,
    answer: Encoded,
}

/// Any machine's answer.
type Encoded = Result<Answered<serde_json::Value>, AskError<serde_json::Value>>;

impl Directory {
    #[must_use]
    pub fn new(host: Arc<Host>, remote: Arc<dyn Remote>) -> Self {
        Self { host, remote, seeks_for: None, cells: Arc::default(), places: Arc::default() }
    }

    /// The same, for those who rather come again than wait long for a shard that nobody holds.
    #[must_use]
    pub fn seeking_for(&self, at_most: TimeDelta) -> Self {
        Self { seeks_for: Some(at_most), ..self.clone() }
    }

    /// Asks `command` of an entity, under a permit for it.
    ///
    /// While the shard moves or nobody holds it, the command is sent again until its deadline. A command that was sent and not
    /// answered is not: its command id makes it safe for the asker to do so.
    ///
    /// # Errors
    /// Every [`AskError`] but [`AskError::NotOwner`].
    pub async fn ask<M: Machine>(&self, permit: &Permit, id: Uuid, command: M::Command, asked: Asked) -> Answer<M> {
        if command.action() != permit.action() || &asked.by != permit.principal() {
            return Err(AskError::Denied);
        }
        let shard = shard_of(id);
        let seek_until =
            self.seeks_for.map_or(asked.deadline, |at_most| asked.deadline.min(self.host.world().now() + at_most));
        loop {
            let answer = if self.host.term(shard).is_some() {
                self.ask_here::<M>(id, command.clone(), asked.clone()).await
            } else {
                self.ask_elsewhere::<M>(shard, id, &command, &asked).await
            };
            match answer {
                Err(AskError::NotOwner) if self.host.world().now() + RETRY < seek_until => {
                    tokio::time::sleep(RETRY).await;
                }
                Err(AskError::NotOwner) => {
                    return Err(AskError::Unavailable { reason: format!("shard {shard} is changing hands") });
                }
                answer => return answer,
            }
        }
    }

    /// In the asker's span, with one of its own only where somebody looks at the trace.
    async fn ask_here<M: Machine>(&self, id: Uuid, command: M::Command, mut asked: Asked) -> Answer<M> {
        match asked.trace() {
            Some(trace) if trace.is_sampled() => {
                let span = span_of(EntityRef { kind: M::KIND, id }, command.name(), &mut asked);
                self.host.ask::<M>(id, command, asked).instrument(span).await
            }
            Some(_) | None => self.host.ask::<M>(id, command, asked).await,
        }
    }

    async fn ask_elsewhere<M: Machine>(
        &self,
        shard: Shard,
        id: Uuid,
        command: &M::Command,
        asked: &Asked,
    ) -> Answer<M> {
        let broken = |error: serde_json::Error| AskError::Broken { reason: error.to_string() };
        let request = Request {
            v: VERSION,
            entity: EntityRef { kind: M::KIND, id },
            asked: asked.clone(),
            command: serde_json::to_value(command).map_err(broken)?,
        };
        let payload = serde_json::to_vec(&request).map_err(broken)?;
        let Ok(patience) = (asked.deadline - self.host.world().now()).to_std() else {
            return Err(AskError::Unavailable { reason: "the time for an answer has passed".to_owned() });
        };
        let response = match self.remote.request(shard, payload, patience).await {
            Ok(response) => response,
            Err(RemoteError::NoResponders) => return Err(AskError::NotOwner),
            Err(RemoteError::TimedOut) => return Err(AskError::Unknown { reason: "no answer in time".to_owned() }),
            Err(RemoteError::Unreachable(reason)) => return Err(AskError::Unavailable { reason }),
        };
        let response: Response = serde_json::from_slice(&response).map_err(unreadable)?;
        decode::<M>(response.answer)
    }

    /// Serves a command that came from another member; the answer is for it alone to read.
    pub async fn serve(&self, payload: &[u8]) -> Vec<u8> {
        if let Some(answer) = self.serve_cell(payload).or_else(|| self.serve_place(payload)) {
            return answer;
        }
        let answer = match serde_json::from_slice::<Request>(payload) {
            Ok(request) if request.v <= VERSION => request.entity.kind.visit(Serve { host: &self.host, request }).await,
            Ok(request) => Err(AskError::Unavailable { reason: format!("encoding {} is not understood", request.v) }),
            Err(error) => Err(AskError::Broken { reason: format!("the command cannot be read: {error}") }),
        };
        serde_json::to_vec(&Response { v: VERSION, answer }).unwrap_or_default()
    }

    /// What lives in this process.
    #[must_use]
    pub const fn host(&self) -> &Arc<Host> {
        &self.host
    }
}

/// Serves a request as the machine of its kind.
struct Serve<'a> {
    host: &'a Arc<Host>,
    request: Request,
}

impl<'a> Visitor for Serve<'a> {
    type Output = BoxFuture<'a, Encoded>;

    fn visit<M: Machine>(self) -> Self::Output {
        let Self { host, mut request } = self;
        async move {
            let command: M::Command = serde_json::from_value(request.command)
                .map_err(|error| AskError::Broken { reason: format!("the command cannot be read: {error}") })?;
            // The asker's own span is at another member: whatever is logged here belongs to this one.
            let span = span_of(request.entity, command.name(), &mut request.asked);
            encode::<M>(host.ask::<M>(request.entity.id, command, request.asked).instrument(span).await)
        }
        .boxed()
    }
}

/// The span in which an entity carries a command out; what the command causes belongs below it.
fn span_of(entity: EntityRef, command: &'static str, asked: &mut Asked) -> Span {
    let trace = asked.trace().map(Trace::child);
    asked.traceparent = trace.map(Trace::traceparent);
    error_span!(
        "command",
        service = "entities",
        correlation_id = asked.correlation_id,
        trace_id = trace.map(|trace| field::display(trace.trace_id())),
        span_id = trace.map(|trace| field::display(trace.span_id())),
        otel.parent = trace.and_then(Trace::parent_to_export),
        resource_name = %entity,
        command,
    )
}

fn encode<M: Machine>(answer: Answer<M>) -> Encoded {
    match answer {
        Ok(answered) => Ok(answered.of_reply(serde_json::to_value).map_err(unreadable)?),
        Err(error) => Err(error.of_rejection(serde_json::to_value).map_err(unreadable)?),
    }
}

fn decode<M: Machine>(answer: Encoded) -> Answer<M> {
    match answer {
        Ok(answered) => Ok(answered.of_reply(serde_json::from_value).map_err(unreadable)?),
        Err(error) => Err(error.of_rejection(serde_json::from_value).map_err(unreadable)?),
    }
}

/// An answer was given, and what it was is lost: the command may have been carried out.
fn unreadable<J>(error: serde_json::Error) -> AskError<J> {
    AskError::Unknown { reason: format!("the answer cannot be read: {error}") }
}

impl<R> Answered<R> {
    fn of_reply<S, E>(self, turn: impl FnOnce(R) -> Result<S, E>) -> Result<Answered<S>, E> {
        let Self { reply, replayed, written, version } = self;
        Ok(Answered { reply: turn(reply)?, replayed, written, version })
    }
}

impl<J> AskError<J> {
    fn of_rejection<K, E>(self, turn: impl FnOnce(J) -> Result<K, E>) -> Result<AskError<K>, E> {
        Ok(match self {
            Self::Rejected(rejection) => AskError::Rejected(turn(rejection)?),
            Self::Denied => AskError::Denied,
            Self::InProgress => AskError::InProgress,
            Self::AlreadyDone => AskError::AlreadyDone,
            Self::Reused => AskError::Reused,
            Self::Taken { constraint } => AskError::Taken { constraint },
            Self::Overloaded => AskError::Overloaded,
            Self::Parked { reason } => AskError::Parked { reason },
            Self::Unavailable { reason } => AskError::Unavailable { reason },
            Self::Unknown { reason } => AskError::Unknown { reason },
            Self::Broken { reason } => AskError::Broken { reason },
            Self::NotOwner => AskError::NotOwner,
        })
    }
}

#[cfg(test)]
pub(crate) mod tests;
