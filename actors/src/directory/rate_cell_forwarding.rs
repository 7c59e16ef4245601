//! Rate limits of the cluster: a cell is checked at the owner of its shard, on this member or over the bus.
//!
//! Its messages are a few bytes beside the commands on the shard's subject, distinguished by their first byte: a command is JSON and
//! begins with a brace. A member of a release that does not know them answers something else, and counts as unreachable.

use super::Directory;
use crate::sharding::shard_of;
use crate::shell_dependencies::RemoteError;
use domain::Shard;
use domain::gcra::{CellHandover, RateDecision};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// The first bytes of a request and a response: its type, and the version of its form.
const MARK: [u8; 2] = [b'L', 1];

/// The bytes of an exported cell: its id, level and age.
const CELL_BYTES: usize = 16 + 8 + 8;
/// The cells in one message, which is half the limit of NATS.
const CELLS_PER_MESSAGE: usize = 16_384;

/// The owner of the cell is unreachable, or has no room for it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuotaUnavailable {
    #[error("the owner of the quota cannot be reached")]
    Unreachable(#[source] RemoteError),
    #[error("the owner of the quota has no room for it")]
    NotStored,
}

impl Directory {
    /// Takes one request of `limit` a minute out of a cell, at its owner.
    ///
    /// # Errors
    /// [`QuotaUnavailable`] where there is no decision within the time.
    pub async fn check_rate_limit(
        &self,
        cell: Uuid,
        limit: u32,
        within: Duration,
    ) -> Result<RateDecision, QuotaUnavailable> {
        let shard = shard_of(cell);
        if self.host.term(shard).is_some() {
            return self.rate_cells.take(cell, limit, Instant::now()).ok_or(QuotaUnavailable::NotStored);
        }
        let mut question = MARK.to_vec();
        question.extend(cell.as_bytes());
        question.extend(limit.to_be_bytes());
        let answer = tokio::time::timeout(within, self.remote.request(shard, question, within)).await;
        let answer = answer.unwrap_or(Err(RemoteError::TimedOut)).map_err(QuotaUnavailable::Unreachable)?;
        decoded(&answer).ok_or(QuotaUnavailable::NotStored)
    }

    /// The cells of these shards as messages for [`Directory::import_rate_cells`] at the next owner. They stay here until
    /// [`Directory::remove_quotas`]: the shards may stay after all.
    #[must_use]
    pub fn export_rate_cells(&self, shards: &BTreeSet<Shard>) -> Vec<Vec<u8>> {
        let cells = self.rate_cells.export(|cell| shards.contains(&shard_of(cell)), Instant::now());
        let message = |cells: &[(Uuid, CellHandover)]| {
            let mut message = MARK.to_vec();
            for (id, handed) in cells {
                message.extend(id.as_bytes());
                message.extend(handed.level.to_be_bytes());
                message.extend(handed.age.to_be_bytes());
            }
            message
        };
        cells.chunks(CELLS_PER_MESSAGE).map(message).collect()
    }

    /// Adds the cells that the earlier owner of some shards exported. The transit time is not counted.
    pub fn import_rate_cells(&self, message: &[u8]) {
        let Some(cells) = message.strip_prefix(&MARK).filter(|cells| cells.len() <= CELL_BYTES * CELLS_PER_MESSAGE)
        else {
            return;
        };
        let now = Instant::now();
        for (id, handed) in cells.chunks_exact(CELL_BYTES).filter_map(decoded_cell) {
            self.rate_cells.import(id, handed, now);
        }
    }

    /// Removes the cells and open connections of these shards: another member owns them.
    pub fn remove_quotas(&self, shards: &BTreeSet<Shard>) {
        self.rate_cells.remove(|cell| shards.contains(&shard_of(cell)));
        self.connection_quota.remove(|owner| shards.contains(&shard_of(owner)));
    }

    /// The response to another member's request; `None` where `payload` is not one.
    pub(super) fn serve_rate_limit(&self, payload: &[u8]) -> Option<Vec<u8>> {
        let question = payload.strip_prefix(&MARK)?;
        let (cell, limit) = question.split_first_chunk::<16>()?;
        let (cell, limit) = (Uuid::from_bytes(*cell), u32::from_be_bytes(limit.try_into().ok()?));
        // The shard may have moved: the requester learns it from the response.
        let owned = self.host.term(shard_of(cell)).is_some();
        let verdict = owned.then(|| self.rate_cells.take(cell, limit, Instant::now())).flatten();
        Some(verdict.map_or_else(|| MARK.to_vec(), encoded))
    }
}

fn encoded(verdict: RateDecision) -> Vec<u8> {
    let nanos = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX).to_be_bytes();
    let mut answer = MARK.to_vec();
    answer.push(verdict.admitted.into());
    answer.extend(verdict.remaining.to_be_bytes());
    answer.extend(nanos(verdict.full_after));
    answer.extend(nanos(verdict.retry_after));
    answer
}

fn decoded(answer: &[u8]) -> Option<RateDecision> {
    let (admitted, rest) = answer.strip_prefix(&MARK)?.split_first()?;
    let (remaining, rest) = rest.split_first_chunk()?;
    let (full_after, retry_after) = rest.split_first_chunk()?;
    Some(RateDecision {
        admitted: *admitted == 1,
        remaining: u32::from_be_bytes(*remaining),
        full_after: Duration::from_nanos(u64::from_be_bytes(*full_after)),
        retry_after: Duration::from_nanos(u64::from_be_bytes(retry_after.try_into().ok()?)),
    })
}

fn decoded_cell(bytes: &[u8]) -> Option<(Uuid, CellHandover)> {
    let (id, rest) = bytes.split_first_chunk::<16>()?;
    let (level, age) = rest.split_first_chunk::<8>()?;
    let handed = CellHandover { level: u64::from_be_bytes(*level), age: u64::from_be_bytes(age.try_into().ok()?) };
    Some((Uuid::from_bytes(*id), handed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_decision_survives_its_encoding() {
        let verdict = RateDecision {
            admitted: true,
            remaining: 119,
            full_after: Duration::from_nanos(500_000_001),
            retry_after: Duration::ZERO,
        };
        for verdict in [verdict, RateDecision { admitted: false, retry_after: Duration::from_secs(60), ..verdict }] {
            assert_eq!(decoded(&encoded(verdict)), Some(verdict));
        }
        for other in [&b""[..], b"L", b"L\x01", b"L\x02\x01", b"{\"v\":1}", &[b'L', 1, 1, 0, 0]] {
            assert_eq!(decoded(other), None);
        }
    }
}
