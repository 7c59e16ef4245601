//! Compares the machine with its baseline. It only reads: what follows from a difference is the control plane's to decide.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use chrono::Utc;
use tracing::{info, warn};

use super::accounts::{HomeReads, MachineAccounts, key_files};
use super::baseline::{Baseline, BaselineFile, StoredBaseline};
use super::groups;
use super::listeners::{self, PortRange};
use super::privileges::{Entries, Observed, PrivilegeKind, Privileges, condition, differences, state_of};
use super::recorded_tenants::RecordedTenants;
use super::setuid::{SearchedFolders, SetuidSearch};
use super::startup_files;
use super::sudo_rules;
use crate::chain;
use crate::finding_log::{Condition, PRIVILEGE};

/// The code of the finding that the baseline cannot be read.
const BASELINE_DAMAGED: &str = "baseline_damaged";
/// The code of the finding that a later release has written the baseline, or a part of it.
const BASELINE_NEWER: &str = "baseline_newer";
/// What a search of the file systems finds.
const SEARCHED: [PrivilegeKind; 2] = [PrivilegeKind::Setuid, PrivilegeKind::FileCapability];
/// The code of the finding that something could not be compared.
const INCOMPLETE: &str = "incomplete";
/// A difference is one if it is still there after this time: accounts and their files are not made in one step.
const CONFIRMED_AFTER: Duration = Duration::from_secs(1);

/// Where privileges are looked for, and what is the agent's own.
#[derive(Debug, Clone)]
pub struct PrivilegeSettings {
    /// The machine's root folder.
    pub root: PathBuf,
    /// The agent's state folder, with its account records.
    pub state_dir: PathBuf,
    pub homes: PathBuf,
    /// The folder of tenants' keys.
    pub keys: PathBuf,
    /// Where the agent's own sshd listens.
    pub ssh_listen: Option<SocketAddr>,
    pub ignored_ports: Vec<PortRange>,
}

/// How much is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// Everything but the search of file systems, of which the known differences are looked at.
    Quick,
    Full,
}

/// The privileges of the machine against their baseline.
pub struct PrivilegeChecker {
    settings: PrivilegeSettings,
    file: BaselineFile,
    baseline: BaselineState,
    search: SetuidSearch,
    homes: HomeReads,
    /// What was observed last.
    observed: Privileges,
    /// Why the last observation of a kind was not complete.
    incomplete: BTreeMap<PrivilegeKind, String>,
    differences: Privileges,
    /// A change of the machine between the next two looks at a difference.
    #[cfg(test)]
    between_looks: Option<Box<dyn FnOnce() + Send>>,
}

enum BaselineState {
    /// None was recorded yet: nothing is known of any difference.
    None,
    Of(Baseline),
    Damaged {
        why: String,
    },
    /// Of a later release: stored until the next clean-up proof, for when that release is back.
    Newer {
        version: u32,
    },
}

impl PrivilegeChecker {
    /// With the baseline that is stored.
    #[must_use]
    pub fn open(settings: PrivilegeSettings) -> Self {
        let file = BaselineFile::in_folder(&settings.state_dir);
        let baseline = match file.load() {
            StoredBaseline::None => BaselineState::None,
            StoredBaseline::Of(baseline) => BaselineState::Of(baseline),
            StoredBaseline::Damaged { why } => BaselineState::Damaged { why },
            StoredBaseline::Newer { version } => {
                warn!(
                    error_code = "baseline",
                    version, "a later release has written the baseline of privileges: nothing is compared"
                );
                BaselineState::Newer { version }
            }
        };
        Self {
            settings,
            file,
            baseline,
            search: SetuidSearch::default(),
            homes: HomeReads::default(),
            observed: Privileges::new(),
            incomplete: BTreeMap::new(),
            differences: Privileges::new(),
            #[cfg(test)]
            between_looks: None,
        }
    }

    /// Whether a kind of privileges was not recorded yet: all of them before the first baseline, and those that could not be observed whole.
    #[must_use]
    pub(super) fn has_unrecorded(&self) -> bool {
        match &self.baseline {
            BaselineState::None => true,
            BaselineState::Of(baseline) => {
                PrivilegeKind::ALL.iter().any(|kind| !baseline.privileges.contains_key(kind))
            }
            BaselineState::Damaged { .. } | BaselineState::Newer { .. } => false,
        }
    }

