//! Ownership of shards and messages between members (design 6): Postgres decides ownership; NATS carries heartbeats and all
//! messages.
//!
//! | module | what |
//! | --- | --- |
//! | `shard_assignment`, `shard_takeover` | which member owns which shards; the takeover of those that it should own |
//! | `heartbeat`, `failure_detector`, `clock` | heartbeats; the detection of partitioned members; the clock that members share |
//! | `parked_marks` | entities that another member has parked |
//! | `bus`, `command_forwarding`, `member_queries` | messages between members; commands to the owner of an entity; queries to all members |
//! | `authentication`, `process_identity` | who has sent a message; which process a member is |
//! | `nats`, `nats_permissions`, `stream_copies`, `recovery_stream` | the connection to NATS; its permissions; the copies of its streams; recovery marks |

pub mod authentication;
pub mod bus;
pub mod clock;
pub mod command_forwarding;
pub mod failure_detector;
mod heartbeat;
pub mod member_queries;
pub mod nats;
pub mod nats_permissions;
pub mod parked_marks;
pub mod process_identity;
pub mod recovery_stream;
pub mod shard_assignment;
pub mod shard_takeover;
pub mod stream_copies;

use crate::process_roles::ProcessRole;
use clock::MemberClock;
use domain::commit::Epoch;
use domain::{MemberId, Shard, Timestamp};
use persistence::membership::{Member, MemberHeartbeat, Ownership};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// How often a member writes its heartbeat to Postgres.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);

/// After this time without a heartbeat in Postgres a member's shards may be taken over. What it tries to commit afterwards is refused
/// by the epoch, so that the number decides about speed and never about correctness.
pub const FAILURE_TIMEOUT: Duration = Duration::from_secs(3);

/// A shard is handed over only to a member whose last heartbeat is no older: one that has missed a heartbeat may be failing.
pub const RECENT_HEARTBEAT: Duration = Duration::from_millis(1500);

/// What this member knows of the cluster, as it was last read.
pub struct ClusterView {
    pub me: Member,
    pub clock: MemberClock,
    state: Mutex<ClusterState>,
    owners: watch::Sender<Owners>,
}

/// The owner of a shard, with the epoch of the ownership.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardOwner {
    pub member: MemberId,
    pub epoch: Epoch,
}

/// The owner of each shard.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Owners(BTreeMap<Shard, ShardOwner>);

impl Owners {
    /// `None` where no member owns the shard, as far as this one has read.
    #[must_use]
    pub fn of(&self, shard: Shard) -> Option<ShardOwner> {
        self.0.get(&shard).copied()
    }
}

/// A member's last heartbeat in Postgres. Its age is measured here, on a monotonic clock: Postgres' own clock can be set.
#[derive(Clone, Copy, Debug)]
pub struct ObservedHeartbeat {
    /// Distinguishes it from other heartbeats.
    pub at: Timestamp,
    since: Instant,
    /// It was the first that this process read of the member, and already old by Postgres' clock.
    was_old: bool,
}

impl ObservedHeartbeat {
    /// No newer heartbeat was read for so long that the member no longer answers from its memory.
    fn is_expired(self, now: Instant) -> bool {
        now.duration_since(self.since) >= FAILURE_TIMEOUT
    }
}

#[derive(Clone, Default)]
pub struct ClusterState {
    pub living: Vec<MemberHeartbeat>,
    pub shards: Vec<Ownership>,
    /// When the last message of each member arrived over NATS.
    pub last_message_at: BTreeMap<MemberId, Instant>,
    /// The last heartbeat in Postgres of every member that has a row there.
    pub heartbeats: BTreeMap<MemberId, ObservedHeartbeat>,
    /// The time of this member's own last heartbeat in Postgres, taken before it was sent.
    pub renewed_at: Option<Instant>,
    /// A heartbeat after the lease had lapsed. Another member may have taken over shards in the meantime, so that it renews the lease only
    /// when the shards have been read after it.
    pub renewed_after_lapse: Option<Instant>,
    /// The others receive each other's messages and not this member's: it owns nothing until they do.
    pub partitioned: bool,
    /// The table of members was read without a gap since then. A member that did not read does not know which others were silent.
    pub watching_since: Option<Instant>,
    read_at: Option<Instant>,
}

impl ClusterState {
    /// Records that the table of members was read at `now`.
    pub fn record_read(&mut self, now: Instant) {
        let gap = self.read_at.is_none_or(|before| now.duration_since(before) > FAILURE_TIMEOUT / 2);
        if gap {
            self.watching_since = Some(now);
        }
        self.read_at = Some(now);
    }

