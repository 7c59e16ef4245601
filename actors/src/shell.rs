//! The protocol that carries a command from an entity's mailbox to durable truth, as a synchronous machine: no task, clock or
//! channel. [`crate::entity`] hosts it in ractor; a simulation can drive it without.
//!
//! ```text
//! Loading ──loaded──▶ Ready ──decide──▶ Committing ──applied──▶ Ready            (reply, effects, next command)
//!    ▲                  │                   ├──conflict──▶ Loading               (decide again)
//!    │                  │                   ├──claimed──▶ Ready                  (decide again, without the names)
//!    │                  └─no commit─▶Looking├──duplicate──▶ Ready                (the first reply again)
//!    │                    (was it done      ├──refused, not applied──▶ Ready     (nothing changed)
//!    └────────────────────before?)          └──fenced, unknown──▶ over           (sleep, or end and be loaded anew)
//! ```
//!
//! Persist, then speak: no reply and no effect leaves before [`Outcome::Applied`] has come in. An input that nothing waits for is
//! not looked at.

use crate::ask::{Answer, Answered, AskError, Asked};
use crate::ports::{StoreError, Term};
use domain::authz::authorize;
use domain::commit::{CommandRecord, Done, REFUSED, SetChange, Snapshot, Timer};
use domain::machine::{Command as _, Refused, Trace};
use domain::policy::PolicyBook;
use domain::redact::redact;
use domain::{CommandId, Commit, Ctx, Effect, EntityRef, EventId, Kind, Machine, Outcome, Step, Timestamp};
use std::any::Any;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use uuid::Uuid;

/// A version that keeps moving under a decision is somebody else writing: after this many reloads the command is given back.
const MOST_RELOADS: u8 = 3;

/// A command on its way through the shell. `token` names the one who waits for the answer.
#[derive(Clone, Debug)]
pub struct Ask<M: Machine> {
    pub token: u64,
    pub command: M::Command,
    pub asked: Asked,
}

/// What the host tells the shell.
#[derive(Debug)]
pub enum Input<M: Machine> {
    Loaded(Result<Option<Snapshot>, StoreError>),
    Ask(Ask<M>),
    Committed(Outcome),
    /// What was found of a command id.
    Looked(Result<Option<Done>, StoreError>),
    /// Nobody has needed the entity for a while.
    Sleep,
}

/// What the shell wants of its host, in this order.
#[derive(Debug)]
pub enum Output<M: Machine> {
    Load,
    Commit(Box<Commit>),
    LookUp(CommandId),
    Reply(u64, Answer<M>),
    Perform(Effect),
    /// The entity is over, here: nobody has to worry.
    Sleep,
    /// Its own code failed: load it anew, and not without end.
    Die(String),
    /// The store did not say what is true: load it anew when it does. Nothing of it is the entity's doing.
    Lose(String),
    /// The snapshot cannot be read. It must be looked at; loading it again would end the same way.
    Park(String),
}

/// What the world is like when an input comes in.
#[derive(Clone, Copy, Debug)]
pub struct Now<'a> {
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
    /// Nobody has looked whether there is one: it was woken by a command that makes it.
    supposed: bool,
    phase: Phase<M>,
    waiting: VecDeque<Ask<M>>,
    /// Names that the last decision claimed and other entities have: the first of the waiting commands is decided again without them.
    holders: BTreeMap<String, Uuid>,
}

#[derive(Debug)]
enum Phase<M: Machine> {
    /// `reloads`: how often the first of the waiting commands has met a conflict.
    Loading {
        reloads: u8,
    },
    Ready {
        reloads: u8,
    },
    Committing {
        ask: Ask<M>,
        next: Arc<M>,
        then: Then<M>,
        reloads: u8,
    },
    Looking {
        ask: Ask<M>,
        otherwise: Unwritten<M>,
        reloads: u8,
    },
    Over,
}

