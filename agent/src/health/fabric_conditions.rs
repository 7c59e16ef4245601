//! Conditions of the NVSwitch fabric: whether the GPUs have joined it, and how it serves them. A GPU without a fabric, and a driver that does
//! not know it, is no finding: GPUs of the same model exist with a fabric and without.

use std::collections::BTreeSet;

use nvml_wrapper_sys::bindings as nvml;

use crate::finding_log::{Condition, FindingLog};
use crate::gpu_probe::probe::GPU_FABRIC;
use crate::gpu_probe::{GpuFabric, GpuSurvey};

/// The probe of the fabric of all GPUs.
pub const FABRIC: &str = "fabric";

/// The service that sets the fabric up, for operators.
const MANAGER: &str = "nvidia-fabricmanager";

/// How far a GPU has joined its fabric. It begins again with each boot, and takes a moment once the fabric manager has started.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Registration {
    NotStarted,
    InProgress,
    Completed,
}

impl Registration {
    /// `None` where the GPU has no fabric, or its driver reports a state that is not known here.
    const fn of(fabric: &GpuFabric) -> Option<Self> {
        match fabric.state {
            nvml::NVML_GPU_FABRIC_STATE_NOT_STARTED => Some(Self::NotStarted),
            nvml::NVML_GPU_FABRIC_STATE_IN_PROGRESS => Some(Self::InProgress),
            nvml::NVML_GPU_FABRIC_STATE_COMPLETED => Some(Self::Completed),
            _ => None,
        }
    }

    const fn code(self) -> &'static str {
        match self {
            Self::NotStarted => "not_started",
            Self::InProgress => "in_progress",
            Self::Completed => "completed",
        }
    }
}

/// The conditions of the fabric, by a survey. What all GPUs have in common is one condition of the machine.
pub fn observed(survey: &GpuSurvey, log: &mut FindingLog) -> Vec<Condition> {
    let gpus: Vec<_> = survey
        .gpus
        .iter()
        .filter_map(|gpu| {
            let fabric = gpu.condition.fabric.as_ref()?;
            Some((gpu.info.uuid.as_str(), fabric, Registration::of(fabric)?))
        })
        .collect();
    let outside = gpus.iter().filter(|(_, _, registration)| *registration != Registration::Completed);
    let outside: BTreeSet<_> = outside.map(|(uuid, ..)| (*uuid).to_owned()).collect();
    let has_none_joined = outside.len() == gpus.len();
    let late = log.still_outside_fabric(outside);
    if has_none_joined && !late.is_empty() {
        let code = gpus.iter().map(|(.., registration)| *registration).max().map_or("", Registration::code);
        let detail = format!(
            "none of {} GPUs has joined the NVSwitch fabric: look at the fabric manager (systemctl status {MANAGER}, its log), start it",
            gpus.len()
        );
        return vec![Condition::of_machine(FABRIC, code, detail)];
    }
    let mut found = Vec::new();
    for (uuid, fabric, registration) in gpus {
        if registration == Registration::Completed {
            let faults = faults(fabric).into_iter();
            found.extend(faults.map(|(code, detail)| Condition::of_gpu(uuid, GPU_FABRIC, code, detail)));
        } else if late.contains(uuid) {
            let detail = format!(
                "other GPUs have joined the NVSwitch fabric, this one has not: look at the log of {MANAGER}, then reset the GPU"
            );
            found.push(Condition::of_gpu(uuid, GPU_FABRIC, registration.code(), detail));
        }
    }
    found
}

/// The fields of the health mask that say yes or no: what each means where it says yes.
const FLAGS: [(&str, u32, u32, &str); 4] = [
    (
        "degraded_bandwidth",
        nvml::NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW,
        nvml::NVML_GPU_FABRIC_HEALTH_MASK_WIDTH_DEGRADED_BW,
        "NVLinks of the GPU to the fabric are down: look at nvidia-smi nvlink --status",
    ),
    (
        "route_recovery",
        nvml::NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_RECOVERY,
        nvml::NVML_GPU_FABRIC_HEALTH_MASK_WIDTH_ROUTE_RECOVERY,
        "a route of the GPU through the fabric is being recovered: wait, then look at the switches",
    ),
    (
        "route_unhealthy",
        nvml::NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY,
        nvml::NVML_GPU_FABRIC_HEALTH_MASK_WIDTH_ROUTE_UNHEALTHY,
        "a route of the GPU through the fabric has failed: look at the switches",
    ),
    (
        "access_timeout_recovery",
        nvml::NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ACCESS_TIMEOUT_RECOVERY,
        nvml::NVML_GPU_FABRIC_HEALTH_MASK_WIDTH_ACCESS_TIMEOUT_RECOVERY,
        "the GPU recovers from accesses through the fabric that timed out: wait, then reset the GPU",
    ),
];

