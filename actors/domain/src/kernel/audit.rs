//! The audited actions, as one table to review (specification, *Audit log entry*: every onboarding, failure, reissue, lifecycle action,
//! SSH key mutation and policy change).

use crate::id::EntityRef;
use crate::reason_code;
use crate::time::Timestamp;
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};

/// The rows: the name in the log, the fields of its metadata, and when a row is written.
macro_rules! actions {
    ($($variant:ident $name:literal { $($field:ident)* }: $when:literal;)+) => {
        /// An action that was done, or that failed.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum AuditAction {
            $(#[doc = $when] $variant,)+
        }

        impl AuditAction {
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// The dotted name in the log.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }

            /// When a row of it is written.
            #[must_use]
            pub const fn when(self) -> &'static str {
                match self {
                    $(Self::$variant => $when,)+
                }
            }

            /// The fields that its metadata may have.
            #[must_use]
            pub const fn fields(self) -> &'static [&'static str] {
                match self {
                    $(Self::$variant => &[$(stringify!($field)),*],)+
                }
            }
        }
    };
}

actions! {
    NodesCreate "nodes.create" { host sku }: "an administrator registered a node";
    NodesUpdate "nodes.update" { host port name labels }: "an administrator changed how a node is reached, or its name or labels";
    NodesIssueEnrollmentToken "nodes.issue_enrollment_token" { token_id expires_at system_id image_digest }: "a bundle with a fresh token was issued; older ones are void";
    NodesReissueEnrollment "nodes.reissue_enrollment" { token_id expires_at certificate_revoked reason }: "a recovery bundle was issued for a node";
    NodesEnroll "nodes.enroll" { identity_generation agent_version }: "an agent enrolled with the issued token";
    NodesRefuseEnrollment "nodes.refuse_enrollment" { result cause }: "an enrollment or a recovery was refused, with its true cause; at most one row a minute and node";
    NodesRecover "nodes.recover" { identity_generation recoveries_left again }: "an agent recovered its identity with its recovery token and key";
    NodesCloneSuspected "nodes.clone_suspected" { given_generation current_generation boot_id }: "token and key were shown with an old identity generation, or two agents use one identity at the same time: the machine has a copy";
    NodesExpireEnrollment "nodes.expire_enrollment" { code }: "a token or an enrollment was not used in time";
    NodesActivate "nodes.activate" {}: "an enrolled agent polled and its inventory matched";
    NodesRenewCertificate "nodes.renew_certificate" { serial not_after }: "an agent renewed its certificate";
    NodesLose "nodes.lose" {}: "an active node sent nothing in time and counts as offline";
    NodesFind "nodes.find" { code }: "an offline node was in contact again";
    NodesQuarantine "nodes.quarantine" { code reason gpus }: "a node was taken out of rent, by an operator, its health, drift or a clone";
    NodesReleaseQuarantine "nodes.release_quarantine" { reason holds left }: "a quarantine was released by an operator, or its cause was over";
    NodesClearFinding "nodes.clear_finding" { finding_id probe finding_code gpu_uuid count reason }: "an administrator cleared a health finding";
    NodesFailDeployment "nodes.fail_deployment" { cause }: "the bare-metal provider could not deploy a node's machine";
    NodesReimage "nodes.reimage" { reason }: "a node's machine is reinstalled, ordered by an administrator or after an allocation";
    NodesRefuseSystem "nodes.refuse_system" { cause }: "a reinstalled machine came back that is not the new system";
    NodesFinishReimage "nodes.finish_reimage" { old_machine_id new_machine_id }: "the new system of a reinstalled machine was validated";
    NodesRepair "nodes.repair" { step attempt task_id finding gpu_uuid cause }: "a repair of a health finding began, went on, succeeded or needs an operator";
    NodesRetire "nodes.retire" { reason drain }: "a node was taken out of service, or begins to drain";
    NodesDrained "nodes.drained" {}: "the last allocation of a draining node ended: it is retired";
    NodesReactivate "nodes.reactivate" { reason }: "a retired node was taken into service again";
    NodesRemove "nodes.remove" { reason machine }: "a retired node was removed for good";
    NodesRestart "nodes.restart" { old_boot_id new_boot_id allocations }: "the machine was restarted: its agent reports another boot; its allocations are kept";
    NodesOrderTask "nodes.order_task" { task_id task_type reason }: "an administrator ordered a task of the node itself";
    NodesUpdateAgent "nodes.update_agent" { task_id digest forced reason rollout_id }: "an administrator ordered another version of the node's agent, or a rollout did";
    NodesValidate "nodes.validate" { task_id level reason }: "an administrator ordered a validation of a node with load";
    NodesResetGpu "nodes.reset_gpu" { task_id gpu_uuid reason }: "an administrator ordered the reset of a GPU that no tenant holds";
    NodesStallTask "nodes.stall_task" { task_id task_type }: "a task that must not be executed twice had no result in time";
    NodesResumeTask "nodes.resume_task" { task_id task_type reason }: "an operator resumed such a task: it is dispatched again";

    AllocationsRequest "allocations.request" { gpu_count }: "a user asked for GPUs";
    AllocationsFail "allocations.fail" { code node_id }: "a request was refused or its provisioning failed";
    AllocationsUpdate "allocations.update" { name labels }: "the name or the labels of an allocation were changed; null is what was removed";
    AllocationsRelease "allocations.release" { issue }: "an allocation was given back, or cancelled";
    AllocationsFailRelease "allocations.fail_release" { code node_id attempt exhausted }: "a clean-up attempt failed";
    AllocationsRetryRelease "allocations.retry_release" { reason }: "an operator ordered another attempt at a failed clean-up";
    AllocationsForceRelease "allocations.force_release" { reason }: "an operator ended an allocation without proof of clean-up";

    AllocationsUncover "allocations.uncover" { holder }: "an allocation is released since its account was depleted and the grace over";
    AllocationsFault "allocations.fault" { code node_id at }: "a critical fault of its node ended an allocation's billing";
    AllocationsEvacuate "allocations.evacuate" { code node_id }: "an allocation is released since its tenant's time to leave a failing GPU or machine has ended";

    TerminalsOpen "terminals.open" { user_id allocation_id node_id recording }: "the user of an active allocation opened a terminal session";
    TerminalsIssueToken "terminals.issue_token" { user_id allocation_id }: "the user asked for a token to connect to a terminal session again";
    TerminalsAttach "terminals.attach" { user_id allocation_id attachment }: "a connection was admitted with a token, before its upgrade";
    TerminalsRefuseToken "terminals.refuse_token" { user_id allocation_id result cause }: "a terminal token was refused, with its true cause; at most one row a minute and session";
    TerminalsClose "terminals.close" { user_id allocation_id code failure_code cause attachments }: "a terminal session ended by itself, by its user, with its allocation, or at the end of its lifetime";
    TerminalsKill "terminals.kill" { user_id allocation_id code reason attachments }: "an administrator closed a terminal session";
    TerminalsChangeRecording "terminals.change_recording" { user_id allocation_id old_recording new_recording }: "a policy switched the recording of a living session on or off, or changed its mode or bound";
    TerminalsReadRecording "terminals.read_recording" { user_id allocation_id }: "a caller read a session's recording; the row is written before the first byte is sent";
    TerminalsForgetRecording "terminals.forget_recording" { user_id allocation_id }: "a session's recording was deleted at the end of its retention";

    SkusCreate "skus.create" { name }: "an administrator made a catalog entry";
    SkusUpdate "skus.update" { old_price new_price regions expected_hardware old_validation new_validation withdrawn }: "an administrator revised a catalog entry";
    SkusApprove "skus.approve" { approval replaced }: "one of the two approvals of a change of status";
    SkusActivate "skus.activate" { reason approved_by }: "both had approved: a catalog entry was activated";
    SkusDeprecate "skus.deprecate" { reason approved_by }: "both had approved: a catalog entry was deprecated";
    SkusDeactivate "skus.deactivate" { reason approved_by }: "both had approved: a catalog entry was deactivated";
    SkusWithdrawApproval "skus.withdraw_approval" { withdrawn by reason }: "an approval that waited was withdrawn by the opposite request";
    SkusExpireApproval "skus.expire_approval" { expired }: "an approval expired without the second one";

    SshKeysCreate "ssh_keys.create" { ssh_key_id fingerprint result code cause }: "a user registered a public key, or was refused";
    SshKeysDelete "ssh_keys.delete" { ssh_key_id fingerprint result cause }: "a user deleted a key, or an administrator did, or that was refused";
    SshKeysMakeDefault "ssh_keys.make_default" { ssh_key_id fingerprint result cause }: "a user chose the default key, or an administrator did among theirs, or that was refused";
    SshKeysChoose "ssh_keys.choose" { ssh_key_ids fingerprints result cause }: "the keys that open one allocation were chosen, or that was refused";
    SshKeysReconcile "ssh_keys.reconcile" { allocation_id revision fingerprints result code }: "a node wrote the keys that open an allocation, or could not";

    PoliciesWrite "policies.write" { policy_key scope old_value new_value effective_at reason }: "a policy value was written";
    PoliciesTakeBack "policies.take_back" { policy_key scope old_value new_value effective_at reason }: "a policy value was taken back, the less specific one holds";
    HealthRulesWrite "health_rules.write" { pattern old_value new_value reason }: "an administrator has overridden the table of health findings";
    HealthRulesTakeBack "health_rules.take_back" { pattern old_value new_value reason }: "an override of the table of health findings was taken back";
    RolloutsCreate "rollouts.create" { digest canary max_unavailable soak_seconds include_held selector reason }: "an administrator began a rollout of an agent's package";
    RolloutsPause "rollouts.pause" { reason }: "an administrator paused a rollout";
    RolloutsResume "rollouts.resume" { reason }: "an administrator resumed a rollout that was paused or had stopped";
    RolloutsAbort "rollouts.abort" { reason }: "an administrator aborted a rollout";
    RolloutsStop "rollouts.stop" { code node_id }: "a rollout stopped since the update of a node had failed";
    BillingOpen "billing.open" { holder currency }: "an operator opened a billing account";
    BillingPlan "billing.plan" { holder old_plan new_plan }: "a token named another plan for the holder of an account, which is in force from the next window";
    BillingAdjust "billing.adjust" { holder amount_minor currency reason }: "an operator credited or debited an account";
    BillingRefundAllocation "billing.refund_allocation" { holder refund_id allocation_id amount_micro reason }: "an operator credited a part of an allocation's cost";
    PaymentsCreate "payments.create" { holder payer account_id amount_minor currency }: "a user began to pay into an account";
    PaymentsCancel "payments.cancel" { holder payer }: "a payer canceled a payment that was not paid";
    PaymentsRefund "payments.refund" { holder payer refund_id amount_minor reason }: "a payer requested a refund";
    PaymentsReverse "payments.reverse" { holder payer reversal_id what amount_minor }: "a refund or a dispute was made, or undone, at the payment processor";
    PaymentsSettleReview "payments.settle_review" { holder payer processor_id amount_minor currency reason }: "an operator settled a payment of another amount or currency";
    PaymentsDismissReview "payments.dismiss_review" { holder payer processor_id amount_minor currency reason }: "an operator dismissed a payment of another amount or currency";
    ProcessorEventsRetry "processor_events.retry" { event_id event_type reason }: "an operator had an event of the payment processor processed again";
    ProcessorEventsDismiss "processor_events.dismiss" { event_id event_type reason }: "an operator dismissed an event of the payment processor";
    PlatformRolesBind "platform_roles.bind" { subject role of_oneself reason }: "a platform role was bound to a subject";
    PlatformRolesRevoke "platform_roles.revoke" { subject role of_oneself reason }: "a platform role was revoked";
    BrowserSessionsOpen "browser_sessions.open" { user_id address user_agent }: "a user logged in to the web console";
    BrowserSessionsEnd "browser_sessions.end" { user_id code provider_error reason }: "a login to the web console ended";
    ServiceAccountsCreate "service_accounts.create" { owner_user_id name roles }: "a service account was made";
    ServiceAccountsAddKey "service_accounts.add_key" { owner_user_id key_id }: "a key was added to a service account";
    ServiceAccountsRevokeKey "service_accounts.revoke_key" { owner_user_id key_id age_seconds }: "a key of a service account was revoked";
    ServiceAccountsDelete "service_accounts.delete" { owner_user_id name revoked_key_ids }: "a service account and its keys were revoked";
    KeysStage "keys.stage" { purpose key_id version forced cut_off reason }: "an operator staged a key";
    KeysActivate "keys.activate" { purpose key_id version outgoing forced cut_off reason }: "an operator activated a key in place of the previous one";
    KeysRetire "keys.retire" { purpose key_id version forced cut_off reason }: "a key was retired; by force, with the number of nodes that it cut off";
    NotificationEndpointsCreate "notification_endpoints.create" { holder kind host }: "a user created an endpoint that receives events";
    NotificationEndpointsUpdate "notification_endpoints.update" { holder kind host is_enabled }: "an endpoint's URL, its events, or whether it is enabled was changed";
    NotificationEndpointsRotateSecret "notification_endpoints.rotate_secret" { holder kind host }: "an endpoint's secret was rotated; the previous one signs for another day";
    NotificationEndpointsDelete "notification_endpoints.delete" { holder kind host waiting dead_letters }: "an endpoint was deleted, with the messages that waited";
    NotificationEndpointsTest "notification_endpoints.test" { holder kind host }: "an endpoint was sent a test message";
    NotificationEndpointsResend "notification_endpoints.resend" { holder kind host message_id count reason }: "dead letters were sent again";
    NotificationEndpointsDismiss "notification_endpoints.dismiss" { holder kind host message_id count reason }: "dead letters were discarded";
    NotificationsBroadcast "notifications.broadcast" { severity message }: "an operator sent a broadcast to all connected clients";
    RuntimeRestart "runtime.restart" { member worker reason }: "an operator restarted an entity or a worker";
}

