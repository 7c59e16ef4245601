//! Nodes, and what is decided about them: their SKUs, their health rules, rollouts of their agent.

use super::*;
use domain::hardware::GpuLocality;
use domain::node::{
    self, AgentContact, AgentTask, CertificateRecord, Enrollment, EnrollmentTokenFault, FindingAcceptance,
    FindingReport, LastHeartbeat, Node, NodeHealth, NodeTask, NodeTaskPhase, OrderedImage, PendingTask, ProbeOutcome,
    ProviderReport, Registration, ReportedFinding, ReportedGpu, ReportedInventory, ReportedSystem, TaskKind,
    TaskOutcome, TenantSlot,
};
use domain::sku::{self, Sku};
use domain::validation::{ValidationLevel, ValidationMinimums};
use domain::{FindingId, RolloutId, TaskId, TaskType, TokenId};

const ROLLOUT: RolloutId = RolloutId(Uuid::from_u128(0x20));

fn expected_hardware() -> domain::hardware::ExpectedHardware {
    domain::hardware::ExpectedHardware {
        cpu_model: Some(text()),
        cpu_cores: Some(64),
        memory_mib: Some(512_000),
        storage_gib: Some(1_000),
        driver_version_min: "570.86.15".parse().ok(),
    }
}

fn digest() -> domain::PackageDigest {
    format!("sha256:{}", "0f".repeat(32)).parse().unwrap()
}

fn update() -> node::AgentUpdate {
    node::AgentUpdate { digest: digest(), force: true, commit_seconds: 120, rollout_id: Some(ROLLOUT) }
}

fn inventory() -> ReportedInventory {
    ReportedInventory {
        gpus: vec![ReportedGpu {
            index: 0,
            uuid: "GPU-0".into(),
            model: "H100".into(),
            memory_mib: u64::MAX,
            locality: GpuLocality::default(),
        }],
        cpu_model: Some(text()),
        driver_version: Some(text()),
        system: Some(ReportedSystem { machine_id: Some(text()), image_digest: None }),
        tenant_devices: vec![text()],
        ..node_fixture::reported_inventory("", 0)
    }
}

fn registration() -> Registration {
    let mut registration = node_fixture::registration(SkuId(Uuid::from_u128(1)), 1);
    let sold = domain::hardware::SoldMachine { cpu_cores: 64, memory_mib: 512_000, storage_gib: 4_000 };
    registration.sku.machine = Some(sold);
    registration
}

