//! Finds an entity wherever it lives and asks it: here, or through the bus at the member that owns its shard.

mod limits;
mod places;

pub use limits::Unlimited;

use crate::ask::{Answer, Answered, AskError, Asked, CommandKey};
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

/// No asker waits longer than this for another member.
const LONGEST: Duration = Duration::from_secs(600);

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
    /// Milliseconds for which the asker still waits: the members' clocks need not agree. A member of an earlier release sends none, and
    /// its deadline counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    remaining_ms: Option<u64>,
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
    /// While the shard moves or no member holds it, the command is sent again until its deadline. A command whose owner lost the shard
    /// before it answered is sent to the next owner under the same command id: it is carried out once. A command that was sent and not
    /// answered in time is not sent again; its command id makes it safe for the asker to do so.
    ///
    /// # Errors
    /// Every [`AskError`] but [`AskError::NotOwner`].
    pub async fn ask<M: Machine>(&self, permit: &Permit, id: Uuid, command: M::Command, mut asked: Asked) -> Answer<M> {
        if command.action() != permit.action() || &asked.by != permit.principal() {
            return Err(AskError::Denied);
        }
        let shard = shard_of(id);
        let seek_until =
            self.seeks_for.map_or(asked.deadline, |at_most| asked.deadline.min(self.host.world().now() + at_most));
        let mut sending = Sending { named: asked.command.is_some(), lost: false };
        loop {
            let answer = if self.host.term(shard).is_some() {
                Some(self.ask_here::<M>(id, command.clone(), asked.clone()).await)
            } else {
                asked.command.get_or_insert_with(|| CommandKey::internal(self.host.world().seed()));
                self.ask_elsewhere::<M>(shard, id, &command, &asked).await
            };
            sending.lost |= answer.is_none();
            let again = match &answer {
                None | Some(Err(AskError::NotOwner)) => true,
                // What an earlier owner was sent is on its way to the store.
                Some(Err(AskError::InProgress)) => sending.lost,
                Some(Ok(_) | Err(_)) => false,
            };
            if again && self.host.world().now() + RETRY < seek_until {
                tokio::time::sleep(RETRY).await;
                continue;
            }
            let changing = || AskError::Unavailable { reason: format!("shard {shard} is changing hands") };
            return sending.concluded::<M>(match answer {
                None | Some(Err(AskError::NotOwner)) => Err(changing()),
                Some(answer) => answer,
            });
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

    /// `None` where the owner that it was sent to lost the shard before it answered.
    async fn ask_elsewhere<M: Machine>(
        &self,
        shard: Shard,
        id: Uuid,
        command: &M::Command,
        asked: &Asked,
    ) -> Option<Answer<M>> {
        let Ok(patience) = (asked.deadline - self.host.world().now()).to_std() else {
            return Some(Err(AskError::Unavailable { reason: "the time for an answer has passed".to_owned() }));
        };
        let payload = serde_json::to_value(command).and_then(|command| {
            serde_json::to_vec(&Request {
                v: VERSION,
                entity: EntityRef { kind: M::KIND, id },
                asked: asked.clone(),
                remaining_ms: Some(millis(patience)),
                command,
            })
        });
        let payload = match payload {
            Ok(payload) => payload,
            Err(error) => return Some(Err(AskError::Broken { reason: error.to_string() })),
        };
        Some(match self.remote.request(shard, payload, patience).await {
            Ok(response) => match serde_json::from_slice::<Response>(&response) {
                Ok(response) => decode::<M>(response.answer),
                Err(error) => Err(unreadable(error)),
            },
            Err(RemoteError::OwnerChanged) => return None,
            Err(RemoteError::NoResponders) => Err(AskError::NotOwner),
            Err(RemoteError::TimedOut) => Err(AskError::Unknown { reason: "no answer in time".to_owned() }),
            Err(RemoteError::Unreachable(reason)) => Err(AskError::Unavailable { reason }),
        })
    }

    /// Serves a command that came from another member and was `in_transit` for so long; the answer is for it alone to read.
    pub async fn serve(&self, payload: &[u8], in_transit: Duration) -> Vec<u8> {
        if let Some(answer) = self.serve_cell(payload).or_else(|| self.serve_place(payload)) {
            return answer;
        }
        let answer = match serde_json::from_slice::<Request>(payload) {
            Ok(request) if request.v <= VERSION => match self.by_this_clock(request, in_transit) {
                Some(request) => request.entity.kind.visit(Serve { host: &self.host, request }).await,
                // The asker waits no more. One that does all the same, since the clocks do not agree, sends it again.
                None => Err(AskError::NotOwner),
            },
            Ok(request) => Err(AskError::Unavailable { reason: format!("encoding {} is not understood", request.v) }),
            Err(error) => Err(AskError::Broken { reason: format!("the command cannot be read: {error}") }),
        };
        serde_json::to_vec(&Response { v: VERSION, answer }).unwrap_or_default()
    }

    /// The request with its deadline by the clock of this process; `None` where its time has passed.
    fn by_this_clock(&self, mut request: Request, in_transit: Duration) -> Option<Request> {
        if let Some(remaining) = request.remaining_ms {
            let remaining = Duration::from_millis(remaining).min(LONGEST).checked_sub(in_transit)?;
            request.asked.deadline = self.host.world().now() + remaining;
        }
        Some(request)
    }

    /// What lives in this process.
    #[must_use]
    pub const fn host(&self) -> &Arc<Host> {
        &self.host
    }
}

/// What is known of a command that is sent until it is answered.
#[derive(Clone, Copy)]
struct Sending {
    /// Its asker gave it an id.
    named: bool,
    /// An owner may have carried it out and could not answer any more.
    lost: bool,
}

impl Sending {
    /// The answer to the asker. After an owner was lost, only what is certain whichever of them carried the command out.
    fn concluded<M: Machine>(self, answer: Answer<M>) -> Answer<M> {
        let certain = match &answer {
            // An id of the asker's leads to the first reply, or to the refusal of a command that was never carried out.
            Ok(_) => true,
            Err(AskError::Rejected(_) | AskError::AlreadyDone) => self.named,
            Err(AskError::Denied | AskError::Reused | AskError::Unknown { .. }) => true,
            Err(_) => false,
        };
        if !self.lost || certain {
            return answer;
        }
        Err(AskError::Unknown { reason: "the owner of the shard was lost before it answered".to_owned() })
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

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
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
