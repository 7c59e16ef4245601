//! The current keys: those that this process signs tasks and service accounts' tokens with, certifies nodes with, and verifies nodes by.
//!
//! The state of each key set is an entity ([`KeySet`]); the private keys are sealed beside it, one secret per key. Both are read together,
//! at the start and after a rotation, and replaced as one: a request sees either the old keys or the new ones.

mod member;
mod service;
mod signers;

pub use member::{MacKey, MemberKeys};
pub use service::ServiceKeys;

use crate::trust::node_ca::{CaCertificate, IssueError, IssuedCertificate, NodeCa, NodeCaError};
use crate::trust::node_certificate::TrustDomain;
use actors::sharding::id_of_name;
use arc_swap::ArcSwap;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chrono::{DateTime, TimeDelta, Utc};
use domain::key_set::{
    ChangeBasis, KeyEntry, KeySet, KeySetChange, KeySetPurpose, KeySetSignature, NewKey, Phase, Rejection, TrustLink,
    TrustedKey,
};
use domain::{EntityKind, EntityRef};
use ed25519_dalek::SigningKey;
use persistence::secrets::{Secret, SecretError};
use persistence::{Reads, Secrets, StoreError};
use secrecy::{ExposeSecret as _, SecretSlice, SecretString};
use serde_json::json;
use sha2::{Digest as _, Sha256};
use signers::{SignerKeyNames, in_use};
use std::collections::BTreeMap;
use std::sync::Arc;
use uuid::Uuid;
use wire::envelope::KeySignature;
use wire::task::{SignedEnvelope, TASK_TYPE, TaskPayload};
use wire::verifier_set::{KeyStatus, SetError, VerifierKey};
use wire::{PublicKey, VerifierSet};

/// A node CA lasts ten years; its certificates a day. It is replaced by rotation, not by waiting.
const CA_LIFETIME: TimeDelta = TimeDelta::days(3650);

/// A private key that is in no set belongs to a change that failed, once it is this old.
const ORPHANED_AFTER: TimeDelta = TimeDelta::hours(1);

/// The current keys, in this process. Cheap to clone; a loaded snapshot does not change.
#[derive(Clone)]
pub struct CurrentKeys(Arc<ArcSwap<Keys>>);

impl CurrentKeys {
    #[must_use]
    pub fn new(keys: Keys) -> Self {
        Self(Arc::new(ArcSwap::from_pointee(keys)))
    }

    #[must_use]
    pub fn load(&self) -> Arc<Keys> {
        self.0.load_full()
    }

    pub fn replace(&self, keys: Keys) {
        self.0.store(Arc::new(keys));
    }
}

/// All keys that are rotated, as they were read.
pub struct Keys {
    pub task: TaskKeys,
    pub node: NodeAuthorities,
    pub service: ServiceKeys,
    pub member: MemberKeys,
}

/// Why the keys cannot be read, or a key not be made.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Secret(#[from] SecretError),
    #[error("the {purpose} keys are damaged: {what}")]
    Damaged { purpose: KeySetPurpose, what: String },
    #[error(transparent)]
    Authority(#[from] NodeCaError),
}

fn damaged(purpose: KeySetPurpose, what: impl std::fmt::Display) -> KeysError {
    KeysError::Damaged { purpose, what: what.to_string() }
}

/// The id of the one entity that the keys of a purpose are.
#[must_use]
pub fn set_id(purpose: KeySetPurpose) -> Uuid {
    id_of_name(EntityKind::KeySet, purpose.name())
}

/// The committed key set of a purpose; `None` where it was never rotated.
///
/// # Errors
/// [`KeysError`]
pub async fn stored(reads: &Reads, purpose: KeySetPurpose) -> Result<Option<KeySet>, KeysError> {
    let row = reads.entity(EntityRef { kind: EntityKind::KeySet, id: set_id(purpose) }).await?;
    row.map(|row| serde_json::from_str(&row.body).map_err(|error| damaged(purpose, error))).transpose()
}

impl Keys {
    /// Reads them, or makes the first ones where this is the cluster's first process.
    ///
    /// # Errors
    /// [`KeysError`], also where the key ring cannot open a sealed key.
    pub async fn read(secrets: &Secrets, reads: &Reads, domain: &TrustDomain) -> Result<Self, KeysError> {
        Ok(Self {
            task: TaskKeys::read(secrets, reads).await?,
            node: NodeAuthorities::read(secrets, reads, domain).await?,
            service: ServiceKeys::read(secrets, reads).await?,
            member: MemberKeys::read(secrets, reads).await?,
        })
    }

