//! The protocol that executes a command of an entity's mailbox up to its durable commit, as a synchronous state machine: no task, clock
//! or channel. [`crate::entity`] hosts it in ractor; a simulation can drive it without.
//!
//! ```text
//! Loading ──loaded──▶ Ready ──decide──▶ Committing ──applied──▶ Ready            (reply, effects, next command)
//!    ▲                  │                   ├──conflict──▶ Loading               (decide again)
//!    │                  │                   ├──claimed──▶ Ready                  (decide again, without the names)
//!    │                  └no commit▶LookingUp├──duplicate──▶ Ready                (replay of the first reply)
//!    │                    (was it done      ├──refused, not applied──▶ Ready     (nothing changed)
//!    └────────────────────before?)          └──fenced, unknown──▶ Ended          (passivate, or end and reload)
//! ```
//!
//! Persist, then reply: no reply and no effect leaves before [`CommitOutcome::Applied`] has come in. An input that the phase does not
//! wait for is ignored.

use crate::command_context::{AskError, AskResult, CommandContext, CommandKey, CommandReply};
use crate::shell_dependencies::{StoreReadError, Term};
use domain::authz::authorize;
use domain::commit::{CommandRecord, CompletedCommand, REFUSED, SetChange, Snapshot, Timer};
use domain::policy::PolicyBook;
use domain::redact::redact;
use domain::state_machine::{AuditedRefusal, Command as _};
use domain::{
    CommandId, Commit, CommitOutcome, Effect, EntityKind, EntityRef, EventId, Machine, Timestamp, Transition,
    TransitionContext, summand,
};
use std::any::Any;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use uuid::Uuid;

/// A version that keeps changing during a decision has another writer: after this many reloads the command is refused.
const RELOADS_MAX: u8 = 3;

/// A command on its way through the shell. `token` identifies the waiting caller.
#[derive(Clone, Debug)]
pub struct CommandRequest<M: Machine> {
    pub token: u64,
    pub command: M::Command,
    pub context: CommandContext,
}

/// The inputs of the shell.
#[derive(Debug)]
pub enum Input<M: Machine> {
    Loaded(Result<Option<Snapshot>, StoreReadError>),
    Ask(CommandRequest<M>),
    Committed(CommitOutcome),
    /// The stored result of a command id.
    LookedUp(Result<Option<CompletedCommand>, StoreReadError>),
    /// The entity is idle.
    Passivate,
}

/// The outputs of the shell, to be executed in this order.
#[derive(Debug)]
pub enum Output<M: Machine> {
    Load,
    Commit(Box<Commit>),
    LookUp(CommandId),
    Reply(u64, AskResult<M>),
    Perform(Effect),
    /// The actor ends without a failure.
    Passivate,
    /// The machine failed: reload the entity, at most so often.
    Crash(String),
    /// The store could not be read or a commit's outcome is unknown: reload when the store is back. It is not the entity's failure.
    StoreOutage(String),
    /// The snapshot cannot be read. An operator must look at it; a reload would end the same way.
    Park(String),
}

/// The environment at the time of an input.
#[derive(Clone, Copy, Debug)]
pub struct InputContext<'a> {
    pub at: Timestamp,
    pub seed: u128,
    pub policy: &'a PolicyBook,
}

/// One entity's shell.
#[derive(Debug)]
pub struct Shell<M: Machine> {
    id: Uuid,
    term: Term,
    state: Option<Arc<M>>,
    version: i64,
    /// Whether it exists was not read: its first command creates it.
    assumed_absent: bool,
    phase: Phase<M>,
    waiting: VecDeque<CommandRequest<M>>,
    /// Names that the last decision claimed and other entities hold: the first waiting command is decided again without them.
    holders: BTreeMap<String, Uuid>,
}

#[derive(Debug)]
enum Phase<M: Machine> {
    /// `reloads`: the conflicts of the first waiting command.
    Loading {
        reloads: u8,
    },
    Ready {
        reloads: u8,
    },
    Committing {
        ask: CommandRequest<M>,
        next: Arc<M>,
        then: AfterCommit<M>,
        reloads: u8,
    },
    LookingUp {
        ask: CommandRequest<M>,
        otherwise: Uncommitted<M>,
        reloads: u8,
    },
    Ended,
}

