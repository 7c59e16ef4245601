//! Connection quotas of the cluster: an entry is updated at the owner of its shard, on this member or over the bus. As with rate
//! limits, a few bytes beside the commands, distinguished by their first byte.

use super::Directory;
use super::rate_cell_forwarding::QuotaUnavailable;
use crate::connection_quota::QuotaRequest;
use crate::sharding::shard_of;
use crate::shell_dependencies::RemoteError;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// The first bytes of a request and its response: its type, and the version of its form.
const MARK: [u8; 2] = [b'P', 1];

const ACQUIRE: u8 = 0;
const RENEW: u8 = 1;
const RELEASE: u8 = 2;

impl Directory {
    /// Whether the connection is, or stays, admitted for `owner`.
    ///
    /// # Errors
    /// [`QuotaUnavailable`] where there is no decision within the time.
    pub async fn update_connection_quota(
        &self,
        owner: Uuid,
        connection: Uuid,
        request: QuotaRequest,
        within: Duration,
    ) -> Result<bool, QuotaUnavailable> {
        let shard = shard_of(owner);
        if self.host.term(shard).is_some() {
            return self
                .connection_quota
                .apply(owner, connection, request, Instant::now())
                .ok_or(QuotaUnavailable::NotStored);
        }
        let answer =
            tokio::time::timeout(within, self.remote.request(shard, encoded(owner, connection, request), within)).await;
        let answer = answer.unwrap_or(Err(RemoteError::TimedOut)).map_err(QuotaUnavailable::Unreachable)?;
        match answer.strip_prefix(&MARK) {
            Some([admitted]) => Ok(*admitted == 1),
            Some(_) | None => Err(QuotaUnavailable::NotStored),
        }
    }

    /// The response to another member's request; `None` where `payload` is not one.
    pub(super) fn serve_connection_quota(&self, payload: &[u8]) -> Option<Vec<u8>> {
        let (owner, connection, request) = decoded(payload)?;
        // The shard may have moved: the requester learns it from the response.
        let owned = self.host.term(shard_of(owner)).is_some();
        let admitted = owned.then(|| self.connection_quota.apply(owner, connection, request, Instant::now())).flatten();
        let mut answer = MARK.to_vec();
        answer.extend(admitted.map(u8::from));
        Some(answer)
    }
}

fn encoded(owner: Uuid, connection: Uuid, request: QuotaRequest) -> Vec<u8> {
    let (kind, most) = match request {
        QuotaRequest::Acquire { most } => (ACQUIRE, most),
        QuotaRequest::Renew => (RENEW, 0),
        QuotaRequest::Release => (RELEASE, 0),
    };
    let mut payload = MARK.to_vec();
    payload.push(kind);
    payload.extend(owner.as_bytes());
    payload.extend(connection.as_bytes());
    payload.extend(most.to_be_bytes());
    payload
}

fn decoded(payload: &[u8]) -> Option<(Uuid, Uuid, QuotaRequest)> {
    let (kind, rest) = payload.strip_prefix(&MARK)?.split_first()?;
    let (owner, rest) = rest.split_first_chunk::<16>()?;
    let (connection, most) = rest.split_first_chunk::<16>()?;
    let most = u32::from_be_bytes(most.try_into().ok()?);
    let request = match *kind {
        ACQUIRE => QuotaRequest::Acquire { most },
        RENEW => QuotaRequest::Renew,
        RELEASE => QuotaRequest::Release,
        _ => return None,
    };
    Some((Uuid::from_bytes(*owner), Uuid::from_bytes(*connection), request))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quota_request_survives_its_encoding() {
        let (owner, connection) = (Uuid::from_u128(1), Uuid::from_u128(2));
        for request in [QuotaRequest::Acquire { most: 32 }, QuotaRequest::Renew, QuotaRequest::Release] {
            assert_eq!(decoded(&encoded(owner, connection, request)), Some((owner, connection, request)));
        }
        let whole = encoded(owner, connection, QuotaRequest::Renew);
        let unknown = [&MARK[..], &[9], &whole[3..]].concat();
        for other in [&b""[..], b"P", b"P\x01", b"{\"v\":1}", &whole[..whole.len() - 1], &unknown] {
            assert_eq!(decoded(other), None);
        }
    }
}
