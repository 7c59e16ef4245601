//! Which GPUs are there, from survey to survey.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use wire::heartbeat::{Alert, Classification, HealthLevel, HealthReport};
use wire::inventory::GpuInfo;

use crate::finding_log::{self, Condition};
use crate::gpu_probe::{GpuError, GpuSurvey, ProcessFault, UnreadableGpu};

/// This many consecutive surveys without an answer are a fault. Fewer are a transient failure of the driver: as a fault they would stop the
/// charge of its allocations from then on to their end.
const UNREADABLE_SURVEYS: u32 = 3;

/// The presence of the GPUs, from survey to survey.
#[derive(Debug)]
pub struct GpuMonitor {
    /// The GPUs that were listed first in this boot. Until then those of the boot before.
    had: Vec<GpuInfo>,
    had_is_of_earlier_boot: bool,
    /// How many surveys of this boot have listed fewer: the driver may find its GPUs one after the other.
    short_surveys: u32,
    /// The list that was read last.
    last: Vec<GpuInfo>,
    missing_since: BTreeMap<String, DateTime<Utc>>,
    unreadable: Option<Unreadable>,
    /// In how many consecutive surveys each GPU was silent, by UUID.
    silent_surveys: BTreeMap<String, u32>,
    /// Since when no other process can begin to use the GPUs.
    restart_needed_since: Option<DateTime<Utc>>,
    /// The PCI address of each GPU that was read, by UUID.
    addresses: BTreeMap<String, String>,
}

/// What a survey says of the GPUs' presence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Presence {
    /// Those that are there, as far as it is known.
    pub gpus: Vec<GpuInfo>,
    pub conditions: Vec<Condition>,
    /// For control planes that do not read findings.
    pub health: HealthReport,
}

/// Since when GPUs cannot be read, and in how many surveys.
#[derive(Clone, Copy, Debug)]
struct Unreadable {
    since: DateTime<Utc>,
    surveys: u32,
}

impl GpuMonitor {
    /// Monitors the GPUs that the node had before in this boot.
    #[must_use]
    pub fn of(had: &[GpuInfo]) -> Self {
        Self {
            had: had.to_vec(),
            had_is_of_earlier_boot: false,
            short_surveys: 0,
            last: had.to_vec(),
            missing_since: BTreeMap::new(),
            unreadable: None,
            silent_surveys: BTreeMap::new(),
            restart_needed_since: None,
            addresses: BTreeMap::new(),
        }
    }

    /// Monitors the GPUs that the node had in the boot before. Where as many are listed now, those that are absent were replaced.
    #[must_use]
    pub fn of_earlier_boot(had: &[GpuInfo]) -> Self {
        Self { had_is_of_earlier_boot: true, ..Self::of(had) }
    }

    /// At these PCI addresses, by UUID.
    #[must_use]
    pub fn at(self, addresses: BTreeMap<String, String>) -> Self {
        Self { addresses, ..self }
    }

    /// Whether the GPU is listed, or missing.
    #[must_use]
    pub fn has(&self, uuid: &str) -> bool {
        self.had.iter().chain(&self.last).any(|gpu| gpu.uuid == uuid)
    }

    /// Whether the driver has listed all GPUs in this boot.
    #[must_use]
    pub const fn is_of_this_boot(&self) -> bool {
        !self.had_is_of_earlier_boot
    }

    /// Whether a GPU that the driver has never named may be there although this survey, which was assessed last, does not have it: the driver
    /// may find its GPUs one after the other, and it does not name one that is lost.
    #[must_use]
    pub fn may_omit_unnamed(&self, survey: &GpuSurvey) -> bool {
        let is_listed = |gpu: &GpuInfo| survey.gpus.iter().any(|it| it.info.uuid == gpu.uuid);
        let absent = self.had.iter().filter(|gpu| !is_listed(gpu)).count();
        let has_unnamed_lost = usize::try_from(survey.lost).is_ok_and(|lost| lost > absent);
        let is_awaited = self.had_is_of_earlier_boot && survey.unreadable.is_empty();
        is_awaited || has_unnamed_lost
    }

