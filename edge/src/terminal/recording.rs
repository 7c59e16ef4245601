//! Recordings of terminal sessions: what an agent may upload, and whether there is room for it.
//!
//! The agent makes a recording (decision 0020), `persistence::recordings` stores it, and it is shown as asciicast ([`asciicast`]).

pub(crate) mod asciicast;
#[cfg(test)]
mod fuzz;

use crate::http::error::{ApiError, Code};
use actors::shell_dependencies::Environment;
use domain::policy::{PolicyKey, Scopes};
use domain::recording::{RecordingMode, RecordingTerms};
use persistence::Recordings;
use persistence::metrics::registered;
use prometheus::{IntCounter, Registry};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;
use wire::recording::{CHUNK_MAX, FrameContent, Frames};

/// How long a sum of all recordings is good: a chunk more or less does not matter.
const TOTAL_CACHE_TTL: Duration = Duration::from_secs(10);
/// `Retry-After` for an agent whose chunk found no room.
const NO_ROOM_RETRY_AFTER: Duration = Duration::from_secs(30);

/// The terms in the form that agents receive.
pub(crate) fn on_the_wire(terms: RecordingTerms) -> wire::recording::RecordTerms {
    let mode = match terms.mode {
        RecordingMode::Off => wire::recording::RecordMode::Off,
        RecordingMode::BestEffort => wire::recording::RecordMode::BestEffort,
        RecordingMode::Strict => wire::recording::RecordMode::Strict,
    };
    wire::recording::RecordTerms { mode, most_bytes: terms.most_bytes }
}

/// The summary of a chunk's frames, where they are valid.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ChunkSummary {
    pub(crate) lost_bytes: u64,
    pub(crate) micros: u64,
    pub(crate) ends: bool,
}

/// Reads a chunk through. Whatever cannot be shown later is refused now.
///
/// # Errors
/// `payload_too_large`, and `invalid_request` with the position.
pub(crate) fn summary(seq: u32, frames: &[u8]) -> Result<ChunkSummary, ApiError> {
    if frames.len() > CHUNK_MAX {
        return Err(ApiError::new(Code::PayloadTooLarge, format!("A chunk has at most {CHUNK_MAX} bytes."))
            .detail("limit_bytes", CHUNK_MAX));
    }
    if frames.is_empty() {
        return Err(ApiError::invalid_request("A chunk has a frame at least."));
    }
    let mut summary = ChunkSummary::default();
    for (index, frame) in Frames::of(frames).enumerate() {
        let frame = frame.map_err(|wrong| {
            ApiError::invalid_request(format!("The chunk is no frames from byte {} on.", wrong.at))
                .detail("at", wrong.at)
        })?;
        let begins = matches!(frame.what, FrameContent::Begin { .. });
        if begins != (seq == 0 && index == 0) {
            return Err(ApiError::invalid_request("The first frame of a recording, and no other, begins it."));
        }
        if summary.ends {
            return Err(ApiError::invalid_request("Nothing follows the frame that ends a recording."));
        }
        if frame.micros < summary.micros {
            return Err(ApiError::invalid_request("The frames of a chunk are in the order of their times."));
        }
        summary.micros = frame.micros;
        match frame.what {
            FrameContent::Gap { bytes } => summary.lost_bytes = summary.lost_bytes.saturating_add(bytes),
            FrameContent::End(_) => summary.ends = true,
            FrameContent::Begin { .. }
            | FrameContent::Output(_)
            | FrameContent::Resize { .. }
            | FrameContent::Paused
            | FrameContent::Resumed => {}
        }
    }
    Ok(summary)
}

/// What this process has received, and a cached total of all recordings; cheap to clone.
#[derive(Clone)]
pub(crate) struct RecordingIntake(Arc<Parts>);

struct Parts {
    all: Mutex<Option<(Instant, u64)>>,
    metrics: RecordingMetrics,
}

struct RecordingMetrics {
    stored: IntCounter,
    bytes: IntCounter,
    refused: IntCounter,
    no_room: IntCounter,
}

impl RecordingIntake {
    /// # Errors
    /// Where the registry has metrics of these names.
    pub(crate) fn register(registry: &Registry) -> prometheus::Result<Self> {
        let counter = |name, help| registered(registry, IntCounter::new(name, help));
        let metrics = RecordingMetrics {
            stored: counter("terminal_recording_chunks_total", "Chunks of terminal recordings that were stored.")?,
            bytes: counter("terminal_recording_bytes_total", "Bytes of terminal recordings that were stored.")?,
            refused: counter("terminal_recording_refused_total", "Chunks of terminal recordings that were refused.")?,
            no_room: counter(
                "terminal_recording_no_room_total",
                "Chunks of terminal recordings that were refused because a policy's limit was reached.",
            )?,
        };
        Ok(Self(Arc::new(Parts { all: Mutex::new(None), metrics })))
    }

