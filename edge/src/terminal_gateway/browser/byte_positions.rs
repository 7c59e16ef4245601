//! How far a user's connection is, over all links to its agent.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use tokio::sync::{Notify, mpsc};
use wire::terminal::{INPUT_WINDOW, TerminalCommand};

#[derive(Default)]
pub(super) struct Progress {
    /// Output is with the user up to here, as far as that is known.
    pub(super) delivered: AtomicU64,
    pub(super) is_attached: AtomicBool,
    /// The client's acknowledged position, once it acknowledges at all.
    pub(super) acknowledged: AtomicU64,
    pub(super) acknowledges: AtomicBool,
    /// Input bytes sent, and read by the program, on this link.
    sent: AtomicU64,
    pub(super) taken: AtomicU64,
    pub(super) room: Notify,
    /// The client sent a ping.
    pub(super) pinged: Notify,
    /// Input waits for the program, so that no message of the client can be read.
    stuck: AtomicBool,
}

impl Progress {
    pub(super) fn begin_link(&self) {
        self.sent.store(0, Ordering::Relaxed);
        self.taken.store(0, Ordering::Relaxed);
        self.stuck.store(false, Ordering::Relaxed);
    }

    /// Whether the client acknowledges itself, so that written output does not count as acknowledged.
    pub(super) fn waits_for_client(&self) -> bool {
        self.acknowledges.load(Ordering::Relaxed) && !self.stuck.load(Ordering::Relaxed)
    }

    /// Records the client's acknowledgement; returns the position where it advances.
    pub(super) fn acknowledge(&self, position: u64) -> Option<u64> {
        self.acknowledges.store(true, Ordering::Relaxed);
        let position = position.min(self.delivered.load(Ordering::Relaxed));
        let before = self.acknowledged.fetch_max(position, Ordering::Relaxed);
        (position > before).then_some(position)
    }

    /// Waits until the program has read enough of the earlier input.
    pub(super) async fn make_room(&self, down: &mpsc::Sender<TerminalCommand>, attachment: u32, bytes: u64) {
        loop {
            let (sent, taken) = (self.sent.load(Ordering::Relaxed), self.taken.load(Ordering::Relaxed));
            let on_the_way = sent.saturating_sub(taken);
            if on_the_way + bytes <= INPUT_WINDOW {
                break;
            }
            // The client's acknowledgements are queued behind its input: until that is read, written output counts as acknowledged, or both
            // sides wait for each other.
            self.stuck.store(true, Ordering::Relaxed);
            let position = self.delivered.load(Ordering::Relaxed);
            let _ = down.send(TerminalCommand::Ack { attachment, position }).await;
            self.room.notified().await;
        }
        self.stuck.store(false, Ordering::Relaxed);
        self.sent.fetch_add(bytes, Ordering::Relaxed);
    }
}
