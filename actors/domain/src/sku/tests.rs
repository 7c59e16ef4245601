#![allow(clippy::unwrap_used)]

use super::*;
use crate::authz::{Caller, Grant, Principal, Role, authorize};
use crate::commit::Footing;
use crate::invariant::i8_what_is_transient_has_an_end;
use crate::machine::Command as _;
use crate::policy::PolicyBook;
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
    Grant { roles: roles.iter().copied().collect(), from: Footing { entity: Uuid::from_u128(9), version: 3 } }
}

fn person(name: &str, roles: &[PlatformRole]) -> Principal {
    Principal::Caller(Caller {
        user_id: name.into(),
        roles: [Role::Admin].into(),
        org_id: None,
        project_id: None,
        plan: None,
        grant: Some(grant(roles)),
        service_account: None,
    })
}

fn decide(state: Option<&Sku>, by: &Principal, command: Command, now: i64) -> Result<Step<Sku>, Rejection> {
    let policy = PolicyBook::default();
    let id = Uuid::from_u128(1);
    Sku::decide(
        state,
        command,
        &Ctx {
            now: at(now),
            policy: &policy,
            by,
            correlation_id: "c",
            seed: 7,
            id,
            version: VERSION,
            trace: crate::machine::Trace::default(),
        },
    )
}

fn admin() -> Principal {
    person("root", &[])
}

fn create() -> Command {
    let spec = Spec {
        name: "h100x4".into(),
        gpu_vendor: "nvidia".into(),
        gpu_model: "H100".into(),
        gpu_memory_mib: 80_000,
        gpu_count: 4,
        cpu_model: "x".into(),
        cpu_cores: 64,
        memory_mib: 512_000,
        storage_gib: 4_000,
        interconnect: None,
        allowed_regions: vec!["eu".into()],
    };
    Command::Create { spec: Box::new(spec), price: Price::new("EUR", 100).unwrap() }
}

fn sku(status: Status) -> Sku {
    Sku { status, ..decide(None, &admin(), create(), 0).unwrap().next.unwrap() }
}

fn dearer() -> Command {
    Command::Revise { price: Some(Price::new("EUR", 200).unwrap()), allowed_regions: None }
}

/// An approval of someone who sees nobody use the SKU, and the first approver's roles as they were.
fn approves(change: Change) -> Approve {
    Approve {
        change,
        reason: "r".into(),
        role: None,
        impact_review: None,
        rollback_plan: None,
        seen: Seen { version: VERSION, in_use: InUse::default(), first: Some(grant(BOTH)) },
    }
}

fn approve(sku: &Sku, by: &Principal, given: Approve, now: i64) -> Result<Step<Sku>, Rejection> {
    decide(Some(sku), by, Command::Approve(Box::new(given)), now)
}

/// The SKU after somebody in `platform_operations` has approved.
fn waiting(status: Status, change: Change) -> Sku {
    approve(&sku(status), &person("ann", &[OPERATIONS]), approves(change), 0).unwrap().next.unwrap()
}

fn outcome(step: Result<Step<Sku>, Rejection>) -> String {
    match step {
        Err(rejection) => format!("refused: {rejection}"),
        Ok(Step { next: None, .. }) => "stays".to_owned(),
        Ok(Step { next: Some(next), events, audit, .. }) => {
            let kept = serde_json::to_string(&next).unwrap();
            assert_eq!(serde_json::from_str::<Sku>(&kept).unwrap(), next);
            assert!(i8_what_is_transient_has_an_end(&next, next.pending.is_some()));
            let said: Vec<_> = events.iter().map(Event::subject).collect();
            let audited: Vec<_> = audit.iter().map(|audit| audit.action.as_str()).collect();
            let waits = next.pending.as_ref().map_or("nothing", |pending| pending.first.change.name());
            format!("-> {}, waits for {waits} | {} | audit {}", next.state(), said.join(", "), audited.join(", "))
        }
    }
}

