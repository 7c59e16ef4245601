//! The health of the machine: its probes, and the findings that they make. The control plane judges the findings.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tracing::warn;
use uuid::Uuid;
use wire::finding::{AcceptedFinding, Finding};
use wire::heartbeat::{GpuTelemetry, HealthLevel, HealthReport};
use wire::inventory::{GpuInfo, GpuSource};

use crate::atomic_file;
use crate::finding_log::{self, Condition, FindingKey, FindingLog, Occurred};
use crate::gpu_probe::{GpuError, GpuSurvey, ProcessFault, SurveyedGpu, probe};
use crate::gpus::Gpus;
use crate::integrity::IntegrityMonitor;
use crate::server_clock::ServerClock;
use crate::system_executor::device_guard;
use crate::unproved_gpus;

pub mod fabric_conditions;
pub mod fault_line;
pub mod gpu_conditions;
pub mod gpu_monitor;
pub mod kernel_log;
pub mod machine_conditions;

use fault_line::FaultyDevice;
use gpu_monitor::GpuMonitor;
use kernel_log::{KernelLog, KernelLogReading};
use machine_conditions::MachineProbe;

/// A heartbeat waits no longer for the driver. What it answers later is in the next one.
const SURVEY_WAIT: Duration = Duration::from_secs(1);

type SurveyResult = Result<GpuSurvey, GpuError>;

/// The health of the machine, from heartbeat to heartbeat.
pub struct HealthMonitor {
    log: FindingLog,
    gpus: GpuMonitor,
    machine: MachineProbe,
    kernel_log: KernelLog,
    /// `None` where the machine's integrity is not watched.
    integrity: Option<Arc<IntegrityMonitor>>,
    /// The root folder of a machine on which the owners of device files keep tenants from each other's GPUs.
    guarded_root: Option<PathBuf>,
    /// A survey that did not end within the heartbeat that began it.
    in_flight: Option<JoinHandle<SurveyResult>>,
    last: Observation,
}

/// The machine whose health is monitored.
#[derive(Debug, Clone, Copy)]
pub struct MonitoredMachine<'a> {
    /// The folder of the agent's state.
    pub state_dir: &'a Path,
    pub kernel_log: &'a Path,
    pub boot_id: Uuid,
    pub gpu_source: GpuSource,
    /// The GPUs that the driver lists at this moment, if it does.
    pub listed: &'a [GpuInfo],
    /// Whether the owners of device files keep tenants from each other's GPUs.
    pub guards_device_files: bool,
}

/// What a heartbeat reports.
#[derive(Debug, Clone, PartialEq)]
pub struct Observation {
    pub gpus: Vec<GpuInfo>,
    pub load: Vec<GpuTelemetry>,
    /// As the driver last reported it.
    pub driver_version: Option<String>,
    /// For control planes that do not read findings.
    pub health: HealthReport,
    pub findings: Vec<Finding>,
}

impl HealthMonitor {
    /// Starts the probes. `on_new_event` is called when something occurs that should not wait for the next heartbeat.
    #[must_use]
    pub fn start(
        machine: &MonitoredMachine<'_>,
        integrity: Option<Arc<IntegrityMonitor>>,
        stop: CancellationToken,
        on_new_event: impl Fn() + Send + 'static,
    ) -> Self {
        let MonitoredMachine { state_dir, kernel_log, boot_id, gpu_source, listed, guards_device_files } = *machine;
        let mut log = FindingLog::open(state_dir, boot_id);
        if log.gpus().is_empty() {
            log.set_gpus(listed);
        }
        let path = kernel_log.display();
        let kernel_log = match gpu_source {
            GpuSource::Nvml => KernelLog::follow(kernel_log, log.kernel_log_position(), stop, on_new_event),
            GpuSource::Simulated | GpuSource::None => KernelLog::off(),
        };
        if kernel_log.is_unreadable() {
            warn!(
                error_code = "kernel_log",
                %path,
                "the kernel's log cannot be read; Xids are known from the driver's events only"
            );
        }
        let health = HealthReport { status: HealthLevel::Ok, alerts: Vec::new() };
        let last = Observation {
            gpus: log.gpus().to_vec(),
            load: Vec::new(),
            driver_version: None,
            health,
            findings: Vec::new(),
        };
        let gpus = if log.gpus_are_of_earlier_boot() {
            GpuMonitor::of_earlier_boot(log.gpus())
        } else {
            GpuMonitor::of(log.gpus())
        };
        let gpus = gpus.at(log.addresses());
        let machine = MachineProbe::new(state_dir);
        let is_guarded = guards_device_files && gpu_source == GpuSource::Nvml;
        let guarded_root = is_guarded.then(|| PathBuf::from("/"));
        Self { log, gpus, machine, kernel_log, integrity, guarded_root, in_flight: None, last }
    }

