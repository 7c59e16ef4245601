//! The sequence numbers of a shard's rows, in the order of its commits.

use domain::commit::Epoch;
use domain::id::Shard;
use std::sync::{Arc, Mutex, PoisonError};

/// One counter for each shard, from 1 in every epoch. A number is never used twice, even where its transition was refused or its
/// outcome is unknown: gaps are harmless, a second row of one number is not.
#[derive(Clone, Debug)]
pub struct Sequences {
    shards: Arc<[Mutex<(Epoch, i64)>]>,
}

impl Default for Sequences {
    fn default() -> Self {
        Self { shards: (0..Shard::COUNT).map(|_| Mutex::new((Epoch(i64::MIN), 0))).collect() }
    }
}

impl Sequences {
    /// Takes `count` consecutive numbers and returns the first. A transition of an older epoch than the last seen gets numbers too: it
    /// will be fenced, and must not reset the counter.
    pub(super) fn take(&self, shard: Shard, epoch: Epoch, count: usize) -> i64 {
        let mut counter = self.shards[usize::from(shard.0)].lock().unwrap_or_else(PoisonError::into_inner);
        if counter.0 < epoch {
            *counter = (epoch, 0);
        }
        let first = counter.1 + 1;
        counter.1 += i64::try_from(count).unwrap_or(i64::MAX / 2);
        first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_begin_at_one_in_each_epoch_and_never_repeat() {
        let sequences = Sequences::default();
        let shard = Shard(7);
        assert_eq!(sequences.take(shard, Epoch(1), 3), 1);
        assert_eq!(sequences.take(shard, Epoch(1), 1), 4);
        assert_eq!(sequences.take(Shard(8), Epoch(1), 1), 1);
        assert_eq!(sequences.take(shard, Epoch(2), 1), 1);
        assert_eq!(sequences.take(shard, Epoch(1), 1), 2, "a stale epoch does not set the counter back");
        assert_eq!(sequences.take(shard, Epoch(2), 1), 3);
    }
}
