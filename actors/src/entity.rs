//! The ractor actor that hosts one entity's [`Shell`]: it executes the shell's outputs, and awaits nothing in its mailbox.

use crate::command_context::{AskError, AskResult};
use crate::entity_host::{ActorExit, CommittedState, EntityFacts, Host, Slot};
use crate::entity_shell::{CommandRequest, Input, InputContext, Output, Shell, panic_message};
use crate::shell_dependencies::{StoreReadError, Term};
use domain::{Commit, CommitOutcome, EntityRef, Machine};
use futures::FutureExt;
use ractor::{Actor, ActorProcessingErr, ActorRef};
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use telemetry::SpanContext;
use tokio::sync::oneshot;
use tracing::{Instrument as _, Span, error_span};
use uuid::Uuid;

/// Hosts entities of machine `M`.
pub(crate) struct EntityActor<M>(PhantomData<fn() -> M>);

impl<M> EntityActor<M> {
    pub(crate) const fn new() -> Self {
        Self(PhantomData)
    }
}

pub(crate) struct ActorArguments<M> {
    pub(crate) id: Uuid,
    pub(crate) term: Term,
    pub(crate) host: Arc<Host>,
    pub(crate) facts: Arc<EntityFacts>,
    pub(crate) memory: Arc<CommittedState<M>>,
    /// Its first command creates it.
    pub(crate) new: bool,
}

pub(crate) enum EntityMessage<M: Machine> {
    /// A command, with the channel of its caller.
    Ask(Box<CommandRequest<M>>, Waiter<M>),
    Input(Box<Input<M>>),
}

/// The waiting caller, and the queue slot that its reply frees.
pub(crate) struct Waiter<M: Machine> {
    pub(crate) answer: oneshot::Sender<AskResult<M>>,
    pub(crate) slot: Slot,
    /// The span of the command's execution and its log lines.
    pub(crate) span: Span,
}

pub(crate) struct ActorState<M: Machine> {
    entity: EntityRef,
    shell: Shell<M>,
    host: Arc<Host>,
    facts: Arc<EntityFacts>,
    memory: Arc<CommittedState<M>>,
    waiters: BTreeMap<u64, Waiter<M>>,
}

impl<M: Machine> Actor for EntityActor<M> {
    type Msg = EntityMessage<M>;
    type State = ActorState<M>;
    type Arguments = ActorArguments<M>;

    async fn pre_start(
        &self,
        myself: ActorRef<Self::Msg>,
        start: ActorArguments<M>,
    ) -> Result<ActorState<M>, ActorProcessingErr> {
        let ActorArguments { id, term, host, facts, memory, new } = start;
        let (shell, first) = if new {
            (Shell::start_new(id, term), None)
        } else {
            let (shell, load) = Shell::start(id, term);
            (shell, Some(load))
        };
        let entity = EntityRef { kind: M::KIND, id };
        let mut hosted = ActorState { entity, shell, host, facts, memory, waiters: BTreeMap::new() };
        hosted.execute(first.into_iter().collect(), &myself);
        Ok(hosted)
    }

    async fn handle(
        &self,
        myself: ActorRef<Self::Msg>,
        message: EntityMessage<M>,
        hosted: &mut ActorState<M>,
    ) -> Result<(), ActorProcessingErr> {
        let input = match message {
            EntityMessage::Ask(ask, waiter) => {
                hosted.waiters.insert(ask.token, waiter);
                Input::Ask(*ask)
            }
            EntityMessage::Input(input) => *input,
        };
        let environment = hosted.host.environment();
        let policy = environment.policy();
        let now = InputContext { at: environment.now(), seed: environment.seed(), policy: &policy };
        let before = hosted.shell.version();
        let outputs = hosted.shell.on(input, now);
        hosted.facts.note(hosted.shell.state(), hosted.shell.version());
        // Before any output is executed: a state that the store may have gone beyond is not remembered.
        hosted.memory.set(hosted.shell.committed_state());
        if hosted.shell.version() != before {
            hosted.host.changed(hosted.entity);
        }
        hosted.execute(outputs, &myself);
        Ok(())
    }
}

