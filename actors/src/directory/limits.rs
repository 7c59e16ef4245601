//! Asks the keeper of a rate limit's cell: here, or over the bus at the owner of its shard.
//!
//! Its words are a few bytes beside the commands on the shard's subject, told apart by their first byte: a command is JSON and begins
//! with a brace. A member of a release that does not know them answers something else, and counts as out of reach.

use super::Directory;
use crate::place::shard_of;
use crate::ports::RemoteError;
use domain::Shard;
use domain::rate_limit::{Handed, Verdict};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// The first bytes of a question and an answer: what it is, and the version of its form.
const MARK: [u8; 2] = [b'L', 1];

/// A cell that is handed over: its id, its level, its age.
const HANDED: usize = 16 + 8 + 8;
/// The cells in one message, which is half of what NATS takes.
const IN_ONE_MESSAGE: usize = 16_384;

/// The keeper of the cell cannot be asked, or has no room for it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unlimited {
    #[error("the keeper of the cell cannot be reached")]
    Away(#[source] RemoteError),
    #[error("the keeper of the cell does not keep it")]
    NotKept,
}

impl Directory {
    /// Takes one request of `limit` a minute out of a cell, wherever it is kept.
    ///
    /// # Errors
    /// [`Unlimited`] where nobody says within the time.
    pub async fn take(&self, cell: Uuid, limit: u32, within: Duration) -> Result<Verdict, Unlimited> {
        let shard = shard_of(cell);
        if self.host.term(shard).is_some() {
            return self.cells.take(cell, limit, Instant::now()).ok_or(Unlimited::NotKept);
        }
        let mut question = MARK.to_vec();
        question.extend(cell.as_bytes());
        question.extend(limit.to_be_bytes());
        let answer = tokio::time::timeout(within, self.remote.request(shard, question, within)).await;
        let answer = answer.unwrap_or(Err(RemoteError::TimedOut)).map_err(Unlimited::Away)?;
        decoded(&answer).ok_or(Unlimited::NotKept)
    }

    /// What the next owner of these shards has to know of their cells, as messages for [`Directory::go_on_with_cells`]. They stay here
    /// until [`Directory::forget_cells`]: the shards may stay after all.
    #[must_use]
    pub fn cells_of(&self, shards: &BTreeSet<Shard>) -> Vec<Vec<u8>> {
        let cells = self.cells.handed(|cell| shards.contains(&shard_of(cell)), Instant::now());
        let message = |cells: &[(Uuid, Handed)]| {
            let mut message = MARK.to_vec();
            for (id, handed) in cells {
                message.extend(id.as_bytes());
                message.extend(handed.level.to_be_bytes());
                message.extend(handed.age.to_be_bytes());
            }
            message
        };
        cells.chunks(IN_ONE_MESSAGE).map(message).collect()
    }

    /// Goes on with what the owner before knew of the cells of some shards. Their time on the way is not counted.
    pub fn go_on_with_cells(&self, message: &[u8]) {
        let Some(cells) = message.strip_prefix(&MARK).filter(|cells| cells.len() <= HANDED * IN_ONE_MESSAGE) else {
            return;
        };
        let now = Instant::now();
        for (id, handed) in cells.chunks_exact(HANDED).filter_map(decoded_cell) {
            self.cells.go_on_from(id, handed, now);
        }
    }

    /// These shards' cells, and the places that somebody has, are another's to keep.
    pub fn forget_cells(&self, shards: &BTreeSet<Shard>) {
        self.cells.forget(|cell| shards.contains(&shard_of(cell)));
        self.places.forget(|owner| shards.contains(&shard_of(owner)));
    }

    /// The answer to another member's question; `None` where `payload` is none.
    pub(super) fn serve_cell(&self, payload: &[u8]) -> Option<Vec<u8>> {
        let question = payload.strip_prefix(&MARK)?;
        let (cell, limit) = question.split_first_chunk::<16>()?;
        let (cell, limit) = (Uuid::from_bytes(*cell), u32::from_be_bytes(limit.try_into().ok()?));
        // The shard may have gone to another: whoever asks finds out.
        let owned = self.host.term(shard_of(cell)).is_some();
        let verdict = owned.then(|| self.cells.take(cell, limit, Instant::now())).flatten();
        Some(verdict.map_or_else(|| MARK.to_vec(), encoded))
    }
}

fn encoded(verdict: Verdict) -> Vec<u8> {
    let nanos = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX).to_be_bytes();
    let mut answer = MARK.to_vec();
    answer.push(verdict.admitted.into());
    answer.extend(verdict.remaining.to_be_bytes());
    answer.extend(nanos(verdict.full_after));
    answer.extend(nanos(verdict.retry_after));
    answer
}

fn decoded(answer: &[u8]) -> Option<Verdict> {
    let (admitted, rest) = answer.strip_prefix(&MARK)?.split_first()?;
    let (remaining, rest) = rest.split_first_chunk()?;
    let (full_after, retry_after) = rest.split_first_chunk()?;
    Some(Verdict {
        admitted: *admitted == 1,
        remaining: u32::from_be_bytes(*remaining),
        full_after: Duration::from_nanos(u64::from_be_bytes(*full_after)),
        retry_after: Duration::from_nanos(u64::from_be_bytes(retry_after.try_into().ok()?)),
    })
}

fn decoded_cell(bytes: &[u8]) -> Option<(Uuid, Handed)> {
    let (id, rest) = bytes.split_first_chunk::<16>()?;
    let (level, age) = rest.split_first_chunk::<8>()?;
    let handed = Handed { level: u64::from_be_bytes(*level), age: u64::from_be_bytes(age.try_into().ok()?) };
    Some((Uuid::from_bytes(*id), handed))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_comes_out_of_the_encoding_as_it_went_in() {
        let verdict = Verdict {
            admitted: true,
            remaining: 119,
            full_after: Duration::from_nanos(500_000_001),
            retry_after: Duration::ZERO,
        };
        for verdict in [verdict, Verdict { admitted: false, retry_after: Duration::from_secs(60), ..verdict }] {
            assert_eq!(decoded(&encoded(verdict)), Some(verdict));
        }
        for other in [&b""[..], b"L", b"L\x01", b"L\x02\x01", b"{\"v\":1}", &[b'L', 1, 1, 0, 0]] {
            assert_eq!(decoded(other), None);
        }
    }
}
