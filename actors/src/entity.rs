//! The ractor actor that hosts one entity's [`Shell`]: it carries out what the shell asks for, and awaits nothing in its mailbox.

use crate::ask::{Answer, AskError};
use crate::host::{Exit, Facts, Host, Memory, Slot};
use crate::ports::{StoreError, Term};
use crate::shell::{Ask, Input, Now, Output, Shell, words_of};
use domain::{Commit, EntityRef, Machine, Outcome};
use futures::FutureExt;
use ractor::{Actor, ActorProcessingErr, ActorRef};
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use telemetry::Trace;
use tokio::sync::oneshot;
use tracing::{Instrument as _, Span, error_span};
use uuid::Uuid;

/// Hosts entities of machine `M`.
pub(crate) struct Entity<M>(PhantomData<fn() -> M>);

impl<M> Entity<M> {
    pub(crate) const fn new() -> Self {
        Self(PhantomData)
    }
}

pub(crate) struct Start<M> {
    pub(crate) id: Uuid,
    pub(crate) term: Term,
    pub(crate) host: Arc<Host>,
    pub(crate) facts: Arc<Facts>,
    pub(crate) memory: Arc<Memory<M>>,
    /// Its first command makes it.
    pub(crate) new: bool,
}

pub(crate) enum Message<M: Machine> {
    /// A command, with the one who waits for its answer.
    Ask(Box<Ask<M>>, Waiter<M>),
    Tell(Box<Input<M>>),
}

/// Who waits, and the place in the bounds that is free again with the answer.
pub(crate) struct Waiter<M: Machine> {
    pub(crate) answer: oneshot::Sender<Answer<M>>,
    pub(crate) slot: Slot,
    /// In whose scope the command is carried out, and what is logged of it stands.
    pub(crate) span: Span,
}

pub(crate) struct Hosted<M: Machine> {
    entity: EntityRef,
    shell: Shell<M>,
    host: Arc<Host>,
    facts: Arc<Facts>,
    memory: Arc<Memory<M>>,
    waiters: BTreeMap<u64, Waiter<M>>,
}

impl<M: Machine> Actor for Entity<M> {
    type Msg = Message<M>;
    type State = Hosted<M>;
    type Arguments = Start<M>;

    async fn pre_start(&self, myself: ActorRef<Self::Msg>, start: Start<M>) -> Result<Hosted<M>, ActorProcessingErr> {
        let Start { id, term, host, facts, memory, new } = start;
        let (shell, first) = if new {
            (Shell::start_new(id, term), None)
        } else {
            let (shell, load) = Shell::start(id, term);
            (shell, Some(load))
        };
        let entity = EntityRef { kind: M::KIND, id };
        let mut hosted = Hosted { entity, shell, host, facts, memory, waiters: BTreeMap::new() };
        hosted.carry_out(first.into_iter().collect(), &myself);
        Ok(hosted)
    }

    async fn handle(
        &self,
        myself: ActorRef<Self::Msg>,
        message: Message<M>,
        hosted: &mut Hosted<M>,
    ) -> Result<(), ActorProcessingErr> {
        let input = match message {
            Message::Ask(ask, waiter) => {
                hosted.waiters.insert(ask.token, waiter);
                Input::Ask(*ask)
            }
            Message::Tell(input) => *input,
        };
        let world = hosted.host.world();
        let policy = world.policy();
        let now = Now { at: world.now(), seed: world.seed(), policy: &policy };
        let before = hosted.shell.version();
        let outputs = hosted.shell.on(input, now);
        hosted.facts.note(hosted.shell.state(), hosted.shell.version());
        // Before anything is handed over or answered: what the store may have beyond it is not remembered.
        hosted.memory.set(hosted.shell.settled());
        if hosted.shell.version() != before {
            hosted.host.changed(hosted.entity);
        }
        hosted.carry_out(outputs, &myself);
        Ok(())
    }
}