    /// The version of each set, by its purpose's name.
    #[must_use]
    pub fn versions(&self) -> BTreeMap<String, u64> {
        self.sets().map(|set| (set.purpose.name().to_owned(), set.version)).into()
    }

    const fn sets(&self) -> [&KeySet; 4] {
        [&self.task.set, &self.node.set, &self.service.set, &self.member.set]
    }

    /// Every key that is not retired, with its set.
    pub fn all(&self) -> impl Iterator<Item = (KeySetPurpose, &KeyEntry)> {
        self.sets().into_iter().flat_map(|set| set.keys.iter().map(|key| (set.purpose, key)))
    }

    /// The names of secrets that are no longer needed: of retired keys, and of changes that failed.
    #[must_use]
    pub fn orphaned_secrets(&self, now: DateTime<Utc>) -> Vec<String> {
        fn those_of<'a, K>(
            set: &'a KeySet,
            held: &'a [StoredPrivateKey<K>],
        ) -> impl Iterator<Item = (&'a KeySet, &'a str, &'a String, DateTime<Utc>)> {
            held.iter().map(move |held| (set, held.id.as_str(), &held.secret, held.made_at))
        }
        let is_orphaned = |set: &KeySet, id: &str, made_at| match set.key(id) {
            Some(key) => key.state.phase() == Phase::Retired,
            None => made_at < now - ORPHANED_AFTER,
        };
        let all = those_of(&self.task.set, &self.task.held)
            .chain(those_of(&self.node.set, &self.node.held))
            .chain(those_of(&self.service.set, &self.service.held))
            .chain(those_of(&self.member.set, &self.member.held));
        all.filter(|(set, id, _, made_at)| is_orphaned(set, id, *made_at)).map(|(.., name, _)| name.clone()).collect()
    }
}

/// A private key, and the name of its secret.
struct StoredPrivateKey<K> {
    id: String,
    key: K,
    secret: String,
    made_at: DateTime<Utc>,
}

/// The keys that sign tasks, and the verifier sets that agents receive.
pub struct TaskKeys {
    pub set: KeySet,
    held: Vec<StoredPrivateKey<SigningKey>>,
    /// In the order of their versions.
    published: Vec<VerifierSet>,
}

const SECRET_NAMES: SignerKeyNames = SignerKeyNames {
    purpose: KeySetPurpose::TaskSigning,
    prefix: "task_signing/",
    first: "task_signing/active",
    id_of: |key| PublicKey::from(key).key_id(),
};

impl TaskKeys {
    async fn read(secrets: &Secrets, reads: &Reads) -> Result<Self, KeysError> {
        let (set, held) = SECRET_NAMES.read(secrets, reads).await?;
        Self::of(set, held)
    }

