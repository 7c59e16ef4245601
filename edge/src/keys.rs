//! The keys in force: what this process signs tasks and service accounts' tokens with, certifies nodes with, and lets nodes in by.
//!
//! Where each key stands is an entity ([`KeySet`]); the private halves lie sealed beside it, one secret a key. Both are read together,
//! at the start and whenever an operator has rotated, and replaced as one: a request sees the keys of before or those of after.

mod member;
mod service;
mod signers;

pub use member::{MacKey, MemberKeys};
pub use service::ServiceKeys;

use crate::identity::TrustDomain;
use crate::node_ca::{Authority, IssueError, Issued, NodeCa, NodeCaError};
use actors::place::id_of_name;
use arc_swap::ArcSwap;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chrono::{DateTime, TimeDelta, Utc};
use domain::key_set::{Basis, Change, Key, KeySet, Link, Listed, NewKey, Phase, Purpose, Rejection, Signature};
use domain::{EntityRef, Kind};
use ed25519_dalek::SigningKey;
use persistence::secrets::{Secret, SecretError};
use persistence::{Reads, Secrets, StoreError};
use secrecy::{ExposeSecret as _, SecretSlice, SecretString};
use serde_json::json;
use sha2::{Digest as _, Sha256};
use signers::{Kept, in_use};
use std::collections::BTreeMap;
use std::sync::Arc;
use uuid::Uuid;
use wire::envelope::KeySignature;
use wire::keys::{KeyStatus, SetError, VerifierKey};
use wire::task::{Envelope, TASK_TYPE, TaskPayload};
use wire::{PublicKey, VerifierSet};

/// A node CA lasts ten years; its certificates a day. It is replaced by rotation, not by waiting.
const CA_LIFE: TimeDelta = TimeDelta::days(3650);

/// A private half that no set knows was made for a change that came to nothing, once it is so old.
const FORSAKEN_AFTER: TimeDelta = TimeDelta::hours(1);

/// The keys in force, in this process. Cheap to clone; what is loaded stays as it is.
#[derive(Clone)]
pub struct KeysInForce(Arc<ArcSwap<Keys>>);

impl KeysInForce {
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
    Damaged { purpose: Purpose, what: String },
    #[error(transparent)]
    Authority(#[from] NodeCaError),
}

fn damaged(purpose: Purpose, what: impl std::fmt::Display) -> KeysError {
    KeysError::Damaged { purpose, what: what.to_string() }
}

/// The id of the one entity that the keys of a purpose are.
#[must_use]
pub fn set_id(purpose: Purpose) -> Uuid {
    id_of_name(Kind::KeySet, purpose.name())
}

/// The keys of a purpose as they were committed last; `None` where none was ever rotated.
///
/// # Errors
/// [`KeysError`]
pub async fn stored(reads: &Reads, purpose: Purpose) -> Result<Option<KeySet>, KeysError> {
    let row = reads.entity(EntityRef { kind: Kind::KeySet, id: set_id(purpose) }).await?;
    row.map(|row| serde_json::from_str(&row.body).map_err(|error| damaged(purpose, error))).transpose()
}

impl Keys {
    /// Reads them, or makes the first ones where this is the cluster's first process.
    ///
    /// # Errors
    /// [`KeysError`], also where the key ring does not open what is sealed.
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
    pub fn all(&self) -> impl Iterator<Item = (Purpose, &Key)> {
        self.sets().into_iter().flat_map(|set| set.keys.iter().map(|key| (set.purpose, key)))
    }

    /// The names of secrets that nothing will ever need again: of retired keys, and of changes that came to nothing.
    #[must_use]
    pub fn forsaken(&self, now: DateTime<Utc>) -> Vec<String> {
        fn those_of<'a, K>(
            set: &'a KeySet,
            held: &'a [Held<K>],
        ) -> impl Iterator<Item = (&'a KeySet, &'a str, &'a String, DateTime<Utc>)> {
            held.iter().map(move |held| (set, held.id.as_str(), &held.secret, held.made_at))
        }
        let forsaken = |set: &KeySet, id: &str, made_at| match set.key(id) {
            Some(key) => key.standing.phase() == Phase::Retired,
            None => made_at < now - FORSAKEN_AFTER,
        };
        let all = those_of(&self.task.set, &self.task.held)
            .chain(those_of(&self.node.set, &self.node.held))
            .chain(those_of(&self.service.set, &self.service.held))
            .chain(those_of(&self.member.set, &self.member.held));
        all.filter(|(set, id, _, made_at)| forsaken(set, id, *made_at)).map(|(.., name, _)| name.clone()).collect()
    }
}

