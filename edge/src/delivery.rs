//! Notifications that are delivered to an address outside: one attempt at a time. When a delivery is repeated, and when it is given up, the
//! machine of its endpoint decides.

pub mod email;

use thiserror::Error;

/// An attempt to deliver a notification that failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{why}")]
pub struct Undelivered {
    /// Another attempt would fail in the same way.
    pub is_final: bool,
    /// For the endpoint's owner: one line without credentials.
    pub why: String,
}

impl Undelivered {
    /// Characters of a reason.
    pub const LONGEST: usize = 300;

    /// A failure that another attempt would meet again.
    #[must_use]
    pub fn finally(why: &str) -> Self {
        Self { is_final: true, why: one_line(why, Self::LONGEST) }
    }

    /// A failure that may be over at the next attempt.
    #[must_use]
    pub fn for_now(why: &str) -> Self {
        Self { is_final: false, why: one_line(why, Self::LONGEST) }
    }
}

/// A text from outside on one line of bounded length: no control characters, none that turn the direction of what follows.
fn one_line(text: &str, longest: usize) -> String {
    let turns = |c: char| matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let words = text.split(|c: char| c.is_control() || c.is_whitespace() || turns(c)).filter(|word| !word.is_empty());
    let line = words.collect::<Vec<_>>().join(" ");
    line.chars().take(longest).collect()
}