/// What follows the commit.
#[derive(Debug)]
enum AfterCommit<M: Machine> {
    Answer {
        reply: M::Reply,
        effects: Vec<Effect>,
    },
    /// The commit records the refusal, and nothing of the command.
    Refuse(M::Rejection),
}

/// The commit of a refusal that has to be audited.
#[derive(Debug)]
struct RefusalRecord<M> {
    commit: Box<Commit>,
    next: Arc<M>,
}

/// A decision without a commit of the command: so a lookup finds whether it was executed before.
#[derive(Debug)]
enum Uncommitted<M: Machine> {
    Rejected { rejection: M::Rejection, refusal: Option<RefusalRecord<M>> },
    Unchanged { reply: M::Reply, effects: Vec<Effect> },
}

/// The decision of the machine.
enum Decision<M: Machine> {
    Uncommitted(Uncommitted<M>),
    Changed { commit: Box<Commit>, next: Arc<M>, reply: M::Reply, effects: Vec<Effect> },
}

/// The source of a reply.
enum ReplySource {
    Written,
    Unchanged,
    Replayed,
}

impl<M: Machine> Shell<M> {
    /// A shell that loads its snapshot at once.
    pub fn start(id: Uuid, term: Term) -> (Self, Output<M>) {
        let phase = Phase::Loading { reloads: 0 };
        (Self::in_phase(id, term, phase, false), Output::Load)
    }

    /// A shell for an entity that its first command creates: it assumes that there is none. The commit verifies it, and a reply without
    /// a commit loads the snapshot first.
    pub fn start_new(id: Uuid, term: Term) -> Self {
        let phase = Phase::Ready { reloads: 0 };
        Self::in_phase(id, term, phase, true)
    }

    fn in_phase(id: Uuid, term: Term, phase: Phase<M>, assumed_absent: bool) -> Self {
        let (waiting, holders) = (VecDeque::new(), BTreeMap::new());
        Self { id, term, state: None, version: 0, assumed_absent, phase, waiting, holders }
    }

    /// Handles one input; returns the outputs, in order.
    pub fn on(&mut self, input: Input<M>, now: InputContext<'_>) -> Vec<Output<M>> {
        let mut out = Vec::new();
        match input {
            Input::Loaded(loaded) => self.loaded(loaded, &mut out),
            Input::Ask(ask) => self.waiting.push_back(ask),
            Input::Committed(outcome) => self.committed(outcome, &mut out),
            Input::LookedUp(found) => self.looked_up(found, &mut out),
            Input::Passivate => {
                if matches!(self.phase, Phase::Ready { .. }) && self.waiting.is_empty() {
                    self.end(Output::Passivate, &mut out);
                }
            }
        }
        self.work(now, &mut out);
        out
    }

    /// The last committed state.
    pub fn state(&self) -> Option<&M> {
        self.state.as_deref()
    }

    /// The state and its version where they are the latest: no commit is in flight, so the store holds no later ones.
    pub fn committed_state(&self) -> Option<(Arc<M>, i64)> {
        match self.phase {
            Phase::Ready { .. } | Phase::LookingUp { .. } => self.state.clone().map(|state| (state, self.version)),
            Phase::Loading { .. } | Phase::Committing { .. } | Phase::Ended => None,
        }
    }

    pub const fn version(&self) -> i64 {
        self.version
    }

    /// The token of the command that is being committed or looked up.
    pub const fn in_flight(&self) -> Option<u64> {
        match &self.phase {
            Phase::Committing { ask, .. } | Phase::LookingUp { ask, .. } => Some(ask.token),
            Phase::Loading { .. } | Phase::Ready { .. } | Phase::Ended => None,
        }
    }

    fn entity(&self) -> EntityRef {
        EntityRef { kind: M::KIND, id: self.id }
    }

