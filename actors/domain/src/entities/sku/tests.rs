use super::*;
use crate::authz::{CallerIdentity, Grant, Principal, TokenRole, authorize};
use crate::node_fixture;
use crate::policy::PolicyBook;
use crate::precondition::Precondition;
use crate::state_machine::Command as _;
use proptest::prelude::*;
use std::fmt::Write as _;
use uuid::Uuid;

const OPERATIONS: PlatformRole = PlatformRole::PlatformOperations;
const OWNER: PlatformRole = PlatformRole::InventoryOwner;
const BOTH: &[PlatformRole] = &[OPERATIONS, OWNER];
/// Policy `sku.approval_ttl_seconds`.
const TTL: i64 = 86_400;
const VERSION: i64 = 7;

fn at(second: i64) -> Timestamp {
    Timestamp::from_timestamp(second, 0).unwrap()
}

fn grant(roles: &[PlatformRole]) -> Grant {
    Grant { roles: roles.iter().copied().collect(), from: Precondition { entity: Uuid::from_u128(9), version: 3 } }
}

fn person(name: &str, roles: &[PlatformRole]) -> Principal {
    Principal::Caller(CallerIdentity { grant: Some(grant(roles)), ..CallerIdentity::new(name, [TokenRole::Admin]) })
}

fn decide(state: Option<&Sku>, by: &Principal, command: Command, now: i64) -> Result<Transition<Sku>, Rejection> {
    let policy = PolicyBook::default();
    let id = Uuid::from_u128(1);
    Sku::decide(
        state,
        command,
        &TransitionContext { seed: 7, id, version: VERSION, ..TransitionContext::in_test(at(now), &policy, by) },
    )
}

fn admin() -> Principal {
    person("root", &[])
}

fn create() -> Command {
    Command::Create {
        spec: Box::new(node_fixture::sku_spec()),
        price: Price::new("EUR", 100).unwrap(),
        validation: ValidationMinimums::default(),
    }
}

fn sku(status: CatalogStatus) -> Sku {
    Sku { status, ..decide(None, &admin(), create(), 0).unwrap().next.unwrap() }
}

fn dearer() -> Command {
    Command::Revise {
        price: Some(Price::new("EUR", 200).unwrap()),
        allowed_regions: None,
        expected_hardware: None,
        validation: None,
        if_version: None,
    }
}

/// An approval of an unused SKU, with the first approver's roles.
fn approves(change: StatusChange) -> ApprovalRequest {
    ApprovalRequest {
        change,
        reason: "r".into(),
        role: None,
        impact_review: None,
        rollback_plan: None,
        seen: ApprovalContext { version: VERSION, in_use: SkuUsage::default(), first: Some(grant(BOTH)) },
    }
}

fn approve(sku: &Sku, by: &Principal, given: ApprovalRequest, now: i64) -> Result<Transition<Sku>, Rejection> {
    decide(Some(sku), by, Command::Approve(Box::new(given)), now)
}

/// The SKU after an approval in `platform_operations`.
fn waiting(status: CatalogStatus, change: StatusChange) -> Sku {
    approve(&sku(status), &person("ann", &[OPERATIONS]), approves(change), 0).unwrap().next.unwrap()
}

fn outcome(step: Result<Transition<Sku>, Rejection>) -> String {
    match step {
        Err(rejection) => format!("refused: {rejection}"),
        Ok(Transition { next: None, .. }) => "stays".to_owned(),
        Ok(Transition { next: Some(next), events, audit, .. }) => {
            let stored = serde_json::to_string(&next).unwrap();
            assert_eq!(serde_json::from_str::<Sku>(&stored).unwrap(), next);
            assert!(next.has_deadline_where_transient());
            let published: Vec<_> = events.iter().map(Event::subject).collect();
            let audited: Vec<_> = audit.iter().map(|audit| audit.action.as_str()).collect();
            let waits = next.pending.as_ref().map_or("nothing", |pending| pending.first.change.name());
            format!("-> {}, waits for {waits} | {} | audit {}", next.state(), published.join(", "), audited.join(", "))
        }
    }
}