    /// Takes in the rows of all members, read at `now`. Returns those that live.
    pub fn record_heartbeats(&mut self, members: Vec<MemberHeartbeat>, now: Instant) -> Vec<MemberHeartbeat> {
        let beat = |heartbeat: &MemberHeartbeat| match self.heartbeats.get(&heartbeat.member.id) {
            Some(beat) if beat.at == heartbeat.heartbeat_at => *beat,
            Some(_) => ObservedHeartbeat { at: heartbeat.heartbeat_at, since: now, was_old: false },
            None => ObservedHeartbeat {
                at: heartbeat.heartbeat_at,
                since: now,
                was_old: heartbeat.silent_for >= FAILURE_TIMEOUT,
            },
        };
        self.heartbeats = members.iter().map(|heartbeat| (heartbeat.member.id, beat(heartbeat))).collect();
        let lives = |heartbeat: &MemberHeartbeat| {
            self.heartbeats.get(&heartbeat.member.id).is_some_and(|it| !it.was_old && !it.is_expired(now))
        };
        members.into_iter().filter(lives).collect()
    }

    /// Whether a member's heartbeat in Postgres has expired, so that it no longer answers from its memory: it has no row, or an old one.
    #[must_use]
    pub fn heartbeat_expired(&self, member: MemberId, now: Instant) -> bool {
        self.heartbeats.get(&member).is_none_or(|beat| beat.is_expired(now))
    }

    /// The members in the table that have had no newer heartbeat in Postgres for so long. None, while this member has not read the table
    /// for as long without a gap: then it does not know which were silent.
    #[must_use]
    pub fn silent_members(&self, for_at_least: Duration, now: Instant) -> Vec<MemberId> {
        let is_reading = self.read_at.is_some_and(|at| now.duration_since(at) <= FAILURE_TIMEOUT / 2);
        let has_watched = self.watching_since.is_some_and(|since| now.duration_since(since) >= for_at_least);
        let silent = |beat: &ObservedHeartbeat| now.duration_since(beat.since) >= for_at_least;
        let members = self.heartbeats.iter().filter(|(_, beat)| is_reading && has_watched && silent(beat));
        members.map(|(member, _)| *member).collect()
    }

    /// Whether a message of the member has arrived recently over NATS.
    #[must_use]
    pub fn has_recent_message_from(&self, member: MemberId, now: Instant) -> bool {
        self.last_message_at
            .get(&member)
            .is_some_and(|at| now.duration_since(*at) < failure_detector::HEARTBEAT_TIMEOUT)
    }

    /// Whether the shards of a member without a heartbeat in Postgres may be taken over at `now`. While this member could not reach
    /// Postgres, the others could not either: then a member that still sends over NATS gets one failure timeout for its next heartbeat.
    #[must_use]
    pub fn may_take_over_from(&self, silent: MemberId, now: Instant) -> bool {
        let watched = self.watching_since.is_some_and(|since| now.duration_since(since) >= FAILURE_TIMEOUT);
        watched || !self.has_recent_message_from(silent, now)
    }
}

impl ClusterView {
    #[must_use]
    pub fn new(me: Member) -> Self {
        Self { me, clock: MemberClock::default(), state: Mutex::default(), owners: watch::Sender::default() }
    }