    /// Observes the machine. Takes no longer than a moment, whatever the driver does. `known` are conditions that others have observed.
    pub async fn observe(&mut self, gpus: &Arc<Gpus>, clock: &ServerClock, known: Vec<Condition>) -> Observation {
        let mut survey = self.survey(gpus).await;
        if let Some(Ok(survey)) = &mut survey {
            self.complete(survey);
        }
        let now = clock.now();
        let mut conditions = self.machine.observed(clock.offset()).await;
        conditions.extend(known);
        conditions.extend(self.integrity.as_ref().and_then(|integrity| integrity.late()));
        let watched = self.integrity.as_ref().map(|integrity| integrity.conditions());
        conditions.extend(watched.clone().flatten().unwrap_or_default());
        if let Some(survey) = &survey {
            conditions.extend(self.note_survey(survey.as_ref(), now));
        }
        // Before the driver has answered for the first time on this machine, no address says which GPU a line is about.
        if survey.is_some() || !self.log.addresses().is_empty() {
            let reading = self.kernel_log.take();
            self.note_kernel_log(reading, now);
        }
        let is_unchecked = matches!(watched, Some(None));
        let is_unknown = |finding: &Finding| match (&survey, &finding.gpu_uuid) {
            (_, None) if finding_log::is_of_altered_machine(&finding.probe) => is_unchecked,
            (_, None) if self.machine.is_unknown(finding) => true,
            (_, Some(_)) if finding.probe == unproved_gpus::PROBE => false,
            (None, _) => {
                finding.gpu_uuid.is_some()
                    || matches!(finding.probe.as_str(), "driver" | "gpu")
                    || is_of_fabric(finding)
            }
            (Some(Ok(survey)), None) => is_of_fabric(finding) && !has_read_fabric(survey),
            (Some(Err(_)), None) => is_of_fabric(finding) || finding.probe == "gpu",
            (Some(Err(_)), Some(_)) if finding_log::is_of_unnamed_gpu(finding) => true,
            (Some(Ok(survey)), Some(_)) if finding_log::is_of_unnamed_gpu(finding) => {
                self.gpus.may_omit_unnamed(survey)
            }
            (Some(_), Some(_)) if finding.probe == "gpu" => false,
            (Some(Err(_)), Some(_)) => true,
            (Some(Ok(survey)), Some(uuid)) => {
                let gpu = survey.gpus.iter().find(|gpu| gpu.info.uuid == *uuid);
                gpu.is_none_or(|gpu| gpu.condition.unread.contains(&finding.probe))
            }
        };
        self.log.note_conditions(&conditions, is_unknown, now);
        self.log.store();
        self.last.findings = self.log.report();
        self.last.clone()
    }

    /// Passes on what an operator has accepted. Another occurrence than the latest is not.
    pub fn accept(&self, accepted: &[AcceptedFinding]) {
        let Some(integrity) = &self.integrity else { return };
        for finding in accepted {
            let (probe, code) = (&finding.probe, &finding.code);
            if let Some(state) = self.log.state_of(probe, code, (finding.boot_id, finding.count)) {
                integrity.accept(code, state);
            }
        }
    }

