//! The queue of an endpoint's messages: backoff, bounds, dead letters.

use crate::retry;
use crate::state_machine::{Timestamp, TransitionContext};
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use uuid::Uuid;

/// The largest body of a message, in bytes.
pub const BODY_MOST: usize = 8 * 1024;
/// The bounds of queued messages and of the bytes of their bodies.
const MAX_QUEUED: usize = 100;
const MAX_QUEUED_BYTES: usize = 96 * 1024;
/// The bounds of dead letters and of the bytes of their bodies. Beyond them the oldest are dropped, and counted.
const MAX_DEAD: usize = 50;
const MAX_DEAD_BYTES: usize = 64 * 1024;
/// The bound of the attempts that are shown.
const MAX_ATTEMPTS_SHOWN: usize = 20;
/// The pauses before the attempts at one message, in seconds (Standard Webhooks, *Deliverability and reliability*).
const PAUSES: [i64; 9] = [5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400];
/// A message that was queued for longer is a dead letter at its next failure.
const MAX_RETRY_TIME: TimeDelta = TimeDelta::days(3);
/// The pause of the endpoint after a failure, which doubles with each further one.
const FIRST_PAUSE: TimeDelta = TimeDelta::seconds(5);
const LONGEST_PAUSE: TimeDelta = TimeDelta::minutes(15);
/// The longest pause that a receiver may ask for, in seconds.
const MAX_RETRY_AFTER: i64 = 86_400;

/// Why an attempt failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeliveryFailure {
    pub why: String,
    /// Another attempt at this message would fail, too.
    pub is_final: bool,
    /// The receiver answers that it is gone.
    pub is_gone: bool,
    /// The pause that the receiver asks for.
    pub retry_after_seconds: Option<u32>,
}

/// A message for a receiver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueuedNotification {
    /// The event's id, by which a receiver detects a duplicate.
    pub id: Uuid,
    /// The event's type.
    pub event: String,
    /// The CloudEvent as it is sent, the same in each attempt.
    pub body: String,
}

/// A message in the queue, or among the dead letters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueEntry {
    pub message: QueuedNotification,
    pub since: Timestamp,
    pub attempts: u32,
    /// Meaningless in a dead letter.
    pub next_attempt_at: Timestamp,
    pub last_error: Option<String>,
}

/// The result of an attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeliveryAttempt {
    pub message_id: Uuid,
    pub event: String,
    pub at: Timestamp,
    /// `None`: the receiver accepted it.
    pub error: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeliveryQueue {
    /// Oldest first.
    pub waiting: VecDeque<QueueEntry>,
    /// Oldest first.
    pub dead: VecDeque<QueueEntry>,
    /// The number of dead letters that were dropped beyond the bound.
    pub forgotten: u64,
    /// The last ones, oldest first.
    pub attempts: VecDeque<DeliveryAttempt>,
    /// Failures since the last success.
    pub failures: u32,
    pub failing_since: Option<Timestamp>,
    /// No attempt before this time.
    pub paused_until: Option<Timestamp>,
}

