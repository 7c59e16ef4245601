//! The findings of this boot. They outlive the process, so that a restarted agent neither forgets nor counts anything twice.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use tracing::warn;
use uuid::Uuid;
use wire::finding::{Finding, MAX_FINDING_DETAIL, MAX_FINDINGS};
use wire::inventory::GpuInfo;

use crate::atomic_file::{self, FileError, PRIVATE};
use crate::bounded_reading::{BoundedReading, LATE_AFTER, Reading, WAIT};
use crate::chain;

const FILE: &str = "health.json";
/// The most findings that are tracked, with conditions that have ended.
const MAX_TRACKED: usize = 4 * MAX_FINDINGS;
/// A condition has ended when it is absent from this many observations in a row: one that comes and goes is one finding.
/// That of a GPU without a name has ended at the first: see [`is_of_unnamed_gpu`].
const ABSENT_OBSERVATIONS: u32 = 3;

/// The prefixes of the names of GPUs that the driver has never named.
const PCI_NAME: &str = "PCI-";
const INDEX_NAME: &str = "INDEX-";

/// The probe of readings that do not answer.
pub const READING: &str = "reading";
/// The probes of an altered machine.
pub const PACKAGE: &str = "package";
pub const PRIVILEGE: &str = "privilege";

/// Whether a finding of this probe is about an altered machine.
#[must_use]
pub fn is_of_altered_machine(probe: &str) -> bool {
    [PACKAGE, PRIVILEGE].contains(&probe)
}

/// What identifies a finding within a boot.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct FindingKey {
    pub probe: &'static str,
    pub gpu_uuid: Option<String>,
    pub code: String,
}

/// The name of a GPU that the driver has never named, by its PCI address. For a control plane, it is a GPU of the machine that is not listed.
#[must_use]
pub fn name_of_place(pci_address: &str) -> String {
    format!("{PCI_NAME}{pci_address}")
}

/// The same by the driver's index, where the address is not known.
#[must_use]
pub fn name_of_index(index: u32) -> String {
    format!("{INDEX_NAME}{index}")
}

/// Whether the finding stands for a GPU that the driver has never named. A control plane counts it with the listed GPUs: it ends with the report
/// that lists the GPU, and stays as long as the list does.
#[must_use]
pub fn is_of_unnamed_gpu(finding: &Finding) -> bool {
    let is_unnamed = |name: &str| [PCI_NAME, INDEX_NAME].into_iter().any(|prefix| name.starts_with(prefix));
    finding.probe == "gpu" && finding.gpu_uuid.as_deref().is_some_and(is_unnamed)
}

/// A condition that a probe observes at this moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Condition {
    pub key: FindingKey,
    pub detail: String,
    /// What exactly is observed, where that may change while the condition lasts: another state is another occurrence.
    pub state: Option<String>,
}

impl Condition {
    /// A condition of a GPU.
    #[must_use]
    pub fn of_gpu(uuid: &str, probe: &'static str, code: &str, detail: impl Into<String>) -> Self {
        let key = FindingKey { probe, gpu_uuid: Some(uuid.to_owned()), code: code.to_owned() };
        Self { key, detail: detail.into(), state: None }
    }

    /// A condition of the machine.
    #[must_use]
    pub fn of_machine(probe: &'static str, code: &str, detail: impl Into<String>) -> Self {
        Self { key: FindingKey { probe, gpu_uuid: None, code: code.to_owned() }, detail: detail.into(), state: None }
    }

    /// With what exactly is observed.
    #[must_use]
    pub fn with_state(self, state: String) -> Self {
        Self { state: Some(state), ..self }
    }
}

/// The condition that a reading does not answer.
pub fn late_reading<T: Send + 'static>(code: &str, reading: &BoundedReading<T>) -> Option<Condition> {
    late_readings(code, reading.late_since().map(|_| reading.subject()).into_iter())
}