    /// The driver's reading of all GPUs; `None` where it is not there yet.
    async fn survey(&mut self, gpus: &Arc<Gpus>) -> Option<SurveyResult> {
        let mut survey = self.in_flight.take().unwrap_or_else(|| {
            let (gpus, xid_events) = (Arc::clone(gpus), self.kernel_log.is_unreadable());
            tokio::task::spawn_blocking(move || gpus.survey(xid_events))
        });
        match tokio::time::timeout(SURVEY_WAIT, &mut survey).await {
            Ok(Ok(survey)) => Some(survey),
            Ok(Err(error)) => Some(Err(GpuError::Process { message: error.to_string(), fault: ProcessFault::Other })),
            Err(_) => {
                self.in_flight = Some(survey);
                None
            }
        }
    }

    fn note_survey(&mut self, survey: Result<&GpuSurvey, &GpuError>, now: DateTime<Utc>) -> Vec<Condition> {
        let presence = self.gpus.assess(survey, now);
        let mut conditions = presence.conditions;
        if self.gpus.is_of_this_boot() {
            self.log.note_complete_list();
        }
        self.last.gpus = presence.gpus;
        self.last.health = presence.health;
        self.last.load = Vec::new();
        if let Ok(survey) = survey {
            conditions.extend(self.guarded_root.as_deref().and_then(opened_device_files));
            self.last.driver_version.clone_from(&survey.driver_version);
            self.last.load = survey.gpus.iter().filter_map(|gpu| gpu.load.clone()).collect();
            self.note_gpus(survey, now);
            conditions.extend(gpu_conditions::observed(survey, &mut self.log));
        }
        conditions
    }

    /// What the driver does not report of a GPU is as it was before in this boot.
    fn complete(&self, survey: &mut GpuSurvey) {
        for gpu in survey.gpus.iter_mut().filter(|gpu| !gpu.condition.unreported.is_empty()) {
            let Some(known) = self.log.gpus().iter().find(|known| known.uuid == gpu.info.uuid) else { continue };
            if gpu.info.model.is_empty() {
                gpu.info.model.clone_from(&known.model);
            }
            if gpu.info.memory_mib == 0 {
                gpu.info.memory_mib = known.memory_mib;
            }
        }
    }

    fn note_gpus(&mut self, survey: &GpuSurvey, now: DateTime<Utc>) {
        for gpu in &survey.gpus {
            let uuid = &gpu.info.uuid;
            if let Some(address) = &gpu.pci_address {
                self.log.set_address(address, uuid);
            }
            for (xid, count) in &gpu.condition.xids {
                let detail = "reported by the driver".to_owned();
                let occurred = Occurred { count: *count, first_at: now, last_at: now, detail };
                let key = FindingKey { probe: "xid", gpu_uuid: Some(uuid.clone()), code: xid.to_string() };
                self.log.note_event(&key, occurred);
            }
        }
        // A GPU that was listed once in this boot, or was in the one before and is not replaced, is missing when it is not.
        let known = self.log.gpus().iter().filter(|gpu| self.gpus.has(&gpu.uuid));
        let known = known.filter(|gpu| survey.gpus.iter().all(|it| it.info.uuid != gpu.uuid));
        let all: Vec<_> = survey.gpus.iter().map(|gpu| gpu.info.clone()).chain(known.cloned()).collect();
        self.log.set_gpus(&all);
    }

    /// The name of a GPU at this address that no GPU of the list has. `None` where one of them may be there: the driver does not say where it is.
    fn name_of_place(&self, pci_address: &str) -> Option<String> {
        let placed = self.log.addresses();
        let all_are_placed = self.last.gpus.iter().all(|gpu| placed.contains_key(&gpu.uuid));
        all_are_placed.then(|| finding_log::name_of_place(pci_address))
    }

