//! Which member owns which shard, and how members reach each other (design 6): Postgres says who owns, NATS says who lives and
//! carries everything.

pub mod assignment;
pub mod authentication;
pub mod bus;
pub mod clock;
pub mod gather;
pub mod hearing;
pub mod nats;
pub mod ownership;
pub mod permissions;
pub mod requests;

use crate::config::Role;
use clock::Clock;
use domain::commit::Epoch;
use domain::{MemberId, Shard};
use persistence::cluster::{Heard, Member, Ownership};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::watch;

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
    pub clock: Clock,
    seen: Mutex<Seen>,
    owners: watch::Sender<Owners>,
}

/// The owner of a shard, and its term.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardOwner {
    pub member: MemberId,
    pub epoch: Epoch,
}

/// Who owns which shard.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Owners(BTreeMap<Shard, ShardOwner>);

impl Owners {
    /// `None` where no member does, as far as this one has read.
    #[must_use]
    pub fn of(&self, shard: Shard) -> Option<ShardOwner> {
        self.0.get(&shard).copied()
    }
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
        Self { me, clock: Clock::default(), seen: Mutex::default(), owners: watch::Sender::default() }
    }

    /// Takes in what was read of the books at `now`.
    pub fn learn(&self, living: &[Heard], shards: &[Ownership], now: Instant) {
        self.note(|seen| {
            seen.read(now);
            seen.heard.retain(|_, at| now.duration_since(*at) < hearing::HEARD_WITHIN * 5);
            (seen.living, seen.shards) = (living.to_vec(), shards.to_vec());
        });
        let owner = |at: &Ownership| Some((at.shard, ShardOwner { member: at.owner?, epoch: at.epoch }));
        let owners = Owners(shards.iter().filter_map(owner).collect());
        self.owners.send_if_modified(|before| {
            let changed = *before != owners;
            if changed {
                *before = owners;
            }
            changed
        });
    }

    /// Whether the books were read longer ago than that.
    #[must_use]
    pub fn is_older_than(&self, age: Duration) -> bool {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.read_at.is_none_or(|at| at.elapsed() > age)
    }

    /// Who owns the shards, as it was read last and from then on.
    #[must_use]
    pub fn owners(&self) -> watch::Receiver<Owners> {
        self.owners.subscribe()
    }

    /// The shards whose owner does not have `role`, and that this member works on for it: they are divided among the living members with
    /// the role. Empty where this member has not read of itself yet.
    #[must_use]
    pub fn shards_without(&self, role: Role) -> Vec<Shard> {
        let seen = self.seen();
        let having: Vec<_> =
            seen.living.iter().filter(|heard| has_role(&heard.member, role)).map(|heard| heard.member.id).collect();
        if !having.contains(&self.me.id) {
            return Vec::new();
        }
        let divided = assignment::assign(&having);
        let lacks = |owned: &&Ownership| {
            owned
                .owner
                .is_some_and(|owner| seen.living.iter().any(|it| it.member.id == owner) && !having.contains(&owner))
        };
        let shards = seen.shards.iter().filter(lacks).map(|owned| owned.shard);
        shards.filter(|shard| divided.get(shard) == Some(&self.me.id)).collect()
    }

    /// How many living members have each role. Empty where this member has not read of any yet.
    #[must_use]
    pub fn role_members(&self) -> BTreeMap<&'static str, usize> {
        let living = self.seen().living;
        if living.is_empty() {
            return BTreeMap::new();
        }
        let count = |role: Role| living.iter().filter(|heard| has_role(&heard.member, role)).count();
        Role::ALL.into_iter().map(|role| (role.name(), count(role))).collect()
    }

    /// Whether a member lives that is of a release which does not authenticate its messages: while a cluster is upgraded.
    #[must_use]
    pub fn has_unauthenticated_members(&self) -> bool {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.living.iter().any(|heard| heard.member.details["authenticates"] != true)
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

/// Whether a member has a role, by what it says of itself.
#[must_use]
pub fn has_role(member: &Member, role: Role) -> bool {
    member.details["roles"].as_array().is_some_and(|roles| roles.iter().any(|it| it == role.name()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use uuid::Uuid;

    fn heard(id: u128, roles: &[&str]) -> Heard {
        let (id, started_at) = (MemberId(Uuid::from_u128(id)), domain::Timestamp::UNIX_EPOCH);
        let member = Member { id, name: id.to_string(), started_at, details: json!({ "roles": roles }) };
        Heard { member, silent_for: Duration::ZERO }
    }

    #[test]
    fn members_with_a_role_divide_the_shards_whose_owner_lacks_it() {
        let living = [
            heard(1, &["entities"]),
            heard(2, &["entities", "billing"]),
            heard(3, &["billing"]),
            heard(4, &["billing"]),
        ];
        let owner = |shard: Shard| living[usize::from(shard.0 % 2)].member.id;
        let owned = |shard| Ownership { shard, owner: Some(owner(shard)), epoch: Epoch(1) };
        let shards: Vec<_> = Shard::all().map(owned).collect();
        let share = |id: usize| {
            let view = View::new(living[id].member.clone());
            assert!(view.shards_without(Role::Billing).is_empty(), "it has read nothing yet");
            view.learn(&living, &shards, Instant::now());
            view.shards_without(Role::Billing)
        };
        assert!(share(0).is_empty(), "it is of another role");
        let mut divided: Vec<_> = (1..4).flat_map(share).collect();
        divided.sort_unstable();
        let lacking: Vec<_> = Shard::all().filter(|shard| shard.0 % 2 == 0).collect();
        assert_eq!(divided, lacking, "each once");
        assert!((1..4).all(|id| share(id).len() > lacking.len() / 6), "in fair shares");
    }

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
