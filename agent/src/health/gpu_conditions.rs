//! Conditions of GPUs, as NVIDIA's driver reports them. What it does not know, or a GPU does not have, is no finding.

use nvml_wrapper_sys::bindings::{
    nvmlComputeMode_enum_NVML_COMPUTEMODE_DEFAULT as SHARED,
    nvmlComputeMode_enum_NVML_COMPUTEMODE_EXCLUSIVE_PROCESS as ONE_PROCESS,
    nvmlComputeMode_enum_NVML_COMPUTEMODE_EXCLUSIVE_THREAD as ONE_THREAD,
    nvmlComputeMode_enum_NVML_COMPUTEMODE_PROHIBITED as PROHIBITED,
};

use crate::gpu_probe::{GpuSurvey, SurveyedGpu, probe};

use super::fabric_conditions;
use crate::finding_log::{Condition, FindingLog};

/// `nvmlClocksEventReasons`: slowed by heat, by the driver or by the hardware.
const THERMAL: u64 = 0x20 | 0x40;
/// Slowed by the power brake: the machine's power supply asks for it.
const POWER_BRAKE: u64 = 0x80;

/// The conditions of all GPUs of a survey.
pub fn observed(survey: &GpuSurvey, log: &mut FindingLog) -> Vec<Condition> {
    let mut found = Vec::new();
    for gpu in &survey.gpus {
        let (uuid, condition) = (gpu.info.uuid.as_str(), &gpu.condition);
        let mut add = |probe, code: &str, detail: String| found.push(Condition::of_gpu(uuid, probe, code, detail));
        if let Some(errors) = condition.ecc_uncorrectable.filter(|errors| *errors > 0) {
            add(
                probe::ECC,
                "uncorrectable",
                format!("{errors} uncorrectable memory errors since the driver was loaded"),
            );
        }
        if !condition.unreported.is_empty() {
            add("gpu", "incomplete", format!("the driver does not report {}", condition.unreported.join("; ")));
        }
        for GpuMode { code, detail } in modes(gpu) {
            add(probe::GPU_MODE, &code, detail);
        }
        if condition.remap_pending == Some(true) {
            add(probe::ROW_REMAP, "pending", "memory rows are remapped at the next reset".to_owned());
        }
        if condition.remap_failed == Some(true) {
            add(probe::ROW_REMAP, "failed", "memory rows could not be remapped".to_owned());
        }
        if let Some(action) = condition.recovery_action.filter(|action| *action > 0) {
            add(probe::RECOVERY_ACTION, &recovery_action(action), format!("the driver asks for action {action}"));
        }
        let reasons = condition.slowdown_reasons.unwrap_or(0);
        if reasons & THERMAL != 0 {
            add(probe::SLOWDOWN, "thermal", format!("the clocks are lowered by heat (reasons {reasons:#x})"));
        }
        if reasons & POWER_BRAKE != 0 {
            add(probe::SLOWDOWN, "power", format!("the clocks are lowered by the power brake (reasons {reasons:#x})"));
        }
        if let Some((width, most)) = condition.pcie_width.filter(|(width, most)| width < most) {
            add(probe::PCIE, "width", format!("{width} of {most} lanes"));
        }
        if let Some(active) = &condition.nvlinks_active {
            let mut down = log.nvlinks_down(uuid, active);
            down.retain(|link| !condition.nvlinks_unread.contains(link));
            if !down.is_empty() {
                let links = down.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
                add(probe::NVLINK, "down", format!("links that were active in this boot: {links}"));
            }
        }
    }
    found.extend(fabric_conditions::observed(survey, log));
    found
}

/// A mode in which programs of a tenant cannot use a GPU as they expect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuMode {
    pub code: String,
    /// The mode, and the command that ends it.
    pub detail: String,
}

