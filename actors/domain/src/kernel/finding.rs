//! Health findings, as one table to review: what follows from each, who causes it, and what repairs it (decision 0048).
//!
//! Agents report what they found, by probe and code, whose segments go from the general to the special; the judgement is here alone, so that a new row needs no new agent. The rows of Xids
//! follow NVIDIA's catalog. A finding that no row has is shown, and has no other consequence. Administrators can override a row.

mod overrides;

pub use overrides::{CodePattern, Judgement, NoPattern, OverrideFault, RuleOverride, RuleOverrides};

use serde::{Deserialize, Serialize};

/// What a finding has as consequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, strum::IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum FindingClass {
    /// No new allocation gets the GPU, or the machine.
    PreventAllocation,
    /// Its tenant is asked to leave.
    Evacuate,
    /// Its tenant pays nothing from the fault on.
    BillingCredit,
    /// The node is in quarantine until the finding is over, or an administrator has cleared it. Its tenants run on.
    Quarantine,
    /// It is shown.
    Warn,
}

/// What can cause a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum FindingCause {
    /// The tenant's program can: it never stops a meter and takes nothing out of rent.
    Tenant,
    Hardware,
    /// The driver, or the operating system.
    Software,
    /// No row has it.
    Unknown,
}

/// What repairs a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Repair {
    /// It ends by itself.
    None,
    /// A reset of the GPU.
    Reset,
    /// A reboot of the machine.
    Reboot,
    /// Only an operator: the finding stays until one clears it.
    Operator,
}

/// What a finding is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FindingScope {
    Gpu,
    Machine,
}

/// A row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FindingRule {
    pub probe: &'static str,
    pub code: &'static str,
    pub scope: FindingScope,
    pub classes: &'static [FindingClass],
    pub cause: FindingCause,
    pub repair: Repair,
    /// For operators.
    pub meaning: &'static str,
    /// For the tenant; empty where nothing concerns them.
    pub tenant_message: &'static str,
}

/// The code, and the codes above it: `145.fatal.netir`, `145.fatal`, `145`.
fn lineage(code: &str) -> impl Iterator<Item = &str> {
    std::iter::successors(Some(code), |code| code.rsplit_once('.').map(|(above, _)| above))
}

impl FindingRule {
    /// The row of a finding: of its code, or of the next code above it that has one. A wording that no row knows is judged by its number.
    #[must_use]
    pub fn of(probe: &str, code: &str) -> &'static Self {
        let row = lineage(code).find_map(|code| TABLE.iter().find(|rule| rule.probe == probe && rule.code == code));
        row.unwrap_or(if MACHINE_PROBES.contains(&probe) { &UNKNOWN_OF_MACHINE } else { &UNKNOWN_OF_GPU })
    }

    #[must_use]
    pub fn has(&self, class: FindingClass) -> bool {
        self.classes.contains(&class)
    }
}

/// The probes whose findings are about the machine.
const MACHINE_PROBES: &[&str] = &[
    "driver",
    "fabric",
    "disk",
    "memory",
    "clock",
    "kernel_log",
    "reading",
    "package",
    "privilege",
    "sxid",
    "limits",
    "ssh",
];
/// The probe whose findings an administrator accepts by clearing them: the agent then compares with what they are about (decision 0057).
pub const PRIVILEGE_PROBE: &str = "privilege";

const UNKNOWN_OF_GPU: FindingRule = unknown(FindingScope::Gpu);
const UNKNOWN_OF_MACHINE: FindingRule = unknown(FindingScope::Machine);

const fn unknown(scope: FindingScope) -> FindingRule {
    FindingRule {
        probe: "",
        code: "",
        scope,
        classes: SHOWN,
        cause: FindingCause::Unknown,
        repair: Repair::None,
        meaning: "not in the table",
        tenant_message: "",
    }
}