    fn loaded(&mut self, loaded: Result<Option<Snapshot>, StoreReadError>, out: &mut Vec<Output<M>>) {
        let Phase::Loading { reloads } = self.phase else { return };
        match loaded {
            Ok(None) => {
                (self.state, self.version, self.assumed_absent) = (None, 0, false);
                self.phase = Phase::Ready { reloads };
            }
            Ok(Some(snapshot)) => match serde_json::from_str::<M>(&snapshot.body) {
                Ok(state) => {
                    (self.state, self.version, self.assumed_absent) = (Some(Arc::new(state)), snapshot.version, false);
                    self.phase = Phase::Ready { reloads };
                }
                Err(error) => {
                    let reason = format!("the snapshot of version {} cannot be read: {error}", snapshot.version);
                    self.refuse_waiting(&AskError::Parked { reason: reason.clone() }, out);
                    self.end(Output::Park(reason), out);
                }
            },
            Err(StoreReadError { reason, is_altered: true }) => {
                self.refuse_waiting(&AskError::Parked { reason: reason.clone() }, out);
                self.end(Output::Park(reason), out);
            }
            Err(error) => {
                self.refuse_waiting(&AskError::Unavailable { reason: error.to_string() }, out);
                self.end(Output::StoreOutage(error.to_string()), out);
            }
        }
    }

    /// Decides the waiting commands, until one has to be committed or looked up.
    fn work(&mut self, now: InputContext<'_>, out: &mut Vec<Output<M>>) {
        loop {
            let reloads = match self.phase {
                Phase::Ready { reloads } => reloads,
                Phase::Loading { .. } | Phase::Committing { .. } | Phase::LookingUp { .. } => return,
                Phase::Ended => {
                    self.refuse_waiting(&AskError::NotOwner, out);
                    return;
                }
            };
            self.phase = Phase::Ready { reloads: 0 };
            let Some(ask) = self.waiting.pop_front() else { return };
            if ask.context.deadline < now.at {
                let reason = "the command waited longer than its asker".to_owned();
                out.push(Output::Reply(ask.token, Err(AskError::Unavailable { reason })));
                continue;
            }
            self.decide(ask, reloads, now, out);
        }
    }

    fn decide(&mut self, ask: CommandRequest<M>, reloads: u8, now: InputContext<'_>, out: &mut Vec<Output<M>>) {
        // The permission is checked where it is decided, however the command arrived.
        if authorize(&ask.context.by, ask.command.action()).is_err() {
            out.push(Output::Reply(ask.token, Err(AskError::Denied)));
            return;
        }
        // A panic of the machine loses no reply: `out` may hold the reply to a command that is durable.
        let holders = std::mem::take(&mut self.holders);
        match catch_unwind(AssertUnwindSafe(|| self.evaluate(&ask, &holders, now))) {
            // No reply is given from the assumption.
            Ok(Ok(Decision::Uncommitted(_))) if self.assumed_absent => {
                self.waiting.push_front(ask);
                self.phase = Phase::Loading { reloads };
                out.push(Output::Load);
            }
            Ok(Ok(Decision::Uncommitted(otherwise))) => match &ask.context.command {
                // It may have been executed before: then its first reply is the answer.
                Some(key) if key.keep_reply => {
                    out.push(Output::LookUp(key.id));
                    self.phase = Phase::LookingUp { ask, otherwise, reloads };
                }
                Some(_) | None => self.reply_uncommitted(ask, otherwise, reloads, out),
            },
            Ok(Ok(Decision::Changed { commit, next, reply, effects })) => {
                out.push(Output::Commit(commit));
                self.phase = Phase::Committing { ask, next, then: AfterCommit::Answer { reply, effects }, reloads };
            }
            Ok(Err(unwritable)) => {
                let reason = unwritable.to_string();
                out.push(Output::Reply(ask.token, Err(AskError::Broken { reason })));
            }
            Err(panic) => {
                let reason = format!("{} panicked: {}", ask.command.name(), panic_message(&*panic));
                out.push(Output::Reply(ask.token, Err(AskError::Broken { reason: reason.clone() })));
                self.fail_and_reload(Output::Crash(reason), out);
            }
        }
    }

    /// Replies without executing; a refusal that has to be audited, after its commit.
    fn reply_uncommitted(
        &mut self,
        ask: CommandRequest<M>,
        unwritten: Uncommitted<M>,
        reloads: u8,
        out: &mut Vec<Output<M>>,
    ) {
        match unwritten {
            Uncommitted::Unchanged { reply, effects } => {
                out.push(Output::Reply(ask.token, self.answer(reply, ReplySource::Unchanged)));
                out.extend(effects.into_iter().map(Output::Perform));
            }
            Uncommitted::Rejected { rejection, refusal: None } => {
                out.push(Output::Reply(ask.token, Err(AskError::Rejected(rejection))));
            }
            Uncommitted::Rejected { rejection, refusal: Some(RefusalRecord { commit, next }) } => {
                out.push(Output::Commit(commit));
                self.phase = Phase::Committing { ask, next, then: AfterCommit::Refuse(rejection), reloads };
            }
        }
    }