/// One row of the audit log. The shell adds the actor, the time and the correlation id.
#[derive(Clone, Debug, PartialEq)]
pub struct AuditRecord {
    pub action: AuditAction,
    pub target: EntityRef,
    /// Identifiers and reasons; never a secret.
    pub metadata: serde_json::Value,
}

impl AuditRecord {
    /// Metadata that differs from the table fails in tests. A release does not check it: a row in another form is better than none.
    #[must_use]
    pub fn new(action: AuditAction, target: EntityRef, metadata: serde_json::Value) -> Self {
        let fault = || form_fault(action, &metadata);
        debug_assert!(fault().is_none(), "metadata of {}: {}", action.as_str(), fault().unwrap_or_default());
        Self { action, target, metadata }
    }
}

/// The fields that several actions have, with what each means in all of them. Ids end in `_id`, what a change replaced begins with `old_`, and
/// what it wrote with `new_`.
pub const SHARED_FIELDS: &[(&str, &str)] = &[
    ("reason", "text: what the person who ordered it has written"),
    ("code", "a reason code: why it came about"),
    ("cause", "text: the true cause of a refusal or a failure"),
    ("result", "`ok`, `refused` or `failed`, where an action is audited however it ends"),
];

/// How this metadata differs from the form that its action has; `None` where it does not.
fn form_fault(action: AuditAction, metadata: &serde_json::Value) -> Option<String> {
    let Some(fields) = metadata.as_object() else { return Some(format!("{metadata} is no object")) };
    let fault = |(name, value): (&String, &serde_json::Value)| {
        let is_valid = match (name.as_str(), value) {
            ("reason" | "code" | "cause", serde_json::Value::Null) => true,
            ("reason" | "cause", value) => value.is_string(),
            ("code", value) => value.as_str().is_some_and(reason_code::is_code),
            ("result", value) => matches!(value.as_str(), Some("ok" | "refused" | "failed")),
            _ => true,
        };
        if !action.fields().contains(&name.as_str()) {
            Some(format!("the table has no field {name}"))
        } else if !is_valid {
            Some(format!("{name} cannot be {value}"))
        } else {
            None
        }
    };
    fields.iter().find_map(fault)
}