/// The condition that readings of one kind do not answer, which it names.
pub fn late_readings<'a>(code: &str, late: impl Iterator<Item = &'a str>) -> Option<Condition> {
    let late: Vec<&str> = late.collect();
    let detail = || format!("no answer for more than {} s: {}", LATE_AFTER.as_secs(), late.join(", "));
    // Another set of them is another occurrence, so that the detail is of what does not answer now.
    (!late.is_empty()).then(|| Condition::of_machine(READING, code, detail()).with_state(late.join("\n")))
}

/// Occurrences of an event since the last report of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Occurred {
    pub count: u64,
    pub first_at: DateTime<Utc>,
    pub last_at: DateTime<Utc>,
    pub detail: String,
}

/// The findings of this boot, and what the probes have to remember.
pub struct FindingLog {
    path: PathBuf,
    state: State,
    stored: State,
    /// The disk may not answer.
    write: BoundedReading<(State, Result<(), FileError>)>,
    /// True while the file cannot be written, which is logged once.
    is_failing: bool,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct State {
    boot_id: Uuid,
    kernel_log_position: Option<u64>,
    /// The GPUs that were listed in this boot. Until its first complete list, those of the boot before.
    gpus: Vec<GpuInfo>,
    gpus_are_of_earlier_boot: bool,
    /// The GPU at each PCI address.
    addresses: BTreeMap<String, String>,
    /// NVLinks of each GPU that were active in this boot.
    nvlinks: BTreeMap<String, BTreeSet<u32>>,
    /// The GPUs that had not joined their fabric at the last survey.
    outside_fabric: BTreeSet<String>,
    findings: Vec<Tracked>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Tracked {
    finding: Finding,
    kind: Kind,
    /// Of a condition, as of its last occurrence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    state: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    /// Reported until the next boot.
    Event,
    /// Reported until it was absent for some observations.
    Condition { absent: u32 },
}

impl Tracked {
    const fn is_reported(&self) -> bool {
        match self.kind {
            Kind::Event => true,
            Kind::Condition { absent } => absent < ABSENT_OBSERVATIONS,
        }
    }

    fn is(&self, key: &FindingKey) -> bool {
        let finding = &self.finding;
        finding.probe == key.probe && finding.gpu_uuid == key.gpu_uuid && finding.code == key.code
    }
}

impl State {
    /// The findings that outlive a boot: those of an altered machine, and those that are counted with the GPUs, which stay known.
    fn outliving_boots(&self) -> impl Iterator<Item = &Tracked> {
        let outlives = |finding: &Finding| is_of_altered_machine(&finding.probe) || is_of_unnamed_gpu(finding);
        self.findings.iter().filter(move |tracked| tracked.is_reported() && outlives(&tracked.finding))
    }
}

/// The GPUs that the machine is known to have, as the log of this state folder has stored them. None where it cannot be read.
#[must_use]
pub fn stored_gpus(state_dir: &Path) -> Vec<GpuInfo> {
    stored(state_dir).gpus
}

/// Whether the driver has reported GPUs of this machine to an agent with this state folder. Simulated ones have no PCI address.
#[must_use]
pub fn has_read_gpus(state_dir: &Path) -> bool {
    !stored(state_dir).addresses.is_empty()
}

fn stored(state_dir: &Path) -> State {
    let text = atomic_file::read_if_there(&state_dir.join(FILE)).unwrap_or_default().unwrap_or_default();
    serde_json::from_str(&text).unwrap_or_default()
}

impl FindingLog {
    /// The findings of this boot that an earlier process has stored. Those of another boot, or of a file that is not understood, are over,
    /// but for those of an altered machine: a boot takes back nothing of what was altered, and it takes a while to look. The GPUs stay known, with
    /// those that were never named: one that does not come back with the boot is missing.
    #[must_use]
    pub fn open(state_dir: &Path, boot_id: Uuid) -> Self {
        let (path, stored) = (state_dir.join(FILE), stored(state_dir));
        let state = if stored.boot_id == boot_id {
            stored.clone()
        } else {
            State {
                boot_id,
                findings: stored.outliving_boots().cloned().collect(),
                gpus: stored.gpus.clone(),
                gpus_are_of_earlier_boot: true,
                addresses: stored.addresses.clone(),
                ..State::default()
            }
        };
        let write = BoundedReading::of(path.display().to_string());
        Self { path, state, stored, write, is_failing: false }
    }

    /// The position in the kernel's log up to which its events are findings.
    #[must_use]
    pub const fn kernel_log_position(&self) -> Option<u64> {
        self.state.kernel_log_position
    }

    pub const fn set_kernel_log_position(&mut self, position: Option<u64>) {
        self.state.kernel_log_position = position;
    }

    /// The GPUs that were listed in this boot. Until its first complete list, those of the boot before.
    #[must_use]
    pub fn gpus(&self) -> &[GpuInfo] {
        &self.state.gpus
    }

    #[must_use]
    pub const fn gpus_are_of_earlier_boot(&self) -> bool {
        self.state.gpus_are_of_earlier_boot
    }

    /// The GPUs are those of this boot from here on.
    pub const fn note_complete_list(&mut self) {
        self.state.gpus_are_of_earlier_boot = false;
    }

    pub fn set_gpus(&mut self, gpus: &[GpuInfo]) {
        if self.state.gpus != gpus {
            self.state.gpus = gpus.to_vec();
        }
    }

    /// The GPU at a PCI address, also where the driver does not list it at the moment.
    #[must_use]
    pub fn gpu_at(&self, pci_address: &str) -> Option<&str> {
        self.state.addresses.get(pci_address).map(String::as_str)
    }

    /// The PCI address of each GPU, by UUID.
    #[must_use]
    pub fn addresses(&self) -> BTreeMap<String, String> {
        self.state.addresses.iter().map(|(address, uuid)| (uuid.clone(), address.clone())).collect()
    }

    /// Records the PCI address of a GPU. An earlier one, of the slot that it had before a boot, is forgotten: another GPU may have it.
    pub fn set_address(&mut self, pci_address: &str, uuid: &str) {
        self.state.addresses.retain(|address, known| known != uuid || address == pci_address);
        if self.state.addresses.insert(pci_address.to_owned(), uuid.to_owned()).is_none() {
            self.name_events(&name_of_place(pci_address), uuid);
        }
    }

    /// What occurred on a GPU before it was named has its name from here on.
    fn name_events(&mut self, place: &str, uuid: &str) {
        let is_of_place =
            |tracked: &mut Tracked| tracked.kind == Kind::Event && tracked.finding.gpu_uuid.as_deref() == Some(place);
        let events: Vec<_> = self.state.findings.extract_if(.., is_of_place).collect();
        for Tracked { finding, .. } in events {
            let gpu_uuid = Some(uuid.to_owned());
            let is_known = |known: &&mut Tracked| {
                (&known.finding.probe, &known.finding.code) == (&finding.probe, &finding.code)
                    && known.finding.gpu_uuid == gpu_uuid
            };
            match self.state.findings.iter_mut().find(is_known) {
                Some(known) => known.finding.count = known.finding.count.saturating_add(finding.count),
                None => self.state.findings.push(Tracked {
                    finding: Finding { gpu_uuid, ..finding },
                    kind: Kind::Event,
                    state: None,
                }),
            }
        }
    }

    /// Notes the active NVLinks of a GPU. Returns those that were active in this boot and are not.
    pub fn nvlinks_down(&mut self, uuid: &str, active: &[u32]) -> Vec<u32> {
        let known = self.state.nvlinks.entry(uuid.to_owned()).or_default();
        known.extend(active);
        known.iter().filter(|link| !active.contains(link)).copied().collect()
    }

    /// Notes the GPUs that have not joined their fabric. Returns those that had not at the survey before either.
    pub fn still_outside_fabric(&mut self, gpus: BTreeSet<String>) -> BTreeSet<String> {
        let before = std::mem::replace(&mut self.state.outside_fabric, gpus);
        before.intersection(&self.state.outside_fabric).cloned().collect()
    }

    /// Notes an event.
    pub fn note_event(&mut self, key: &FindingKey, occurred: Occurred) {
        let detail = bounded(&occurred.detail);
        if let Some(known) = self.state.findings.iter_mut().find(|tracked| tracked.is(key)) {
            known.finding.count = known.finding.count.saturating_add(occurred.count);
            known.finding.last_at = occurred.last_at;
            known.finding.detail = detail;
            return;
        }
        self.track(key, Kind::Event, None, Occurred { detail, ..occurred });
    }

    /// Notes all conditions that are observed. `is_unknown` tells of which known conditions nothing is known this time: they stay.
    pub fn note_conditions(
        &mut self,
        observed: &[Condition],
        is_unknown: impl Fn(&Finding) -> bool,
        now: DateTime<Utc>,
    ) {
        for tracked in &mut self.state.findings {
            let is_observed = observed.iter().any(|condition| tracked.is(&condition.key));
            if let Kind::Condition { absent } = &mut tracked.kind
                && !is_observed
                && !is_unknown(&tracked.finding)
            {
                *absent = match is_of_unnamed_gpu(&tracked.finding) {
                    // The GPU is listed from this report on, or has another such name.
                    true => ABSENT_OBSERVATIONS,
                    false => absent.saturating_add(1).min(ABSENT_OBSERVATIONS),
                };
            }
        }
        for condition in observed {
            let known = self.state.findings.iter_mut().find(|tracked| tracked.is(&condition.key));
            let Some(known) = known else {
                let (count, detail) = (1, bounded(&condition.detail));
                let occurred = Occurred { count, first_at: now, last_at: now, detail };
                self.track(&condition.key, Kind::Condition { absent: 0 }, condition.state.clone(), occurred);
                continue;
            };
            if !known.is_reported() || known.state != condition.state {
                known.state.clone_from(&condition.state);
                known.finding.count = known.finding.count.saturating_add(1);
                known.finding.last_at = now;
                known.finding.detail = bounded(&condition.detail);
            }
            known.kind = Kind::Condition { absent: 0 };
        }
    }

    /// The findings for a heartbeat, in a stable order; where there are too many, the latest ones.
    #[must_use]
    pub fn report(&self) -> Vec<Finding> {
        let mut findings: Vec<_> =
            self.state.findings.iter().filter(|tracked| tracked.is_reported()).map(|it| it.finding.clone()).collect();
        findings.sort_by_key(|finding| std::cmp::Reverse(finding.last_at));
        findings.truncate(MAX_FINDINGS);
        findings.sort_by(|a, b| (&a.probe, &a.gpu_uuid, &a.code).cmp(&(&b.probe, &b.gpu_uuid, &b.code)));
        findings
    }

    /// The state of the occurrence of a condition that a report had with this count, if it is the latest.
    #[must_use]
    pub fn state_of(&self, probe: &str, code: &str, (boot_id, count): (Uuid, u64)) -> Option<&str> {
        let is_it = |finding: &Finding| finding.probe == probe && finding.code == code && finding.gpu_uuid.is_none();
        let known = self.state.findings.iter().find(|tracked| is_it(&tracked.finding) && tracked.is_reported())?;
        let is_latest = known.finding.boot_id == boot_id && known.finding.count == count;
        known.state.as_deref().filter(|_| is_latest)
    }

    /// Stores the findings where they changed. A power failure ends the boot and with it most of what is stored: only what outlives it is
    /// synced. A disk that does not answer is waited for no longer than a moment: what is known then is stored once it has.
    pub fn store(&mut self) {
        if self.state == self.stored && !self.write.is_in_flight() {
            return;
        }
        let (path, state) = (self.path.clone(), self.state.clone());
        let is_synced = !self.state.outliving_boots().eq(self.stored.outliving_boots());
        let written = self.write.read_within(WAIT, move || {
            let stored = write(&path, &state, is_synced);
            (state, stored)
        });
        match written {
            Reading::Fresh((state, Ok(()))) => {
                self.stored = state;
                self.is_failing = false;
            }
            Reading::Fresh((_, Err(error))) if !std::mem::replace(&mut self.is_failing, true) => {
                warn!(error_code = "node_storage", error = chain(&error), "the health findings cannot be stored");
            }
            Reading::Fresh((_, Err(_))) | Reading::Late { .. } => {}
        }
    }

    fn track(&mut self, key: &FindingKey, kind: Kind, state: Option<String>, occurred: Occurred) {
        if self.state.findings.len() >= MAX_TRACKED {
            // A condition that has ended goes first, then what occurred longest ago.
            let oldest = |tracked: &Tracked| (tracked.is_reported(), tracked.finding.last_at);
            let oldest = self.state.findings.iter().enumerate().min_by_key(|(_, tracked)| oldest(tracked));
            if let Some((index, _)) = oldest {
                self.state.findings.remove(index);
            }
        }
        let finding = Finding {
            probe: key.probe.to_owned(),
            gpu_uuid: key.gpu_uuid.clone(),
            code: key.code.clone(),
            count: occurred.count,
            first_at: occurred.first_at,
            last_at: occurred.last_at,
            boot_id: self.state.boot_id,
            detail: occurred.detail,
        };
        self.state.findings.push(Tracked { finding, kind, state });
    }
}

fn write(path: &Path, state: &State, is_synced: bool) -> Result<(), FileError> {
    let text = serde_json::to_vec(state).map_err(|error| FileError::at("write", path)(error.into()))?;
    match is_synced {
        true => atomic_file::write_atomically(path, &text, PRIVATE),
        false => atomic_file::write_without_sync(path, &text, PRIVATE),
    }
}

/// Text without control characters and of a bounded length.
fn bounded(text: &str) -> String {
    let one_line = text.chars().map(|character| if character.is_control() { ' ' } else { character });
    one_line.take(MAX_FINDING_DETAIL).collect()
}

#[cfg(test)]
impl FindingLog {
    /// Stores the findings, however long the disk takes.
    pub(crate) fn store_all(&mut self) {
        while self.state != self.stored || self.write.is_in_flight() {
            self.store();
        }
    }
}

#[cfg(test)]
mod tests {
    use chrono::TimeDelta;

    use super::*;

    const BOOT: Uuid = Uuid::from_u128(1);

    fn at(seconds: i64) -> DateTime<Utc> {
        DateTime::UNIX_EPOCH + TimeDelta::seconds(seconds)
    }

    fn xid(code: &str) -> FindingKey {
        FindingKey { probe: "xid", gpu_uuid: Some("GPU-1".into()), code: code.into() }
    }

    fn occurred(count: u64, seconds: i64) -> Occurred {
        Occurred { count, first_at: at(seconds), last_at: at(seconds + 1), detail: "d".into() }
    }

    #[test]
    fn gpu_that_is_in_another_slot_after_a_boot_has_one_address() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = FindingLog::open(folder.path(), Uuid::from_u128(1));
        log.set_address("0000:3b:00", "GPU-1");
        log.set_address("0000:5e:00", "GPU-2");
        log.set_address("0000:1b:00", "GPU-1");
        assert_eq!((log.gpu_at("0000:3b:00"), log.gpu_at("0000:1b:00")), (None, Some("GPU-1")));
        assert_eq!(log.addresses()["GPU-1"], "0000:1b:00");
        log.set_address("0000:1b:00", "GPU-2");
        assert_eq!((log.gpu_at("0000:1b:00"), log.gpu_at("0000:5e:00")), (Some("GPU-2"), None));
    }

    #[test]
    fn event_of_a_gpu_that_was_not_named_yet_is_of_that_gpu_once_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = FindingLog::open(folder.path(), BOOT);
        let at_place = |code: &str| FindingKey { gpu_uuid: Some(name_of_place("0000:3b:00")), ..xid(code) };
        log.note_event(&at_place("79"), occurred(1, 0));
        log.note_event(&at_place("31"), occurred(2, 0));
        log.note_event(&xid("31"), occurred(1, 10));
        log.set_address("0000:5e:00", "GPU-2");
        assert!(log.report().iter().any(|it| it.gpu_uuid.as_deref() == Some("PCI-0000:3b:00")));
        log.set_address("0000:3b:00", "GPU-1");
        let shown = |it: &Finding| format!("{} {} {}", it.gpu_uuid.as_deref().unwrap_or("none"), it.code, it.count);
        assert_eq!(log.report().iter().map(shown).collect::<Vec<_>>(), ["GPU-1 31 3", "GPU-1 79 1"]);
    }

