//! The hardware of a node, as its agent reports it.

use domain::node::{ReportedGpu, ReportedInventory};
use std::fmt::Display;

/// Free H100s of 80,000 MiB, whose UUIDs have the machine's name and their index. The agent isolates devices.
#[must_use]
pub fn reported_inventory(machine: impl Display, gpus: u32) -> ReportedInventory {
    let gpu =
        |index| ReportedGpu { index, uuid: format!("GPU-{machine}-{index}"), model: "H100".into(), memory_mib: 80_000 };
    ReportedInventory {
        gpus: (0..gpus).map(gpu).collect(),
        gpu_source: "simulated".into(),
        executor: "sandbox".into(),
        isolates_devices: true,
        cpu_model: None,
        cpu_cores: 64,
        memory_mib: 512_000,
        storage_gib: 4_000,
        driver_version: None,
        host_fingerprint: None,
        system: None,
        tenant_devices: Vec::new(),
    }
}
