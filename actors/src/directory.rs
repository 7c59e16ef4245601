//! Finds an entity and sends it commands: on this member, or over the bus on the member that owns its shard.

mod connection_quota_forwarding;
mod rate_cell_forwarding;

pub use rate_cell_forwarding::QuotaUnavailable;

use crate::command_context::{AskError, AskResult, CommandContext, CommandKey, CommandReply};
use crate::connection_quota::ConnectionQuota;
use crate::entity_host::Host;
use crate::rate_cells::RateCells;
use crate::sharding::shard_of;
use crate::shell_dependencies::{Remote, RemoteError};
use chrono::TimeDelta;
use domain::Visitor;
use domain::state_machine::Command as _;
use domain::{EntityRef, Machine, Permit, Shard};
use futures::FutureExt;
use futures::future::BoxFuture;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;
use telemetry::SpanContext;
use tracing::{Instrument as _, Span, error_span, field};
use uuid::Uuid;

/// The newest encoding between members that this release reads. A command is sent in the earliest one that has all of it.
const VERSION: u16 = domain::state_machine::VERSIONED_SKU_REVISIONS;

/// The pause before a command for a shard without an owner is resent.
const RETRY_PAUSE: Duration = Duration::from_millis(25);

/// The longest wait for another member.
const TIMEOUT_MAX: Duration = Duration::from_secs(600);

/// Sends commands to any entity of the cluster.
#[derive(Clone)]
pub struct Directory {
    host: Arc<Host>,
    remote: Arc<dyn Remote>,
    /// How long it waits for a shard to have an owner, where that is less than a command's deadline.
    owner_timeout: Option<TimeDelta>,
    /// The rate cells whose shards this member owns.
    rate_cells: Arc<RateCells>,
    /// The open connections whose shards this member owns.
    connection_quota: Arc<ConnectionQuota>,
}

/// A command that is forwarded to another member.
#[derive(Serialize, Deserialize)]
struct Request {
    v: u16,
    entity: EntityRef,
    asked: CommandContext,
    /// Milliseconds for which the caller still waits: the members' clocks need not agree. A member of an earlier release sends none;
    /// then the deadline counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    remaining_ms: Option<u64>,
    command: serde_json::Value,
}

#[derive(Serialize, Deserialize)]
struct Response {
    v: u16,
    answer: EncodedReply,
}

/// The reply of any machine.
type EncodedReply = Result<CommandReply<serde_json::Value>, AskError<serde_json::Value>>;

impl Directory {
    #[must_use]
    pub fn new(host: Arc<Host>, remote: Arc<dyn Remote>) -> Self {
        Self { host, remote, owner_timeout: None, rate_cells: Arc::default(), connection_quota: Arc::default() }
    }

    /// A directory that waits less long for a shard without an owner; its callers retry later.
    #[must_use]
    pub fn with_owner_timeout(&self, at_most: TimeDelta) -> Self {
        Self { owner_timeout: Some(at_most), ..self.clone() }
    }

    /// Sends `command` to an entity, under a permit for it.
    ///
    /// While the shard moves or has no owner, the command is resent until its deadline. A command whose owner lost the shard before it
    /// replied is resent to the next owner under the same command id, so it is executed once. A command that was sent and not answered
    /// in time is not resent; its command id lets the caller do so safely.
    ///
    /// # Errors
    /// Every [`AskError`] but [`AskError::NotOwner`].
    pub async fn ask<M: Machine>(
        &self,
        permit: &Permit,
        id: Uuid,
        command: M::Command,
        mut context: CommandContext,
    ) -> AskResult<M> {
        if command.action() != permit.action() || &context.by != permit.principal() {
            return Err(AskError::Denied);
        }
        let shard = shard_of(id);
        let retry_until = self
            .owner_timeout
            .map_or(context.deadline, |at_most| context.deadline.min(self.host.environment().now() + at_most));
        let mut in_flight = InFlightRequest { named: context.command.is_some(), lost: false };
        loop {
            let answer = if self.host.term(shard).is_some() {
                Some(self.ask_local::<M>(id, command.clone(), context.clone()).await)
            } else {
                context.command.get_or_insert_with(|| CommandKey::internal(self.host.environment().seed()));
                self.ask_remote::<M>(shard, id, &command, &context).await
            };
            in_flight.lost |= answer.is_none();
            let retry = match &answer {
                None | Some(Err(AskError::NotOwner)) => true,
                // The earlier owner's execution may still be in flight to the store.
                Some(Err(AskError::InProgress)) => in_flight.lost,
                Some(Ok(_) | Err(_)) => false,
            };
            if retry && self.host.environment().now() + RETRY_PAUSE < retry_until {
                tokio::time::sleep(RETRY_PAUSE).await;
                continue;
            }
            let changing = || AskError::Unavailable { reason: format!("shard {shard} is changing hands") };
            return in_flight.final_result::<M>(match answer {
                None | Some(Err(AskError::NotOwner)) => Err(changing()),
                Some(answer) => answer,
            });
        }
    }