fn node_commands() -> Vec<node::Command> {
    use node::{Command, Fact, Instruction, Request};
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
        session: None,
        last_heartbeat: Some(LastHeartbeat { at: at(), overdue_at: at() }),
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
        Request::ResetGpu { gpu_uuid: text(), reason: text() }.into(),
        Instruction::UpdateForRollout { rollout_id: ROLLOUT, digest: digest(), soaks: true, includes_held: true }
            .into(),
        Instruction::CheckForRollout { rollout_id: ROLLOUT }.into(),
        Request::Report {
            serial: "0a".into(),
            task_id: TaskId(ALLOCATION),
            attempt: 2,
            verdict: failed,
            output: None,
            unproved: None,
        }
        .into(),
        Request::Report {
            serial: "0a".into(),
            task_id: TaskId(ALLOCATION),
            attempt: 2,
            verdict: TaskOutcome::Succeeded { proof: Some(TENANT) },
            output: Some(json!({ "deep": [null, { "a": -1.5 }] })),
            unproved: Some(Box::new(node::ProofGap {
                checked_at: at(),
                gpus: [("GPU-1".into(), "lost".into())].into(),
            })),
        }
        .into(),
        Instruction::Reserve {
            allocation_id: TENANT,
            gpu_count: 1,
            keys: request().ssh_keys,
            revision: 1,
            reimages: true,
        }
        .into(),
        Instruction::ReconcileLogins { allocation_id: TENANT, revision: 2, keys: request().ssh_keys }.into(),
        Instruction::Unreserve { allocation_id: TENANT }.into(),
        Instruction::Provision { allocation_id: TENANT, deadline_at: at() }.into(),
        Instruction::Clean { allocation_id: TENANT, attempt: 1, deadline_at: at() }.into(),
        Instruction::MarkReleaseFailed { allocation_id: TENANT, attempt: 1 }.into(),
        Instruction::Fence { allocation_id: TENANT, attempt: 1 }.into(),
        Instruction::Abandon { allocation_id: TENANT }.into(),
        Request::Reimage { reason: text() }.into(),
        Fact::MachineTokenMade { token_id: TokenId(ALLOCATION), token_sha256: [4; 32], image: None }.into(),
        Fact::MachineTokenMade {
            token_id: TokenId(ALLOCATION),
            token_sha256: [4; 32],
            image: Some(OrderedImage { digest: Some(text()) }),
        }
        .into(),
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
        Rejection::GpuUnknown { gpu_uuid: text(), reported: vec![text()] },
        Rejection::GpuNotReset { gpu_uuid: text(), why: text() },
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
    node.machine.inventory = Some(inventory());
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
    node.tenancy.holds.insert(TENANT, hold);
    node.tenancy.fenced_by.insert(TENANT);
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
            gpu_uuid: None,
            phase,
        };
        node.tasks.by_id.insert(TaskId(Uuid::from_u128(n as u128)), task);
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
            gpu_uuid: None,
        }),
    ];
    let replies = [
        reply,
        Reply::Node { node: Box::new(node.clone()) },
        Reply::Task { task_id: TaskId(ALLOCATION), node: Box::new(node) },
        Reply::TokenIssued { expires_at: at() },
        Reply::Enrolled { identity_generation: 1, recoveries_left: 5 },
        Reply::Work { orders },
        Reply::HeartbeatAccepted { next_heartbeat_seconds: 30, accepted: Vec::new() },
        Reply::HeartbeatAccepted {
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
    let allowed_regions = vec!["eu".into(), "us".into()];
    let spec = SkuSpec { interconnect: Some("nvlink".into()), allowed_regions, ..node_fixture::sku_spec() };
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
            if_version: Some(7),
        },
        Command::Revise {
            price: None,
            allowed_regions: None,
            expected_hardware: None,
            validation: None,
            if_version: None,
        },
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
        Rejection::ApprovedBefore { change: sku::StatusChange::Activate, missing: PlatformRole::PlatformOperations },
        Rejection::ReviewMissing { field: sku::ReviewText::ImpactReview },
        Rejection::Moved,
        Rejection::VersionDiffers { current: 7 },
    ];
    survives::<Sku>(commands, [reply], rejections);
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
        soak_seconds: 600,
        includes_held: true,
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
    let stop = Fact::NodeEnded { node_id: NODE, outcome: RolloutOutcome::Failed { reason: code() } };
    let (stopped, _) = decided(Some(&running), stop.clone(), &crate::testing::worker(), ROLLOUT.0);
    let skips = SkipReason::ALL.iter().map(|reason| RolloutOutcome::Skipped { reason: *reason });
    let ended = skips.chain([RolloutOutcome::Updated]).map(|outcome| Fact::NodeEnded { node_id: NODE, outcome });
    let soaked = [None, Some(code())].map(|fault| Fact::NodeSoaked { node_id: NODE, fault });
    let updated = Fact::NodeEnded { node_id: NODE, outcome: RolloutOutcome::Updated };
    let (soaking, _) = decided(Some(&running), updated, &crate::testing::worker(), ROLLOUT.0);
    let others = [
        create,
        Request::Pause { reason: text() },
        Request::Resume { reason: text() },
        Request::Abort { reason: text() },
    ];
    let commands: Vec<Command> = ended
        .chain(soaked)
        .chain([page(None, Some(position)), page(Some(position), None), stop])
        .map(Command::from)
        .chain(others.map(Command::from))
        .chain([Command::TICK])
        .collect();
    let shown = [stopped, soaking].map(|rollout| Reply::Rollout { rollout: Box::new(rollout) });
    let replies = shown.into_iter().chain([reply, Reply::Done]);
    let rejections = [
        Rejection::NotFound,
        Rejection::Exists,
        Rejection::OtherUnfinished { rollout_id: ROLLOUT },
        Rejection::WrongState { state: PhaseName::Stopped, command: CommandName::Pause },
    ];
    survives::<Rollout>(commands, replies, rejections);
}
