//! Seals what two replicas say to each other about a terminal, so that the bus carries what its operator cannot read, and nobody who hears
//! it can say it again.
//!
//! A link begins with a hello and its answer, each sealed by itself under a key with a salt that its sender draws. Both salts are in the
//! keys of what follows, one for each direction: whoever repeats an old hello is answered with a new salt, and under that nothing opens of
//! what was once said. Messages are counted: one that is lost, repeated or put elsewhere is noticed, and ends the link.

use aes_gcm::{
    Aes256Gcm, Key, KeyInit,
    aead::{Aead, Nonce},
};
use rand::Rng;
use secrecy::{ExposeSecret, SecretSlice};
use sha2::{Digest, Sha256};
use std::sync::Arc;
use zeroize::Zeroizing;

/// What the keys are made for. Replicas that make theirs otherwise do not hear each other, and mistake nothing.
const VERSION: &[u8] = b"gpuaas terminal relay v2";
const SALT: usize = 16;
const COUNT: usize = 8;

type Salt = [u8; SALT];

/// What a key is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    ToAgent = 1,
    ToUser = 2,
    Hello = 3,
    Answer = 4,
}

/// What the replicas share.
#[derive(Clone)]
pub(super) struct Shared(Arc<SecretSlice<u8>>);

impl Shared {
    pub(super) fn new(secret: SecretSlice<u8>) -> Self {
        Self(Arc::new(secret))
    }

    /// A hello on a new link of that name. `None` only where it cannot be sealed.
    pub(super) fn hello(&self, link: u128, words: &[u8]) -> Option<(Asking, Vec<u8>)> {
        let asks = drawn();
        let message = alone(&self.cipher(Use::Hello, link, &[asks]), &asks, words)?;
        Some((Asking { shared: self.clone(), link, asks }, message))
    }

    /// What a hello says, and who is to be answered. `None` where it is none, or of others.
    pub(super) fn hear_hello(&self, link: u128, message: &[u8]) -> Option<(Vec<u8>, Asked)> {
        let (asks, sealed) = message.split_first_chunk::<SALT>()?;
        let words = self.cipher(Use::Hello, link, &[*asks]).decrypt(&nonce(0), sealed).ok()?;
        Some((words, Asked { shared: self.clone(), link, asks: *asks }))
    }

    fn cipher(&self, of: Use, link: u128, salts: &[Salt]) -> Aes256Gcm {
        let secret = self.0.expose_secret();
        let mut hash = Sha256::new();
        hash.update(VERSION);
        hash.update((secret.len() as u64).to_be_bytes());
        hash.update(secret);
        hash.update(link.to_be_bytes());
        hash.update([of as u8]);
        hash.update(salts.as_flattened());
        let bytes: Zeroizing<[u8; 32]> = Zeroizing::new(hash.finalize().into());
        Aes256Gcm::new(&Key::<Aes256Gcm>::from(*bytes))
    }

    fn sealing(&self, of: Use, link: u128, salts: [Salt; 2]) -> Sealing {
        Sealing { cipher: self.cipher(of, link, &salts), count: 0 }
    }

    fn opening(&self, of: Use, link: u128, salts: [Salt; 2]) -> Opening {
        Opening { cipher: self.cipher(of, link, &salts), expected: 0 }
    }
}

/// Whoever has said hello, until they are answered.
pub(super) struct Asking {
    shared: Shared,
    link: u128,
    asks: Salt,
}

impl Asking {
    /// How the link goes on at the user's side. `None` where it is no answer to this hello.
    pub(super) fn answered(&self, message: &[u8]) -> Option<(Sealing, Opening)> {
        let Self { shared, link, asks } = self;
        let (answers, sealed) = message.split_first_chunk::<SALT>()?;
        let salts = [*asks, *answers];
        shared.cipher(Use::Answer, *link, &salts).decrypt(&nonce(0), sealed).ok()?;
        Some((shared.sealing(Use::ToAgent, *link, salts), shared.opening(Use::ToUser, *link, salts)))
    }
}

/// Whose hello was heard.
pub(super) struct Asked {
    shared: Shared,
    link: u128,
    asks: Salt,
}

impl Asked {
    /// The answer, and how the link goes on at the agent's side.
    pub(super) fn answer(self) -> Option<(Vec<u8>, Sealing, Opening)> {
        let Self { shared, link, asks } = self;
        let answers = drawn();
        let salts = [asks, answers];
        let message = alone(&shared.cipher(Use::Answer, link, &salts), &answers, &[])?;
        Some((message, shared.sealing(Use::ToUser, link, salts), shared.opening(Use::ToAgent, link, salts)))
    }
}

/// The sender's side of one direction.
pub(super) struct Sealing {
    cipher: Aes256Gcm,
    count: u64,
}

impl Sealing {
    /// count ‖ sealed. `None` only where nothing more can be sealed.
    pub(super) fn seal(&mut self, plain: &[u8]) -> Option<Vec<u8>> {
        let count = self.count;
        self.count = count.checked_add(1)?;
        let sealed = self.cipher.encrypt(&nonce(count), plain).ok()?;
        Some([&count.to_be_bytes(), sealed.as_slice()].concat())
    }
}

/// The receiver's side of one direction.
pub(super) struct Opening {
    cipher: Aes256Gcm,
    expected: u64,
}

