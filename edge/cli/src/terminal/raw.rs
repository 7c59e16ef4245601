//! The user's own terminal, raw while a shell elsewhere is shown in it, and as it was again whatever ends that: a return, a panic, a signal
//! that can be caught. (After `kill -9` of this program, `reset` does it.)

use rustix::termios::{OptionalActions, QueueSelector, Termios, tcflush, tcgetattr, tcgetwinsize, tcsetattr};
use std::io::{self, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, Once, PoisonError};

/// What the terminal was before.
static BEFORE: Mutex<Option<(OwnedFd, Termios)>> = Mutex::new(None);
static HOOK: Once = Once::new();

/// What a program that was cut off may have left on: mouse reports, bracketed paste, a hidden cursor, colours.
const OFF: &[u8] = b"\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?2004l\x1b[?25h\x1b[0m";

/// The terminal is raw as long as this lives.
pub(crate) struct Raw;

impl Raw {
    pub(crate) fn begin(terminal: impl AsFd) -> io::Result<Self> {
        let terminal = terminal.as_fd().try_clone_to_owned()?;
        let before = tcgetattr(&terminal)?;
        HOOK.call_once(|| {
            let tells = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                // First, so that what it tells can be read.
                restore();
                tells(panic);
            }));
        });
        *BEFORE.lock().unwrap_or_else(PoisonError::into_inner) = Some((terminal, before));
        let raw = Self;
        raw.again()?;
        Ok(raw)
    }

    /// Raw once more, after a rest.
    pub(crate) fn again(&self) -> io::Result<()> {
        let before = BEFORE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((terminal, modes)) = &*before {
            let mut raw = modes.clone();
            raw.make_raw();
            tcsetattr(terminal, OptionalActions::Now, &raw)?;
        }
        Ok(())
    }

    /// As it was, for as long as the user is elsewhere.
    pub(crate) fn rest(&self) {
        restore();
    }

    /// Turns off what a program that did not end by itself may have left on.
    pub(crate) fn sober(&self) {
        let mut out = io::stdout().lock();
        let _ = out.write_all(OFF).and_then(|()| out.flush());
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        restore();
        BEFORE.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

fn restore() {
    let before = BEFORE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((terminal, modes)) = &*before {
        let _ = tcsetattr(terminal, OptionalActions::Now, modes);
    }
}

/// Forgets what was typed and not read.
pub(crate) fn discard_typed(terminal: impl AsFd) {
    let _ = tcflush(terminal, QueueSelector::IFlush);
}

/// Columns and rows.
pub(crate) fn size(terminal: impl AsFd) -> (u16, u16) {
    match tcgetwinsize(terminal) {
        Ok(size) if size.ws_col > 0 && size.ws_row > 0 => (size.ws_col, size.ws_row),
        Ok(_) | Err(_) => (80, 24),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
    use rustix::termios::LocalModes;

    #[test]
    fn the_terminal_is_as_it_was_after_a_return_and_before_a_panic_is_told() {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let terminal = ioctl_tiocgptpeer(&master, OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        let is_raw = || !tcgetattr(&terminal).unwrap().local_modes.contains(LocalModes::ICANON);
        assert!(!is_raw());
        let raw = Raw::begin(&terminal).unwrap();
        assert!(is_raw());
        raw.rest();
        assert!(!is_raw());
        raw.again().unwrap();
        drop(raw);
        assert!(!is_raw());

        let raw = Raw::begin(&terminal).unwrap();
        // The hook alone has to do it: nothing is unwound where a process aborts.
        let panicked = std::thread::scope(|scope| scope.spawn(|| panic!("as a test wants it")).join());
        assert!(panicked.is_err() && !is_raw());
        drop(raw);
    }
}