#[test]
fn every_command_in_every_status_does_what_was_reviewed() {
    let mut table = String::new();
    let mut states: Vec<_> =
        [CatalogStatus::Draft, CatalogStatus::Active, CatalogStatus::Deprecated, CatalogStatus::Inactive]
            .into_iter()
            .map(|status| (status.name().to_owned(), sku(status)))
            .collect();
    for (status, change) in [
        (CatalogStatus::Draft, StatusChange::Activate),
        (CatalogStatus::Active, StatusChange::Deprecate),
        (CatalogStatus::Active, StatusChange::Deactivate),
        (CatalogStatus::Deprecated, StatusChange::Deactivate),
        (CatalogStatus::Inactive, StatusChange::Activate),
    ] {
        states.push((format!("{} ({} approved)", status.name(), change.name()), waiting(status, change)));
    }
    for (name, state) in &states {
        let commands = [create(), dearer(), Command::Tick].map(|command| (command.name(), admin(), command));
        let approvals = StatusChange::ALL
            .map(|change| (change.name(), person("bob", &[OWNER]), Command::Approve(Box::new(approves(change)))));
        for (what, by, command) in commands.into_iter().chain(approvals) {
            writeln!(table, "{name} {what}: {}", outcome(decide(Some(state), &by, command, 1))).unwrap();
        }
    }
    insta::assert_snapshot!(table);
}

#[test]
fn nonexistent_sku_can_only_be_created() {
    assert_eq!(decide(None, &admin(), dearer(), 0).err(), Some(Rejection::NotFound));
    assert_eq!(decide(None, &admin(), Command::Tick, 0).err(), Some(Rejection::NotFound));
    let created = decide(None, &admin(), create(), 0).unwrap().next.unwrap();
    assert_eq!((created.state(), created.keys().unique_name.as_deref()), ("draft", Some("h100x4")));
}

#[test]
fn a_new_price_is_a_new_version_and_the_same_price_is_none() {
    let revised = decide(Some(&sku(CatalogStatus::Active)), &admin(), dearer(), 5).unwrap().next.unwrap();
    let versions: Vec<_> =
        revised.prices.iter().map(|version| (version.price.amount_minor_per_gpu_hour, version.from)).collect();
    assert_eq!(versions, [(100, at(0)), (200, at(5))]);
    let repeated = decide(Some(&revised), &admin(), dearer(), 9).unwrap().next.unwrap();
    assert_eq!(repeated.prices, revised.prices);
}

#[test]
fn prices_and_approvals_of_a_sku_are_bounded() {
    let mut sku = sku(CatalogStatus::Active);
    for n in 1..=1000_i64 {
        let revise = Command::Revise {
            price: Some(Price::new("EUR", n + 1000).unwrap()),
            allowed_regions: None,
            expected_hardware: None,
            validation: None,
            if_version: None,
        };
        sku = decide(Some(&sku), &admin(), revise, n).unwrap().next.unwrap();
    }
    assert_eq!((sku.prices.len(), sku.price().unwrap().amount_minor_per_gpu_hour), (100, 2000));
    // The longest texts, in the longest characters.
    let texts = |role| ApprovalRequest {
        role: Some(role),
        impact_review: Some("\u{1f511}".repeat(4000)),
        rollback_plan: Some("\u{1f511}".repeat(4000)),
        reason: "\u{1f511}".repeat(500),
        ..approves(StatusChange::Deactivate)
    };
    for (name, role, change) in [
        ("ann", OPERATIONS, StatusChange::Deactivate),
        ("bob", OWNER, StatusChange::Deactivate),
        ("ann", OPERATIONS, StatusChange::Activate),
    ] {
        let given = ApprovalRequest { change, ..texts(role) };
        sku = approve(&sku, &person(name, BOTH), given, 2000).unwrap().next.unwrap();
    }
    assert_eq!((sku.approvals.len(), sku.pending.is_some()), (2, true));
    let size = serde_json::to_string(&sku).unwrap().len();
    assert!(size < Sku::SNAPSHOT_MOST / 4 * 3, "{size}");
}

#[test]
fn two_people_in_two_roles_activate_a_sku() {
    let first = waiting(CatalogStatus::Draft, StatusChange::Activate);
    assert_eq!((first.state(), first.approvals.len()), ("draft", 0));
    let step = approve(&first, &person("bob", &[OWNER]), approves(StatusChange::Activate), 3).unwrap();
    assert_eq!(step.requires, [grant(BOTH).from], "the first one's role must not be revoked meanwhile");
    let active = step.next.unwrap();
    let given: Vec<_> =
        active.approvals.iter().map(|approval| (approval.user_id.as_str(), approval.role, approval.at)).collect();
    assert_eq!(given, [("ann", OPERATIONS, at(0)), ("bob", OWNER, at(3))]);
    assert_eq!((active.state(), active.pending.clone()), ("active", None));
    assert!(active.deadline().is_none());
}

