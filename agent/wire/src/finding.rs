//! Health findings: what the agent's probes found. The agent reports, the control plane judges.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The most findings in one heartbeat.
pub const MAX_FINDINGS: usize = 64;
/// The most characters of [`Finding::detail`].
pub const MAX_FINDING_DETAIL: usize = 200;
/// The most bytes of [`Finding::probe`] and [`Finding::code`].
pub const MAX_FINDING_NAME: usize = 32;

/// One kind of fault on one GPU, or on the machine.
///
/// An agent repeats a finding in every heartbeat: an event (such as an Xid) until the machine's next boot, a condition (such as a pending
/// row remapping) while it lasts. Its times change only when `count` does, so that a finding that lasts is the same in every heartbeat.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// What found it: `xid`, `row_remap`, `driver`, … The control plane's table of findings has all of them.
    pub probe: String,
    /// The UUID of the GPU, or the PCI address of one that the driver has never named (`PCI-0000:3b:00`). Absent where it concerns the machine, or
    /// one of the GPUs and nothing says which.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_uuid: Option<String>,
    /// What was found, such as the number of an Xid.
    pub code: String,
    /// How often it occurred in this boot.
    pub count: u64,
    pub first_at: DateTime<Utc>,
    pub last_at: DateTime<Utc>,
    /// The boot in which it occurred.
    pub boot_id: Uuid,
    /// For operators: the latest occurrence, as the probe describes it.
    pub detail: String,
}

/// A finding that an operator has accepted as it was: it names the occurrence, so that nothing later is accepted with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceptedFinding {
    pub probe: String,
    pub code: String,
    pub boot_id: Uuid,
    pub count: u64,
}