/// A private half, and under which name it is kept.
struct Held<K> {
    id: String,
    key: K,
    secret: String,
    made_at: DateTime<Utc>,
}

/// What tasks are signed with, and what agents are told of it.
pub struct TaskKeys {
    pub set: KeySet,
    held: Vec<Held<SigningKey>>,
    /// In the order of their versions.
    published: Vec<VerifierSet>,
}

const KEPT: Kept = Kept {
    purpose: Purpose::TaskSigning,
    names: "task_signing/",
    first: "task_signing/active",
    id_of: |key| PublicKey::from(key).key_id(),
};

impl TaskKeys {
    async fn read(secrets: &Secrets, reads: &Reads) -> Result<Self, KeysError> {
        let (set, held) = KEPT.read(secrets, reads).await?;
        Self::of(set, held)
    }

    fn of(set: KeySet, held: Vec<Held<SigningKey>>) -> Result<Self, KeysError> {
        let published = set.chain.iter().map(published).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { set, held, published })
    }

    /// One key that was never rotated, for tests of what is around it.
    ///
    /// # Errors
    /// Never: it is well-formed.
    pub fn founded(key: SigningKey, at: DateTime<Utc>) -> Result<Self, KeysError> {
        let (set, held) = KEPT.founded(key, at);
        Self::of(set, held)
    }

    /// The keys that are trusted and here: the active one first, then the others, newest first.
    fn signers(&self) -> impl Iterator<Item = (Phase, &Held<SigningKey>)> {
        in_use(&self.set, &self.held)
    }

    /// Signs a task with the active key, and while one is in grace with that too: an agent that was not told of the rotation yet knows
    /// the older one, and loses no task.
    ///
    /// # Errors
    /// The payload does not serialise, which no order does.
    pub fn sign(&self, payload: &TaskPayload) -> Result<Envelope, serde_json::Error> {
        let bytes = serde_json::to_vec(payload)?;
        let signing = self.signers().filter(|(phase, _)| matches!(phase, Phase::Active | Phase::Grace));
        let signatures = signing.map(|(_, held)| KeySignature::over(&held.key, &held.id, TASK_TYPE, &bytes)).collect();
        Ok(Envelope { payload_type: TASK_TYPE.to_owned(), payload: bytes, signatures })
    }

    /// The sets that an agent lacks whose newest is `version`, lowest first.
    #[must_use]
    pub fn sets_after(&self, version: u64) -> Vec<VerifierSet> {
        self.published.iter().filter(|set| set.version > version).cloned().collect()
    }

    /// The active key as it stands in a bundle.
    #[must_use]
    pub fn bundled(&self) -> String {
        let active = self.signers().next().map(|(_, held)| PublicKey::from(&held.key));
        let keys = active.into_iter().map(|key| VerifierKey::new(key, KeyStatus::Active)).collect();
        VerifierSet { version: 0, keys, signatures: Vec::new() }.to_env_value()
    }

    /// What the change comes to, signed by every key that is trusted now: whoever trusts any of them follows.
    fn signed(&self, change: &Change) -> Result<Result<Vec<Signature>, Rejection>, SetError> {
        let listed = match self.set.listed_after(change) {
            Ok(listed) => listed,
            Err(rejection) => return Ok(Err(rejection)),
        };
        let keys = listed.iter().filter_map(verifier_key).collect();
        let signers: Vec<_> = self.signers().map(|(_, held)| (held.id.as_str(), &held.key)).collect();
        let set = VerifierSet::sign(self.set.version + 1, keys, &signers)?;
        let kept = |signature: &KeySignature| Signature {
            by: signature.key_id.clone(),
            value: STANDARD.encode(&signature.signature),
        };
        Ok(Ok(set.signatures.iter().map(kept).collect()))
    }
}

