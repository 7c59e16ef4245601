//! Envelope encryption of values that must be readable again: AES-256-GCM under a fresh data key for every value, the data key sealed
//! under a key of the key ring (the key-encryption keys, KEK). The seal context of the value (table, column and row id) is
//! authenticated with both, so that a sealed value that was moved elsewhere does not open.
//!
//! # Key ring file
//! Lines of text; `#` begins a comment. `key ID BASE64` defines a key of 32 bytes (an id is 1 to 64 of `[A-Za-z0-9._-]`), `active ID`
//! names the one that seals. The others still open: a key is rotated by adding a new one, making it active, rewrapping everything
//! ([`crate::key_rewrap`]), and removing the old one when nothing is sealed under it.
//!
//! # Sealed value, version 1
//! `1 · length of key id · key id · nonce (12) · sealed data key (32 + 16) · nonce (12) · ciphertext + 16`.

mod data_key;

pub use data_key::DataKey;

use aes_gcm::aead::{Aead, Generate, KeyInit, Payload};
use aes_gcm::{Aes256Gcm, Key};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use secrecy::{ExposeSecret, SecretSlice};
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Write};
use std::path::Path;
use zeroize::Zeroizing;

const VERSION: u8 = 1;
const KEY: usize = 32;
const NONCE: usize = 12;
const TAG: usize = 16;

/// The seal context: where a sealed value is stored. A value that was sealed for one context opens in no other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SealContext<'a> {
    pub table: &'a str,
    pub column: &'a str,
    pub row: &'a str,
}

impl SealContext<'_> {
    /// Each part is length-prefixed: `("a", "bc")` and `("ab", "c")` are different contexts.
    fn associated_data(&self, layer: u8, key_id: &str) -> Vec<u8> {
        let mut data = vec![VERSION, layer];
        for part in [self.table, self.column, self.row, key_id] {
            data.extend_from_slice(&(part.len() as u64).to_be_bytes());
            data.extend_from_slice(part.as_bytes());
        }
        data
    }
}

const DATA_KEY: u8 = b'k';
const DATA: u8 = b'd';

/// The key-encryption keys by id, and the active one.
pub struct KeyRing {
    active: String,
    keys: BTreeMap<String, Zeroizing<[u8; KEY]>>,
}

impl fmt::Debug for KeyRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ids: Vec<_> = self.keys.keys().collect();
        f.debug_struct("KeyRing").field("active", &self.active).field("ids", &ids).finish()
    }
}

#[derive(Debug, thiserror::Error)]
pub enum KeyRingError {
    #[error("the key ring file {path} could not be read or written")]
    File {
        path: String,
        #[source]
        source: io::Error,
    },
    #[error("line {line} of the key ring: {problem}")]
    Line { line: usize, problem: &'static str },
    #[error("the key ring names no active key among its keys")]
    NoActive,
}

/// A sealed value did not open.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvelopeError {
    #[error("the sealed value is of format {0}, which this release does not know")]
    Format(u8),
    #[error("the sealed value is cut short")]
    Short,
    #[error("the value is sealed under key {0:?}, which is not in the key ring")]
    UnknownKey(String),
    /// Another key under the same id, another context, or altered bytes: they cannot be distinguished.
    #[error("the sealed value does not open here")]
    Refused,
}

