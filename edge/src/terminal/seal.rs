//! Seals what two replicas say to each other about a terminal, so that the bus carries what its operator cannot read.
//!
//! Each direction of each link has a key of its own, made of the secret that the replicas share, the link's name and a salt that the
//! sender draws anew. Messages are counted: one that is lost, repeated or put elsewhere is noticed, and ends the link.

use aes_gcm::{
    Aes256Gcm, Key, KeyInit,
    aead::{Aead, Nonce, Payload},
};
use rand::Rng;
use secrecy::{ExposeSecret, SecretSlice};
use sha2::{Digest, Sha256};
use std::sync::Arc;
use zeroize::Zeroizing;

const SALT: usize = 16;
const COUNT: usize = 8;

/// Which way a message goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    ToAgent = 1,
    ToUser = 2,
}

/// What the replicas share.
#[derive(Clone)]
pub(super) struct Shared(Arc<SecretSlice<u8>>);

impl Shared {
    pub(super) fn new(secret: SecretSlice<u8>) -> Self {
        Self(Arc::new(secret))
    }

    fn cipher(&self, link: u128, direction: Direction, salt: &[u8; SALT]) -> Aes256Gcm {
        let secret = self.0.expose_secret();
        let mut hash = Sha256::new();
        hash.update(b"gpuaas terminal relay v1");
        hash.update((secret.len() as u64).to_be_bytes());
        hash.update(secret);
        hash.update(link.to_be_bytes());
        hash.update([direction as u8]);
        hash.update(salt);
        let bytes: Zeroizing<[u8; 32]> = Zeroizing::new(hash.finalize().into());
        Aes256Gcm::new(&Key::<Aes256Gcm>::from(*bytes))
    }

    pub(super) fn sealing(&self, link: u128, direction: Direction) -> Sealing {
        let mut salt = [0; SALT];
        rand::rng().fill_bytes(&mut salt);
        Sealing { cipher: self.cipher(link, direction, &salt), salt, count: 0 }
    }

    pub(super) fn opening(&self, link: u128, direction: Direction) -> Opening {
        Opening { shared: self.clone(), link, direction, sender: None }
    }
}

/// The sender's side of one direction.
pub(super) struct Sealing {
    cipher: Aes256Gcm,
    salt: [u8; SALT],
    count: u64,
}

impl Sealing {
    /// salt ‖ count ‖ sealed. `None` only where nothing more can be sealed.
    pub(super) fn seal(&mut self, plain: &[u8]) -> Option<Vec<u8>> {
        let count = self.count.to_be_bytes();
        self.count = self.count.checked_add(1)?;
        let payload = Payload { msg: plain, aad: &self.salt };
        let sealed = self.cipher.encrypt(&nonce(count), payload).ok()?;
        Some([self.salt.as_slice(), &count, &sealed].concat())
    }
}

/// The receiver's side of one direction.
pub(super) struct Opening {
    shared: Shared,
    link: u128,
    direction: Direction,
    /// The one whose messages are taken: the first.
    sender: Option<(Aes256Gcm, [u8; SALT], u64)>,
}

impl Opening {
    /// `None` where it is not the sender's next message.
    pub(super) fn open(&mut self, message: &[u8]) -> Option<Vec<u8>> {
        let (salt, rest) = message.split_first_chunk::<SALT>()?;
        let (count, sealed) = rest.split_first_chunk::<COUNT>()?;
        let (shared, link, direction) = (&self.shared, self.link, self.direction);
        let known = self.sender.take().unwrap_or_else(|| (shared.cipher(link, direction, salt), *salt, 0));
        let (cipher, of, expected) = &known;
        let next = of == salt && *expected == u64::from_be_bytes(*count);
        let plain = cipher.decrypt(&nonce(*count), Payload { msg: sealed, aad: salt }).ok().filter(|_| next)?;
        let (cipher, of, expected) = known;
        self.sender = Some((cipher, of, expected.checked_add(1)?));
        Some(plain)
    }
}

fn nonce(count: [u8; COUNT]) -> Nonce<Aes256Gcm> {
    let mut bytes = [0; 12];
    bytes[4..].copy_from_slice(&count);
    Nonce::<Aes256Gcm>::from(bytes)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn shared(byte: u8) -> Shared {
        Shared::new(vec![byte; 32].into())
    }

    #[test]
    fn what_is_sealed_opens_in_order_and_shows_nothing() {
        let mut sealing = shared(1).sealing(7, Direction::ToUser);
        let mut opening = shared(1).opening(7, Direction::ToUser);
        for text in ["one", "", "three"] {
            let sealed = sealing.seal(text.as_bytes()).unwrap();
            assert!(text.is_empty() || !sealed.windows(text.len()).any(|part| part == text.as_bytes()));
            assert_eq!(opening.open(&sealed).unwrap(), text.as_bytes());
        }
    }

    #[test]
    fn what_is_altered_repeated_left_out_or_of_another_link_does_not_open() {
        let one = |link, direction, secret| shared(secret).opening(link, direction);
        let mut sealing = shared(1).sealing(7, Direction::ToUser);
        let (first, second) = (sealing.seal(b"first").unwrap(), sealing.seal(b"second").unwrap());
        for (link, direction, secret) in
            [(8, Direction::ToUser, 1), (7, Direction::ToAgent, 1), (7, Direction::ToUser, 2)]
        {
            assert!(one(link, direction, secret).open(&first).is_none());
        }
        assert!(one(7, Direction::ToUser, 1).open(&second).is_none(), "the first is missing");
        let mut opening = one(7, Direction::ToUser, 1);
        assert!(opening.open(&first).is_some());
        assert!(opening.open(&first).is_none(), "it comes twice");
        for position in 0..first.len() {
            let mut altered = first.clone();
            altered[position] ^= 1;
            assert!(one(7, Direction::ToUser, 1).open(&altered).is_none(), "byte {position}");
        }
        for length in [0, 1, SALT, SALT + COUNT, SALT + COUNT + 15] {
            assert!(one(7, Direction::ToUser, 1).open(&vec![0; length]).is_none());
        }
        let another = shared(1).sealing(7, Direction::ToUser).seal(b"x").unwrap();
        assert_ne!(another[..SALT], first[..SALT], "no two senders share a key");
    }
}