const SHOWN: &[FindingClass] = &[FindingClass::Warn];
/// For no new tenant; the present one is not harmed.
const WITHHELD: &[FindingClass] = &[FindingClass::PreventAllocation];
/// The present tenant works on, and is asked to leave.
const LEAVE: &[FindingClass] = &[FindingClass::PreventAllocation, FindingClass::Evacuate];
/// The machine may have been altered by an intruder.
const ALTERED: &[FindingClass] = &[FindingClass::PreventAllocation, FindingClass::Quarantine];
/// Its present tenant cannot work with it.
const FAILED: &[FindingClass] = &[FindingClass::PreventAllocation, FindingClass::Evacuate, FindingClass::BillingCredit];

const TENANT: FindingCause = FindingCause::Tenant;
const HARDWARE: FindingCause = FindingCause::Hardware;
const SOFTWARE: FindingCause = FindingCause::Software;

const GPU_FAILED: &str =
    "A GPU of your allocation has failed. It costs nothing from the fault on; save what you can and release it.";
const GPU_TO_LEAVE: &str =
    "A GPU of your allocation needs maintenance. Save your work and release the allocation soon.";
const MACHINE_FAILED: &str =
    "The machine of your allocation has failed. It costs nothing from the fault on; save what you can and release it.";
const MACHINE_TO_LEAVE: &str =
    "The machine of your allocation needs maintenance. Save your work and release the allocation soon.";
const YOUR_PROGRAM: &str = "A program of yours has caused an error on a GPU; the GPU works on.";
const CONTAINED: &str = "A memory error has ended programs of yours on a GPU. The GPU works on: start them again.";
const AFTER_A_FAULT: &str = "A program of yours was ended after an error on a GPU.";
const NO_LOGINS: &str = "Logins by SSH do not work at the moment. A terminal does, and your programs run on.";
const SLOWED: &str = "A GPU of your allocation is slowed down at the moment.";

/// The rows: `probe code: classes, cause, repair, meaning, tenant's message;`, with the scope of each block.
macro_rules! table {
    ($($scope:ident { $($probe:literal $code:literal: $classes:ident, $cause:ident, $repair:ident, $meaning:literal, $message:expr;)+ })+) => {
        /// All rows.
        pub const TABLE: &[FindingRule] = &[$($(FindingRule {
            probe: $probe,
            code: $code,
            scope: FindingScope::$scope,
            classes: $classes,
            cause: $cause,
            repair: Repair::$repair,
            meaning: $meaning,
            tenant_message: $message,
        },)+)+];
    };
}