impl KeyRing {
    /// Reads the file in the format above.
    ///
    /// # Errors
    /// [`KeyRingError`] names the line, never its content.
    pub fn load(path: &Path) -> Result<Self, KeyRingError> {
        let file = |source| KeyRingError::File { path: path.display().to_string(), source };
        let text = Zeroizing::new(std::fs::read_to_string(path).map_err(file)?);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let mode = std::fs::metadata(path).map_err(file)?.permissions().mode();
            // In a pod it is root's, and the service reads it by its group.
            if mode & 0o037 != 0 {
                tracing::warn!(path = %path.display(), "the key ring file can be read by others than its owner and group");
            }
        }
        Self::parse(&text)
    }

    /// Creates a key ring of one fresh key and writes it where no file is yet, readable by its owner alone. For development: production
    /// brings its own.
    ///
    /// # Errors
    /// [`KeyRingError::File`] where the file exists or cannot be written.
    pub fn create(path: &Path) -> Result<Self, KeyRingError> {
        let file = |source| KeyRingError::File { path: path.display().to_string(), source };
        let key = Zeroizing::new(<[u8; KEY]>::generate());
        let encoded = Zeroizing::new(STANDARD.encode(key.as_slice()));
        let text = Zeroizing::new(format!("# Made for development.\nactive dev\nkey dev {}\n", encoded.as_str()));
        let mut options = std::fs::OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        {
            use std::os::unix::fs::OpenOptionsExt;
            options.mode(0o600);
        }
        let mut out = options.open(path).map_err(file)?;
        out.write_all(text.as_bytes()).and_then(|()| out.sync_all()).map_err(file)?;
        Self::parse(&text)
    }

    /// # Errors
    /// As [`KeyRing::load`].
    pub fn parse(text: &str) -> Result<Self, KeyRingError> {
        let mut active = None;
        let mut keys = BTreeMap::new();
        for (index, line) in text.lines().enumerate() {
            let wrong = |problem| KeyRingError::Line { line: index + 1, problem };
            let content = line.split('#').next().unwrap_or_default();
            let words: Vec<&str> = content.split_whitespace().collect();
            match words.as_slice() {
                [] => {}
                ["active", id] => {
                    if active.replace((*id).to_owned()).is_some() {
                        return Err(wrong("a second active key"));
                    }
                }
                ["key", id, encoded] => {
                    if !is_key_id(id) {
                        return Err(wrong("a key id is 1 to 64 of A-Z a-z 0-9 . _ -"));
                    }
                    let bytes = STANDARD.decode(encoded).map(Zeroizing::new).map_err(|_| wrong("not base64"))?;
                    let key = <[u8; KEY]>::try_from(bytes.as_slice()).map_err(|_| wrong("a key has 32 bytes"))?;
                    if keys.insert((*id).to_owned(), Zeroizing::new(key)).is_some() {
                        return Err(wrong("this key id stands twice"));
                    }
                }
                _ => return Err(wrong("expected `key ID BASE64` or `active ID`")),
            }
        }
        match active {
            Some(active) if keys.contains_key(&active) => Ok(Self { active, keys }),
            Some(_) | None => Err(KeyRingError::NoActive),
        }
    }

    /// The id of the key that seals.
    #[must_use]
    pub fn active(&self) -> &str {
        &self.active
    }

    /// Whether the ring has the key.
    #[must_use]
    pub fn has(&self, id: &str) -> bool {
        self.keys.contains_key(id)
    }

    /// A fingerprint of each key, by its id: two files with the same fingerprints hold the same keys. It says nothing of a key's bytes.
    #[must_use]
    pub fn fingerprints(&self) -> BTreeMap<&str, String> {
        let of = |key: &Zeroizing<[u8; KEY]>| {
            let digest = Sha256::new().chain_update(b"gpuaas key ring fingerprint v1\0").chain_update(key.as_slice());
            hex::encode(&digest.finalize()[..8])
        };
        self.keys.iter().map(|(id, key)| (id.as_str(), of(key))).collect()
    }

    /// The first bytes of every value that the active key has sealed.
    #[must_use]
    pub fn active_prefix(&self) -> Vec<u8> {
        // An id has 64 characters at most.
        let length = u8::try_from(self.active.len()).unwrap_or(u8::MAX);
        [&[VERSION, length], self.active.as_bytes()].concat()
    }

    /// Rewraps under the active key what was sealed for the same context under any key of the ring.
    ///
    /// # Errors
    /// [`EnvelopeError`], as [`KeyRing::open`].
    pub fn reseal(&self, context: &SealContext<'_>, sealed: &[u8]) -> Result<Vec<u8>, EnvelopeError> {
        self.seal(context, self.open(context, sealed)?.expose_secret())
    }

    /// Seals `plain` for `context` under the active key.
    ///
    /// # Errors
    /// [`EnvelopeError::Refused`] where the value is longer than the cipher allows (64 GiB).
    pub fn seal(&self, context: &SealContext<'_>, plain: &[u8]) -> Result<Vec<u8>, EnvelopeError> {
        let id = self.active.as_str();
        let kek = self.keys.get(id).ok_or_else(|| EnvelopeError::UnknownKey(id.to_owned()))?;
        let data_key = Zeroizing::new(<[u8; KEY]>::generate());
        let mut sealed = vec![VERSION, u8::try_from(id.len()).map_err(|_| EnvelopeError::Refused)?];
        sealed.extend_from_slice(id.as_bytes());
        sealed.extend_from_slice(&encrypt(kek, &context.associated_data(DATA_KEY, id), data_key.as_slice())?);
        sealed.extend_from_slice(&encrypt(&data_key, &context.associated_data(DATA, id), plain)?);
        Ok(sealed)
    }

    /// Opens what was sealed for the same context, under any key of the ring.
    ///
    /// # Errors
    /// [`EnvelopeError`]: cut short, of another format, under a missing key, or of another context.
    pub fn open(&self, context: &SealContext<'_>, sealed: &[u8]) -> Result<SecretSlice<u8>, EnvelopeError> {
        let (&version, rest) = sealed.split_first().ok_or(EnvelopeError::Short)?;
        if version != VERSION {
            return Err(EnvelopeError::Format(version));
        }
        let (&length, rest) = rest.split_first().ok_or(EnvelopeError::Short)?;
        let (id, rest) = rest.split_at_checked(usize::from(length)).ok_or(EnvelopeError::Short)?;
        let (wrapped, data) = rest.split_at_checked(NONCE + KEY + TAG).ok_or(EnvelopeError::Short)?;
        let id = std::str::from_utf8(id).map_err(|_| EnvelopeError::Refused)?;
        let kek = self.keys.get(id).ok_or_else(|| EnvelopeError::UnknownKey(id.to_owned()))?;
        let data_key = decrypt(kek, &context.associated_data(DATA_KEY, id), wrapped)?;
        let data_key = Zeroizing::new(<[u8; KEY]>::try_from(data_key.as_slice()).map_err(|_| EnvelopeError::Refused)?);
        let mut plain = decrypt(&data_key, &context.associated_data(DATA, id), data)?;
        Ok(SecretSlice::from(std::mem::take(&mut *plain)))
    }
}