    pub(crate) fn count_stored(&self, bytes: usize) {
        self.0.metrics.stored.inc();
        self.0.metrics.bytes.inc_by(bytes as u64);
    }

    pub(crate) fn count_refused(&self) {
        self.0.metrics.refused.inc();
    }

    /// Refuses, for the time being, a chunk over the size that the policies allow: room comes with time, or from an operator.
    ///
    /// # Errors
    /// `service_unavailable`
    pub(crate) async fn check_room(
        &self,
        environment: &dyn Environment,
        recordings: &Recordings,
        owner: &str,
        scopes: &Scopes,
    ) -> Result<(), ApiError> {
        let (policy, now) = (environment.policy(), environment.now());
        let most = |key| policy.int(key, scopes, now).unsigned_abs() * 1024 * 1024;
        let of_owner = recordings.bytes(Some(owner)).await.map_err(ApiError::unavailable)?;
        let key = if of_owner >= most(PolicyKey::TerminalRecordingMaxUser) {
            PolicyKey::TerminalRecordingMaxUser
        } else if self.total_bytes(recordings).await? >= most(PolicyKey::TerminalRecordingMaxTotal) {
            PolicyKey::TerminalRecordingMaxTotal
        } else {
            return Ok(());
        };
        self.0.metrics.no_room.inc();
        tracing::warn!(policy_key = key.name(), "there is no room for a terminal's recording: policy {}", key.name());
        let error = ApiError::unavailable(format!("no room for recordings: {}", key.name()));
        Err(error.detail("policy_key", key.name()).retry_after(NO_ROOM_RETRY_AFTER))
    }

    async fn total_bytes(&self, recordings: &Recordings) -> Result<u64, ApiError> {
        let known = *self.0.all.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, sum)) = known
            && at.elapsed() < TOTAL_CACHE_TTL
        {
            return Ok(sum);
        }
        let sum = recordings.bytes(None).await.map_err(ApiError::unavailable)?;
        *self.0.all.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), sum));
        Ok(sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire::recording::{Frame, RecordingEnd};

    fn chunk(frames: &[(u64, FrameContent)]) -> Vec<u8> {
        let mut bytes = Vec::new();
        frames.iter().for_each(|(micros, what)| Frame { micros: *micros, what: what.clone() }.write(&mut bytes));
        bytes
    }

    fn begin() -> FrameContent {
        FrameContent::Begin { columns: 80, rows: 24 }
    }

    fn output() -> FrameContent {
        FrameContent::Output(b"x".to_vec())
    }

    #[test]
    fn valid_chunk_is_summarized() {
        let first = chunk(&[(0, begin()), (5, FrameContent::Gap { bytes: 7 }), (5, output())]);
        assert_eq!(summary(0, &first).unwrap(), ChunkSummary { lost_bytes: 7, micros: 5, ends: false });
        let last = chunk(&[(9, FrameContent::End(RecordingEnd::Session))]);
        assert_eq!(summary(4, &last).unwrap(), ChunkSummary { lost_bytes: 0, micros: 9, ends: true });
    }

    #[test]
    fn invalid_chunk_is_refused_with_its_fault() {
        let too_long = chunk(&[(0, FrameContent::Output(vec![b'x'; CHUNK_MAX]))]);
        assert_eq!(summary(1, &too_long).unwrap_err().code(), Code::PayloadTooLarge);
        let end = FrameContent::End(RecordingEnd::Session);
        for (seq, frames) in [
            (0, chunk(&[(0, output())])),
            (0, chunk(&[(0, begin()), (0, begin())])),
            (1, chunk(&[(0, begin())])),
            (1, chunk(&[(9, output()), (8, output())])),
            (1, chunk(&[(1, end), (1, output())])),
            (1, b"rubbish".to_vec()),
            (1, Vec::new()),
            (1, [chunk(&[(1, output())]), vec![2]].concat()),
        ] {
            assert_eq!(summary(seq, &frames).unwrap_err().code(), Code::InvalidRequest, "{frames:?}");
        }
    }
}
