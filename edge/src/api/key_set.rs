//! The service's own keys: the phase of each in its rotation, and its next step (design 8).
//!
//! A change is answered once every replica has applied it (200), or after a timeout (202, with the replicas that have not).

use actors::CommandReply;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use domain::key_set::{
    ChangeBasis, KeyEntry, KeySet, KeySetChange, KeySetPurpose, KeyState, NewKey, Phase, Rejection, Reply, Request,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::{Instant, sleep};
use utoipa::ToSchema;
use uuid::Uuid;

use super::request_context::{Authorized, RequestContext, RotateKeys, replayed};
use super::request_fields::{KeyId, Reason, ReasonBody};
use crate::api::idempotency::request_layer::Idempotent;
use crate::api::rejection_response::Explain as _;
use crate::app_state::AppState;
use crate::app_state::runtime_interface::{MemberNode, MemberReport, Tree, TreeFilter};
use crate::http::error::{ApiError, Code};
use crate::http::request_body;
use crate::trust::current_keys::{Keys, KeysError, make, set_id, stored};

/// How long a change waits for the replicas, and how often they are polled.
const PROPAGATION_TIMEOUT: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The most nodes that a response names.
const MAX_NAMED_NODES: u32 = 100;

/// The placeholder key in the command of a replay: the reply to the first request counts.
const NO_KEY: NewKey = NewKey { id: String::new(), public: String::new() };

/// The purpose of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum KeyPurpose {
    /// They sign what agents execute.
    TaskSigning,
    /// They certify nodes.
    NodeCa,
    /// They sign the access tokens of service accounts.
    ServiceTokens,
    /// They authenticate messages between replicas.
    MemberMessages,
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum KeyPhase {
    /// Trusted by every replica, and not used yet.
    Staged,
    /// Used.
    Active,
    /// Trusted until nothing depends on it.
    Grace,
    /// Trusted nowhere.
    Retired,
}

/// A new key is to be made.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewStaged)]
pub(super) struct NewStagedKey {
    purpose: KeyPurpose,
    reason: Reason,
}

/// A key is to take its next step.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct KeyStep {
    purpose: KeyPurpose,
    key_id: KeyId,
    reason: Reason,
    /// Also where something still depends on its phase; the refusal without it says what.
    #[serde(default)]
    force: bool,
}

/// All keys of the service that are rotated.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
pub(super) struct AllKeys {
    sets: Vec<KeySetView>,
    at_rest: AtRestView,
    replicas: Vec<ReplicaKeys>,
}

/// The keys of the key ring, by which is sealed what must be readable again.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[schema(as = KeysAtRest)]
pub(super) struct AtRestView {
    /// Rises with every change; 0 where none was ever put to use by `rewrap`.
    version: u64,
    keys: Vec<AtRestKey>,
}

/// A key of the key ring, without itself.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[schema(as = KeyAtRest)]
pub(super) struct AtRestKey {
    key_id: String,
    /// Null where it was never part of a rotation.
    phase: Option<KeyPhase>,
    since: Option<DateTime<Utc>>,
    /// How many values are sealed under it: one without any may leave the key ring.
    sealed: u64,
}

/// The keys of one purpose.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[schema(as = KeySet)]
pub(super) struct KeySetView {
    purpose: KeyPurpose,
    /// Rises with every change.
    version: u64,
    /// In the order in which they came.
    keys: Vec<KeyView>,
}

/// A key, as far as it may be known.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[schema(as = Key)]
pub(super) struct KeyView {
    key_id: String,
    phase: KeyPhase,
    /// When it entered its phase.
    since: DateTime<Utc>,
    /// The deadline of its phase, after which it is overdue.
    until: Option<DateTime<Utc>>,
    made_at: DateTime<Utc>,
    /// The public key or the certificate.
    public: String,
    /// For an authority: the number of nodes whose certificates only it has issued.
    dependents: Option<u64>,
}

/// The key versions that a replica has applied.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
pub(super) struct ReplicaKeys {
    name: String,
    /// False where it did not answer: the versions are not known.
    answers: bool,
    versions: BTreeMap<String, u64>,
    /// The key of its key ring that seals.
    seals_with: Option<String>,
}

/// A set after a change.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[schema(as = Changed)]
pub(super) struct KeyChangeView {
    set: KeySetView,
    /// The key that was changed.
    key_id: String,
    /// Replicas that have not applied it yet; none where the status is 200 or 201.
    waiting_for: Vec<String>,
    /// Nodes that must recover their identity or enroll again, at most 100 of them.
    cut_off: Vec<CutOffNode>,
}