    fn of(set: KeySet, held: Vec<StoredPrivateKey<SigningKey>>) -> Result<Self, KeysError> {
        let published = set.chain.iter().map(published).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { set, held, published })
    }

    /// One key that was never rotated, for tests.
    ///
    /// # Errors
    /// Never: it is well-formed.
    pub fn with_first_key(key: SigningKey, at: DateTime<Utc>) -> Result<Self, KeysError> {
        let (set, held) = SECRET_NAMES.with_first_key(key, at);
        Self::of(set, held)
    }

    /// The trusted keys whose private halves are loaded: the active one first, then the others, newest first.
    fn signers(&self) -> impl Iterator<Item = (Phase, &StoredPrivateKey<SigningKey>)> {
        in_use(&self.set, &self.held)
    }

    /// Signs a task with the active key, and while another is in its grace period with that too: an agent that has not received the
    /// rotation yet trusts the older one, and loses no task.
    ///
    /// # Errors
    /// The payload does not serialise, which no order does.
    pub fn sign(&self, payload: &TaskPayload) -> Result<SignedEnvelope, serde_json::Error> {
        let bytes = serde_json::to_vec(payload)?;
        let signing = self.signers().filter(|(phase, _)| matches!(phase, Phase::Active | Phase::Grace));
        let signatures = signing.map(|(_, held)| KeySignature::over(&held.key, &held.id, TASK_TYPE, &bytes)).collect();
        Ok(SignedEnvelope { payload_type: TASK_TYPE.to_owned(), payload: bytes, signatures })
    }

    /// The verifier sets that an agent with the newest version `version` lacks, lowest first.
    #[must_use]
    pub fn sets_after(&self, version: u64) -> Vec<VerifierSet> {
        self.published.iter().filter(|set| set.version > version).cloned().collect()
    }

    /// The active key in the form of a bundle.
    #[must_use]
    pub fn bundled(&self) -> String {
        let active = self.signers().next().map(|(_, held)| PublicKey::from(&held.key));
        let keys = active.into_iter().map(|key| VerifierKey::new(key, KeyStatus::Active)).collect();
        VerifierSet { version: 0, keys, signatures: Vec::new() }.to_env_value()
    }

    /// The result of the change, signed by every key that is trusted now: a verifier that trusts any of them accepts it.
    fn signed(&self, change: &KeySetChange) -> Result<Result<Vec<KeySetSignature>, Rejection>, SetError> {
        let listed = match self.set.listed_after(change) {
            Ok(listed) => listed,
            Err(rejection) => return Ok(Err(rejection)),
        };
        let keys = listed.iter().filter_map(verifier_key).collect();
        let signers: Vec<_> = self.signers().map(|(_, held)| (held.id.as_str(), &held.key)).collect();
        let set = VerifierSet::sign(self.set.version + 1, keys, &signers)?;
        let stored = |signature: &KeySignature| KeySetSignature {
            by: signature.key_id.clone(),
            value: STANDARD.encode(&signature.signature),
        };
        Ok(Ok(set.signatures.iter().map(stored).collect()))
    }
}

fn published(link: &TrustLink) -> Result<VerifierSet, KeysError> {
    let unreadable = |what: &str| damaged(KeySetPurpose::TaskSigning, format!("version {} has {what}", link.version));
    let keys: Vec<_> = link.keys.iter().filter_map(verifier_key).collect();
    if keys.len() != link.keys.len() {
        return Err(unreadable("a key that cannot be read"));
    }
    let signature = |kept: &KeySetSignature| {
        let value = STANDARD.decode(&kept.value).map_err(|_| unreadable("a signature that cannot be read"))?;
        Ok(KeySignature { key_id: kept.by.clone(), signature: value })
    };
    let signatures = link.signatures.iter().map(signature).collect::<Result<_, KeysError>>()?;
    Ok(VerifierSet { version: link.version, keys, signatures })
}

fn verifier_key(listed: &TrustedKey) -> Option<VerifierKey> {
    let status = match listed.phase {
        Phase::Staged => KeyStatus::Staged,
        Phase::Active => KeyStatus::Active,
        Phase::Grace => KeyStatus::Grace,
        Phase::Retired => return None,
    };
    Some(VerifierKey { key_id: listed.id.clone(), public_key: listed.public.parse().ok()?, status })
}

/// The authorities that certify nodes, and those whose certificates are accepted.
pub struct NodeAuthorities {
    pub set: KeySet,
    issuing: NodeCa,
    held: Vec<StoredPrivateKey<()>>,
    /// Staged, active and in grace; the active one first.
    trusted: Vec<(Phase, CaCertificate)>,
    /// The cluster's first authority: certificates from before there were several name none.
    pub founding: String,
}

const NODE_CAS: &str = "node_ca";
const FIRST_NODE_CA: &str = "node_ca";

impl NodeAuthorities {
    async fn read(secrets: &Secrets, reads: &Reads, domain: &TrustDomain) -> Result<Self, KeysError> {
        let stored = stored(reads, KeySetPurpose::NodeCa).await?;
        if stored.is_none() && secrets.get(FIRST_NODE_CA).await?.is_none() {
            let made = new_authority(domain, Utc::now())?;
            secrets.get_or_create(FIRST_NODE_CA, || (made.value, made.public)).await?;
        }
        let secrets = secrets.list(NODE_CAS).await?;
        Self::of(stored, &secrets, domain)
    }

