//! Recordings of terminal sessions: what an agent may send of one, and whether there is room for it.
//!
//! Made by the agent (decision 0023), kept by `persistence::recordings`, shown as asciicast ([`asciicast`]).

pub(crate) mod asciicast;

use crate::error::{ApiError, Code};
use crate::services::Services;
use domain::policy::{Key, Scopes};
use domain::recording::{Mode, Terms};
use prometheus::{IntCounter, Registry};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;
use wire::recording::{CHUNK_MOST, Frames, What};

/// How long a sum of all recordings is good: a chunk more or less does not matter.
const SUM_IS_GOOD_FOR: Duration = Duration::from_secs(10);
/// How soon an agent comes again that found no room.
const NO_ROOM_FOR: Duration = Duration::from_secs(30);

/// The terms as agents are told them.
pub(crate) fn on_the_wire(terms: Terms) -> wire::recording::Terms {
    let mode = match terms.mode {
        Mode::Off => wire::recording::Mode::Off,
        Mode::BestEffort => wire::recording::Mode::BestEffort,
        Mode::Strict => wire::recording::Mode::Strict,
    };
    wire::recording::Terms { mode, most_bytes: terms.most_bytes }
}

/// What the frames of a chunk say, where they are frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Summary {
    pub(crate) lost_bytes: u64,
    pub(crate) micros: u64,
    pub(crate) ends: bool,
}

/// Reads a chunk through. Whatever cannot be shown later is refused now.
///
/// # Errors
/// `payload_too_large`, and `invalid_request` with the place.
pub(crate) fn summary(seq: u32, frames: &[u8]) -> Result<Summary, ApiError> {
    if frames.len() > CHUNK_MOST {
        return Err(ApiError::new(Code::PayloadTooLarge, format!("A chunk has at most {CHUNK_MOST} bytes."))
            .detail("limit_bytes", CHUNK_MOST));
    }
    if frames.is_empty() {
        return Err(ApiError::invalid_request("A chunk has a frame at least."));
    }
    let mut summary = Summary::default();
    for (index, frame) in Frames::of(frames).enumerate() {
        let frame = frame.map_err(|wrong| {
            ApiError::invalid_request(format!("The chunk is no frames from byte {} on.", wrong.at))
                .detail("at", wrong.at)
        })?;
        let begins = matches!(frame.what, What::Begin { .. });
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
            What::Gap { bytes } => summary.lost_bytes = summary.lost_bytes.saturating_add(bytes),
            What::End(_) => summary.ends = true,
            What::Begin { .. } | What::Output(_) | What::Resize { .. } | What::Paused | What::Resumed => {}
        }
    }
    Ok(summary)
}

/// What this process has taken in, and how much there is altogether; cheap to clone.
#[derive(Clone)]
pub(crate) struct Shelf(Arc<Parts>);

struct Parts {
    all: Mutex<Option<(Instant, u64)>>,
    figures: Figures,
}

struct Figures {
    kept: IntCounter,
    bytes: IntCounter,
    refused: IntCounter,
    no_room: IntCounter,
}

impl Shelf {
    /// # Errors
    /// Where the registry has metrics of these names.
    pub(crate) fn register(registry: &Registry) -> prometheus::Result<Self> {
        let counter = |name, help| {
            let counter = IntCounter::new(name, help)?;
            registry.register(Box::new(counter.clone())).map(|()| counter)
        };
        let figures = Figures {
            kept: counter("terminal_recording_chunks_total", "Chunks of terminal recordings that were kept.")?,
            bytes: counter("terminal_recording_bytes_total", "Bytes of terminal recordings that were kept.")?,
            refused: counter("terminal_recording_refused_total", "Chunks of terminal recordings that were refused.")?,
            no_room: counter(
                "terminal_recording_no_room_total",
                "Chunks of terminal recordings for which the policies leave no room.",
            )?,
        };
        Ok(Self(Arc::new(Parts { all: Mutex::new(None), figures })))
    }

    pub(crate) fn kept(&self, bytes: usize) {
        self.0.figures.kept.inc();
        self.0.figures.bytes.inc_by(bytes as u64);
    }

    pub(crate) fn refused(&self) {
        self.0.figures.refused.inc();
    }

    /// Refuses what would be more than the policies let be kept, for the time being: room comes with time, or from an operator.
    ///
    /// # Errors
    /// `service_unavailable`
    pub(crate) async fn check_room(&self, services: &Services, owner: &str, scopes: &Scopes) -> Result<(), ApiError> {
        let (policy, now) = (services.world.policy(), services.world.now());
        let most = |key| policy.int(key, scopes, now).unsigned_abs() * 1024 * 1024;
        let recordings = services.trust.secrets.recordings();
        let of_owner = recordings.bytes(Some(owner)).await.map_err(ApiError::unavailable)?;
        let key = if of_owner >= most(Key::TerminalRecordingMaxUser) {
            Key::TerminalRecordingMaxUser
        } else if self.all(services).await? >= most(Key::TerminalRecordingMaxTotal) {
            Key::TerminalRecordingMaxTotal
        } else {
            return Ok(());
        };
        self.0.figures.no_room.inc();
        tracing::warn!(policy_key = key.name(), "there is no room for a terminal's recording: policy {}", key.name());
        let error = ApiError::unavailable(format!("no room for recordings: {}", key.name()));
        Err(error.detail("policy_key", key.name()).retry_after(NO_ROOM_FOR))
    }

    async fn all(&self, services: &Services) -> Result<u64, ApiError> {
        let known = *self.0.all.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, sum)) = known
            && at.elapsed() < SUM_IS_GOOD_FOR
        {
            return Ok(sum);
        }
        let sum = services.trust.secrets.recordings().bytes(None).await.map_err(ApiError::unavailable)?;
        *self.0.all.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), sum));
        Ok(sum)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use wire::recording::{Ended, Frame};

    fn chunk(frames: &[(u64, What)]) -> Vec<u8> {
        let mut bytes = Vec::new();
        frames.iter().for_each(|(micros, what)| Frame { micros: *micros, what: what.clone() }.write(&mut bytes));
        bytes
    }

    fn begin() -> What {
        What::Begin { columns: 80, rows: 24 }
    }

    fn output() -> What {
        What::Output(b"x".to_vec())
    }

    #[test]
    fn an_honest_chunk_is_summed_up() {
        let first = chunk(&[(0, begin()), (5, What::Gap { bytes: 7 }), (5, output())]);
        assert_eq!(summary(0, &first).unwrap(), Summary { lost_bytes: 7, micros: 5, ends: false });
        let last = chunk(&[(9, What::End(Ended::Session))]);
        assert_eq!(summary(4, &last).unwrap(), Summary { lost_bytes: 0, micros: 9, ends: true });
    }

    #[test]
    fn a_hostile_chunk_is_refused_with_its_fault() {
        let too_long = chunk(&[(0, What::Output(vec![b'x'; CHUNK_MOST]))]);
        assert_eq!(summary(1, &too_long).unwrap_err().code(), Code::PayloadTooLarge);
        let end = What::End(Ended::Session);
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
