//! Seals what two replicas send each other about a terminal, so that the bus carries what its operator cannot read, and a message that
//! is repeated, altered, reordered or sent to another session does not open.
//!
//! A link begins with a hello and its answer, each sealed by itself under a key with a salt that its sender draws. Both salts are in the
//! keys of what follows, one for each direction: a repeated hello is answered with a new salt, and under that nothing opens of what was
//! sent before. Messages are counted: one that is lost, repeated or put elsewhere is noticed, and ends the link.
//!
//! Every key is derived for one [`Scope`], the associated data of every message: a hello of one session does not open at the stream of
//! another, and neither does a message of its link.

use aes_gcm::{
    Aes256Gcm, Key, KeyInit,
    aead::{Aead, Nonce, Payload},
};
use hmac::{Hmac, Mac as _};
use rand::Rng;
use secrecy::{ExposeSecret, SecretSlice};
use sha2::Sha256;
use std::sync::Arc;
use uuid::Uuid;
use zeroize::Zeroizing;

/// What the keys are made for. Replicas with another version do not open each other's messages.
const VERSION: &[u8] = b"gpuaas terminal relay v3";
const SALT: usize = 16;
const COUNT: usize = 8;
const NAME: usize = 16;

type Salt = [u8; SALT];

/// What a key is for. Each direction has its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    ToAgent = 1,
    ToUser = 2,
    Hello = 3,
    Answer = 4,
    Announcement = 5,
}

/// What a message belongs to, beside its direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Scope {
    pub(super) session: Uuid,
    /// The replica that sent the hello or the announcement.
    pub(super) member: u128,
    /// 0 for an announcement.
    pub(super) link: u128,
}

impl Scope {
    /// The associated data of a message: what its key is derived for. `peer` is the replica that answered, 0 where none has yet.
    fn bytes(self, of: Use, peer: u128) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(1 + 4 * NAME);
        bytes.push(of as u8);
        bytes.extend(self.session.as_bytes());
        bytes.extend(self.member.to_be_bytes());
        bytes.extend(self.link.to_be_bytes());
        bytes.extend(peer.to_be_bytes());
        bytes
    }
}

/// A key with its associated data.
struct Sealer {
    cipher: Aes256Gcm,
    scope: Vec<u8>,
}

impl Sealer {
    fn seal(&self, count: u64, plain: &[u8]) -> Option<Vec<u8>> {
        self.cipher.encrypt(&nonce(count), Payload { msg: plain, aad: &self.scope }).ok()
    }

    fn open(&self, count: u64, sealed: &[u8]) -> Option<Vec<u8>> {
        self.cipher.decrypt(&nonce(count), Payload { msg: sealed, aad: &self.scope }).ok()
    }
}

/// What the replicas share.
#[derive(Clone)]
pub(super) struct Shared(Arc<SecretSlice<u8>>);

impl Shared {
    pub(super) fn new(secret: SecretSlice<u8>) -> Self {
        Self(Arc::new(secret))
    }

    /// A hello on a new link. `None` only where it cannot be sealed.
    pub(super) fn hello(&self, scope: Scope, words: &[u8]) -> Option<(Asking, Vec<u8>)> {
        let asks = drawn();
        let message = alone(&self.sealer(Use::Hello, scope, 0, &[asks])?, &asks, words)?;
        Some((Asking { shared: self.clone(), scope, asks }, message))
    }

    /// What a hello holds, and the replica to answer. `None` where it is none, or belongs to another scope or cluster.
    pub(super) fn hear_hello(&self, scope: Scope, message: &[u8]) -> Option<(Vec<u8>, Asked)> {
        let (asks, sealed) = message.split_first_chunk::<SALT>()?;
        let words = self.sealer(Use::Hello, scope, 0, &[*asks])?.open(0, sealed)?;
        Some((words, Asked { shared: self.clone(), scope, asks: *asks }))
    }

    /// Announces that the stream of the scope's session is at the scope's member.
    pub(super) fn announcement(&self, scope: Scope) -> Option<Vec<u8>> {
        let salt = drawn();
        alone(&self.sealer(Use::Announcement, scope, 0, &[salt])?, &salt, &[])
    }