    /// The presence of the GPUs by a survey. GPUs that could not be read are as they were read last.
    pub fn assess(&mut self, survey: Result<&GpuSurvey, &GpuError>, now: DateTime<Utc>) -> Presence {
        let mut presence = self.assess_gpus(survey, now);
        let Some(why) = survey.ok().and_then(|survey| survey.restart_needed.as_ref()) else {
            self.restart_needed_since = None;
            return presence;
        };
        let since = *self.restart_needed_since.get_or_insert(now);
        presence.conditions.push(Condition::of_machine("driver", "restart_needed", why.as_str()));
        presence.health.status = presence.health.status.max(HealthLevel::Warning);
        presence.health.alerts.push(Alert {
            probe_id: "driver.restart_needed".to_owned(),
            target: "gpus".to_owned(),
            since,
            classifications: vec![Classification::PreventAllocation, Classification::Warn],
            message: format!("no new program can use the GPUs before a reboot ({why}); those that use them go on"),
            tenant_message: String::new(),
        });
        presence
    }

    fn assess_gpus(&mut self, survey: Result<&GpuSurvey, &GpuError>, now: DateTime<Utc>) -> Presence {
        let (listed, mut reasons) = match survey {
            Ok(survey) => {
                for gpu in &survey.gpus {
                    if let Some(address) = &gpu.pci_address {
                        self.addresses.insert(gpu.info.uuid.clone(), address.clone());
                    }
                }
                let listed: Vec<_> = survey.gpus.iter().map(|gpu| gpu.info.clone()).collect();
                (listed, survey.unreadable.iter().map(|gpu| gpu.why.clone()).collect())
            }
            Err(error) => (Vec::new(), vec![error.to_string()]),
        };
        let is_short = self.had_is_of_earlier_boot && listed.len() < self.had.len();
        let mut is_awaited = false;
        if is_short && reasons.is_empty() && survey.is_ok_and(|survey| survey.lost == 0) {
            self.short_surveys = self.short_surveys.saturating_add(1);
            is_awaited = self.short_surveys < UNREADABLE_SURVEYS;
        }
        if is_awaited {
            reasons.push(format!("{} of {} GPUs are listed since the boot", listed.len(), self.had.len()));
        }
        let Some(why) = reasons.first() else {
            self.unreadable = None;
            self.silent_surveys.clear();
            let were_replaced = self.had_is_of_earlier_boot && listed.len() >= self.had.len();
            if self.had.is_empty() || were_replaced {
                self.had.clone_from(&listed);
            }
            self.had_is_of_earlier_boot = false;
            self.last.clone_from(&listed);
            let health = self.missing(&listed, now);
            let lost = survey.map_or(0, |survey| survey.lost);
            return Presence { gpus: listed, conditions: missing_conditions(&health, lost), health };
        };
        let before = self.unreadable.unwrap_or(Unreadable { since: now, surveys: 0 });
        let unreadable = Unreadable { surveys: before.surveys.saturating_add(u32::from(!is_awaited)), ..before };
        self.unreadable = Some(unreadable);
        let silent: Vec<_> =
            self.last.iter().filter(|gpu| listed.iter().all(|read| read.uuid != gpu.uuid)).cloned().collect();
        self.silent_surveys.retain(|uuid, _| silent.iter().any(|gpu| gpu.uuid == *uuid));
        for gpu in &silent {
            let surveys = self.silent_surveys.entry(gpu.uuid.clone()).or_default();
            *surveys = surveys.saturating_add(u32::from(!is_awaited));
        }
        let mut health = self.missing(&self.last.clone(), now);
        let mut conditions = missing_conditions(&health, 0);
        match survey {
            Err(error) => conditions.push(unreadable.condition_of_driver(error)),
            Ok(survey) => conditions.extend(self.silent_gpus(&silent, survey, why, unreadable)),
        }
        let harms_tenants = survey.err().is_none_or(|error| !is_of_this_process(error));
        health.status = health.status.max(unreadable.status(harms_tenants));
        health.alerts.push(unreadable.alert(why, harms_tenants));
        self.last = listed.into_iter().chain(silent).collect();
        self.last.sort_by_key(|gpu| gpu.index);
        Presence { gpus: self.last.clone(), conditions, health }
    }

