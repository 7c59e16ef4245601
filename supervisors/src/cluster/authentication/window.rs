//! Which numbers of a sender have come: each is taken once. Messages of several subscriptions overtake each other, by less than a window.

use std::time::{Duration, Instant};

/// So many numbers below the highest may still come. A sender whose message is refused for being older sends it again under a new one.
const SIZE: u64 = 65_536;
const BITS: u64 = u64::BITS as u64;
const WORDS: usize = (SIZE / BITS) as usize;

/// A bitmap over the last [`SIZE`] numbers.
#[derive(Default)]
pub(super) struct Window {
    highest: u64,
    /// Nothing up to here is admitted any more.
    floor: u64,
    /// Bit `number % SIZE`. None before the first number, and while the sender is silent.
    taken: Option<Box<[u64; WORDS]>>,
    last_at: Option<Instant>,
}

impl Window {
    /// Whether the number comes for the first time, as far as that is known.
    pub(super) fn admit(&mut self, number: u64) -> bool {
        if number <= self.floor {
            return false;
        }
        self.last_at = Some(Instant::now());
        let taken = self.taken.get_or_insert_with(|| Box::new([0; WORDS]));
        if number > self.highest {
            // What was left out in between has not come.
            let first = (self.highest + 1).max(number.saturating_sub(SIZE - 1));
            (first..=number).for_each(|between| taken[word(between)] &= !bit(between));
            self.highest = number;
        } else if self.highest - number >= SIZE {
            return false;
        }
        let new = taken[word(number)] & bit(number) == 0;
        taken[word(number)] |= bit(number);
        new
    }

    /// Whether nothing came for so long.
    pub(super) fn rested_for(&self, pause: Duration) -> bool {
        self.taken.is_some() && self.last_at.is_some_and(|at| at.elapsed() >= pause)
    }

    /// Gives the bitmap back: of what has come until now nothing is admitted any more.
    pub(super) fn shrink(&mut self) {
        (self.floor, self.taken) = (self.highest, None);
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
    fn each_number_is_taken_once_in_whatever_order_they_come() {
        let mut numbers: Vec<u64> = (1..=SIZE).chain(1..=SIZE).collect();
        numbers.shuffle(&mut rand::rng());
        let (mut window, mut seen) = (Window::default(), BTreeSet::new());
        for number in numbers {
            assert_eq!(window.admit(number), seen.insert(number), "{number}");
        }
    }

    #[test]
    fn number_that_left_the_window_is_refused_and_one_that_was_left_out_is_taken() {
        let mut window = Window::default();
        assert!(window.admit(5) && !window.admit(5) && !window.admit(0));
        assert!(window.admit(5 + SIZE), "it has the place of 5");
        assert!(!window.admit(5) && !window.admit(5 + SIZE));
        assert!(window.admit(6), "it was left out");
        assert!(window.admit(10 * SIZE) && !window.admit(10 * SIZE - SIZE) && window.admit(10 * SIZE - SIZE + 1));
    }

    #[test]
    fn window_that_was_shrunk_admits_only_what_comes_after() {
        let mut window = Window::default();
        assert!(window.admit(1) && window.admit(7));
        window.shrink();
        assert!(!window.admit(1) && !window.admit(5) && !window.admit(7));
        assert!(window.admit(9) && window.admit(8) && !window.admit(9));
    }
}