fn is_key_id(id: &str) -> bool {
    (1..=64).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

fn cipher(key: &[u8; KEY]) -> Aes256Gcm {
    let key: &Key<Aes256Gcm> = key.into();
    Aes256Gcm::new(key)
}

/// Returns nonce and ciphertext.
fn encrypt(key: &[u8; KEY], aad: &[u8], msg: &[u8]) -> Result<Vec<u8>, EnvelopeError> {
    let nonce = <[u8; NONCE]>::generate();
    let mut out = nonce.to_vec();
    out.extend(cipher(key).encrypt(&nonce.into(), Payload { msg, aad }).map_err(|_| EnvelopeError::Refused)?);
    Ok(out)
}

fn decrypt(key: &[u8; KEY], aad: &[u8], sealed: &[u8]) -> Result<Zeroizing<Vec<u8>>, EnvelopeError> {
    let (nonce, msg) = sealed.split_first_chunk::<NONCE>().ok_or(EnvelopeError::Short)?;
    cipher(key).decrypt(&(*nonce).into(), Payload { msg, aad }).map(Zeroizing::new).map_err(|_| EnvelopeError::Refused)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CONTEXT: SealContext<'_> = SealContext { table: "secret", column: "sealed", row: "node-ca" };

    fn ring(active: &str, ids: &[(&str, u8)]) -> KeyRing {
        let mut text = format!("active {active}\n");
        for (id, byte) in ids {
            text.push_str(&format!("key {id} {} # comment\n", STANDARD.encode([*byte; 32])));
        }
        KeyRing::parse(&text).unwrap()
    }

    proptest! {
        #[test]
        fn sealed_value_opens_in_its_context_and_in_no_other(plain: Vec<u8>, at in 0_usize..200, bit in 0_u8..8) {
            let ring = ring("a", &[("a", 1)]);
            let sealed = ring.seal(&CONTEXT, &plain).unwrap();
            let opened = ring.open(&CONTEXT, &sealed).unwrap();
            prop_assert_eq!(opened.expose_secret(), plain.as_slice());

            for context in [SealContext { row: "node-cb", ..CONTEXT }, SealContext { column: "x", ..CONTEXT }, SealContext { table: "t", ..CONTEXT }] {
                prop_assert_eq!(ring.open(&context, &sealed).unwrap_err(), EnvelopeError::Refused);
            }
            let mut altered = sealed.clone();
            let at = at % altered.len();
            altered[at] ^= 1 << bit;
            prop_assert!(ring.open(&CONTEXT, &altered).is_err());
            prop_assert!(ring.open(&CONTEXT, &sealed[..at]).is_err());
        }
    }

    #[test]
    fn a_key_is_rotated_by_adding_one_and_making_it_active() {
        let sealed = ring("a", &[("a", 1)]).seal(&CONTEXT, b"x").unwrap();
        let rotated = ring("b", &[("a", 1), ("b", 2)]);
        assert_eq!(rotated.open(&CONTEXT, &sealed).unwrap().expose_secret(), b"x");
        let rewrapped = rotated.seal(&CONTEXT, b"x").unwrap();
        let old = ring("a", &[("a", 1)]);
        assert_eq!(old.open(&CONTEXT, &rewrapped).unwrap_err(), EnvelopeError::UnknownKey("b".to_owned()));
    }

    #[test]
    fn another_key_under_the_same_id_does_not_open_it() {
        let sealed = ring("a", &[("a", 1)]).seal(&CONTEXT, b"x").unwrap();
        assert_eq!(ring("a", &[("a", 2)]).open(&CONTEXT, &sealed).unwrap_err(), EnvelopeError::Refused);
    }

    #[test]
    fn same_value_is_sealed_differently_each_time() {
        let ring = ring("a", &[("a", 1)]);
        assert_ne!(ring.seal(&CONTEXT, b"x").unwrap(), ring.seal(&CONTEXT, b"x").unwrap());
    }

    #[test]
    fn unknown_format_is_reported_by_number() {
        assert_eq!(ring("a", &[("a", 1)]).open(&CONTEXT, &[9, 9]).unwrap_err(), EnvelopeError::Format(9));
    }

    #[test]
    fn malformed_key_ring_is_refused_by_line_without_quoting_it() {
        let short = format!("active a\nkey a {}", STANDARD.encode([7_u8; 31]));
        for text in ["key a !!!\nactive a", &short, "active a", "key", "", "active a\nactive a"] {
            let error = KeyRing::parse(text).unwrap_err();
            assert!(!format!("{error:?}").contains("!!!"));
        }
        assert!(!format!("{:?}", ring("a", &[("a", 1)])).contains(&STANDARD.encode([1_u8; 32])));
    }

    #[test]
    fn created_key_ring_is_readable_by_its_owner_alone_and_never_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kek");
        let sealed = KeyRing::create(&path).unwrap().seal(&CONTEXT, b"x").unwrap();
        assert_eq!(KeyRing::load(&path).unwrap().open(&CONTEXT, &sealed).unwrap().expose_secret(), b"x");
        assert!(KeyRing::create(&path).is_err());
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        }
    }
}