    /// The GPUs that are missing, since when each is missed, and where it was.
    fn missing(&mut self, has: &[GpuInfo], now: DateTime<Utc>) -> HealthReport {
        let missing = |gpu: &&GpuInfo| !has.iter().any(|other| other.uuid == gpu.uuid);
        let Self { had, missing_since: since, addresses, .. } = self;
        since.retain(|uuid, _| had.iter().filter(missing).any(|gpu| gpu.uuid == *uuid));
        let alerts: Vec<Alert> = had
            .iter()
            .filter(missing)
            .map(|gpu| Alert {
                probe_id: "gpu.missing".to_owned(),
                target: gpu.uuid.clone(),
                since: *since.entry(gpu.uuid.clone()).or_insert(now),
                classifications: vec![Classification::PreventAllocation, Classification::BillingCredit],
                message: unlisted(gpu, addresses.get(&gpu.uuid)),
                tenant_message: "A GPU of this node has failed.".to_owned(),
            })
            .collect();
        HealthReport { status: if alerts.is_empty() { HealthLevel::Ok } else { HealthLevel::Critical }, alerts }
    }

    /// Each GPU that alone could not be read in [`UNREADABLE_SURVEYS`], with the driver's error of its address, and each that is absent beside
    /// them. One that was never read has the name of its place, from the first survey on: it is a fault of that GPU alone, which no tenant can hold.
    fn silent_gpus(&self, silent: &[GpuInfo], survey: &GpuSurvey, why: &str, unreadable: Unreadable) -> Vec<Condition> {
        let mut left: Vec<&UnreadableGpu> = survey.unreadable.iter().collect();
        let (mut conditions, mut absent) = (Vec::new(), Vec::new());
        let address_of = |gpu: &GpuInfo| self.addresses.get(&gpu.uuid);
        let is_it = |gpu: &GpuInfo, read: &UnreadableGpu| {
            address_of(gpu).is_some_and(|address| read.pci_address.as_ref() == Some(address))
        };
        // The address of two GPUs is that of neither for certain.
        let is_shared = |address: &String| {
            survey.unreadable.iter().filter(|it| it.pci_address.as_ref() == Some(address)).count() > 1
        };
        let may_be_it = |gpu: &GpuInfo, read: &UnreadableGpu| {
            address_of(gpu).is_none() || read.pci_address.as_ref().is_none_or(is_shared)
        };
        let (placed, others): (Vec<_>, Vec<_>) =
            silent.iter().partition(|gpu| survey.unreadable.iter().any(|read| is_it(gpu, read)));
        let position_of = |gpu: &GpuInfo, left: &[&UnreadableGpu]| {
            let found = left.iter().position(|read| is_it(gpu, read));
            found.or_else(|| left.iter().position(|read| may_be_it(gpu, read)))
        };
        for gpu in placed.into_iter().chain(others) {
            let why = match position_of(gpu, &left).map(|position| left.remove(position)) {
                Some(read) => read.why.as_str(),
                // All of them are awaited.
                None if survey.unreadable.is_empty() => why,
                None => {
                    absent.push(gpu);
                    continue;
                }
            };
            if self.silent_surveys.get(&gpu.uuid).is_none_or(|surveys| *surveys < UNREADABLE_SURVEYS) {
                continue;
            }
            let detail = match address_of(gpu).filter(|address| !why.contains(address.as_str())) {
                Some(address) => format!("GPU at {address}: {why}"),
                None => why.to_owned(),
            };
            conditions.push(Condition::of_gpu(&gpu.uuid, "gpu", "unreadable", detail));
        }
        // One that was missing and cannot be read is missing still, and is no other GPU.
        for gpu in self.had.iter().filter(|gpu| self.last.iter().all(|it| it.uuid != gpu.uuid)) {
            if let Some(position) = position_of(gpu, &left) {
                left.remove(position);
            }
        }
        // After a boot the driver may list them a moment later.
        if unreadable.is_fault() {
            let code = absence(survey.lost, absent.len());
            let absent = absent.into_iter();
            conditions
                .extend(absent.map(|gpu| Condition::of_gpu(&gpu.uuid, "gpu", code, unlisted(gpu, address_of(gpu)))));
        }
        conditions.extend(left.into_iter().map(|read| {
            let name = match &read.pci_address {
                Some(address) => finding_log::name_of_place(address),
                None => finding_log::name_of_index(read.index),
            };
            Condition::of_gpu(&name, "gpu", "unreadable", read.why.as_str())
        }));
        conditions
    }
}

/// What is said of a GPU that was there and is not.
fn unlisted(gpu: &GpuInfo, pci_address: Option<&String>) -> String {
    let place = pci_address.map(|address| format!(" at {address}")).unwrap_or_default();
    format!("the driver no longer lists GPU {} ({}){place}", gpu.index, gpu.model)
}

