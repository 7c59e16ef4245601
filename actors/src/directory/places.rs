//! Says of a place what there is to say to its keeper: here, or over the bus to the owner of its shard. As with rate limits, a few
//! bytes beside the commands, told apart by their first byte.

use super::Directory;
use super::limits::Unlimited;
use crate::place::shard_of;
use crate::places::Word;
use crate::ports::RemoteError;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// The first bytes of a word and of its answer: what it is, and the version of its form.
const MARK: [u8; 2] = [b'P', 1];

const TAKE: u8 = 0;
const KEEP: u8 = 1;
const LEAVE: u8 = 2;

impl Directory {
    /// Whether the place is, or stays, `owner`'s, wherever that is known.
    ///
    /// # Errors
    /// [`Unlimited`] where nobody says within the time.
    pub async fn place(&self, owner: Uuid, place: Uuid, word: Word, within: Duration) -> Result<bool, Unlimited> {
        let shard = shard_of(owner);
        if self.host.term(shard).is_some() {
            return self.places.hear(owner, place, word, Instant::now()).ok_or(Unlimited::NotKept);
        }
        let answer =
            tokio::time::timeout(within, self.remote.request(shard, encoded(owner, place, word), within)).await;
        let answer = answer.unwrap_or(Err(RemoteError::TimedOut)).map_err(Unlimited::Away)?;
        match answer.strip_prefix(&MARK) {
            Some([admitted]) => Ok(*admitted == 1),
            Some(_) | None => Err(Unlimited::NotKept),
        }
    }

    /// The answer to another member's word; `None` where `payload` is none.
    pub(super) fn serve_place(&self, payload: &[u8]) -> Option<Vec<u8>> {
        let (owner, place, word) = decoded(payload)?;
        // The shard may have gone to another: whoever asks finds out.
        let owned = self.host.term(shard_of(owner)).is_some();
        let heard = owned.then(|| self.places.hear(owner, place, word, Instant::now())).flatten();
        let mut answer = MARK.to_vec();
        answer.extend(heard.map(u8::from));
        Some(answer)
    }
}

fn encoded(owner: Uuid, place: Uuid, word: Word) -> Vec<u8> {
    let (kind, most) = match word {
        Word::Take { most } => (TAKE, most),
        Word::Keep => (KEEP, 0),
        Word::Leave => (LEAVE, 0),
    };
    let mut payload = MARK.to_vec();
    payload.push(kind);
    payload.extend(owner.as_bytes());
    payload.extend(place.as_bytes());
    payload.extend(most.to_be_bytes());
    payload
}

fn decoded(payload: &[u8]) -> Option<(Uuid, Uuid, Word)> {
    let (kind, rest) = payload.strip_prefix(&MARK)?.split_first()?;
    let (owner, rest) = rest.split_first_chunk::<16>()?;
    let (place, most) = rest.split_first_chunk::<16>()?;
    let most = u32::from_be_bytes(most.try_into().ok()?);
    let word = match *kind {
        TAKE => Word::Take { most },
        KEEP => Word::Keep,
        LEAVE => Word::Leave,
        _ => return None,
    };
    Some((Uuid::from_bytes(*owner), Uuid::from_bytes(*place), word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_comes_out_of_the_encoding_as_it_went_in() {
        let (owner, place) = (Uuid::from_u128(1), Uuid::from_u128(2));
        for word in [Word::Take { most: 32 }, Word::Keep, Word::Leave] {
            assert_eq!(decoded(&encoded(owner, place, word)), Some((owner, place, word)));
        }
        let whole = encoded(owner, place, Word::Keep);
        let unknown = [&MARK[..], &[9], &whole[3..]].concat();
        for other in [&b""[..], b"P", b"P\x01", b"{\"v\":1}", &whole[..whole.len() - 1], &unknown] {
            assert_eq!(decoded(other), None);
        }
    }
}
