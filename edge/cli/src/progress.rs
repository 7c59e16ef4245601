//! The progress of a command that waits: a spinner in a terminal, a line per step elsewhere.

use crate::output::Output;
use crate::printable::plain;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{self, IsTerminal as _};
use std::time::Duration;

const TICK_INTERVAL: Duration = Duration::from_millis(100);

pub(crate) struct Progress {
    out: Output,
    line: Option<ProgressBar>,
}

impl Progress {
    pub(crate) fn begin(out: Output, what: &str) -> Self {
        let line = (!out.quiet && io::stderr().is_terminal()).then(|| {
            let line = ProgressBar::new_spinner();
            if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} ({elapsed})") {
                line.set_style(style);
            }
            line.enable_steady_tick(TICK_INTERVAL);
            line
        });
        if let Some(line) = &line {
            line.set_message(plain(what));
        }
        Self { out, line }
    }

    pub(crate) fn step(&self, what: &str) {
        match &self.line {
            Some(line) => line.set_message(plain(what)),
            None => self.out.notice(&plain(what)),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(line) = &self.line {
            line.finish_and_clear();
        }
    }
}
