//! The assignment of shards to members: rendezvous hashing over the living members, with an even share for each. Every member computes
//! the same from the same set, and a member that joins or leaves moves little but its own share.

use domain::{MemberId, Shard};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

/// The member of each shard. Empty where no member lives.
#[must_use]
pub fn assign(living: &[MemberId]) -> BTreeMap<Shard, MemberId> {
    if living.is_empty() {
        return BTreeMap::new();
    }
    let share = Shard::COUNT.div_ceil(living.len());
    let mut taken: BTreeMap<MemberId, usize> = BTreeMap::new();
    let mut assigned = BTreeMap::new();
    // The highest weights first, so that the order of the shards favours no member.
    let mut wishes: Vec<_> = Shard::all()
        .flat_map(|shard| living.iter().map(move |member| (weight(shard, *member), shard, *member)))
        .collect();
    wishes.sort_unstable_by(|a, b| b.cmp(a));
    for (_, shard, member) in wishes {
        let held = taken.entry(member).or_default();
        if *held < share && !assigned.contains_key(&shard) {
            assigned.insert(shard, member);
            *held += 1;
        }
    }
    assigned
}

fn weight(shard: Shard, member: MemberId) -> u64 {
    let digest = Sha256::new().chain_update([shard.0]).chain_update(member.0.as_bytes()).finalize();
    digest.first_chunk::<8>().map_or(0, |bytes| u64::from_be_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    fn members(n: u128) -> Vec<MemberId> {
        (1..=n).map(|n| MemberId(Uuid::from_u128(n << 64))).collect()
    }

    #[test]
    fn every_shard_is_assigned_and_every_member_has_an_even_share() {
        for n in 1..=7 {
            let assigned = assign(&members(n));
            assert_eq!(assigned.len(), Shard::COUNT);
            let share = Shard::COUNT.div_ceil(usize::try_from(n).unwrap_or(1));
            for member in members(n) {
                let held = assigned.values().filter(|owner| **owner == member).count();
                assert!(held <= share, "{held} of {share}");
            }
        }
    }

    #[test]
    fn assignment_does_not_depend_on_the_order_of_the_members() {
        let mut turned = members(5);
        turned.reverse();
        assert_eq!(assign(&members(5)), assign(&turned));
    }

    #[test]
    fn leaving_member_moves_little_but_its_own_share() {
        let before = assign(&members(4));
        let after = assign(&members(3));
        let gone = members(4)[3];
        let moved = before.iter().filter(|(shard, owner)| after[shard] != **owner).count();
        let own = before.values().filter(|owner| **owner == gone).count();
        assert!(moved < own + own, "{moved} moved, {own} were its own");
    }
}
