//! The progress of a command that waits: a spinner in a terminal that can move its cursor, a line per step elsewhere.

use crate::output::Output;
use crate::printable::plain;
use indicatif::{ProgressBar, ProgressStyle};
use std::ffi::OsStr;
use std::io::{self, IsTerminal as _};
use std::time::Duration;
use tokio::time::error::Elapsed;

const TICK_INTERVAL: Duration = Duration::from_millis(100);
/// The exit status of a program that SIGINT has ended.
const INTERRUPTED: i32 = 130;

pub(crate) struct Progress {
    out: Output,
    line: Option<ProgressBar>,
}

impl Progress {
    pub(crate) fn begin(out: Output, what: &str) -> Self {
        let line = (!out.quiet && io::stderr().is_terminal() && moves_cursor(std::env::var_os("TERM").as_deref()))
            .then(|| {
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

    /// Waits for at most `limit`. Ctrl-C ends this program, with a notice that `what` goes on, and the command that shows it.
    pub(crate) async fn wait<T>(
        &self,
        watched: impl Future<Output = T>,
        limit: Duration,
        what: &str,
        shown_by: &str,
    ) -> Result<T, Elapsed> {
        tokio::select! {
            watched = tokio::time::timeout(limit, watched) => watched,
            _ = tokio::signal::ctrl_c() => {
                self.clear();
                self.out.notice(&format!("{what} goes on without being watched: {shown_by}"));
                std::process::exit(INTERRUPTED);
            }
        }
    }

    fn clear(&self) {
        if let Some(line) = &self.line {
            line.finish_and_clear();
        }
    }
}

/// Whether a terminal of this name (`TERM`) can redraw a line. Editors and serial consoles set `dumb`, or nothing.
fn moves_cursor(terminal: Option<&OsStr>) -> bool {
    terminal.is_some_and(|name| !name.is_empty() && name != "dumb" && name != "unknown")
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spinner_is_drawn_in_a_terminal_that_names_itself() {
        for (name, draws) in [(Some("xterm-256color"), true), (Some("dumb"), false), (Some(""), false), (None, false)] {
            assert_eq!(moves_cursor(name.map(OsStr::new)), draws, "{name:?}");
        }
    }
}