    fn of(stored: Option<KeySet>, secrets: &[Secret], domain: &TrustDomain) -> Result<Self, KeysError> {
        let lacking = |what: &str| damaged(KeySetPurpose::NodeCa, what);
        let mut held = Vec::new();
        for secret in secrets {
            let pem = secret.public["certificate_pem"].as_str().ok_or_else(|| lacking("a certificate is missing"))?;
            held.push((CaCertificate::read(pem)?, secret));
        }
        let set = match stored {
            Some(set) => set,
            None => {
                let first = held.iter().find(|(_, secret)| secret.name == FIRST_NODE_CA);
                let (first, secret) = first.ok_or_else(|| lacking("there is none"))?;
                let key = NewKey { id: first.id.clone(), public: first.certificate_pem.clone() };
                KeySet::founded(KeySetPurpose::NodeCa, key, secret.created_at)
            }
        };
        let active = set.keys.iter().find(|key| key.state.phase() == Phase::Active);
        let active = active.ok_or_else(|| lacking("none is active"))?;
        let (authority, secret) = held
            .iter()
            .find(|(authority, _)| authority.id == active.id)
            .ok_or_else(|| lacking("the private half of the active authority is missing"))?;
        let key = std::str::from_utf8(secret.value.expose_secret()).map_err(|_| lacking("a key is no PEM text"))?;
        let issuing = NodeCa::load(domain.clone(), &authority.certificate_pem, &SecretString::from(key.to_owned()))?;
        let held = held
            .iter()
            .map(|(authority, secret)| StoredPrivateKey {
                id: authority.id.clone(),
                key: (),
                secret: secret.name.clone(),
                made_at: secret.created_at,
            })
            .collect();
        Self::over(set, issuing, held)
    }

    fn over(set: KeySet, issuing: NodeCa, held: Vec<StoredPrivateKey<()>>) -> Result<Self, KeysError> {
        let mut trusted = Vec::new();
        for listed in set.listed() {
            trusted.push((listed.phase, CaCertificate::read(&listed.public)?));
        }
        trusted.sort_by_key(|(phase, _)| *phase != Phase::Active);
        let founding = set.keys.first().map(|key| key.id.clone()).unwrap_or_default();
        Ok(Self { set, issuing, held, trusted, founding })
    }

    /// One authority that was never rotated, for tests.
    ///
    /// # Errors
    /// Never: it is well-formed.
    pub fn with_first_key(ca: NodeCa, at: DateTime<Utc>) -> Result<Self, KeysError> {
        let key = NewKey { id: ca.authority().id.clone(), public: ca.certificate_pem().to_owned() };
        Self::over(KeySet::founded(KeySetPurpose::NodeCa, key, at), ca, Vec::new())
    }

    /// Certifies by the active authority. See [`NodeCa::issue`].
    ///
    /// # Errors
    /// [`IssueError`]
    pub fn issue(
        &self,
        node_id: Uuid,
        csr_pem: &str,
        not_before: DateTime<Utc>,
        not_after: DateTime<Utc>,
    ) -> Result<IssuedCertificate, IssueError> {
        self.issuing.issue(node_id, csr_pem, not_before, not_after)
    }

    /// All trusted authorities, PEM, the active one first: TLS verifies nodes by them.
    #[must_use]
    pub fn bundle_pem(&self) -> String {
        self.trusted.iter().map(|(_, authority)| authority.certificate_pem.as_str()).collect()
    }

    /// The key identifiers of the trusted authorities.
    #[must_use]
    pub fn key_ids(&self) -> Vec<String> {
        self.trusted.iter().map(|(_, authority)| authority.key_id.clone()).collect()
    }

    /// Whether the authority of this key identifier is trusted.
    #[must_use]
    pub fn trusts(&self, key_id: &str) -> bool {
        self.trusted.iter().any(|(_, authority)| authority.key_id == key_id)
    }

    /// Whether the authority of this key identifier no longer certifies: nodes with its certificate should renew.
    #[must_use]
    pub fn is_outgoing(&self, key_id: &str) -> bool {
        self.trusted.iter().any(|(phase, authority)| *phase == Phase::Grace && authority.key_id == key_id)
    }

    /// Differs for each set of trusted authorities.
    #[must_use]
    pub fn fingerprint(&self) -> [u8; 32] {
        let mut ids: Vec<_> = self.trusted.iter().map(|(_, authority)| authority.id.as_str()).collect();
        ids.sort_unstable();
        Sha256::digest(ids.join(",")).into()
    }