fn published(link: &Link) -> Result<VerifierSet, KeysError> {
    let unreadable = |what: &str| damaged(Purpose::TaskSigning, format!("version {} has {what}", link.version));
    let keys: Vec<_> = link.keys.iter().filter_map(verifier_key).collect();
    if keys.len() != link.keys.len() {
        return Err(unreadable("a key that cannot be read"));
    }
    let signature = |kept: &Signature| {
        let value = STANDARD.decode(&kept.value).map_err(|_| unreadable("a signature that cannot be read"))?;
        Ok(KeySignature { key_id: kept.by.clone(), signature: value })
    };
    let signatures = link.signatures.iter().map(signature).collect::<Result<_, KeysError>>()?;
    Ok(VerifierSet { version: link.version, keys, signatures })
}

fn verifier_key(listed: &Listed) -> Option<VerifierKey> {
    let status = match listed.phase {
        Phase::Staged => KeyStatus::Staged,
        Phase::Active => KeyStatus::Active,
        Phase::Grace => KeyStatus::Grace,
        Phase::Retired => return None,
    };
    Some(VerifierKey { key_id: listed.id.clone(), public_key: listed.public.parse().ok()?, status })
}

/// Who certifies nodes, and whose certificates let them in.
pub struct NodeAuthorities {
    pub set: KeySet,
    issuing: NodeCa,
    held: Vec<Held<()>>,
    /// Staged, active and in grace; the active one first.
    trusted: Vec<(Phase, Authority)>,
    /// The authority that the cluster began with: certificates of before there were several name none.
    pub founding: String,
}

const NODE_CAS: &str = "node_ca";
const FIRST_NODE_CA: &str = "node_ca";

impl NodeAuthorities {
    async fn read(secrets: &Secrets, reads: &Reads, domain: &TrustDomain) -> Result<Self, KeysError> {
        let stored = stored(reads, Purpose::NodeCa).await?;
        if stored.is_none() && secrets.get(FIRST_NODE_CA).await?.is_none() {
            let made = new_authority(domain, Utc::now())?;
            secrets.get_or_create(FIRST_NODE_CA, || (made.value, made.public)).await?;
        }
        let secrets = secrets.list(NODE_CAS).await?;
        Self::of(stored, &secrets, domain)
    }

    fn of(stored: Option<KeySet>, secrets: &[Secret], domain: &TrustDomain) -> Result<Self, KeysError> {
        let lacking = |what: &str| damaged(Purpose::NodeCa, what);
        let mut held = Vec::new();
        for secret in secrets {
            let pem = secret.public["certificate_pem"].as_str().ok_or_else(|| lacking("a certificate is missing"))?;
            held.push((Authority::read(pem)?, secret));
        }
        let set = match stored {
            Some(set) => set,
            None => {
                let first = held.iter().find(|(_, secret)| secret.name == FIRST_NODE_CA);
                let (first, secret) = first.ok_or_else(|| lacking("there is none"))?;
                let key = NewKey { id: first.id.clone(), public: first.certificate_pem.clone() };
                KeySet::founded(Purpose::NodeCa, key, secret.created_at)
            }
        };
        let active = set.keys.iter().find(|key| key.standing.phase() == Phase::Active);
        let active = active.ok_or_else(|| lacking("none is active"))?;
        let (authority, secret) = held
            .iter()
            .find(|(authority, _)| authority.id == active.id)
            .ok_or_else(|| lacking("the private half of the active authority is missing"))?;
        let key = std::str::from_utf8(secret.value.expose_secret()).map_err(|_| lacking("a key is no PEM text"))?;
        let issuing = NodeCa::load(domain.clone(), &authority.certificate_pem, &SecretString::from(key.to_owned()))?;
        let held = held
            .iter()
            .map(|(authority, secret)| Held {
                id: authority.id.clone(),
                key: (),
                secret: secret.name.clone(),
                made_at: secret.created_at,
            })
            .collect();
        Self::over(set, issuing, held)
    }

    fn over(set: KeySet, issuing: NodeCa, held: Vec<Held<()>>) -> Result<Self, KeysError> {
        let mut trusted = Vec::new();
        for listed in set.listed() {
            trusted.push((listed.phase, Authority::read(&listed.public)?));
        }
        trusted.sort_by_key(|(phase, _)| *phase != Phase::Active);
        let founding = set.keys.first().map(|key| key.id.clone()).unwrap_or_default();
        Ok(Self { set, issuing, held, trusted, founding })
    }

