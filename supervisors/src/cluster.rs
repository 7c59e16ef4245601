//! Which member owns which shard, and how members reach each other (design 6): Postgres says who owns, NATS says who lives and
//! carries everything.

pub mod assignment;
pub mod bus;
pub mod gather;
pub mod hearing;
pub mod ownership;

use domain::MemberId;
use persistence::cluster::{Heard, Member, Ownership};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often a member says in Postgres that it lives.
pub const BEAT: Duration = Duration::from_secs(1);

/// After so much silence in Postgres a member's shards may be taken. It can commit nothing in that time that the epoch would not
/// refuse afterwards, so that the number decides about speed and never about correctness.
pub const SILENCE: Duration = Duration::from_secs(3);

/// How long a renewal lets a member answer from its memory: it stops before the others may take its shards.
pub const LEASE: Duration = Duration::from_millis(2500);

/// A shard is given only to a member whose last beat is no older: one that has missed a beat may be going.
pub const PROMPT: Duration = Duration::from_millis(1500);

/// What this member knows of the cluster, as it was read last.
pub struct View {
    pub me: Member,
    seen: Mutex<Seen>,
}

#[derive(Clone, Default)]
pub struct Seen {
    pub living: Vec<Heard>,
    pub shards: Vec<Ownership>,
    /// When each member was heard over NATS last.
    pub heard: BTreeMap<MemberId, Instant>,
    /// Of this member's own last renewal in Postgres, counted from before it was sent.
    pub renewed_at: Option<Instant>,
    /// The others hear each other and not this member: it owns nothing until they do.
    pub cut_off: bool,
    /// The books were read without a gap since then. Whoever was not looking does not know who was silent.
    pub watching_since: Option<Instant>,
    read_at: Option<Instant>,
}

impl Seen {
    /// The books were read at `now`.
    pub fn read(&mut self, now: Instant) {
        let gap = self.read_at.is_none_or(|before| now.duration_since(before) > SILENCE / 2);
        if gap {
            self.watching_since = Some(now);
        }
        self.read_at = Some(now);
    }

    /// Over NATS, lately.
    #[must_use]
    pub fn hears(&self, member: MemberId, now: Instant) -> bool {
        self.heard.get(&member).is_some_and(|at| now.duration_since(*at) < hearing::HEARD_WITHIN)
    }

    /// Whether a member that is silent in Postgres may lose its shards by `now`. While this member could not read the books, nobody
    /// could write them: then whoever still speaks over NATS gets as long as silence takes to be heard in Postgres again.
    #[must_use]
    pub fn may_take_from(&self, silent: MemberId, now: Instant) -> bool {
        let watched = self.watching_since.is_some_and(|since| now.duration_since(since) >= SILENCE);
        watched || !self.hears(silent, now)
    }
}

impl View {
    #[must_use]
    pub fn new(me: Member) -> Self {
        Self { me, seen: Mutex::default() }
    }

    #[must_use]
    pub fn seen(&self) -> Seen {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn note(&self, change: impl FnOnce(&mut Seen)) {
        change(&mut self.seen.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// True while this member's own renewal is fresh: only then it may answer from its memory.
    #[must_use]
    pub fn is_fresh(&self) -> bool {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.renewed_at.is_some_and(|at| at.elapsed() < LEASE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    #[test]
    fn after_an_outage_of_postgres_who_speaks_over_nats_gets_time_to_come_back() {
        let (other, begin) = (MemberId(Uuid::from_u128(2)), Instant::now());
        let mut seen = Seen::default();
        let at = |seconds: u64| begin + Duration::from_secs(seconds);
        seen.read(at(0));
        seen.read(at(1));
        // Ten seconds without Postgres; everybody's beats there are old, and nobody is dead.
        seen.read(at(11));
        assert!(seen.may_take_from(other, at(11)), "nothing at all is heard of it");
        seen.heard.insert(other, at(11));
        assert!(!seen.may_take_from(other, at(11)));
        for second in 12..=14 {
            seen.read(at(second));
            seen.heard.insert(other, at(second));
        }
        assert!(seen.may_take_from(other, at(14)), "it speaks, and does not reach Postgres: it can commit nothing");
    }

    #[test]
    fn who_was_heard_long_ago_is_not_heard() {
        let (other, begin) = (MemberId(Uuid::from_u128(2)), Instant::now());
        let seen = Seen { heard: BTreeMap::from([(other, begin)]), ..Seen::default() };
        assert!(seen.hears(other, begin + hearing::HEARD_WITHIN / 2));
        assert!(!seen.hears(other, begin + hearing::HEARD_WITHIN));
    }
}
