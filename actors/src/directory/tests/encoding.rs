//! Every command, reply and rejection of every machine survives the encoding between members.

use super::*;
use domain::allocation::{self, AllocationFailure, CommandName, FailureCode, PhaseName, Placement};
use domain::authz::{CallerIdentity, Grant, PlatformRole};
use domain::commit::Precondition;
use domain::event::GpuDevice;
use domain::metadata::{MetadataPatch, PatchValue};
use domain::node::{
    self, AgentTask, CertificateRecord, Enrollment, FindingAcceptance, FindingReport, NodeHealth, OnboardingMode,
    ProbeOutcome, PromisedHardware, ProviderReport, ReportedFinding, ReportedGpu, ReportedInventory, ReportedSystem,
};
use domain::node::{
    AgentContact, EnrollmentTokenFault, NodeTask, NodeTaskPhase, PendingTask, Registration, TaskKind, TaskOutcome,
    TenantSlot,
};
use domain::policy::PolicyBook;
use domain::state_machine::{Command as _, RequestOrigin, TransitionContext};
use domain::validation::{ValidationLevel, ValidationMinimums};
use domain::{AllocationId, FindingId, NodeId, TaskId, TaskType, Timestamp, TokenId, role_bindings, sku, tenant};
use domain::{allocation::Allocation, node::Node, role_bindings::RoleBindings, sku::Sku, tenant::Tenant};
use serde_json::json;
use std::fmt::Debug;

const NODE: NodeId = NodeId(Uuid::from_u128(0x10));
const ROLLOUT: domain::RolloutId = domain::RolloutId(Uuid::from_u128(0x20));
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
        assert_eq!(serde_json::from_value::<M::Command>(value).unwrap(), command);
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

fn expected_hardware() -> domain::hardware::ExpectedHardware {
    domain::hardware::ExpectedHardware {
        cpu_model: Some(text()),
        cpu_cores: Some(64),
        memory_mib: Some(512_000),
        storage_gib: Some(1_000),
        driver_version_min: "570.86.15".parse().ok(),
    }
}

fn text() -> String {
    "ünïcode \"quoted\" \\ and a line\n".to_owned()
}

fn digest() -> domain::PackageDigest {
    format!("sha256:{}", "0f".repeat(32)).parse().unwrap()
}

