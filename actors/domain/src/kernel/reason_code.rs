//! The reason codes, as one table to review: why something is in its state, failed, or ended.
//!
//! A code has one meaning wherever it appears: in states, events, notifications, and the field `code` of audit metadata. Beside these, agents
//! report codes of their own, of the same form.

/// Where a code appears.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum ReasonPlace {
    /// `state_reason.code` of a node, and its event `node.state_changed`.
    NodeState,
    /// `reason` in `status_history` of an allocation, and `provisioning.released`.
    AllocationStatus,
    /// `failure.code` of an allocation, and its events of failures; codes of agents appear there too.
    AllocationFailure,
    /// Why the tenant of a node is not billed, or is asked to leave.
    TenantFault,
    /// How a terminal session ended.
    TerminalEnd,
    /// Why the node could not start a terminal session, or lost it; codes of agents appear there too.
    TerminalFailure,
    /// How a login to the web console ended.
    BrowserSessionEnd,
    /// Why a rollout does not update a node.
    RolloutSkip,
    /// Why the update of a node failed; codes of agents and findings (`probe/code`) appear there too.
    RolloutFailure,
    /// Why a public SSH key was refused.
    SshKeyRefusal,
}

/// A row of the table.
#[derive(Clone, Copy, Debug)]
pub struct ReasonCode {
    pub code: &'static str,
    pub appears_in: &'static [ReasonPlace],
    pub meaning: &'static str,
}

macro_rules! reason_codes {
    ($($code:literal in $($place:ident)+: $meaning:literal;)+) => {
        /// The table.
        pub const ALL: &[ReasonCode] = &[$(ReasonCode {
            code: $code,
            appears_in: &[$(ReasonPlace::$place),+],
            meaning: $meaning,
        }),+];
    };
}

