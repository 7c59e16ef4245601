//! Who has how many of something open at once, in the whole cluster: streams of events, connections for notifications.
//!
//! What is open is a place, kept in the memory of the owner of its shard, as the cells of rate limits are. Whoever has a place says so again
//! before it would be forgotten; so one that died gives its places back by saying nothing, and a shard's new owner knows them all within
//! [`RENEWED_EVERY`]. Until then it admits more than it would, and never fewer.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// How long a place is kept of which nothing is heard.
pub const KEPT_FOR: Duration = Duration::from_secs(60);
/// How often whoever has a place says so.
pub const RENEWED_EVERY: Duration = Duration::from_secs(20);

/// Places that are remembered, about 10 MB.
const MOST: usize = 131_072;
/// The least time between two searches for places that nobody has any more.
const SWEEP_EVERY: Duration = Duration::from_secs(1);

/// What is said of a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// It is wanted; so many are the most.
    Take { most: u32 },
    /// It is still taken.
    Keep,
    /// It is free again.
    Leave,
}

/// The places whose shards are here.
#[derive(Debug)]
pub struct Places {
    taken: Mutex<Taken>,
    most: usize,
}

#[derive(Debug)]
struct Taken {
    /// By whom they belong to: each with when it was heard of last.
    by_owner: HashMap<Uuid, HashMap<Uuid, Instant>>,
    all: usize,
    swept_at: Option<Instant>,
}

impl Default for Places {
    fn default() -> Self {
        Self::remembering(MOST)
    }
}

impl Places {
    #[must_use]
    pub fn remembering(most: usize) -> Self {
        Self { taken: Mutex::new(Taken { by_owner: HashMap::new(), all: 0, swept_at: None }), most }
    }

    /// Whether the place is, or stays, `owner`'s; `None` where there is no room to remember it.
    #[must_use]
    pub fn hear(&self, owner: Uuid, place: Uuid, word: Word, now: Instant) -> Option<bool> {
        let mut taken = self.lock();
        taken.forget_the_silent(owner, now);
        let of_owner = taken.by_owner.get(&owner);
        let (count, is_taken) = of_owner.map_or((0, false), |own| (own.len(), own.contains_key(&place)));
        match word {
            Word::Leave => {
                taken.leave(owner, place);
                return Some(false);
            }
            Word::Take { most } if !is_taken && count >= usize::try_from(most).unwrap_or(usize::MAX) => {
                return Some(false);
            }
            // One that was taken before is kept, whatever the limit has become.
            Word::Take { .. } | Word::Keep => {}
        }
        if !is_taken && taken.all >= self.most {
            taken.sweep(now);
            if taken.all >= self.most {
                return None;
            }
        }
        taken.keep(owner, place, now);
        Some(true)
    }

    /// Forgets those that are kept elsewhere from here on.
    pub fn forget(&self, of: impl Fn(Uuid) -> bool) {
        let mut taken = self.lock();
        taken.by_owner.retain(|owner, _| !of(*owner));
        taken.count_anew();
    }

    /// How many are remembered.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lock().all
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Taken {
    fn keep(&mut self, owner: Uuid, place: Uuid, now: Instant) {
        if self.by_owner.entry(owner).or_default().insert(place, now).is_none() {
            self.all += 1;
        }
    }

    fn leave(&mut self, owner: Uuid, place: Uuid) {
        let Some(own) = self.by_owner.get_mut(&owner) else { return };
        if own.remove(&place).is_some() {
            self.all -= 1;
        }
        if own.is_empty() {
            self.by_owner.remove(&owner);
        }
    }

    fn forget_the_silent(&mut self, owner: Uuid, now: Instant) {
        let Some(own) = self.by_owner.get_mut(&owner) else { return };
        let before = own.len();
        own.retain(|_, heard| now.saturating_duration_since(*heard) < KEPT_FOR);
        self.all -= before - own.len();
        if own.is_empty() {
            self.by_owner.remove(&owner);
        }
    }

    fn sweep(&mut self, now: Instant) {
        if self.swept_at.is_some_and(|at| now.saturating_duration_since(at) < SWEEP_EVERY) {
            return;
        }
        self.swept_at = Some(now);
        self.by_owner.retain(|_, own| {
            own.retain(|_, heard| now.saturating_duration_since(*heard) < KEPT_FOR);
            !own.is_empty()
        });
        self.count_anew();
    }

    fn count_anew(&mut self) {
        self.all = self.by_owner.values().map(HashMap::len).sum();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const ANN: Uuid = Uuid::from_u128(1);
    const BOB: Uuid = Uuid::from_u128(2);

    fn taken(places: &Places, owner: Uuid, wanted: std::ops::Range<u128>, most: u32, now: Instant) -> usize {
        wanted.filter(|n| places.hear(owner, Uuid::from_u128(*n), Word::Take { most }, now).unwrap()).count()
    }

    #[test]
    fn each_has_as_many_as_are_admitted_and_who_leaves_one_can_take_another() {
        let (places, now) = (Places::default(), Instant::now());
        assert_eq!(taken(&places, ANN, 0..10, 3, now), 3);
        assert_eq!(taken(&places, BOB, 0..10, 3, now), 3, "nobody takes another's");
        assert_eq!(taken(&places, ANN, 0..3, 1, now), 3, "what is taken stays, though fewer are admitted");
        places.hear(ANN, Uuid::from_u128(0), Word::Leave, now).unwrap();
        places.hear(ANN, Uuid::from_u128(0), Word::Leave, now).unwrap();
        assert_eq!(taken(&places, ANN, 5..10, 3, now), 1);
        for owner in [ANN, BOB] {
            for place in 0..10 {
                places.hear(owner, Uuid::from_u128(place), Word::Leave, now).unwrap();
            }
        }
        assert!(places.is_empty(), "nothing is kept of those who left");
    }

    #[test]
    fn of_whom_nothing_is_heard_the_place_is_free_again() {
        let (places, now) = (Places::default(), Instant::now());
        assert_eq!(taken(&places, ANN, 0..3, 3, now), 3);
        let later = now + KEPT_FOR / 2;
        assert!(places.hear(ANN, Uuid::from_u128(0), Word::Keep, later).unwrap());
        assert_eq!(taken(&places, ANN, 5..10, 3, now + KEPT_FOR), 2, "one of them has said that it lives");
    }

    #[test]
    fn a_new_keeper_learns_of_the_places_that_there_are_and_admits_none_above_them() {
        let (places, now) = (Places::default(), Instant::now());
        for n in 0..5 {
            assert!(places.hear(ANN, Uuid::from_u128(n), Word::Keep, now).unwrap());
        }
        assert_eq!(taken(&places, ANN, 5..10, 3, now), 0);
        places.forget(|owner| owner == ANN);
        assert!(places.is_empty());
    }

    #[test]
    fn no_more_are_remembered_than_there_is_room_for() {
        let (places, now) = (Places::remembering(4), Instant::now());
        for n in 0..10 {
            let heard = places.hear(Uuid::from_u128(n), ANN, Word::Take { most: 1 }, now);
            assert_eq!(heard, (n < 4).then_some(true));
        }
        let later = now + KEPT_FOR;
        assert_eq!(places.hear(Uuid::from_u128(99), BOB, Word::Take { most: 1 }, later), Some(true));
        assert_eq!(places.len(), 1, "those of whom nothing was heard were forgotten");
    }
}