    /// Takes in the rows of all members and shards, read at `now`. Returns the members that live.
    pub fn update(&self, members: Vec<MemberHeartbeat>, shards: &[Ownership], now: Instant) -> Vec<MemberHeartbeat> {
        self.change_state(|state| {
            state.record_read(now);
            state.last_message_at.retain(|_, at| now.duration_since(*at) < failure_detector::HEARTBEAT_TIMEOUT * 5);
            state.living = state.record_heartbeats(members, now);
            state.shards = shards.to_vec();
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
        self.state().living
    }

    /// Whether the last read is older than `age`.
    #[must_use]
    pub fn is_older_than(&self, age: Duration) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.read_at.is_none_or(|at| at.elapsed() > age)
    }

    /// The owners of the shards, as last read, and their changes.
    #[must_use]
    pub fn owners(&self) -> watch::Receiver<Owners> {
        self.owners.subscribe()
    }

    /// The shards whose owner does not have `role` and that this member processes in its place: they are divided among the living members
    /// with the role. Empty where this member has not read its own row yet.
    #[must_use]
    pub fn shards_without(&self, role: ProcessRole) -> Vec<Shard> {
        let state = self.state();
        let with_role: Vec<_> = state
            .living
            .iter()
            .filter(|heartbeat| has_role(&heartbeat.member, role))
            .map(|heartbeat| heartbeat.member.id)
            .collect();
        if !with_role.contains(&self.me.id) {
            return Vec::new();
        }
        let divided = shard_assignment::assign(&with_role);
        let lacks = |owned: &&Ownership| {
            owned
                .owner
                .is_some_and(|owner| state.living.iter().any(|it| it.member.id == owner) && !with_role.contains(&owner))
        };
        let shards = state.shards.iter().filter(lacks).map(|owned| owned.shard);
        shards.filter(|shard| divided.get(shard) == Some(&self.me.id)).collect()
    }

    /// How many living members have each role. Empty where this member has read no rows yet.
    #[must_use]
    pub fn role_members(&self) -> BTreeMap<&'static str, usize> {
        let living = self.state().living;
        if living.is_empty() {
            return BTreeMap::new();
        }
        let count = |role: ProcessRole| living.iter().filter(|heartbeat| has_role(&heartbeat.member, role)).count();
        ProcessRole::ALL.into_iter().map(|role| (role.name(), count(role))).collect()
    }

