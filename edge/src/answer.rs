//! What a user or administrator is told when a command was not carried out: one table per machine, every rejection spelled out.

use actors::AskError;
use domain::money::HIGHEST_BALANCE_MINOR;
use domain::policy::{Bounds, Key};
use domain::{
    allocation, announcement, billing_account, bindings, key_set, node, payment, policy, processor_event, runtime,
    service_account, sku, tenant, terminal_session,
};

use crate::error::{ApiError, Code};
use crate::runtime::RuntimeError;

/// The constraint that keeps names unique within a kind.
const UNIQUE_NAME: &str = "entity_unique_name";

/// A machine's no, as an answer that says what to do next.
pub trait Explain {
    fn explain(self) -> ApiError;
}

/// The answer where a machine gave no reply.
pub fn not_answered<J: Explain>(error: AskError<J>) -> ApiError {
    match error {
        AskError::Rejected(rejection) => rejection.explain(),
        AskError::Denied => ApiError::forbidden("Your role does not allow this; ask an administrator."),
        AskError::InProgress => ApiError::new(
            Code::IdempotencyInProgress,
            "The first request with this Idempotency-Key is still running; ask again in a moment.",
        ),
        AskError::Reused => ApiError::new(
            Code::IdempotencyKeyReused,
            "This Idempotency-Key belongs to another request; use a new key for a new request.",
        )
        .detail("field", "Idempotency-Key"),
        AskError::AlreadyDone => {
            conflict("This was carried out before, and its answer was not kept; look at the resource.")
        }
        AskError::Taken { constraint } if constraint == UNIQUE_NAME => {
            conflict("There is one of this name already; choose another name.").detail("field", "name")
        }
        AskError::Taken { constraint } => ApiError::internal(format!("the database refused: {constraint}")),
        AskError::Overloaded => ApiError::overloaded(),
        AskError::Broken { reason } => ApiError::internal(format!("the machine failed: {reason}")),
        error @ (AskError::Parked { .. }
        | AskError::Unavailable { .. }
        | AskError::Unknown { .. }
        | AskError::NotOwner) => ApiError::unavailable(error.without_rejection()),
    }
}

/// A name for the cause that does not depend on the machine.
trait WithoutRejection {
    fn without_rejection(self) -> String;
}

impl<J> WithoutRejection for AskError<J> {
    fn without_rejection(self) -> String {
        match self {
            Self::Parked { reason } => format!("parked: {reason}"),
            Self::Unavailable { reason } => format!("unavailable: {reason}"),
            Self::Unknown { reason } => format!("the outcome is unknown: {reason}"),
            Self::NotOwner => "nobody owns the shard".to_owned(),
            Self::Rejected(_)
            | Self::Denied
            | Self::InProgress
            | Self::AlreadyDone
            | Self::Reused
            | Self::Taken { .. }
            | Self::Overloaded
            | Self::Broken { .. } => "not carried out".to_owned(),
        }
    }
}

fn conflict(message: impl Into<std::borrow::Cow<'static, str>>) -> ApiError {
    ApiError::new(Code::StateConflict, message)
}

/// Names the policy that is in the way, and what it allows.
pub(crate) fn limited_by(refusal: ApiError, key: Key, limit: impl Into<serde_json::Value>) -> ApiError {
    refusal.detail("policy_key", key.name()).detail("limit", limit)
}

fn invalid(message: String, field: &str) -> ApiError {
    ApiError::invalid_request(message).detail("field", field)
}

/// What a machine does not say to people.
fn unexpected(rejection: &impl std::error::Error) -> ApiError {
    ApiError::internal(format!("the machine refused a person with: {rejection}"))
}