/// The faults of a GPU whose registration is completed, by code.
fn faults(fabric: &GpuFabric) -> Vec<(&'static str, String)> {
    if let Some(error) = &fabric.error {
        let detail = format!("the GPU could not join the NVSwitch fabric: {error}; look at the log of {MANAGER}");
        return vec![("failed", detail)];
    }
    let mask = fabric.health_mask;
    let field = |shift: u32, width: u32| (mask >> shift) & width;
    let mut found = Vec::new();
    for (code, shift, width, meaning) in FLAGS {
        // All of them have the same values.
        if field(shift, width) == nvml::NVML_GPU_FABRIC_HEALTH_MASK_DEGRADED_BW_TRUE {
            found.push((code, format!("{meaning} (health mask {mask:#x})")));
        }
    }
    let configuration = field(
        nvml::NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_INCORRECT_CONFIGURATION,
        nvml::NVML_GPU_FABRIC_HEALTH_MASK_WIDTH_INCORRECT_CONFIGURATION,
    );
    if let Some(fault) = misconfiguration(configuration) {
        let detail = format!("{fault}: correct it, then restart {MANAGER} (health mask {mask:#x})");
        found.push(("incorrect_configuration", detail));
    }
    let summary = match fabric.health_summary {
        nvml::NVML_GPU_FABRIC_HEALTH_SUMMARY_UNHEALTHY => Some("unhealthy"),
        nvml::NVML_GPU_FABRIC_HEALTH_SUMMARY_LIMITED_CAPACITY => Some("of limited capacity"),
        _ => None,
    };
    // A fault that a later driver knows.
    if let Some(summary) = summary.filter(|_| found.is_empty()) {
        let detail =
            format!("the driver calls the fabric {summary} (health mask {mask:#x}): look at nvidia-smi -q, Fabric");
        found.push(("unhealthy", detail));
    }
    found
}