fn update() -> node::AgentUpdate {
    node::AgentUpdate { digest: digest(), force: true, commit_seconds: 120, rollout_id: Some(ROLLOUT) }
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
        Fact::AdoptLogins { chosen: Some(vec![SshKeyId(ALLOCATION)]), keys: Vec::new(), logins_revision: 2 }.into(),
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

fn inventory() -> ReportedInventory {
    ReportedInventory {
        gpus: vec![ReportedGpu { index: 0, uuid: "GPU-0".into(), model: "H100".into(), memory_mib: u64::MAX }],
        gpu_source: "simulated".into(),
        executor: "sandbox".into(),
        isolates_devices: true,
        cpu_model: Some(text()),
        cpu_cores: 8,
        memory_mib: 64_000,
        storage_gib: 1_000,
        driver_version: Some(text()),
        host_fingerprint: None,
        system: Some(ReportedSystem { machine_id: Some(text()), image_digest: None }),
    }
}

fn registration() -> Registration {
    let sku = PromisedHardware {
        sku_id: SkuId(Uuid::from_u128(1)),
        name: "h100".into(),
        gpu_model: "H100".into(),
        gpu_memory_mib: 80_000,
        gpu_count: 1,
        allowed_regions: vec!["eu".into()],
    };
    Registration {
        host: "node-a".into(),
        port: 22,
        ssh_username: "ops".into(),
        ssh_public_key: "ssh-ed25519 AAAA".into(),
        ssh_key_fingerprint: "SHA256:x".into(),
        sku,
        region_code: "eu".into(),
        gpus_total: 1,
        onboarding_mode: OnboardingMode::Manual,
        metadata: domain::metadata::Metadata::default(),
    }
}

fn node_commands() -> Vec<node::Command> {
    use node::{Command, Fact, Request};
    let issued = CertificateRecord { serial: "0a".into(), not_after: at(), generation: 2, authority: None };
    let enrollment = Enrollment {
        token_sha256: [255; 32],
        csr_sha256: [1; 32],
        issued: issued.clone(),
        recovery_public_key: "AAAA".into(),
        boot_id: "boot".into(),
        agent_version: "0.1.0".into(),
        protocol: 3,
        inventory: inventory(),
    };
    let seen = AgentContact {
        boot_id: "boot".into(),
        agent_version: "0.1.0".into(),
        protocol: 3,
        last_seen_at: at(),
        silent_at: at(),
        task_types: None,
        package_digest: Some(digest()),
    };
    let finding = ReportedFinding {
        probe: "xid".into(),
        gpu_uuid: Some(text()),
        code: "79".into(),
        count: u64::MAX,
        first_at: at(),
        last_at: at(),
        boot_id: "boot".into(),
        detail: text(),
    };
    let health = NodeHealth {
        alerts: vec![json!({ "probe_id": "xid", "n": 1.5, "deep": [null, { "a": -1 }] })],
        report: Some(FindingReport { sent_at: at(), findings: vec![finding], is_truncated: true }),
        ..NodeHealth::default()
    };
    let probe = ProbeOutcome { reachable: false, checked_at: at(), error: Some(text()) };
    let failed = TaskOutcome::Failed { code: "code".into(), message: text() };
    vec![
        Request::Register { registration: Box::new(registration()), probe: Some(probe), machine: None }.into(),
        Request::Revise {
            host: Some("b".into()),
            port: Some(u16::MAX),
            ssh_username: None,
            probe: None,
            metadata: revision(),
            if_version: Some(i64::MAX),
        }
        .into(),
        Request::IssueToken { token_id: TokenId(ALLOCATION), token_sha256: [7; 32], ttl_seconds: Some(60) }.into(),
        Request::Retire { reason: text(), drain: true }.into(),
        Request::Reactivate { reason: text() }.into(),
        Request::Remove { reason: text() }.into(),
        Request::Quarantine { reason: text() }.into(),
        Request::ReleaseQuarantine { reason: text() }.into(),
        Request::ClearFinding { finding_id: FindingId(ALLOCATION), reason: text() }.into(),
        Request::Enroll(Box::new(enrollment)).into(),
        Request::Renew { serial: "09".into(), issued }.into(),
        Request::Poll { serial: "0a".into() }.into(),
        Request::PresentToken { token_sha256: [3; 32] }.into(),
        Request::Heartbeat {
            serial: "0a".into(),
            seen: Box::new(seen),
            inventory: Box::new(inventory()),
            health: Box::new(health),
        }
        .into(),
        Request::OrderTask { task_type: TaskType::NodeReboot, reason: text() }.into(),
        Request::ResumeTask { task_id: TaskId(ALLOCATION), reason: text() }.into(),
        Request::Validate { level: ValidationLevel::Deep, reason: text() }.into(),
        Request::UpdateAgent { digest: digest(), force: true, reason: text() }.into(),
        node::Fact::UpdateForRollout { rollout_id: ROLLOUT, digest: digest() }.into(),
        Request::Report { serial: "0a".into(), task_id: TaskId(ALLOCATION), attempt: 2, verdict: failed, output: None }
            .into(),
        Request::Report {
            serial: "0a".into(),
            task_id: TaskId(ALLOCATION),
            attempt: 2,
            verdict: TaskOutcome::Succeeded { proof: Some(TENANT) },
            output: Some(json!({ "deep": [null, { "a": -1.5 }] })),
        }
        .into(),
        Fact::Reserve { allocation_id: TENANT, gpu_count: 1, keys: request().ssh_keys, revision: 1, reimages: true }
            .into(),
        Fact::ReconcileLogins { allocation_id: TENANT, revision: 2, keys: request().ssh_keys }.into(),
        Fact::Unreserve { allocation_id: TENANT }.into(),
        Fact::Provision { allocation_id: TENANT, deadline_at: at() }.into(),
        Fact::Clean { allocation_id: TENANT, attempt: 1, deadline_at: at() }.into(),
        Fact::MarkReleaseFailed { allocation_id: TENANT, attempt: 1 }.into(),
        Fact::Fence { allocation_id: TENANT, attempt: 1 }.into(),
        Fact::Abandon { allocation_id: TENANT }.into(),
        Request::Reimage { reason: text() }.into(),
        Fact::MachineToken { token_id: TokenId(ALLOCATION), token_sha256: [4; 32] }.into(),
        Fact::MachineReported { since: at(), report: ProviderReport::Done }.into(),
        Fact::MachineReported { since: at(), report: ProviderReport::Waiting { status: text() } }.into(),
        Fact::MachineReported { since: at(), report: ProviderReport::Failed { why: text() } }.into(),
        Fact::MachineReported { since: at(), report: ProviderReport::Lost { why: text() } }.into(),
        Command::TICK,
    ]
}

fn node_rejections() -> Vec<node::Rejection> {
    use node::Rejection;
    let causes = [
        EnrollmentTokenFault::NoneIssued,
        EnrollmentTokenFault::Mismatch,
        EnrollmentTokenFault::Expired,
        EnrollmentTokenFault::Consumed,
    ];
    let refused = causes.map(|cause| Rejection::TokenRefused { cause });
    let mut rejections = vec![
        Rejection::NotFound,
        Rejection::NotProvided,
        Rejection::MachineTaken { node_id: NODE },
        Rejection::Exists,
        Rejection::WrongState { state: node::PhaseName::Active, command: node::CommandName::Retire },
        Rejection::InUse { allocation_id: TENANT },
        Rejection::GpusDiffer { given: 1, promised: 2 },
        Rejection::RegionNotAllowed { region_code: text() },
        Rejection::VersionDiffers,
        Rejection::TooManyLabels { max: 32 },
        Rejection::NotInOrder { why: text() },
        Rejection::CertificateUnknown,
        Rejection::CertificateExpired,
        Rejection::Removed,
        Rejection::Fenced { allocation_id: TENANT },
        Rejection::ForeignNode { id: NODE },
        Rejection::FindingUnknown,
        Rejection::TaskUnknown,
        Rejection::NotOrdered { task_type: TaskType::AgentUpdate },
        Rejection::TooManyTasks { limit: 8 },
        Rejection::TaskDoesNotWait { why: text() },
        Rejection::UpdateInProgress { task_id: TaskId(ALLOCATION) },
        Rejection::StaleAttempt { given: 1, current: 2 },
        Rejection::NotSchedulable { why: text() },
        Rejection::NotEnoughGpus { free: 1, wanted: 2 },
    ];
    rejections.extend(refused);
    rejections
}

#[test]
fn of_a_node() {
    use node::{Reply, Request};
    let admin = user("root", &[TokenRole::Admin]);
    let register = Request::Register { registration: Box::new(registration()), probe: None, machine: None };
    let (registered, reply) = decided::<Node>(None, register, &admin, NODE.0);
    let token = Request::IssueToken { token_id: TokenId(ALLOCATION), token_sha256: [7; 32], ttl_seconds: None };
    let (mut node, _) = decided(Some(&registered), token, &admin, NODE.0);
    node.inventory = Some(inventory());
    let work =
        PendingTask { task_id: TaskId(ALLOCATION), attempt: 1, ordered_at: at(), deadline_at: at(), origin: None };
    let order = |what| AgentTask { work: work.clone(), what };
    let place = || TenantSlot { allocation_id: TENANT, placed: placed(), sku: "h100".into() };
    let hold = node::Hold {
        placed: placed(),
        keys: request().ssh_keys,
        logins: node::HoldSshAccess {
            revision: 2,
            written: 1,
            order: Some(node::SshKeysTask { work: work.clone(), since: at(), due_at: at(), rests_until: Some(at()) }),
        },
        phase: node::HoldPhase::Releasing { work: work.clone() },
        again: None,
        terminals: std::collections::BTreeMap::new(),
        remains: Some(text()),
        reimages: true,
        evacuation: None,
    };
    node.holds.insert(TENANT, hold);
    node.fenced_by.insert(TENANT);
    let ended =
        NodeTaskPhase::Ended { at: at(), verdict: TaskOutcome::Succeeded { proof: None }, output: Some(json!([1])) };
    for (n, phase) in
        [NodeTaskPhase::Open, NodeTaskPhase::AwaitsOperator { since: at() }, ended].into_iter().enumerate()
    {
        let task = NodeTask {
            task_type: TaskType::NodeReboot,
            work: work.clone(),
            boot_id: Some("boot".into()),
            update: Some(update()),
            validation: None,
            phase,
        };
        node.tasks.insert(TaskId(Uuid::from_u128(n as u128)), task);
    }
    let orders = vec![
        order(TaskKind::Release { place: place() }),
        order(TaskKind::Provision { place: place(), keys: request().ssh_keys }),
        order(TaskKind::ReconcileLogins { place: place(), keys: request().ssh_keys }),
        order(TaskKind::OfNode {
            task_type: TaskType::NodeValidate,
            boot_id: None,
            update: Some(update()),
            validation: None,
        }),
    ];
    let replies = [
        reply,
        Reply::Node { node: Box::new(node.clone()) },
        Reply::Task { task_id: TaskId(ALLOCATION), node: Box::new(node) },
        Reply::TokenIssued { expires_at: at() },
        Reply::Enrolled { identity_generation: 1, recoveries_left: 5 },
        Reply::Work { orders },
        Reply::Heard { next_heartbeat_seconds: 30, accepted: Vec::new() },
        Reply::Heard {
            next_heartbeat_seconds: 30,
            accepted: vec![FindingAcceptance { probe: text(), code: text(), boot_id: text(), count: 7 }],
        },
        Reply::Reserved { placed: placed() },
        Reply::Done,
    ];
    survives::<Node>(node_commands(), replies, node_rejections());
}

#[test]
fn of_a_sku() {
    use sku::{ApprovalContext, ApprovalRequest, Command, Rejection, SkuSpec, SkuUsage, StatusChange};
    let from = Precondition { entity: ALLOCATION, version: 3 };
    let first = Some(Grant { roles: [PlatformRole::PlatformOperations].into(), from });
    let approve = |change, role| ApprovalRequest {
        change,
        reason: text(),
        role,
        impact_review: Some(text()),
        rollback_plan: None,
        seen: ApprovalContext { version: 7, in_use: SkuUsage { nodes: 1, allocations: 2 }, first: first.clone() },
    };
    let spec = SkuSpec {
        name: "h100".into(),
        gpu_vendor: "nvidia".into(),
        gpu_model: "H100".into(),
        gpu_memory_mib: 80_000,
        gpu_count: 8,
        cpu_model: "epyc".into(),
        cpu_cores: 64,
        memory_mib: 1_000_000,
        storage_gib: 10_000,
        interconnect: Some("nvlink".into()),
        allowed_regions: vec!["eu".into(), "us".into()],
        expected_hardware: None,
    };
    let price = Price::new("EUR", 250).unwrap();
    let create =
        Command::Create { spec: Box::new(spec), price: price.clone(), validation: ValidationMinimums::default() };
    let (_, reply) = decided::<Sku>(None, create.clone(), &user("root", &[TokenRole::Admin]), ALLOCATION);
    let commands = vec![
        create,
        Command::Revise {
            price: Some(price),
            allowed_regions: Some(Vec::new()),
            expected_hardware: Some(Box::new(expected_hardware())),
            validation: Some(ValidationMinimums::default()),
        },
        Command::Revise { price: None, allowed_regions: None, expected_hardware: None, validation: None },
        Command::Approve(Box::new(approve(StatusChange::Activate, None))),
        Command::Approve(Box::new(approve(StatusChange::Deprecate, Some(PlatformRole::InventoryOwner)))),
        Command::Tick,
    ];
    let rejections = [
        Rejection::NotFound,
        Rejection::Exists,
        Rejection::WrongStatus { status: sku::CatalogStatus::Draft, command: sku::StatusChange::Deactivate },
        Rejection::RoleNotHeld { role: Some(PlatformRole::InventoryOwner) },
        Rejection::RoleNotHeld { role: None },
        Rejection::ReviewMissing { field: sku::ReviewText::ImpactReview },
        Rejection::Moved,
    ];
    survives::<Sku>(commands, [reply], rejections);
}

#[test]
fn of_a_tenant() {
    use tenant::{Command, Fact, QuotaScopes, Rejection, Reply, Request};
    let add = Request::AddKey {
        user_id: "ann".into(),
        name: text(),
        key_type: "ssh-ed25519".into(),
        public_key: "ssh-ed25519 AAAA".into(),
        fingerprint: "SHA256:x".into(),
    };
    let (_, reply) = decided::<Tenant>(None, add.clone(), &ann(), ALLOCATION);
    let ssh_key = SshKeyId(ALLOCATION);
    let scopes = QuotaScopes { org_id: None, project_id: Some("p".into()), plan: Some(text()) };
    let commands: Vec<Command> = vec![
        add.into(),
        Request::DeleteKey { key: ssh_key }.into(),
        Request::MakeDefault { key: ssh_key }.into(),
        Fact::Admit { user_id: "ann".into(), allocation_id: TENANT, scopes: scopes.clone(), logins_revision: 1 }.into(),
        Request::ExpectTerminal {
            user_id: "ann".into(),
            allocation_id: TENANT,
            session: domain::TerminalSessionId(ALLOCATION),
            there: [domain::TerminalSessionId(Uuid::nil())].into(),
            over: [domain::TerminalSessionId(ALLOCATION)].into(),
            scopes,
        }
        .into(),
        Fact::Forget { allocation_id: TENANT }.into(),
        Request::ExpectAccount {
            user_id: "ann".into(),
            account: domain::ServiceAccountId(ALLOCATION),
            there: [domain::ServiceAccountId(Uuid::nil())].into(),
            scopes: QuotaScopes { org_id: Some(text().into()), project_id: None, plan: None },
        }
        .into(),
        Command::TICK,
    ];
    let rejections = [
        Rejection::NotFound,
        Rejection::KeyExists { existing: ssh_key },
        Rejection::TooManyKeys { limit: 100 },
        Rejection::OverQuota { limit: 50 },
        Rejection::TooManyServiceAccounts { limit: 20 },
        Rejection::TooManyTerminals { limit: 8 },
    ];
    survives::<Tenant>(commands, [reply, Reply::Done], rejections);
}

#[test]
fn of_a_billing_account() {
    use domain::billing_account::{BillingAccount, Command, Fact, Holder, Rejection, Reply, Request};
    use domain::money::{Currency, MicroAmount};
    let currency = Currency::parse("EUR").unwrap();
    let holder = Holder::Org(text().into());
    let (payment_id, refund_id) = (domain::PaymentId(ALLOCATION), domain::RefundId(ALLOCATION));
    let open = Request::Open { holder: holder.clone(), currency: currency.clone() };
    let (_, reply) = decided::<BillingAccount>(None, open.clone(), &user("root", &[TokenRole::Admin]), ALLOCATION);
    let price = Price::new("EUR", 250).unwrap();
    let hold = |holder| Fact::Hold {
        holder,
        allocation_id: TENANT,
        user_id: "ann".into(),
        price: price.clone(),
        gpu_count: 4,
    };
    let usage = |from, until| Fact::Usage { allocation_id: TENANT, from, until };
    let commands: Vec<Command> = vec![
        open.into(),
        hold(holder).into(),
        hold(Holder::User("ann".into())).into(),
        usage(Some(at()), Some(at())).into(),
        usage(None, None).into(),
        Request::Adjust { amount_minor: -7, currency: currency.clone(), reason: text() }.into(),
        Fact::Deposit { payment_id, holder: Holder::User(text().into()), currency, amount_minor: 7 }.into(),
        Fact::TakeRefund { refund_id, payment_id, amount_minor: 7, is_exact: true }.into(),
        Fact::GiveBackRefund { refund_id, payment_id, amount_minor: 7 }.into(),
        Fact::Reverse { reversal_id: text(), payment_id, is_dispute: true, amount_minor: i64::MAX }.into(),
        Fact::UndoReversal { reversal_id: text(), payment_id, is_dispute: false, amount_minor: 7 }.into(),
        Request::RefundAllocation {
            refund_id,
            allocation_id: TENANT,
            cost: Some(MicroAmount::of(7)),
            ended_at: Some(at()),
            amount_minor: Some(7),
            reason: text(),
        }
        .into(),
        Command::TICK,
    ];
    let rejections = [
        Rejection::NotFound,
        Rejection::InsufficientBalance { needed: MicroAmount::of(7), available: MicroAmount::of(i64::MIN) },
        Rejection::CurrencyDiffers { account: "EUR".into(), given: "USD".into() },
        Rejection::Amount { max: 7 },
        Rejection::Full,
        Rejection::MoreThanCost { left: MicroAmount::of(7) },
        Rejection::TooLate { days: 7 },
        Rejection::TooManyRefunds,
        Rejection::Moved,
    ];
    survives::<BillingAccount>(commands, [reply, Reply::Done], rejections);
}

#[test]
fn of_a_payment() {
    use domain::billing_account::Holder;
    use domain::money::Currency;
    use domain::payment::{
        Command, Fact, Payment, PaymentFailure, RefundStatus, Rejection, Reply, Request, ReversalStep,
    };
    let (currency, refund_id) = (Currency::parse("EUR").unwrap(), domain::RefundId(ALLOCATION));
    let create = Request::Create {
        account_id: domain::BillingAccountId(ALLOCATION),
        holder: Holder::Org(text().into()),
        payer: "ann".into(),
        amount_minor: 5_000,
        currency: currency.clone(),
        success_url: "https://a.test/done".into(),
        cancel_url: "https://a.test/back".into(),
    };
    let (_, reply) = decided::<Payment>(None, create.clone(), &ann(), ALLOCATION);
    let not_paid = |outcome| Fact::NotPaid { processor_id: "pi_1".into(), outcome, why: text() };
    let reversed =
        |what| Fact::Reversed { reversal_id: "dp_1".into(), what, amount_minor: 7, currency: currency.clone() };
    let mut commands: Vec<Command> = vec![
        create.into(),
        Fact::Opened { processor_id: "pi_1".into() }.into(),
        Fact::Lapse { why: text() }.into(),
        Fact::Paid {
            processor_id: "pi_1".into(),
            amount_minor: i64::MAX,
            currency: currency.clone(),
            charge_id: Some("ch_1".into()),
        }
        .into(),
        Fact::Deposited.into(),
        Request::Refund { refund_id, amount_minor: None, reason: text() }.into(),
        Fact::DepositRefused { why: text() }.into(),
        Fact::RefundTaken { refund_id, amount_minor: 7 }.into(),
        Fact::RefundRefused { refund_id, why: text() }.into(),
        Fact::GivenBack { refund_id }.into(),
        Fact::ReversalPosted { reversal_id: "dp_1".into(), is_undone: true }.into(),
        Command::TICK,
    ];
    commands.extend(
        [PaymentFailure::Declined, PaymentFailure::Canceled, PaymentFailure::Expired].map(not_paid).map(Command::from),
    );
    commands.extend(
        [ReversalStep::Refund, ReversalStep::RefundFailed, ReversalStep::DisputeOpened, ReversalStep::DisputeWon]
            .map(reversed)
            .map(Command::from),
    );
    commands.extend(
        [RefundStatus::Pending, RefundStatus::Succeeded, RefundStatus::Failed]
            .map(|status| Fact::RefundAt { refund_id, processor_refund_id: "re_1".into(), status, amount_minor: 7 })
            .map(Command::from),
    );
    let rejections = [
        Rejection::NotFound,
        Rejection::Exists,
        Rejection::Amount { min: 1, max: 7 },
        Rejection::Over { state: domain::payment::PhaseName::Expired },
        Rejection::Differs { expected: text(), given: text() },
        Rejection::PaidTwice { as_of: text(), again: text() },
        Rejection::NotPaid { state: domain::payment::PhaseName::Open },
        Rejection::TooLate { days: 7 },
        Rejection::MoreThanLeft { left: 7 },
        Rejection::TooManyRefunds,
        Rejection::RefundUnknown,
    ];
    survives::<Payment>(commands, [reply, Reply::Done], rejections);
}

#[test]
fn of_a_processor_event() {
    use domain::processor_event::{
        Command, Fact, Maintenance, ProcessingOutcome, ProcessorEvent, Rejection, Reply, Request,
    };
    let receive = Fact::Receive {
        event_id: "evt_1".into(),
        event_type: text(),
        object_id: Some("pi_1".into()),
        occurred_at: Some(at()),
        digest: "00".into(),
        body_enc: "AA==".into(),
        nothing_follows: true,
    };
    let worker = crate::testing::worker();
    let (event, kept) = decided::<ProcessorEvent>(None, receive.clone(), &worker, ALLOCATION);
    let mut commands: Vec<Command> = vec![
        receive.into(),
        Fact::Failed { why: text() }.into(),
        Request::Retry { reason: text() }.into(),
        Request::Dismiss { reason: text() }.into(),
        Maintenance::Reseal { body_enc: "AA==".into() }.into(),
        Command::TICK,
    ];
    commands.extend(ProcessingOutcome::ALL.map(|outcome| Command::from(Fact::Processed { outcome })));
    let replies = [kept, Reply::Shown { event: Box::new(event) }, Reply::Done];
    let rejections = [
        Rejection::NotFound,
        Rejection::Differs,
        Rejection::WrongState { state: domain::processor_event::PhaseName::Processed },
    ];
    survives::<ProcessorEvent>(commands, replies, rejections);
}

#[test]
fn of_bindings() {
    use role_bindings::{Command, Rejection, Reply};
    let role = PlatformRole::Auditor;
    let bind = Command::Bind { subject: "ann".into(), role, reason: text() };
    let (_, reply) = decided::<RoleBindings>(None, bind.clone(), &user("root", &[TokenRole::Admin]), ALLOCATION);
    let commands = vec![
        bind,
        Command::Revoke { role, reason: Some(text()) },
        Command::Revoke { role, reason: None },
        Command::Tick,
    ];
    survives::<RoleBindings>(commands, [reply, Reply::Done], [Rejection::NotBound]);
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
fn of_the_health_rules() {
    use domain::finding::{CodePattern, FindingCause, FindingClass, Judgement, OverrideFault, Repair, RuleOverride};
    use domain::health_rules::{Command, HealthRules, Rejection, Reply};
    let pattern = CodePattern::parse("xid/14*").unwrap();
    let judgement = Judgement {
        pattern: pattern.clone(),
        classes: [FindingClass::Evacuate, FindingClass::Warn].into(),
        cause: FindingCause::Hardware,
        repair: Repair::Operator,
        tenant_message: text(),
    };
    let written = RuleOverride { judgement: judgement.clone(), reason: text(), written_by: text(), written_at: at() };
    let commands = vec![
        Command::Write { judgement: Box::new(judgement), reason: text() },
        Command::TakeBack { pattern: pattern.clone(), reason: text() },
        Command::Tick,
    ];
    let faults = [
        OverrideFault::WithoutClass,
        OverrideFault::CausedByTenants { rows: vec![text()] },
        OverrideFault::WithoutMessage,
    ];
    let refused = faults.into_iter().map(|fault| Rejection::Refused { fault });
    let others = [Rejection::NotFound, Rejection::NotSet { pattern }, Rejection::TooMany { limit: 100 }];
    let rejections: Vec<_> = refused.chain(others).collect();
    survives::<HealthRules>(commands, [Reply::Written { written: Box::new(written) }, Reply::Done], rejections);
}

#[test]
fn of_a_rollout() {
    use domain::rollout::{
        Command, CommandName, Fact, FeedPosition, NodeSelector, NodesPage, PhaseName, Rejection, Reply, Request,
        Rollout, RolloutCandidate, RolloutOrder,
    };
    use domain::rollout_outcome::{RolloutOutcome, SkipReason};
    let order = RolloutOrder {
        digest: digest(),
        canary: 1,
        max_unavailable: 2,
        selector: NodeSelector {
            sku_id: Some(domain::SkuId(ALLOCATION)),
            region_code: Some(text()),
            node_ids: Some([NODE].into()),
        },
        reason: text(),
    };
    let create = Request::Create { order: Box::new(order) };
    let (created, reply) = decided::<Rollout>(None, create.clone(), &ann(), ROLLOUT.0);
    let position = FeedPosition { created_at: at(), node_id: NODE };
    let nodes = vec![
        RolloutCandidate { node_id: NODE, skip: None },
        RolloutCandidate { node_id: NODE, skip: Some(SkipReason::Offline) },
    ];
    let page = |after, next| Fact::NodesFound { page: Box::new(NodesPage { after, nodes: nodes.clone(), next }) };
    let (running, _) = decided(Some(&created), page(None, Some(position)), &crate::testing::worker(), ROLLOUT.0);
    let stop = Fact::NodeEnded { node_id: NODE, outcome: RolloutOutcome::Failed { reason: text() } };
    let (stopped, _) = decided(Some(&running), stop.clone(), &crate::testing::worker(), ROLLOUT.0);
    let skips = SkipReason::ALL.iter().map(|reason| RolloutOutcome::Skipped { reason: *reason });
    let ended = skips.chain([RolloutOutcome::Updated]).map(|outcome| Fact::NodeEnded { node_id: NODE, outcome });
    let others = [
        create,
        Request::Pause { reason: text() },
        Request::Resume { reason: text() },
        Request::Abort { reason: text() },
    ];
    let commands: Vec<Command> = ended
        .chain([page(None, Some(position)), page(Some(position), None), stop])
        .map(Command::from)
        .chain(others.map(Command::from))
        .chain([Command::TICK])
        .collect();
    let replies = [reply, Reply::Rollout { rollout: Box::new(stopped) }, Reply::Done];
    let rejections = [
        Rejection::NotFound,
        Rejection::Exists,
        Rejection::OtherUnfinished { rollout_id: ROLLOUT },
        Rejection::WrongState { state: PhaseName::Stopped, command: CommandName::Pause },
    ];
    survives::<Rollout>(commands, replies, rejections);
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
        Rejection::NotBuilt { key: low, value: values[1].clone() },
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
fn of_a_principal() {
    let Principal::Caller(caller) = user("ann", &[TokenRole::User, TokenRole::Admin]) else { unreachable!() };
    let from = Precondition { entity: ALLOCATION, version: 3 };
    let grant = Some(Grant { roles: [PlatformRole::Auditor].into(), from });
    let permit = authorize(&Principal::Caller(CallerIdentity { grant, ..caller }), Action::Rent).unwrap();
    let origin = RequestOrigin::untraced("c").traced(Some("00-trace".into()), Some("vendor=1".to_owned()));
    let asked = CommandContext::from_origin(&permit, origin, at()).with_key(key("k")).urgent();
    let bytes = serde_json::to_vec(&asked).unwrap();
    let back: CommandContext = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(format!("{back:?}"), format!("{asked:?}"));
}

#[test]
fn of_a_service_account() {
    use domain::service_account::{Command, Rejection, Reply, ServiceAccount};
    let create = Command::Create { name: "ci".into(), roles: [TokenRole::User, TokenRole::Admin].into() };
    let root = user("root", &[TokenRole::Admin]);
    let (_, reply) = decided::<ServiceAccount>(None, create.clone(), &root, ALLOCATION);
    let key = domain::ServiceAccountKeyId(ALLOCATION);
    let commands =
        vec![create, Command::AddKey { sha256: [7; 32] }, Command::RevokeKey { key }, Command::Delete, Command::Tick];
    let rejections = [
        Rejection::NotFound,
        Rejection::KeyNotFound,
        Rejection::Exists,
        Rejection::RolesNotHeld,
        Rejection::TooManyKeys { limit: 5 },
    ];
    survives::<ServiceAccount>(commands, [reply, Reply::Key { id: key, created_at: at() }, Reply::Done], rejections);
}

#[test]
fn of_a_service_account_as_principal() {
    let Principal::Caller(owner) = ann() else { panic!("ann is a person") };
    let service_account = Some(domain::ServiceAccountId(ALLOCATION));
    let permit =
        authorize(&Principal::Caller(domain::authz::CallerIdentity { service_account, ..owner }), Action::Rent)
            .unwrap();
    let bytes = serde_json::to_vec(&CommandContext::new(&permit, "c", at())).unwrap();
    let back: CommandContext = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(back.by.to_string(), format!("service-account:{ALLOCATION}"));
    // It is still a service account at the other member: its rights did not grow in transit.
    assert!(authorize(&back.by, Action::KeepServiceAccounts).is_err());
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