impl Explain for node::Rejection {
    fn explain(self) -> ApiError {
        use node::Rejection as R;
        match self {
            R::NotFound => ApiError::not_found("node"),
            R::Exists => conflict("The node exists already."),
            R::WrongState { state, command } => {
                let (done, way) = node_command(&state, &command);
                ApiError::invalid_request(format!("A node that is {state} cannot be {done}; {way}"))
                    .detail("state", state)
            }
            R::InUse { allocation_id } => ApiError::new(
                Code::NodeInUse,
                format!("Allocation {allocation_id} is on the node; release it first, or retire with \"drain\": true."),
            )
            .detail("allocation_id", allocation_id.to_string()),
            R::GpusDiffer { given, promised } => invalid(
                format!(
                    "`gpus_total` is {given}, but a node of this SKU has {promised} GPUs; correct it or choose another SKU."
                ),
                "gpus_total",
            ),
            R::RegionNotAllowed { region_code } => invalid(
                format!("The SKU is not offered in region {region_code}; add the region to the SKU or choose another."),
                "region_code",
            ),
            R::VersionDiffers => conflict(
                "The node has changed since the version in If-Match; read it again and repeat your change on it.",
            )
            .detail("field", "If-Match"),
            R::NotInOrder { why } => conflict(format!(
                "The node is not in order: {}. Repair it, wait for its next heartbeat and ask again.",
                why.trim_end_matches('.')
            )),
            R::NotOrdered { task_type } => invalid(
                format!("`type` {task_type} is not ordered by hand; it follows from what is done with allocations."),
                "type",
            ),
            R::TooManyTasks { limit } => conflict(format!(
                "The node has not reported on {limit} tasks, which is the most; wait for it, or resume what waits for you."
            ))
            .detail("limit", limit),
            R::TaskDoesNotWait { why } => conflict(format!("The task does not wait for an operator: {why}.")),
            R::TaskUnknown => ApiError::not_found("task of this node"),
            rejection @ (R::TokenRefused { .. }
            | R::CertificateUnknown
            | R::CertificateExpired
            | R::Removed
            | R::Fenced { .. }
            | R::ForeignNode { .. }
            | R::StaleAttempt { .. }
            | R::NotSchedulable { .. }
            | R::NotEnoughGpus { .. }) => unexpected(&rejection),
        }
    }
}

/// What was to be done with a node, and what has to be done first.
fn node_command(state: &str, command: &str) -> (&'static str, &'static str) {
    match command {
        "remove" => ("removed", "retire it first."),
        "retire" => ("retired", "only a node that was active can be; one that never was can be removed."),
        "reactivate" => ("reactivated", "only a retired node can be."),
        "release_quarantine" => ("released from quarantine", "only a quarantined node can be."),
        "issue_token" => (
            "given a first enrollment token",
            "that is for nodes that have not been active. Its identity comes back by reissue-enrollment.",
        ),
        "reissue" if state == "draining" => {
            ("given a new token", "wait until its last allocation ends and it is retired, or quarantine it.")
        }
        "order_task" if !matches!(state, "removing" | "removed") => ("given a task", "its agent has not enrolled yet."),
        "quarantine" => ("quarantined", "it is gone."),
        _ => ("changed", "it is gone. Register the machine as a new node."),
    }
}

impl Explain for allocation::Rejection {
    fn explain(self) -> ApiError {
        use allocation::Rejection as R;
        match self {
            R::NotFound => ApiError::not_found("allocation"),
            R::Exists => conflict("The allocation exists already."),
            R::WrongState { state, command } if command == "choose_logins" => conflict(format!(
                "Nobody logs in to an allocation that is {state}; its keys cannot be chosen any more."
            ))
            .detail("state", state),
            R::WrongState { state, command } => {
                let how = if command == "force_release" { "by force" } else { "by another try" };
                conflict(format!(
                    "An allocation that is {state} cannot be released {how}; this is a way out of release_failed alone."
                ))
                .detail("state", state)
            }
            R::GpuCount { max } => invalid(format!("`gpu_count` must be a whole number from 1 to {max}."), "gpu_count"),
            R::QueueSeconds { max } => limited_by(
                invalid(format!("`queue_seconds` must be a whole number from 0 to {max}."), "queue_seconds"),
                Key::AllocationQueueMax,
                max,
            ),
            R::KeyUnknown { id } => invalid(
                format!("{id} is not a key of the allocation's user; GET /api/v1/ssh-keys lists theirs."),
                "ssh_key_ids",
            ),
            R::KeysMoved => conflict("The user's keys change at this moment; ask again."),
        }
    }
}