#[test]
fn one_person_gives_one_approval_in_any_role() {
    let ann = person("ann", BOTH);
    for role in [None, Some(OPERATIONS), Some(OWNER)] {
        let first =
            approve(&sku(CatalogStatus::Draft), &ann, ApprovalRequest { role, ..approves(StatusChange::Activate) }, 0);
        let first = first.unwrap().next.unwrap();
        for role in [None, Some(OPERATIONS), Some(OWNER)] {
            let repeated = approve(&first, &ann, ApprovalRequest { role, ..approves(StatusChange::Activate) }, 1);
            let given = first.pending.as_ref().unwrap().first.role;
            let missing = if given == OWNER { OPERATIONS } else { OWNER };
            let expected = Rejection::ApprovedBefore { change: StatusChange::Activate, missing };
            assert_eq!(repeated.err(), Some(expected), "{role:?}");
        }
    }
}

#[test]
fn two_people_in_one_role_are_not_enough() {
    let first = waiting(CatalogStatus::Draft, StatusChange::Activate);
    let second = approve(&first, &person("bob", &[OPERATIONS]), approves(StatusChange::Activate), 1);
    let expected = Rejection::ApprovedBefore { change: StatusChange::Activate, missing: OWNER };
    assert_eq!(second.err(), Some(expected));
}

#[test]
fn approver_with_both_roles_gives_the_missing_or_the_named_one() {
    let role_of = |state: &Sku, given: ApprovalRequest| {
        let next = approve(state, &person("bob", BOTH), given, 1).ok().and_then(|step| step.next);
        next.map(|next| next.pending.map_or_else(|| next.approvals[1].role, |pending| pending.first.role))
    };
    assert_eq!(role_of(&sku(CatalogStatus::Draft), approves(StatusChange::Activate)), Some(OPERATIONS));
    let named = ApprovalRequest { role: Some(OWNER), ..approves(StatusChange::Activate) };
    assert_eq!(role_of(&sku(CatalogStatus::Draft), named.clone()), Some(OWNER));
    let first = waiting(CatalogStatus::Draft, StatusChange::Activate);
    assert_eq!(role_of(&first, approves(StatusChange::Activate)), Some(OWNER));
    assert_eq!(role_of(&first, ApprovalRequest { role: Some(OPERATIONS), ..named }), None, "that role has spoken");
}

#[test]
fn approval_in_a_role_that_is_not_held_is_rejected() {
    let draft = sku(CatalogStatus::Draft);
    let ann = person("ann", &[OPERATIONS, PlatformRole::Auditor]);
    for role in [OWNER, PlatformRole::Auditor] {
        let given = ApprovalRequest { role: Some(role), ..approves(StatusChange::Activate) };
        assert_eq!(approve(&draft, &ann, given, 0).err(), Some(Rejection::RoleNotHeld { role: Some(role) }));
    }
    let refused = approve(&draft, &admin(), approves(StatusChange::Activate), 0);
    assert_eq!(refused.err(), Some(Rejection::RoleNotHeld { role: None }));
}

#[test]
fn a_sku_in_use_is_deactivated_with_both_texts_from_either() {
    let in_use = |nodes, allocations| SkuUsage { nodes, allocations };
    let given = |in_use: SkuUsage, impact: bool, plan: bool| {
        let text = |given: bool| given.then(|| "text".to_owned());
        let seen = ApprovalContext { in_use, ..approves(StatusChange::Deactivate).seen };
        let (impact_review, rollback_plan) = (text(impact), text(plan));
        ApprovalRequest { impact_review, rollback_plan, seen, ..approves(StatusChange::Deactivate) }
    };
    let ann = person("ann", &[OPERATIONS]);
    let missing = |state: &Sku, by: &Principal, given: ApprovalRequest| match approve(state, by, given, 1) {
        Err(Rejection::ReviewMissing { field }) => field.to_string(),
        other => outcome(other),
    };
    let active = sku(CatalogStatus::Active);
    assert_eq!(missing(&active, &ann, given(in_use(1, 0), false, false)), "impact_review");
    assert_eq!(missing(&active, &ann, given(in_use(0, 1), true, false)), "rollback_plan");
    assert_eq!(missing(&active, &ann, given(in_use(2, 2), false, true)), "impact_review");
    let first = approve(&active, &ann, given(in_use(2, 2), true, true), 1).unwrap().next.unwrap();
    let bob = person("bob", &[OWNER]);
    let both = approve(&first, &bob, given(in_use(2, 2), false, false), 2).unwrap();
    assert_eq!(both.audit[0].metadata["approval"]["in_use"]["nodes"], 2);
    assert_eq!(both.next.unwrap().state(), "inactive");
    // It came into use between the two approvals.
    let unused = approve(&active, &ann, given(in_use(0, 0), false, false), 1).unwrap().next.unwrap();
    assert_eq!(missing(&unused, &bob, given(in_use(1, 0), false, false)), "impact_review");
    assert_eq!(approve(&unused, &bob, given(in_use(1, 0), true, true), 1).unwrap().next.unwrap().state(), "inactive");
    // A deprecation does not affect running allocations, so there is nothing to review.
    let seen = ApprovalContext { in_use: in_use(2, 2), ..approves(StatusChange::Deprecate).seen };
    assert!(approve(&active, &ann, ApprovalRequest { seen, ..approves(StatusChange::Deprecate) }, 1).is_ok());
}