    /// Whether a member of this cluster made the announcement.
    pub(super) fn is_announcement(&self, scope: Scope, message: &[u8]) -> bool {
        let opened = message
            .split_first_chunk::<SALT>()
            .and_then(|(salt, sealed)| self.sealer(Use::Announcement, scope, 0, &[*salt])?.open(0, sealed));
        opened.is_some()
    }

    fn sealer(&self, of: Use, scope: Scope, peer: u128, salts: &[Salt]) -> Option<Sealer> {
        let scope = scope.bytes(of, peer);
        // Takes a key of any length.
        let mut mac = Hmac::<Sha256>::new_from_slice(self.0.expose_secret()).ok()?;
        mac.update(VERSION);
        mac.update(&scope);
        mac.update(salts.as_flattened());
        let bytes: Zeroizing<[u8; 32]> = Zeroizing::new(mac.finalize().into_bytes().into());
        Some(Sealer { cipher: Aes256Gcm::new(&Key::<Aes256Gcm>::from(*bytes)), scope })
    }

    fn sealing(&self, of: Use, scope: Scope, peer: u128, salts: [Salt; 2]) -> Option<Sealing> {
        Some(Sealing { sealer: self.sealer(of, scope, peer, &salts)?, count: 0 })
    }

    fn opening(&self, of: Use, scope: Scope, peer: u128, salts: [Salt; 2]) -> Option<Opening> {
        Some(Opening { sealer: self.sealer(of, scope, peer, &salts)?, expected: 0 })
    }
}

/// The replica that sent a hello, until it is answered.
pub(super) struct Asking {
    shared: Shared,
    scope: Scope,
    asks: Salt,
}

impl Asking {
    /// How the link goes on at the user's side. `None` where it is no answer to this hello.
    pub(super) fn answered(&self, message: &[u8]) -> Option<(Sealing, Opening)> {
        let Self { shared, scope, asks } = self;
        let (answers, sealed) = message.split_first_chunk::<SALT>()?;
        let salts = [*asks, *answers];
        let peer = shared.sealer(Use::Answer, *scope, 0, &salts)?.open(0, sealed)?;
        let peer = u128::from_be_bytes(peer.try_into().ok()?);
        let sealing = shared.sealing(Use::ToAgent, *scope, peer, salts)?;
        Some((sealing, shared.opening(Use::ToUser, *scope, peer, salts)?))
    }
}

/// A replica whose hello has come.
pub(super) struct Asked {
    shared: Shared,
    scope: Scope,
    asks: Salt,
}

impl Asked {
    /// The answer of the replica `me`, and how the link goes on at the agent's side.
    pub(super) fn answer(self, me: u128) -> Option<(Vec<u8>, Sealing, Opening)> {
        let Self { shared, scope, asks } = self;
        let answers = drawn();
        let salts = [asks, answers];
        let message = alone(&shared.sealer(Use::Answer, scope, 0, &salts)?, &answers, &me.to_be_bytes())?;
        let sealing = shared.sealing(Use::ToUser, scope, me, salts)?;
        Some((message, sealing, shared.opening(Use::ToAgent, scope, me, salts)?))
    }
}

/// The sender's side of one direction.
pub(super) struct Sealing {
    sealer: Sealer,
    count: u64,
}

impl Sealing {
    /// count ‖ sealed. `None` only where nothing more can be sealed.
    pub(super) fn seal(&mut self, plain: &[u8]) -> Option<Vec<u8>> {
        let count = self.count;
        self.count = count.checked_add(1)?;
        let sealed = self.sealer.seal(count, plain)?;
        Some([&count.to_be_bytes(), sealed.as_slice()].concat())
    }
}

/// The receiver's side of one direction.
pub(super) struct Opening {
    sealer: Sealer,
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
        let plain = self.sealer.open(expected, sealed)?;
        self.expected = expected.checked_add(1)?;
        Some(plain)
    }
}