/// What is said when the commit stands.
#[derive(Debug)]
enum Then<M: Machine> {
    Answer {
        reply: M::Reply,
        effects: Vec<Effect>,
    },
    /// The commit keeps that it was refused, and nothing of the command.
    Refuse(M::Rejection),
}

/// What is written of a refusal that has to be audited.
#[derive(Debug)]
struct Kept<M> {
    commit: Box<Commit>,
    next: Arc<M>,
}

/// What the machine made of a command that is not carried out: no commit finds out whether it was before.
#[derive(Debug)]
enum Unwritten<M: Machine> {
    Rejected { rejection: M::Rejection, kept: Option<Kept<M>> },
    Unchanged { reply: M::Reply, effects: Vec<Effect> },
}

/// What the machine made of a command.
enum Decided<M: Machine> {
    Unwritten(Unwritten<M>),
    Changed { commit: Box<Commit>, next: Arc<M>, reply: M::Reply, effects: Vec<Effect> },
}

/// How a command came to its reply.
enum How {
    Written,
    Unchanged,
    Replayed,
}

impl<M: Machine> Shell<M> {
    /// A shell that asks for its snapshot at once.
    pub fn start(id: Uuid, term: Term) -> (Self, Output<M>) {
        let phase = Phase::Loading { reloads: 0 };
        (Self::in_phase(id, term, phase, false), Output::Load)
    }

    /// A shell for an entity that its first command makes: it supposes that there is none. The commit finds out, and whatever is
    /// answered without a commit is looked up before.
    pub fn start_new(id: Uuid, term: Term) -> Self {
        let phase = Phase::Ready { reloads: 0 };
        Self::in_phase(id, term, phase, true)
    }

    fn in_phase(id: Uuid, term: Term, phase: Phase<M>, supposed: bool) -> Self {
        let (waiting, holders) = (VecDeque::new(), BTreeMap::new());
        Self { id, term, state: None, version: 0, supposed, phase, waiting, holders }
    }

