//! A polling loop with a backoff per item: an item that hangs delays no other, and one that keeps failing is retried after growing
//! pauses.

use domain::retry;
use futures::FutureExt;
use futures::future::BoxFuture;
use std::collections::{BTreeMap, VecDeque};
use std::panic::AssertUnwindSafe;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval};

/// The backoff after a first failure; it doubles with each further one.
const INITIAL_BACKOFF: Duration = Duration::from_millis(500);

/// The bound of the backoff. Nothing signals that a cause has ended, so that a waiting item has to be retried soon after.
const MAX_BACKOFF: Duration = Duration::from_secs(10);

/// How many failures are remembered. Beyond it the one that is due first is forgotten, which costs one attempt.
const CAPACITY: usize = 4096;

/// How often a loop polls, and how much it processes at a time.
#[derive(Clone, Copy, Debug)]
pub struct PollLoopConfig {
    /// The time between two polls.
    pub interval: Duration,
    /// Items that are processed at the same time.
    pub concurrency: usize,
    /// A poll that finds this many may have left some: the next one follows at once. (A poll that finds fewer has found everything.)
    pub page_size: usize,
}

/// Polls for items and processes them. `poll` finds items and is given the keys to exclude; `work` returns whether its item is done.
pub async fn run<K, T, W>(
    config: PollLoopConfig,
    mut poll: impl FnMut(Vec<K>) -> BoxFuture<'static, Vec<(K, T)>>,
    work: impl Fn(T) -> W,
) where
    K: Ord + Copy + Send + 'static,
    W: Future<Output = bool> + Send + 'static,
{
    let PollLoopConfig { interval: period, concurrency, page_size } = config;
    let mut clock = interval(period);
    clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut backoff = ItemBackoff::default();
    let mut in_flight = JoinSet::new();
    let mut found = VecDeque::new();
    let mut more = false;
    loop {
        tokio::select! {
            Some(ended) = in_flight.join_next() => {
                // Panics are caught in the task; a task is cancelled only together with this one.
                if let Ok((key, done)) = ended {
                    backoff.finish(key, done, Instant::now());
                }
            }
            // The items of the last poll come first.
            () = next_poll(&mut clock, more), if found.is_empty() => {
                found.extend(poll(backoff.excluded(Instant::now())).await);
                more = found.len() >= page_size;
            }
        }
        while in_flight.len() < concurrency
            && let Some((key, item)) = found.pop_front()
        {
            if backoff.start(key) {
                let work = AssertUnwindSafe(work(item)).catch_unwind();
                in_flight.spawn(async move { (key, work.await.unwrap_or(false)) });
            }
        }
    }
}

/// Waits for the next poll; not at all where there is `more`.
async fn next_poll(clock: &mut Interval, more: bool) {
    if more {
        clock.reset();
    } else {
        clock.tick().await;
    }
}

/// The items that are in flight, and those that have failed and wait.
#[derive(Debug)]
struct ItemBackoff<K> {
    entries: BTreeMap<K, BackoffEntry>,
}

#[derive(Clone, Copy, Debug)]
struct BackoffEntry {
    failures: u32,
    /// `None` while the item is in flight.
    retry_at: Option<Instant>,
}

impl<K> Default for ItemBackoff<K> {
    fn default() -> Self {
        Self { entries: BTreeMap::new() }
    }
}

impl<K: Ord + Copy> ItemBackoff<K> {
    /// `false` where the item is in flight already.
    fn start(&mut self, key: K) -> bool {
        let entry = self.entries.entry(key).or_insert(BackoffEntry { failures: 0, retry_at: Some(Instant::now()) });
        entry.retry_at.take().is_some()
    }

