//! Seals the messages that two replicas exchange about a terminal, so that the bus carries nothing that its operator can read, and a
//! message that is repeated, altered, reordered or redirected to another session does not open.
//!
//! A link begins with a hello and its answer, each sealed under a key with a random salt of its sender. Both salts are in the keys of what
//! follows, one key for each direction: a repeated hello is answered with a new salt, under which nothing opens that was sent before.
//! Messages are counted: a message that is lost, repeated or moved is detected and ends the link.
//!
//! Every key is derived for one [`LinkScope`], the associated data of every message: a hello of one session does not open at the stream of
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

/// The label of the key derivation. Replicas of another version do not open each other's messages.
const VERSION: &[u8] = b"gpuaas terminal relay v3";
const SALT_LEN: usize = 16;
const COUNT_LEN: usize = 8;
const NAME_LEN: usize = 16;

type Salt = [u8; SALT_LEN];

/// The purpose of a key. Each direction has its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KeyUse {
    ToAgent = 1,
    ToUser = 2,
    Hello = 3,
    Answer = 4,
    Announcement = 5,
}

/// What a message belongs to, besides its direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LinkScope {
    pub(super) session: Uuid,
    /// The replica that sent the hello or the announcement.
    pub(super) member: u128,
    /// 0 for an announcement.
    pub(super) link: u128,
}

impl LinkScope {
    /// The associated data of a message, from which its key is derived. `peer` is the replica that answered, 0 where none has yet.
    fn bytes(self, of: KeyUse, peer: u128) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(1 + 4 * NAME_LEN);
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

/// The secret that all replicas share.
#[derive(Clone)]
pub(super) struct ClusterSecret(Arc<SecretSlice<u8>>);

impl ClusterSecret {
    pub(super) fn new(secret: SecretSlice<u8>) -> Self {
        Self(Arc::new(secret))
    }

    /// Seals a hello on a new link. `None` only where it cannot be sealed.
    pub(super) fn hello(&self, scope: LinkScope, plain: &[u8]) -> Option<(SentHello, Vec<u8>)> {
        let asks = random_salt();
        let message = sealed_once(&self.sealer(KeyUse::Hello, scope, 0, &[asks])?, &asks, plain)?;
        Some((SentHello { shared: self.clone(), scope, asks }, message))
    }

    /// Opens a hello: its content, and the state to answer it with. `None` where it is not a hello, or belongs to another scope or cluster.
    pub(super) fn open_hello(&self, scope: LinkScope, message: &[u8]) -> Option<(Vec<u8>, ReceivedHello)> {
        let (asks, sealed) = message.split_first_chunk::<SALT_LEN>()?;
        let plain = self.sealer(KeyUse::Hello, scope, 0, &[*asks])?.open(0, sealed)?;
        Some((plain, ReceivedHello { shared: self.clone(), scope, asks: *asks }))
    }

    /// Announces that the stream of the scope's session is at the scope's member.
    pub(super) fn announcement(&self, scope: LinkScope) -> Option<Vec<u8>> {
        let salt = random_salt();
        sealed_once(&self.sealer(KeyUse::Announcement, scope, 0, &[salt])?, &salt, &[])
    }

    /// Whether a member of this cluster made the announcement.
    pub(super) fn is_announcement(&self, scope: LinkScope, message: &[u8]) -> bool {
        let opened = message
            .split_first_chunk::<SALT_LEN>()
            .and_then(|(salt, sealed)| self.sealer(KeyUse::Announcement, scope, 0, &[*salt])?.open(0, sealed));
        opened.is_some()
    }

    fn sealer(&self, of: KeyUse, scope: LinkScope, peer: u128, salts: &[Salt]) -> Option<Sealer> {
        let scope = scope.bytes(of, peer);
        // HMAC accepts keys of any length.
        let mut mac = Hmac::<Sha256>::new_from_slice(self.0.expose_secret()).ok()?;
        mac.update(VERSION);
        mac.update(&scope);
        mac.update(salts.as_flattened());
        let bytes: Zeroizing<[u8; 32]> = Zeroizing::new(mac.finalize().into_bytes().into());
        Some(Sealer { cipher: Aes256Gcm::new(&Key::<Aes256Gcm>::from(*bytes)), scope })
    }

    fn sealing(&self, of: KeyUse, scope: LinkScope, peer: u128, salts: [Salt; 2]) -> Option<MessageSealer> {
        Some(MessageSealer { sealer: self.sealer(of, scope, peer, &salts)?, count: 0 })
    }