reason_codes! {
    "registered" in NodeState: "an administrator registered the node";
    "token_issued" in NodeState: "a bundle with an enrollment token was issued";
    "token_expired" in NodeState: "the enrollment token was not used in time";
    "certificate_issued" in NodeState: "the agent enrolled and has a certificate";
    "enrollment_expired" in NodeState: "the enrolled agent did not become active in time";
    "inventory_mismatch" in NodeState: "the inventory of the enrolled node differs from its SKU";
    "first_poll" in NodeState: "the agent polled for the first time, and the inventory matched";
    "silent" in NodeState: "the agent sent nothing in time";
    "heard_again" in NodeState: "the agent is in contact again";
    "restarted" in NodeState: "the agent is in contact again, and the machine was restarted";
    "draining" in NodeState RolloutSkip: "the node takes no new allocation and is retired after its last one";
    "drained" in NodeState: "the last allocation of the draining node ended";
    "retired" in NodeState RolloutSkip: "the node is out of service";
    "reactivated" in NodeState: "the retired node is in service again";
    "removing" in NodeState: "the node is being removed";
    "removed" in NodeState RolloutSkip: "the node was removed for good, or is being removed";
    "quarantined" in NodeState RolloutSkip: "the node is out of rent until its quarantine ends";
    "quarantine_released" in NodeState: "the quarantine was released, or its cause is over";
    "health_critical" in NodeState TenantFault: "the agent reports critical health of the machine";
    "inventory_drift" in NodeState: "the inventory of the node in service differs from its SKU";
    "integrity_finding" in NodeState: "the agent's package or the machine's privileges were altered";
    "clone_suspected" in NodeState: "the node's identity was shown by a copy of the machine";
    "gpu_of_another_node" in NodeState: "the node reports a GPU that another node has claimed";
    "validation_failed" in NodeState: "the node failed its validation";
    "forced_release" in NodeState: "an allocation was released without proof of clean-up";
    "deployment_failed" in NodeState: "the bare-metal provider could not deploy the machine";
    "reimaging" in NodeState: "the machine is being reinstalled";
    "system_refused" in NodeState: "the reinstalled machine is not the new system";
    "machine_lost" in NodeState: "the bare-metal provider released the machine, or gave it to another";

    "requested" in AllocationStatus: "its user asked for it";
    "devices_reserved" in AllocationStatus: "a node holds GPUs for it";
    "tenant_ready" in AllocationStatus: "the node has set it up";
    "provisioning_failed" in AllocationStatus: "it could not be set up: `failure` has the cause";
    "release_requested" in AllocationStatus: "its user released it";
    "balance_depleted" in AllocationStatus: "no money covers it, and the grace is over";
    "evacuated" in AllocationStatus: "its GPU or machine goes out of service, and the time to leave has ended";
    "clean_up_retried" in AllocationStatus: "the clean-up failed and is tried again";
    "clean_up_ordered" in AllocationStatus: "the clean-up failed, and an administrator ordered another attempt";
    "cleaned_up" in AllocationStatus: "the node has proved the clean-up";
    "cancelled" in AllocationStatus: "its user released it before a node was found";
    "forced" in AllocationStatus: "an administrator released it without proof of clean-up";

    "insufficient_capacity" in AllocationFailure: "no node has the GPUs";
    "concurrency_limit_exceeded" in AllocationFailure: "the user has as many allocations as policy permits";
    "insufficient_balance" in AllocationFailure: "the account does not cover the first window";
    "provisioning_timeout" in AllocationFailure: "the node did not confirm in time";
    "node_not_available" in AllocationFailure: "the node is not in service any more";
    "reservation_lost" in AllocationFailure: "the node holds no GPUs for the allocation";
    "agent_error" in AllocationFailure: "the agent reported an error without a valid code";
    "release_timeout" in AllocationFailure: "the node did not prove the clean-up in time";
    "proof_missing" in AllocationFailure: "the agent gave no valid clean-up proof";
    "clean_up_failed" in AllocationFailure: "the clean-up attempt had failed, and is reported once more";

    "machine_fault" in AllocationFailure TenantFault: "a finding about the machine ends billing";
    "gpu_fault" in AllocationFailure TenantFault: "a finding about a GPU of the allocation ends billing";
    "gpu_lost" in AllocationFailure TenantFault: "the machine does not list a GPU of the allocation any more";
    "machine_maintenance" in TenantFault: "a finding about the machine asks its tenants to leave";
    "gpu_maintenance" in TenantFault: "a finding about a GPU of the allocation asks its tenant to leave";

    "exited" in TerminalEnd: "its program ended";
    "failed" in TerminalEnd: "the node could not start it, or lost it";
    "never_attached" in TerminalEnd: "its first token was not used in time";
    "killed" in TerminalEnd: "an administrator closed it, or its node's certificates were revoked";
    "allocation_ended" in TerminalEnd: "its allocation is not active any more";
    "detached_expired" in TerminalEnd: "no connection came back in time";
    "lifetime" in TerminalEnd BrowserSessionEnd: "it reached its longest lifetime";
    "displaced" in TerminalEnd BrowserSessionEnd: "its user opened one above the limit";
    "ended_by_user" in TerminalEnd BrowserSessionEnd: "its user ended it, from elsewhere";
    "logged_out" in TerminalEnd BrowserSessionEnd: "the login to the web console ended that it was opened by, or that it is";
    "tenant_not_ready" in TerminalFailure: "the allocation is not set up on the node";
    "agent_outdated" in TerminalFailure: "the agent has no task for terminals";
    "too_many_terminals" in TerminalFailure: "the allocation has as many sessions as one may have";
    "not_begun" in TerminalFailure: "the agent did not begin it in time";
    "agent_restarted" in TerminalFailure: "the agent was stopped or restarted";

    "idle" in BrowserSessionEnd: "no request came in time";
    "ended_by_administrator" in BrowserSessionEnd: "an administrator ended it";
    "provider_logout" in BrowserSessionEnd: "the identity provider logged its user out";
    "provider_refused" in BrowserSessionEnd: "the identity provider refused to refresh its tokens";

    "up_to_date" in RolloutSkip: "the agent reports this version";
    "not_active" in RolloutSkip: "the node was never active";
    "offline" in RolloutSkip RolloutFailure: "the node is not in contact, or was silent after its update";
    "update_in_progress" in RolloutSkip: "another update has no result";
    "too_many_tasks" in RolloutSkip: "the node has as many tasks without a result as it may have";
    "unsupported" in RolloutSkip: "no package installed its agent, or the agent has no task for updates";
    "update_unsupported" in RolloutFailure: "the agent has no way to update itself";
    "no_result" in RolloutFailure: "no result in time: it is unknown which version is in use";

    "private_key" in SshKeyRefusal: "it is a private key";
    "weak" in SshKeyRefusal: "its type or length is not accepted";
    "options" in SshKeyRefusal: "it has options before the key";
    "unreadable" in SshKeyRefusal: "it is no public key";
}

/// Whether the table has this code.
#[must_use]
pub fn is_listed(code: &str) -> bool {
    ALL.iter().any(|row| row.code == code)
}

/// Whether this text has the form of a code: snake case; a finding's is `probe/code`.
#[must_use]
pub fn is_code(text: &str) -> bool {
    let is_of_finding = |code: &str| {
        !code.is_empty() && code.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
    };
    match text.split_once('/') {
        None => is_snake_case(text),
        Some((probe, code)) => is_snake_case(probe) && is_of_finding(code),
    }
}

/// Whether this is lower-case letters, digits and underscores.
#[must_use]
pub fn is_snake_case(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
}

#[cfg(test)]
mod tests;