    #[test]
    fn restarted_agent_continues_the_counts_of_the_boot_and_a_new_boot_begins_without_any() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = FindingLog::open(folder.path(), BOOT);
        log.note_event(&xid("79"), occurred(1, 10));
        log.set_kernel_log_position(Some(7));
        log.set_address("0000:3b:00", "GPU-1");
        log.store_all();
        let mut repeated = FindingLog::open(folder.path(), BOOT);
        assert_eq!((repeated.kernel_log_position(), repeated.gpu_at("0000:3b:00")), (Some(7), Some("GPU-1")));
        repeated.note_event(&xid("79"), occurred(2, 20));
        let found = repeated.report();
        assert_eq!((found.len(), found[0].count, found[0].first_at, found[0].last_at), (1, 3, at(10), at(21)));
        let next = FindingLog::open(folder.path(), Uuid::from_u128(2));
        assert_eq!((next.report(), next.kernel_log_position()), (vec![], None));
        std::fs::write(folder.path().join(FILE), "{").unwrap();
        assert_eq!(FindingLog::open(folder.path(), BOOT).report(), vec![]);
    }

    #[test]
    fn finding_of_an_altered_machine_outlives_a_boot_until_it_is_known_to_be_over() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = FindingLog::open(folder.path(), BOOT);
        let altered = Condition::of_machine("privilege", "sudoers", "a rule of eve").with_state("s".to_owned());
        let disk = Condition::of_machine("disk", "full", "no room");
        log.note_conditions(&[altered.clone(), disk], |_| false, at(1));
        log.store_all();
        let mut next = FindingLog::open(folder.path(), Uuid::from_u128(2));
        assert_eq!(next.report().iter().map(|it| it.probe.as_str()).collect::<Vec<_>>(), ["privilege"]);
        // Nothing was compared yet in this boot.
        (2..9).for_each(|second| next.note_conditions(&[], |_| true, at(second)));
        assert_eq!(next.report().len(), 1);
        (9..19).for_each(|second| next.note_conditions(&[], |_| false, at(second)));
        assert_eq!(next.report(), vec![]);
        next.store_all();
        assert_eq!(FindingLog::open(folder.path(), Uuid::from_u128(3)).report(), vec![]);
    }

    #[test]
    fn condition_that_lasts_is_the_same_finding_and_one_that_returns_is_counted() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = FindingLog::open(folder.path(), BOOT);
        let pending = Condition::of_gpu("GPU-1", "row_remap", "pending", "rows wait");
        let mut observe = |observed: &[Condition], seconds: i64| {
            log.note_conditions(observed, |_| false, at(seconds));
            log.report()
        };
        let first = observe(std::slice::from_ref(&pending), 1);
        assert_eq!(observe(std::slice::from_ref(&pending), 2), first, "nothing to write for the control plane");
        assert_eq!((observe(&[], 3), observe(&[], 4)), (first.clone(), first.clone()), "absent for a moment");
        assert_eq!(observe(&[], 5), vec![]);
        let repeated = observe(&[pending], 6);
        assert_eq!((repeated[0].count, repeated[0].first_at, repeated[0].last_at), (2, at(1), at(6)));
    }

    #[test]
    fn finding_of_an_unnamed_gpu_outlives_a_boot_and_ends_with_the_first_report_without_it() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = FindingLog::open(folder.path(), BOOT);
        let unreadable = |name: &str| Condition::of_gpu(name, "gpu", "unreadable", "e");
        let names = |log: &FindingLog| log.report().into_iter().filter_map(|it| it.gpu_uuid).collect::<Vec<_>>();
        let at_place = unreadable(&name_of_place("0000:3b:00"));
        log.note_conditions(&[at_place.clone(), unreadable("GPU-1")], |_| false, at(1));
        log.note_conditions(&[unreadable(&name_of_index(2))], |_| false, at(2));
        assert_eq!(names(&log), ["GPU-1", "INDEX-2"], "one name of the GPU at a time");
        log.note_conditions(&[at_place], |_| false, at(3));
        assert_eq!(names(&log), ["GPU-1", "PCI-0000:3b:00"]);
        log.store_all();
        let mut next = FindingLog::open(folder.path(), Uuid::from_u128(2));
        assert_eq!(names(&next), ["PCI-0000:3b:00"]);
        (4..9).for_each(|second| next.note_conditions(&[], is_of_unnamed_gpu, at(second)));
        assert_eq!(names(&next), ["PCI-0000:3b:00"], "nothing is known of it");
        next.note_conditions(&[], |_| false, at(9));
        assert_eq!(names(&next), Vec::<String>::new());
    }

    #[test]
    fn other_state_of_a_condition_is_another_occurrence() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = FindingLog::open(folder.path(), BOOT);
        let mut observe = |state: &str, seconds: i64| {
            let condition = Condition::of_machine("privilege", "setuid", state).with_state(state.to_owned());
            log.note_conditions(&[condition], |_| false, at(seconds));
            log.store_all();
            let found = log.report().remove(0);
            let latest = log.state_of("privilege", "setuid", (BOOT, found.count)).map(str::to_owned);
            assert_eq!(log.state_of("privilege", "setuid", (BOOT, found.count + 1)), None);
            assert_eq!(log.state_of("privilege", "setuid", (Uuid::from_u128(2), found.count)), None);
            (found.count, found.detail, latest)
        };
        assert_eq!(observe("a", 1), (1, "a".to_owned(), Some("a".to_owned())));
        assert_eq!(observe("a", 2).0, 1);
        assert_eq!(observe("b", 3), (2, "b".to_owned(), Some("b".to_owned())));
        let repeated = FindingLog::open(folder.path(), BOOT);
        assert_eq!(repeated.state_of("privilege", "setuid", (BOOT, 2)), Some("b"), "also after a restart");
    }

    #[test]
    fn condition_stays_while_nothing_is_known_of_it() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = FindingLog::open(folder.path(), BOOT);
        let gpu = Condition::of_gpu("GPU-1", "row_remap", "pending", "");
        log.note_conditions(&[gpu, Condition::of_machine("disk", "full", "")], |_| false, at(1));
        for n in 2..10 {
            log.note_conditions(&[], |finding| finding.gpu_uuid.is_some(), at(n));
        }
        assert_eq!(log.report().iter().map(|finding| finding.probe.as_str()).collect::<Vec<_>>(), ["row_remap"]);
    }

    #[test]
    fn findings_are_bounded_and_the_latest_are_reported() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = FindingLog::open(folder.path(), BOOT);
        for n in 0..1000 {
            log.note_event(&xid(&n.to_string()), Occurred { detail: "x\n".repeat(1000), ..occurred(1, n) });
        }
        let found = log.report();
        assert_eq!((found.len(), log.state.findings.len()), (MAX_FINDINGS, MAX_TRACKED));
        assert!(found.iter().any(|finding| finding.code == "999") && found.iter().all(|finding| finding.code != "0"));
        assert!(
            found.iter().all(|finding| finding.detail.len() == MAX_FINDING_DETAIL && !finding.detail.contains('\n'))
        );
    }

    #[test]
    fn nvlink_is_down_only_if_it_was_up_in_this_boot() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = FindingLog::open(folder.path(), BOOT);
        assert_eq!(log.nvlinks_down("GPU-1", &[]), Vec::<u32>::new(), "a GPU without a bridge");
        assert_eq!(log.nvlinks_down("GPU-1", &[0, 1]), Vec::<u32>::new());
        assert_eq!(log.nvlinks_down("GPU-1", &[1]), [0]);
    }
}