    /// Whether a live member's release does not authenticate its messages: during an upgrade of the cluster.
    #[must_use]
    pub fn has_unauthenticated_members(&self) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.living.iter().any(|heartbeat| heartbeat.member.details["authenticates"] != true)
    }

    #[must_use]
    pub fn state(&self) -> ClusterState {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn change_state(&self, change: impl FnOnce(&mut ClusterState)) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// Whether a member has a role, by its own row.
#[must_use]
pub fn has_role(member: &Member, role: ProcessRole) -> bool {
    member.details["roles"].as_array().is_some_and(|roles| roles.iter().any(|it| it == role.name()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use uuid::Uuid;

    fn heartbeat(id: u128, roles: &[&str]) -> MemberHeartbeat {
        let (id, started_at) = (MemberId(Uuid::from_u128(id)), domain::Timestamp::UNIX_EPOCH);
        let member = Member { id, name: id.to_string(), started_at, details: json!({ "roles": roles }) };
        MemberHeartbeat { member, heartbeat_at: started_at, silent_for: Duration::ZERO }
    }

    #[test]
    fn members_with_a_role_divide_the_shards_whose_owner_lacks_it() {
        let living = [
            heartbeat(1, &["entities"]),
            heartbeat(2, &["entities", "billing"]),
            heartbeat(3, &["billing"]),
            heartbeat(4, &["billing"]),
        ];
        let owner = |shard: Shard| living[usize::from(shard.0 % 2)].member.id;
        let owned = |shard| Ownership { shard, owner: Some(owner(shard)), epoch: Epoch(1) };
        let shards: Vec<_> = Shard::all().map(owned).collect();
        let share = |id: usize| {
            let view = ClusterView::new(living[id].member.clone());
            assert!(view.shards_without(ProcessRole::Billing).is_empty(), "it has read nothing yet");
            view.update(living.to_vec(), &shards, Instant::now());
            view.shards_without(ProcessRole::Billing)
        };
        assert!(share(0).is_empty(), "it is of another role");
        let mut divided: Vec<_> = (1..4).flat_map(share).collect();
        divided.sort_unstable();
        let lacking: Vec<_> = Shard::all().filter(|shard| shard.0 % 2 == 0).collect();
        assert_eq!(divided, lacking, "each once");
        assert!((1..4).all(|id| share(id).len() > lacking.len() / 6), "in fair shares");
    }

    #[test]
    fn member_with_heartbeats_over_nats_gets_time_to_return_after_an_outage_of_postgres() {
        let (other, begin) = (MemberId(Uuid::from_u128(2)), Instant::now());
        let mut state = ClusterState::default();
        let at = |seconds: u64| begin + Duration::from_secs(seconds);
        state.record_read(at(0));
        state.record_read(at(1));
        // Ten seconds without Postgres: all heartbeats there are old, and no member is dead.
        state.record_read(at(11));
        assert!(state.may_take_over_from(other, at(11)), "no message of it has arrived");
        state.last_message_at.insert(other, at(11));
        assert!(!state.may_take_over_from(other, at(11)));
        for second in 12..=14 {
            state.record_read(at(second));
            state.last_message_at.insert(other, at(second));
        }
        assert!(
            state.may_take_over_from(other, at(14)),
            "it sends, and does not reach Postgres: it can commit nothing"
        );
    }

    fn heartbeat_at(n: u128, second: i64, silent_for: Duration) -> MemberHeartbeat {
        let at = |second| domain::Timestamp::UNIX_EPOCH + chrono::TimeDelta::seconds(second);
        let id = MemberId(Uuid::from_u128(n));
        let member = Member { id, name: n.to_string(), started_at: at(0), details: serde_json::Value::Null };
        MemberHeartbeat { member, heartbeat_at: at(second), silent_for }
    }

    #[test]
    fn step_of_the_postgres_clock_expires_no_heartbeat() {
        let (other, begin, day) = (MemberId(Uuid::from_u128(2)), Instant::now(), Duration::from_secs(86_400));
        let mut state = ClusterState::default();
        assert_eq!(state.record_heartbeats(vec![heartbeat_at(2, 1, Duration::ZERO)], begin).len(), 1);
        let moment = |millis| begin + Duration::from_millis(millis);
        assert_eq!(
            state.record_heartbeats(vec![heartbeat_at(2, 1, day)], moment(500)).len(),
            1,
            "the clock went a day ahead"
        );
        assert!(!state.heartbeat_expired(other, moment(500)));
        assert_eq!(
            state.record_heartbeats(vec![heartbeat_at(2, -86_400, Duration::ZERO)], moment(1000)).len(),
            1,
            "and two days back"
        );
        assert!(
            state.record_heartbeats(vec![heartbeat_at(2, -86_400, Duration::ZERO)], moment(4000)).is_empty(),
            "no heartbeat since"
        );
        assert!(state.heartbeat_expired(other, moment(4000)));
    }

    #[test]
    fn member_is_silent_only_where_the_table_was_read_without_a_gap() {
        let (living, killed, begin) = (MemberId(Uuid::from_u128(1)), MemberId(Uuid::from_u128(2)), Instant::now());
        let (mut state, long) = (ClusterState::default(), Duration::from_secs(15));
        let at = |second: i64| begin + Duration::from_secs(second.unsigned_abs());
        let read = |state: &mut ClusterState, second| {
            state.record_read(at(second));
            let beats = vec![heartbeat_at(1, second, Duration::ZERO), heartbeat_at(2, 0, Duration::ZERO)];
            state.record_heartbeats(beats, at(second));
        };
        for second in 0..=14 {
            read(&mut state, second);
            assert_eq!(state.silent_members(long, at(second)), [], "after {second} s");
        }
        read(&mut state, 15);
        assert_eq!(state.silent_members(long, at(15)), [killed]);
        // This member hung, or did not reach Postgres: it has seen no heartbeat, and no member is judged.
        assert_eq!(state.silent_members(long, at(100)), []);
        for second in 100..=114 {
            read(&mut state, second);
            assert_eq!(state.silent_members(long, at(second)), [], "after {second} s");
        }
        read(&mut state, 115);
        assert_eq!(state.silent_members(long, at(115)), [killed]);
        assert!(!state.heartbeat_expired(living, at(115)));
    }

    #[test]
    fn member_with_an_old_heartbeat_at_the_first_read_is_watched_before_its_takeover() {
        let (other, begin, minute) = (MemberId(Uuid::from_u128(2)), Instant::now(), Duration::from_secs(60));
        let mut state = ClusterState::default();
        assert!(
            state.record_heartbeats(vec![heartbeat_at(2, 1, minute)], begin).is_empty(),
            "nothing is assigned to it"
        );
        assert!(!state.heartbeat_expired(other, begin), "the clock may have been set");
        assert!(state.record_heartbeats(vec![heartbeat_at(2, 1, minute)], begin + FAILURE_TIMEOUT).is_empty());
        assert!(state.heartbeat_expired(other, begin + FAILURE_TIMEOUT));
        assert!(state.record_heartbeats(Vec::new(), begin).is_empty());
        assert!(state.heartbeat_expired(other, begin), "it has no row any more");
    }

    #[test]
    fn old_message_of_a_member_does_not_count_as_recent() {
        let (other, begin) = (MemberId(Uuid::from_u128(2)), Instant::now());
        let state = ClusterState { last_message_at: BTreeMap::from([(other, begin)]), ..ClusterState::default() };
        assert!(state.has_recent_message_from(other, begin + failure_detector::HEARTBEAT_TIMEOUT / 2));
        assert!(!state.has_recent_message_from(other, begin + failure_detector::HEARTBEAT_TIMEOUT));
    }
}