    /// When the authority that certifies nodes ends.
    #[must_use]
    pub fn issuing_ends(&self) -> DateTime<Utc> {
        self.issuing.authority().not_after
    }

    /// When the authority of this id ends.
    #[must_use]
    pub fn not_after(&self, id: &str) -> Option<DateTime<Utc>> {
        self.trusted.iter().find(|(_, authority)| authority.id == id).map(|(_, authority)| authority.not_after)
    }
}

/// A key to be staged: its private half, to be stored, and its public part.
struct NewKeyMaterial {
    value: SecretSlice<u8>,
    public: serde_json::Value,
    key: NewKey,
}

fn new_authority(domain: &TrustDomain, now: DateTime<Utc>) -> Result<NewKeyMaterial, NodeCaError> {
    let created = NodeCa::create(domain.clone(), now, now + CA_LIFETIME)?;
    let authority = created.ca.authority();
    Ok(NewKeyMaterial {
        value: SecretSlice::from(created.key_pem.expose_secret().as_bytes().to_vec()),
        public: json!({ "certificate_pem": authority.certificate_pem }),
        key: NewKey { id: authority.id.clone(), public: authority.certificate_pem.clone() },
    })
}

/// Makes a key of the purpose and stores its private half, sealed. It has no effect until it is staged.
///
/// # Errors
/// [`KeysError`]
pub async fn make(secrets: &Secrets, domain: &TrustDomain, purpose: KeySetPurpose) -> Result<NewKey, KeysError> {
    let (prefix, made) = match purpose {
        KeySetPurpose::TaskSigning => (SECRET_NAMES.prefix.to_owned(), SECRET_NAMES.generate()),
        KeySetPurpose::ServiceTokens => (service::SECRET_NAMES.prefix.to_owned(), service::SECRET_NAMES.generate()),
        KeySetPurpose::MemberMessages => (member::SECRET_NAMES.prefix.to_owned(), member::SECRET_NAMES.generate()),
        KeySetPurpose::NodeCa => (format!("{NODE_CAS}/"), new_authority(domain, Utc::now())?),
        KeySetPurpose::AtRest => return Err(damaged(purpose, "they are the operator's to make")),
    };
    secrets.create(&format!("{prefix}{}", made.key.id), &made.value, made.public).await?;
    Ok(made.key)
}

/// All trusted authorities, PEM; `None` where no member has made one yet.
///
/// # Errors
/// [`KeysError`]
pub async fn node_authorities_pem(secrets: &Secrets, reads: &Reads) -> Result<Option<String>, KeysError> {
    if let Some(set) = stored(reads, KeySetPurpose::NodeCa).await? {
        return Ok(Some(set.listed().iter().map(|listed| listed.public.as_str()).collect()));
    }
    let first = secrets.get(FIRST_NODE_CA).await?;
    Ok(first.and_then(|first| first.public["certificate_pem"].as_str().map(str::to_owned)))
}

impl Keys {
    /// The basis of a change: the version that it was prepared on, and the signatures of its result.
    ///
    /// # Errors
    /// [`KeysError`] where the set cannot be signed; the inner one is why the change cannot be.
    pub fn prepare(
        &self,
        purpose: KeySetPurpose,
        change: &KeySetChange,
    ) -> Result<Result<ChangeBasis, Rejection>, KeysError> {
        let (set, signatures) = match purpose {
            KeySetPurpose::TaskSigning => {
                let signed = self.task.signed(change).map_err(|error| damaged(purpose, error))?;
                (&self.task.set, signed)
            }
            KeySetPurpose::NodeCa => (&self.node.set, self.node.set.listed_after(change).map(|_| Vec::new())),
            KeySetPurpose::ServiceTokens => {
                (&self.service.set, self.service.set.listed_after(change).map(|_| Vec::new()))
            }
            KeySetPurpose::MemberMessages => {
                (&self.member.set, self.member.set.listed_after(change).map(|_| Vec::new()))
            }
            KeySetPurpose::AtRest => return Ok(Err(Rejection::OtherPurpose)),
        };
        let first = set.keys.first().ok_or_else(|| damaged(purpose, "there is none"))?;
        let founding = NewKey { id: first.id.clone(), public: first.public.clone() };
        let founded_at = first.made_at;
        Ok(signatures.map(|signatures| ChangeBasis { purpose, version: set.version, founding, founded_at, signatures }))
    }
}
