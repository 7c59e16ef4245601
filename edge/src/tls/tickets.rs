//! TLS session tickets that every replica can read (RFC 8446, section 4.6.1).
//!
//! The key of each period is derived from one secret that the replicas share, so nothing has to be handed round when keys
//! rotate. A ticket lives at most ten minutes: it is opened only with the keys of its period's neighbourhood, and only
//! while the time sealed into it is fresh.

use std::{
    fmt,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use aes_gcm::{
    Aes256Gcm, Key, KeyInit,
    aead::{Aead, Nonce, Payload},
};
use rand::Rng;
use rustls::server::ProducesTickets;
use secrecy::{ExposeSecret, SecretSlice};
use sha2::{Digest, Sha256};
use thiserror::Error;
use zeroize::Zeroizing;

/// How long a ticket is good.
pub const LIFETIME: Duration = Duration::from_secs(600);
/// How far the clocks of replicas may be apart.
const SKEW: Duration = Duration::from_secs(30);

const NAME_LEN: usize = 8;
const NONCE_LEN: usize = 12;
const TIME_LEN: usize = 8;

/// Seals and opens tickets under keys derived from a shared secret.
pub struct SharedTickets {
    secret: SecretSlice<u8>,
    /// What the session was verified under.
    trust: [u8; 32],
}

/// The secret has not 32 to 64 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the ticket secret needs 32 to 64 random bytes, this one has {0}")]
pub struct TicketSecretLength(usize);

impl SharedTickets {
    /// # Errors
    /// Where the secret is not of 32 to 64 bytes.
    pub fn new(secret: SecretSlice<u8>) -> Result<Self, TicketSecretLength> {
        let length = secret.expose_secret().len();
        if (32..=64).contains(&length) { Ok(Self { secret, trust: [0; 32] }) } else { Err(TicketSecretLength(length)) }
    }

    /// The tickets of sessions that were verified under this trust: under another they do not open, and the session is verified again.
    #[must_use]
    pub fn under(&self, trust: [u8; 32]) -> Self {
        Self { secret: self.secret.clone(), trust }
    }

    fn key(&self, period: u64) -> Aes256Gcm {
        let mut hash = Sha256::new();
        hash.update(b"gpuaas tls ticket key v2");
        hash.update((self.secret.expose_secret().len() as u64).to_be_bytes());
        hash.update(self.secret.expose_secret());
        hash.update(self.trust);
        hash.update(period.to_be_bytes());
        let bytes: Zeroizing<[u8; 32]> = Zeroizing::new(hash.finalize().into());
        Aes256Gcm::new(&Key::<Aes256Gcm>::from(*bytes))
    }

    /// Ticket = period ‖ nonce ‖ sealed(issued at ‖ session).
    fn seal(&self, session: &[u8], now: u64) -> Option<Vec<u8>> {
        let name = period(now).to_be_bytes();
        let mut nonce = [0_u8; NONCE_LEN];
        rand::rng().fill_bytes(&mut nonce);
        let mut plain = Zeroizing::new(Vec::with_capacity(TIME_LEN + session.len()));
        plain.extend_from_slice(&now.to_be_bytes());
        plain.extend_from_slice(session);
        let payload = Payload { msg: &plain, aad: &name };
        let sealed = self.key(period(now)).encrypt(&Nonce::<Aes256Gcm>::from(nonce), payload).ok()?;
        Some([name.as_slice(), &nonce, &sealed].concat())
    }

    fn open(&self, ticket: &[u8], now: u64) -> Option<Vec<u8>> {
        let (name, rest) = ticket.split_at_checked(NAME_LEN)?;
        let (nonce, sealed) = rest.split_at_checked(NONCE_LEN)?;
        let sealed_in = u64::from_be_bytes(name.try_into().ok()?);
        let nonce: [u8; NONCE_LEN] = nonce.try_into().ok()?;
        if !(period(now).saturating_sub(1)..=period(now) + 1).contains(&sealed_in) {
            return None;
        }
        let payload = Payload { msg: sealed, aad: name };
        let plain = Zeroizing::new(self.key(sealed_in).decrypt(&Nonce::<Aes256Gcm>::from(nonce), payload).ok()?);
        let (issued_at, session) = plain.split_at_checked(TIME_LEN)?;
        let issued_at = u64::from_be_bytes(issued_at.try_into().ok()?);
        let fresh = issued_at <= now + SKEW.as_secs() && now < issued_at.saturating_add(LIFETIME.as_secs());
        fresh.then(|| session.to_vec())
    }
}

/// A period is a ticket's lifetime, so the keys of at most two are needed beside the clocks' skew.
fn period(at: u64) -> u64 {
    at / LIFETIME.as_secs()
}

fn seconds_now() -> Option<u64> {
    SystemTime::now().duration_since(UNIX_EPOCH).ok().map(|since| since.as_secs())
}

impl ProducesTickets for SharedTickets {
    fn enabled(&self) -> bool {
        true
    }

    fn lifetime(&self) -> u32 {
        u32::try_from(LIFETIME.as_secs()).unwrap_or(0)
    }

    fn encrypt(&self, plain: &[u8]) -> Option<Vec<u8>> {
        self.seal(plain, seconds_now()?)
    }

    fn decrypt(&self, cipher: &[u8]) -> Option<Vec<u8>> {
        self.open(cipher, seconds_now()?)
    }
}

impl fmt::Debug for SharedTickets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SharedTickets(..)")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NOW: u64 = 1_790_000_123;

    fn tickets(fill: u8) -> SharedTickets {
        SharedTickets::new(SecretSlice::from(vec![fill; 32])).unwrap()
    }

    #[test]
    fn ticket_opens_only_on_replicas_with_the_same_secret() {
        let ticket = tickets(1).seal(b"session", NOW).unwrap();
        assert_eq!(tickets(1).open(&ticket, NOW).unwrap(), b"session");
        assert_eq!(tickets(2).open(&ticket, NOW), None);
    }

    #[test]
    fn ticket_is_valid_only_under_the_trust_of_its_session() {
        let ticket = tickets(1).under([1; 32]).seal(b"session", NOW).unwrap();
        assert_eq!(tickets(1).under([1; 32]).open(&ticket, NOW).unwrap(), b"session");
        assert_eq!(tickets(1).under([2; 32]).open(&ticket, NOW), None);
        assert_eq!(tickets(1).open(&ticket, NOW), None);
    }

    #[test]
    fn ticket_expires_after_ten_minutes() {
        for begin in [NOW, NOW - NOW % 600, NOW - NOW % 600 + 599] {
            let ticket = tickets(1).seal(b"s", begin).unwrap();
            assert!(tickets(1).open(&ticket, begin + 599).is_some());
            assert_eq!(tickets(1).open(&ticket, begin + 600), None);
            assert!(tickets(1).open(&ticket, begin - 30).is_some(), "a clock that is a little behind");
            assert_eq!(tickets(1).open(&ticket, begin - 31), None);
        }
        assert_eq!(ProducesTickets::lifetime(&tickets(1)), 600);
    }

    #[test]
    fn a_secret_that_is_too_short_or_long_is_refused() {
        for length in [0, 31, 65] {
            assert!(SharedTickets::new(SecretSlice::from(vec![7; length])).is_err());
        }
        assert!(SharedTickets::new(SecretSlice::from(vec![7; 64])).is_ok());
    }

    proptest! {
        #[test]
        fn noise_and_altered_tickets_do_not_open(noise in proptest::collection::vec(any::<u8>(), 0..120), bit in 0_usize..(8 + 12 + 8 + 4 + 16) * 8) {
            prop_assert_eq!(tickets(1).open(&noise, NOW), None);
            let mut ticket = tickets(1).seal(b"four", NOW).unwrap();
            ticket[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(tickets(1).open(&ticket, NOW), None);
        }
    }
}