impl Explain for sku::Rejection {
    fn explain(self) -> ApiError {
        use sku::Rejection as R;
        match self {
            R::NotFound => ApiError::not_found("SKU"),
            R::Exists => conflict("The SKU exists already."),
            R::WrongStatus { status, command } => {
                let done = match command.as_str() {
                    "deprecate" => "deprecated; only an active one can be",
                    "deactivate" => "deactivated; it was never active",
                    _ => "changed so",
                };
                conflict(format!("A SKU that is {status} cannot be {done}.")).detail("status", status)
            }
            R::RoleNotHeld { role: Some(role) } => ApiError::forbidden(format!(
                "You do not hold the platform role `{role}`; leave `role` out, or ask an administrator to bind it to you."
            ))
            .detail("field", "role"),
            R::RoleNotHeld { role: None } => ApiError::forbidden(
                "This needs the platform role `platform_operations` or `inventory_owner`; ask an administrator to bind it to you.",
            ),
            R::ReviewMissing { field } => invalid(
                format!("Nodes or allocations refer to the SKU: say in `{field}` what its end means for them."),
                &field,
            ),
            R::Moved => conflict("Others decide on the SKU at this moment; look at it and ask again."),
        }
    }
}

impl Explain for tenant::Rejection {
    fn explain(self) -> ApiError {
        use tenant::Rejection as R;
        match self {
            R::NotFound => ApiError::not_found("SSH key"),
            R::KeyExists { existing } => {
                conflict(format!("You have registered this key already, as {existing}; use that one."))
                    .detail("ssh_key_id", existing.to_string())
            }
            R::TooManyKeys { limit } => limited_by(
                conflict(format!("You have {limit} keys, which is the most; delete one first.")),
                Key::SshKeyMaxPerUser,
                limit,
            ),
            R::TooManyServiceAccounts { limit } => limited_by(
                conflict(format!(
                    "You may have {limit} service accounts; delete one that nothing uses, then try again."
                )),
                Key::AuthServiceAccountsPerUser,
                limit,
            ),
            R::TooManyTerminals { limit } => limited_by(
                conflict(format!(
                    "The allocation has {limit} terminal sessions, which is the most; end one, or connect to it with `session_id`."
                )),
                Key::TerminalSessionsPerAllocation,
                limit,
            ),
            rejection @ R::OverQuota { .. } => unexpected(&rejection),
        }
    }
}

impl Explain for key_set::Rejection {
    fn explain(self) -> ApiError {
        use key_set::{Phase, Rejection as R};
        match self {
            R::NotFound { id } => ApiError::new(
                Code::NotFound,
                format!("There is no key {id} of this purpose; GET /api/v1/admin/keys lists those there are."),
            ),
            R::AlreadyStaged { id } => {
                conflict(format!("Key {id} is staged already; activate it, or retire it first.")).detail("key_id", id)
            }
            R::WrongPhase { id, phase } => {
                let way = match phase {
                    Phase::Staged => "activate it first",
                    Phase::Active => "it is in use; to replace it, stage another and activate that one",
                    Phase::Grace => "it was replaced; stage a new one",
                    Phase::Retired => "that is its end; stage a new one",
                };
                conflict(format!("Key {id} is {}: {way}.", phase.name())).detail("key_id", id).detail("phase", phase.name())
            }
            R::StillActive { id } => conflict(format!(
                "Key {id} is the active one; stage another, activate that one, and then retire this one."
            ))
            .detail("key_id", id),
            R::InGrace { id, until } => conflict(format!(
                "Tasks that key {id} signed may be under way until {until}; ask again then, or with \"force\": true where the key \
                 has leaked."
            ))
            .detail("key_id", id)
            .detail("until", serde_json::json!(until)),
            R::InUse { id, dependents } => conflict(format!(
                "{dependents} nodes have certificates by authority {id} alone; wait until they have renewed, or ask with \"force\": \
                 true: those nodes have to recover or to be enrolled anew."
            ))
            .detail("key_id", id)
            .detail("dependents", dependents),
            R::Moved => conflict("Somebody else rotates these keys at this moment; look at them and ask again."),
            R::OtherPurpose => invalid(
                "Keys of this purpose are not rotated so: those at rest are in the key ring file, and `rewrap` puts them to use."
                    .to_owned(),
                "purpose",
            ),
            rejection @ R::Exists { .. } => unexpected(&rejection),
        }
    }
}