    /// Every part of a decision that runs the machine's own code.
    fn evaluate(
        &self,
        ask: &CommandRequest<M>,
        holders: &BTreeMap<String, Uuid>,
        now: InputContext<'_>,
    ) -> Result<Decision<M>, CommitBlocked> {
        let ctx = TransitionContext {
            now: now.at,
            policy: now.policy,
            by: &ask.context.by,
            correlation_id: &ask.context.origin.correlation_id,
            trace: ask.context.origin.trace(),
            seed: now.seed,
            id: self.id,
            version: self.version,
        };
        let decided = if holders.is_empty() {
            M::decide(self.state.as_deref(), ask.command.clone(), &ctx)
        } else {
            M::decide_without(self.state.as_deref(), ask.command.clone(), holders, &ctx)
        };
        let mut step = match decided {
            Ok(step) => step,
            Err(rejection) => {
                let refused = self.state.as_ref().and_then(|state| state.audit_refusal(&ask.command, &rejection, &ctx));
                let refusal = refused.map(|refused| self.refusal_record(ask, refused, &rejection, &ctx)).transpose()?;
                return Ok(Decision::Uncommitted(Uncommitted::Rejected { rejection, refusal }));
            }
        };
        let Some(next) = step.next.take() else {
            return Ok(Decision::Uncommitted(Uncommitted::Unchanged { reply: step.reply, effects: step.effects }));
        };
        let commit = Box::new(self.commit(ask, &next, &step, &ctx)?);
        Ok(Decision::Changed { commit, next: Arc::new(next), reply: step.reply, effects: step.effects })
    }

    fn commit(
        &self,
        ask: &CommandRequest<M>,
        next: &M,
        step: &Transition<M>,
        ctx: &TransitionContext<'_>,
    ) -> Result<Commit, CommitBlocked> {
        // A stored reply is found by the id of its command, so the command needs an id.
        let unnamed = || step.stores_reply.then(|| CommandKey::internal(ctx.seed));
        let command = match ask.context.command.clone().or_else(unnamed) {
            None => None,
            Some(key) => Some(CommandRecord {
                id: key.id,
                digest: key.digest,
                reply: if key.keep_reply || step.stores_reply { Some(redacted_reply(&step.reply)?) } else { None },
                resolved: key.resolved,
                consumes: key.consumes,
            }),
        };
        // Ids of events follow those that the machine took itself.
        let outbox = (1 << 32_u64..).zip(&step.events);
        let base = self.base_commit(ask, next, ctx)?;
        Ok(Commit {
            why: step.why.clone(),
            audit: step.audit.clone(),
            outbox: outbox.map(|(n, event)| (EventId(ctx.new_id(n)), event.clone())).collect(),
            postings: step.postings.clone(),
            command,
            requires: base.requires.iter().chain(&step.requires).copied().collect(),
            ..base
        })
    }

    /// The command id is not stored: the command was not executed, and may be when it is resent.
    fn refusal_record(
        &self,
        ask: &CommandRequest<M>,
        refused: AuditedRefusal<M>,
        rejection: &M::Rejection,
        ctx: &TransitionContext<'_>,
    ) -> Result<RefusalRecord<M>, CommitBlocked> {
        let why = format!("{REFUSED}{rejection}");
        let commit = Commit { why, audit: vec![refused.audit], ..self.base_commit(ask, &refused.next, ctx)? };
        Ok(RefusalRecord { commit: Box::new(commit), next: Arc::new(refused.next) })
    }

