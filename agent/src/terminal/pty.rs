//! The agent's end of a pseudo-terminal (pty(7)).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use rustix::pipe::{SpliceFlags, splice};
use rustix::termios::{Winsize, tcsetwinsize};
use tokio::io::unix::AsyncFd;

/// Its reader and its writer share it.
#[derive(Debug)]
pub(super) struct PtyMaster(AsyncFd<OwnedFd>);

impl PtyMaster {
    /// # Errors
    /// It cannot be made non-blocking, or not be waited for.
    #[allow(unsafe_code)]
    pub(super) fn new(master: OwnedFd) -> io::Result<Self> {
        let flags = OFlag::from_bits_retain(fcntl(&master, FcntlArg::F_GETFL)?);
        fcntl(&master, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        // SAFETY: an `OwnedFd` names one descriptor and keeps it open for as long as it lives.
        let registered = unsafe { AsyncFd::register(master) };
        registered.map(Self).map_err(io::Error::from)
    }

    /// Sets the size in characters.
    ///
    /// # Errors
    /// It is no terminal.
    pub(super) fn resize(&self, columns: u16, rows: u16) -> io::Result<()> {
        let size = Winsize { ws_col: columns, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 };
        Ok(tcsetwinsize(&self.0, size)?)
    }

    /// # Errors
    /// EIO when every program has closed the terminal.
    pub(super) async fn read(&self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            let mut ready = self.0.readable().await?;
            if let Ok(read) = ready.try_io(|master| Ok(rustix::io::read(master, &mut *into)?)) {
                return read;
            }
        }
    }

    /// Moves output into a pipe that has room for it. The kernel does it in one step, so that no signal falls in between.
    ///
    /// # Errors
    /// EIO when every program has closed the terminal.
    pub(super) async fn splice(&self, pipe: BorrowedFd<'_>, most: usize) -> io::Result<usize> {
        loop {
            let mut ready = self.0.readable().await?;
            let moved = ready.try_io(|master| Ok(splice(master, None, pipe, None, most, SpliceFlags::NONBLOCK)?));
            if let Ok(moved) = moved {
                return moved;
            }
        }
    }

    /// # Errors
    /// EIO when every program has closed the terminal.
    pub(super) async fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            let mut ready = self.0.writable().await?;
            if let Ok(written) = ready.try_io(|master| Ok(rustix::io::write(master, bytes)?)) {
                return written;
            }
        }
    }
}

impl AsFd for PtyMaster {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.get_ref().as_fd()
    }
}
