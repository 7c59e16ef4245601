//! The audited actions, as one table to review (specification, *Audit log entry*: every onboarding, failure, reissue, lifecycle action,
//! SSH key mutation and policy change).

use crate::id::EntityRef;
use crate::time::Timestamp;
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};

/// The rows: the name in the log, and when a row is written.
macro_rules! actions {
    ($($variant:ident $name:literal: $when:literal;)+) => {
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
        }
    };
}

actions! {
    NodesCreate "nodes.create": "an administrator registered a node";
    NodesUpdate "nodes.update": "an administrator changed how a node is reached, or its name or labels";
    NodesIssueEnrollmentToken "nodes.issue_enrollment_token": "a bundle with a fresh token was issued; older ones are void";
    NodesReissueEnrollment "nodes.reissue_enrollment": "a recovery bundle was issued for a node";
    NodesEnroll "nodes.enroll": "an agent enrolled with the issued token";
    NodesRefuseEnrollment "nodes.refuse_enrollment": "an enrollment or a recovery was refused, with its true cause; at most one row a minute and node";
    NodesRecover "nodes.recover": "an agent recovered its identity with its recovery token and key";
    NodesCloneSuspected "nodes.clone_suspected": "token and key were shown with an old identity generation: the machine has a copy";
    NodesExpireEnrollment "nodes.expire_enrollment": "a token or an enrollment was not used in time";
    NodesActivate "nodes.activate": "an enrolled agent polled and its inventory matched";
    NodesRenewCertificate "nodes.renew_certificate": "an agent renewed its certificate";
    NodesLose "nodes.lose": "an active node sent nothing in time and counts as offline";
    NodesFind "nodes.find": "an offline node was in contact again";
    NodesQuarantine "nodes.quarantine": "a node was taken out of rent, by an operator, its health, drift or a clone";
    NodesReleaseQuarantine "nodes.release_quarantine": "a quarantine was released by an operator, or its cause was over: holds, left";
    NodesClearFinding "nodes.clear_finding": "an administrator cleared a health finding: finding_id, probe, code, gpu_uuid, reason";
    NodesFailDeployment "nodes.fail_deployment": "the bare-metal provider could not deploy a node's machine, with the reason";
    NodesReimage "nodes.reimage": "a node's machine is reinstalled, ordered by an administrator or after an allocation: reason";
    NodesRefuseSystem "nodes.refuse_system": "a reinstalled machine came back that is not the new system, with the reason";
    NodesFinishReimage "nodes.finish_reimage": "the new system of a reinstalled machine was validated: machine_id, machine_id_before";
    NodesRepair "nodes.repair": "a repair of a health finding began, went on, succeeded or needs an operator: step, attempt, finding";
    NodesRetire "nodes.retire": "a node was taken out of service, or begins to drain";
    NodesDrained "nodes.drained": "the last allocation of a draining node ended: it is retired";
    NodesReactivate "nodes.reactivate": "a retired node was taken into service again";
    NodesRemove "nodes.remove": "a retired node was removed for good";
    NodesRestart "nodes.restart": "the machine was restarted: its agent reports another boot; its allocations are kept";
    NodesOrderTask "nodes.order_task": "an administrator ordered a task of the node itself";
    NodesUpdateAgent "nodes.update_agent": "an administrator ordered another version of the node's agent, or a rollout did: task_id, digest, force, reason or rollout_id";
    NodesValidate "nodes.validate": "an administrator ordered a validation of a node with load: task_id, level, reason";
    NodesResetGpu "nodes.reset_gpu": "an administrator ordered the reset of a GPU that no tenant holds: task_id, gpu_uuid, reason";
    NodesStallTask "nodes.stall_task": "a task that must not be executed twice had no result in time";
    NodesResumeTask "nodes.resume_task": "an operator resumed such a task: it is dispatched again";

    AllocationsRequest "allocations.request": "a user asked for GPUs";
    AllocationsFail "allocations.fail": "a request was refused or its provisioning failed, with the code";
    AllocationsUpdate "allocations.update": "the name or the labels of an allocation were changed: name, labels; null is what was removed";
    AllocationsRelease "allocations.release": "an allocation was given back, or cancelled";
    AllocationsFailRelease "allocations.fail_release": "a clean-up attempt failed, with the reason";
    AllocationsRetryRelease "allocations.retry_release": "an operator ordered another attempt at a failed clean-up";
    AllocationsForceRelease "allocations.force_release": "an operator ended an allocation without proof of clean-up";

    AllocationsUncover "allocations.uncover": "an allocation is released since its account was depleted and the grace over";
    AllocationsFault "allocations.fault": "a critical fault of its node ended an allocation's billing";
    AllocationsEvacuate "allocations.evacuate": "an allocation is released since its tenant's time to leave a failing GPU or machine has ended: node_id, reason";

    TerminalsOpen "terminals.open": "the user of an active allocation opened a terminal session";
    TerminalsIssueToken "terminals.issue_token": "the user asked for a token to connect to a terminal session again";
    TerminalsAttach "terminals.attach": "a connection was admitted with a token, before its upgrade";
    TerminalsRefuseToken "terminals.refuse_token": "a terminal token was refused, with its true cause; at most one row a minute and session";
    TerminalsClose "terminals.close": "a terminal session ended by itself, by its user, with its allocation, or at the end of its lifetime";
    TerminalsKill "terminals.kill": "an administrator closed a terminal session";
    TerminalsChangeRecording "terminals.change_recording": "a policy switched the recording of a living session on or off, or changed its mode or bound";
    TerminalsReadRecording "terminals.read_recording": "a caller read a session's recording; the row is written before the first byte is sent";
    TerminalsForgetRecording "terminals.forget_recording": "a session's recording was deleted at the end of its retention";

    SkusCreate "skus.create": "an administrator made a catalog entry";
    SkusUpdate "skus.update": "an administrator revised a catalog entry";
    SkusApprove "skus.approve": "one of the two approvals of a change of status";
    SkusActivate "skus.activate": "both had approved: a catalog entry was activated";
    SkusDeprecate "skus.deprecate": "both had approved: a catalog entry was deprecated";
    SkusDeactivate "skus.deactivate": "both had approved: a catalog entry was deactivated";
    SkusWithdrawApproval "skus.withdraw_approval": "an approval that waited was withdrawn by the opposite request";
    SkusExpireApproval "skus.expire_approval": "an approval expired without the second one";

    SshKeysCreate "ssh_keys.create": "a user registered a public key, or was refused";
    SshKeysDelete "ssh_keys.delete": "a user deleted a key, or an administrator did, or that was refused";
    SshKeysMakeDefault "ssh_keys.make_default": "a user chose the default key, or an administrator did among theirs, or that was refused";
    SshKeysChoose "ssh_keys.choose": "the keys that open one allocation were chosen, or that was refused";
    SshKeysReconcile "ssh_keys.reconcile": "a node wrote the keys that open an allocation, or could not";

    PoliciesWrite "policies.write": "a policy value was written: policy_key, old_value, new_value, reason";
    PoliciesTakeBack "policies.take_back": "a policy value was taken back, the less specific one holds: policy_key, old_value, reason";
    HealthRulesWrite "health_rules.write": "an administrator has overridden the table of health findings: pattern, old, new, reason";
    HealthRulesTakeBack "health_rules.take_back": "an override of the table of health findings was taken back: pattern, old, reason";
    RolloutsCreate "rollouts.create": "an administrator began a rollout of an agent's package: digest, canary, max_unavailable, selector, reason";
    RolloutsPause "rollouts.pause": "an administrator paused a rollout: reason";
    RolloutsResume "rollouts.resume": "an administrator resumed a rollout that was paused or had stopped: reason";
    RolloutsAbort "rollouts.abort": "an administrator aborted a rollout: reason";
    RolloutsStop "rollouts.stop": "a rollout stopped since the update of a node had failed: node_id, reason";
    BillingOpen "billing.open": "an operator opened a billing account";
    BillingPlan "billing.plan": "a token named another plan for the holder of an account, which is in force from the next window: old_plan, new_plan";
    BillingAdjust "billing.adjust": "an operator credited or debited an account: amount_minor, reason";
    BillingRefundAllocation "billing.refund_allocation": "an operator credited a part of an allocation's cost: refund_id, allocation_id, reason";
    PaymentsCreate "payments.create": "a user began to pay into an account: amount_minor, currency";
    PaymentsCancel "payments.cancel": "a payer canceled a payment that was not paid";
    PaymentsRefund "payments.refund": "a payer requested a refund: refund_id, amount_minor, reason";
    PaymentsReverse "payments.reverse": "a refund or a dispute was made, or undone, at the payment processor: reversal_id, what, amount_minor";
    ProcessorEventsRetry "processor_events.retry": "an operator had an event of the payment processor processed again: event_id, event_type, reason";
    ProcessorEventsDismiss "processor_events.dismiss": "an operator dismissed an event of the payment processor: event_id, event_type, reason";
    PlatformRolesBind "platform_roles.bind": "a platform role was bound to a subject";
    PlatformRolesRevoke "platform_roles.revoke": "a platform role was revoked";
    BrowserSessionsOpen "browser_sessions.open": "a user logged in to the web console: user_id, address, user_agent";
    BrowserSessionsEnd "browser_sessions.end": "a login to the web console ended: user_id, code; an administrator's reason, the provider's error";
    ServiceAccountsCreate "service_accounts.create": "a service account was made";
    ServiceAccountsAddKey "service_accounts.add_key": "a key was added to a service account";
    ServiceAccountsRevokeKey "service_accounts.revoke_key": "a key of a service account was revoked";
    ServiceAccountsDelete "service_accounts.delete": "a service account and its keys were revoked";
    KeysStage "keys.stage": "an operator staged a key: purpose, key_id, version, reason";
    KeysActivate "keys.activate": "an operator activated a key in place of the previous one";
    KeysRetire "keys.retire": "a key was retired; by force, with the number of nodes that it cut off";
    NotificationEndpointsCreate "notification_endpoints.create": "a user created an endpoint that receives events: holder, kind, host";
    NotificationEndpointsUpdate "notification_endpoints.update": "an endpoint's URL, its events, or whether it is enabled was changed";
    NotificationEndpointsRotateSecret "notification_endpoints.rotate_secret": "an endpoint's secret was rotated; the previous one signs for another day";
    NotificationEndpointsDelete "notification_endpoints.delete": "an endpoint was deleted, with the messages that waited: waiting, dead_letters";
    NotificationEndpointsTest "notification_endpoints.test": "an endpoint was sent a test message";
    NotificationEndpointsResend "notification_endpoints.resend": "dead letters were sent again: message_id, count, reason";
    NotificationEndpointsDismiss "notification_endpoints.dismiss": "dead letters were discarded: message_id, count, reason";
    NotificationsBroadcast "notifications.broadcast": "an operator sent a broadcast to all connected clients: severity, message";
    RuntimeRestart "runtime.restart": "an operator restarted an entity or a worker";
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
    #[must_use]
    pub const fn new(action: AuditAction, target: EntityRef, metadata: serde_json::Value) -> Self {
        Self { action, target, metadata }
    }
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
    use std::collections::BTreeSet;
    use std::fmt::Write as _;

    #[test]
    fn the_audited_actions_are_as_reviewed() {
        let mut table = String::new();
        for action in AuditAction::ALL {
            writeln!(table, "{}: {}", action.as_str(), action.when()).unwrap();
        }
        insta::assert_snapshot!(table);
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
