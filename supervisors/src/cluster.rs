//! Which member owns which shard, and how members reach each other (design 6): Postgres says who owns, NATS says who lives and
//! carries everything.

pub mod assignment;
pub mod bus;
pub mod gather;
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
