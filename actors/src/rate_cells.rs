//! Rate limit cells of the shards that this process owns.
//!
//! They are in memory only: a commit per request would cost far more than they are worth. A planned handover of a shard exports its
//! cells. Those of an owner that died are lost, which gives each of its callers one more burst.

use dashmap::DashMap;
use domain::gcra::{CellHandover, RateCell, RateDecision, WINDOW};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// The most cells, about 10 MB.
const CAPACITY: usize = 131_072;
/// The least time between two sweeps of idle cells.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// The cells of callers, by an id that does not reveal the caller.
#[derive(Debug)]
pub struct RateCells {
    cells: DashMap<Uuid, RateCell>,
    /// Shared by all callers without a cell of their own.
    others: Mutex<RateCell>,
    begin: Instant,
    swept_at: Mutex<Instant>,
    capacity: usize,
}

impl Default for RateCells {
    fn default() -> Self {
        Self::with_capacity(CAPACITY)
    }
}

impl RateCells {
    #[must_use]
    pub fn with_capacity(capacity: usize) -> Self {
        let begin = Instant::now();
        Self { cells: DashMap::new(), others: Mutex::default(), begin, swept_at: Mutex::new(begin), capacity }
    }

    /// Takes one request out of a cell; `None` where there is no room for the cell.
    #[must_use]
    pub fn take(&self, id: Uuid, limit: u32, now: Instant) -> Option<RateDecision> {
        let at = self.nanos(now);
        if let Some(mut cell) = self.cells.get_mut(&id) {
            return Some(cell.take(limit, at));
        }
        if self.cells.len() >= self.capacity {
            self.sweep(now);
        }
        (self.cells.len() < self.capacity).then(|| self.cells.entry(id).or_default().take(limit, at))
    }

    /// As [`Self::take`], from the shared cell where there is no room.
    #[must_use]
    pub fn take_or_share(&self, id: Uuid, limit: u32, now: Instant) -> RateDecision {
        self.take(id, limit, now)
            .unwrap_or_else(|| self.others.lock().unwrap_or_else(PoisonError::into_inner).take(limit, self.nanos(now)))
    }

    /// The selected cells that are not idle, to be handed over.
    #[must_use]
    pub fn export(&self, of: impl Fn(Uuid) -> bool, now: Instant) -> Vec<(Uuid, CellHandover)> {
        let at = self.nanos(now);
        let handed = self.cells.iter().filter_map(|cell| Some((*cell.key(), cell.handover(at)?)));
        handed.filter(|(id, _)| of(*id)).collect()
    }

    /// Adds the cell of another owner, where there is room.
    pub fn import(&self, id: Uuid, handed: CellHandover, now: Instant) {
        if self.cells.len() < self.capacity || self.cells.contains_key(&id) {
            self.cells.entry(id).or_default().merge(handed, self.nanos(now));
        }
    }

    /// Removes the selected cells: another member owns them.
    pub fn remove(&self, of: impl Fn(Uuid) -> bool) {
        self.cells.retain(|id, _| !of(*id));
    }

    /// The number of cells.
    #[must_use]
    pub fn len(&self) -> usize {
        self.cells.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.cells.is_empty()
    }

    fn sweep(&self, now: Instant) {
        let Ok(mut swept_at) = self.swept_at.try_lock() else { return };
        if now.saturating_duration_since(*swept_at) >= SWEEP_INTERVAL {
            *swept_at = now;
            let at = self.nanos(now);
            self.cells.retain(|_, cell| !cell.is_idle(at));
        }
    }

    /// A clock that began a window before the first cell, so that what another owner counted before that has a time.
    fn nanos(&self, now: Instant) -> u64 {
        u64::try_from((now.saturating_duration_since(self.begin) + WINDOW).as_nanos()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_caller_has_a_cell() {
        let (cells, now) = (RateCells::with_capacity(10), Instant::now());
        let admitted = |n: u128| (0..100).filter(|_| cells.take(Uuid::from_u128(n), 30, now).unwrap().admitted).count();
        assert_eq!((admitted(1), admitted(2), admitted(1)), (30, 30, 0));
    }

    #[test]
    fn exported_cells_continue_at_the_next_owner_and_are_removed() {
        let (here, there, now) = (RateCells::with_capacity(10), RateCells::with_capacity(2), Instant::now());
        let spend = |cells: &RateCells, n: u128| {
            (0..100).filter(|_| cells.take(Uuid::from_u128(n), 30, now).unwrap().admitted).count()
        };
        for n in 0..4 {
            assert_eq!(spend(&here, n), 30);
        }
        let going = |id: Uuid| id.as_u128() != 0;
        let handed = here.export(going, now);
        assert_eq!(handed.len(), 3);
        for (id, cell) in &handed {
            there.import(*id, *cell, now);
        }
        here.remove(going);
        assert_eq!((here.len(), there.len()), (1, 2), "no more than the capacity");
        let known = |n: &u128| there.cells.contains_key(&Uuid::from_u128(*n));
        for n in (1..4).filter(known).collect::<Vec<_>>() {
            assert_eq!(spend(&there, n), 0, "the limit is used up at the next owner too");
        }
        assert_eq!(spend(&here, 0), 0);
        assert!(here.export(going, now + WINDOW).is_empty(), "an idle cell is not handed over");
    }

    #[test]
    fn cells_are_bounded_and_further_callers_share_one() {
        let (cells, now) = (RateCells::with_capacity(10), Instant::now());
        let admitted = (0..10_000).filter(|n| cells.take_or_share(Uuid::from_u128(*n), 30, now).admitted).count();
        assert_eq!((admitted, cells.len()), (10 + 30, 10));
        assert_eq!(cells.take(Uuid::from_u128(70_000), 30, now), None);
        let later = now + WINDOW;
        assert!(cells.take(Uuid::from_u128(70_000), 30, later).unwrap().admitted);
        assert_eq!(cells.len(), 1, "idle cells are removed");
    }
}