/// The modes of a GPU in which it is for no tenant. A mode that the GPU does not support is none.
#[must_use]
pub fn modes(gpu: &SurveyedGpu) -> Vec<GpuMode> {
    let condition = &gpu.condition;
    let mode = |code: &str, detail: String| GpuMode { code: code.to_owned(), detail };
    let command = |option: &str| format!("run: nvidia-smi -i {} {option}", place(gpu));
    let mig = match condition.mig {
        None | Some((false, false)) => None,
        Some((true, true)) => Some(mode("mig", format!("MIG is on, and CUDA finds no device; {}", command("-mig 0")))),
        Some((true, false)) => {
            let reset = format!("reset the GPU: nvidia-smi --gpu-reset -i {}", place(gpu));
            Some(mode("mig", format!("MIG is on until the next reset of the GPU; {reset}")))
        }
        Some((false, true)) => {
            Some(mode("mig_pending", format!("MIG is on from the next reset of the GPU; {}", command("-mig 0"))))
        }
    };
    let compute = condition.compute_mode.filter(|compute| *compute != SHARED).map(|compute| {
        let (code, what) = match compute {
            PROHIBITED => ("compute_prohibited".to_owned(), "no program may compute".to_owned()),
            ONE_PROCESS | ONE_THREAD => {
                ("compute_exclusive".to_owned(), "one program at a time may compute".to_owned())
            }
            other => (format!("compute_{other}"), format!("the compute mode is {other}")),
        };
        mode(&code, format!("{what}; {}", command("-c 0")))
    });
    mig.into_iter().chain(compute).collect()
}

/// As `nvidia-smi -i` takes it.
fn place(gpu: &SurveyedGpu) -> String {
    gpu.pci_address.as_ref().map_or_else(|| gpu.info.uuid.clone(), |address| format!("{address}.0"))
}