/// The code of so many absent GPUs. The driver does not name a GPU that is lost: where as many are lost as are absent, they are these.
fn absence(lost: u32, absent: usize) -> &'static str {
    if usize::try_from(lost).is_ok_and(|lost| lost == absent) { "lost" } else { "missing" }
}

/// True where the error is about the agent's own process, and says nothing about programs that use the GPUs.
const fn is_of_this_process(error: &GpuError) -> bool {
    match error {
        // The agent has met the library before: it was removed since, and programs that have loaded it go on.
        GpuError::NotInstalled { .. } | GpuError::Process { .. } => true,
        GpuError::NotLoaded | GpuError::Hung { .. } | GpuError::Driver { .. } | GpuError::NotReady { .. } => false,
    }
}

impl Unreadable {
    const fn is_fault(self) -> bool {
        self.surveys >= UNREADABLE_SURVEYS
    }

    const fn status(self, harms_tenants: bool) -> HealthLevel {
        if self.is_fault() && harms_tenants { HealthLevel::Critical } else { HealthLevel::Warning }
    }

    /// The error concerns the driver as a whole.
    fn condition_of_driver(self, error: &GpuError) -> Condition {
        let code = match error {
            // It does not pass.
            GpuError::Process { fault: ProcessFault::DriverReplaced, .. } => "restart_needed",
            _ if !self.is_fault() => "unresponsive",
            GpuError::Hung { .. } => "hung",
            GpuError::NotLoaded => "not_loaded",
            GpuError::NotInstalled { .. } | GpuError::Process { fault: ProcessFault::Other, .. } => "not_callable",
            GpuError::Driver { .. } | GpuError::NotReady { .. } => "failed",
        };
        Condition::of_machine("driver", code, error.to_string())
    }

    fn alert(self, why: &str, harms_tenants: bool) -> Alert {
        let is_credited = self.is_fault() && harms_tenants;
        let mut classifications = vec![Classification::PreventAllocation];
        classifications.push(if is_credited { Classification::BillingCredit } else { Classification::Warn });
        Alert {
            probe_id: "gpu.unreadable".to_owned(),
            target: "gpus".to_owned(),
            since: self.since,
            classifications,
            message: format!("the driver does not list the GPUs ({why}); shown are those that it listed last"),
            tenant_message: "The GPUs of this node cannot be looked at.".to_owned(),
        }
    }
}

/// The missing GPUs as conditions.
fn missing_conditions(health: &HealthReport, lost: u32) -> Vec<Condition> {
    let code = absence(lost, health.alerts.len());
    health.alerts.iter().map(|alert| Condition::of_gpu(&alert.target, "gpu", code, alert.message.as_str())).collect()
}

#[cfg(test)]
mod tests {
    use chrono::TimeDelta;

    use super::*;
    use crate::finding_log::FindingKey;
    use crate::gpu_probe::{GpuCondition, SurveyedGpu};
    use wire::inventory::GpuTopology;

    fn gpu(index: u32) -> GpuInfo {
        GpuInfo {
            index,
            uuid: format!("GPU-{index}"),
            vendor: "NVIDIA".into(),
            model: "H100".into(),
            memory_mib: 1,
            topology: GpuTopology::default(),
        }
    }

    fn survey(gpus: &[GpuInfo]) -> GpuSurvey {
        let gpu = |info: &GpuInfo| SurveyedGpu {
            info: info.clone(),
            pci_address: None,
            load: None,
            condition: GpuCondition::default(),
        };
        GpuSurvey { gpus: gpus.iter().map(gpu).collect(), ..GpuSurvey::default() }
    }

    fn unreadable(index: u32, pci_address: Option<&str>, error: &str) -> UnreadableGpu {
        let place = pci_address.map(|address| format!(" at {address}")).unwrap_or_default();
        let why = format!("GPU {index}{place}: {error}");
        UnreadableGpu { index, pci_address: pci_address.map(str::to_owned), why }
    }

    fn codes(presence: &Presence) -> Vec<String> {
        let code = |condition: &Condition| {
            let FindingKey { probe, gpu_uuid, code } = &condition.key;
            format!("{probe}/{code} {}", gpu_uuid.as_deref().unwrap_or("machine"))
        };
        presence.conditions.iter().map(code).collect()
    }

    const HUNG: GpuError = GpuError::Hung { seconds: 10 };