impl Explain for billing_account::Rejection {
    fn explain(self) -> ApiError {
        use billing_account::Rejection as R;
        match self {
            R::NotFound => ApiError::not_found("billing account"),
            R::InsufficientBalance { needed, available } => ApiError::new(
                Code::InsufficientBalance,
                format!("{needed} minor units are more than the {available} that are available; take less, or pay in first."),
            )
            .detail("needed_micro", needed.get())
            .detail("available_micro", available.get()),
            R::CurrencyDiffers { account, given } => {
                conflict(format!("The account is in {account}, and not in {given}; an account keeps its currency."))
                    .detail("field", "currency")
                    .detail("currency", account)
            }
            R::Amount { max } => limited_by(
                invalid(
                    format!(
                        "`amount_minor` must be from -{max} to {max}, and not 0; policy `billing.adjustment_max_minor` says so."
                    ),
                    "amount_minor",
                ),
                Key::BillingAdjustmentMax,
                max,
            ),
            R::Full => conflict(format!("No account holds more than {HIGHEST_BALANCE_MINOR} minor units; give less.")),
            R::MoreThanCost { left } => conflict(format!(
                "Of what the allocation has cost {left} minor units are left that were not given back; leave `amount_minor` out for all \
                 of them."
            ))
            .detail("field", "amount_minor")
            .detail("left_micro", left.get()),
            R::TooLate { days } => too_late("The allocation ended", days),
            R::TooManyRefunds => {
                conflict("Too many pieces of the allocation's cost were given back; give the rest by an adjustment.")
            }
            R::Moved => conflict("The allocation begins or ends at this moment; ask again."),
        }
    }
}

fn too_late(what: &str, days: i64) -> ApiError {
    limited_by(
        conflict(format!(
            "{what} longer than {days} days ago; policy `allocation.refund_window_days` lets nothing be refunded then."
        )),
        Key::AllocationRefundWindow,
        days,
    )
}

impl Explain for payment::Rejection {
    fn explain(self) -> ApiError {
        use payment::Rejection as R;
        match self {
            R::NotFound => ApiError::not_found("payment"),
            R::Exists => conflict("The payment exists already."),
            // Whoever knows the amount says by which of the two.
            R::Amount { min, max } => limited_by(
                invalid(
                    format!(
                        "`amount_minor` must be a whole number from {min} to {max}; policies `billing.minimum_deposit_minor` and \
                         `billing.maximum_deposit_minor` say so."
                    ),
                    "amount_minor",
                ),
                Key::BillingMaximumDeposit,
                max,
            )
            .detail("minimum", min),
            R::Over { state } => {
                conflict(format!("The payment is {state}; begin another one, with a new Idempotency-Key.")).detail("state", state)
            }
            R::NotPaid { state } => conflict(format!(
                "The payment is {state}: nothing of it is in your account that could be given back. GET /api/v1/billing/payments shows \
                 when it is deposited."
            ))
            .detail("state", state),
            R::TooLate { days } => too_late("It was paid", days),
            R::MoreThanLeft { left: ..=0 } => {
                conflict("Nothing is left of the payment: all of it was given back, or is on its way back.")
            }
            R::MoreThanLeft { left } => invalid(
                format!("`amount_minor` must be a whole number from 1 to {left}, which is left of the payment."),
                "amount_minor",
            )
            .detail("left_minor", left),
            R::TooManyRefunds => conflict("So many refunds were asked of this payment already; ask an administrator for more."),
            rejection @ (R::Differs { .. } | R::PaidTwice { .. } | R::RefundUnknown) => unexpected(&rejection),
        }
    }
}

