//! What failed, and when to try again: for all programs, `gpuctl` too. Nothing here is of this service.

pub mod retry_after;

use std::error::Error;

/// An error with its sources on one line, each after a colon.
#[must_use]
pub fn chain(error: &dyn Error) -> String {
    let (mut text, mut source) = (error.to_string(), error.source());
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        // Some libraries print the source in their own text, too.
        if !text.ends_with(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[derive(Debug, thiserror::Error)]
    #[error("the key cannot be read")]
    struct Plain(#[source] io::Error);

    #[derive(Debug, thiserror::Error)]
    #[error("it cannot start: {0}")]
    struct Repeating(#[source] Plain);

    #[test]
    fn chain_has_each_source_once() {
        let error = Repeating(Plain(io::Error::other("no such file")));
        assert_eq!(chain(&error), "it cannot start: the key cannot be read: no such file");
        assert_eq!(chain(&io::Error::other("alone")), "alone");
    }
}
