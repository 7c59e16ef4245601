//! Every command, reply and rejection of every machine survives the encoding between members.

mod money;
mod nodes;
mod users;

use super::*;
use domain::allocation::{self, Allocation, AllocationFailure, CommandName, FailureCode, PhaseName, Placement};
use domain::authz::{Grant, PlatformRole};
use domain::commit::Precondition;
use domain::event::GpuDevice;
use domain::metadata::{MetadataPatch, PatchValue};
use domain::policy::PolicyBook;
use domain::state_machine::{Command as _, TransitionContext};
use domain::{AllocationId, NodeId, Timestamp, node, sku};
use serde_json::json;
use std::fmt::Debug;

const NODE: NodeId = NodeId(Uuid::from_u128(0x10));
const TENANT: AllocationId = AllocationId(ALLOCATION);

fn at() -> Timestamp {
    Timestamp::from_timestamp(1_800_000_000, 123_456_000).unwrap()
}

/// Over the bus and back, as bytes.
fn survives<M: Machine>(
    commands: Vec<M::Command>,
    replies: impl IntoIterator<Item = M::Reply>,
    rejections: impl IntoIterator<Item = M::Rejection>,
) where
    M::Command: PartialEq + Debug,
    M::Reply: PartialEq,
    M::Rejection: PartialEq,
{
    for command in commands {
        let bytes = serde_json::to_vec(&serde_json::to_value(&command).unwrap()).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(strict_json::tagged::from_value::<M::Command>(value).unwrap(), command);
    }
    let replies =
        replies.into_iter().map(|reply| Ok(CommandReply { reply, replayed: true, written: false, version: 7 }));
    let reason = || "a reason".to_owned();
    let errors = [
        AskError::Denied,
        AskError::InProgress,
        AskError::AlreadyDone,
        AskError::Reused,
        AskError::Taken { constraint: "name".to_owned() },
        AskError::Overloaded,
        AskError::Parked { reason: reason() },
        AskError::Unavailable { reason: reason() },
        AskError::Unknown { reason: reason() },
        AskError::Broken { reason: reason() },
        AskError::NotOwner,
    ];
    let refused = rejections.into_iter().map(AskError::Rejected).chain(errors).map(Err);
    for answer in replies.chain(refused) {
        let answer: AskResult<M> = answer;
        let bytes = serde_json::to_vec(&Response { v: VERSION, answer: encode::<M>(answer.clone()) }).unwrap();
        let response: Response = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(decode::<M>(response.answer), answer);
    }
}

/// The transition of `state` by `command`.
fn decided<M: Machine>(state: Option<&M>, command: impl Into<M::Command>, by: &Principal, id: Uuid) -> (M, M::Reply) {
    let policy = PolicyBook::default();
    let ctx = TransitionContext {
        now: at(),
        policy: &policy,
        by,
        correlation_id: "c",
        trace: domain::state_machine::TraceContext::default(),
        seed: 5,
        id,
        version: 0,
    };
    let step = M::decide(state, command.into(), &ctx).unwrap();
    (step.next.unwrap(), step.reply)
}

fn placed() -> Placement {
    Placement {
        devices: vec![GpuDevice { index: 1, uuid: "GPU-1".into() }],
        host: "node-a".into(),
        port: 22,
        user_name: "t1".into(),
        region_code: "eu".into(),
        host_fingerprint: Some("SHA256:x".into()),
    }
}

fn text() -> String {
    "ünïcode \"quoted\" \\ and a line\n".to_owned()
}

fn code() -> String {
    "xid/NVRM.79-a".to_owned()
}