impl Explain for processor_event::Rejection {
    fn explain(self) -> ApiError {
        use processor_event::Rejection as R;
        match self {
            R::NotFound => ApiError::not_found("event of the payment processor"),
            R::Differs => ApiError::invalid_request(
                "Another event came under this id before, and that one is kept; an event's id is never used twice.",
            )
            .detail("field", "id"),
            R::WrongState { state } => conflict(format!(
                "The event is {state}: only one that is dead, or retrying, waits for an operator's word."
            ))
            .detail("state", state),
        }
    }
}

impl Explain for bindings::Rejection {
    fn explain(self) -> ApiError {
        match self {
            Self::NotBound => ApiError::new(
                Code::NotFound,
                "The role is not bound to this subject; GET /api/v1/admin/platform-roles/bindings lists what is.",
            ),
        }
    }
}

impl Explain for service_account::Rejection {
    fn explain(self) -> ApiError {
        use service_account::Rejection as R;
        match self {
            R::NotFound => ApiError::not_found("service account"),
            R::KeyNotFound => ApiError::not_found("key of this service account"),
            R::Exists => conflict("The service account exists already."),
            R::RolesNotHeld => ApiError::forbidden(
                "A service account gets no role that you do not have yourself; ask for fewer in `roles`.",
            )
            .detail("field", "roles"),
            R::TooManyKeys { limit } => limited_by(
                conflict(format!(
                    "The service account has {limit} keys, which is the most; revoke one that nothing uses."
                )),
                Key::AuthServiceAccountKeysMax,
                limit,
            ),
        }
    }
}

impl Explain for terminal_session::Rejection {
    fn explain(self) -> ApiError {
        use terminal_session::Rejection as R;
        match self {
            R::NotFound => ApiError::not_found("terminal session"),
            R::Exists => conflict("The terminal session exists already."),
            R::Closed { reason } => conflict("The terminal session is over; leave `session_id` out to open another.")
                .detail("reason", reason),
            // No person shows a token here.
            rejection @ R::TokenRefused { .. } => unexpected(&rejection),
        }
    }
}

impl Explain for policy::Rejection {
    fn explain(self) -> ApiError {
        use policy::Rejection as R;
        match self {
            R::OutOfBounds { key, value } => not_admitted(key, &value.to_string()),
            R::Crosses { key, low, high, crossing } => {
                let policy::Crossing { at, low: smallest, high: largest, with } = crossing;
                let (low, high) = (low.name(), high.name());
                let message = format!(
                    "With this value {low} ({smallest}) would be over {high} ({largest}) from {at} on, for those whom the values \
                     of scope {with} concern too; change the other one first."
                );
                policy_out_of_bounds(key, message).detail(
                    "crosses",
                    serde_json::json!({ low: smallest, high: largest, "at": at, "scope_kind": with.kind() }),
                )
            }
            R::Differs { key, current } => {
                let now = current.as_ref().map_or_else(|| "not set".to_owned(), ToString::to_string);
                conflict(format!(
                    "`old_value` is not what {} would be without this write: in this scope it is {now}. Look at it again and repeat.",
                    key.name()
                ))
                .detail("field", "old_value")
                .detail("current_value", serde_json::json!(current))
            }
            R::NotSet { key } => ApiError::new(
                Code::NotFound,
                format!(
                    "There is no such value of {} in this scope; GET /api/v1/admin/policy-values lists what is set.",
                    key.name()
                ),
            ),
            R::Past { now } => invalid(
                format!("`effective_at` lies in the past (it is {now}); leave it out to set the value at once."),
                "effective_at",
            ),
            R::TooFarAhead { latest } => {
                invalid(format!("`effective_at` must be at {latest} at the latest."), "effective_at")
            }
            R::TooManyAhead { limit } => conflict(format!(
                "{limit} values lie ahead, which is the most; wait until one has come to pass, or write it anew under its effective_at."
            )),
            R::TooManyScopes { limit } => conflict(format!(
                "{limit} scopes have values of their own, which is the most; set this one for a plan or an organisation."
            )),
            rejection @ R::NotFound => unexpected(&rejection),
        }
    }
}