    /// One authority that was never rotated, for tests of what is around it.
    ///
    /// # Errors
    /// Never: it is well-formed.
    pub fn founded(ca: NodeCa, at: DateTime<Utc>) -> Result<Self, KeysError> {
        let key = NewKey { id: ca.authority().id.clone(), public: ca.certificate_pem().to_owned() };
        Self::over(KeySet::founded(Purpose::NodeCa, key, at), ca, Vec::new())
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
    ) -> Result<Issued, IssueError> {
        self.issuing.issue(node_id, csr_pem, not_before, not_after)
    }

    /// All authorities whose certificates are good, PEM, the active one first: what TLS verifies nodes by.
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

    /// Whether the authority of this key identifier certifies no more: whose certificate is its should renew.
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

    /// When the authority of this id ends.
    #[must_use]
    pub fn not_after(&self, id: &str) -> Option<DateTime<Utc>> {
        self.trusted.iter().find(|(_, authority)| authority.id == id).map(|(_, authority)| authority.not_after)
    }
}

/// A key that is to be staged: the private half to be kept, and what may be known of it.
struct Made {
    value: SecretSlice<u8>,
    public: serde_json::Value,
    key: NewKey,
}

fn new_authority(domain: &TrustDomain, now: DateTime<Utc>) -> Result<Made, NodeCaError> {
    let created = NodeCa::create(domain.clone(), now, now + CA_LIFE)?;
    let authority = created.ca.authority();
    Ok(Made {
        value: SecretSlice::from(created.key_pem.expose_secret().as_bytes().to_vec()),
        public: json!({ "certificate_pem": authority.certificate_pem }),
        key: NewKey { id: authority.id.clone(), public: authority.certificate_pem.clone() },
    })
}

/// Makes a key of the purpose and keeps its private half, sealed. It counts for nothing until it is staged.
///
/// # Errors
/// [`KeysError`]
pub async fn make(secrets: &Secrets, domain: &TrustDomain, purpose: Purpose) -> Result<NewKey, KeysError> {
    let (prefix, made) = match purpose {
        Purpose::TaskSigning => (KEPT.names.to_owned(), KEPT.made()),
        Purpose::ServiceTokens => (service::KEPT.names.to_owned(), service::KEPT.made()),
        Purpose::MemberMessages => (member::KEPT.names.to_owned(), member::KEPT.made()),
        Purpose::NodeCa => (format!("{NODE_CAS}/"), new_authority(domain, Utc::now())?),
        Purpose::AtRest => return Err(damaged(purpose, "they are the operator's to make")),
    };
    secrets.create(&format!("{prefix}{}", made.key.id), &made.value, made.public).await?;
    Ok(made.key)
}

/// All authorities whose certificates are good, PEM; `None` where no member has made one yet.
///
/// # Errors
/// [`KeysError`]
pub async fn node_authorities_pem(secrets: &Secrets, reads: &Reads) -> Result<Option<String>, KeysError> {
    if let Some(set) = stored(reads, Purpose::NodeCa).await? {
        return Ok(Some(set.listed().iter().map(|listed| listed.public.as_str()).collect()));
    }
    let first = secrets.get(FIRST_NODE_CA).await?;
    Ok(first.and_then(|first| first.public["certificate_pem"].as_str().map(str::to_owned)))
}

impl Keys {
    /// What a change is asked with: the version that it was prepared on, and the signatures for what comes of it.
    ///
    /// # Errors
    /// [`KeysError`] where the set cannot be signed; the inner one is why the change cannot be.
    pub fn prepare(&self, purpose: Purpose, change: &Change) -> Result<Result<Basis, Rejection>, KeysError> {
        let (set, signatures) = match purpose {
            Purpose::TaskSigning => {
                let signed = self.task.signed(change).map_err(|error| damaged(purpose, error))?;
                (&self.task.set, signed)
            }
            Purpose::NodeCa => (&self.node.set, self.node.set.listed_after(change).map(|_| Vec::new())),
            Purpose::ServiceTokens => (&self.service.set, self.service.set.listed_after(change).map(|_| Vec::new())),
            Purpose::MemberMessages => (&self.member.set, self.member.set.listed_after(change).map(|_| Vec::new())),
            Purpose::AtRest => return Ok(Err(Rejection::OtherPurpose)),
        };
        let first = set.keys.first().ok_or_else(|| damaged(purpose, "there is none"))?;
        let founding = NewKey { id: first.id.clone(), public: first.public.clone() };
        let founded_at = first.made_at;
        Ok(signatures.map(|signatures| Basis { purpose, version: set.version, founding, founded_at, signatures }))
    }
}
