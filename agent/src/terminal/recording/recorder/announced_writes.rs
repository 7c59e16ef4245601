//! The recording passes from one process of the agent to the next: each write is announced before it happens.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use wire::recording::RecordMode;

use super::Recorder;
use crate::terminal::recording::spool::{Spool, SpoolWriter};
use crate::terminal::session_handover::{CommitPoint, RecordFile, RecordingPoint, RecordingState};

impl Recorder {
    /// Continues a recording of an earlier process at `committed`, of a session whose output is there from `start` to `end`. Returns the
    /// position from which output is to be recorded.
    pub(in crate::terminal) fn adopt(
        spool: Arc<Spool>,
        committed: CommitPoint,
        point: RecordingPoint,
        record: RecordFile,
        (start, end): (u64, u64),
    ) -> (Self, u64) {
        let CommitPoint { terms, state, .. } = committed;
        let mut it = Self::new(Arc::clone(&spool), terms, point.size);
        // Output that is not recorded may have been shown up to its end.
        let is_on = state == RecordingState::On && terms.mode != RecordMode::Off;
        let from = if is_on { committed.position.clamp(start, end) } else { end };
        let unrecorded = from.saturating_sub(committed.position);
        match (state, terms.mode) {
            (_, RecordMode::Off) => {}
            (RecordingState::On, _) => it.lost = unrecorded,
            (RecordingState::Full | RecordingState::Over | RecordingState::Ended, _) => it.past_limit = unrecorded,
        }
        let next = committed.chunk + u32::from(committed.length > 0);
        let is_ended = state == RecordingState::Ended;
        it.writer = (!is_ended).then(|| SpoolWriter::resume(spool, next, committed.recorded, point.most));
        it.last = committed.micros;
        it.most = point.most;
        it.begun = began_at(point.began_micros);
        it.state = state;
        it.end_notified = true;
        it.shown = from;
        it.committed = committed;
        it.intended = committed;
        it.record = Some(record);
        it.announce();
        (it, from)
    }

    /// What the next process of the agent must know.
    pub(in crate::terminal) fn point(&self) -> RecordingPoint {
        let began = monotonic().saturating_sub(self.begun.elapsed());
        RecordingPoint {
            began_micros: u64::try_from(began.as_micros()).unwrap_or(u64::MAX),
            size: self.size,
            most: self.most,
            before: self.committed,
            after: self.intended,
        }
    }

    /// Has each write announced in the session's record before it happens.
    pub(in crate::terminal) fn announce_in(&mut self, record: RecordFile) {
        self.record = Some(record);
        self.announce();
    }

    pub(super) fn announce(&self) {
        if let Some(record) = &self.record {
            record.record(self.point());
        }
    }

    /// Announces a write of so many bytes, after which the recording is there.
    pub(super) fn intend(
        &mut self,
        writer: &SpoolWriter,
        bytes: usize,
        (position, micros): (u64, Option<u64>),
        state: RecordingState,
    ) {
        let (chunk, length, recorded) = writer.after(bytes);
        let terms = self.in_flight.terms.unwrap_or(self.committed.terms);
        self.intended = CommitPoint { chunk, length, recorded, position, micros, terms, state };
        self.announce();
    }

    /// Leaves the recording to the next process of the agent.
    pub(in crate::terminal) fn leave(&self) {
        self.spool.leave();
    }
}

/// The machine's monotonic clock, by which the processes of one boot agree.
fn monotonic() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Duration::try_from(now).unwrap_or_default()
}

/// That time of the monotonic clock.
fn began_at(micros: u64) -> Instant {
    let ago = monotonic().saturating_sub(Duration::from_micros(micros));
    Instant::now().checked_sub(ago).unwrap_or_else(Instant::now)
}