    /// Compares. `goes_on` is asked from time to time, and may end the comparison, which then returns false: what was known before holds.
    pub fn check(&mut self, depth: Depth, mut goes_on: impl FnMut() -> bool) -> bool {
        self.observe(depth, &mut goes_on);
        let mut found = self.found();
        let is_new = |(kind, entries): (&PrivilegeKind, &Entries)| {
            entries.iter().any(|(name, state)| self.differences.get(kind).and_then(|it| it.get(name)) != Some(state))
        };
        if found.iter().any(is_new) {
            std::thread::sleep(CONFIRMED_AFTER);
            #[cfg(test)]
            self.between_looks.take().into_iter().for_each(|change| change());
            self.observe(Depth::Quick, &mut goes_on);
            let repeated = self.found();
            for (kind, entries) in &mut found {
                let repeated = repeated.get(kind);
                // By name: what changes from look to look is a difference as well.
                entries.retain(|name, state| match repeated.and_then(|it| it.get(name)) {
                    Some(seen) => {
                        state.clone_from(seen);
                        true
                    }
                    None => false,
                });
            }
        }
        if !goes_on() {
            return false;
        }
        found.retain(|_, entries| !entries.is_empty());
        self.differences = found;
        true
    }

    /// Records the kinds that the baseline does not have, where no tenant is on the machine. A full check must have been made.
    pub fn record_first(&mut self) {
        let recorded = match &self.baseline {
            BaselineState::None => Privileges::new(),
            BaselineState::Of(baseline) => baseline.privileges.clone(),
            BaselineState::Damaged { .. } | BaselineState::Newer { .. } => return,
        };
        let mut privileges = recorded.clone();
        for (kind, entries) in self.complete() {
            privileges.entry(kind).or_insert(entries);
        }
        if privileges.len() > recorded.len() && self.tenants().is_certainly_empty() {
            self.record(privileges, "the privileges of the machine are recorded");
        }
    }

    fn tenants(&self) -> RecordedTenants {
        RecordedTenants::read(&self.settings.root, &self.settings.state_dir)
    }

    /// What was observed whole. A part must not be recorded: the rest would be a difference once it is seen.
    fn complete(&self) -> Privileges {
        let is_whole = |(kind, _): &(&PrivilegeKind, &Entries)| !self.incomplete.contains_key(kind);
        self.observed.iter().filter(is_whole).map(|(kind, entries)| (*kind, entries.clone())).collect()
    }

    /// After a clean-up proof: what is gone is forgotten, so that it is a difference when it comes back. While there is any difference the
    /// baseline stays as it is: a tenant who has gained privileges must not leave them as accepted.
    pub fn renew(&mut self) {
        match &self.baseline {
            BaselineState::None => self.record_first(),
            // Also what is no finding yet, or no more by the second look, is not accepted.
            BaselineState::Of(baseline) if self.differences.is_empty() && self.found().is_empty() => {
                let mut renewed = baseline.privileges.clone();
                renewed.extend(self.complete());
                if renewed != baseline.privileges || !baseline.newer.is_empty() {
                    self.record_without_newer(renewed, "the recorded privileges are renewed after a clean-up");
                }
            }
            // As a first one, since nothing was compared.
            BaselineState::Newer { .. } if self.tenants().is_certainly_empty() => {
                self.record(
                    self.complete(),
                    "the privileges of the machine are recorded in place of a later release's",
                );
            }
            BaselineState::Newer { .. } => {}
            BaselineState::Of(_) | BaselineState::Damaged { .. } => {}
        }
    }

    /// An operator has accepted the differences that the finding of this code had. Others than those are not accepted.
    pub fn accept(&mut self, code: &str, state: &str) {
        let is_unknown = match &self.baseline {
            BaselineState::Damaged { .. } => code == BASELINE_DAMAGED,
            BaselineState::Newer { .. } => code == BASELINE_NEWER,
            BaselineState::None | BaselineState::Of(_) => false,
        };
        if is_unknown && self.observed.contains_key(&PrivilegeKind::Setuid) {
            self.record(self.complete(), "an operator has accepted the privileges of the machine");
        }
        let BaselineState::Of(baseline) = &self.baseline else { return };
        let Some(kind) = PrivilegeKind::of(code) else { return };
        let accepted = self.differences.get(&kind).filter(|differences| state_of(differences) == state);
        let Some(accepted) = accepted.cloned() else { return };
        let mut privileges = baseline.privileges.clone();
        privileges.entry(kind).or_default().extend(accepted);
        if self.record(privileges, "an operator has accepted a difference of privileges") {
            self.differences.remove(&kind);
        }
    }

    /// The findings.
    #[must_use]
    pub fn conditions(&self) -> Vec<Condition> {
        let mut found: Vec<Condition> =
            self.differences.iter().map(|(kind, differences)| condition(*kind, differences)).collect();
        let of_baseline = match &self.baseline {
            BaselineState::Damaged { why } => Some((BASELINE_DAMAGED, why.clone())),
            BaselineState::Newer { version } => {
                Some((BASELINE_NEWER, format!("version {version}: nothing is compared until the next clean-up")))
            }
            BaselineState::Of(baseline) if !baseline.newer.is_empty() => {
                let codes: Vec<&str> = baseline.newer.keys().map(String::as_str).collect();
                Some((BASELINE_NEWER, format!("not compared until the agent is updated: {}", codes.join(", "))))
            }
            BaselineState::None | BaselineState::Of(_) => None,
        };
        if let Some((code, detail)) = of_baseline {
            found.push(Condition::of_machine(PRIVILEGE, code, detail).with_state(String::new()));
        }
        if let Some((kind, why)) = self.incomplete.first_key_value() {
            found.push(Condition::of_machine(PRIVILEGE, INCOMPLETE, format!("{}: {why}", kind.code())));
        }
        found
    }