    /// In the caller's span; with a span of its own only where the trace is sampled.
    async fn ask_local<M: Machine>(&self, id: Uuid, command: M::Command, mut context: CommandContext) -> AskResult<M> {
        match context.trace() {
            Some(trace) if trace.is_sampled() => {
                let span = span_of(EntityRef { kind: M::KIND, id }, command.name(), &mut context);
                self.host.ask::<M>(id, command, context).instrument(span).await
            }
            Some(_) | None => self.host.ask::<M>(id, command, context).await,
        }
    }

    /// `None` where the owner lost the shard before it replied.
    async fn ask_remote<M: Machine>(
        &self,
        shard: Shard,
        id: Uuid,
        command: &M::Command,
        context: &CommandContext,
    ) -> Option<AskResult<M>> {
        let Ok(timeout) = (context.deadline - self.host.environment().now()).to_std() else {
            return Some(Err(AskError::Unavailable { reason: "the time for an answer has passed".to_owned() }));
        };
        let encoding = command.encoding();
        let payload = serde_json::to_value(command).and_then(|command| {
            serde_json::to_vec(&Request {
                v: encoding,
                entity: EntityRef { kind: M::KIND, id },
                asked: context.clone(),
                remaining_ms: Some(millis(timeout)),
                command,
            })
        });
        let payload = match payload {
            Ok(payload) => payload,
            Err(error) => return Some(Err(AskError::Broken { reason: error.to_string() })),
        };
        Some(match self.remote.request(shard, payload, timeout).await {
            Ok(response) => match strict_json::from_slice::<Response>(&response) {
                Ok(response) => decode::<M>(response.answer),
                Err(error) => Err(unreadable(error)),
            },
            Err(RemoteError::OwnerChanged) => return None,
            Err(RemoteError::NoResponders) => Err(AskError::NotOwner),
            Err(RemoteError::TimedOut) => Err(AskError::Unknown { reason: "no answer in time".to_owned() }),
            Err(RemoteError::Unreachable(reason)) => Err(AskError::Unavailable { reason }),
        })
    }

    /// Executes a command that another member forwarded and that was `in_transit` for so long. The payload of the response is opaque.
    pub async fn serve(&self, payload: &[u8], in_transit: Duration) -> Vec<u8> {
        if let Some(answer) = self.serve_rate_limit(payload).or_else(|| self.serve_connection_quota(payload)) {
            return answer;
        }
        let answer = match strict_json::from_slice::<Request>(payload) {
            Ok(request) if request.v <= VERSION => match self.with_local_deadline(request, in_transit) {
                Some(request) => request.entity.kind.visit(RequestHandler { host: &self.host, request }).await,
                // The caller waits no longer. One that still does, since the clocks differ, resends it.
                None => Err(AskError::NotOwner),
            },
            Ok(request) => Err(AskError::Unavailable { reason: format!("encoding {} is not understood", request.v) }),
            Err(error) => Err(AskError::Broken { reason: format!("the command cannot be read: {error}") }),
        };
        serde_json::to_vec(&Response { v: VERSION, answer }).unwrap_or_default()
    }