impl<M: Machine> ActorState<M> {
    fn execute(&mut self, outputs: Vec<Output<M>>, myself: &ActorRef<EntityMessage<M>>) {
        for output in outputs {
            match output {
                Output::Load => {
                    let (host, entity) = (Arc::clone(&self.host), self.entity);
                    let broke = |reason| Input::Loaded(Err(StoreReadError::unavailable(reason)));
                    let loading = async move { Input::Loaded(host.store().load(entity).await) };
                    send_result(myself, Span::current(), loading, broke);
                }
                Output::Commit(commit) => {
                    let (host, span) = (Arc::clone(&self.host), self.in_flight_span());
                    let broke = |reason| Input::Committed(CommitOutcome::Unknown { reason });
                    let shown = commit_span(&span, &commit);
                    let committing = async move { Input::Committed(host.store().commit(*commit).await) };
                    send_result(myself, span, committing.instrument(shown), broke);
                }
                Output::LookUp(id) => {
                    let (host, span) = (Arc::clone(&self.host), self.in_flight_span());
                    let broke = |reason| Input::LookedUp(Err(StoreReadError::unavailable(reason)));
                    let looking = async move { Input::LookedUp(host.store().command(id).await) };
                    send_result(myself, span, looking, broke);
                }
                Output::Reply(token, answer) => {
                    let answer = self.check_lease(answer);
                    if let Some(Waiter { answer: asker, slot, span: _ }) = self.waiters.remove(&token) {
                        // The slot first: with the reply the caller may send the same command again at once.
                        drop(slot);
                        // A caller that no longer waits has dropped its receiver.
                        let _ = asker.send(answer);
                    }
                }
                Output::Perform(effect) => self.host.effects().perform(effect),
                Output::Passivate => self.exit(ActorExit::Passivated, myself),
                Output::Crash(reason) => self.exit(ActorExit::Crashed { reason }, myself),
                Output::StoreOutage(reason) => self.exit(ActorExit::StoreOutage { reason }, myself),
                Output::Park(reason) => self.exit(ActorExit::Parked { reason }, myself),
            }
        }
    }

    /// The span of the command that is being committed or looked up.
    fn in_flight_span(&self) -> Span {
        let waiter = self.shell.in_flight().and_then(|token| self.waiters.get(&token));
        waiter.map_or_else(Span::none, |waiter| waiter.span.clone())
    }

    /// A committed reply is true. A reply from memory, or a rejection that was decided from it, is true only while the lease lasts.
    fn check_lease(&self, answer: AskResult<M>) -> AskResult<M> {
        let from_memory = match &answer {
            Ok(answered) => !answered.written && !answered.replayed,
            Err(AskError::Rejected(_) | AskError::Unavailable { .. }) => true,
            Err(_) => false,
        };
        if from_memory && !self.host.environment().may_answer_from_memory() { Err(AskError::NotOwner) } else { answer }
    }

    /// Leaves the directory first, so that the next command activates a new actor; then stops. The version check keeps the two apart.
    fn exit(&self, exit: ActorExit, myself: &ActorRef<EntityMessage<M>>) {
        self.host.actor_exited(self.entity, myself.get_id(), exit);
        // Messages that arrive meanwhile are still answered, by a shell that has ended.
        if myself.drain().is_err() {
            myself.stop(None);
        }
    }
}

/// The span of a commit, where its trace is sampled.
fn commit_span(above: &Span, commit: &Commit) -> Span {
    match commit.origin.traceparent.as_deref().and_then(SpanContext::parse) {
        Some(trace) if trace.is_sampled() => {
            let trace = trace.child();
            error_span!(
                parent: above,
                "commit",
                trace_id = %trace.trace_id(),
                span_id = %trace.span_id(),
                otel.parent = trace.parent_to_export(),
                to_state = commit.to_state,
            )
        }
        Some(_) | None => Span::none(),
    }
}

/// Runs `work` outside the mailbox, in `span`, and sends its result into the mailbox. Where it panics, `broke` makes the input: the
/// entity must not wait for ever.
fn send_result<M: Machine>(
    myself: &ActorRef<EntityMessage<M>>,
    span: Span,
    work: impl Future<Output = Input<M>> + Send + 'static,
    broke: impl FnOnce(String) -> Input<M> + Send + 'static,
) {
    let myself = myself.clone();
    let telling = async move {
        let input = match AssertUnwindSafe(work).catch_unwind().await {
            Ok(input) => input,
            Err(panic) => broke(format!("the store panicked: {}", panic_message(&*panic))),
        };
        // An actor that has stopped has answered its callers already.
        let _ = myself.cast(EntityMessage::Input(Box::new(input)));
    };
    tokio::spawn(telling.instrument(span));
}
