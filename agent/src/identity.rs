//! The identity of this node on disk: its keys, its certificate, and the verifiers whose tasks it trusts.
//!
//! A certificate and its key are two files, and no file system renames two at once. So a new key waits in a file of its purpose
//! ([`pending_key`]) from before its CSR is sent; storing the certificate is the moment the identity changes; and an agent that crashed
//! between the certificate and the key finishes the step when it starts. The old key stays until then.
//!
//! # A healthy machine is never taken for a clone
//!
//! The control plane takes an agent for a clone that recovers from a generation which another request has left already. In whatever order
//! requests and answers are lost, the agent is killed and started, certificates are renewed and tokens reissued, the following hold, and
//! `daemon/enroll/tests.rs` tries such orders against the state machine of the node:
//!
//! - A generation is known of one token: the one that was presented for it. With another token the node enrolls, and after a lost answer it
//!   recovers from the first generation, which the control plane takes for that of its enrollment.
//! - A recovery is sent with the same generation and CSR until its own certificate is stored. No other request replaces it: it may have been
//!   executed, or may be yet.
//! - Recoveries and renewals of a process do not overlap: the answer to a renewal would bring back the generation before.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use ed25519_dalek::SigningKey;
use ed25519_dalek::pkcs8::spki::der::pem::LineEnding;
use ed25519_dalek::pkcs8::{DecodePrivateKey as _, EncodePrivateKey as _};
use rcgen::{KeyPair, PublicKeyData as _};
use secrecy::{ExposeSecret as _, SecretString};
use serde::{Deserialize, Serialize};
use uuid::Uuid;
use wire::bundle::fingerprint;
use wire::enroll::{EnrollAnswer, RecoveryState};
use wire::verifier_set::SetError;
use wire::{VerifierSet, Verifiers};
use x509_parser::extensions::{GeneralName, ParsedExtension};

use crate::atomic_file::{self, FileError};
use crate::config::AgentConfig;

pub mod pending_key;

pub use pending_key::PendingKey;

/// A certificate may begin so long after its arrival: the clocks of replicas differ.
const ISSUE_TOLERANCE: TimeDelta = TimeDelta::minutes(1);

/// A valid certificate and its key.
#[derive(Debug, Clone)]
pub struct AgentIdentity {
    /// The leaf first, then its issuers.
    pub certificate_chain_pem: String,
    pub key_pem: SecretString,
    pub not_before: DateTime<Utc>,
    pub not_after: DateTime<Utc>,
    /// The key identifier of the authority that issued it, lower-case hexadecimal; `None` if the certificate does not name one.
    pub authority: Option<String>,
    /// When this process received it; `None` if it was on disk when the process started.
    pub taken_at: Option<DateTime<Utc>>,
}

impl AgentIdentity {
    /// Whether the certificate has expired.
    #[must_use]
    pub fn is_expired(&self, now: DateTime<Utc>) -> bool {
        now >= self.not_after
    }

    /// Whether the certificate is valid now: neither expired nor in the future.
    #[must_use]
    pub fn is_in_force(&self, now: DateTime<Utc>) -> bool {
        self.not_before <= now && !self.is_expired(now)
    }

    /// Whether it was not valid when it arrived: another one would not be either.
    #[must_use]
    pub fn arrived_invalid(&self) -> bool {
        self.taken_at.is_some_and(|at| self.is_expired(at) || self.not_before - at > ISSUE_TOLERANCE)
    }

    /// When to renew: after half of its lifetime and up to a tenth of it more. `chance` is uniform in `0.0..1.0`.
    ///
    /// The lifetime begins when the certificate was received. Its `notBefore` is earlier, as a tolerance for slow clocks: half of a short
    /// lifetime, counted from there, would be over before the certificate arrives.
    #[must_use]
    pub fn renew_at(&self, chance: f64) -> DateTime<Utc> {
        let begins = self.taken_at.map_or(self.not_before, |taken_at| taken_at.max(self.not_before));
        let life = (self.not_after - begins).to_std().unwrap_or(Duration::ZERO);
        begins + life.mul_f64(0.5 + 0.1 * chance.clamp(0.0, 1.0))
    }
}