    #[test]
    fn vanished_gpu_is_missing_until_it_returns() {
        let had = [gpu(0), gpu(1)];
        let (mut monitor, start) = (GpuMonitor::of(&had), Utc::now());
        assert_eq!(monitor.assess(Ok(&survey(&had)), start).health.status, HealthLevel::Ok);
        let _ = monitor.assess(Ok(&survey(&had[..1])), start);
        let found = monitor.assess(Ok(&survey(&had[..1])), start + TimeDelta::minutes(1));
        assert_eq!((found.health.status, codes(&found)), (HealthLevel::Critical, vec!["gpu/missing GPU-1".to_owned()]));
        let alert = &found.health.alerts[0];
        assert_eq!((alert.target.as_str(), alert.since), ("GPU-1", start));
        assert_eq!(codes(&monitor.assess(Ok(&survey(&had)), start)), Vec::<String>::new());
        assert!(monitor.missing_since.is_empty());
    }

    #[test]
    fn finding_of_a_vanished_gpu_names_the_address_that_it_had() {
        let had = [gpu(0), gpu(1)];
        let mut monitor = GpuMonitor::of(&had).at(BTreeMap::from([("GPU-1".to_owned(), "0000:3b:00".to_owned())]));
        let found = monitor.assess(Ok(&GpuSurvey { lost: 1, ..survey(&had[..1]) }), Utc::now());
        assert_eq!(codes(&found), ["gpu/lost GPU-1"]);
        let detail = &found.conditions[0].detail;
        assert!(detail.contains("GPU 1 ") && detail.ends_with("at 0000:3b:00"), "{detail}");
    }

    #[test]
    fn gpu_that_does_not_come_back_with_a_boot_is_missing_and_a_replaced_one_is_not() {
        let had = [gpu(0), gpu(1)];
        let mut monitor = GpuMonitor::of_earlier_boot(&had);
        let partial = GpuSurvey { unreadable: vec![unreadable(1, None, "an unknown error")], ..survey(&had[..1]) };
        let found = monitor.assess(Ok(&partial), Utc::now());
        assert_eq!((found.gpus.len(), monitor.is_of_this_boot()), (2, false), "one of them cannot be read yet");
        for _ in 1..UNREADABLE_SURVEYS {
            let found = monitor.assess(Ok(&survey(&had[..1])), Utc::now());
            assert_eq!((codes(&found), monitor.is_of_this_boot()), (vec![], false), "it may come a moment later");
        }
        let found = monitor.assess(Ok(&survey(&had[..1])), Utc::now());
        assert_eq!((codes(&found), monitor.is_of_this_boot()), (vec!["gpu/missing GPU-1".to_owned()], true));

        let mut monitor = GpuMonitor::of_earlier_boot(&had);
        let replaced = [gpu(0), gpu(7)];
        assert_eq!(codes(&monitor.assess(Ok(&survey(&replaced)), Utc::now())), Vec::<String>::new());
        assert!(monitor.has("GPU-7") && !monitor.has("GPU-1"));
        assert_eq!(codes(&monitor.assess(Ok(&survey(&replaced[..1])), Utc::now())), ["gpu/missing GPU-7"]);
    }

    #[test]
    fn driver_that_lists_its_gpus_a_moment_after_the_boot_has_no_missing_gpu() {
        let had = [gpu(0), gpu(1)];
        let mut monitor = GpuMonitor::of_earlier_boot(&had);
        for listed in [&had[..0], &had[..1]] {
            let found = monitor.assess(Ok(&survey(listed)), Utc::now());
            assert_eq!((codes(&found), found.gpus.len()), (vec![], 2), "as before the boot");
            assert_eq!(found.health.status, HealthLevel::Warning);
            assert!(found.health.alerts[0].message.contains("of 2 GPUs are listed since the boot"), "{found:?}");
        }
        let found = monitor.assess(Ok(&survey(&had)), Utc::now());
        assert_eq!((codes(&found), found.health.status), (vec![], HealthLevel::Ok));
        assert_eq!(codes(&monitor.assess(Ok(&survey(&had[..1])), Utc::now())), ["gpu/missing GPU-1"], "in this boot");
        // What the driver says has fallen off the bus is not awaited.
        let mut monitor = GpuMonitor::of_earlier_boot(&had);
        let lost = GpuSurvey { lost: 1, ..survey(&had[1..]) };
        assert_eq!(codes(&monitor.assess(Ok(&lost), Utc::now())), ["gpu/lost GPU-0"]);
    }

