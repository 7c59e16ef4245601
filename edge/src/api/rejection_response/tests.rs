//! Every refusal, as people read it.

use super::*;
use domain::money::Currency;
use domain::{
    AllocationId, SshKeyId, allocation, billing_account, key_set, node, payment, policy, policy_values,
    processor_event, role_bindings, service_account, sku, tenant, terminal_session,
};
use std::fmt::Write as _;
use uuid::Uuid;

fn eur() -> Currency {
    Currency::parse("EUR").unwrap()
}

/// A refusal that has its caller send the same request again is not stored for its `Idempotency-Key`: the repetition would get it again.
fn row(table: &mut String, name: &str, error: &ApiError) {
    let repeats = ["ask again.", "try again."].iter().any(|repeat| error.message().ends_with(repeat));
    let after_a_change = ["and ask again.", "then try again."].iter().any(|change| error.message().ends_with(change));
    assert!(!repeats || after_a_change || error.code().status().is_server_error(), "{name}: {error}");
    writeln!(table, "{name}: {} {} {}", error.code().status().as_u16(), error.code(), error.message()).unwrap();
}

#[test]
fn value_outside_a_policy_is_refused_with_its_key() {
    let refusals = [
        (allocation::Rejection::QueueSeconds { max: 7 }.explain(), PolicyKey::AllocationQueueMax),
        (tenant::Rejection::TooManyKeys { limit: 7 }.explain(), PolicyKey::SshKeyMaxPerUser),
        (tenant::Rejection::TooManyServiceAccounts { limit: 7 }.explain(), PolicyKey::AuthServiceAccountsPerUser),
        (tenant::Rejection::TooManyTerminals { limit: 7 }.explain(), PolicyKey::TerminalSessionsPerAllocation),
        (service_account::Rejection::TooManyKeys { limit: 7 }.explain(), PolicyKey::AuthServiceAccountKeysMax),
        (billing_account::Rejection::Amount { max: 7, currency: None }.explain(), PolicyKey::BillingAdjustmentMax),
        (billing_account::Rejection::TooLate { days: 7 }.explain(), PolicyKey::AllocationRefundWindow),
        (payment::Rejection::Amount { min: 1, max: 7, currency: None }.explain(), PolicyKey::BillingMaximumDeposit),
        (payment::Rejection::TooLate { days: 7 }.explain(), PolicyKey::AllocationRefundWindow),
    ];
    for (refusal, key) in refusals {
        let details = (&refusal.details()["policy_key"], &refusal.details()["limit"]);
        assert_eq!(details, (&serde_json::json!(key.name()), &serde_json::json!(7)), "{refusal}");
    }
}