    fn note_kernel_log(&mut self, reading: KernelLogReading, now: DateTime<Utc>) {
        if reading.lost_records > 0 {
            let detail = "records of the kernel's log were overwritten before they were read".to_owned();
            let key = FindingKey { probe: "kernel_log", gpu_uuid: None, code: "overrun".to_owned() };
            let occurred = Occurred { count: reading.lost_records, first_at: now, last_at: now, detail };
            self.log.note_event(&key, occurred);
        }
        let booted_at = if reading.faults.is_empty() { None } else { booted_at(now) };
        for (kind, seen) in reading.faults {
            let at = |micros: u64| {
                let since_boot = i64::try_from(micros).map(TimeDelta::microseconds).ok();
                booted_at.zip(since_boot).map_or(now, |(booted_at, since_boot)| (booted_at + since_boot).min(now))
            };
            let address = kind.pci_address;
            let (gpu_uuid, detail) = match kind.device {
                FaultyDevice::NvSwitch => (None, format!("NVSwitch at {address}: {}", seen.text)),
                FaultyDevice::Gpu => match self.log.gpu_at(&address) {
                    Some(uuid) => (Some(uuid.to_owned()), seen.text),
                    None => (self.name_of_place(&address), format!("GPU at {address}: {}", seen.text)),
                },
            };
            let (first_at, last_at) = (at(seen.first_micros), at(seen.last_micros));
            let occurred = Occurred { count: seen.count, first_at, last_at, detail };
            self.log.note_event(&FindingKey { probe: kind.device.probe(), gpu_uuid, code: kind.code }, occurred);
        }
        self.log.set_kernel_log_position(reading.position);
    }
}

/// Whether the finding is about the fabric of all GPUs, which the driver alone knows.
fn is_of_fabric(finding: &Finding) -> bool {
    finding.probe == fabric_conditions::FABRIC
}

/// Whether the driver has answered about the fabric of each GPU.
fn has_read_fabric(survey: &GpuSurvey) -> bool {
    let is_read = |gpu: &SurveyedGpu| !gpu.condition.unread.contains(probe::GPU_FABRIC);
    !survey.gpus.is_empty() && survey.gpus.iter().all(is_read)
}

/// No tenant can be set up: what a driver's library opens it opens to all tenants.
fn opened_device_files(root: &Path) -> Option<Condition> {
    let fault = device_guard::check_driver_parameters(root).err()?;
    Some(Condition::of_machine("driver", "device_files", fault.with_remedy()))
}