/// A value that its key does not take, and what it takes.
pub fn not_admitted(key: Key, value: &str) -> ApiError {
    let takes = match key.bounds() {
        Bounds::Int { min, max, .. } => format!("a whole number from {min} to {max}"),
        Bounds::Enum { of, .. } => format!("one of {}", of.join(", ")),
        Bounds::Bool { .. } => "true or false".to_owned(),
    };
    policy_out_of_bounds(key, format!("{value} is no value of {}; it takes {takes}.", key.name()))
}

fn policy_out_of_bounds(key: Key, message: String) -> ApiError {
    ApiError::new(Code::PolicyOutOfBounds, message)
        .detail("field", "value")
        .detail("key", key.name())
        .detail("bounds", bounds_of(key))
        .detail("default", serde_json::json!(key.default_value()))
}

/// What a key takes, as the API writes it.
#[must_use]
pub fn bounds_of(key: Key) -> serde_json::Value {
    match key.bounds() {
        Bounds::Int { min, max, .. } => serde_json::json!({ "min": min, "max": max }),
        Bounds::Enum { of, .. } => serde_json::json!({ "enum": of }),
        Bounds::Bool { .. } => serde_json::json!({ "enum": [true, false] }),
    }
}

impl From<persistence::StoreError> for ApiError {
    fn from(error: persistence::StoreError) -> Self {
        if error.is_unavailable() { Self::unavailable(error) } else { Self::internal(error) }
    }
}

impl Explain for announcement::Rejection {
    fn explain(self) -> ApiError {
        use announcement::Rejection as R;
        match self {
            R::NotFound => ApiError::not_found("announcement"),
            R::Exists => conflict("This was announced already."),
        }
    }
}

impl Explain for runtime::Rejection {
    fn explain(self) -> ApiError {
        match self {
            // The record's id comes from the part's name.
            rejection @ runtime::Rejection::AnotherPart => unexpected(&rejection),
        }
    }
}