    /// The request with its deadline by the clock of this process; `None` where the deadline has passed.
    fn with_local_deadline(&self, mut request: Request, in_transit: Duration) -> Option<Request> {
        if let Some(remaining) = request.remaining_ms {
            let remaining = Duration::from_millis(remaining).min(TIMEOUT_MAX).checked_sub(in_transit)?;
            request.asked.deadline = self.host.environment().now() + remaining;
        }
        Some(request)
    }

    /// The host of this process.
    #[must_use]
    pub const fn host(&self) -> &Arc<Host> {
        &self.host
    }
}

/// A command that is sent until it is answered.
#[derive(Clone, Copy)]
struct InFlightRequest {
    /// Its caller named the command id.
    named: bool,
    /// An owner may have executed it and lost the shard before it could reply.
    lost: bool,
}

impl InFlightRequest {
    /// The result for the caller. After an owner was lost, only what is certain whichever of them executed the command.
    fn final_result<M: Machine>(self, answer: AskResult<M>) -> AskResult<M> {
        let certain = match &answer {
            // A command id of the caller leads to the first reply, or to the rejection of a command that was never executed.
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

/// Executes a request as the machine of its kind.
struct RequestHandler<'a> {
    host: &'a Arc<Host>,
    request: Request,
}

impl<'a> Visitor for RequestHandler<'a> {
    type Output = BoxFuture<'a, EncodedReply>;

    fn visit<M: Machine>(self) -> Self::Output {
        let Self { host, mut request } = self;
        async move {
            let command: M::Command = strict_json::tagged::from_value(request.command)
                .map_err(|error| AskError::Broken { reason: format!("the command cannot be read: {error}") })?;
            // The caller's span is at another member: log lines here belong to this span.
            let span = span_of(request.entity, command.name(), &mut request.asked);
            encode::<M>(host.ask::<M>(request.entity.id, command, request.asked).instrument(span).await)
        }
        .boxed()
    }
}

/// The span in which an entity executes a command; its consequences are child spans.
fn span_of(entity: EntityRef, command: &'static str, context: &mut CommandContext) -> Span {
    let trace = context.trace().map(SpanContext::child);
    context.origin.traceparent = trace.map(SpanContext::traceparent);
    error_span!(
        "command",
        service = "entities",
        correlation_id = context.origin.correlation_id,
        trace_id = trace.map(|trace| field::display(trace.trace_id())),
        span_id = trace.map(|trace| field::display(trace.span_id())),
        otel.parent = trace.and_then(SpanContext::parent_to_export),
        resource_name = %entity,
        command,
    )
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn encode<M: Machine>(answer: AskResult<M>) -> EncodedReply {
    match answer {
        Ok(answered) => Ok(answered.map_reply(serde_json::to_value).map_err(unreadable)?),
        Err(error) => Err(error.map_rejection(serde_json::to_value).map_err(unreadable)?),
    }
}

fn decode<M: Machine>(answer: EncodedReply) -> AskResult<M> {
    match answer {
        Ok(answered) => Ok(answered.map_reply(strict_json::tagged::from_value).map_err(unreadable)?),
        Err(error) => Err(error.map_rejection(strict_json::tagged::from_value).map_err(unreadable)?),
    }
}

/// The entity replied, and the reply is lost: the command may have been executed.
fn unreadable<J>(error: serde_json::Error) -> AskError<J> {
    AskError::Unknown { reason: format!("the answer cannot be read: {error}") }
}

impl<R> CommandReply<R> {
    fn map_reply<S, E>(self, map: impl FnOnce(R) -> Result<S, E>) -> Result<CommandReply<S>, E> {
        let Self { reply, replayed, written, version } = self;
        Ok(CommandReply { reply: map(reply)?, replayed, written, version })
    }
}

impl<J> AskError<J> {
    fn map_rejection<K, E>(self, map: impl FnOnce(J) -> Result<K, E>) -> Result<AskError<K>, E> {
        Ok(match self {
            Self::Rejected(rejection) => AskError::Rejected(map(rejection)?),
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