#[test]
fn every_refusal_of_a_machine_says_what_to_do_next() {
    let id = Uuid::from_u128(7);
    let text = || "why".to_owned();
    let mut table = String::new();
    use node::{CommandName, PhaseName};
    let wrong = |state, command| node::Rejection::WrongState { state, command };
    for rejection in [
        node::Rejection::NotFound,
        node::Rejection::Exists,
        wrong(PhaseName::Active, CommandName::Remove),
        wrong(PhaseName::Removed, CommandName::Retire),
        wrong(PhaseName::Active, CommandName::Reactivate),
        wrong(PhaseName::Active, CommandName::ReleaseQuarantine),
        wrong(PhaseName::Active, CommandName::IssueToken),
        wrong(PhaseName::Draining, CommandName::Reissue),
        wrong(PhaseName::Removed, CommandName::Reissue),
        wrong(PhaseName::Registered, CommandName::OrderTask),
        wrong(PhaseName::Removed, CommandName::Quarantine),
        wrong(PhaseName::Removed, CommandName::Revise),
        node::Rejection::InUse { allocation_id: AllocationId(id) },
        node::Rejection::GpusDiffer { given: 3, promised: 4 },
        node::Rejection::RegionNotAllowed { region_code: text() },
        node::Rejection::VersionDiffers,
        node::Rejection::TooManyLabels { max: 32 },
        node::Rejection::NotInOrder { why: "The agent reports critical health.".into() },
        node::Rejection::NotOrdered { task_type: domain::TaskType::AllocationRelease },
        node::Rejection::TooManyTasks { limit: 8 },
        node::Rejection::TaskDoesNotWait { why: "it is with the agent".into() },
        node::Rejection::TaskUnknown,
        node::Rejection::CertificateUnknown,
    ] {
        row(&mut table, "node", &rejection.explain());
    }
    for rejection in [
        allocation::Rejection::NotFound,
        allocation::Rejection::Exists,
        allocation::Rejection::WrongState {
            state: allocation::PhaseName::Active,
            command: allocation::CommandName::ForceRelease,
        },
        allocation::Rejection::GpuCount { max: 64 },
        allocation::Rejection::QueueSeconds { max: 60 },
        allocation::Rejection::WrongState {
            state: allocation::PhaseName::Released,
            command: allocation::CommandName::ChooseLogins,
        },
        allocation::Rejection::KeyUnknown { id: SshKeyId(id) },
        allocation::Rejection::KeysMoved,
        allocation::Rejection::WrongState {
            state: allocation::PhaseName::Released,
            command: allocation::CommandName::Revise,
        },
        allocation::Rejection::VersionDiffers,
        allocation::Rejection::TooManyLabels { max: 32 },
    ] {
        row(&mut table, "allocation", &rejection.explain());
    }
    for rejection in [
        sku::Rejection::NotFound,
        sku::Rejection::Exists,
        sku::Rejection::WrongStatus { status: sku::CatalogStatus::Draft, command: sku::StatusChange::Deactivate },
        sku::Rejection::WrongStatus { status: sku::CatalogStatus::Inactive, command: sku::StatusChange::Deprecate },
        sku::Rejection::RoleNotHeld { role: Some(domain::authz::PlatformRole::InventoryOwner) },
        sku::Rejection::RoleNotHeld { role: None },
        sku::Rejection::ApprovedBefore {
            change: sku::StatusChange::Activate,
            missing: domain::authz::PlatformRole::InventoryOwner,
        },
        sku::Rejection::ReviewMissing { field: sku::ReviewText::ImpactReview },
        sku::Rejection::Moved,
        sku::Rejection::VersionDiffers { current: 7 },
    ] {
        row(&mut table, "sku", &rejection.explain());
    }
    for rejection in [
        tenant::Rejection::NotFound,
        tenant::Rejection::KeyExists { existing: SshKeyId(id) },
        tenant::Rejection::TooManyKeys { limit: 100 },
        tenant::Rejection::TooManyTerminals { limit: 8 },
        tenant::Rejection::OverQuota { limit: 1 },
        tenant::Rejection::TooManyServiceAccounts { limit: 20 },
    ] {
        row(&mut table, "ssh key", &rejection.explain());
    }
    for rejection in [
        billing_account::Rejection::NotFound,
        billing_account::Rejection::InsufficientBalance {
            needed: domain::money::MicroAmount::of(2_500_000),
            available: domain::money::MicroAmount::of(-1),
            currency: domain::money::Currency::parse("EUR").ok(),
        },
        // As a member of release 0.1.0 sends it.
        billing_account::Rejection::InsufficientBalance {
            needed: domain::money::MicroAmount::of(2_500_000),
            available: domain::money::MicroAmount::of(-1),
            currency: None,
        },
        billing_account::Rejection::CurrencyDiffers { account: "EUR".into(), given: "USD".into() },
        billing_account::Rejection::Amount { max: 7, currency: Some(eur()) },
        billing_account::Rejection::Amount { max: 7, currency: None },
        billing_account::Rejection::Full { currency: domain::money::Currency::parse("EUR").ok() },
        billing_account::Rejection::MoreThanCost {
            left: domain::money::MicroAmount::of(7),
            currency: domain::money::Currency::parse("EUR").ok(),
        },
        billing_account::Rejection::TooLate { days: 30 },
        billing_account::Rejection::TooManyRefunds,
        billing_account::Rejection::Moved,
    ] {
        row(&mut table, "billing account", &rejection.explain());
    }
    for rejection in [
        payment::Rejection::NotFound,
        payment::Rejection::Exists,
        payment::Rejection::Amount { min: 1_000, max: 100_000, currency: Some(eur()) },
        payment::Rejection::Amount { min: 1_000, max: 100_000, currency: None },
        payment::Rejection::Over { state: payment::PhaseName::Expired },
        payment::Rejection::AlreadyPaid { state: payment::PhaseName::Paid },
        payment::Rejection::StillOpen,
        payment::Rejection::NotPaid { state: payment::PhaseName::Open },
        payment::Rejection::TooLate { days: 30 },
        payment::Rejection::MoreThanLeft { left: 7, currency: Some(eur()) },
        payment::Rejection::MoreThanLeft { left: 0, currency: Some(eur()) },
        payment::Rejection::TooManyRefunds,
        payment::Rejection::LessThanCharged { least: 7, currency: Currency::parse("JPY").unwrap(), paid: Some(eur()) },
        payment::Rejection::NotUnderReview { state: payment::PhaseName::Canceled },
        payment::Rejection::ReviewEnded { decision: payment::ReviewDecision::Dismissed },
    ] {
        row(&mut table, "payment", &rejection.explain());
    }
    for rejection in [
        processor_event::Rejection::NotFound,
        processor_event::Rejection::Differs,
        processor_event::Rejection::WrongState { state: processor_event::PhaseName::Processed },
    ] {
        row(&mut table, "processor event", &rejection.explain());
    }
    row(&mut table, "platform role", &role_bindings::Rejection::NotBound.explain());
    for rejection in [
        service_account::Rejection::NotFound,
        service_account::Rejection::KeyNotFound,
        service_account::Rejection::Exists,
        service_account::Rejection::RolesNotHeld,
        service_account::Rejection::TooManyKeys { limit: 5 },
    ] {
        row(&mut table, "service account", &rejection.explain());
    }
    for rejection in [
        terminal_session::Rejection::NotFound,
        terminal_session::Rejection::Exists,
        terminal_session::Rejection::Closed { reason: terminal_session::CloseCode::Killed },
        terminal_session::Rejection::NotDetached,
        terminal_session::Rejection::TokenRefused { cause: terminal_session::TerminalTokenFault::Spent },
    ] {
        row(&mut table, "terminal session", &rejection.explain());
    }
    for rejection in [key_set::Rejection::Moved, key_set::Rejection::AlreadyStaged { id: "k".into() }] {
        row(&mut table, "key set", &rejection.explain());
    }
    let (low, high) = (PolicyKey::BillingMinimumDeposit, PolicyKey::BillingMaximumDeposit);
    let at = chrono::DateTime::UNIX_EPOCH;
    let crossing = policy::CrossingBounds { at, low: 2, high: 1, with: policy::PolicyScope::Plan("gold".into()) };
    for rejection in [
        policy_values::Rejection::NotFound,
        policy_values::Rejection::OutOfBounds { key: low, value: policy::PolicyValue::Int(1) },
        policy_values::Rejection::OutOfBounds { key: PolicyKey::MaasEnabled, value: policy::PolicyValue::Int(1) },
        policy_values::Rejection::OutOfBounds {
            key: PolicyKey::TerminalRecordingMode,
            value: policy::PolicyValue::Bool(true),
        },
        policy_values::Rejection::Scope {
            key: PolicyKey::BillingWindow,
            scope: policy::PolicyScope::ProjectId("gold".into()),
        },
        policy_values::Rejection::Crosses { key: low, low, high, crossing },
        policy_values::Rejection::Differs { key: low, current: None },
        policy_values::Rejection::Differs { key: low, current: Some(policy::PolicyValue::Int(7)) },
        policy_values::Rejection::NotSet { key: low },
        policy_values::Rejection::Past { now: at },
        policy_values::Rejection::TooFarAhead { latest: at },
        policy_values::Rejection::TooManyAhead { limit: 20 },
        policy_values::Rejection::TooManyScopes { limit: 7 },
    ] {
        row(&mut table, "policy value", &rejection.explain());
    }
    for error in [
        AskError::Denied,
        AskError::InProgress,
        AskError::AlreadyDone,
        AskError::Reused,
        AskError::Taken { constraint: UNIQUE_NAME.into() },
        AskError::Taken { constraint: "another".into() },
        AskError::Overloaded,
        AskError::Parked { reason: text() },
        AskError::Unavailable { reason: text() },
        AskError::Unknown { reason: text() },
        AskError::Broken { reason: text() },
        AskError::NotOwner,
    ] {
        row(&mut table, "asking", &not_answered::<sku::Rejection>(error));
    }
    insta::assert_snapshot!(table);
}