#[test]
fn of_an_allocation() {
    use allocation::{Command, Fact, Rejection, Request};
    let worker = crate::testing::worker();
    let (requested, reply) = decided::<Allocation>(None, rent(), &ann(), ALLOCATION);
    let reserved = Fact::Reserved { node_id: NODE, placed: placed() };
    let (provisioning, _) = decided(Some(&requested), reserved.clone(), &worker, ALLOCATION);
    let (active, _) = decided(Some(&provisioning), Fact::Provisioned { node_id: NODE }, &worker, ALLOCATION);
    let (mut releasing, _) = decided(Some(&active), Request::Release { issue: Some(text()) }, &ann(), ALLOCATION);
    releasing.failure = Some(AllocationFailure {
        phase: PhaseName::Active,
        code: FailureCode::Reported(text()),
        message: text(),
        retryable: true,
    });
    let commands: Vec<Command> = vec![
        rent(),
        Request::Release { issue: None }.into(),
        Request::Release { issue: Some(text()) }.into(),
        Request::Revise { metadata: revision(), if_version: Some(7) }.into(),
        Request::Revise {
            metadata: MetadataPatch { name: PatchValue::Remove, labels: PatchValue::Remove },
            if_version: None,
        }
        .into(),
        Request::RetryRelease { reason: text() }.into(),
        Request::ForceRelease { reason: text() }.into(),
        reserved.into(),
        Fact::NoCapacity { suggestion: Some(text()) }.into(),
        Fact::OverQuota { limit: -1 }.into(),
        Fact::Provisioned { node_id: NODE }.into(),
        Fact::ProvisionFailed { node_id: NODE, reason: text() }.into(),
        Fact::Cleaned { node_id: NODE, attempt: 3 }.into(),
        Fact::CleanupFailed { node_id: NODE, attempt: 3, reason: text(), detail: text() }.into(),
        Fact::StillCounted { logins_revision: 3 }.into(),
        Request::ChooseLogins { chosen: None, keys: request().ssh_keys, logins_revision: 1 }.into(),
        Fact::LoginsResolved { chosen: Some(vec![SshKeyId(ALLOCATION)]), keys: Vec::new(), logins_revision: 2 }.into(),
        Fact::LoginsWritten { node_id: NODE, revision: 2 }.into(),
        Command::TICK,
    ];
    let rejections = [
        Rejection::NotFound,
        Rejection::Exists,
        Rejection::WrongState { state: PhaseName::Active, command: CommandName::Create },
        Rejection::GpuCount { max: 64 },
        Rejection::QueueSeconds { max: i64::MAX },
        Rejection::KeyUnknown { id: SshKeyId(ALLOCATION) },
        Rejection::KeysMoved,
        Rejection::VersionDiffers,
        Rejection::TooManyLabels { max: 32 },
    ];
    let replies = [reply, Box::new(provisioning), Box::new(active), Box::new(releasing)];
    survives::<Allocation>(commands, replies, rejections);
}

fn revision() -> MetadataPatch {
    let labels = [("env".to_owned(), Some("dev".to_owned())), ("gone".to_owned(), None)].into();
    MetadataPatch { name: PatchValue::Set(text()), labels: PatchValue::Set(labels) }
}

#[test]
fn of_an_announcement() {
    use domain::announcement::{Announcement, Command, Rejection, Reply, Severity};
    let announce = |severity| Command::Announce { severity, message: text() };
    let by = user("root", &[TokenRole::Admin]);
    let (_, reply) = decided::<Announcement>(None, announce(Severity::Info), &by, ALLOCATION);
    let severities = [Severity::Info, Severity::Warning, Severity::Critical];
    let commands = severities.into_iter().map(announce).chain([Command::Tick]).collect();
    survives::<Announcement>(commands, [reply, Reply::Done], [Rejection::NotFound, Rejection::Exists]);
}

#[test]
fn of_a_runtime_part() {
    use domain::restart_record::{Command, Rejection, Reply, RestartRecord, RuntimePart};
    let entity = EntityRef { kind: domain::EntityKind::Node, id: NODE.0 };
    let member = domain::MemberId(Uuid::from_u128(3));
    let parts = [RuntimePart::Entity { entity }, RuntimePart::Worker { member, worker: text() }];
    let restart = |what: RuntimePart| Command::Restart { what, reason: Some(text()) };
    let commands = parts.into_iter().map(restart).chain([Command::Tick]).collect();
    survives::<RestartRecord>(commands, [Reply], [Rejection::AnotherPart]);
}