/// A node without a certificate by a trusted authority.
#[derive(Clone, Debug, Deserialize, Serialize, ToSchema)]
#[schema(as = CutOff)]
pub(super) struct CutOffNode {
    node_id: Uuid,
    // Answers that an earlier release has stored have none.
    #[serde(default)]
    name: Option<String>,
    host: String,
    /// When the certificate that it has would have ended.
    certificate_not_after: DateTime<Utc>,
}

/// The service's own keys, and the phase of each in its rotation.
#[utoipa::path(get, path = "/", responses((status = 200, description = "The keys.", body = AllKeys)))]
pub(super) async fn list(_: Authorized<RotateKeys>, State(app): State<AppState>) -> Result<Json<AllKeys>, ApiError> {
    let keys = read(&app).await?;
    let mut sets = Vec::new();
    for purpose in KeyPurpose::ALL {
        sets.push(view(&app, &keys, purpose).await?);
    }
    let at_rest = at_rest(&app).await?;
    Ok(Json(AllKeys { sets, at_rest, replicas: replicas(&app).await? }))
}

/// Makes a key and has it trusted everywhere. Nothing uses it yet.
#[utoipa::path(
    post,
    path = "/",
    request_body = NewStagedKey,
    responses(
        (status = 201, description = "It is staged, and every replica trusts it.", body = KeyChangeView),
        (status = 202, description = "It is staged; some replicas do not trust it yet.", body = KeyChangeView),
    ),
)]
pub(super) async fn stage(
    Authorized { context, .. }: Authorized<RotateKeys>,
    State(app): State<AppState>,
    Idempotent(request_body::Json(asked)): Idempotent<request_body::Json<NewStagedKey>>,
) -> Result<Response, ApiError> {
    let purpose = asked.purpose;
    // A second staged key would be refused, so no key is generated for it. A replay still gets the first reply.
    let keys = read(&app).await?;
    let staged = set_of(&keys, purpose).keys.iter().find(|key| key.state.phase() == Phase::Staged);
    let key = if context.is_replay() {
        NO_KEY
    } else if let Some(staged) = staged {
        return Err(Rejection::AlreadyStaged { id: staged.id.clone() }.explain());
    } else {
        make(&app.trust.secrets, &app.trust.domain, purpose.into()).await?
    };
    let rotation = KeyRotation {
        purpose,
        change: KeySetChange::Stage { key },
        reason: asked.reason.to_string(),
        cut_off: Vec::new(),
    };
    rotation.execute(&context, &app, StatusCode::CREATED).await
}

/// A route for each step of a key's rotation: its name, the descriptions of the statuses 200 and 202, and its own description.
macro_rules! steps {
    ($($(#[doc = $doc:tt])+ $name:ident: $prepared:ident, $done:tt, $waits:tt;)+) => {$(
        $(#[doc = $doc])+
        #[utoipa::path(
            post,
            path = "/",
            request_body = KeyStep,
            responses(
                (status = 200, description = $done, body = KeyChangeView),
                (status = 202, description = $waits, body = KeyChangeView),
            ),
        )]
        pub(super) async fn $name(
            Authorized { context, .. }: Authorized<RotateKeys>,
            State(app): State<AppState>,
            Idempotent(request_body::Json(asked)): Idempotent<request_body::Json<KeyStep>>,
        ) -> Result<Response, ApiError> {
            let (context, rotation) = asked.$prepared(context, &app).await?;
            rotation.execute(&context, &app, StatusCode::OK).await
        }
    )+};
}

steps! {
    /// Puts a staged key to use. The one before is trusted on, in grace.
    ///
    /// It is refused while a replica does not know the key, since that replica could not verify what others sign with it.
    activate: prepare_activation, "It is active on every replica.", "It is active; some replicas use the one before yet.";

    /// Trusts a key no more. Its private half is destroyed.
    ///
    /// A signing key is refused before its grace is over, an authority while nodes have certificates by it alone; with `force` neither
    /// is, and the answer names the nodes that are cut off.
    retire: prepare_retirement, "No replica trusts it.", "It is retired; some replicas trust it yet.";
}

impl KeyStep {
    async fn prepare_activation(
        &self,
        context: RequestContext,
        app: &AppState,
    ) -> Result<(RequestContext, KeyRotation), ApiError> {
        if !self.force && !context.is_replay() {
            let version = set_of(&read(app).await?, self.purpose).version;
            let behind = wait_for_version(app, self.purpose, version).await?;
            if !behind.is_empty() {
                return Err(not_known_yet(&behind));
            }
        }
        let change = KeySetChange::Activate { id: self.key_id.to_string() };
        let rotation =
            KeyRotation { purpose: self.purpose, change, reason: self.reason.to_string(), cut_off: Vec::new() };
        Ok((context, rotation))
    }