/// When the machine was booted, if this is the time.
fn booted_at(now: DateTime<Utc>) -> Option<DateTime<Utc>> {
    let text = atomic_file::read_if_there(Path::new("/proc/uptime")).ok()??;
    let seconds: f64 = text.split_whitespace().next()?.parse().ok()?;
    Some(now - TimeDelta::from_std(Duration::try_from_secs_f64(seconds).ok()?).ok()?)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use wire::inventory::GpuTopology;

    use super::*;
    use crate::gpu_probe::{GpuCondition, UnreadableGpu};

    const BOOT: Uuid = Uuid::from_u128(1);

    /// A monitor of a machine without GPUs.
    fn monitor(state_dir: &Path, integrity: Option<Arc<IntegrityMonitor>>) -> HealthMonitor {
        HealthMonitor {
            log: FindingLog::open(state_dir, BOOT),
            gpus: GpuMonitor::of(&[]),
            machine: MachineProbe::new(state_dir),
            kernel_log: KernelLog::off(),
            integrity,
            guarded_root: None,
            in_flight: None,
            last: Observation {
                gpus: Vec::new(),
                load: Vec::new(),
                driver_version: None,
                health: HealthReport { status: HealthLevel::Ok, alerts: Vec::new() },
                findings: Vec::new(),
            },
        }
    }

    fn no_gpus() -> Arc<Gpus> {
        Arc::new(Gpus::Absent { why: String::new() })
    }

    /// The driver's answer with so many listed GPUs.
    fn survey(listed: u32) -> GpuSurvey {
        let gpu = |index: u32| SurveyedGpu {
            info: GpuInfo {
                index,
                uuid: format!("GPU-{index}"),
                vendor: "NVIDIA".into(),
                model: "H100".into(),
                memory_mib: 1,
                topology: GpuTopology::default(),
            },
            pci_address: Some(format!("0000:{index:02x}:00")),
            load: None,
            condition: GpuCondition::default(),
        };
        GpuSurvey { gpus: (0..listed).map(gpu).collect(), ..GpuSurvey::default() }
    }

    /// As a control plane counts the GPUs after this survey: those that are listed, and the names of others.
    async fn counted(monitored: &mut HealthMonitor, survey: SurveyResult) -> (usize, Vec<String>) {
        monitored.in_flight = Some(tokio::spawn(std::future::ready(survey)));
        let Observation { gpus, findings, .. } =
            monitored.observe(&no_gpus(), &ServerClock::unknown(), Vec::new()).await;
        let named = findings.into_iter().filter(|it| it.probe == "gpu").filter_map(|it| it.gpu_uuid);
        (gpus.len(), named.filter(|name| gpus.iter().all(|gpu| gpu.uuid != *name)).collect())
    }

    #[tokio::test]
    async fn gpu_that_was_never_read_is_one_gpu_in_each_report_until_it_is_listed() {
        const HUNG: GpuError = GpuError::Hung { seconds: 10 };
        let folder = tempfile::tempdir().unwrap();
        let mut monitored = monitor(folder.path(), None);
        let never_read = |address: Option<&str>| {
            let gpu = UnreadableGpu { index: 3, pci_address: address.map(str::to_owned), why: "e".into() };
            Ok(GpuSurvey { unreadable: vec![gpu], ..survey(3) })
        };
        let place = (3, vec!["PCI-0000:3b:00".to_owned()]);
        assert_eq!(counted(&mut monitored, never_read(Some("0000:3b:00"))).await, place, "at once");
        assert_eq!(counted(&mut monitored, never_read(None)).await, (3, vec!["INDEX-3".to_owned()]));
        assert_eq!(counted(&mut monitored, never_read(Some("0000:3b:00"))).await, place);
        for _ in 0..5 {
            assert_eq!(counted(&mut monitored, Err(HUNG)).await, place);
        }
        monitored.log.store_all();
        let mut next = monitor(folder.path(), None);
        next.log = FindingLog::open(folder.path(), Uuid::from_u128(2));
        next.gpus = GpuMonitor::of_earlier_boot(next.log.gpus()).at(next.log.addresses());
        next.last.gpus = next.log.gpus().to_vec();
        assert_eq!(counted(&mut next, Err(HUNG)).await, place, "after a boot");
        assert_eq!(counted(&mut next, Ok(survey(1))).await, place, "the driver finds one after the other");
        assert_eq!(counted(&mut next, never_read(Some("0000:3b:00"))).await, place);
        assert_eq!(counted(&mut next, Ok(GpuSurvey { lost: 1, ..survey(3) })).await, place, "it has no other name");
        assert_eq!(counted(&mut next, Ok(survey(4))).await, (4, vec![]));
    }

    #[tokio::test]
    async fn findings_about_the_machine_and_its_package_stay_until_they_were_looked_for() {
        let folder = tempfile::tempdir().unwrap();
        let altered = [("privilege", "sudoers"), ("package", "altered")];
        let found = altered.map(|(probe, code)| Condition::of_machine(probe, code, "").with_state(String::new()));
        let compared = monitor(folder.path(), Some(IntegrityMonitor::with_conditions(Some(found.to_vec()))));
        let reported = |observed: Observation| observed.findings.into_iter().map(|it| it.code).collect::<Vec<_>>();
        let mut monitored = compared;
        assert_eq!(
            reported(monitored.observe(&no_gpus(), &ServerClock::unknown(), Vec::new()).await),
            ["altered", "sudoers"]
        );
        // The next agent, whose first comparison takes longer than its heartbeats.
        let mut next = monitor(folder.path(), Some(IntegrityMonitor::with_conditions(None)));
        for _ in 0..9 {
            assert_eq!(
                reported(next.observe(&no_gpus(), &ServerClock::unknown(), Vec::new()).await),
                ["altered", "sudoers"]
            );
        }
        next.integrity = Some(IntegrityMonitor::with_conditions(Some(Vec::new())));
        for _ in 0..9 {
            next.observe(&no_gpus(), &ServerClock::unknown(), Vec::new()).await;
        }
        assert_eq!(reported(next.observe(&no_gpus(), &ServerClock::unknown(), Vec::new()).await), Vec::<String>::new());
    }

    #[tokio::test]
    async fn only_the_latest_occurrence_is_passed_on_as_accepted() {
        let folder = tempfile::tempdir().unwrap();
        let occurred = |state: &str| {
            let found = Condition::of_machine("privilege", "setuid", state).with_state(state.to_owned());
            IntegrityMonitor::with_conditions(Some(vec![found]))
        };
        let mut monitored = monitor(folder.path(), Some(occurred("first")));
        monitored.observe(&no_gpus(), &ServerClock::unknown(), Vec::new()).await;
        let second = occurred("second");
        monitored.integrity = Some(Arc::clone(&second));
        monitored.observe(&no_gpus(), &ServerClock::unknown(), Vec::new()).await;
        let accepted = |boot_id: Uuid, count: u64| AcceptedFinding {
            probe: "privilege".into(),
            code: "setuid".into(),
            boot_id,
            count,
        };
        monitored.accept(&[accepted(BOOT, 1), accepted(Uuid::from_u128(2), 2)]);
        assert_eq!(second.accepted(), vec![]);
        monitored.accept(&[accepted(BOOT, 2)]);
        assert_eq!(second.accepted(), [("setuid".to_owned(), "second".to_owned())]);
    }

    #[test]
    fn device_files_that_the_driver_opens_to_all_users_are_a_finding_where_they_isolate_tenants() {
        let root = tempfile::tempdir().unwrap();
        let params = root.path().join("proc/driver/nvidia/params");
        fs::create_dir_all(params.parent().unwrap()).unwrap();
        fs::write(&params, "ModifyDeviceFiles: 1\n").unwrap();
        let found = opened_device_files(root.path()).unwrap();
        assert_eq!((found.key.probe, found.key.code.as_str()), ("driver", "device_files"));
        assert!(found.detail.contains("NVreg_ModifyDeviceFiles=0"), "{}", found.detail);
        assert!(found.detail.len() <= wire::finding::MAX_FINDING_DETAIL, "{}", found.detail);
        fs::write(&params, "ModifyDeviceFiles: 0\n").unwrap();
        assert_eq!(opened_device_files(root.path()), None);
        let guarded = |guards_device_files, gpu_source| {
            let (state_dir, kernel_log, boot_id, listed) = (root.path(), root.path(), BOOT, &[][..]);
            let machine = MonitoredMachine { state_dir, kernel_log, boot_id, gpu_source, listed, guards_device_files };
            let stop = CancellationToken::new();
            stop.cancel();
            HealthMonitor::start(&machine, None, stop, || {}).guarded_root.is_some()
        };
        assert!(guarded(true, GpuSource::Nvml));
        assert!(!guarded(false, GpuSource::Nvml), "the sandbox isolates nothing");
        assert!(!guarded(true, GpuSource::Simulated));
    }
}