#[test]
fn of_policy_values_of_a_scope() {
    use domain::PolicyValueId;
    use domain::policy::{CrossingBounds, PolicyKey, PolicyScope, PolicyValue};
    use domain::policy_values::{
        Command, ExpectedValue, PolicyRevocation, PolicyVersion, PolicyWrite, Rejection, Reply, ScopeValues,
    };
    let scopes = [
        PolicyScope::Global,
        PolicyScope::UserId("ann".into()),
        PolicyScope::ProjectId("*".into()),
        PolicyScope::OrgId(">".into()),
        PolicyScope::Plan("a.b".into()),
    ];
    let values = [PolicyValue::Int(-7), PolicyValue::Bool(true), PolicyValue::Text("user-revoke".into())];
    let expected = [ExpectedValue::Anything, ExpectedValue::Nothing, ExpectedValue::This(values[0].clone())];
    let write = |(scope, value, expected): (&PolicyScope, &PolicyValue, &ExpectedValue)| {
        Command::Write(Box::new(PolicyWrite {
            scope: scope.clone(),
            key: PolicyKey::BillingWindow,
            value: value.clone(),
            effective_at: Some(at()),
            reason: "r".into(),
            expected: expected.clone(),
        }))
    };
    let many = scopes.iter().zip(values.iter().cycle()).zip(expected.iter().cycle());
    let take_back = |effective_at| PolicyRevocation {
        key: PolicyKey::BillingWindow,
        effective_at,
        reason: "r".into(),
        expected: ExpectedValue::This(PolicyValue::Int(7)),
    };
    let others = [Command::TakeBack(take_back(None)), Command::TakeBack(take_back(Some(at()))), Command::Tick];
    let commands = many.map(|((scope, value), expected)| write((scope, value, expected))).chain(others).collect();
    let written = |value: &PolicyValue| Reply::Written {
        scope: PolicyScope::Plan("gold".into()),
        written: Box::new(PolicyVersion {
            id: PolicyValueId(ALLOCATION),
            key: "billing.window_seconds".into(),
            value: value.clone(),
            effective_at: at(),
            reason: "r".into(),
            old_value: None,
            written_by: "user:ann".into(),
            written_at: at(),
        }),
    };
    let (low, high) = (PolicyKey::BillingMinimumDeposit, PolicyKey::BillingMaximumDeposit);
    let crossing = CrossingBounds { at: at(), low: 2, high: 1, with: PolicyScope::Global };
    let rejections = [
        Rejection::NotFound,
        Rejection::OutOfBounds { key: low, value: values[2].clone() },
        Rejection::Scope { key: low, scope: PolicyScope::Global },
        Rejection::Crosses { key: low, low, high, crossing },
        Rejection::Differs { key: low, current: None },
        Rejection::Differs { key: low, current: Some(values[1].clone()) },
        Rejection::NotSet { key: low },
        Rejection::Past { now: at() },
        Rejection::TooFarAhead { latest: at() },
        Rejection::TooManyAhead { limit: 20 },
        Rejection::TooManyScopes { limit: 7 },
    ];
    survives::<ScopeValues>(commands, values.iter().map(written).chain([Reply::Done]), rejections);
}

#[test]
fn states_and_commands_in_rejections_are_encoded_by_name() {
    use domain::{payment, processor_event, terminal_session};
    let (state, command) = (node::PhaseName::BootstrapIssued, node::CommandName::OrderTask);
    let of_node = json!(node::Rejection::WrongState { state, command });
    assert_eq!(of_node, json!({ "rejection": "wrong_state", "state": "bootstrap-issued", "command": "order_task" }));
    let (state, command) = (PhaseName::ReleaseFailed, CommandName::ChooseLogins);
    let of_allocation = json!(allocation::Rejection::WrongState { state, command });
    assert_eq!(
        of_allocation,
        json!({ "rejection": "wrong_state", "state": "release_failed", "command": "choose_logins" })
    );
    let (status, command) = (sku::CatalogStatus::Draft, sku::StatusChange::Deactivate);
    let of_sku = json!(sku::Rejection::WrongStatus { status, command });
    assert_eq!(of_sku, json!({ "rejection": "wrong_status", "status": "draft", "command": "deactivate" }));
    let of_review = json!(sku::Rejection::ReviewMissing { field: sku::ReviewText::RollbackPlan });
    assert_eq!(of_review, json!({ "rejection": "review_missing", "field": "rollback_plan" }));
    let of_payment = json!(payment::Rejection::NotPaid { state: payment::PhaseName::Created });
    assert_eq!(of_payment, json!({ "rejection": "not_paid", "state": "created" }));
    let of_event = json!(processor_event::Rejection::WrongState { state: processor_event::PhaseName::Dismissed });
    assert_eq!(of_event, json!({ "rejection": "wrong_state", "state": "dismissed" }));
    let reason = terminal_session::CloseCode::DetachedExpired;
    let of_session = json!(terminal_session::Rejection::Closed { reason });
    assert_eq!(of_session, json!({ "rejection": "closed", "reason": "detached_expired" }));
}