    async fn prepare_retirement(
        &self,
        context: RequestContext,
        app: &AppState,
    ) -> Result<(RequestContext, KeyRotation), ApiError> {
        let id = self.key_id.to_string();
        let keys = read(app).await?;
        let (cut_off, dependents) = match self.purpose {
            KeyPurpose::NodeCa => dependents(app, &keys, &id, MAX_NAMED_NODES).await?,
            KeyPurpose::TaskSigning | KeyPurpose::ServiceTokens | KeyPurpose::MemberMessages => (Vec::new(), 0),
        };
        let change = KeySetChange::Retire { id, dependents, force: self.force };
        let rotation = KeyRotation { purpose: self.purpose, change, reason: self.reason.to_string(), cut_off };
        // The retirement of a leaked key is exempt from load shedding.
        Ok((context.prioritized(), rotation))
    }
}

/// Reseals everything under the key of the key ring that is active in its file.
///
/// It runs in the background and survives crashes; GET of the keys shows what is left under each key. It is refused while a replica seals
/// with another key.
#[utoipa::path(
    post,
    path = "/",
    request_body = ReasonBody,
    responses((status = 202, description = "It goes on.", body = AtRestView)),
)]
pub(super) async fn rewrap(
    Authorized { context, .. }: Authorized<RotateKeys>,
    State(app): State<AppState>,
    Idempotent(request_body::Json(asked)): Idempotent<request_body::Json<ReasonBody>>,
) -> Result<Response, ApiError> {
    let values = app.trust.secrets.rewrap();
    let id = values.active().to_owned();
    let others = wait_until_none(&app, |replica| replica.seals_with.as_ref() != Some(&id)).await?;
    if !others.is_empty() && !context.is_replay() {
        let shown = described(&others);
        return Err(ApiError::new(
            Code::StateConflict,
            format!("Not every replica seals with key {id}: {shown}. Make it active in their key rings and restart them first."),
        )
        .detail("key_id", id)
        .detail("waiting_for", serde_json::json!(names(&others))));
    }
    let outgoing = values.sealed().await?.into_keys().filter(|other| *other != id).collect();
    let command = Request::Adopt { id, outgoing, reason: asked.reason.to_string() };
    let answered = context.ask::<KeySet>(set_id(KeySetPurpose::AtRest), command).await?;
    Ok((StatusCode::ACCEPTED, replayed(&answered), Json(at_rest(&app).await?)).into_response())
}

async fn at_rest(app: &AppState) -> Result<AtRestView, ApiError> {
    let mut sealed = app.trust.secrets.rewrap().sealed().await?;
    let set = stored(&app.reads, KeySetPurpose::AtRest).await?;
    let known = |key: &KeyEntry| AtRestKey {
        key_id: key.id.clone(),
        phase: Some(KeyPhase::of(key.state.phase())),
        since: Some(key.entered_at),
        sealed: sealed.remove(&key.id).unwrap_or(0),
    };
    let version = set.as_ref().map_or(0, |set| set.version);
    let mut keys: Vec<_> = set.iter().flat_map(|set| &set.keys).map(known).collect();
    keys.extend(sealed.into_iter().map(|(key_id, sealed)| AtRestKey { key_id, phase: None, since: None, sealed }));
    Ok(AtRestView { version, keys })
}

/// A step of a rotation that is being executed.
struct KeyRotation {
    purpose: KeyPurpose,
    change: KeySetChange,
    reason: String,
    cut_off: Vec<CutOffNode>,
}