impl<M: Machine> Hosted<M> {
    fn carry_out(&mut self, outputs: Vec<Output<M>>, myself: &ActorRef<Message<M>>) {
        for output in outputs {
            match output {
                Output::Load => {
                    let (host, entity) = (Arc::clone(&self.host), self.entity);
                    let broke = |reason| Input::Loaded(Err(StoreError::unavailable(reason)));
                    let loading = async move { Input::Loaded(host.store().load(entity).await) };
                    tell_later(myself, Span::current(), loading, broke);
                }
                Output::Commit(commit) => {
                    let (host, span) = (Arc::clone(&self.host), self.span_under_way());
                    let broke = |reason| Input::Committed(Outcome::Unknown { reason });
                    let shown = commit_span(&span, &commit);
                    let committing = async move { Input::Committed(host.store().commit(*commit).await) };
                    tell_later(myself, span, committing.instrument(shown), broke);
                }
                Output::LookUp(id) => {
                    let (host, span) = (Arc::clone(&self.host), self.span_under_way());
                    let broke = |reason| Input::Looked(Err(StoreError::unavailable(reason)));
                    let looking = async move { Input::Looked(host.store().command(id).await) };
                    tell_later(myself, span, looking, broke);
                }
                Output::Reply(token, answer) => {
                    let answer = self.if_it_may_be_true(answer);
                    if let Some(Waiter { answer: asker, slot, span: _ }) = self.waiters.remove(&token) {
                        // The place first: whoever has the answer may ask the same again at once.
                        drop(slot);
                        // Who does not wait any more is not owed an answer.
                        let _ = asker.send(answer);
                    }
                }
                Output::Perform(effect) => self.host.effects().perform(effect),
                Output::Sleep => self.leave(Exit::Asleep, myself),
                Output::Die(reason) => self.leave(Exit::Died { reason }, myself),
                Output::Lose(reason) => self.leave(Exit::Lost { reason }, myself),
                Output::Park(reason) => self.leave(Exit::Parked { reason }, myself),
            }
        }
    }

    /// The scope of the command that is being committed or looked up.
    fn span_under_way(&self) -> Span {
        let waiter = self.shell.under_way().and_then(|token| self.waiters.get(&token));
        waiter.map_or_else(Span::none, |waiter| waiter.span.clone())
    }

    /// What was committed is true. What was only remembered, and a refusal decided from it, is so while the lease lasts.
    fn if_it_may_be_true(&self, answer: Answer<M>) -> Answer<M> {
        let from_memory = match &answer {
            Ok(answered) => !answered.written && !answered.replayed,
            Err(AskError::Rejected(_) | AskError::Unavailable { .. }) => true,
            Err(_) => false,
        };
        if from_memory && !self.host.world().may_answer_from_memory() { Err(AskError::NotOwner) } else { answer }
    }

    /// Out of the directory first, so that whoever asks next wakes a fresh one; then away. The version check keeps the two apart.
    fn leave(&self, exit: Exit, myself: &ActorRef<Message<M>>) {
        self.host.left(self.entity, myself.get_id(), exit);
        // What was sent meanwhile is still answered, by a shell that is over.
        if myself.drain().is_err() {
            myself.stop(None);
        }
    }
}

/// The time that a commit takes, for those who look at the trace.
fn commit_span(above: &Span, commit: &Commit) -> Span {
    match commit.traceparent.as_deref().and_then(Trace::parse) {
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

/// Runs `work` beside the mailbox, in `span`, and puts what came of it into the mailbox, which handles it there too. Where it breaks,
/// `broke` says what that means: the entity must not wait for it for ever.
fn tell_later<M: Machine>(
    myself: &ActorRef<Message<M>>,
    span: Span,
    work: impl Future<Output = Input<M>> + Send + 'static,
    broke: impl FnOnce(String) -> Input<M> + Send + 'static,
) {
    let myself = myself.clone();
    let telling = async move {
        let input = match AssertUnwindSafe(work).catch_unwind().await {
            Ok(input) => input,
            Err(panic) => broke(format!("the store panicked: {}", words_of(&*panic))),
        };
        // An actor that is gone has answered its waiters already.
        let _ = myself.cast(Message::Tell(Box::new(input)));
    };
    tokio::spawn(telling.instrument(span));
}