#[test]
fn every_command_in_every_status_does_what_was_reviewed() {
    let mut table = String::new();
    let mut states: Vec<_> = [Status::Draft, Status::Active, Status::Deprecated, Status::Inactive]
        .into_iter()
        .map(|status| (status.name().to_owned(), sku(status)))
        .collect();
    for (status, change) in [
        (Status::Draft, Change::Activate),
        (Status::Active, Change::Deprecate),
        (Status::Active, Change::Deactivate),
        (Status::Deprecated, Change::Deactivate),
        (Status::Inactive, Change::Activate),
    ] {
        states.push((format!("{} ({} approved)", status.name(), change.name()), waiting(status, change)));
    }
    for (name, state) in &states {
        let commands = [create(), dearer(), Command::Tick].map(|command| (command.name(), admin(), command));
        let approvals = Change::ALL
            .map(|change| (change.name(), person("bob", &[OWNER]), Command::Approve(Box::new(approves(change)))));
        for (what, by, command) in commands.into_iter().chain(approvals) {
            writeln!(table, "{name} {what}: {}", outcome(decide(Some(state), &by, command, 1))).unwrap();
        }
    }
    insta::assert_snapshot!(table);
}

#[test]
fn what_does_not_exist_can_only_be_created() {
    assert_eq!(decide(None, &admin(), dearer(), 0).err(), Some(Rejection::NotFound));
    assert_eq!(decide(None, &admin(), Command::Tick, 0).err(), Some(Rejection::NotFound));
    let created = decide(None, &admin(), create(), 0).unwrap().next.unwrap();
    assert_eq!((created.state(), created.keys().unique_name.as_deref()), ("draft", Some("h100x4")));
}

#[test]
fn a_new_price_is_a_new_version_and_the_same_price_is_none() {
    let revised = decide(Some(&sku(Status::Active)), &admin(), dearer(), 5).unwrap().next.unwrap();
    let versions: Vec<_> =
        revised.prices.iter().map(|version| (version.price.amount_minor_per_gpu_hour, version.from)).collect();
    assert_eq!(versions, [(100, at(0)), (200, at(5))]);
    let again = decide(Some(&revised), &admin(), dearer(), 9).unwrap().next.unwrap();
    assert_eq!(again.prices, revised.prices);
}

#[test]
fn two_people_in_two_roles_activate_a_sku() {
    let first = waiting(Status::Draft, Change::Activate);
    assert_eq!((first.state(), first.approvals.len()), ("draft", 0));
    let step = approve(&first, &person("bob", &[OWNER]), approves(Change::Activate), 3).unwrap();
    assert_eq!(step.rests_on, [grant(BOTH).from], "the first one's role must not be revoked meanwhile");
    let active = step.next.unwrap();
    let given: Vec<_> =
        active.approvals.iter().map(|approval| (approval.user_id.as_str(), approval.role, approval.at)).collect();
    assert_eq!(given, [("ann", OPERATIONS, at(0)), ("bob", OWNER, at(3))]);
    assert_eq!((active.state(), active.pending.clone()), ("active", None));
    assert!(active.deadline().is_none());
}

#[test]
fn one_person_is_one_approval_in_whatever_role() {
    let ann = person("ann", BOTH);
    for role in [None, Some(OPERATIONS), Some(OWNER)] {
        let first = approve(&sku(Status::Draft), &ann, Approve { role, ..approves(Change::Activate) }, 0);
        let first = first.unwrap().next.unwrap();
        for role in [None, Some(OPERATIONS), Some(OWNER)] {
            let again = approve(&first, &ann, Approve { role, ..approves(Change::Activate) }, 1).unwrap();
            assert!(again.next.is_none() && again.reply.pending.is_some(), "{role:?}");
        }
    }
}

#[test]
fn two_people_in_one_role_are_not_enough() {
    let first = waiting(Status::Draft, Change::Activate);
    let second = approve(&first, &person("bob", &[OPERATIONS]), approves(Change::Activate), 1).unwrap();
    assert!(second.next.is_none());
}