impl KeyRotation {
    async fn execute(self, context: &RequestContext, app: &AppState, done: StatusCode) -> Result<Response, ApiError> {
        let keys = read(app).await?;
        let on = match keys.prepare(self.purpose.into(), &self.change)? {
            Ok(on) => on,
            // A step that was committed before would be refused now; a replay gets its outcome.
            Err(_) if context.is_replay() => ChangeBasis {
                purpose: self.purpose.into(),
                version: set_of(&keys, self.purpose).version,
                founding: NO_KEY,
                founded_at: app.environment.now(),
                signatures: Vec::new(),
            },
            Err(rejection) => return Err(self.with_cut_off_nodes(rejection)),
        };
        let command = Request::Rotate { change: self.change.clone(), on, reason: self.reason.clone() };
        let answered = context.try_ask::<KeySet>(set_id(self.purpose.into()), command).await?;
        let answered: CommandReply<Reply> = answered.map_err(|error| match error {
            actors::AskError::Rejected(rejection) => self.with_cut_off_nodes(rejection),
            other => crate::api::rejection_response::not_answered(other),
        })?;
        let Reply::At { version, id } = &answered.reply else {
            return Err(ApiError::internal("the machine of keys answered another question"));
        };
        let behind = wait_for_version(app, self.purpose, *version).await?;
        let waiting_for: Vec<_> = behind.into_iter().map(|replica| replica.name).collect();
        let status = if waiting_for.is_empty() { done } else { StatusCode::ACCEPTED };
        let set = view(app, &read(app).await?, self.purpose).await?;
        let changed = KeyChangeView { set, key_id: id.clone(), waiting_for, cut_off: self.cut_off };
        Ok((status, replayed(&answered), Json(changed)).into_response())
    }

    /// A refusal to retire an authority names the nodes that depend on it.
    fn with_cut_off_nodes(&self, rejection: Rejection) -> ApiError {
        rejection.explain().detail("nodes", serde_json::json!(self.cut_off))
    }
}

async fn read(app: &AppState) -> Result<Keys, ApiError> {
    let trust = &app.trust;
    Ok(Keys::read(&trust.secrets, &app.reads, &trust.domain).await?)
}

const fn set_of(keys: &Keys, purpose: KeyPurpose) -> &KeySet {
    match purpose {
        KeyPurpose::TaskSigning => &keys.task.set,
        KeyPurpose::NodeCa => &keys.node.set,
        KeyPurpose::ServiceTokens => &keys.service.set,
        KeyPurpose::MemberMessages => &keys.member.set,
    }
}

async fn dependents(app: &AppState, keys: &Keys, id: &str, named: u32) -> Result<(Vec<CutOffNode>, u64), ApiError> {
    let founding = keys.node.founding == id;
    let (nodes, count) = app.reads.dependents(id, founding, app.environment.now(), named).await?;
    let cut_off = |of: persistence::queries::DependentNode| CutOffNode {
        node_id: of.node.0,
        name: of.name,
        host: of.host,
        certificate_not_after: of.not_after,
    };
    Ok((nodes.into_iter().map(cut_off).collect(), count))
}

/// Waits until every live replica has applied this version, and returns those that have not.
async fn wait_for_version(app: &AppState, purpose: KeyPurpose, version: u64) -> Result<Vec<ReplicaKeys>, ApiError> {
    wait_until_none(app, |replica| replica.versions.get(purpose.name()).is_none_or(|it| *it < version)).await
}