    #[test]
    fn gpu_that_the_driver_reports_as_lost_is_lost() {
        let had = [gpu(0), gpu(1)];
        let mut monitor = GpuMonitor::of(&had);
        let lost = GpuSurvey { lost: 1, ..survey(&had[1..]) };
        assert_eq!(codes(&monitor.assess(Ok(&lost), Utc::now())), ["gpu/lost GPU-0"]);
    }

    #[test]
    fn reordered_gpus_are_the_same() {
        let had = [gpu(0), gpu(1)];
        let mut monitor = GpuMonitor::of(&had);
        let reordered = [GpuInfo { index: 0, ..gpu(1) }, GpuInfo { index: 1, ..gpu(0) }];
        let found = monitor.assess(Ok(&survey(&reordered)), Utc::now());
        assert_eq!((codes(&found), &found.gpus[..]), (vec![], &reordered[..]));
    }

    #[test]
    fn unresponsive_driver_is_a_fault_only_after_several_surveys() {
        let had = [gpu(0), gpu(1)];
        let (mut monitor, start) = (GpuMonitor::of(&had), Utc::now());
        let at = |n: i64| start + TimeDelta::seconds(30 * n);
        let wanted = [
            (HealthLevel::Warning, "driver/unresponsive machine"),
            (HealthLevel::Warning, "driver/unresponsive machine"),
            (HealthLevel::Critical, "driver/hung machine"),
        ];
        for (n, (status, code)) in (0..).zip(wanted) {
            let found = monitor.assess(Err(&HUNG), at(n));
            assert_eq!((found.health.status, &found.gpus[..]), (status, &had[..]), "as it was read last");
            assert_eq!(codes(&found), [code]);
            let alert = &found.health.alerts[0];
            assert_eq!((alert.probe_id.as_str(), alert.since), ("gpu.unreadable", start));
        }
        assert_eq!(monitor.assess(Ok(&survey(&had)), at(3)).health.status, HealthLevel::Ok);
        // The next failure is counted from its own beginning.
        assert_eq!(codes(&monitor.assess(Err(&HUNG), at(4))), ["driver/unresponsive machine"]);
    }

    #[test]
    fn driver_says_why_it_reports_nothing() {
        let code = |error: GpuError| {
            let mut monitor = GpuMonitor::of(&[gpu(0)]);
            let found = (0..3).map(|_| monitor.assess(Err(&error), Utc::now())).last();
            codes(&found.unwrap()).concat()
        };
        assert_eq!(code(GpuError::NotLoaded), "driver/not_loaded machine");
        assert_eq!(code(GpuError::Driver { message: "x".into() }), "driver/failed machine");
        assert_eq!(code(GpuError::NotReady { message: "x".into() }), "driver/failed machine");
        for error in [process(ProcessFault::Other), GpuError::NotInstalled { why: "x".into() }] {
            assert_eq!(code(error), "driver/not_callable machine");
        }
        assert_eq!(code(process(ProcessFault::DriverReplaced)), "driver/restart_needed machine");
    }

    fn process(fault: ProcessFault) -> GpuError {
        GpuError::Process { message: "x".into(), fault }
    }

    #[test]
    fn what_only_the_agents_own_process_meets_credits_no_tenant_at_any_control_plane() {
        let credits = |error: &GpuError| {
            let mut monitor = GpuMonitor::of(&[gpu(0)]);
            let found = (0..9).map(|_| monitor.assess(Err(error), Utc::now())).last().unwrap();
            let is_credited = found.health.alerts[0].classifications.contains(&Classification::BillingCredit);
            assert_eq!(found.health.status == HealthLevel::Critical, is_credited, "{error}");
            assert!(found.health.alerts[0].classifications.contains(&Classification::PreventAllocation), "{error}");
            is_credited
        };
        for fault in [ProcessFault::Other, ProcessFault::DriverReplaced] {
            assert!(!credits(&process(fault)));
        }
        assert!(!credits(&GpuError::NotInstalled { why: "x".into() }));
        for error in [HUNG, GpuError::NotLoaded, GpuError::Driver { message: "x".into() }] {
            assert!(credits(&error), "{error}");
        }
    }