    /// Takes one input and says what is to be done, in order.
    pub fn on(&mut self, input: Input<M>, now: Now<'_>) -> Vec<Output<M>> {
        let mut out = Vec::new();
        match input {
            Input::Loaded(loaded) => self.loaded(loaded, &mut out),
            Input::Ask(ask) => self.waiting.push_back(ask),
            Input::Committed(outcome) => self.committed(outcome, &mut out),
            Input::Looked(found) => self.looked(found, &mut out),
            Input::Sleep => {
                if matches!(self.phase, Phase::Ready { .. }) && self.waiting.is_empty() {
                    self.over(Output::Sleep, &mut out);
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

    /// The state and its version where they are the last of all: nothing is being committed, so the store holds no later ones.
    pub fn settled(&self) -> Option<(Arc<M>, i64)> {
        match self.phase {
            Phase::Ready { .. } | Phase::Looking { .. } => self.state.clone().map(|state| (state, self.version)),
            Phase::Loading { .. } | Phase::Committing { .. } | Phase::Over => None,
        }
    }

    pub const fn version(&self) -> i64 {
        self.version
    }

    /// Whose command is being committed or looked up.
    pub const fn under_way(&self) -> Option<u64> {
        match &self.phase {
            Phase::Committing { ask, .. } | Phase::Looking { ask, .. } => Some(ask.token),
            Phase::Loading { .. } | Phase::Ready { .. } | Phase::Over => None,
        }
    }

    fn entity(&self) -> EntityRef {
        EntityRef { kind: M::KIND, id: self.id }
    }

    fn loaded(&mut self, loaded: Result<Option<Snapshot>, StoreError>, out: &mut Vec<Output<M>>) {
        let Phase::Loading { reloads } = self.phase else { return };
        match loaded {
            Ok(None) => {
                (self.state, self.version, self.supposed) = (None, 0, false);
                self.phase = Phase::Ready { reloads };
            }
            Ok(Some(snapshot)) => match serde_json::from_str::<M>(&snapshot.body) {
                Ok(state) => {
                    (self.state, self.version, self.supposed) = (Some(Arc::new(state)), snapshot.version, false);
                    self.phase = Phase::Ready { reloads };
                }
                Err(error) => {
                    let reason = format!("the snapshot of version {} cannot be read: {error}", snapshot.version);
                    self.refuse_waiting(&AskError::Parked { reason: reason.clone() }, out);
                    self.over(Output::Park(reason), out);
                }
            },
            Err(StoreError { reason, is_altered: true }) => {
                self.refuse_waiting(&AskError::Parked { reason: reason.clone() }, out);
                self.over(Output::Park(reason), out);
            }
            Err(error) => {
                self.refuse_waiting(&AskError::Unavailable { reason: error.to_string() }, out);
                self.over(Output::Lose(error.to_string()), out);
            }
        }
    }

    /// Decides the waiting commands, until one of them has to be committed or looked up.
    fn work(&mut self, now: Now<'_>, out: &mut Vec<Output<M>>) {
        loop {
            let reloads = match self.phase {
                Phase::Ready { reloads } => reloads,
                Phase::Loading { .. } | Phase::Committing { .. } | Phase::Looking { .. } => return,
                Phase::Over => {
                    self.refuse_waiting(&AskError::NotOwner, out);
                    return;
                }
            };
            self.phase = Phase::Ready { reloads: 0 };
            let Some(ask) = self.waiting.pop_front() else { return };
            if ask.asked.deadline < now.at {
                let reason = "the command waited longer than its asker".to_owned();
                out.push(Output::Reply(ask.token, Err(AskError::Unavailable { reason })));
                continue;
            }
            self.decide(ask, reloads, now, out);
        }
    }

    fn decide(&mut self, ask: Ask<M>, reloads: u8, now: Now<'_>, out: &mut Vec<Output<M>>) {
        // Who asks is checked where it is decided, whatever way the command came.
        if authorize(&ask.asked.by, ask.command.action()).is_err() {
            out.push(Output::Reply(ask.token, Err(AskError::Denied)));
            return;
        }
        // A machine that panics takes nobody's answer with it: `out` may hold the reply to a command that is durable.
        let holders = std::mem::take(&mut self.holders);
        match catch_unwind(AssertUnwindSafe(|| self.consider(&ask, &holders, now))) {
            // Nothing is answered from a supposition.
            Ok(Ok(Decided::Unwritten(_))) if self.supposed => {
                self.waiting.push_front(ask);
                self.phase = Phase::Loading { reloads };
                out.push(Output::Load);
            }
            Ok(Ok(Decided::Unwritten(otherwise))) => match &ask.asked.command {
                // There may be nothing to do because it was carried out before: then its first reply is the answer.
                Some(key) if key.keep_reply => {
                    out.push(Output::LookUp(key.id));
                    self.phase = Phase::Looking { ask, otherwise, reloads };
                }
                Some(_) | None => self.conclude(ask, otherwise, reloads, out),
            },
            Ok(Ok(Decided::Changed { commit, next, reply, effects })) => {
                out.push(Output::Commit(commit));
                self.phase = Phase::Committing { ask, next, then: Then::Answer { reply, effects }, reloads };
            }
            Ok(Err(unwritable)) => {
                let reason = unwritable.to_string();
                out.push(Output::Reply(ask.token, Err(AskError::Broken { reason })));
            }
            Err(panic) => {
                let reason = format!("{} panicked: {}", ask.command.name(), words_of(&*panic));
                out.push(Output::Reply(ask.token, Err(AskError::Broken { reason: reason.clone() })));
                self.start_anew(Output::Die(reason), out);
            }
        }
    }

    /// Answers without carrying anything out; a refusal that has to be audited when that stands.
    fn conclude(&mut self, ask: Ask<M>, unwritten: Unwritten<M>, reloads: u8, out: &mut Vec<Output<M>>) {
        match unwritten {
            Unwritten::Unchanged { reply, effects } => {
                out.push(Output::Reply(ask.token, self.answer(reply, How::Unchanged)));
                out.extend(effects.into_iter().map(Output::Perform));
            }
            Unwritten::Rejected { rejection, kept: None } => {
                out.push(Output::Reply(ask.token, Err(AskError::Rejected(rejection))));
            }
            Unwritten::Rejected { rejection, kept: Some(Kept { commit, next }) } => {
                out.push(Output::Commit(commit));
                self.phase = Phase::Committing { ask, next, then: Then::Refuse(rejection), reloads };
            }
        }
    }

    /// Everything of a decision that the machine's own code has a part in.
    fn consider(&self, ask: &Ask<M>, holders: &BTreeMap<String, Uuid>, now: Now<'_>) -> Result<Decided<M>, Unwritable> {
        let ctx = Ctx {
            now: now.at,
            policy: now.policy,
            by: &ask.asked.by,
            correlation_id: &ask.asked.correlation_id,
            trace: Trace { parent: ask.asked.traceparent.as_deref(), state: ask.asked.tracestate.as_deref() },
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
                let kept = refused.map(|refused| self.keep(ask, refused, &rejection, &ctx)).transpose()?;
                return Ok(Decided::Unwritten(Unwritten::Rejected { rejection, kept }));
            }
        };
        let Some(next) = step.next.take() else {
            return Ok(Decided::Unwritten(Unwritten::Unchanged { reply: step.reply, effects: step.effects }));
        };
        let commit = Box::new(self.commit(ask, &next, &step, &ctx)?);
        Ok(Decided::Changed { commit, next: Arc::new(next), reply: step.reply, effects: step.effects })
    }

    fn commit(&self, ask: &Ask<M>, next: &M, step: &Step<M>, ctx: &Ctx<'_>) -> Result<Commit, Unwritable> {
        let command = match &ask.asked.command {
            None => None,
            Some(key) => Some(CommandRecord {
                id: key.id,
                digest: key.digest,
                reply: if key.keep_reply { Some(kept_reply(&step.reply)?) } else { None },
                consumes: key.consumes,
            }),
        };
        // Ids of events come after those that the machine took for itself.
        let outbox = (1 << 32_u64..).zip(&step.events);
        let bare = self.bare_commit(ask, next, ctx)?;
        Ok(Commit {
            why: step.why.clone(),
            audit: step.audit.clone(),
            outbox: outbox.map(|(n, event)| (EventId(ctx.new_id(n)), event.clone())).collect(),
            postings: step.postings.clone(),
            command,
            rests_on: bare.rests_on.iter().chain(&step.rests_on).copied().collect(),
            ..bare
        })
    }

    /// The command is not remembered: it was not carried out, and may be when it comes again.
    fn keep(
        &self,
        ask: &Ask<M>,
        refused: Refused<M>,
        rejection: &M::Rejection,
        ctx: &Ctx<'_>,
    ) -> Result<Kept<M>, Unwritable> {
        let why = format!("{REFUSED}{rejection}");
        let commit = Commit { why, audit: vec![refused.audit], ..self.bare_commit(ask, &refused.next, ctx)? };
        Ok(Kept { commit: Box::new(commit), next: Arc::new(refused.next) })
    }

    /// The transition with nothing beside it.
    fn bare_commit(&self, ask: &Ask<M>, next: &M, ctx: &Ctx<'_>) -> Result<Commit, Unwritable> {
        Ok(Commit {
            entity: self.entity(),
            shard: self.term.shard,
            epoch: self.term.epoch,
            expected_version: self.version,
            snapshot: snapshot_of(next)?,
            from_state: self.state.as_deref().map(Machine::state),
            to_state: next.state(),
            keys: next.keys(),
            claims: change_of(M::claims, self.state.as_deref(), next),
            terms: change_of(M::terms, self.state.as_deref(), next),
            timer: timer_of(next),
            at: ctx.now,
            command_name: ask.command.name(),
            why: String::new(),
            actor: ask.asked.by.to_string(),
            correlation_id: ask.asked.correlation_id.clone(),
            traceparent: ask.asked.traceparent.clone(),
            tracestate: ask.asked.tracestate.clone(),
            audit: Vec::new(),
            outbox: Vec::new(),
            postings: Vec::new(),
            command: None,
            rests_on: ask.asked.by.rests_on(ask.command.action()).into_iter().collect(),
            patient: ask.asked.patient,
        })
    }

    fn committed(&mut self, outcome: Outcome, out: &mut Vec<Output<M>>) {
        let (ask, next, then, reloads) = match self.take_phase() {
            Phase::Committing { ask, next, then, reloads } => (ask, next, then, reloads),
            other @ (Phase::Loading { .. } | Phase::Ready { .. } | Phase::Looking { .. } | Phase::Over) => {
                self.phase = other;
                return;
            }
        };
        let refuse = |error, out: &mut Vec<Output<M>>| out.push(Output::Reply(ask.token, Err(error)));
        match outcome {
            Outcome::Applied => {
                (self.state, self.supposed) = (Some(next), false);
                self.version += 1;
                match then {
                    Then::Answer { reply, effects } => {
                        out.push(Output::Reply(ask.token, self.answer(reply, How::Written)));
                        out.extend(effects.into_iter().map(Output::Perform));
                    }
                    Then::Refuse(rejection) => refuse(AskError::Rejected(rejection), out),
                }
            }
            Outcome::Conflict if reloads < MOST_RELOADS => {
                self.waiting.push_front(ask);
                self.phase = Phase::Loading { reloads: reloads + 1 };
                out.push(Output::Load);
            }
            Outcome::Conflict => {
                refuse(AskError::Unavailable { reason: "the entity keeps changing under the command".into() }, out);
            }
            Outcome::Claimed { holders } if reloads < MOST_RELOADS => {
                self.waiting.push_front(ask);
                self.holders = holders;
                self.phase = Phase::Ready { reloads: reloads + 1 };
            }
            Outcome::Claimed { .. } => {
                refuse(AskError::Unavailable { reason: "names that it claims keep changing hands".into() }, out);
            }
            Outcome::Duplicate(done) => out.push(Output::Reply(ask.token, self.repeated(&ask, done))),
            Outcome::Refused { constraint } => refuse(AskError::Taken { constraint }, out),
            Outcome::NotApplied { reason } => refuse(AskError::Unavailable { reason }, out),
            Outcome::Fenced => {
                refuse(AskError::NotOwner, out);
                self.over(Output::Sleep, out);
            }
            Outcome::Unknown { reason } => {
                refuse(AskError::Unknown { reason: reason.clone() }, out);
                self.start_anew(Output::Lose(format!("a commit's outcome is unknown: {reason}")), out);
            }
        }
    }

    fn looked(&mut self, found: Result<Option<Done>, StoreError>, out: &mut Vec<Output<M>>) {
        let (ask, otherwise, reloads) = match self.take_phase() {
            Phase::Looking { ask, otherwise, reloads } => (ask, otherwise, reloads),
            other @ (Phase::Loading { .. } | Phase::Ready { .. } | Phase::Committing { .. } | Phase::Over) => {
                self.phase = other;
                return;
            }
        };
        let answer = match found {
            Ok(Some(done)) => self.repeated(&ask, done),
            Ok(None) => return self.conclude(ask, otherwise, reloads, out),
            Err(error) => Err(AskError::Unavailable { reason: error.to_string() }),
        };
        out.push(Output::Reply(ask.token, answer));
    }

    /// The first reply to a command that came before.
    fn repeated(&self, ask: &Ask<M>, done: Done) -> Answer<M> {
        let same = ask.asked.command.as_ref().is_some_and(|key| key.digest == done.digest);
        if !same {
            return Err(AskError::Reused);
        }
        let Some(reply) = done.reply else {
            return Err(AskError::AlreadyDone);
        };
        match serde_json::from_str(&reply) {
            Ok(reply) => self.answer(reply, How::Replayed),
            // It was carried out, and what came of it cannot be told.
            Err(error) => Err(AskError::Unknown { reason: format!("the kept reply cannot be read: {error}") }),
        }
    }

    const fn answer(&self, reply: M::Reply, how: How) -> Answer<M> {
        let (replayed, written) = match how {
            How::Written => (false, true),
            How::Unchanged => (false, false),
            How::Replayed => (true, false),
        };
        Ok(Answered { reply, replayed, written, version: self.version })
    }

    const fn take_phase(&mut self) -> Phase<M> {
        std::mem::replace(&mut self.phase, Phase::Ready { reloads: 0 })
    }

    fn refuse_waiting(&mut self, error: &AskError<M::Rejection>, out: &mut Vec<Output<M>>) {
        out.extend(self.waiting.drain(..).map(|ask| Output::Reply(ask.token, Err(error.clone()))));
    }

    fn start_anew(&mut self, last: Output<M>, out: &mut Vec<Output<M>>) {
        let not_asked = "the entity is being loaded anew".to_owned();
        self.refuse_waiting(&AskError::Unavailable { reason: not_asked }, out);
        self.over(last, out);
    }

    fn over(&mut self, last: Output<M>, out: &mut Vec<Output<M>>) {
        self.phase = Phase::Over;
        self.refuse_waiting(&AskError::NotOwner, out);
        out.push(last);
    }
}

/// Why the next state is not written.
#[derive(Debug, thiserror::Error)]
enum Unwritable {
    #[error("the next state cannot be written down: {0}")]
    Json(#[from] serde_json::Error),
    #[error("the next state of the {kind} has {bytes} bytes, over its bound of {most}")]
    TooLarge { kind: Kind, bytes: usize, most: usize },
}

fn snapshot_of<M: Machine>(next: &M) -> Result<String, Unwritable> {
    let snapshot = serde_json::to_string(next)?;
    let (bytes, most) = (snapshot.len(), M::SNAPSHOT_MOST);
    if bytes > most { Err(Unwritable::TooLarge { kind: M::KIND, bytes, most }) } else { Ok(snapshot) }
}

/// What the entity has from this transition on of such a set, and what it gives up.
fn change_of<M: Machine>(of: impl Fn(&M) -> BTreeSet<String>, before: Option<&M>, next: &M) -> SetChange {
    let (had, has) = (before.map(&of).unwrap_or_default(), of(next));
    SetChange { added: has.difference(&had).cloned().collect(), dropped: had.difference(&has).cloned().collect() }
}

/// The row of the deadline index. Something overdue that time alone does not move is kept there to be seen, and not woken.
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

/// A reply as it is kept: what its fields call a secret is taken out (specification, *Idempotency record*).
fn kept_reply(reply: &impl serde::Serialize) -> Result<String, serde_json::Error> {
    let mut reply = serde_json::to_value(reply)?;
    redact(&mut reply);
    serde_json::to_string(&reply)
}

/// What a panic said.
pub(crate) fn words_of(panic: &(dyn Any + Send)) -> &str {
    match (panic.downcast_ref::<String>(), panic.downcast_ref::<&str>()) {
        (Some(words), _) => words,
        (None, Some(words)) => words,
        (None, None) => "without words",
    }
}

/// Far enough away for every timer, near enough for every database: the year 9999.
const NEVER: Timestamp = match Timestamp::from_timestamp(253_370_764_800, 0) {
    Some(never) => never,
    None => Timestamp::MAX_UTC,
};

#[cfg(test)]
mod property;
#[cfg(test)]
mod tests;