/// The interval between audited refusals: a refused caller can repeat the request at once, and must not fill the log.
pub const REFUSAL_AUDIT_INTERVAL: TimeDelta = TimeDelta::minutes(1);

/// When an entity's last refusal was audited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RefusalAudit(Option<Timestamp>);

impl RefusalAudit {
    /// The state after a refusal that is to be audited; `None` where one was audited within the interval.
    #[must_use]
    pub fn audited(self, now: Timestamp) -> Option<Self> {
        let due = self.0.is_none_or(|last| now >= last + REFUSAL_AUDIT_INTERVAL || now < last);
        due.then_some(Self(Some(now)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::collections::BTreeSet;
    use std::fmt::Write as _;

    #[test]
    fn the_audited_actions_are_as_reviewed() {
        let mut table = String::new();
        for action in AuditAction::ALL {
            writeln!(table, "{} {{ {} }}: {}", action.as_str(), action.fields().join(", "), action.when()).unwrap();
        }
        insta::assert_snapshot!(table.replace("{  }", "{}"));
    }

    #[test]
    fn the_shared_fields_are_as_reviewed() {
        let table: Vec<_> = SHARED_FIELDS.iter().map(|(name, meaning)| format!("{name}: {meaning}")).collect();
        insta::assert_snapshot!(table.join("\n"));
    }

    #[test]
    fn every_field_is_named_in_the_one_form() {
        // Names of earlier releases, each with the one that is used.
        let earlier = [
            ("why", "reason or cause"),
            ("error", "cause"),
            ("fault", "failure_code"),
            ("old", "old_value"),
            ("new", "new_value"),
            ("type", "task_type"),
            ("force", "forced"),
        ];
        for action in AuditAction::ALL {
            let (name, fields) = (action.as_str(), action.fields());
            assert_eq!(fields.iter().collect::<BTreeSet<_>>().len(), fields.len(), "{name}");
            for field in fields {
                assert!(reason_code::is_snake_case(field), "{name}: {field}");
                assert!(!field.ends_with("_before"), "{name}: {field}: old_… and new_…");
                for (word, instead) in earlier {
                    assert_ne!(*field, word, "{name}: say {instead}");
                }
                let pair = [("old_", "new_"), ("new_", "old_")]
                    .iter()
                    .find_map(|(has, wants)| field.strip_prefix(has).map(|rest| format!("{wants}{rest}")));
                assert!(pair.is_none_or(|other| fields.contains(&other.as_str())), "{name}: {field} without its pair");
            }
        }
    }

    #[test]
    fn metadata_in_another_form_is_a_fault() {
        let fault = |metadata| form_fault(AuditAction::NodesQuarantine, &metadata);
        for valid in [json!({}), json!({ "code": "health_critical" }), json!({ "reason": "It smells of smoke." })] {
            assert_eq!(fault(valid), None);
        }
        for (metadata, expected) in [
            (json!([]), "[] is no object"),
            (json!({ "why": "x" }), "the table has no field why"),
            (json!({ "code": "It smells of smoke." }), "code cannot be \"It smells of smoke.\""),
            (json!({ "reason": ["x"] }), "reason cannot be [\"x\"]"),
        ] {
            assert_eq!(fault(metadata).as_deref(), Some(expected));
        }
        let refused = form_fault(AuditAction::TerminalsRefuseToken, &json!({ "result": "denied" }));
        assert_eq!(refused.as_deref(), Some("result cannot be \"denied\""));
    }

    #[test]
    fn every_audit_action_has_a_unique_name() {
        let names: BTreeSet<_> = AuditAction::ALL.iter().map(|action| action.as_str()).collect();
        assert_eq!(names.len(), AuditAction::ALL.len());
        assert!(
            names
                .iter()
                .all(|name| name.split_once('.').is_some_and(|(noun, verb)| !noun.is_empty() && !verb.is_empty()))
        );
    }

    #[test]
    fn one_refusal_per_minute_is_audited() {
        let second = |n| Timestamp::UNIX_EPOCH + TimeDelta::seconds(n);
        let (mut refusals, mut audited) = (RefusalAudit::default(), Vec::new());
        for n in 0..200 {
            if let Some(next) = refusals.audited(second(n)) {
                refusals = next;
                audited.push(n);
            }
        }
        assert_eq!(audited, [0, 60, 120, 180]);
        assert!(refusals.audited(second(0)).is_some(), "a clock that was put back silences nothing");
    }
}