    #[test]
    fn replaced_driver_is_a_finding_at_once_and_beside_gpus_that_are_still_read() {
        let mut monitor = GpuMonitor::of(&[gpu(0)]);
        let replaced = process(ProcessFault::DriverReplaced);
        assert_eq!(codes(&monitor.assess(Err(&replaced), Utc::now())), ["driver/restart_needed machine"]);
        let (read, now) = (GpuSurvey { restart_needed: Some("why".into()), ..survey(&[gpu(0)]) }, Utc::now());
        let _ = monitor.assess(Ok(&read), now);
        let found = monitor.assess(Ok(&read), now + TimeDelta::seconds(5));
        assert_eq!((codes(&found), found.gpus.len()), (vec!["driver/restart_needed machine".to_owned()], 1));
        let alert = &found.health.alerts[0];
        assert_eq!((found.health.status, alert.since), (HealthLevel::Warning, now));
        assert_eq!(alert.classifications, [Classification::PreventAllocation, Classification::Warn]);
        assert_eq!(codes(&monitor.assess(Ok(&survey(&[gpu(0)])), now)), Vec::<String>::new());
    }

    #[test]
    fn gpu_that_cannot_be_read_is_named_by_its_address_also_where_it_was_never_read() {
        let had = [gpu(0), gpu(1), gpu(2)];
        let addresses = [("GPU-1", "0000:3b:00"), ("GPU-2", "0000:5e:00")].map(|(a, b)| (a.to_owned(), b.to_owned()));
        let mut monitor = GpuMonitor::of(&had).at(addresses.into());
        let details = |monitor: &mut GpuMonitor, unreadable: Vec<UnreadableGpu>| {
            let partial = GpuSurvey { unreadable, ..survey(&[gpu(0)]) };
            let found = (0..3).map(|_| monitor.assess(Ok(&partial), Utc::now())).last().unwrap();
            let detail = |it: &Condition| format!("{}: {}", it.key.gpu_uuid.as_deref().unwrap_or("machine"), it.detail);
            found.conditions.iter().map(detail).collect::<Vec<_>>()
        };
        let at = |index, address| unreadable(index, Some(address), "e");
        let found = details(&mut monitor, vec![at(1, "0000:5e:00"), at(2, "0000:3b:00")]);
        assert_eq!(found, ["GPU-1: GPU 2 at 0000:3b:00: e", "GPU-2: GPU 1 at 0000:5e:00: e"]);
        let found = details(&mut monitor, vec![unreadable(1, None, "a"), unreadable(2, None, "b")]);
        assert_eq!(found, ["GPU-1: GPU at 0000:3b:00: GPU 1: a", "GPU-2: GPU at 0000:5e:00: GPU 2: b"]);
        let mut new = GpuMonitor::of(&[gpu(0)]);
        let found = details(&mut new, vec![at(1, "0000:3b:00"), unreadable(2, None, "b")]);
        assert_eq!(found, ["PCI-0000:3b:00: GPU 1 at 0000:3b:00: e", "INDEX-2: GPU 2: b"]);
        // What the driver says of one GPU is said of no other.
        let found = details(&mut monitor, vec![at(1, "0000:3b:00"), at(3, "0000:9a:00")]);
        let absent = "GPU-2: the driver no longer lists GPU 2 (H100) at 0000:5e:00";
        assert_eq!(found, ["GPU-1: GPU 1 at 0000:3b:00: e", absent, "PCI-0000:9a:00: GPU 3 at 0000:9a:00: e"]);
    }

    #[test]
    fn gpu_that_falls_off_the_bus_beside_one_that_was_never_read_is_lost() {
        let mut monitor = GpuMonitor::of(&[]);
        let never_read = |gpus: &[GpuInfo], lost| GpuSurvey {
            unreadable: vec![unreadable(2, Some("0000:5e:00"), "e")],
            lost,
            ..survey(gpus)
        };
        for _ in 0..3 {
            let _ = monitor.assess(Ok(&never_read(&[gpu(0), gpu(1)], 0)), Utc::now());
        }
        monitor.addresses = BTreeMap::from([("GPU-1".to_owned(), "0000:3b:00".to_owned())]);
        let found = monitor.assess(Ok(&never_read(&[gpu(0)], 1)), Utc::now());
        assert_eq!(codes(&found), ["gpu/lost GPU-1", "gpu/unreadable PCI-0000:5e:00"]);
    }

