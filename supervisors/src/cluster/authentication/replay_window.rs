//! The replay window of a sender: each number is accepted once. Messages of several subscriptions overtake each other, by less than the
//! window.

use std::time::{Duration, Instant};

/// The width of the window below the highest number. A sender whose message is refused as older resends it under a new number.
const SIZE: u64 = 65_536;
const BITS: u64 = u64::BITS as u64;
const BLOCKS: usize = (SIZE / BITS) as usize;

/// A bitmap over the last [`SIZE`] numbers.
#[derive(Default)]
pub(super) struct ReplayWindow {
    highest: u64,
    /// Numbers up to here are refused.
    floor: u64,
    /// Bit `number % SIZE`. None before the first number, and while the sender is idle.
    received: Option<Box<[u64; BLOCKS]>>,
    last_at: Option<Instant>,
}

impl ReplayWindow {
    /// Whether the number is new.
    pub(super) fn admit(&mut self, number: u64) -> bool {
        if number <= self.floor {
            return false;
        }
        self.last_at = Some(Instant::now());
        let received = self.received.get_or_insert_with(|| Box::new([0; BLOCKS]));
        if number > self.highest {
            // The numbers in between have not arrived.
            let first = (self.highest + 1).max(number.saturating_sub(SIZE - 1));
            (first..=number).for_each(|between| received[word(between)] &= !bit(between));
            self.highest = number;
        } else if self.highest - number >= SIZE {
            return false;
        }
        let new = received[word(number)] & bit(number) == 0;
        received[word(number)] |= bit(number);
        new
    }

    /// Whether no number arrived for so long.
    pub(super) fn is_idle_for(&self, pause: Duration) -> bool {
        self.received.is_some() && self.last_at.is_some_and(|at| at.elapsed() >= pause)
    }

    /// Frees the bitmap: every number up to the highest is refused from here on.
    pub(super) fn compact(&mut self) {
        (self.floor, self.received) = (self.highest, None);
    }
}

const fn word(number: u64) -> usize {
    ((number % SIZE) / BITS) as usize
}

const fn bit(number: u64) -> u64 {
    1 << (number % BITS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::seq::SliceRandom as _;
    use std::collections::BTreeSet;

    #[test]
    fn each_number_is_accepted_once_in_any_order() {
        let mut numbers: Vec<u64> = (1..=SIZE).chain(1..=SIZE).collect();
        numbers.shuffle(&mut rand::rng());
        let (mut window, mut seen) = (ReplayWindow::default(), BTreeSet::new());
        for number in numbers {
            assert_eq!(window.admit(number), seen.insert(number), "{number}");
        }
    }

    #[test]
    fn number_below_the_window_is_refused_and_a_skipped_one_is_accepted() {
        let mut window = ReplayWindow::default();
        assert!(window.admit(5) && !window.admit(5) && !window.admit(0));
        assert!(window.admit(5 + SIZE), "it has the place of 5");
        assert!(!window.admit(5) && !window.admit(5 + SIZE));
        assert!(window.admit(6), "it was left out");
        assert!(window.admit(10 * SIZE) && !window.admit(10 * SIZE - SIZE) && window.admit(10 * SIZE - SIZE + 1));
    }

    #[test]
    fn compacted_window_accepts_only_higher_numbers() {
        let mut window = ReplayWindow::default();
        assert!(window.admit(1) && window.admit(7));
        window.compact();
        assert!(!window.admit(1) && !window.admit(5) && !window.admit(7));
        assert!(window.admit(9) && window.admit(8) && !window.admit(9));
    }
}