/// What is wrong in the configuration of the fabric. The last ones are of later drivers.
fn misconfiguration(value: u32) -> Option<String> {
    let known = match value {
        nvml::NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_NOT_SUPPORTED
        | nvml::NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_NONE => return None,
        nvml::NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_INCORRECT_SYSGUID => "the system GUID is wrong",
        nvml::NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_INCORRECT_CHASSIS_SN => {
            "the serial number of the chassis is wrong"
        }
        nvml::NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_NO_PARTITION => "the GPU is in no partition",
        nvml::NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_INSUFFICIENT_NVLINKS => "the GPU has too few NVLinks",
        6 => "the firmware of the GPU is not compatible",
        7 => "the location of the GPU is not valid",
        8 => "the state of the GPU is not valid",
        other => return Some(format!("the configuration is wrong in a way that is not known here ({other})")),
    };
    Some(known.to_owned())
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;
    use wire::finding::{MAX_FINDING_DETAIL, MAX_FINDING_NAME};
    use wire::inventory::{GpuInfo, GpuTopology};

    use super::*;
    use crate::gpu_probe::{GpuCondition, SurveyedGpu};

    const NOT_STARTED: u32 = 1;
    const IN_PROGRESS: u32 = 2;
    const COMPLETED: u32 = 3;
    /// Every field says no, and nothing is wrong in the configuration.
    const HEALTHY: u32 = 0x1aa;

    fn fabric(state: u32) -> GpuFabric {
        GpuFabric { state, error: None, health_mask: 0, health_summary: 0 }
    }

    /// A machine with GPUs of these fabrics.
    fn survey(fabrics: &[Option<GpuFabric>]) -> GpuSurvey {
        let gpu = |(index, fabric): (u32, &Option<GpuFabric>)| SurveyedGpu {
            info: GpuInfo {
                index,
                uuid: format!("GPU-{index}"),
                vendor: "NVIDIA".into(),
                model: "H100".into(),
                memory_mib: 1,
                topology: GpuTopology::default(),
            },
            pci_address: None,
            load: None,
            condition: GpuCondition { fabric: fabric.clone(), ..GpuCondition::default() },
        };
        GpuSurvey { gpus: (0..).zip(fabrics).map(gpu).collect(), ..GpuSurvey::default() }
    }

    /// The conditions of each of these surveys in turn.
    fn conditions(surveys: &[GpuSurvey]) -> Vec<Vec<String>> {
        let folder = tempfile::tempdir().unwrap();
        let mut log = FindingLog::open(folder.path(), Uuid::nil());
        let observe = |survey: &GpuSurvey| {
            let found = observed(survey, &mut log);
            found.iter().map(name).collect()
        };
        surveys.iter().map(observe).collect()
    }

    fn name(condition: &Condition) -> String {
        assert!(condition.detail.len() <= MAX_FINDING_DETAIL, "{}", condition.detail);
        let key = &condition.key;
        assert!(key.code.len() <= MAX_FINDING_NAME, "{}", key.code);
        format!("{}/{} {}", key.probe, key.code, key.gpu_uuid.as_deref().unwrap_or("machine"))
    }

    fn states(states: &[u32]) -> GpuSurvey {
        survey(&states.iter().map(|state| Some(fabric(*state))).collect::<Vec<_>>())
    }

    /// The codes of the only GPU, after it has been seen twice.
    fn codes(fabric: GpuFabric) -> Vec<String> {
        let same = survey(&[Some(fabric)]);
        conditions(&[same.clone(), same]).remove(1)
    }

    #[test]
    fn absent_unknown_and_healthy_fabrics_are_no_finding() {
        assert_eq!(conditions(&vec![survey(&[None, None]); 3]).concat(), Vec::<String>::new());
        // Not supported, and a state of a later driver.
        assert_eq!(conditions(&vec![states(&[0, 4, 0]); 3]).concat(), Vec::<String>::new());
        assert_eq!(conditions(&vec![states(&[COMPLETED, COMPLETED, 0]); 3]).concat(), Vec::<String>::new());
        let healthy = GpuFabric { health_mask: HEALTHY, health_summary: 1, ..fabric(COMPLETED) };
        assert_eq!(codes(healthy.clone()), Vec::<String>::new());
        // Nothing of it has a meaning before the registration is completed.
        let early = GpuFabric { state: 0, health_mask: !HEALTHY, health_summary: 2, ..healthy };
        assert_eq!(codes(early), Vec::<String>::new());
    }

    #[test]
    fn gpus_that_join_between_two_surveys_are_no_finding_and_later_ones_are() {
        let (before, after) = (states(&[NOT_STARTED, NOT_STARTED]), states(&[COMPLETED, COMPLETED]));
        assert_eq!(conditions(&[before.clone(), after.clone()]).concat(), Vec::<String>::new());
        assert_eq!(conditions(&[before.clone(), before.clone(), after]).concat(), ["fabric/not_started machine"]);
        // A GPU that cannot be read in between is a new wait.
        assert_eq!(conditions(&[before.clone(), survey(&[]), before]).concat(), Vec::<String>::new());
    }

    #[test]
    fn what_all_gpus_have_in_common_is_one_finding_of_the_machine_and_one_alone_is_of_its_gpu() {
        let twice = |states: GpuSurvey| conditions(&[states.clone(), states]).remove(1);
        assert_eq!(twice(states(&[NOT_STARTED, IN_PROGRESS, NOT_STARTED])), ["fabric/in_progress machine"]);
        assert_eq!(twice(states(&[IN_PROGRESS])), ["fabric/in_progress machine"]);
        assert_eq!(
            twice(states(&[COMPLETED, IN_PROGRESS, NOT_STARTED, 0])),
            ["gpu_fabric/in_progress GPU-1", "gpu_fabric/not_started GPU-2"]
        );
        // All are outside, and one of them since a moment ago.
        let moment = [states(&[IN_PROGRESS, COMPLETED]), states(&[IN_PROGRESS, IN_PROGRESS])];
        assert_eq!(conditions(&moment).concat(), ["fabric/in_progress machine"]);
    }

    #[test]
    fn gpu_that_is_still_outside_is_known_after_a_restart_of_the_agent() {
        let folder = tempfile::tempdir().unwrap();
        let survey = states(&[IN_PROGRESS]);
        let mut log = FindingLog::open(folder.path(), Uuid::nil());
        assert_eq!(observed(&survey, &mut log), vec![]);
        log.store_all();
        let found = observed(&survey, &mut FindingLog::open(folder.path(), Uuid::nil()));
        assert_eq!(found.iter().map(name).collect::<Vec<_>>(), ["fabric/in_progress machine"]);
        let rebooted = observed(&survey, &mut FindingLog::open(folder.path(), Uuid::from_u128(1)));
        assert_eq!(rebooted, vec![]);
    }

    #[test]
    fn every_fault_of_a_gpu_in_the_fabric_is_a_finding() {
        let masked = |mask: u32| codes(GpuFabric { health_mask: mask, health_summary: 2, ..fabric(COMPLETED) });
        // Each field in turn says yes, and the others no.
        for (code, shift, ..) in FLAGS {
            assert_eq!(masked(HEALTHY ^ (0b11 << shift)), [format!("gpu_fabric/{code} GPU-0")]);
        }
        for value in 2..16 {
            let mask = (HEALTHY & 0xff) | (value << 8);
            assert_eq!(masked(mask), ["gpu_fabric/incorrect_configuration GPU-0"], "{value}");
        }
        assert_eq!(masked(0x55).len(), 4);
        // A driver that does not say what it is, or a fault of a later one.
        assert_eq!(masked(HEALTHY), ["gpu_fabric/unhealthy GPU-0"]);
        let limited = GpuFabric { health_summary: 3, ..fabric(COMPLETED) };
        assert_eq!(codes(limited), ["gpu_fabric/unhealthy GPU-0"]);
        let error = "Insufficient Resources (23)".to_owned();
        let failed = GpuFabric { error: Some(error.clone()), health_mask: !0, ..fabric(COMPLETED) };
        assert_eq!(codes(failed.clone()), ["gpu_fabric/failed GPU-0"]);
        assert!(faults(&failed)[0].1.contains(&error));
    }
}
