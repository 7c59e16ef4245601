//! Who is cut off: a member that Postgres hears and the others do not hear over NATS, while some of them hear each other (design 6).
//! Nobody can reach its entities, so that it has to do without them.
//!
//! Every member says in its beat in Postgres whom it hears over NATS, itself among them: that it hears itself shows that its own link
//! carries. From what all say each computes who talks with whom. A member withdraws itself when it stands outside; the others learn
//! it from the books, and nobody decides it about another (`deploy/decisions/0005`).

use domain::MemberId;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Four beats: who was not heard for so long is not heard.
pub const HEARD_WITHIN: Duration = Duration::from_secs(2);

/// How long a member must stand outside, or inside again, before it draws the consequence. Members come back to a NATS server that was
/// restarted one after the other, and no shard should move for that.
const STEADY: Duration = Duration::from_secs(3);

/// Whom each living member says that it hears. Members that have not said so (yet, or being of an earlier release) are absent.
pub type Hearing = BTreeMap<MemberId, BTreeSet<MemberId>>;

/// Does `me` stand outside, while others hear each other? `None` where that cannot be told, and all stay where they are: nobody hears
/// anybody, since NATS is gone for all; or the cluster has fallen into equal parts, none of which is more the cluster than another.
#[must_use]
pub fn is_cut_off(me: MemberId, hearing: &Hearing) -> Option<bool> {
    let mine = hearing.contains_key(&me).then(|| party_of(me, hearing))?;
    let voice = |party: &BTreeSet<MemberId>| if talks(party, hearing) { party.len() } else { 0 };
    let others = hearing.keys().filter(|id| !mine.contains(id)).map(|id| voice(&party_of(*id, hearing)));
    match others.max().unwrap_or(0).cmp(&voice(&mine)) {
        Ordering::Greater => Some(true),
        Ordering::Less => Some(false),
        Ordering::Equal => None,
    }
}

/// Those who can reach each other, directly or by way of a third, and who hear each other both ways.
fn party_of(member: MemberId, hearing: &Hearing) -> BTreeSet<MemberId> {
    let hears = |a: &MemberId, b: &MemberId| hearing.get(a).is_some_and(|heard| heard.contains(b));
    let mut party = BTreeSet::from([member]);
    let mut newest = vec![member];
    while let Some(next) = newest.pop() {
        let joined = hearing.keys().filter(|id| hears(&next, id) && hears(id, &next) && !party.contains(id));
        newest.extend(joined.copied().collect::<Vec<_>>());
        party.extend(newest.iter().copied());
    }
    party
}

fn talks(party: &BTreeSet<MemberId>, hearing: &Hearing) -> bool {
    let hears_itself = |id: &MemberId| hearing.get(id).is_some_and(|heard| heard.contains(id));
    party.len() > 1 || party.iter().any(hears_itself)
}

/// A member's own standing: it changes only when what is seen has been so for [`STEADY`].
#[derive(Debug, Default)]
pub struct Standing {
    cut_off: bool,
    differs_since: Option<Instant>,
}

impl Standing {
    /// Takes in what is seen now; the answer says whether the member counts itself out.
    pub fn look(&mut self, cut_off: Option<bool>, now: Instant) -> bool {
        if cut_off.is_none_or(|cut_off| cut_off == self.cut_off) {
            self.differs_since = None;
        } else if now.duration_since(*self.differs_since.get_or_insert(now)) >= STEADY {
            (self.cut_off, self.differs_since) = (!self.cut_off, None);
        }
        self.cut_off
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    fn id(n: u128) -> MemberId {
        MemberId(Uuid::from_u128(n))
    }

    /// `says(&[(1, &[1, 2]), …])`: member 1 hears itself and 2.
    fn says(who: &[(u128, &[u128])]) -> Hearing {
        who.iter().map(|(me, heard)| (id(*me), heard.iter().map(|n| id(*n)).collect())).collect()
    }

    fn cut_off(hearing: &Hearing) -> Vec<u128> {
        hearing.keys().filter(|id| is_cut_off(**id, hearing) == Some(true)).map(|id| id.0.as_u128()).collect()
    }

    #[test]
    fn whom_nobody_hears_while_others_hear_each_other_is_cut_off() {
        assert_eq!(cut_off(&says(&[(1, &[1, 2]), (2, &[1, 2]), (3, &[])])), [3]);
        assert_eq!(cut_off(&says(&[(1, &[1, 2]), (2, &[1, 2]), (3, &[3])])), [3], "it talks with itself alone");
        assert_eq!(cut_off(&says(&[(1, &[1, 2]), (2, &[1, 2]), (3, &[1, 2])])), [3], "it hears and is not heard");
        assert_eq!(cut_off(&says(&[(1, &[1]), (2, &[])])), [2], "of two, the one whose link is dead");
    }

    #[test]
    fn nats_gone_for_all_leaves_everybody_where_they_are() {
        for hearing in [says(&[(1, &[]), (2, &[]), (3, &[])]), says(&[(1, &[])])] {
            assert!(hearing.keys().all(|id| is_cut_off(*id, &hearing).is_none()));
        }
    }

    #[test]
    fn equal_parts_stay_as_they_are() {
        assert!(cut_off(&says(&[(1, &[1, 2]), (2, &[1, 2]), (3, &[3, 4]), (4, &[3, 4])])).is_empty());
        assert!(cut_off(&says(&[(1, &[1]), (2, &[2])])).is_empty());
    }

    #[test]
    fn a_member_that_has_not_said_whom_it_hears_is_not_judged() {
        let hearing = says(&[(1, &[1, 2]), (2, &[1, 2])]);
        assert_eq!(is_cut_off(id(3), &hearing), None);
    }

    #[test]
    fn a_moments_silence_moves_nothing() {
        let (mut standing, begin) = (Standing::default(), Instant::now());
        let mut look = |cut_off, half_steady| standing.look(cut_off, begin + STEADY / 2 * half_steady);
        assert!(!look(Some(true), 0));
        assert!(!look(Some(true), 1));
        assert!(!look(Some(false), 1));
        assert!(!look(Some(true), 2), "it counts from anew");
        assert!(look(Some(true), 4));
        assert!(look(None, 9), "who is out stays out while nothing can be told");
        assert!(look(Some(false), 10));
        assert!(!look(Some(false), 12));
    }

    #[test]
    fn whatever_four_members_hear_somebody_is_left() {
        for graph in (0..1_u32 << 16).step_by(5) {
            let heard = |me: u32| (0..4).filter(move |other| graph >> (me * 4 + other) & 1 == 1);
            let hearing: Hearing =
                (0..4).map(|me| (id(me.into()), heard(me).map(|other| id(other.into())).collect())).collect();
            assert!(cut_off(&hearing).len() < 4, "{hearing:?}");
        }
    }
}