#[test]
fn who_holds_both_roles_gives_the_one_that_is_missing_or_that_they_name() {
    let role_of = |state: &Sku, given: Approve| {
        let next = approve(state, &person("bob", BOTH), given, 1).unwrap().next;
        next.map(|next| next.pending.map_or_else(|| next.approvals[1].role, |pending| pending.first.role))
    };
    assert_eq!(role_of(&sku(Status::Draft), approves(Change::Activate)), Some(OPERATIONS));
    let named = Approve { role: Some(OWNER), ..approves(Change::Activate) };
    assert_eq!(role_of(&sku(Status::Draft), named.clone()), Some(OWNER));
    let first = waiting(Status::Draft, Change::Activate);
    assert_eq!(role_of(&first, approves(Change::Activate)), Some(OWNER));
    assert_eq!(role_of(&first, Approve { role: Some(OPERATIONS), ..named }), None, "that role has spoken");
}

#[test]
fn nobody_approves_in_a_role_that_they_do_not_hold() {
    let draft = sku(Status::Draft);
    let ann = person("ann", &[OPERATIONS, PlatformRole::Auditor]);
    for role in [OWNER, PlatformRole::Auditor] {
        let given = Approve { role: Some(role), ..approves(Change::Activate) };
        assert_eq!(approve(&draft, &ann, given, 0).err(), Some(Rejection::RoleNotHeld { role: Some(role) }));
    }
    let refused = approve(&draft, &admin(), approves(Change::Activate), 0);
    assert_eq!(refused.err(), Some(Rejection::RoleNotHeld { role: None }));
}

#[test]
fn a_sku_in_use_is_deactivated_with_both_texts_from_either() {
    let in_use = |nodes, allocations| InUse { nodes, allocations };
    let given = |in_use: InUse, impact: bool, plan: bool| {
        let text = |given: bool| given.then(|| "text".to_owned());
        let seen = Seen { in_use, ..approves(Change::Deactivate).seen };
        let (impact_review, rollback_plan) = (text(impact), text(plan));
        Approve { impact_review, rollback_plan, seen, ..approves(Change::Deactivate) }
    };
    let ann = person("ann", &[OPERATIONS]);
    let missing = |state: &Sku, by: &Principal, given: Approve| match approve(state, by, given, 1) {
        Err(Rejection::ReviewMissing { field }) => field,
        other => outcome(other),
    };
    let active = sku(Status::Active);
    assert_eq!(missing(&active, &ann, given(in_use(1, 0), false, false)), "impact_review");
    assert_eq!(missing(&active, &ann, given(in_use(0, 1), true, false)), "rollback_plan");
    assert_eq!(missing(&active, &ann, given(in_use(2, 2), false, true)), "impact_review");
    let first = approve(&active, &ann, given(in_use(2, 2), true, true), 1).unwrap().next.unwrap();
    let bob = person("bob", &[OWNER]);
    let both = approve(&first, &bob, given(in_use(2, 2), false, false), 2).unwrap();
    assert_eq!(both.audit[0].metadata["approval"]["in_use"]["nodes"], 2);
    assert_eq!(both.next.unwrap().state(), "inactive");
    // It came into use between the two.
    let unused = approve(&active, &ann, given(in_use(0, 0), false, false), 1).unwrap().next.unwrap();
    assert_eq!(missing(&unused, &bob, given(in_use(1, 0), false, false)), "impact_review");
    assert_eq!(approve(&unused, &bob, given(in_use(1, 0), true, true), 1).unwrap().next.unwrap().state(), "inactive");
    // What runs goes on where a SKU is deprecated, so there is nothing to review.
    let seen = Seen { in_use: in_use(2, 2), ..approves(Change::Deprecate).seen };
    assert!(approve(&active, &ann, Approve { seen, ..approves(Change::Deprecate) }, 1).is_ok());
}