    #[test]
    fn transient_read_error_beside_a_gpu_that_was_never_read_is_no_fault() {
        let mut monitor = GpuMonitor::of(&[gpu(0), gpu(1)]).at([("GPU-1".to_owned(), "0000:3b:00".to_owned())].into());
        let never_read = || unreadable(2, Some("0000:5e:00"), "e");
        let beside = GpuSurvey { unreadable: vec![never_read()], ..survey(&[gpu(0), gpu(1)]) };
        for _ in 0..UNREADABLE_SURVEYS {
            let found = monitor.assess(Ok(&beside), Utc::now());
            assert_eq!((codes(&found), found.gpus.len()), (vec!["gpu/unreadable PCI-0000:5e:00".to_owned()], 2));
        }
        let both = [unreadable(1, Some("0000:3b:00"), "e"), never_read()];
        let both = GpuSurvey { unreadable: both.into(), ..survey(&[gpu(0)]) };
        for _ in 1..UNREADABLE_SURVEYS {
            let found = monitor.assess(Ok(&both), Utc::now());
            assert_eq!((codes(&found), found.gpus.len()), (vec!["gpu/unreadable PCI-0000:5e:00".to_owned()], 2));
        }
        let found = monitor.assess(Ok(&both), Utc::now());
        assert_eq!(codes(&found), ["gpu/unreadable GPU-1", "gpu/unreadable PCI-0000:5e:00"]);
        // The next failure is counted from its own beginning.
        let _ = monitor.assess(Ok(&beside), Utc::now());
        assert_eq!(codes(&monitor.assess(Ok(&both), Utc::now())), ["gpu/unreadable PCI-0000:5e:00"]);
    }

    #[test]
    fn missing_gpu_that_returns_and_cannot_be_read_is_one_gpu() {
        let (had, address) = ([gpu(0), gpu(1)], "0000:3b:00");
        let mut monitor = GpuMonitor::of(&had).at([("GPU-1".to_owned(), address.to_owned())].into());
        let _ = monitor.assess(Ok(&survey(&had[..1])), Utc::now());
        for pci_address in [Some(address), None] {
            let returned = GpuSurvey { unreadable: vec![unreadable(1, pci_address, "e")], ..survey(&had[..1]) };
            assert_eq!(codes(&monitor.assess(Ok(&returned), Utc::now())), ["gpu/missing GPU-1"], "{pci_address:?}");
        }
        let other = GpuSurvey { unreadable: vec![unreadable(1, Some("0000:5e:00"), "e")], ..survey(&had[..1]) };
        let found = monitor.assess(Ok(&other), Utc::now());
        assert_eq!(codes(&found), ["gpu/missing GPU-1", "gpu/unreadable PCI-0000:5e:00"]);
    }

    #[test]
    fn gpu_that_alone_cannot_be_read_is_a_fault_of_that_gpu() {
        let had = [gpu(0), gpu(1), gpu(2)];
        let mut monitor = GpuMonitor::of(&had);
        let partial = GpuSurvey {
            unreadable: vec![unreadable(1, None, "an unknown error")],
            ..survey(&[gpu(0), GpuInfo { index: 2, ..gpu(2) }])
        };
        for _ in 0..2 {
            let found = monitor.assess(Ok(&partial), Utc::now());
            assert_eq!((codes(&found), &found.gpus[..]), (vec![], &had[..]));
        }
        let found = monitor.assess(Ok(&partial), Utc::now());
        assert_eq!((codes(&found), found.gpus.len()), (vec!["gpu/unreadable GPU-1".to_owned()], 3));
    }

    #[test]
    fn missing_gpu_stays_missing_while_the_driver_does_not_answer() {
        let had = [gpu(0), gpu(1)];
        let (mut monitor, now) = (GpuMonitor::of(&had), Utc::now());
        assert_eq!(monitor.assess(Ok(&survey(&had[..1])), now).health.status, HealthLevel::Critical);
        let found = monitor.assess(Err(&HUNG), now);
        assert_eq!((found.health.status, found.health.alerts.len(), found.gpus.len()), (HealthLevel::Critical, 2, 1));
        assert_eq!(codes(&found), ["gpu/missing GPU-1", "driver/unresponsive machine"]);
    }

    #[test]
    fn first_list_of_a_driver_that_was_unresponsive_at_start_is_the_baseline() {
        let (mut monitor, now) = (GpuMonitor::of(&[]), Utc::now());
        let _ = monitor.assess(Err(&HUNG), now);
        assert_eq!(monitor.assess(Ok(&survey(&[gpu(0)])), now).health.status, HealthLevel::Ok);
        assert_eq!(monitor.assess(Ok(&survey(&[])), now).health.status, HealthLevel::Critical);
    }
}