/// salt ‖ sealed: the only message under a key of its own.
fn alone(sealer: &Sealer, salt: &Salt, words: &[u8]) -> Option<Vec<u8>> {
    let sealed = sealer.seal(0, words)?;
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

    const ANSWERS: u128 = 9;

    const fn scope() -> Scope {
        Scope { session: Uuid::from_u128(5), member: 6, link: 7 }
    }

    /// Both sides of a link: the user's, then the agent's.
    fn linked() -> ((Sealing, Opening), (Sealing, Opening)) {
        let (asking, hello) = shared(1).hello(scope(), b"hello").unwrap();
        let (words, asked) = shared(1).hear_hello(scope(), &hello).unwrap();
        assert_eq!(words, b"hello");
        let (answer, sealing, opening) = asked.answer(ANSWERS).unwrap();
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
        let (asking, hello) = shared(1).hello(scope(), b"hello").unwrap();
        let answer = |hello: &[u8]| shared(1).hear_hello(scope(), hello).unwrap().1.answer(ANSWERS).unwrap();
        let (first, mut to_user, mut opens) = answer(&hello);
        let (mut sealing, mut hears) = asking.answered(&first).unwrap();
        let typed = sealing.seal(b"rm -r work").unwrap();
        assert!(opens.open(&typed).is_some());
        assert!(hears.open(&to_user.seal(b"shown").unwrap()).is_some());

        let (second, _, mut opens_again) = answer(&hello);
        assert_ne!(first, second);
        assert!(opens_again.open(&typed).is_none(), "what was typed once is typed again");
        // Nor does an old answer say anything to a new hello.
        let (asking, _) = shared(1).hello(scope(), b"hello").unwrap();
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
    fn message_of_one_session_or_member_does_not_open_in_another_with_the_same_salts() {
        let salts = [[1; SALT], [2; SALT]];
        let sealing = |scope, peer| shared(1).sealing(Use::ToAgent, scope, peer, salts).unwrap();
        let opens = |of, scope, peer| shared(1).opening(of, scope, peer, salts).unwrap();
        let typed = sealing(scope(), ANSWERS).seal(b"typed").unwrap();
        assert_eq!(opens(Use::ToAgent, scope(), ANSWERS).open(&typed).unwrap(), b"typed");
        assert!(opens(Use::ToUser, scope(), ANSWERS).open(&typed).is_none());
        assert!(opens(Use::ToAgent, scope(), ANSWERS + 1).open(&typed).is_none());
        for other in [
            Scope { session: Uuid::from_u128(8), ..scope() },
            Scope { member: 8, ..scope() },
            Scope { link: 8, ..scope() },
        ] {
            assert!(opens(Use::ToAgent, other, ANSWERS).open(&typed).is_none(), "{other:?}");
        }
    }

    #[test]
    fn announcement_of_another_session_member_or_cluster_is_none() {
        let of = Scope { link: 0, ..scope() };
        let message = shared(1).announcement(of).unwrap();
        assert!(shared(1).is_announcement(of, &message));
        assert!(!shared(2).is_announcement(of, &message));
        assert!(!shared(1).is_announcement(Scope { session: Uuid::from_u128(8), ..of }, &message));
        assert!(!shared(1).is_announcement(Scope { member: 8, ..of }, &message));
        assert!(!shared(1).is_announcement(of, &[]));
    }

    #[test]
    fn a_hello_of_another_link_or_secret_and_one_that_is_altered_is_none() {
        let (asking, hello) = shared(1).hello(scope(), b"hello").unwrap();
        for other in [
            Scope { session: Uuid::from_u128(8), ..scope() },
            Scope { member: 8, ..scope() },
            Scope { link: 8, ..scope() },
        ] {
            assert!(shared(1).hear_hello(other, &hello).is_none(), "{other:?}");
        }
        assert!(shared(2).hear_hello(scope(), &hello).is_none());
        let (answer, ..) = shared(1).hear_hello(scope(), &hello).unwrap().1.answer(ANSWERS).unwrap();
        for (message, is_heard) in [
            (&hello, &(|message: &[u8]| shared(1).hear_hello(scope(), message).is_some()) as &dyn Fn(&[u8]) -> bool),
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