    fn finish(&mut self, key: K, done: bool, now: Instant) {
        if done {
            self.entries.remove(&key);
            return;
        }
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.failures = entry.failures.saturating_add(1);
            entry.retry_at = Some(now + retry::pause(INITIAL_BACKOFF, entry.failures, MAX_BACKOFF));
        }
        if self.entries.len() > CAPACITY {
            let waiting = self.entries.iter().filter_map(|(key, entry)| Some((entry.retry_at?, *key)));
            if let Some((_, soonest)) = waiting.min() {
                self.entries.remove(&soonest);
            }
        }
    }

    /// The items that must not be started now. One that was not found again since its retry was due belongs to another member, and is
    /// forgotten.
    fn excluded(&mut self, now: Instant) -> Vec<K> {
        self.entries.retain(|_, entry| entry.retry_at.is_none_or(|until| now < until + MAX_BACKOFF));
        let pauses = self.entries.iter().filter(|(_, entry)| entry.retry_at.is_none_or(|until| now < until));
        pauses.map(|(key, _)| *key).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    const QUARTERS: PollLoopConfig =
        PollLoopConfig { interval: Duration::from_millis(250), concurrency: 8, page_size: 100 };

    const HANGS: u32 = 1;
    const FAILS: u32 = 2;
    const PANICS: u32 = 3;

    #[tokio::test(start_paused = true)]
    async fn hanging_or_failing_item_delays_no_other_and_is_retried_with_growing_backoff() {
        let begin = Instant::now();
        let tried: Arc<Mutex<Vec<(u32, u128)>>> = Arc::default();
        let (log, mut next) = (Arc::clone(&tried), 10);
        let poll = move |excluded: Vec<u32>| {
            next += 1;
            let found = [HANGS, FAILS, PANICS, next].into_iter().filter(|item| !excluded.contains(item));
            let found: Vec<_> = found.map(|item| (item, item)).collect();
            async move { found }.boxed()
        };
        let work = move |item| {
            log.lock().unwrap().push((item, begin.elapsed().as_millis()));
            async move {
                match item {
                    HANGS => std::future::pending().await,
                    FAILS => false,
                    PANICS => panic!("out of order"),
                    _ => true,
                }
            }
        };
        let turns = run(QUARTERS, poll, work);
        assert!(tokio::time::timeout(Duration::from_secs(10), turns).await.is_err());
        let tried = tried.lock().unwrap().clone();
        let at = |item| tried.iter().filter(|(tried, _)| *tried == item).map(|(_, at)| *at).collect::<Vec<_>>();
        assert_eq!(at(HANGS).len(), 1);
        for item in [FAILS, PANICS] {
            let pauses: Vec<_> = at(item).windows(2).map(|pair| pair[1] - pair[0]).collect();
            // The polling interval bounds the precision.
            let doubles = pauses
                .iter()
                .zip([500, 1000, 2000, 4000])
                .all(|(pause, at_least)| (at_least..at_least + 300).contains(pause));
            assert!(pauses.len() == 4 && doubles, "{pauses:?}");
        }
        let fresh = tried.iter().filter(|(item, _)| *item > 10).count();
        assert!((38..=41).contains(&fresh), "a new one at every turn, and not {fresh}");
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_items_are_retried_within_ten_seconds_after_an_outage_of_any_length() {
        for outage in [3, 60, 3600].map(Duration::from_secs) {
            let begin = Instant::now();
            let done: Arc<Mutex<Option<Duration>>> = Arc::default();
            let taken_up = Arc::clone(&done);
            let poll = |excluded: Vec<u32>| {
                let found = if excluded.is_empty() { vec![(1, ())] } else { Vec::new() };
                async move { found }.boxed()
            };
            let work = move |()| {
                let over = begin.elapsed() > outage;
                if over {
                    taken_up.lock().unwrap().get_or_insert(begin.elapsed());
                }
                async move { over }
            };
            let turns = run(QUARTERS, poll, work);
            assert!(tokio::time::timeout(outage + Duration::from_secs(11), turns).await.is_err());
            assert!(done.lock().unwrap().is_some(), "an outage of {outage:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn full_page_is_followed_by_the_next_poll_at_once() {
        let begin = Instant::now();
        let mut left = 1000_u32;
        let done: Arc<Mutex<Vec<Duration>>> = Arc::default();
        let poll = move |_| {
            let found: Vec<_> = (left.saturating_sub(100)..left).map(|item| (item, item)).collect();
            left -= u32::try_from(found.len()).unwrap();
            async move { found }.boxed()
        };
        let work = |_| {
            done.lock().unwrap().push(begin.elapsed());
            async { true }
        };
        assert!(tokio::time::timeout(Duration::from_secs(1), run(QUARTERS, poll, work)).await.is_err());
        let done = done.lock().unwrap();
        assert_eq!((done.len(), done.iter().max()), (1000, Some(&Duration::ZERO)));
    }

    #[test]
    fn remembered_failures_are_bounded() {
        let (mut backoff, now) = (ItemBackoff::default(), Instant::now());
        for item in 0..2 * CAPACITY {
            assert!(backoff.start(item));
            backoff.finish(item, false, now);
        }
        assert_eq!(backoff.entries.len(), CAPACITY);
        assert!(backoff.excluded(now + 3 * MAX_BACKOFF).is_empty() && backoff.entries.is_empty());
    }
}