#[test]
fn an_approval_waits_until_its_end_and_not_longer() {
    let first = waiting(Status::Draft, Change::Activate);
    let deadline = first.deadline().unwrap();
    assert_eq!(deadline.at, at(TTL));
    assert_eq!(deadline.reason, "to activate it, a second person in role inventory_owner has to approve");
    assert!(decide(Some(&first), &admin(), Command::Tick, TTL - 1).unwrap().next.is_none());
    let expired = decide(Some(&first), &admin(), Command::Tick, TTL).unwrap();
    assert_eq!((expired.audit[0].action, expired.next.unwrap().pending), (AuditAction::SkusExpireApproval, None));
    // Nor does it count where the tick is late: this approval is a first one.
    let late = approve(&first, &person("bob", &[OWNER]), approves(Change::Activate), TTL).unwrap().next.unwrap();
    assert_eq!((late.state(), late.pending.unwrap().first.user_id), ("draft", "bob".to_owned()));
}

#[test]
fn an_approval_in_a_role_that_was_revoked_does_not_count() {
    let first = waiting(Status::Draft, Change::Activate);
    for now in [None, Some(grant(&[])), Some(grant(&[OWNER]))] {
        let seen = Seen { first: now, ..approves(Change::Activate).seen };
        let step =
            approve(&first, &person("bob", &[OWNER]), Approve { seen, ..approves(Change::Activate) }, 1).unwrap();
        assert_eq!(step.audit[0].metadata["replaced"]["user_id"], "ann");
        let next = step.next.unwrap();
        assert_eq!((next.state(), next.pending.unwrap().first.user_id), ("draft", "bob".to_owned()));
    }
}

#[test]
fn what_was_looked_at_beside_another_version_is_looked_at_again() {
    let seen = Seen { version: VERSION - 1, ..approves(Change::Activate).seen };
    let given = Approve { seen, ..approves(Change::Activate) };
    assert_eq!(approve(&sku(Status::Draft), &person("bob", BOTH), given, 1).err(), Some(Rejection::Moved));
}

#[test]
fn a_revision_withdraws_what_was_approved_before_it() {
    let revised = decide(Some(&waiting(Status::Draft, Change::Activate)), &admin(), dearer(), 1).unwrap();
    assert_eq!(revised.audit[0].metadata["withdrawn"]["user_id"], "ann");
    assert_eq!(revised.next.unwrap().pending, None);
    let same = Command::Revise { price: None, allowed_regions: None };
    let same = decide(Some(&waiting(Status::Draft, Change::Activate)), &admin(), same, 1).unwrap();
    assert!(same.next.unwrap().pending.is_some());
}

proptest! {
    /// Whatever is asked by whomever in whatever order: no status changes without two people in two roles.
    #[test]
    fn no_status_changes_without_two_people_in_two_roles(
        moves in prop::collection::vec((0usize..4, 0usize..4, 0usize..3, 0usize..4, 0i64..TTL), 0..40)
    ) {
        let holds: [&[PlatformRole]; 4] = [BOTH, &[OPERATIONS], &[OWNER], &[]];
        let (mut sku, mut now) = (sku(Status::Draft), 0);
        for (who, holding, change, asked, pause) in moves {
            now += pause / 4;
            let by = person(["ann", "bob", "eve", "joe"][who], holds[holding]);
            let command = match asked {
                0 => dearer(),
                1 => Command::Tick,
                _ => Command::Approve(Box::new(approves(Change::ALL[change]))),
            };
            let allowed = command.action() != Action::ApproveSkus || authorize(&by, Action::ApproveSkus).is_ok();
            let Ok(Step { next: Some(next), .. }) = decide(Some(&sku), &by, command, now) else { continue };
            prop_assert!(allowed);
            if next.status != sku.status {
                let [first, second] = next.approvals.as_slice() else { panic!("not two approvals") };
                prop_assert!(first.user_id != second.user_id && first.role != second.role);
                prop_assert!(second.at - first.at < chrono::TimeDelta::seconds(TTL));
                prop_assert_eq!(second.change.to(), next.status);
            }
            prop_assert!(i8_what_is_transient_has_an_end(&next, next.pending.is_some()));
            sku = next;
        }
    }
}
