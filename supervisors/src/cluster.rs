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
pub mod process;
pub mod requests;

use crate::config::Role;
use clock::Clock;
use domain::commit::Epoch;
use domain::{MemberId, Shard, Timestamp};
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

/// A member's last beat in Postgres. Its age is measured here, on a monotonic clock: Postgres' own clock can be set.
#[derive(Clone, Copy, Debug)]
pub struct Beat {
    /// Tells it from other beats.
    pub at: Timestamp,
    since: Instant,
    /// It was the first that this process saw of the member, and old by Postgres' clock.
    was_old: bool,
}

impl Beat {
    /// No other has been seen for so long that the member does not answer from its memory any more.
    fn is_silent(self, now: Instant) -> bool {
        now.duration_since(self.since) >= SILENCE
    }
}

#[derive(Clone, Default)]
pub struct Seen {
    pub living: Vec<Heard>,
    pub shards: Vec<Ownership>,
    /// When each member was heard over NATS last.
    pub heard: BTreeMap<MemberId, Instant>,
    /// The last beat in Postgres of every member that has a row there.
    pub beats: BTreeMap<MemberId, Beat>,
    /// Of this member's own last renewal in Postgres, counted from before it was sent.
    pub renewed_at: Option<Instant>,
    /// A renewal after a lapse. Another member may have taken shards in the meantime, so that it counts when the shards have been read
    /// after it.
    pub renewed_after_lapse: Option<Instant>,
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

    /// These members have rows in the books at `now`. Answers those that live.
    pub fn watch(&mut self, members: Vec<Heard>, now: Instant) -> Vec<Heard> {
        let beat = |heard: &Heard| match self.beats.get(&heard.member.id) {
            Some(beat) if beat.at == heard.beat_at => *beat,
            Some(_) => Beat { at: heard.beat_at, since: now, was_old: false },
            None => Beat { at: heard.beat_at, since: now, was_old: heard.silent_for >= SILENCE },
        };
        self.beats = members.iter().map(|heard| (heard.member.id, beat(heard))).collect();
        let lives =
            |heard: &Heard| self.beats.get(&heard.member.id).is_some_and(|it| !it.was_old && !it.is_silent(now));
        members.into_iter().filter(lives).collect()
    }

    /// Whether a member answers from its memory no more, as far as Postgres tells: it has no row there, or has not beaten for long enough.
    #[must_use]
    pub fn has_fallen_silent(&self, member: MemberId, now: Instant) -> bool {
        self.beats.get(&member).is_none_or(|beat| beat.is_silent(now))
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

    /// Takes in what was read of the books at `now`, every member with a row among it. Answers those that live.
    pub fn learn(&self, members: Vec<Heard>, shards: &[Ownership], now: Instant) -> Vec<Heard> {
        self.note(|seen| {
            seen.read(now);
            seen.heard.retain(|_, at| now.duration_since(*at) < hearing::HEARD_WITHIN * 5);
            seen.living = seen.watch(members, now);
            seen.shards = shards.to_vec();
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
        self.seen().living
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

    /// A renewal that was sent at `before` has been made. Answers whether the one before it had lapsed; then the renewal counts with
    /// [`View::confirm`].
    pub fn renewed(&self, before: Instant) -> bool {
        let lapsed = !self.is_fresh();
        self.note(|seen| {
            let renewal = if lapsed { &mut seen.renewed_after_lapse } else { &mut seen.renewed_at };
            *renewal = Some(before);
        });
        lapsed
    }

    /// The shards have been read since `renewal` was made, and followed.
    pub fn confirm(&self, renewal: Instant) {
        self.note(|seen| seen.renewed_at = seen.renewed_at.max(Some(renewal)));
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
        Heard { member, beat_at: started_at, silent_for: Duration::ZERO }
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
            view.learn(living.to_vec(), &shards, Instant::now());
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

    fn beating(n: u128, second: i64, silent_for: Duration) -> Heard {
        let at = |second| domain::Timestamp::UNIX_EPOCH + chrono::TimeDelta::seconds(second);
        let id = MemberId(Uuid::from_u128(n));
        let member = Member { id, name: n.to_string(), started_at: at(0), details: serde_json::Value::Null };
        Heard { member, beat_at: at(second), silent_for }
    }

    #[test]
    fn a_step_of_postgres_clock_makes_no_member_silent() {
        let (other, begin, day) = (MemberId(Uuid::from_u128(2)), Instant::now(), Duration::from_secs(86_400));
        let mut seen = Seen::default();
        assert_eq!(seen.watch(vec![beating(2, 1, Duration::ZERO)], begin).len(), 1);
        let moment = |millis| begin + Duration::from_millis(millis);
        assert_eq!(seen.watch(vec![beating(2, 1, day)], moment(500)).len(), 1, "the clock went a day ahead");
        assert!(!seen.has_fallen_silent(other, moment(500)));
        assert_eq!(seen.watch(vec![beating(2, -86_400, Duration::ZERO)], moment(1000)).len(), 1, "and two days back");
        assert!(
            seen.watch(vec![beating(2, -86_400, Duration::ZERO)], moment(4000)).is_empty(),
            "it has not beaten since"
        );
        assert!(seen.has_fallen_silent(other, moment(4000)));
    }

    #[test]
    fn a_member_that_was_silent_before_this_process_came_is_watched_before_its_shards_go() {
        let (other, begin, minute) = (MemberId(Uuid::from_u128(2)), Instant::now(), Duration::from_secs(60));
        let mut seen = Seen::default();
        assert!(seen.watch(vec![beating(2, 1, minute)], begin).is_empty(), "nothing is assigned to it");
        assert!(!seen.has_fallen_silent(other, begin), "the clock may have been set");
        assert!(seen.watch(vec![beating(2, 1, minute)], begin + SILENCE).is_empty());
        assert!(seen.has_fallen_silent(other, begin + SILENCE));
        assert!(seen.watch(Vec::new(), begin).is_empty());
        assert!(seen.has_fallen_silent(other, begin), "it has no row any more");
    }

    #[test]
    fn a_renewal_after_a_lapse_counts_when_the_shards_were_read() {
        let view = View::new(beating(1, 0, Duration::ZERO).member);
        let renewal = Instant::now();
        assert!(view.renewed(renewal));
        assert!(!view.is_fresh());
        view.confirm(renewal);
        assert!(view.is_fresh());
        assert!(!view.renewed(Instant::now()), "the next one follows in time");
    }

    #[test]
    fn who_was_heard_long_ago_is_not_heard() {
        let (other, begin) = (MemberId(Uuid::from_u128(2)), Instant::now());
        let seen = Seen { heard: BTreeMap::from([(other, begin)]), ..Seen::default() };
        assert!(seen.hears(other, begin + hearing::HEARD_WITHIN / 2));
        assert!(!seen.hears(other, begin + hearing::HEARD_WITHIN));
    }
}