#[test]
fn approval_expires_at_its_deadline() {
    let first = waiting(CatalogStatus::Draft, StatusChange::Activate);
    let deadline = first.deadline().unwrap();
    assert_eq!(deadline.at, at(TTL));
    assert_eq!(deadline.reason, "to activate it, a second person in role inventory_owner has to approve");
    assert!(decide(Some(&first), &admin(), Command::Tick, TTL - 1).unwrap().next.is_none());
    let expired = decide(Some(&first), &admin(), Command::Tick, TTL).unwrap();
    assert_eq!((expired.audit[0].action, expired.next.unwrap().pending), (AuditAction::SkusExpireApproval, None));
    // It does not count even where the tick is late: this approval is a first one.
    let late = approve(&first, &person("bob", &[OWNER]), approves(StatusChange::Activate), TTL).unwrap().next.unwrap();
    assert_eq!((late.state(), late.pending.unwrap().first.user_id), ("draft", "bob".into()));
}

#[test]
fn an_approval_in_a_role_that_was_revoked_does_not_count() {
    let first = waiting(CatalogStatus::Draft, StatusChange::Activate);
    for now in [None, Some(grant(&[])), Some(grant(&[OWNER]))] {
        let seen = ApprovalContext { first: now, ..approves(StatusChange::Activate).seen };
        let step =
            approve(&first, &person("bob", &[OWNER]), ApprovalRequest { seen, ..approves(StatusChange::Activate) }, 1)
                .unwrap();
        assert_eq!(step.audit[0].metadata["replaced"]["user_id"], "ann");
        let next = step.next.unwrap();
        assert_eq!((next.state(), next.pending.unwrap().first.user_id), ("draft", "bob".into()));
    }
}

#[test]
fn context_of_another_version_is_rejected() {
    let seen = ApprovalContext { version: VERSION - 1, ..approves(StatusChange::Activate).seen };
    let given = ApprovalRequest { seen, ..approves(StatusChange::Activate) };
    assert_eq!(approve(&sku(CatalogStatus::Draft), &person("bob", BOTH), given, 1).err(), Some(Rejection::Moved));
}

#[test]
fn revision_of_another_version_is_refused_with_the_current_one() {
    let draft = sku(CatalogStatus::Draft);
    let revise = |if_version| {
        let Command::Revise { price, .. } = dearer() else { unreachable!() };
        let command =
            Command::Revise { price, allowed_regions: None, expected_hardware: None, validation: None, if_version };
        decide(Some(&draft), &admin(), command, 1).map(|step| step.next.is_some())
    };
    for (if_version, expected) in [
        (None, Ok(true)),
        (Some(VERSION), Ok(true)),
        (Some(VERSION - 1), Err(Rejection::VersionDiffers { current: VERSION })),
        (Some(VERSION + 1), Err(Rejection::VersionDiffers { current: VERSION })),
    ] {
        assert_eq!(revise(if_version), expected, "{if_version:?}");
    }
}

#[test]
fn a_revision_withdraws_what_was_approved_before_it() {
    let revised = decide(Some(&waiting(CatalogStatus::Draft, StatusChange::Activate)), &admin(), dearer(), 1).unwrap();
    assert_eq!(revised.audit[0].metadata["withdrawn"]["user_id"], "ann");
    assert_eq!(revised.next.unwrap().pending, None);
    let same = Command::Revise {
        price: None,
        allowed_regions: None,
        expected_hardware: None,
        validation: None,
        if_version: None,
    };
    let same = decide(Some(&waiting(CatalogStatus::Draft, StatusChange::Activate)), &admin(), same, 1).unwrap();
    assert!(same.next.unwrap().pending.is_some());
}

