//! How far a user's connection is, over all links to its agent.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use tokio::sync::{Notify, mpsc};
use wire::terminal::{Down, INPUT_WINDOW};

#[derive(Default)]
pub(super) struct Progress {
    /// Output is with the user up to here, as far as that is known.
    pub(super) delivered: AtomicU64,
    pub(super) knows: AtomicBool,
    /// Up to where the client says it has it, once it says so.
    pub(super) acknowledged: AtomicU64,
    pub(super) acknowledges: AtomicBool,
    /// Input that was sent and taken, on this link.
    sent: AtomicU64,
    pub(super) taken: AtomicU64,
    pub(super) room: Notify,
    /// The client asked whether anybody is there.
    pub(super) pinged: Notify,
    /// Input waits for the program, so that nothing that the client says can be read.
    stuck: AtomicBool,
}

impl Progress {
    pub(super) fn begin_link(&self) {
        self.sent.store(0, Ordering::Relaxed);
        self.taken.store(0, Ordering::Relaxed);
        self.stuck.store(false, Ordering::Relaxed);
    }

    /// Whether what is written does not count, and the client says what does.
    pub(super) fn waits_for_client(&self) -> bool {
        self.acknowledges.load(Ordering::Relaxed) && !self.stuck.load(Ordering::Relaxed)
    }

    /// The client has it up to here. Up to where that is news, if it is any.
    pub(super) fn acknowledge(&self, position: u64) -> Option<u64> {
        self.acknowledges.store(true, Ordering::Relaxed);
        let position = position.min(self.delivered.load(Ordering::Relaxed));
        let before = self.acknowledged.fetch_max(position, Ordering::Relaxed);
        (position > before).then_some(position)
    }

    /// Waits until the program has taken enough of what was typed before.
    pub(super) async fn make_room(&self, down: &mpsc::Sender<Down>, attachment: u32, bytes: u64) {
        loop {
            let (sent, taken) = (self.sent.load(Ordering::Relaxed), self.taken.load(Ordering::Relaxed));
            let on_the_way = sent.saturating_sub(taken);
            if on_the_way + bytes <= INPUT_WINDOW {
                break;
            }
            // Its acknowledgements lie behind its input: until that is taken, what is written counts, or the two wait for each other.
            self.stuck.store(true, Ordering::Relaxed);
            let position = self.delivered.load(Ordering::Relaxed);
            let _ = down.send(Down::Ack { attachment, position }).await;
            self.room.notified().await;
        }
        self.stuck.store(false, Ordering::Relaxed);
        self.sent.fetch_add(bytes, Ordering::Relaxed);
    }
}
