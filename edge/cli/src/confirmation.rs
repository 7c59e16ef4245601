//! Confirmation of irreversible commands: a user at a terminal is asked, and a script passes `--yes`.

use crate::failure::Failure;
use std::io::{self, BufRead, BufReader, IsTerminal as _, Read as _};

/// The longest line that is read as an answer.
const LONGEST: u64 = 64;

#[derive(Debug, clap::Args)]
pub(crate) struct Confirm {
    /// Do not ask for a confirmation.
    #[arg(long, short)]
    yes: bool,
}

impl Confirm {
    /// Whether the command line confirms it, so that nothing is asked.
    pub(crate) const fn is_given(&self) -> bool {
        self.yes
    }

    /// Asks `question` on the terminal. Without a terminal `--yes` is required.
    pub(crate) fn ask(&self, question: &str) -> Result<(), Failure> {
        if self.yes {
            return Ok(());
        }
        if !io::stdin().is_terminal() {
            return Err(Failure::usage("this asks for a confirmation, and there is no terminal to ask in")
                .next("Confirm it on the command line: --yes"));
        }
        read_confirmation(question, &mut BufReader::new(io::stdin().lock()), &mut io::stderr().lock())
    }
}

fn read_confirmation(question: &str, answers: &mut impl BufRead, screen: &mut impl io::Write) -> Result<(), Failure> {
    let unread = |error: io::Error| Failure::usage(format!("no answer can be read: {error}"));
    write!(screen, "{} [y/N] ", crate::printable::plain(question)).and_then(|()| screen.flush()).map_err(unread)?;
    let mut line = String::new();
    answers.take(LONGEST).read_line(&mut line).map_err(unread)?;
    match line.trim().to_ascii_lowercase().as_str() {
        "y" | "yes" => Ok(()),
        _ => Err(Failure::usage("not confirmed; nothing was done")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_yes_confirms() {
        let answered = |line: &str| {
            let mut screen = Vec::new();
            let confirmed = read_confirmation("Remove node 7?", &mut line.as_bytes(), &mut screen).is_ok();
            (confirmed, String::from_utf8_lossy(&screen).into_owned())
        };
        assert_eq!(answered("y\n"), (true, "Remove node 7? [y/N] ".to_owned()));
        assert!(answered(" YES \n").0);
        for no in ["", "\n", "n\n", "yesterday\n", "yes but no\n"] {
            assert!(!answered(no).0, "{no:?}");
        }
    }
}
