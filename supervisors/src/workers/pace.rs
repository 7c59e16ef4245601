//! Works on what is found, turn by turn, each item at its own pace: one that hangs holds nobody up, and one that keeps failing is left
//! alone for longer and longer.

use futures::FutureExt;
use futures::future::BoxFuture;
use std::collections::{BTreeMap, VecDeque};
use std::panic::AssertUnwindSafe;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval};

/// The pause after a first failure; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(500);

/// No longer, since nobody says when a cause has ended: what waits is taken up soon after it has.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// Failures that are remembered. Beyond it the one that is due the soonest is forgotten, which costs a try.
const REMEMBERED: usize = 4096;

/// How much at a time.
#[derive(Clone, Copy, Debug)]
pub struct Pacing {
    /// From one look to the next.
    pub each: Duration,
    /// Items that are worked on at the same time.
    pub at_once: usize,
    /// A look that finds so many may have left some: the next one does not wait for its turn. (Beyond it, a look finds a whole turn's work.)
    pub full: usize,
}

/// Looks for items turn by turn and works on them. `look` is given what is to be passed over; `work` says whether its item is done with.
pub async fn run<K, T, W>(
    pacing: Pacing,
    mut look: impl FnMut(Vec<K>) -> BoxFuture<'static, Vec<(K, T)>>,
    work: impl Fn(T) -> W,
) where
    K: Ord + Copy + Send + 'static,
    W: Future<Output = bool> + Send + 'static,
{
    let Pacing { each, at_once, full } = pacing;
    let mut clock = interval(each);
    clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut pace = Pace::default();
    let mut under_way = JoinSet::new();
    let mut found = VecDeque::new();
    let mut more = false;
    loop {
        tokio::select! {
            Some(ended) = under_way.join_next() => {
                // Its work is caught where it panics; a task that was cancelled ends with this one.
                if let Ok((key, done)) = ended {
                    pace.end(key, done, Instant::now());
                }
            }
            // What was found before comes first.
            () = next(&mut clock, more), if found.is_empty() => {
                found.extend(look(pace.passed_over(Instant::now())).await);
                more = found.len() >= full;
            }
        }
        while under_way.len() < at_once
            && let Some((key, item)) = found.pop_front()
        {
            if pace.begin(key) {
                let work = AssertUnwindSafe(work(item)).catch_unwind();
                under_way.spawn(async move { (key, work.await.unwrap_or(false)) });
            }
        }
    }
}

/// The next turn; the present one where it has `more`.
async fn next(clock: &mut Interval, more: bool) {
    if more {
        clock.reset();
    } else {
        clock.tick().await;
    }
}

/// What is under way, and what has failed and waits.
#[derive(Debug)]
struct Pace<K> {
    book: BTreeMap<K, Entry>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    failures: u32,
    /// `None` while it is under way.
    waits_until: Option<Instant>,
}

impl<K> Default for Pace<K> {
    fn default() -> Self {
        Self { book: BTreeMap::new() }
    }
}

impl<K: Ord + Copy> Pace<K> {
    /// `false` where it is under way already.
    fn begin(&mut self, key: K) -> bool {
        let entry = self.book.entry(key).or_insert(Entry { failures: 0, waits_until: Some(Instant::now()) });
        entry.waits_until.take().is_some()
    }

    fn end(&mut self, key: K, done: bool, now: Instant) {
        if done {
            self.book.remove(&key);
            return;
        }
        if let Some(entry) = self.book.get_mut(&key) {
            let pause = FIRST_PAUSE * 2_u32.pow(entry.failures.min(16));
            entry.failures += 1;
            entry.waits_until = Some(now + pause.min(LONGEST_PAUSE));
        }
        if self.book.len() > REMEMBERED {
            let waiting = self.book.iter().filter_map(|(key, entry)| Some((entry.waits_until?, *key)));
            if let Some((_, soonest)) = waiting.min() {
                self.book.remove(&soonest);
            }
        }
    }

