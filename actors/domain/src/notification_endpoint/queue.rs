//! The messages that wait for an endpoint: backoff, bounds, dead letters.

use super::Failure;
use crate::machine::{Ctx, Timestamp};
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use uuid::Uuid;

/// The largest body of a message, in bytes.
pub const BODY_MOST: usize = 8 * 1024;
/// Messages that wait at once, and the bytes of their bodies.
const WAITING_MOST: usize = 100;
const WAITING_BYTES: usize = 96 * 1024;
/// Dead letters that are kept, and the bytes of their bodies. Over it the oldest are forgotten, and counted.
const DEAD_MOST: usize = 50;
const DEAD_BYTES: usize = 64 * 1024;
/// Attempts that are shown.
const SHOWN_MOST: usize = 20;
/// The pauses before the attempts at one message, in seconds (Standard Webhooks, *Deliverability and reliability*).
const PAUSES: [i64; 9] = [5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400];
/// A message that has waited for longer is a dead letter at its next failure.
const TRIED_FOR: TimeDelta = TimeDelta::days(3);
/// How long the endpoint pauses after a failure: it doubles with each further one.
const FIRST_PAUSE: TimeDelta = TimeDelta::seconds(5);
const LONGEST_PAUSE: TimeDelta = TimeDelta::minutes(15);
/// The longest wait that a receiver may ask for.
const RETRY_AFTER_MOST: i64 = 86_400;

/// Something that a receiver is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// The event's id. A receiver knows a repetition by it.
    pub id: Uuid,
    /// The event's type.
    pub event: String,
    /// The CloudEvent as it is sent, the same in each attempt.
    pub body: String,
}

/// A message in the queue, or among the dead letters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiting {
    pub message: Message,
    pub since: Timestamp,
    pub attempts: u32,
    /// Meaningless in a dead letter.
    pub next_attempt_at: Timestamp,
    pub last_error: Option<String>,
}

/// What came of an attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attempt {
    pub message_id: Uuid,
    pub event: String,
    pub at: Timestamp,
    /// `None`: the receiver has it.
    pub error: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Queue {
    /// Oldest first.
    pub waiting: VecDeque<Waiting>,
    /// Oldest first.
    pub dead: VecDeque<Waiting>,
    /// Dead letters that were forgotten for want of room.
    pub forgotten: u64,
    /// The last ones, oldest first.
    pub attempts: VecDeque<Attempt>,
    /// Failures since the last success.
    pub failures: u32,
    pub failing_since: Option<Timestamp>,
    /// Nothing is tried before.
    pub paused_until: Option<Timestamp>,
}

impl Queue {
    /// The first message that is to be tried now.
    #[must_use]
    pub fn due(&self, now: Timestamp) -> Option<&Waiting> {
        if self.paused_until.is_some_and(|until| now < until) {
            return None;
        }
        self.waiting.iter().find(|waiting| waiting.next_attempt_at <= now)
    }

    #[must_use]
    pub fn next_attempt_at(&self) -> Option<Timestamp> {
        let soonest = self.waiting.iter().map(|waiting| waiting.next_attempt_at).min()?;
        Some(self.paused_until.map_or(soonest, |until| until.max(soonest)))
    }

    pub(super) fn is_failing(&self) -> bool {
        self.failing_since.is_some() || !self.dead.is_empty()
    }

    /// True of a message that is here, or whose attempt is among the last ones.
    pub(super) fn knows(&self, id: Uuid) -> bool {
        let is_here = |waiting: &Waiting| waiting.message.id == id;
        self.waiting.iter().any(is_here)
            || self.dead.iter().any(is_here)
            || self.attempts.iter().any(|attempt| attempt.message_id == id)
    }

    pub(super) fn push(&mut self, message: Message, now: Timestamp) {
        let waiting = Waiting { message, since: now, attempts: 0, next_attempt_at: now, last_error: None };
        let bytes = bytes(&self.waiting) + waiting.message.body.len();
        if waiting.message.body.len() > BODY_MOST {
            self.bury(waiting, "the message is too long".to_owned());
        } else if self.waiting.len() >= WAITING_MOST || bytes > WAITING_BYTES {
            self.bury(waiting, "too many messages wait for this endpoint".to_owned());
        } else {
            self.waiting.push_back(waiting);
        }
    }

    /// False where no such message waits.
    pub(super) fn delivered(&mut self, id: Uuid, now: Timestamp) -> bool {
        let Some(waiting) = self.take(id) else { return false };
        self.show(&waiting, now, None);
        (self.failures, self.failing_since, self.paused_until) = (0, None, None);
        true
    }

