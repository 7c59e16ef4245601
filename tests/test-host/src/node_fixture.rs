//! A SKU, a node as it is registered, and its hardware as its agent reports it. The tests of `domain` and of `actors` have this file as a module.

use domain::hardware::{GpuLocality, PromisedHardware};
use domain::metadata::Metadata;
use domain::node::{Node, OnboardingMode, Registration, ReportedGpu, ReportedInventory, Request};
use domain::policy::PolicyBook;
use domain::sku::SkuSpec;
use domain::state_machine::TraceContext;
use domain::{Machine as _, NodeId, Principal, SkuId, Timestamp, TransitionContext};
use std::fmt::Display;

/// Nodes with four H100s of 80,000 MiB.
#[must_use]
pub fn sku_spec() -> SkuSpec {
    SkuSpec {
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
        expected_hardware: None,
    }
}

/// The registration of a node in the region `eu` with so many H100s of 80,000 MiB.
#[must_use]
pub fn registration(sku_id: SkuId, gpus: u32) -> Registration {
    Registration {
        host: "node-a".into(),
        port: 22,
        ssh_username: "ops".into(),
        ssh_public_key: "ssh-ed25519 AAAA".into(),
        ssh_key_fingerprint: "SHA256:x".into(),
        sku: PromisedHardware {
            sku_id,
            name: format!("h100x{gpus}"),
            gpu_model: "H100".into(),
            gpu_memory_mib: 80_000,
            gpu_count: gpus,
            allowed_regions: vec!["eu".into()],
            machine: None,
        },
        region_code: "eu".into(),
        gpus_total: gpus,
        onboarding_mode: OnboardingMode::Manual,
        metadata: Metadata::default(),
    }
}

/// A node that has just been registered.
#[must_use]
pub fn registered_node(id: NodeId, registration: Registration, now: Timestamp) -> Node {
    let register = Request::Register { registration: Box::new(registration), probe: None, machine: None };
    let (policy, by, trace) = (PolicyBook::default(), Principal::system("test"), TraceContext::default());
    let (policy, by, correlation_id) = (&policy, &by, "test");
    let ctx = TransitionContext { now, policy, by, correlation_id, trace, seed: 7, id: id.0, version: 0 };
    Node::decide(None, register.into(), &ctx).unwrap().next.unwrap()
}

/// Free H100s of 80,000 MiB, whose UUIDs have the machine's name and their index. The agent isolates devices.
#[must_use]
pub fn reported_inventory(machine: impl Display, gpus: u32) -> ReportedInventory {
    let gpu = |index| ReportedGpu {
        index,
        uuid: format!("GPU-{machine}-{index}"),
        model: "H100".into(),
        memory_mib: 80_000,
        locality: GpuLocality::default(),
    };
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