/// The names of `nvmlDeviceGpuRecoveryAction_t`. An action of a later driver keeps its number.
fn recovery_action(action: u32) -> String {
    match action {
        1 => "gpu_reset".to_owned(),
        2 => "node_reboot".to_owned(),
        3 => "drain_p2p".to_owned(),
        4 => "drain_and_reset".to_owned(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use uuid::Uuid;
    use wire::inventory::{GpuInfo, GpuTopology};

    use super::*;
    use crate::gpu_probe::{GpuCondition, GpuFabric, SurveyedGpu};

    fn codes(condition: GpuCondition) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        let mut log = FindingLog::open(folder.path(), Uuid::nil());
        log.nvlinks_down("GPU-1", &[0, 1]);
        let info = GpuInfo {
            index: 0,
            uuid: "GPU-1".into(),
            vendor: "NVIDIA".into(),
            model: "H100".into(),
            memory_mib: 1,
            topology: GpuTopology::default(),
        };
        let gpu = SurveyedGpu { info, pci_address: None, load: None, condition };
        let survey = GpuSurvey { gpus: vec![gpu], ..GpuSurvey::default() };
        let found = observed(&survey, &mut log);
        found.iter().map(|condition| format!("{}/{}", condition.key.probe, condition.key.code)).collect()
    }

    #[test]
    fn unknown_and_normal_readings_are_not_findings() {
        assert_eq!(codes(GpuCondition::default()), Vec::<String>::new());
        let good = GpuCondition {
            ecc_uncorrectable: Some(0),
            remap_pending: Some(false),
            remap_failed: Some(false),
            recovery_action: Some(0),
            // Idle, set by applications, and the software's power cap: every GPU under load.
            slowdown_reasons: Some(0x1 | 0x2 | 0x4),
            nvlinks_active: Some(vec![0, 1]),
            nvlinks_unread: vec![2],
            fabric: Some(GpuFabric { state: 3, error: None, health_mask: 0x1aa, health_summary: 1 }),
            pcie_width: Some((16, 16)),
            xids: vec![],
            mig: Some((false, false)),
            compute_mode: Some(0),
            unreported: vec![],
            unread: BTreeSet::from(["nvlink".to_owned()]),
        };
        assert_eq!(codes(good), Vec::<String>::new());
    }

    #[test]
    fn nvlink_that_cannot_be_read_is_not_down_and_another_one_is() {
        let links = |active: &[u32], unread: &[u32]| {
            let (nvlinks_active, nvlinks_unread) = (Some(active.to_vec()), unread.to_vec());
            codes(GpuCondition { nvlinks_active, nvlinks_unread, ..GpuCondition::default() })
        };
        assert_eq!(links(&[0], &[1]), Vec::<String>::new());
        assert_eq!(links(&[], &[1]), ["nvlink/down"]);
    }

    #[test]
    fn mode_names_the_command_that_ends_it_on_its_gpu_alone() {
        let found = |address: Option<&str>, mig, compute_mode| {
            let info = GpuInfo {
                index: 3,
                uuid: "GPU-1".into(),
                vendor: "NVIDIA".into(),
                model: "H100".into(),
                memory_mib: 1,
                topology: GpuTopology::default(),
            };
            let condition = GpuCondition { mig, compute_mode, ..GpuCondition::default() };
            let pci_address = address.map(str::to_owned);
            let found = modes(&SurveyedGpu { info, pci_address, load: None, condition });
            found.into_iter().map(|mode| (mode.code, mode.detail)).collect::<Vec<_>>()
        };
        let one = |mig, compute| found(Some("0000:3b:00"), mig, compute).remove(0);
        let (code, detail) = one(Some((true, true)), None);
        assert!(code == "mig" && detail.ends_with("run: nvidia-smi -i 0000:3b:00.0 -mig 0"), "{detail}");
        let (code, detail) = one(Some((true, false)), Some(0));
        assert!(code == "mig" && detail.ends_with("nvidia-smi --gpu-reset -i 0000:3b:00.0"), "{detail}");
        assert_eq!(one(Some((false, true)), None).0, "mig_pending");
        for (compute, wanted) in
            [(1, "compute_exclusive"), (2, "compute_prohibited"), (3, "compute_exclusive"), (4, "compute_4")]
        {
            let (code, detail) = one(Some((false, false)), Some(compute));
            assert!(code == wanted && detail.ends_with("run: nvidia-smi -i 0000:3b:00.0 -c 0"), "{code}: {detail}");
            assert!(detail.len() <= wire::finding::MAX_FINDING_DETAIL, "{detail}");
        }
        assert!(found(None, None, Some(2))[0].1.ends_with("nvidia-smi -i GPU-1 -c 0"), "an address that is unknown");
        assert_eq!(found(None, None, None), vec![], "a GPU without these modes");
    }

    #[test]
    fn every_condition_is_a_finding() {
        let bad = GpuCondition {
            ecc_uncorrectable: Some(1),
            remap_pending: Some(true),
            remap_failed: Some(true),
            recovery_action: Some(1),
            slowdown_reasons: Some(0x40 | 0x80),
            nvlinks_active: Some(vec![1]),
            nvlinks_unread: vec![],
            fabric: Some(GpuFabric { state: 3, error: None, health_mask: 0x1a9, health_summary: 3 }),
            pcie_width: Some((8, 16)),
            xids: vec![],
            mig: Some((true, true)),
            compute_mode: Some(2),
            unreported: vec!["its name: an internal driver error occurred".into()],
            unread: BTreeSet::new(),
        };
        assert_eq!(
            codes(bad),
            [
                "ecc/uncorrectable",
                "gpu/incomplete",
                "gpu_mode/mig",
                "gpu_mode/compute_prohibited",
                "row_remap/pending",
                "row_remap/failed",
                "recovery_action/gpu_reset",
                "slowdown/thermal",
                "slowdown/power",
                "pcie/width",
                "nvlink/down",
                "gpu_fabric/degraded_bandwidth"
            ]
        );
        let action = |action| codes(GpuCondition { recovery_action: Some(action), ..GpuCondition::default() });
        assert_eq!(
            [2, 3, 4, 9].map(action).concat(),
            [
                "recovery_action/node_reboot",
                "recovery_action/drain_p2p",
                "recovery_action/drain_and_reset",
                "recovery_action/9"
            ]
        );
    }
}