    fn opening(&self, of: KeyUse, scope: LinkScope, peer: u128, salts: [Salt; 2]) -> Option<MessageOpener> {
        Some(MessageOpener { sealer: self.sealer(of, scope, peer, &salts)?, expected: 0 })
    }
}

/// The replica that sent a hello, until it is answered.
pub(super) struct SentHello {
    shared: ClusterSecret,
    scope: LinkScope,
    asks: Salt,
}

impl SentHello {
    /// Opens the answer: the link's state at the user's side. `None` where it does not answer this hello.
    pub(super) fn open_answer(&self, message: &[u8]) -> Option<(MessageSealer, MessageOpener)> {
        let Self { shared, scope, asks } = self;
        let (answers, sealed) = message.split_first_chunk::<SALT_LEN>()?;
        let salts = [*asks, *answers];
        let peer = shared.sealer(KeyUse::Answer, *scope, 0, &salts)?.open(0, sealed)?;
        let peer = u128::from_be_bytes(peer.try_into().ok()?);
        let sealing = shared.sealing(KeyUse::ToAgent, *scope, peer, salts)?;
        Some((sealing, shared.opening(KeyUse::ToUser, *scope, peer, salts)?))
    }
}

/// A hello that was received.
pub(super) struct ReceivedHello {
    shared: ClusterSecret,
    scope: LinkScope,
    asks: Salt,
}

impl ReceivedHello {
    /// Seals the answer of the replica `me`: the message, and the link's state at the agent's side.
    pub(super) fn seal_answer(self, me: u128) -> Option<(Vec<u8>, MessageSealer, MessageOpener)> {
        let Self { shared, scope, asks } = self;
        let answers = random_salt();
        let salts = [asks, answers];
        let message = sealed_once(&shared.sealer(KeyUse::Answer, scope, 0, &salts)?, &answers, &me.to_be_bytes())?;
        let sealing = shared.sealing(KeyUse::ToUser, scope, me, salts)?;
        Some((message, sealing, shared.opening(KeyUse::ToAgent, scope, me, salts)?))
    }
}

/// The sender's side of one direction.
pub(super) struct MessageSealer {
    sealer: Sealer,
    count: u64,
}

impl MessageSealer {
    /// count ‖ sealed. `None` only where nothing more can be sealed.
    pub(super) fn seal(&mut self, plain: &[u8]) -> Option<Vec<u8>> {
        let count = self.count;
        self.count = count.checked_add(1)?;
        let sealed = self.sealer.seal(count, plain)?;
        Some([&count.to_be_bytes(), sealed.as_slice()].concat())
    }
}

/// The receiver's side of one direction.
pub(super) struct MessageOpener {
    sealer: Sealer,
    expected: u64,
}

impl MessageOpener {
    /// `None` where it is not the sender's next message.
    pub(super) fn open(&mut self, message: &[u8]) -> Option<Vec<u8>> {
        let (count, sealed) = message.split_first_chunk::<COUNT_LEN>()?;
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
fn sealed_once(sealer: &Sealer, salt: &Salt, plain: &[u8]) -> Option<Vec<u8>> {
    let sealed = sealer.seal(0, plain)?;
    Some([salt.as_slice(), &sealed].concat())
}

fn random_salt() -> Salt {
    let mut salt = [0; SALT_LEN];
    rand::rng().fill_bytes(&mut salt);
    salt
}

fn nonce(count: u64) -> Nonce<Aes256Gcm> {
    let mut bytes = [0; 12];
    bytes[4..].copy_from_slice(&count.to_be_bytes());
    Nonce::<Aes256Gcm>::from(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared(byte: u8) -> ClusterSecret {
        ClusterSecret::new(vec![byte; 32].into())
    }

    const ANSWERS: u128 = 9;

    const fn scope() -> LinkScope {
        LinkScope { session: Uuid::from_u128(5), member: 6, link: 7 }
    }

    /// Both sides of a link: the user's, then the agent's.
    fn linked() -> ((MessageSealer, MessageOpener), (MessageSealer, MessageOpener)) {
        let (asking, hello) = shared(1).hello(scope(), b"hello").unwrap();
        let (plain, asked) = shared(1).open_hello(scope(), &hello).unwrap();
        assert_eq!(plain, b"hello");
        let (answer, sealing, opening) = asked.seal_answer(ANSWERS).unwrap();
        (asking.open_answer(&answer).unwrap(), (sealing, opening))
    }

    #[test]
    fn sealed_messages_open_in_order_and_reveal_nothing() {
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
    fn replayed_hello_derives_keys_under_which_no_old_message_opens() {
        let (asking, hello) = shared(1).hello(scope(), b"hello").unwrap();
        let seal_answer = |hello: &[u8]| shared(1).open_hello(scope(), hello).unwrap().1.seal_answer(ANSWERS).unwrap();
        let (first, mut to_user, mut opens) = seal_answer(&hello);
        let (mut sealing, mut opener) = asking.open_answer(&first).unwrap();
        let typed = sealing.seal(b"rm -r work").unwrap();
        assert!(opens.open(&typed).is_some());
        assert!(opener.open(&to_user.seal(b"shown").unwrap()).is_some());

        let (second, _, mut opens_again) = seal_answer(&hello);
        assert_ne!(first, second);
        assert!(opens_again.open(&typed).is_none(), "what was typed once is typed again");
        // Nor does an old answer open for a new hello.
        let (asking, _) = shared(1).hello(scope(), b"hello").unwrap();
        assert!(asking.open_answer(&first).is_none());
    }

    #[test]
    fn altered_repeated_omitted_or_reversed_message_does_not_open() {
        let ((mut to_agent, _), (_, mut opening)) = linked();
        let (first, second) = (to_agent.seal(b"first").unwrap(), to_agent.seal(b"second").unwrap());
        assert!(opening.open(&second).is_none(), "the first is missing");
        for position in 0..first.len() {
            let mut altered = first.clone();
            altered[position] ^= 1;
            assert!(opening.open(&altered).is_none(), "byte {position}");
        }
        for length in [0, 1, COUNT_LEN, COUNT_LEN + 15, COUNT_LEN + 16] {
            assert!(opening.open(&vec![0; length]).is_none());
        }
        assert_eq!(opening.open(&first).unwrap(), b"first");
        assert!(opening.open(&first).is_none(), "it comes twice");
        let ((mut to_agent, mut from_agent), (_, mut another)) = linked();
        let output = to_agent.seal(b"said").unwrap();
        assert!(from_agent.open(&output).is_none(), "it goes the other way");
        assert!(opening.open(&output).is_none(), "it is of another link");
        assert!(another.open(&output).is_some());
    }

    #[test]
    fn message_of_one_session_or_member_does_not_open_in_another_with_the_same_salts() {
        let salts = [[1; SALT_LEN], [2; SALT_LEN]];
        let sealing = |scope, peer| shared(1).sealing(KeyUse::ToAgent, scope, peer, salts).unwrap();
        let opens = |of, scope, peer| shared(1).opening(of, scope, peer, salts).unwrap();
        let typed = sealing(scope(), ANSWERS).seal(b"typed").unwrap();
        assert_eq!(opens(KeyUse::ToAgent, scope(), ANSWERS).open(&typed).unwrap(), b"typed");
        assert!(opens(KeyUse::ToUser, scope(), ANSWERS).open(&typed).is_none());
        assert!(opens(KeyUse::ToAgent, scope(), ANSWERS + 1).open(&typed).is_none());
        for other in [
            LinkScope { session: Uuid::from_u128(8), ..scope() },
            LinkScope { member: 8, ..scope() },
            LinkScope { link: 8, ..scope() },
        ] {
            assert!(opens(KeyUse::ToAgent, other, ANSWERS).open(&typed).is_none(), "{other:?}");
        }
    }

    #[test]
    fn announcement_of_another_session_member_or_cluster_is_refused() {
        let of = LinkScope { link: 0, ..scope() };
        let message = shared(1).announcement(of).unwrap();
        assert!(shared(1).is_announcement(of, &message));
        assert!(!shared(2).is_announcement(of, &message));
        assert!(!shared(1).is_announcement(LinkScope { session: Uuid::from_u128(8), ..of }, &message));
        assert!(!shared(1).is_announcement(LinkScope { member: 8, ..of }, &message));
        assert!(!shared(1).is_announcement(of, &[]));
    }

    #[test]
    fn altered_hello_and_hello_of_another_link_or_secret_are_refused() {
        let (asking, hello) = shared(1).hello(scope(), b"hello").unwrap();
        for other in [
            LinkScope { session: Uuid::from_u128(8), ..scope() },
            LinkScope { member: 8, ..scope() },
            LinkScope { link: 8, ..scope() },
        ] {
            assert!(shared(1).open_hello(other, &hello).is_none(), "{other:?}");
        }
        assert!(shared(2).open_hello(scope(), &hello).is_none());
        let (answer, ..) = shared(1).open_hello(scope(), &hello).unwrap().1.seal_answer(ANSWERS).unwrap();
        for (message, is_accepted) in [
            (&hello, &(|message: &[u8]| shared(1).open_hello(scope(), message).is_some()) as &dyn Fn(&[u8]) -> bool),
            (&answer, &|message: &[u8]| asking.open_answer(message).is_some()),
        ] {
            assert!(is_accepted(message));
            for position in 0..message.len() {
                let mut altered = message.clone();
                altered[position] ^= 1;
                assert!(!is_accepted(&altered), "byte {position}");
            }
            assert!(!is_accepted(&[]) && !is_accepted(&[0; SALT_LEN]) && !is_accepted(&[0; SALT_LEN + 16]));
        }
    }
}