    /// False where no such message waits.
    pub(super) fn failed(&mut self, id: Uuid, failure: &Failure, most: i64, ctx: &Ctx<'_>) -> bool {
        let Some(at) = self.waiting.iter().position(|waiting| waiting.message.id == id) else { return false };
        let now = ctx.now;
        let waiting = &mut self.waiting[at];
        waiting.attempts = waiting.attempts.saturating_add(1);
        waiting.last_error = Some(failure.why.clone());
        waiting.next_attempt_at = now + pause(waiting.attempts, failure, ctx.seed);
        let is_dead = failure.is_final || i64::from(waiting.attempts) >= most || now - waiting.since >= TRIED_FOR;
        let shown = waiting.clone();
        self.show(&shown, now, Some(failure.why.clone()));
        if is_dead && let Some(waiting) = self.waiting.remove(at) {
            self.bury(waiting, failure.why.clone());
        }
        // A final failure is about the message, and not about the receiver.
        if !failure.is_final {
            self.failing_since.get_or_insert(now);
            self.paused_until = Some(now + pause_of_endpoint(self.failures));
            self.failures = self.failures.saturating_add(1);
        }
        true
    }

    /// Its owner has enabled the endpoint again: everything is tried at once.
    pub(super) fn resume(&mut self, now: Timestamp) {
        (self.failures, self.failing_since, self.paused_until) = (0, None, None);
        self.waiting.iter_mut().for_each(|waiting| waiting.next_attempt_at = now);
    }

    /// Puts dead letters back to the end of the queue, as far as there is room. Answers how many.
    pub(super) fn resend(&mut self, id: Option<Uuid>, now: Timestamp) -> u32 {
        let mut count = 0;
        for letter in std::mem::take(&mut self.dead) {
            let is_wanted = id.is_none_or(|id| letter.message.id == id);
            let has_room =
                self.waiting.len() < WAITING_MOST && bytes(&self.waiting) + letter.message.body.len() <= WAITING_BYTES;
            if is_wanted && has_room {
                self.waiting.push_back(Waiting { since: now, attempts: 0, next_attempt_at: now, ..letter });
                count += 1;
            } else {
                self.dead.push_back(letter);
            }
        }
        if count > 0 {
            self.paused_until = None;
        }
        count
    }

    /// Forgets dead letters. Answers how many.
    pub(super) fn dismiss(&mut self, id: Option<Uuid>) -> u32 {
        let before = self.dead.len();
        self.dead.retain(|letter| id.is_some_and(|id| letter.message.id != id));
        u32::try_from(before - self.dead.len()).unwrap_or(u32::MAX)
    }

    fn take(&mut self, id: Uuid) -> Option<Waiting> {
        let at = self.waiting.iter().position(|waiting| waiting.message.id == id)?;
        self.waiting.remove(at)
    }

    fn bury(&mut self, waiting: Waiting, why: String) {
        if waiting.message.body.len() > BODY_MOST {
            // Nothing that long is kept.
            self.forgotten = self.forgotten.saturating_add(1);
            return;
        }
        self.dead.push_back(Waiting { last_error: Some(why), ..waiting });
        while self.dead.len() > DEAD_MOST || bytes(&self.dead) > DEAD_BYTES {
            self.dead.pop_front();
            self.forgotten = self.forgotten.saturating_add(1);
        }
    }

    fn show(&mut self, of: &Waiting, at: Timestamp, error: Option<String>) {
        let Message { id, event, .. } = of.message.clone();
        self.attempts.push_back(Attempt { message_id: id, event, at, error });
        while self.attempts.len() > SHOWN_MOST {
            self.attempts.pop_front();
        }
    }
}

fn bytes(messages: &VecDeque<Waiting>) -> usize {
    messages.iter().map(|waiting| waiting.message.body.len()).sum()
}

/// The pause after that many attempts, give or take a tenth, so that what failed together does not come back together.
fn pause(attempts: u32, failure: &Failure, seed: u128) -> TimeDelta {
    let step = usize::try_from(attempts.saturating_sub(1)).unwrap_or(usize::MAX).min(PAUSES.len() - 1);
    let milliseconds = PAUSES[step] * 1000;
    let jitter = i64::try_from(seed % 201).unwrap_or_default() - 100;
    let paused = TimeDelta::milliseconds(milliseconds + milliseconds * jitter / 1000);
    let asked = i64::from(failure.retry_after_seconds.unwrap_or(0)).min(RETRY_AFTER_MOST);
    paused.max(TimeDelta::seconds(asked))
}

fn pause_of_endpoint(failures: u32) -> TimeDelta {
    (FIRST_PAUSE * 2_i32.pow(failures.min(12))).min(LONGEST_PAUSE)
}