proptest! {
    /// Any commands of any callers in any order: no status changes without two people in two roles.
    #[test]
    fn no_status_changes_without_two_people_in_two_roles(
        moves in prop::collection::vec((0usize..4, 0usize..4, 0usize..3, 0usize..4, 0i64..TTL), 0..40)
    ) {
        let holds: [&[PlatformRole]; 4] = [BOTH, &[OPERATIONS], &[OWNER], &[]];
        let (mut sku, mut now) = (sku(CatalogStatus::Draft), 0);
        for (who, holding, change, asked, pause) in moves {
            now += pause / 4;
            let by = person(["ann", "bob", "eve", "joe"][who], holds[holding]);
            let command = match asked {
                0 => dearer(),
                1 => Command::Tick,
                _ => Command::Approve(Box::new(approves(StatusChange::ALL[change]))),
            };
            let allowed = command.action() != Action::ApproveSkus || authorize(&by, Action::ApproveSkus).is_ok();
            let Ok(Transition { next: Some(next), .. }) = decide(Some(&sku), &by, command, now) else { continue };
            prop_assert!(allowed);
            if next.status != sku.status {
                let [first, second] = next.approvals.as_slice() else { panic!("not two approvals") };
                prop_assert!(first.user_id != second.user_id && first.role != second.role);
                prop_assert!(second.at - first.at < chrono::TimeDelta::seconds(TTL));
                prop_assert_eq!(second.change.to(), next.status);
            }
            prop_assert!(next.has_deadline_where_transient());
            sku = next;
        }
    }
}

#[test]
fn expected_hardware_is_replaced_as_a_whole_and_every_process_reads_it_again() {
    use crate::hardware::ExpectedHardware;
    let expect = |expected: ExpectedHardware| Command::Revise {
        price: None,
        allowed_regions: None,
        expected_hardware: Some(Box::new(expected)),
        validation: None,
        if_version: None,
    };
    let cores = ExpectedHardware { cpu_cores: Some(64), ..ExpectedHardware::default() };
    let memory = ExpectedHardware { memory_mib: Some(512_000), ..ExpectedHardware::default() };
    let first = decide(Some(&sku(CatalogStatus::Active)), &admin(), expect(cores.clone()), 1).unwrap();
    assert_eq!(first.events.iter().map(Event::subject).collect::<Vec<_>>(), ["policy.invalidate.sku_hardware"]);
    assert_eq!(first.effects, [Effect::ReadPolicy]);
    assert_eq!(first.audit[0].metadata["expected_hardware"]["cpu_cores"], 64);
    let first = first.next.unwrap();
    let same = decide(Some(&first), &admin(), expect(cores), 2).unwrap();
    assert_eq!((same.events.len(), same.effects.len()), (0, 0));
    let second = decide(Some(&first), &admin(), expect(memory.clone()), 3).unwrap().next.unwrap();
    assert_eq!(second.spec.expected_hardware.as_deref(), Some(&memory));
    let none = decide(Some(&second), &admin(), expect(ExpectedHardware::default()), 4).unwrap();
    assert_eq!(none.next.unwrap().spec.expected_hardware, None);
    let dearer = decide(Some(&second), &admin(), dearer(), 5).unwrap().next.unwrap();
    assert_eq!(dearer.spec.expected_hardware.as_deref(), Some(&memory), "what a change does not name stays");
}

#[test]
fn changed_minimums_are_published_to_every_process_and_audited_and_the_same_ones_are_not() {
    let minimums = ValidationMinimums([(crate::validation::Measurement::Memory, 9)].into());
    let revise = |validation| Command::Revise {
        price: None,
        allowed_regions: None,
        expected_hardware: None,
        validation: Some(validation),
        if_version: None,
    };
    let draft = sku(CatalogStatus::Draft);
    let step = decide(Some(&draft), &admin(), revise(minimums.clone()), 1).unwrap();
    assert_eq!(step.events.iter().map(Event::subject).collect::<Vec<_>>(), ["policy.invalidate.sku_minimums"]);
    assert_eq!(step.effects, [Effect::ReadPolicy]);
    assert_eq!(step.audit[0].metadata["new_validation"], json!({ "memory_mib_per_second": 9 }));
    let set = step.next.unwrap();
    let same = decide(Some(&set), &admin(), revise(minimums.clone()), 2).unwrap();
    assert_eq!((same.events, same.effects), (vec![], vec![]));
    assert_eq!(decide(Some(&set), &admin(), dearer(), 3).unwrap().next.unwrap().validation, minimums, "it stays");
    let removed = decide(Some(&set), &admin(), revise(ValidationMinimums::default()), 4).unwrap();
    assert_eq!((removed.events.len(), removed.next.unwrap().validation.is_empty()), (1, true));
}
