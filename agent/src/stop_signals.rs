//! The signals by which a service manager, or a person, stops a program of the node.

use std::io;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// SIGTERM and SIGINT of this process, from now on.
pub struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl StopSignals {
    /// # Errors
    /// Where the process cannot receive signals.
    pub fn listen() -> io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// Waits for one of them.
    pub async fn received(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    /// A token that the first of them cancels.
    #[must_use]
    pub fn into_token(mut self) -> CancellationToken {
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        tokio::spawn(async move {
            self.received().await;
            stopped.cancel();
        });
        stop
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::signal::{Signal as SystemSignal, raise};

    #[tokio::test]
    async fn token_is_cancelled_by_either_signal() {
        for received in [SystemSignal::SIGTERM, SystemSignal::SIGINT] {
            let stop = StopSignals::listen().unwrap().into_token();
            assert!(!stop.is_cancelled());
            raise(received).unwrap();
            stop.cancelled().await;
        }
    }
}