impl DeliveryQueue {
    /// The first message that is due.
    #[must_use]
    pub fn due(&self, now: Timestamp) -> Option<&QueueEntry> {
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

    /// True where the message is queued or dead, or its attempt is among the last ones.
    pub(super) fn contains(&self, id: Uuid) -> bool {
        let is_here = |waiting: &QueueEntry| waiting.message.id == id;
        self.waiting.iter().any(is_here)
            || self.dead.iter().any(is_here)
            || self.attempts.iter().any(|attempt| attempt.message_id == id)
    }

    pub(super) fn push(&mut self, message: QueuedNotification, now: Timestamp) {
        let waiting = QueueEntry { message, since: now, attempts: 0, next_attempt_at: now, last_error: None };
        let bytes = bytes(&self.waiting) + waiting.message.body.len();
        if waiting.message.body.len() > BODY_MOST {
            self.add_dead_letter(waiting, "the message is too long".to_owned());
        } else if self.waiting.len() >= MAX_QUEUED || bytes > MAX_QUEUED_BYTES {
            self.add_dead_letter(waiting, "too many messages wait for this endpoint".to_owned());
        } else {
            self.waiting.push_back(waiting);
        }
    }

    /// False where no such message is queued.
    pub(super) fn delivered(&mut self, id: Uuid, now: Timestamp) -> bool {
        let Some(waiting) = self.take(id) else { return false };
        self.record_attempt(&waiting, now, None);
        (self.failures, self.failing_since, self.paused_until) = (0, None, None);
        true
    }

    /// False where no such message is queued.
    pub(super) fn failed(
        &mut self,
        id: Uuid,
        failure: &DeliveryFailure,
        most: i64,
        ctx: &TransitionContext<'_>,
    ) -> bool {
        let Some(at) = self.waiting.iter().position(|waiting| waiting.message.id == id) else { return false };
        let now = ctx.now;
        let waiting = &mut self.waiting[at];
        waiting.attempts = waiting.attempts.saturating_add(1);
        waiting.last_error = Some(failure.why.clone());
        waiting.next_attempt_at = now + pause(waiting.attempts, failure, ctx.seed);
        let is_dead = failure.is_final || i64::from(waiting.attempts) >= most || now - waiting.since >= MAX_RETRY_TIME;
        let shown = waiting.clone();
        self.record_attempt(&shown, now, Some(failure.why.clone()));
        if is_dead && let Some(waiting) = self.waiting.remove(at) {
            self.add_dead_letter(waiting, failure.why.clone());
        }
        // A final failure concerns the message, and not the receiver.
        if !failure.is_final {
            self.failing_since.get_or_insert(now);
            self.failures = self.failures.saturating_add(1);
            self.paused_until = Some(now + retry::delay(FIRST_PAUSE, self.failures, LONGEST_PAUSE));
        }
        true
    }

    /// Makes all messages due, after its owner has enabled the endpoint again.
    pub(super) fn resume(&mut self, now: Timestamp) {
        (self.failures, self.failing_since, self.paused_until) = (0, None, None);
        self.waiting.iter_mut().for_each(|waiting| waiting.next_attempt_at = now);
    }

    /// Moves dead letters to the end of the queue, as far as there is room. Returns how many.
    pub(super) fn resend(&mut self, id: Option<Uuid>, now: Timestamp) -> u32 {
        let mut count = 0;
        for letter in std::mem::take(&mut self.dead) {
            let is_wanted = id.is_none_or(|id| letter.message.id == id);
            let has_room =
                self.waiting.len() < MAX_QUEUED && bytes(&self.waiting) + letter.message.body.len() <= MAX_QUEUED_BYTES;
            if is_wanted && has_room {
                self.waiting.push_back(QueueEntry { since: now, attempts: 0, next_attempt_at: now, ..letter });
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

    /// Removes dead letters. Returns how many.
    pub(super) fn dismiss(&mut self, id: Option<Uuid>) -> u32 {
        let before = self.dead.len();
        self.dead.retain(|letter| id.is_some_and(|id| letter.message.id != id));
        u32::try_from(before - self.dead.len()).unwrap_or(u32::MAX)
    }

    fn take(&mut self, id: Uuid) -> Option<QueueEntry> {
        let at = self.waiting.iter().position(|waiting| waiting.message.id == id)?;
        self.waiting.remove(at)
    }

    fn add_dead_letter(&mut self, waiting: QueueEntry, why: String) {
        if waiting.message.body.len() > BODY_MOST {
            // A message over the bound is not stored.
            self.forgotten = self.forgotten.saturating_add(1);
            return;
        }
        self.dead.push_back(QueueEntry { last_error: Some(why), ..waiting });
        while self.dead.len() > MAX_DEAD || bytes(&self.dead) > MAX_DEAD_BYTES {
            self.dead.pop_front();
            self.forgotten = self.forgotten.saturating_add(1);
        }
    }

    fn record_attempt(&mut self, of: &QueueEntry, at: Timestamp, error: Option<String>) {
        let QueuedNotification { id, event, .. } = of.message.clone();
        self.attempts.push_back(DeliveryAttempt { message_id: id, event, at, error });
        while self.attempts.len() > MAX_ATTEMPTS_SHOWN {
            self.attempts.pop_front();
        }
    }
}

fn bytes(messages: &VecDeque<QueueEntry>) -> usize {
    messages.iter().map(|waiting| waiting.message.body.len()).sum()
}

/// The pause after that many attempts, with a jitter of a tenth, so that messages that failed together are not retried together.
fn pause(attempts: u32, failure: &DeliveryFailure, seed: u128) -> TimeDelta {
    let step = usize::try_from(attempts.saturating_sub(1)).unwrap_or(usize::MAX).min(PAUSES.len() - 1);
    let milliseconds = PAUSES[step] * 1000;
    let jitter = i64::try_from(seed % 201).unwrap_or_default() - 100;
    let paused = TimeDelta::milliseconds(milliseconds + milliseconds * jitter / 1000);
    let asked = i64::from(failure.retry_after_seconds.unwrap_or(0)).min(MAX_RETRY_AFTER);
    paused.max(TimeDelta::seconds(asked))
}