/// Why the identity cannot be read, created or accepted.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    #[error(transparent)]
    Store(#[from] FileError),
    #[error("{what} cannot be read; remove {} and ask an administrator to reissue the node's enrollment", path.display())]
    Unreadable { what: &'static str, path: PathBuf, why: String },
    #[error(
        "the certificate {} does not belong to the key {}; remove both and ask an administrator to reissue the node's enrollment",
        cert.display(),
        key.display()
    )]
    KeyMismatch { cert: PathBuf, key: PathBuf },
    #[error("the certificate that the control plane sent is not for this node: {why}")]
    ForeignCertificate { why: &'static str },
    #[error("a key could not be made")]
    Key(#[source] rcgen::Error),
    #[error("the trusted verifier keys cannot be used")]
    Verifiers(#[from] SetError),
}

/// The identity's files.
#[derive(Debug, Clone)]
pub struct IdentityStore {
    node_id: Uuid,
    cert: PathBuf,
    key: PathBuf,
    node_ca: PathBuf,
    folder: PathBuf,
    /// Held while the files of an answer are written: two writers of one file would rename each other's half.
    writing: Arc<Mutex<()>>,
}

impl IdentityStore {
    /// The files that `config` names.
    #[must_use]
    pub fn new(config: &AgentConfig) -> Self {
        Self {
            node_id: config.node_id,
            cert: config.cert_path.clone(),
            key: config.key_path.clone(),
            node_ca: config.node_cert_ca_bundle_path.clone(),
            folder: config.state_dir.join("identity"),
            writing: Arc::default(),
        }
    }

    /// The identity, if the node has one. Finishes a change that a crash interrupted.
    ///
    /// # Errors
    /// [`IdentityError`] when the files are inconsistent.
    pub fn load(&self) -> Result<Option<AgentIdentity>, IdentityError> {
        let Some(chain) = atomic_file::read_if_there(&self.cert)? else { return Ok(None) };
        let certificate =
            self.parse(&chain).map_err(|why| self.unreadable("the node's certificate", &self.cert, why))?;
        let is_certified = |pending: &PendingKey| spki(&pending.key_pem).is_ok_and(|key| key == certificate.public_key);
        if let Some(pending) = self.pending_keys()?.into_iter().find(is_certified) {
            return Ok(Some(self.finish(&pending, chain, &certificate)?));
        }
        let Some(key_pem) = atomic_file::read_if_there(&self.key)? else { return Ok(None) };
        let key_pem = SecretString::from(key_pem);
        let public_key =
            spki(&key_pem).map_err(|error| self.unreadable("the node's key", &self.key, error.to_string()))?;
        if public_key != certificate.public_key {
            return Err(IdentityError::KeyMismatch { cert: self.cert.clone(), key: self.key.clone() });
        }
        Ok(Some(certificate.with(chain, key_pem)))
    }

    /// The identity, for another process than the agent: nothing is written, and a change that the agent has begun is taken as finished.
    ///
    /// # Errors
    /// [`IdentityError`] when the files are inconsistent.
    pub fn peek(&self) -> Result<Option<AgentIdentity>, IdentityError> {
        let Some(chain) = atomic_file::read_if_there(&self.cert)? else { return Ok(None) };
        let certificate =
            self.parse(&chain).map_err(|why| self.unreadable("the node's certificate", &self.cert, why))?;
        let fits = |key_pem: &SecretString| spki(key_pem).is_ok_and(|key| key == certificate.public_key);
        let pending = self.pending_keys()?.into_iter().map(|pending| pending.key_pem).find(fits);
        let stored = || Ok::<_, IdentityError>(atomic_file::read_if_there(&self.key)?.map(SecretString::from));
        match pending.map_or_else(stored, |key_pem| Ok(Some(key_pem)))? {
            None => Ok(None),
            Some(key_pem) if fits(&key_pem) => Ok(Some(certificate.with(chain, key_pem))),
            Some(_) => Err(IdentityError::KeyMismatch { cert: self.cert.clone(), key: self.key.clone() }),
        }
    }

    /// Stores the certificate that was requested with `pending`, and arrived `now`.
    ///
    /// # Errors
    /// [`IdentityError::ForeignCertificate`] when it is for another key or node; the old identity is then unchanged.
    pub fn commit(
        &self,
        pending: &PendingKey,
        answer: &EnrollAnswer,
        now: DateTime<Utc>,
    ) -> Result<AgentIdentity, IdentityError> {
        let foreign = |why| IdentityError::ForeignCertificate { why };
        let chain = joined(&answer.certificate_pem, &answer.chain_pem);
        let certificate = self.parse(&chain).map_err(|_| foreign("it does not parse"))?;
        if spki(&pending.key_pem).map_err(IdentityError::Key)? != certificate.public_key {
            return Err(foreign("it certifies another key"));
        }
        if !certificate.names_node {
            return Err(foreign("it does not name the node"));
        }
        let _alone = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        // A renewal is of the identity that there is.
        let token_sha256 = match &pending.presented_sha256 {
            Some(presented) => Some(presented.clone()),
            None => self.recovery_record()?.and_then(|record| record.token_sha256),
        };
        self.write_json("recovery.json", &RecoveryRecord { state: answer.recovery, token_sha256 })?;
        // A control plane from before there were several authorities sends the one authority as the chain.
        let bundle = answer.node_ca_bundle_pem.as_ref().unwrap_or(&answer.chain_pem);
        if !bundle.trim().is_empty() {
            self.write_node_cas(bundle)?;
        }
        atomic_file::write_atomically(&self.cert, chain.as_bytes(), atomic_file::PUBLIC)?;
        Ok(AgentIdentity { taken_at: Some(now), ..self.finish(pending, chain, &certificate)? })
    }

    /// Stores the authorities that issue nodes' certificates.
    ///
    /// # Errors
    /// [`IdentityError`]; the previous ones are then unchanged.
    pub fn store_node_cas(&self, bundle_pem: &str) -> Result<(), IdentityError> {
        let _alone = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        self.write_node_cas(bundle_pem)
    }

    fn write_node_cas(&self, bundle_pem: &str) -> Result<(), IdentityError> {
        Ok(atomic_file::write_atomically(&self.node_ca, bundle_pem.as_bytes(), atomic_file::PUBLIC)?)
    }

    /// The fingerprint of the stored authorities, if there are any.
    ///
    /// # Errors
    /// [`IdentityError`]
    pub fn node_cas_fingerprint(&self) -> Result<Option<String>, IdentityError> {
        Ok(atomic_file::read_if_there(&self.node_ca)?.map(|pem| fingerprint(&pem)))
    }

    /// The certificate is stored; stores its key.
    fn finish(
        &self,
        pending: &PendingKey,
        chain: String,
        certificate: &Certificate,
    ) -> Result<AgentIdentity, IdentityError> {
        atomic_file::write_atomically(&self.key, pending.key_pem.expose_secret().as_bytes(), atomic_file::PRIVATE)?;
        self.forget_pending(pending)?;
        Ok(certificate.with(chain, pending.key_pem.clone()))
    }

    /// The Ed25519 key that signs clean-up proofs; created once.
    ///
    /// # Errors
    /// [`IdentityError`].
    pub fn recovery_key(&self) -> Result<SigningKey, IdentityError> {
        let path = self.folder.join("recovery.key");
        if let Some(text) = atomic_file::read_if_there(&path)? {
            return SigningKey::from_pkcs8_pem(&text)
                .map_err(|error| self.unreadable("the node's recovery key", &path, error.to_string()));
        }
        let key = SigningKey::generate(&mut rand::rng());
        let pem = key
            .to_pkcs8_pem(LineEnding::LF)
            .map_err(|error| self.unreadable("the node's recovery key", &path, error.to_string()))?;
        atomic_file::write_atomically(&path, pem.as_bytes(), atomic_file::PRIVATE)?;
        Ok(key)
    }

    /// What the control plane sent for the recovery of this identity.
    fn recovery_record(&self) -> Result<Option<RecoveryRecord>, IdentityError> {
        self.read_json("recovery.json", "the recovery record")
    }

    /// The current verifier set: the last one that was accepted, unless a new bundle was installed since.
    ///
    /// # Errors
    /// [`IdentityError`].
    pub fn verifiers(&self, bundle: &VerifierSet) -> Result<Verifiers, IdentityError> {
        let stored: Option<TrustedSets> = self.read_json("verifiers.json", "the trusted verifier keys")?;
        let set = match stored {
            Some(stored) if stored.bundle == *bundle => stored.current,
            Some(_) | None => bundle.clone(),
        };
        Ok(Verifiers::trusting(set)?)
    }

    /// Stores the accepted set.
    ///
    /// # Errors
    /// [`IdentityError`].
    pub fn store_verifiers(&self, bundle: &VerifierSet, current: &VerifierSet) -> Result<(), IdentityError> {
        self.write_json("verifiers.json", &TrustedSets { bundle: bundle.clone(), current: current.clone() })
    }

    fn read_json<T: for<'a> Deserialize<'a>>(
        &self,
        name: &str,
        what: &'static str,
    ) -> Result<Option<T>, IdentityError> {
        let path = self.folder.join(name);
        let Some(text) = atomic_file::read_if_there(&path)? else { return Ok(None) };
        // serde_json's messages quote numbers and words of the text at most; the key is neither.
        serde_json::from_str(&text).map(Some).map_err(|error| self.unreadable(what, &path, error.to_string()))
    }

    fn write_json(&self, name: &str, value: &impl Serialize) -> Result<(), IdentityError> {
        let path = self.folder.join(name);
        atomic_file::private_folder(&self.folder)?;
        let bytes = serde_json::to_vec(value).map_err(|error| self.unreadable("a record", &path, error.to_string()))?;
        Ok(atomic_file::write_atomically(&path, &bytes, atomic_file::PRIVATE)?)
    }

    fn unreadable(&self, what: &'static str, path: &std::path::Path, why: String) -> IdentityError {
        IdentityError::Unreadable { what, path: path.to_owned(), why }
    }

    fn parse(&self, chain_pem: &str) -> Result<Certificate, String> {
        let (_, pem) = x509_parser::pem::parse_x509_pem(chain_pem.as_bytes()).map_err(|error| error.to_string())?;
        let leaf = pem.parse_x509().map_err(|error| error.to_string())?;
        let at = |seconds| DateTime::from_timestamp(seconds, 0).ok_or_else(|| "a time out of range".to_owned());
        let suffix = format!("/node/{}", self.node_id);
        let alternative = leaf.subject_alternative_name().map_err(|error| error.to_string())?;
        let names_node = alternative.is_some_and(|names| {
            let is_node = |name: &GeneralName<'_>| matches!(name, GeneralName::URI(uri) if uri.ends_with(&suffix));
            names.value.general_names.iter().any(is_node)
        });
        Ok(Certificate {
            public_key: leaf.public_key().raw.to_vec(),
            not_before: at(leaf.validity().not_before.timestamp())?,
            not_after: at(leaf.validity().not_after.timestamp())?,
            names_node,
            authority: leaf.iter_extensions().find_map(|extension| match extension.parsed_extension() {
                ParsedExtension::AuthorityKeyIdentifier(authority) => {
                    authority.key_identifier.as_ref().map(|id| hex::encode(id.0))
                }
                _ => None,
            }),
        })
    }
}

#[derive(Serialize, Deserialize)]
struct RecoveryRecord {
    #[serde(flatten)]
    state: RecoveryState,
    /// SHA-256 of the token that was presented for the identity; `None` where an earlier release has written the record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    token_sha256: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct TrustedSets {
    /// The bundle's set from which `current` was followed.
    bundle: VerifierSet,
    current: VerifierSet,
}

struct Certificate {
    /// SubjectPublicKeyInfo, DER.
    public_key: Vec<u8>,
    not_before: DateTime<Utc>,
    not_after: DateTime<Utc>,
    names_node: bool,
    authority: Option<String>,
}

impl Certificate {
    fn with(&self, certificate_chain_pem: String, key_pem: SecretString) -> AgentIdentity {
        AgentIdentity {
            certificate_chain_pem,
            key_pem,
            not_before: self.not_before,
            not_after: self.not_after,
            authority: self.authority.clone(),
            taken_at: None,
        }
    }
}

fn spki(key_pem: &SecretString) -> Result<Vec<u8>, rcgen::Error> {
    Ok(KeyPair::from_pem(key_pem.expose_secret())?.subject_public_key_info())
}

fn joined(certificate: &str, chain: &str) -> String {
    let mut text = certificate.trim_end().to_owned();
    text.push('\n');
    if !chain.trim().is_empty() {
        text.push_str(chain.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::Path;

    use rcgen::{BasicConstraints, CertificateParams, CertificateSigningRequestParams, IsCa, Issuer, SanType};
    use serde_json::{Value, json};
    use wire::SecretToken;

    use super::*;

    const NODE: Uuid = Uuid::from_u128(5);

    fn store_in(folder: &Path) -> IdentityStore {
        IdentityStore {
            node_id: NODE,
            cert: folder.join("node.pem"),
            key: folder.join("node.key"),
            node_ca: folder.join("node-ca.pem"),
            folder: folder.join("identity"),
            writing: Arc::default(),
        }
    }

    fn answer(csr_pem: &str, node: Uuid) -> EnrollAnswer {
        let ca_key = KeyPair::generate().unwrap();
        let mut ca = CertificateParams::new(vec![]).unwrap();
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca_pem = ca.self_signed(&ca_key).unwrap().pem();
        let issuer = Issuer::new(ca, ca_key);
        let mut request = CertificateSigningRequestParams::from_pem(csr_pem).unwrap();
        let uri = format!("spiffe://example/node/{node}");
        request.params.subject_alt_names = vec![SanType::URI(uri.try_into().unwrap())];
        EnrollAnswer {
            certificate_pem: request.signed_by(&issuer).unwrap().pem(),
            chain_pem: ca_pem,
            not_after: Utc::now(),
            recovery: RecoveryState { identity_generation: 1, remaining: 5 },
            verifier_sets: vec![],
            node_ca_bundle_pem: None,
        }
    }

    #[test]
    fn enrolled_identity_is_reloaded_and_its_key_is_private() {
        let folder = tempfile::tempdir().unwrap();
        let store = store_in(folder.path());
        assert!(store.load().unwrap().is_none());
        let pending = store.pending_enrollment(&SecretToken::new("t")).unwrap();
        let identity = store.commit(&pending, &answer(&pending.csr_pem, NODE), Utc::now()).unwrap();
        let loaded = store.load().unwrap().unwrap();
        assert_eq!(loaded.certificate_chain_pem, identity.certificate_chain_pem);
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&store.key), 0o600);
        assert_eq!(mode(&store.folder), 0o700);
        let mut files: Vec<_> =
            std::fs::read_dir(&store.folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        files.sort();
        assert_eq!(files, ["recovery.json"], "no key is pending");
        assert_eq!(store.pending_recovery(&SecretToken::new("t")).unwrap().0, 1);
    }

    #[test]
    fn lost_answer_is_requested_with_the_same_csr_and_a_new_token_with_a_new_one() {
        let folder = tempfile::tempdir().unwrap();
        let store = store_in(folder.path());
        let first = store.pending_enrollment(&SecretToken::new("one")).unwrap().csr_pem;
        assert_eq!(store_in(folder.path()).pending_enrollment(&SecretToken::new("one")).unwrap().csr_pem, first);
        assert_ne!(store.pending_enrollment(&SecretToken::new("two")).unwrap().csr_pem, first);
    }

    #[test]
    fn unanswered_recovery_is_repeated_also_after_a_renewal_and_an_enrollment() {
        let folder = tempfile::tempdir().unwrap();
        let (store, token) = (store_in(folder.path()), SecretToken::new("t"));
        let enrolled = store.pending_enrollment(&token).unwrap();
        store.commit(&enrolled, &answer(&enrolled.csr_pem, NODE), Utc::now()).unwrap();
        let recovery = store.pending_recovery(&token).unwrap().1.csr_pem;
        let renewal = store.pending_renewal().unwrap();
        assert_eq!(store.pending_recovery(&token).unwrap().1.csr_pem, recovery);
        store.commit(&renewal, &answer(&renewal.csr_pem, NODE), Utc::now()).unwrap();
        store.pending_enrollment(&token).unwrap();
        let (generation, pending) = store_in(folder.path()).pending_recovery(&token).unwrap();
        assert_eq!((generation, &pending.csr_pem), (1, &recovery));
        let mut recovered = answer(&pending.csr_pem, NODE);
        recovered.recovery.identity_generation = 2;
        store.commit(&pending, &recovered, Utc::now()).unwrap();
        let (generation, pending) = store.pending_recovery(&token).unwrap();
        assert_eq!(generation, 2);
        assert_ne!(pending.csr_pem, recovery);
    }

    #[test]
    fn generation_belongs_to_the_token_that_was_presented_for_it() {
        let folder = tempfile::tempdir().unwrap();
        let (store, [first, second]) = (store_in(folder.path()), ["one", "two"].map(SecretToken::new));
        let enrolled = store.pending_enrollment(&first).unwrap();
        let mut second_generation = answer(&enrolled.csr_pem, NODE);
        second_generation.recovery.identity_generation = 2;
        store.commit(&enrolled, &second_generation, Utc::now()).unwrap();
        let known = |token| (store.has_spent(token).unwrap(), store.pending_recovery(token).unwrap().0);
        assert_eq!((known(&first), known(&second)), ((true, 2), (false, 1)));
        // A renewal is of the identity that there is, whatever token is configured.
        let renewal = store.pending_renewal().unwrap();
        let mut renewed = answer(&renewal.csr_pem, NODE);
        renewed.recovery.identity_generation = 2;
        store.commit(&renewal, &renewed, Utc::now()).unwrap();
        std::fs::remove_file(store.folder.join("pending.json")).unwrap();
        assert_eq!((known(&first), known(&second)), ((true, 2), (false, 1)));
    }

    #[test]
    fn state_of_an_earlier_release_is_of_the_token_until_an_enrollment_with_it_was_tried() {
        let folder = tempfile::tempdir().unwrap();
        let (store, token) = (store_in(folder.path()), SecretToken::new("t"));
        std::fs::create_dir(&store.folder).unwrap();
        let recorded = json!({ "identity_generation": 3, "remaining": 4 });
        std::fs::write(store.folder.join("recovery.json"), recorded.to_string()).unwrap();
        let pending = store.pending_recovery(&token).unwrap();
        assert_eq!((store.has_spent(&token).unwrap(), pending.0), (true, 3));
        let stored = std::fs::read_to_string(store.folder.join("pending.json")).unwrap();
        let sent: Value = serde_json::from_str(&stored).unwrap();
        assert_eq!((&sent["for"], &sent["identity_generation"]), (&json!("recover"), &json!(3)));
        assert!(sent.get("token_sha256").is_none(), "as an earlier release has written it: {sent}");
        assert_eq!(store.pending_recovery(&token).unwrap().1.csr_pem, pending.1.csr_pem);
        store.pending_enrollment(&token).unwrap();
        assert_eq!((store.has_spent(&token).unwrap(), store.pending_recovery(&token).unwrap().0), (false, 1));
    }

    #[test]
    fn crash_between_certificate_and_key_is_completed_at_the_next_start() {
        let folder = tempfile::tempdir().unwrap();
        let store = store_in(folder.path());
        let first = store.pending_enrollment(&SecretToken::new("t")).unwrap();
        store.commit(&first, &answer(&first.csr_pem, NODE), Utc::now()).unwrap();
        let old_key = std::fs::read(&store.key).unwrap();

        let renewal = store.pending_renewal().unwrap();
        assert_eq!(std::fs::read(&store.key).unwrap(), old_key, "the old key stays until the certificate is there");
        let sent = answer(&renewal.csr_pem, NODE);
        std::fs::write(&store.cert, joined(&sent.certificate_pem, &sent.chain_pem)).unwrap();
        let loaded = store.load().unwrap().unwrap();
        assert_eq!(loaded.key_pem.expose_secret(), renewal.key_pem.expose_secret());
        assert_ne!(std::fs::read(&store.key).unwrap(), old_key);
        assert!(store.load().unwrap().is_some());
    }

    #[test]
    fn certificate_for_another_key_or_node_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let store = store_in(folder.path());
        let other = store.pending_enrollment(&SecretToken::new("other")).unwrap();
        let pending = store.pending_enrollment(&SecretToken::new("t")).unwrap();
        for sent in [answer(&other.csr_pem, NODE), answer(&pending.csr_pem, Uuid::from_u128(6))] {
            let refused = store.commit(&pending, &sent, Utc::now());
            assert!(matches!(refused, Err(IdentityError::ForeignCertificate { .. })));
        }
        assert!(store.load().unwrap().is_none());
    }

    #[test]
    fn key_that_does_not_match_the_certificate_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let store = store_in(folder.path());
        let pending = store.pending_enrollment(&SecretToken::new("t")).unwrap();
        store.commit(&pending, &answer(&pending.csr_pem, NODE), Utc::now()).unwrap();
        std::fs::write(&store.key, KeyPair::generate().unwrap().serialize_pem()).unwrap();
        assert!(matches!(store.load(), Err(IdentityError::KeyMismatch { .. })));
        // What the reissue's restart command does.
        std::fs::remove_file(&store.key).unwrap();
        assert!(store.load().unwrap().is_none());
    }

    #[test]
    fn authorities_of_a_heartbeat_and_of_a_certificate_are_stored_whole_side_by_side() {
        let folder = tempfile::tempdir().unwrap();
        let store = store_in(folder.path());
        // Long enough that a write takes longer than the start of the other one.
        let bundle = "authority\n".repeat(100_000);
        std::thread::scope(|threads| {
            for _ in 0..2 {
                let (store, bundle) = (store.clone(), &bundle);
                threads.spawn(move || {
                    for _ in 0..50 {
                        store.store_node_cas(bundle).unwrap();
                        assert_eq!(store.node_cas_fingerprint().unwrap(), Some(fingerprint(bundle)));
                    }
                });
            }
            for _ in 0..20 {
                let renewal = store.pending_renewal().unwrap();
                let renewed =
                    EnrollAnswer { node_ca_bundle_pem: Some(bundle.clone()), ..answer(&renewal.csr_pem, NODE) };
                store.commit(&renewal, &renewed, Utc::now()).unwrap();
            }
        });
    }

    #[test]
    fn recovery_key_is_created_once() {
        let folder = tempfile::tempdir().unwrap();
        let key = store_in(folder.path()).recovery_key().unwrap();
        assert_eq!(store_in(folder.path()).recovery_key().unwrap(), key);
    }

    #[test]
    fn accepted_verifier_keys_are_stored_until_another_bundle_is_installed() {
        use wire::verifier_set::{KeyStatus, PublicKey, VerifierKey};
        let folder = tempfile::tempdir().unwrap();
        let store = store_in(folder.path());
        let set = |seed: u8, version| VerifierSet {
            version,
            keys: vec![VerifierKey::new(PublicKey::from(&SigningKey::from_bytes(&[seed; 32])), KeyStatus::Active)],
            signatures: vec![],
        };
        store.store_verifiers(&set(1, 0), &set(2, 4)).unwrap();
        assert_eq!(store.verifiers(&set(1, 0)).unwrap().version(), 4);
        assert_eq!(store.verifiers(&set(3, 0)).unwrap().version(), 0);
    }

    #[test]
    fn renewal_falls_between_half_and_six_tenths_of_the_certificate_lifetime() {
        let not_before = Utc::now();
        let identity = AgentIdentity {
            certificate_chain_pem: String::new(),
            key_pem: SecretString::from(String::new()),
            not_before,
            not_after: not_before + Duration::from_secs(1000),
            authority: None,
            taken_at: None,
        };
        assert_eq!(identity.renew_at(0.0), not_before + Duration::from_secs(500));
        assert_eq!(identity.renew_at(1.0), not_before + Duration::from_secs(600));
        assert!(identity.is_expired(identity.not_after) && !identity.is_expired(not_before));
        assert!(identity.is_in_force(not_before) && !identity.is_in_force(identity.not_after));
        assert!(!identity.is_in_force(not_before - Duration::from_secs(1)), "made under a clock that was ahead");
        let taken = |after| AgentIdentity { taken_at: Some(not_before + after), ..identity.clone() };
        let backdated = taken(Duration::from_secs(900));
        assert_eq!(backdated.renew_at(0.0), not_before + Duration::from_secs(950), "in the half of what is left of it");
        let behind = AgentIdentity { taken_at: Some(not_before - Duration::from_secs(900)), ..identity.clone() };
        assert_eq!(behind.renew_at(0.0), identity.renew_at(0.0), "by a clock that runs behind");
    }
}