/// Waits until no replica is `behind`, and returns those that are. A replica that died a moment ago counts until its death is detected.
async fn wait_until_none(app: &AppState, behind: impl Fn(&ReplicaKeys) -> bool) -> Result<Vec<ReplicaKeys>, ApiError> {
    let end = Instant::now() + PROPAGATION_TIMEOUT;
    loop {
        let mut found = replicas(app).await?;
        found.retain(|replica| behind(replica));
        if found.is_empty() || Instant::now() >= end {
            return Ok(found);
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// The refusal of a key that these replicas do not know.
fn not_known_yet(behind: &[ReplicaKeys]) -> ApiError {
    let shown = described(behind);
    ApiError::new(
        Code::ServiceUnavailable,
        format!(
            "Not every replica knows the key yet: {shown}. Ask again in a moment. A replica that hangs is to be ended; with `force` the key is \
             activated without it, and it cannot verify what the others sign."
        ),
    )
    .detail("waiting_for", serde_json::json!(names(behind)))
    .expected()
}

fn names(replicas: &[ReplicaKeys]) -> Vec<&str> {
    replicas.iter().map(|replica| replica.name.as_str()).collect()
}

/// The replicas that are awaited, and which of them hang.
fn described(replicas: &[ReplicaKeys]) -> String {
    let one = |replica: &ReplicaKeys| match replica.answers {
        true => replica.name.clone(),
        false => format!("{}, which does not answer", replica.name),
    };
    replicas.iter().map(one).collect::<Vec<_>>().join("; ")
}

async fn replicas(app: &AppState) -> Result<Vec<ReplicaKeys>, ApiError> {
    let tree = app.runtime.tree(TreeFilter { parked: Some(true), limit: Some(1), ..TreeFilter::default() }).await?;
    // Those that do not answer are named by their heartbeats.
    let heartbeats = if tree.silent.is_empty() { Vec::new() } else { app.runtime.cluster().await?.members };
    Ok(replicas_of(tree, &heartbeats))
}

fn replicas_of(tree: Tree, heartbeats: &[MemberReport]) -> Vec<ReplicaKeys> {
    let answer = |member: MemberNode| ReplicaKeys {
        name: member.name,
        answers: true,
        versions: member.key_sets,
        seals_with: Some(member.seals_with).filter(|id| !id.is_empty()),
    };
    let silent = |id: Uuid| {
        let heartbeat = heartbeats.iter().find(|member| member.id == id);
        let name = heartbeat.map_or_else(|| id.to_string(), |member| member.name.clone());
        ReplicaKeys { name, answers: false, versions: BTreeMap::new(), seals_with: None }
    };
    tree.members.into_iter().map(answer).chain(tree.silent.into_iter().map(silent)).collect()
}

async fn view(app: &AppState, keys: &Keys, purpose: KeyPurpose) -> Result<KeySetView, ApiError> {
    let set = set_of(keys, purpose);
    let mut views = Vec::new();
    for key in &set.keys {
        let counted = purpose == KeyPurpose::NodeCa && key.state.phase() != Phase::Retired;
        let dependents = if counted { Some(dependents(app, keys, &key.id, 1).await?.1) } else { None };
        views.push(KeyView::of(key, dependents));
    }
    Ok(KeySetView { purpose, version: set.version, keys: views })
}

impl KeyView {
    fn of(key: &KeyEntry, dependents: Option<u64>) -> Self {
        let until = match key.state {
            KeyState::Staged { until } | KeyState::Grace { until } => Some(until),
            KeyState::Active | KeyState::Retired => None,
        };
        let phase = KeyPhase::of(key.state.phase());
        Self {
            key_id: key.id.clone(),
            phase,
            since: key.entered_at,
            until,
            made_at: key.made_at,
            public: key.public.clone(),
            dependents,
        }
    }
}

impl KeyPurpose {
    const ALL: [Self; 4] = [Self::TaskSigning, Self::NodeCa, Self::ServiceTokens, Self::MemberMessages];

    fn name(self) -> &'static str {
        KeySetPurpose::from(self).name()
    }
}

impl KeyPhase {
    const fn of(phase: Phase) -> Self {
        match phase {
            Phase::Staged => Self::Staged,
            Phase::Active => Self::Active,
            Phase::Grace => Self::Grace,
            Phase::Retired => Self::Retired,
        }
    }
}

impl From<KeyPurpose> for KeySetPurpose {
    fn from(purpose: KeyPurpose) -> Self {
        match purpose {
            KeyPurpose::TaskSigning => Self::TaskSigning,
            KeyPurpose::NodeCa => Self::NodeCa,
            KeyPurpose::ServiceTokens => Self::ServiceTokens,
            KeyPurpose::MemberMessages => Self::MemberMessages,
        }
    }
}

impl From<KeysError> for ApiError {
    fn from(error: KeysError) -> Self {
        match error {
            KeysError::Store(error) => Self::from(error),
            KeysError::Secret(persistence::secrets::SecretError::Store(error)) => Self::from(error),
            error @ (KeysError::Secret(_) | KeysError::Damaged { .. } | KeysError::Authority(_)) => {
                Self::internal(error)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replica_that_hangs_is_named_where_it_is_awaited() {
        let (hung, unknown) = (Uuid::from_u128(7), Uuid::from_u128(8));
        let tree = Tree {
            members: Vec::new(),
            silent: vec![hung, unknown],
            entities_by_kind: BTreeMap::new(),
            overdue: 0,
            parked: 0,
            entities: Vec::new(),
            truncated: false,
            next_page: None,
        };
        let heartbeat = MemberReport {
            id: hung,
            name: "edge-2".to_owned(),
            started_at: Utc::now(),
            roles: Vec::new(),
            silent_for_ms: 0,
            unheard_for_ms: None,
            clock_offset_ms: None,
            shards: Vec::new(),
        };
        let mut behind = replicas_of(tree, &[heartbeat]);
        behind.push(ReplicaKeys {
            name: "edge-3".to_owned(),
            answers: true,
            versions: BTreeMap::new(),
            seals_with: None,
        });
        let refusal = not_known_yet(&behind);
        let named = format!("edge-2, which does not answer; {unknown}, which does not answer; edge-3. Ask again");
        assert!(refusal.message().contains(&named) && refusal.message().contains("`force`"), "{}", refusal.message());
        assert_eq!(refusal.details()["waiting_for"], serde_json::json!(["edge-2", unknown.to_string(), "edge-3"]));
    }
}
