//! Raw mode of the user's terminal while a remote shell is shown in it. The former mode is restored after a return, a panic or a signal
//! that can be caught. (After `kill -9` of this program, `reset` restores it.)

use rustix::termios::{OptionalActions, QueueSelector, Termios, tcflush, tcgetattr, tcgetwinsize, tcsetattr};
use std::io::{self, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, Once, PoisonError};

/// The terminal and its former mode.
static SAVED_MODES: Mutex<Option<(OwnedFd, Termios)>> = Mutex::new(None);
static HOOK: Once = Once::new();

/// Resets what a disconnected program may have left on: mouse reports, bracketed paste, a hidden cursor, colours.
const RESET_SEQUENCES: &[u8] = b"\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?2004l\x1b[?25h\x1b[0m";

/// A guard: the terminal is in raw mode until it is dropped.
pub(crate) struct RawMode;

impl RawMode {
    pub(crate) fn begin(terminal: impl AsFd) -> io::Result<Self> {
        let terminal = terminal.as_fd().try_clone_to_owned()?;
        let before = tcgetattr(&terminal)?;
        HOOK.call_once(|| {
            let default_hook = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                // Restored first, so that the panic message is readable.
                restore();
                default_hook(panic);
            }));
        });
        *SAVED_MODES.lock().unwrap_or_else(PoisonError::into_inner) = Some((terminal, before));
        let raw = Self;
        raw.enter()?;
        Ok(raw)
    }

    /// Enters raw mode, also after [`RawMode::suspend`].
    pub(crate) fn enter(&self) -> io::Result<()> {
        let before = SAVED_MODES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((terminal, modes)) = &*before {
            let mut raw = modes.clone();
            raw.make_raw();
            tcsetattr(terminal, OptionalActions::Now, &raw)?;
        }
        Ok(())
    }

    /// Restores the former mode while this program is suspended.
    pub(crate) fn suspend(&self) {
        restore();
    }

    /// Turns off modes that a program that was cut off may have left on.
    pub(crate) fn reset_modes(&self) {
        let mut out = io::stdout().lock();
        let _ = out.write_all(RESET_SEQUENCES).and_then(|()| out.flush());
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        restore();
        SAVED_MODES.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

fn restore() {
    let before = SAVED_MODES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((terminal, modes)) = &*before {
        let _ = tcsetattr(terminal, OptionalActions::Now, modes);
    }
}

/// Discards unread input.
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
mod tests {
    use super::*;
    use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
    use rustix::termios::LocalModes;

    #[test]
    fn terminal_mode_is_restored_after_a_return_and_before_a_panic_message() {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let terminal = ioctl_tiocgptpeer(&master, OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        let is_raw = || !tcgetattr(&terminal).unwrap().local_modes.contains(LocalModes::ICANON);
        assert!(!is_raw());
        let raw = RawMode::begin(&terminal).unwrap();
        assert!(is_raw());
        raw.suspend();
        assert!(!is_raw());
        raw.enter().unwrap();
        drop(raw);
        assert!(!is_raw());

        let raw = RawMode::begin(&terminal).unwrap();
        // The hook alone must restore it: an aborting process does not unwind.
        let panicked = std::thread::scope(|scope| scope.spawn(|| panic!("as a test wants it")).join());
        assert!(panicked.is_err() && !is_raw());
        drop(raw);
    }
}