    /// The transition without events, postings or audit records.
    fn base_commit(
        &self,
        ask: &CommandRequest<M>,
        next: &M,
        ctx: &TransitionContext<'_>,
    ) -> Result<Commit, CommitBlocked> {
        Ok(Commit {
            entity: self.entity(),
            shard: self.term.shard,
            epoch: self.term.epoch,
            expected_version: self.version,
            snapshot: snapshot_of(next)?,
            from_state: self.state.as_deref().map(Machine::state),
            to_state: next.state(),
            keys: next.keys(),
            claims: set_change(M::claims, self.state.as_deref(), next),
            terms: set_change(M::terms, self.state.as_deref(), next),
            summands: summand::differences(self.state.as_deref().and_then(Machine::summand), next.summand()),
            timer: timer_of(next),
            at: ctx.now,
            command_name: ask.command.name(),
            why: String::new(),
            actor: ask.context.by.to_string(),
            origin: ask.context.origin.clone(),
            audit: Vec::new(),
            outbox: Vec::new(),
            postings: Vec::new(),
            command: None,
            requires: ask.context.by.requires(ask.command.action()).into_iter().collect(),
            patient: ask.context.patient,
        })
    }

    fn committed(&mut self, outcome: CommitOutcome, out: &mut Vec<Output<M>>) {
        let (ask, next, then, reloads) = match self.take_phase() {
            Phase::Committing { ask, next, then, reloads } => (ask, next, then, reloads),
            other @ (Phase::Loading { .. } | Phase::Ready { .. } | Phase::LookingUp { .. } | Phase::Ended) => {
                self.phase = other;
                return;
            }
        };
        let refuse = |error, out: &mut Vec<Output<M>>| out.push(Output::Reply(ask.token, Err(error)));
        match outcome {
            CommitOutcome::Applied => {
                (self.state, self.assumed_absent) = (Some(next), false);
                self.version += 1;
                match then {
                    AfterCommit::Answer { reply, effects } => {
                        out.push(Output::Reply(ask.token, self.answer(reply, ReplySource::Written)));
                        out.extend(effects.into_iter().map(Output::Perform));
                    }
                    AfterCommit::Refuse(rejection) => refuse(AskError::Rejected(rejection), out),
                }
            }
            CommitOutcome::Conflict if reloads < RELOADS_MAX => {
                self.waiting.push_front(ask);
                self.phase = Phase::Loading { reloads: reloads + 1 };
                out.push(Output::Load);
            }
            CommitOutcome::Conflict => {
                refuse(AskError::Unavailable { reason: "the entity keeps changing under the command".into() }, out);
            }
            CommitOutcome::Claimed { holders } if reloads < RELOADS_MAX => {
                self.waiting.push_front(ask);
                self.holders = holders;
                self.phase = Phase::Ready { reloads: reloads + 1 };
            }
            CommitOutcome::Claimed { .. } => {
                refuse(AskError::Unavailable { reason: "names that it claims keep changing hands".into() }, out);
            }
            CommitOutcome::Duplicate(done) => out.push(Output::Reply(ask.token, self.replay(&ask, done))),
            CommitOutcome::Refused { constraint } => refuse(AskError::Taken { constraint }, out),
            CommitOutcome::NotApplied { reason } => refuse(AskError::Unavailable { reason }, out),
            CommitOutcome::Fenced => {
                refuse(AskError::NotOwner, out);
                self.end(Output::Passivate, out);
            }
            CommitOutcome::Unknown { reason } => {
                refuse(AskError::Unknown { reason: reason.clone() }, out);
                self.fail_and_reload(Output::StoreOutage(format!("a commit's outcome is unknown: {reason}")), out);
            }
        }
    }

    fn looked_up(&mut self, found: Result<Option<CompletedCommand>, StoreReadError>, out: &mut Vec<Output<M>>) {
        let (ask, otherwise, reloads) = match self.take_phase() {
            Phase::LookingUp { ask, otherwise, reloads } => (ask, otherwise, reloads),
            other @ (Phase::Loading { .. } | Phase::Ready { .. } | Phase::Committing { .. } | Phase::Ended) => {
                self.phase = other;
                return;
            }
        };
        let answer = match found {
            Ok(Some(done)) => self.replay(&ask, done),
            Ok(None) => return self.reply_uncommitted(ask, otherwise, reloads, out),
            Err(error) => Err(AskError::Unavailable { reason: error.to_string() }),
        };
        out.push(Output::Reply(ask.token, answer));
    }