table! {
    Gpu {
        "gpu" "lost": FAILED, HARDWARE, Reboot, "the GPU has fallen off the bus", GPU_FAILED;
        "gpu" "missing": FAILED, HARDWARE, Reboot, "the driver does not list a GPU that it listed in this boot", GPU_FAILED;
        "gpu" "unreadable": FAILED, HARDWARE, Reset, "the driver reports nothing of this GPU", GPU_FAILED;
        "gpu" "incomplete": WITHHELD, HARDWARE, None, "the driver does not report the GPU's name or its memory", "";

        "xid" "8": SHOWN, TENANT, None, "a program was ended since it took too long", YOUR_PROGRAM;
        "xid" "13": SHOWN, TENANT, None, "an exception of the graphics engine: usually a program's invalid access", YOUR_PROGRAM;
        "xid" "31": SHOWN, TENANT, None, "a page fault: a program's invalid address", YOUR_PROGRAM;
        "xid" "32": SHOWN, SOFTWARE, None, "an invalid or corrupted push buffer", "";
        "xid" "38": SHOWN, SOFTWARE, None, "an error of the driver's firmware", "";
        "xid" "43": SHOWN, TENANT, None, "a channel was reset: a program's error", YOUR_PROGRAM;
        "xid" "44": SHOWN, TENANT, None, "a fault of the graphics engine during a context switch", YOUR_PROGRAM;
        "xid" "45": SHOWN, TENANT, None, "clean-up after a program has ended or failed", YOUR_PROGRAM;
        "xid" "45.caused_by": SHOWN, TENANT, None, "clean-up after a program that another Xid has ended", AFTER_A_FAULT;
        "xid" "46": LEAVE, HARDWARE, Reset, "the GPU has stopped processing", GPU_TO_LEAVE;
        "xid" "48": FAILED, HARDWARE, Reset, "an uncorrectable memory error (double bit)", GPU_FAILED;
        "xid" "54": LEAVE, HARDWARE, Operator, "auxiliary power is not connected", GPU_TO_LEAVE;
        "xid" "61": FAILED, HARDWARE, Reset, "the micro-controller of the GPU has stopped at a breakpoint", GPU_FAILED;
        "xid" "62": FAILED, HARDWARE, Reset, "the micro-controller of the GPU has halted", GPU_FAILED;
        "xid" "63": WITHHELD, HARDWARE, Reset, "a memory row is recorded to be remapped at the next reset", "";
        "xid" "64": FAILED, HARDWARE, Operator, "a memory row could not be recorded to be remapped", GPU_FAILED;
        "xid" "65": SHOWN, TENANT, None, "an exception of the video processor", YOUR_PROGRAM;
        "xid" "66": SHOWN, TENANT, None, "an illegal access by a program", YOUR_PROGRAM;
        "xid" "67": SHOWN, TENANT, None, "an illegal access by a program", YOUR_PROGRAM;
        "xid" "68": SHOWN, TENANT, None, "an exception of the video decoder", YOUR_PROGRAM;
        "xid" "69": SHOWN, TENANT, None, "an error of the graphics engine's class", YOUR_PROGRAM;
        "xid" "74": FAILED, HARDWARE, Reset, "an error of an NVLink", GPU_FAILED;
        "xid" "79": FAILED, HARDWARE, Reboot, "the GPU has fallen off the bus", GPU_FAILED;
        "xid" "92": WITHHELD, HARDWARE, Operator, "many correctable memory errors (single bit)", "";
        "xid" "94": SHOWN, TENANT, None, "a contained memory error: it ended the program that met it", CONTAINED;
        "xid" "95": FAILED, HARDWARE, Reset, "an uncontained memory error", GPU_FAILED;
        "xid" "109": LEAVE, HARDWARE, Reset, "a context switch took too long", GPU_TO_LEAVE;
        "xid" "110": FAILED, HARDWARE, Reboot, "a security fault", GPU_FAILED;
        "xid" "119": FAILED, HARDWARE, Reset, "the GPU's system processor does not answer", GPU_FAILED;
        "xid" "120": FAILED, HARDWARE, Reset, "an error of the GPU's system processor", GPU_FAILED;
        "xid" "121": SHOWN, HARDWARE, None, "a corrected error of the link between chips", "";
        "xid" "136": LEAVE, HARDWARE, Reset, "an NVLink could not be trained", GPU_TO_LEAVE;
        "xid" "137": SHOWN, TENANT, None, "a program's illegal access to another GPU's memory", YOUR_PROGRAM;
        "xid" "140": FAILED, HARDWARE, Reset, "an unrecovered memory error", GPU_FAILED;
        "xid" "143": FAILED, HARDWARE, Reboot, "the GPU could not be initialised", GPU_FAILED;
        // Their lines say whether they are fatal. Where one does not, the driver asks for a reset (`recovery_action`) if it needs one, and the tenant is
        // to leave then.
        "xid" "144": WITHHELD, HARDWARE, Reset, "an error of an NVLink (SAW)", "";
        "xid" "144.fatal": FAILED, HARDWARE, Reset, "a fatal error of an NVLink (SAW)", GPU_FAILED;
        "xid" "144.nonfatal": SHOWN, HARDWARE, None, "an error of an NVLink (SAW) that it has recovered from", "";
        "xid" "145": WITHHELD, HARDWARE, Reset, "an error of an NVLink (RLW)", "";
        "xid" "145.fatal": FAILED, HARDWARE, Reset, "a fatal error of an NVLink (RLW)", GPU_FAILED;
        "xid" "145.nonfatal": SHOWN, HARDWARE, None, "an error of an NVLink (RLW) that it has recovered from", "";
        "xid" "146": WITHHELD, HARDWARE, Reset, "an error of an NVLink (TLW)", "";
        "xid" "146.fatal": FAILED, HARDWARE, Reset, "a fatal error of an NVLink (TLW)", GPU_FAILED;
        "xid" "146.nonfatal": SHOWN, HARDWARE, None, "an error of an NVLink (TLW) that it has recovered from", "";
        "xid" "147": WITHHELD, HARDWARE, Reset, "an error of an NVLink (TREX)", "";
        "xid" "147.fatal": FAILED, HARDWARE, Reset, "a fatal error of an NVLink (TREX)", GPU_FAILED;
        "xid" "147.nonfatal": SHOWN, HARDWARE, None, "an error of an NVLink (TREX) that it has recovered from", "";
        "xid" "148": WITHHELD, HARDWARE, Reset, "an error of an NVLink (NVLPW)", "";
        "xid" "148.fatal": FAILED, HARDWARE, Reset, "a fatal error of an NVLink (NVLPW)", GPU_FAILED;
        "xid" "148.nonfatal": SHOWN, HARDWARE, None, "an error of an NVLink (NVLPW) that it has recovered from", "";
        "xid" "149": WITHHELD, HARDWARE, Reset, "an error of an NVLink (NETIR)", "";
        "xid" "149.fatal": FAILED, HARDWARE, Reset, "a fatal error of an NVLink (NETIR)", GPU_FAILED;
        "xid" "149.nonfatal": SHOWN, HARDWARE, None, "an error of an NVLink (NETIR) that it has recovered from", "";
        "xid" "150": WITHHELD, HARDWARE, Reset, "an error of an NVLink (MSE)", "";
        "xid" "150.fatal": FAILED, HARDWARE, Reset, "a fatal error of an NVLink (MSE)", GPU_FAILED;
        "xid" "150.nonfatal": SHOWN, HARDWARE, None, "an error of an NVLink (MSE) that it has recovered from", "";
        "xid" "154": SHOWN, HARDWARE, None, "the action that recovers the GPU has changed: see recovery_action", "";
        "xid" "156": WITHHELD, HARDWARE, Reset, "a resource of the GPU is recorded to be retired", "";
        "xid" "157": WITHHELD, HARDWARE, Operator, "a resource of the GPU could not be recorded to be retired", "";
        "xid" "158": FAILED, HARDWARE, Reset, "a fatal time-out of the GPU", GPU_FAILED;

        // Its programs were ended by an Xid of its own; the memory is spared by rows that are remapped.
        "ecc" "uncorrectable": SHOWN, HARDWARE, None, "uncorrectable memory errors since the driver was loaded", "";
        "row_remap" "pending": WITHHELD, HARDWARE, Reset, "memory rows are remapped at the next reset", "";
        "row_remap" "failed": LEAVE, HARDWARE, Operator, "memory rows could not be remapped: the GPU is to be replaced", GPU_TO_LEAVE;
        "recovery_action" "gpu_reset": LEAVE, HARDWARE, Reset, "the driver asks for a reset of the GPU", GPU_TO_LEAVE;
        "recovery_action" "node_reboot": LEAVE, HARDWARE, Reboot, "the driver asks for a reboot", GPU_TO_LEAVE;
        "recovery_action" "drain_p2p": LEAVE, HARDWARE, Reset, "the driver asks to end traffic between GPUs", GPU_TO_LEAVE;
        "recovery_action" "drain_and_reset": LEAVE, HARDWARE, Reset, "the driver asks to drain the GPU and to reset it", GPU_TO_LEAVE;
        "slowdown" "thermal": SHOWN, HARDWARE, None, "the clocks are lowered by heat", SLOWED;
        "slowdown" "power": SHOWN, HARDWARE, None, "the clocks are lowered by the power brake", SLOWED;
        "nvlink" "down": WITHHELD, HARDWARE, Reset, "NVLinks that were active in this boot are not", "";
        // Its present tenant may need no other GPU: nothing of the fabric asks it to leave.
        "gpu_fabric" "not_started": WITHHELD, HARDWARE, None, "the GPU has not begun to join the NVSwitch fabric; others have joined it", "";
        "gpu_fabric" "in_progress": WITHHELD, HARDWARE, None, "the GPU is still joining the NVSwitch fabric; others have joined it", "";
        "gpu_fabric" "failed": WITHHELD, HARDWARE, Reset, "the GPU could not join the NVSwitch fabric", "";
        "gpu_fabric" "degraded_bandwidth": WITHHELD, HARDWARE, Reset, "the GPU has less bandwidth to the NVSwitch fabric", "";
        "gpu_fabric" "route_recovery": WITHHELD, HARDWARE, None, "a route of the GPU through the NVSwitch fabric is being recovered", "";
        "gpu_fabric" "route_unhealthy": WITHHELD, HARDWARE, Reset, "a route of the GPU through the NVSwitch fabric has failed", "";
        "gpu_fabric" "access_timeout_recovery": WITHHELD, HARDWARE, None, "the GPU recovers from accesses to the fabric that timed out", "";
        "gpu_fabric" "incorrect_configuration": WITHHELD, HARDWARE, None, "the fabric is not wired or configured as this GPU needs it", "";
        "gpu_fabric" "unhealthy": WITHHELD, HARDWARE, Reset, "the driver reports the GPU's part in the fabric as unhealthy", "";
        // Its tenant has left, and a reset frees what is left on it.
        "clean_up" "unproved": WITHHELD, HARDWARE, Reset, "the driver does not show that the GPU is free of its last tenant", "";
        // A mode is no fault of the GPU: its present tenant, if any, can use it.
        "gpu_mode" "mig": WITHHELD, SOFTWARE, None, "the GPU is divided into instances (MIG): CUDA finds no device", "";
        "gpu_mode" "mig_pending": WITHHELD, SOFTWARE, None, "the GPU is divided into instances (MIG) from its next reset on", "";
        "gpu_mode" "compute_prohibited": WITHHELD, SOFTWARE, None, "the compute mode of the GPU lets no program compute", "";
        "gpu_mode" "compute_exclusive": WITHHELD, SOFTWARE, None, "the compute mode of the GPU lets one program at a time compute", "";
        "pcie" "width": SHOWN, HARDWARE, None, "the PCIe link has fewer lanes than it could have", "";
    }
    Machine {
        "driver" "unresponsive": WITHHELD, SOFTWARE, None, "the driver did not answer lately", "";
        "driver" "hung": FAILED, SOFTWARE, None, "the driver does not answer", MACHINE_FAILED;
        "driver" "not_loaded": FAILED, SOFTWARE, None, "the driver is installed and not loaded", MACHINE_FAILED;
        "driver" "failed": FAILED, SOFTWARE, None, "the driver answers with errors only", MACHINE_FAILED;
        // What the agent's own process meets says nothing about the programs of tenants.
        "driver" "not_callable": WITHHELD, SOFTWARE, None, "the agent cannot call the driver", "";
        "driver" "restart_needed": WITHHELD, SOFTWARE, Reboot, "the driver was replaced: no new program can use the GPUs before a reboot", "";
        "driver" "device_files": WITHHELD, SOFTWARE, None, "the driver's libraries may open the GPUs of one tenant to another: ModifyDeviceFiles is not 0", "";
        // The GPUs of a machine are of one fabric. It is set up after each boot: a reboot would begin that again.
        "fabric" "not_started": WITHHELD, SOFTWARE, None, "no GPU has begun to join the NVSwitch fabric: is the fabric manager running?", "";
        "fabric" "in_progress": WITHHELD, SOFTWARE, None, "the GPUs are still joining the NVSwitch fabric: see the fabric manager's log", "";
        // Its tenants may need no NVLink: none is asked to leave.
        "sxid" "fatal": WITHHELD, HARDWARE, Reboot, "a fatal error of an NVSwitch", "";
        "sxid" "nonfatal": SHOWN, HARDWARE, None, "an error of an NVSwitch that it has recovered from", "";
        "disk" "read_only": LEAVE, HARDWARE, None, "the root file system has become read-only", MACHINE_TO_LEAVE;
        "disk" "full": WITHHELD, SOFTWARE, None, "the agent's state folder has no space left", "";
        "memory" "uncorrectable": LEAVE, HARDWARE, Reboot, "uncorrectable errors of the machine's memory", MACHINE_TO_LEAVE;
        "clock" "skew": SHOWN, SOFTWARE, None, "the clock differs from the control plane's", "";
        "kernel_log" "overrun": SHOWN, SOFTWARE, None, "lines of the kernel's log were lost: a fault may be unknown", "";
        // A reading that hangs stops no other, and its present tenants run on.
        "reading" "root": WITHHELD, SOFTWARE, None, "the root file system does not answer", "";
        "reading" "state": WITHHELD, SOFTWARE, None, "the agent's state folder does not answer: no task can be recorded", "";
        "reading" "storage": WITHHELD, SOFTWARE, None, "a disk of the machine does not answer", "";
        "reading" "integrity": WITHHELD, SOFTWARE, None, "the machine's integrity is not compared: a file system does not answer", "";
        "reading" "memory_errors": SHOWN, SOFTWARE, None, "the kernel's counts of memory errors cannot be read: a fault may be unknown", "";
        "reading" "inventory": SHOWN, SOFTWARE, None, "a part of the inventory or the load cannot be read, and is as it was before", "";
        "limits" "not_taken": SHOWN, SOFTWARE, None, "the kernel does not bound the memory or the processes of a tenant", "";
        "limits" "no_quota": SHOWN, SOFTWARE, None, "the kernel does not bound the disk space of a tenant", "";
        // Its tenants run on, and the next one could not log in.
        "ssh" "unavailable": WITHHELD, SOFTWARE, None, "the agent's sshd does not run: tenants cannot log in by SSH", NO_LOGINS;

        "package" "altered": ALTERED, SOFTWARE, None, "files of the agent's package are not those that were signed", "";
        "privilege" "sudoers": ALTERED, SOFTWARE, None, "rules of sudo were added or changed since the last clean-up", "";
        "privilege" "setuid": ALTERED, SOFTWARE, None, "files that run with the rights of another user were added or changed", "";
        "privilege" "file_capability": ALTERED, SOFTWARE, None, "programs with capabilities were added or changed", "";
        "privilege" "uid_zero": ALTERED, SOFTWARE, None, "accounts with the rights of root were added or changed", "";
        "privilege" "account": ALTERED, SOFTWARE, None, "accounts that are no tenant's, or passwords, were added or changed", "";
        "privilege" "group_member": ALTERED, SOFTWARE, None, "accounts have become members of groups", "";
        "privilege" "authorized_keys": ALTERED, SOFTWARE, None, "SSH keys of accounts that are no tenant's were added", "";
        "privilege" "listening_port": ALTERED, SOFTWARE, None, "processes that are no tenant's listen on more ports", "";
        "privilege" "autostart": ALTERED, SOFTWARE, None, "files by which programs run as root, or logins are admitted, were added or changed", "";
        "privilege" "baseline_damaged": ALTERED, SOFTWARE, None, "the agent's record of the machine's privileges was damaged", "";
        "privilege" "baseline_newer": SHOWN, SOFTWARE, None, "a later release has written the agent's record of the machine's privileges", "";
        "privilege" "incomplete": SHOWN, SOFTWARE, None, "a part of the machine's privileges cannot be read", "";
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::fmt::Write as _;

    #[test]
    fn every_row_is_as_it_was_reviewed() {
        let mut text = String::new();
        for rule in TABLE {
            let classes: Vec<&str> = rule.classes.iter().map(|class| class.into()).collect();
            let (cause, repair): (&str, &str) = (rule.cause.into(), rule.repair.into());
            let separator = if rule.tenant_message.is_empty() { "" } else { " | " };
            writeln!(
                text,
                "{}/{} ({:?}): {} | cause {cause} | repair {repair} | {}{separator}{}",
                rule.probe,
                rule.code,
                rule.scope,
                classes.join(", "),
                rule.meaning,
                rule.tenant_message
            )
            .unwrap();
        }
        insta::assert_snapshot!(text);
    }

    #[test]
    fn rows_are_distinct_and_machine_probes_are_listed() {
        let keys: BTreeSet<_> = TABLE.iter().map(|rule| (rule.probe, rule.code)).collect();
        assert_eq!(keys.len(), TABLE.len());
        for rule in TABLE {
            let is_machine = rule.scope == FindingScope::Machine;
            assert_eq!(is_machine, MACHINE_PROBES.contains(&rule.probe), "{}", rule.probe);
            assert!(!rule.classes.is_empty());
        }
    }

    #[test]
    fn what_a_tenant_can_cause_is_shown_and_nothing_else() {
        for rule in TABLE.iter().filter(|rule| rule.cause == FindingCause::Tenant) {
            assert_eq!((rule.classes, rule.repair), (SHOWN, Repair::None), "{}/{}", rule.probe, rule.code);
        }
        for code in ["13", "31", "43", "45", "94"] {
            assert_eq!(FindingRule::of("xid", code).cause, FindingCause::Tenant, "{code}");
        }
    }

    #[test]
    fn unknown_findings_are_shown_and_nothing_else() {
        for (probe, code) in [("xid", "99999"), ("xid", ""), ("quantum", "flux"), ("driver", "sings")] {
            let rule = FindingRule::of(probe, code);
            assert_eq!((rule.classes, rule.cause), (SHOWN, FindingCause::Unknown), "{probe}/{code}");
        }
        assert_eq!(FindingRule::of("driver", "sings").scope, FindingScope::Machine);
    }

    #[test]
    fn code_is_judged_by_its_own_row_or_the_next_one_above() {
        for (probe, code, row) in [
            ("xid", "145.nonfatal.rlw_rxpipe", "145.nonfatal"),
            ("xid", "149.fatal.netir_link_evt", "149.fatal"),
            ("xid", "149.odd.netir", "149"),
            ("xid", "149", "149"),
            ("xid", "154.node_reboot", "154"),
            ("xid", "1490.fatal", ""),
            ("xid", "14", ""),
            ("xid", ".149", ""),
            ("sxid", "fatal.20034", "fatal"),
            ("sxid", "nonfatal.28006", "nonfatal"),
            ("sxid", "20034", ""),
        ] {
            assert_eq!(FindingRule::of(probe, code).code, row, "{probe}/{code}");
        }
    }

    #[test]
    fn errors_of_nvlinks_follow_what_their_line_says() {
        for number in 144..=150 {
            let rule = |code: &str| FindingRule::of("xid", &format!("{number}{code}"));
            assert_eq!((rule("").classes, rule("").repair), (WITHHELD, Repair::Reset), "{number}");
            assert_eq!((rule(".fatal.x").classes, rule(".fatal.x").repair), (FAILED, Repair::Reset), "{number}");
            assert_eq!((rule(".nonfatal.x").classes, rule(".nonfatal.x").repair), (SHOWN, Repair::None), "{number}");
        }
    }

    #[test]
    fn tenant_learns_of_every_finding_that_concerns_them() {
        for rule in TABLE {
            let concerns = rule.has(FindingClass::Evacuate) || rule.has(FindingClass::BillingCredit);
            assert!(!concerns || !rule.tenant_message.is_empty(), "{}/{}", rule.probe, rule.code);
        }
    }
}