impl Opening {
    /// `None` where it is not the sender's next message.
    pub(super) fn open(&mut self, message: &[u8]) -> Option<Vec<u8>> {
        let (count, sealed) = message.split_first_chunk::<COUNT>()?;
        let expected = self.expected;
        if u64::from_be_bytes(*count) != expected {
            return None;
        }
        let plain = self.cipher.decrypt(&nonce(expected), sealed).ok()?;
        self.expected = expected.checked_add(1)?;
        Some(plain)
    }
}

/// salt ‖ sealed: the only message under a key of its own.
fn alone(cipher: &Aes256Gcm, salt: &Salt, words: &[u8]) -> Option<Vec<u8>> {
    let sealed = cipher.encrypt(&nonce(0), words).ok()?;
    Some([salt.as_slice(), &sealed].concat())
}

fn drawn() -> Salt {
    let mut salt = [0; SALT];
    rand::rng().fill_bytes(&mut salt);
    salt
}

fn nonce(count: u64) -> Nonce<Aes256Gcm> {
    let mut bytes = [0; 12];
    bytes[4..].copy_from_slice(&count.to_be_bytes());
    Nonce::<Aes256Gcm>::from(bytes)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn shared(byte: u8) -> Shared {
        Shared::new(vec![byte; 32].into())
    }

    /// Both sides of a link: the user's, then the agent's.
    fn linked() -> ((Sealing, Opening), (Sealing, Opening)) {
        let (asking, hello) = shared(1).hello(7, b"hello").unwrap();
        let (words, asked) = shared(1).hear_hello(7, &hello).unwrap();
        assert_eq!(words, b"hello");
        let (answer, sealing, opening) = asked.answer().unwrap();
        (asking.answered(&answer).unwrap(), (sealing, opening))
    }

    #[test]
    fn what_is_sealed_opens_in_order_and_shows_nothing() {
        let ((mut to_agent, mut from_agent), (mut to_user, mut from_user)) = linked();
        for text in ["one", "", "three"] {
            for (sealing, opening) in [(&mut to_agent, &mut from_user), (&mut to_user, &mut from_agent)] {
                let sealed = sealing.seal(text.as_bytes()).unwrap();
                assert!(text.is_empty() || !sealed.windows(text.len()).any(|part| part == text.as_bytes()));
                assert_eq!(opening.open(&sealed).unwrap(), text.as_bytes());
            }
        }
    }

    #[test]
    fn a_hello_that_is_said_again_leads_to_keys_under_which_nothing_old_opens() {
        let (asking, hello) = shared(1).hello(7, b"hello").unwrap();
        let answer = |hello: &[u8]| shared(1).hear_hello(7, hello).unwrap().1.answer().unwrap();
        let (first, mut to_user, mut opens) = answer(&hello);
        let (mut sealing, mut hears) = asking.answered(&first).unwrap();
        let typed = sealing.seal(b"rm -r work").unwrap();
        assert!(opens.open(&typed).is_some());
        assert!(hears.open(&to_user.seal(b"shown").unwrap()).is_some());

        let (second, _, mut opens_again) = answer(&hello);
        assert_ne!(first, second);
        assert!(opens_again.open(&typed).is_none(), "what was typed once is typed again");
        // Nor does an old answer say anything to a new hello.
        let (asking, _) = shared(1).hello(7, b"hello").unwrap();
        assert!(asking.answered(&first).is_none());
    }

    #[test]
    fn what_is_altered_repeated_left_out_or_of_another_direction_does_not_open() {
        let ((mut to_agent, _), (_, mut opening)) = linked();
        let (first, second) = (to_agent.seal(b"first").unwrap(), to_agent.seal(b"second").unwrap());
        assert!(opening.open(&second).is_none(), "the first is missing");
        for position in 0..first.len() {
            let mut altered = first.clone();
            altered[position] ^= 1;
            assert!(opening.open(&altered).is_none(), "byte {position}");
        }
        for length in [0, 1, COUNT, COUNT + 15, COUNT + 16] {
            assert!(opening.open(&vec![0; length]).is_none());
        }
        assert_eq!(opening.open(&first).unwrap(), b"first");
        assert!(opening.open(&first).is_none(), "it comes twice");
        let ((mut to_agent, mut from_agent), (_, mut another)) = linked();
        let said = to_agent.seal(b"said").unwrap();
        assert!(from_agent.open(&said).is_none(), "it goes the other way");
        assert!(opening.open(&said).is_none(), "it is of another link");
        assert!(another.open(&said).is_some());
    }

    #[test]
    fn a_hello_of_another_link_or_secret_and_one_that_is_altered_is_none() {
        let (asking, hello) = shared(1).hello(7, b"hello").unwrap();
        assert!(shared(1).hear_hello(8, &hello).is_none());
        assert!(shared(2).hear_hello(7, &hello).is_none());
        let (answer, ..) = shared(1).hear_hello(7, &hello).unwrap().1.answer().unwrap();
        for (message, is_heard) in [
            (&hello, &(|message: &[u8]| shared(1).hear_hello(7, message).is_some()) as &dyn Fn(&[u8]) -> bool),
            (&answer, &|message: &[u8]| asking.answered(message).is_some()),
        ] {
            assert!(is_heard(message));
            for position in 0..message.len() {
                let mut altered = message.clone();
                altered[position] ^= 1;
                assert!(!is_heard(&altered), "byte {position}");
            }
            assert!(!is_heard(&[]) && !is_heard(&[0; SALT]) && !is_heard(&[0; SALT + 16]));
        }
    }
}