    /// What is not to be begun now. What was not found again since it could be is somebody else's by now, and forgotten.
    fn passed_over(&mut self, now: Instant) -> Vec<K> {
        self.book.retain(|_, entry| entry.waits_until.is_none_or(|until| now < until + LONGEST_PAUSE));
        let pauses = self.book.iter().filter(|(_, entry)| entry.waits_until.is_none_or(|until| now < until));
        pauses.map(|(key, _)| *key).collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    const QUARTERS: Pacing = Pacing { each: Duration::from_millis(250), at_once: 8, full: 100 };

    const HANGS: u32 = 1;
    const FAILS: u32 = 2;
    const PANICS: u32 = 3;

    #[tokio::test(start_paused = true)]
    async fn an_item_that_hangs_or_fails_holds_nobody_up_and_is_tried_ever_more_seldom() {
        let begin = Instant::now();
        let tried: Arc<Mutex<Vec<(u32, u128)>>> = Arc::default();
        let (log, mut next) = (Arc::clone(&tried), 10);
        let look = move |passed_over: Vec<u32>| {
            next += 1;
            let found = [HANGS, FAILS, PANICS, next].into_iter().filter(|item| !passed_over.contains(item));
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
        let turns = run(QUARTERS, look, work);
        assert!(tokio::time::timeout(Duration::from_secs(10), turns).await.is_err());
        let tried = tried.lock().unwrap().clone();
        let at = |item| tried.iter().filter(|(tried, _)| *tried == item).map(|(_, at)| *at).collect::<Vec<_>>();
        assert_eq!(at(HANGS).len(), 1);
        for item in [FAILS, PANICS] {
            let pauses: Vec<_> = at(item).windows(2).map(|pair| pair[1] - pair[0]).collect();
            // A turn is the grain of it.
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
    async fn after_an_outage_of_any_length_what_waited_is_taken_up_within_ten_seconds() {
        for outage in [3, 60, 3600].map(Duration::from_secs) {
            let begin = Instant::now();
            let done: Arc<Mutex<Option<Duration>>> = Arc::default();
            let taken_up = Arc::clone(&done);
            let look = |passed_over: Vec<u32>| {
                let found = if passed_over.is_empty() { vec![(1, ())] } else { Vec::new() };
                async move { found }.boxed()
            };
            let work = move |()| {
                let over = begin.elapsed() > outage;
                if over {
                    taken_up.lock().unwrap().get_or_insert(begin.elapsed());
                }
                async move { over }
            };
            let turns = run(QUARTERS, look, work);
            assert!(tokio::time::timeout(outage + Duration::from_secs(11), turns).await.is_err());
            assert!(done.lock().unwrap().is_some(), "an outage of {outage:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_one_look_cannot_hold_waits_for_no_turn() {
        let begin = Instant::now();
        let mut left = 1000_u32;
        let done: Arc<Mutex<Vec<Duration>>> = Arc::default();
        let look = move |_| {
            let found: Vec<_> = (left.saturating_sub(100)..left).map(|item| (item, item)).collect();
            left -= u32::try_from(found.len()).unwrap();
            async move { found }.boxed()
        };
        let work = |_| {
            done.lock().unwrap().push(begin.elapsed());
            async { true }
        };
        assert!(tokio::time::timeout(Duration::from_secs(1), run(QUARTERS, look, work)).await.is_err());
        let done = done.lock().unwrap();
        assert_eq!((done.len(), done.iter().max()), (1000, Some(&Duration::ZERO)));
    }

    #[test]
    fn what_is_remembered_of_failures_is_bounded() {
        let (mut pace, now) = (Pace::default(), Instant::now());
        for item in 0..2 * REMEMBERED {
            assert!(pace.begin(item));
            pace.end(item, false, now);
        }
        assert_eq!(pace.book.len(), REMEMBERED);
        assert!(pace.passed_over(now + 3 * LONGEST_PAUSE).is_empty() && pace.book.is_empty());
    }
}