    /// The first reply to a command that was executed before.
    fn replay(&self, ask: &CommandRequest<M>, done: CompletedCommand) -> AskResult<M> {
        let same = ask.context.command.as_ref().is_some_and(|key| key.digest == done.digest);
        if !same {
            return Err(AskError::Reused);
        }
        let Some(reply) = done.reply else {
            return Err(AskError::AlreadyDone);
        };
        match serde_json::from_str(&reply) {
            Ok(reply) => self.answer(reply, ReplySource::Replayed),
            // It was executed, and its reply cannot be read.
            Err(error) => Err(AskError::Unknown { reason: format!("the stored reply cannot be read: {error}") }),
        }
    }

    const fn answer(&self, reply: M::Reply, how: ReplySource) -> AskResult<M> {
        let (replayed, written) = match how {
            ReplySource::Written => (false, true),
            ReplySource::Unchanged => (false, false),
            ReplySource::Replayed => (true, false),
        };
        Ok(CommandReply { reply, replayed, written, version: self.version })
    }

    const fn take_phase(&mut self) -> Phase<M> {
        std::mem::replace(&mut self.phase, Phase::Ready { reloads: 0 })
    }

    fn refuse_waiting(&mut self, error: &AskError<M::Rejection>, out: &mut Vec<Output<M>>) {
        out.extend(self.waiting.drain(..).map(|ask| Output::Reply(ask.token, Err(error.clone()))));
    }

    fn fail_and_reload(&mut self, last: Output<M>, out: &mut Vec<Output<M>>) {
        let not_asked = "the entity is being reloaded".to_owned();
        self.refuse_waiting(&AskError::Unavailable { reason: not_asked }, out);
        self.end(last, out);
    }

    fn end(&mut self, last: Output<M>, out: &mut Vec<Output<M>>) {
        self.phase = Phase::Ended;
        self.refuse_waiting(&AskError::NotOwner, out);
        out.push(last);
    }
}

/// Why the next state cannot be committed.
#[derive(Debug, thiserror::Error)]
enum CommitBlocked {
    #[error("the next state cannot be serialized: {0}")]
    Json(#[from] serde_json::Error),
    #[error("the next state of the {kind} has {bytes} bytes, over its bound of {most}")]
    TooLarge { kind: EntityKind, bytes: usize, most: usize },
}

fn snapshot_of<M: Machine>(next: &M) -> Result<String, CommitBlocked> {
    let snapshot = serde_json::to_string(next)?;
    let (bytes, most) = (snapshot.len(), M::SNAPSHOT_MOST);
    if bytes > most { Err(CommitBlocked::TooLarge { kind: M::KIND, bytes, most }) } else { Ok(snapshot) }
}

/// The difference between the set of names before and after the transition.
fn set_change<M: Machine>(of: impl Fn(&M) -> BTreeSet<String>, before: Option<&M>, next: &M) -> SetChange {
    let (had, has) = (before.map(&of).unwrap_or_default(), of(next));
    SetChange { added: has.difference(&had).cloned().collect(), dropped: had.difference(&has).cloned().collect() }
}

/// The row of the deadline index. An overdue state without a timer is kept there to be seen, and not woken.
fn timer_of<M: Machine>(entity: &M) -> Option<Timer> {
    let deadline = entity.deadline();
    let wake_at = entity.timer();
    if deadline.is_none() && wake_at.is_none() {
        return None;
    }
    Some(Timer {
        wake_at: wake_at.unwrap_or(NEVER),
        deadline_at: deadline.as_ref().map(|deadline| deadline.at),
        reason: deadline.map(|deadline| deadline.reason).unwrap_or_default(),
    })
}

/// A reply as it is stored: secret fields are redacted (specification, *Idempotency record*).
fn redacted_reply(reply: &impl serde::Serialize) -> Result<String, serde_json::Error> {
    let mut reply = serde_json::to_value(reply)?;
    redact(&mut reply);
    serde_json::to_string(&reply)
}

/// The message of a panic.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> &str {
    match (panic.downcast_ref::<String>(), panic.downcast_ref::<&str>()) {
        (Some(message), _) => message,
        (None, Some(message)) => message,
        (None, None) => "with a value that is not text",
    }
}

/// Far enough in the future for every timer, near enough for every database: the year 9999.
const NEVER: Timestamp = match Timestamp::from_timestamp(253_370_764_800, 0) {
    Some(never) => never,
    None => Timestamp::MAX_UTC,
};

#[cfg(test)]
mod property_tests;
#[cfg(test)]
mod tests;