    fn record(&mut self, privileges: Privileges, what: &'static str) -> bool {
        let newer = match &self.baseline {
            BaselineState::Of(baseline) => baseline.newer.clone(),
            BaselineState::None | BaselineState::Damaged { .. } | BaselineState::Newer { .. } => BTreeMap::new(),
        };
        self.store(Baseline { recorded_at: Utc::now(), privileges, newer }, what)
    }

    fn record_without_newer(&mut self, privileges: Privileges, what: &'static str) -> bool {
        self.store(Baseline { recorded_at: Utc::now(), privileges, newer: BTreeMap::new() }, what)
    }

    fn store(&mut self, baseline: Baseline, what: &'static str) -> bool {
        match self.file.store(&baseline) {
            Ok(()) => {
                let entries: usize = baseline.privileges.values().map(Entries::len).sum();
                info!(entries, "{what}");
                self.baseline = BaselineState::Of(baseline);
                true
            }
            Err(error) => {
                warn!(
                    error_code = "node_storage",
                    error = chain(&error),
                    "the baseline of privileges cannot be stored"
                );
                false
            }
        }
    }

    fn observe(&mut self, depth: Depth, goes_on: &mut impl FnMut() -> bool) {
        let settings = &self.settings;
        // Before the accounts: a tenant's account is made before its keys, and removed after them.
        let listed = key_files(&settings.root, &settings.keys);
        let tenants = self.tenants();
        let accounts = MachineAccounts::read(&settings.root, &tenants);
        let uids = tenants.uids();
        let quick = [
            (PrivilegeKind::Sudoers, sudo_rules::observe(&settings.root, &tenants)),
            (PrivilegeKind::UidZero, accounts.with_uid_zero()),
            (PrivilegeKind::Account, accounts.without_uid_zero()),
            (PrivilegeKind::GroupMember, groups::observe(&settings.root, &accounts)),
            (PrivilegeKind::AuthorizedKeys, accounts.authorized_keys((&settings.keys, &listed), &mut self.homes)),
            (
                PrivilegeKind::ListeningPort,
                listeners::observe(&settings.root, &uids, &settings.ignored_ports, settings.ssh_listen),
            ),
            (PrivilegeKind::Autostart, startup_files::observe(&settings.root, &tenants)),
        ];
        if depth == Depth::Full {
            let (root, homes) = (settings.root.clone(), settings.homes.clone());
            let found = self.search.search(&SearchedFolders { root, homes, tenants: uids }, goes_on);
            self.take(PrivilegeKind::Setuid, found.setuid);
            self.take(PrivilegeKind::FileCapability, found.capabilities);
        } else {
            SEARCHED.into_iter().for_each(|kind| self.look_at_searched_differences(kind, &uids));
        }
        for (kind, found) in quick {
            self.take(kind, found);
        }
    }

    fn take(&mut self, kind: PrivilegeKind, found: Observed) {
        match found.incomplete {
            None => {
                self.incomplete.remove(&kind);
                self.observed.insert(kind, found.entries);
            }
            Some(why) => {
                // What is not there this time may be where nothing could be read.
                self.observed.entry(kind).or_default().extend(found.entries);
                self.incomplete.insert(kind, why);
            }
        }
    }

    /// A corrected file shows before the next search.
    fn look_at_searched_differences(&mut self, kind: PrivilegeKind, tenants: &BTreeSet<u32>) {
        let BaselineState::Of(baseline) = &self.baseline else { return };
        let Some(observed) = self.observed.get_mut(&kind) else { return };
        let Some(recorded) = baseline.privileges.get(&kind) else { return };
        for name in differences(recorded, observed).into_keys() {
            match self.search.state_of(kind, &name, tenants) {
                Ok(Some(state)) => {
                    observed.insert(name, state);
                }
                Ok(None) => {
                    observed.remove(&name);
                }
                // It may be as it was.
                Err(_) => {}
            }
        }
    }

    fn found(&self) -> Privileges {
        let BaselineState::Of(baseline) = &self.baseline else { return Privileges::new() };
        // A kind that was not recorded is not compared.
        let of = |kind: PrivilegeKind| {
            let (recorded, observed) = (baseline.privileges.get(&kind)?, self.observed.get(&kind)?);
            let found = differences(recorded, observed);
            (!found.is_empty()).then_some((kind, found))
        };
        PrivilegeKind::ALL.into_iter().filter_map(of).collect()
    }
}

#[cfg(test)]
mod tests;