impl From<RuntimeError> for ApiError {
    fn from(error: RuntimeError) -> Self {
        Self::unavailable(error)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use domain::{AllocationId, SshKeyId};
    use std::fmt::Write as _;
    use uuid::Uuid;

    fn row(table: &mut String, name: &str, error: &ApiError) {
        writeln!(table, "{name}: {} {} {}", error.code().status().as_u16(), error.code(), error.message()).unwrap();
    }

    #[test]
    fn what_a_policy_does_not_allow_is_refused_by_its_key() {
        let refusals = [
            (allocation::Rejection::QueueSeconds { max: 7 }.explain(), Key::AllocationQueueMax),
            (tenant::Rejection::TooManyKeys { limit: 7 }.explain(), Key::SshKeyMaxPerUser),
            (tenant::Rejection::TooManyServiceAccounts { limit: 7 }.explain(), Key::AuthServiceAccountsPerUser),
            (tenant::Rejection::TooManyTerminals { limit: 7 }.explain(), Key::TerminalSessionsPerAllocation),
            (service_account::Rejection::TooManyKeys { limit: 7 }.explain(), Key::AuthServiceAccountKeysMax),
            (billing_account::Rejection::Amount { max: 7 }.explain(), Key::BillingAdjustmentMax),
            (billing_account::Rejection::TooLate { days: 7 }.explain(), Key::AllocationRefundWindow),
            (payment::Rejection::Amount { min: 1, max: 7 }.explain(), Key::BillingMaximumDeposit),
            (payment::Rejection::TooLate { days: 7 }.explain(), Key::AllocationRefundWindow),
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
        let wrong =
            |state: &str, command: &str| node::Rejection::WrongState { state: state.into(), command: command.into() };
        for rejection in [
            node::Rejection::NotFound,
            node::Rejection::Exists,
            wrong("active", "remove"),
            wrong("registered", "retire"),
            wrong("active", "reactivate"),
            wrong("active", "release_quarantine"),
            wrong("active", "issue_token"),
            wrong("draining", "reissue"),
            wrong("removed", "reissue"),
            wrong("registered", "order_task"),
            wrong("removed", "quarantine"),
            wrong("removed", "revise"),
            node::Rejection::InUse { allocation_id: AllocationId(id) },
            node::Rejection::GpusDiffer { given: 3, promised: 4 },
            node::Rejection::RegionNotAllowed { region_code: text() },
            node::Rejection::VersionDiffers,
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
            allocation::Rejection::WrongState { state: "active".into(), command: "force_release".into() },
            allocation::Rejection::GpuCount { max: 64 },
            allocation::Rejection::QueueSeconds { max: 60 },
            allocation::Rejection::WrongState { state: "released".into(), command: "choose_logins".into() },
            allocation::Rejection::KeyUnknown { id: SshKeyId(id) },
            allocation::Rejection::KeysMoved,
        ] {
            row(&mut table, "allocation", &rejection.explain());
        }
        for rejection in [
            sku::Rejection::NotFound,
            sku::Rejection::Exists,
            sku::Rejection::WrongStatus { status: "draft".into(), command: "deactivate".into() },
            sku::Rejection::WrongStatus { status: "inactive".into(), command: "deprecate".into() },
            sku::Rejection::RoleNotHeld { role: Some(domain::authz::PlatformRole::InventoryOwner) },
            sku::Rejection::RoleNotHeld { role: None },
            sku::Rejection::ReviewMissing { field: "impact_review".into() },
            sku::Rejection::Moved,
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
                needed: domain::money::Micro::of(2_500_000),
                available: domain::money::Micro::of(-1),
            },
            billing_account::Rejection::CurrencyDiffers { account: "EUR".into(), given: "USD".into() },
            billing_account::Rejection::Amount { max: 7 },
            billing_account::Rejection::Full,
            billing_account::Rejection::MoreThanCost { left: domain::money::Micro::of(7) },
            billing_account::Rejection::TooLate { days: 30 },
            billing_account::Rejection::TooManyRefunds,
            billing_account::Rejection::Moved,
        ] {
            row(&mut table, "billing account", &rejection.explain());
        }
        for rejection in [
            payment::Rejection::NotFound,
            payment::Rejection::Exists,
            payment::Rejection::Amount { min: 1_000, max: 100_000 },
            payment::Rejection::Over { state: "expired".into() },
            payment::Rejection::NotPaid { state: "open".into() },
            payment::Rejection::TooLate { days: 30 },
            payment::Rejection::MoreThanLeft { left: 7 },
            payment::Rejection::MoreThanLeft { left: 0 },
            payment::Rejection::TooManyRefunds,
        ] {
            row(&mut table, "payment", &rejection.explain());
        }
        for rejection in [
            processor_event::Rejection::NotFound,
            processor_event::Rejection::Differs,
            processor_event::Rejection::WrongState { state: "processed".into() },
        ] {
            row(&mut table, "processor event", &rejection.explain());
        }
        row(&mut table, "platform role", &bindings::Rejection::NotBound.explain());
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
            terminal_session::Rejection::Closed { reason: "killed".into() },
            terminal_session::Rejection::TokenRefused { cause: terminal_session::TokenCause::Spent },
        ] {
            row(&mut table, "terminal session", &rejection.explain());
        }
        let (low, high) = (Key::BillingMinimumDeposit, Key::BillingMaximumDeposit);
        let at = chrono::DateTime::UNIX_EPOCH;
        let crossing = policy::Crossing { at, low: 2, high: 1, with: policy::Scope::Plan("gold".into()) };
        for rejection in [
            policy::Rejection::NotFound,
            policy::Rejection::OutOfBounds { key: low, value: policy::Value::Int(1) },
            policy::Rejection::OutOfBounds { key: Key::MaasEnabled, value: policy::Value::Int(1) },
            policy::Rejection::OutOfBounds { key: Key::TerminalRecordingMode, value: policy::Value::Bool(true) },
            policy::Rejection::Crosses { key: low, low, high, crossing },
            policy::Rejection::Differs { key: low, current: None },
            policy::Rejection::Differs { key: low, current: Some(policy::Value::Int(7)) },
            policy::Rejection::NotSet { key: low },
            policy::Rejection::Past { now: at },
            policy::Rejection::TooFarAhead { latest: at },
            policy::Rejection::TooManyAhead { limit: 20 },
            policy::Rejection::TooManyScopes { limit: 7 },
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
}
