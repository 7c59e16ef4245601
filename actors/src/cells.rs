//! The cells of the rate limits that this process keeps: those of the shards that it owns.
//!
//! They live in memory alone: a commit for every request would cost far more than they are worth. Whoever gives a shard away in order
//! hands its cells over; those of an owner that died are gone, which gives each caller there one more burst.

use dashmap::DashMap;
use domain::rate_limit::{Cell, Handed, Verdict, WINDOW};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Cells that are remembered, about 10 MB.
const MOST: usize = 131_072;
/// The least time between two searches for cells that need not be remembered.
const SWEEP_EVERY: Duration = Duration::from_secs(1);

/// Some callers' cells, by an id that says nothing of the caller.
#[derive(Debug)]
pub struct Cells {
    cells: DashMap<Uuid, Cell>,
    /// For callers that there is no room to remember: they share one.
    others: Mutex<Cell>,
    begin: Instant,
    swept_at: Mutex<Instant>,
    most: usize,
}

impl Default for Cells {
    fn default() -> Self {
        Self::remembering(MOST)
    }
}

impl Cells {
    #[must_use]
    pub fn remembering(most: usize) -> Self {
        let begin = Instant::now();
        Self { cells: DashMap::new(), others: Mutex::default(), begin, swept_at: Mutex::new(begin), most }
    }

    /// Takes one request out of a cell; `None` where there is no room for it.
    #[must_use]
    pub fn take(&self, id: Uuid, limit: u32, now: Instant) -> Option<Verdict> {
        let at = self.nanos(now);
        if let Some(mut cell) = self.cells.get_mut(&id) {
            return Some(cell.take(limit, at));
        }
        if self.cells.len() >= self.most {
            self.sweep(now);
        }
        (self.cells.len() < self.most).then(|| self.cells.entry(id).or_default().take(limit, at))
    }

    /// The same, and where there is no room, out of the one cell of all for whom there is none.
    #[must_use]
    pub fn take_or_share(&self, id: Uuid, limit: u32, now: Instant) -> Verdict {
        self.take(id, limit, now)
            .unwrap_or_else(|| self.others.lock().unwrap_or_else(PoisonError::into_inner).take(limit, self.nanos(now)))
    }

    /// The cells that matter of those that are asked for.
    #[must_use]
    pub fn handed(&self, of: impl Fn(Uuid) -> bool, now: Instant) -> Vec<(Uuid, Handed)> {
        let at = self.nanos(now);
        let handed = self.cells.iter().filter_map(|cell| Some((*cell.key(), cell.handed(at)?)));
        handed.filter(|(id, _)| of(*id)).collect()
    }

    /// Goes on with a cell of another keeper's, where there is room.
    pub fn go_on_from(&self, id: Uuid, handed: Handed, now: Instant) {
        if self.cells.len() < self.most || self.cells.contains_key(&id) {
            self.cells.entry(id).or_default().go_on_from(handed, self.nanos(now));
        }
    }

    /// Forgets those that are kept elsewhere from here on.
    pub fn forget(&self, of: impl Fn(Uuid) -> bool) {
        self.cells.retain(|id, _| !of(*id));
    }

    /// How many are remembered.
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
        if now.saturating_duration_since(*swept_at) >= SWEEP_EVERY {
            *swept_at = now;
            let at = self.nanos(now);
            self.cells.retain(|_, cell| !cell.is_idle(at));
        }
    }

    /// A clock that began a window before its first cell: so there is a time for what another keeper counted before that.
    fn nanos(&self, now: Instant) -> u64 {
        u64::try_from((now.saturating_duration_since(self.begin) + WINDOW).as_nanos()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_caller_has_a_cell_of_their_own() {
        let (cells, now) = (Cells::remembering(10), Instant::now());
        let admitted = |n: u128| (0..100).filter(|_| cells.take(Uuid::from_u128(n), 30, now).unwrap().admitted).count();
        assert_eq!((admitted(1), admitted(2), admitted(1)), (30, 30, 0));
    }

    #[test]
    fn what_is_given_away_goes_on_elsewhere_and_is_forgotten_here() {
        let (here, there, now) = (Cells::remembering(10), Cells::remembering(2), Instant::now());
        let spend = |cells: &Cells, n: u128| {
            (0..100).filter(|_| cells.take(Uuid::from_u128(n), 30, now).unwrap().admitted).count()
        };
        for n in 0..4 {
            assert_eq!(spend(&here, n), 30);
        }
        let going = |id: Uuid| id.as_u128() != 0;
        let handed = here.handed(going, now);
        assert_eq!(handed.len(), 3);
        for (id, cell) in &handed {
            there.go_on_from(*id, *cell, now);
        }
        here.forget(going);
        assert_eq!((here.len(), there.len()), (1, 2), "no more than there is room for");
        let known = |n: &u128| there.cells.contains_key(&Uuid::from_u128(*n));
        for n in (1..4).filter(known).collect::<Vec<_>>() {
            assert_eq!(spend(&there, n), 0, "the quota is used up there too");
        }
        assert_eq!(spend(&here, 0), 0);
        assert!(here.handed(going, now + WINDOW).is_empty(), "an idle cell is not handed over");
    }

    #[test]
    fn however_many_callers_come_no_more_are_remembered_and_the_rest_share_one_cell() {
        let (cells, now) = (Cells::remembering(10), Instant::now());
        let admitted = (0..10_000).filter(|n| cells.take_or_share(Uuid::from_u128(*n), 30, now).admitted).count();
        assert_eq!((admitted, cells.len()), (10 + 30, 10));
        assert_eq!(cells.take(Uuid::from_u128(70_000), 30, now), None);
        let later = now + WINDOW;
        assert!(cells.take(Uuid::from_u128(70_000), 30, later).unwrap().admitted);
        assert_eq!(cells.len(), 1, "those that are idle were forgotten");
    }
}
