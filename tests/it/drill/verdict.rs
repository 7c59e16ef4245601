//! What a restored database has of what was acknowledged, and whether `gpuaas recover-report` agrees.

use super::load::{Acknowledgement, LoadRecords, RentalProgress};
use chrono::{DateTime, Utc};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use uuid::Uuid;

/// What the restored database has.
#[derive(Clone, Debug, Default)]
pub(super) struct RestoredDatabase {
    /// Each entity of the records with the states that it has come to.
    pub(super) history: BTreeSet<(Uuid, String)>,
    /// The states of the entities that it has.
    pub(super) states: BTreeMap<Uuid, String>,
}

impl RestoredDatabase {
    pub(super) fn has(&self, it: &Acknowledgement) -> bool {
        match it.state {
            None => self.states.contains_key(&it.entity),
            Some(state) => self.history.contains(&(it.entity, state.to_owned())),
        }
    }
}

/// The acknowledged transitions that it lacks, and what must not be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct LossVerdict {
    pub(super) lost: usize,
    /// The oldest of them.
    pub(super) lost_since: Option<DateTime<Utc>>,
    /// Losses that have an effect outside of the database, and must be in the report.
    pub(super) to_be_listed: usize,
    pub(super) violations: Vec<String>,
}

/// Compares what the load's clients know with the restored database and the report (`gpuaas recover-report --output json`). What was acknowledged
/// until `archived_until` was in the archive. `has_events`: whether the streams have survived.
pub(super) fn judge(
    records: &LoadRecords,
    restored: &RestoredDatabase,
    archived_until: DateTime<Utc>,
    report: &Value,
    has_events: bool,
) -> LossVerdict {
    let mut verdict = LossVerdict::default();
    for it in records.acknowledged.iter().filter(|it| !restored.has(it)) {
        verdict.lost += 1;
        verdict.lost_since = Some(verdict.lost_since.map_or(it.at, |since| since.min(it.at)));
        if it.at <= archived_until {
            let what = it.state.unwrap_or("its creation");
            verdict
                .violations
                .push(format!("{} ({what}) was archived and is not there: acknowledged {}", it.entity, it.at));
        }
    }
    let listed = |kind: &str| -> BTreeSet<String> {
        let losses = report["losses"].as_array().into_iter().flatten().filter(|loss| loss["kind"] == kind);
        losses.filter_map(|loss| loss["subject"].as_str().map(str::to_owned)).collect()
    };
    let (tenants, gone, money) =
        (listed("tenant_without_allocation"), listed("allocation_without_tenant"), listed("money_without_posting"));
    let state = |id: &Uuid| restored.states.get(id).map(String::as_str);
    let runs = |id: &Uuid| matches!(state(id), Some("provisioning" | "active" | "releasing" | "release_failed"));
    let mut must_list = |is_listed: bool, what: String| {
        verdict.to_be_listed += 1;
        if !is_listed {
            verdict.violations.push(format!("the report lacks a loss: {what}"));
        }
    };
    for (id, progress) in &records.rentals {
        let subject = format!("allocation/{id}");
        match progress {
            RentalProgress::Active if !runs(id) => {
                must_list(tenants.contains(&subject), format!("the tenant of {subject}"));
            }
            RentalProgress::Released if has_events && state(id) == Some("active") => {
                must_list(gone.contains(&subject), format!("{subject} has ended"));
            }
            RentalProgress::Requested | RentalProgress::Active | RentalProgress::Ending | RentalProgress::Released => {}
        }
    }
    for id in records.paid.iter().filter(|id| !matches!(state(id), Some("deposited" | "refused"))) {
        must_list(money.contains(&format!("payment/{id}")), format!("the money of payment/{id}"));
    }
    // What is listed has a cause that the clients know.
    let of_rentals: BTreeSet<String> = records.rentals.keys().map(|id| format!("allocation/{id}")).collect();
    let strangers: Vec<_> = tenants.union(&gone).filter(|subject| !of_rentals.contains(*subject)).collect();
    if strangers.len() > records.unanswered_rentals {
        verdict.violations.push(format!("the report lists rentals that no client has requested: {strangers:?}"));
    }
    let of_payments: BTreeSet<String> = records.payments.iter().map(|id| format!("payment/{id}")).collect();
    for subject in money.difference(&of_payments) {
        verdict.violations.push(format!("the report lists a payment that no client has begun: {subject}"));
    }
    for (id, progress) in &records.rentals {
        let subject = format!("allocation/{id}");
        if *progress == RentalProgress::Released && tenants.contains(&subject) {
            verdict.violations.push(format!("the report lists a tenant of {subject}, which was released"));
        }
        if runs(id) && tenants.contains(&subject) {
            verdict.violations.push(format!("the report lists {subject}, which the database has as {:?}", state(id)));
        }
    }
    verdict
}

#[cfg(test)]
mod tests {
    use super::*;
    use chrono::TimeDelta;
    use serde_json::json;

    fn id(number: u128) -> Uuid {
        Uuid::from_u128(number)
    }

    fn at(seconds: i64) -> DateTime<Utc> {
        DateTime::UNIX_EPOCH + TimeDelta::seconds(seconds)
    }

    /// One rental that is active since second 3 and was lost; one payment that was deposited at second 2 and was not.
    fn records() -> LoadRecords {
        let acknowledged = [(1, None, 2), (1, Some("active"), 3), (5, None, 1), (5, Some("deposited"), 2)]
            .map(|(entity, state, seconds)| Acknowledgement { entity: id(entity), state, at: at(seconds) });
        LoadRecords {
            acknowledged: acknowledged.to_vec(),
            rentals: BTreeMap::from([(id(1), RentalProgress::Active)]),
            payments: BTreeSet::from([id(5)]),
            paid: BTreeSet::from([id(5)]),
            ..LoadRecords::default()
        }
    }

    fn restored() -> RestoredDatabase {
        RestoredDatabase {
            history: BTreeSet::from([(id(5), "deposited".to_owned())]),
            states: BTreeMap::from([(id(5), "deposited".to_owned())]),
        }
    }

    fn report(losses: &[(&str, &str, u128)]) -> Value {
        let losses: Vec<_> = losses
            .iter()
            .map(|(kind, subject, number)| json!({ "kind": kind, "subject": format!("{subject}/{}", id(*number)) }))
            .collect();
        json!({ "losses": losses })
    }

    const TENANT: (&str, &str, u128) = ("tenant_without_allocation", "allocation", 1);

    #[test]
    fn losses_after_the_archive_that_are_listed_are_no_violation() {
        let verdict = judge(&records(), &restored(), at(1), &report(&[TENANT]), false);
        assert_eq!(verdict, LossVerdict { lost: 2, lost_since: Some(at(2)), to_be_listed: 1, violations: Vec::new() });
    }

    #[test]
    fn archived_transition_that_is_not_there_is_a_violation() {
        let verdict = judge(&records(), &restored(), at(2), &report(&[TENANT]), false);
        assert!(verdict.violations.len() == 1 && verdict.violations[0].contains("was archived"), "{verdict:?}");
    }

    #[test]
    fn loss_that_the_report_lacks_is_a_violation() {
        let verdict = judge(&records(), &restored(), at(1), &report(&[]), false);
        assert!(verdict.violations.len() == 1 && verdict.violations[0].contains("lacks a loss"), "{verdict:?}");
        let mut without_payment = restored();
        without_payment.states.clear();
        let verdict = judge(&records(), &without_payment, at(0), &report(&[TENANT]), false);
        assert!(verdict.violations.iter().any(|it| it.contains("the money of payment/")), "{verdict:?}");
        // An end is known from the streams alone.
        let mut ended = records();
        ended.rentals.insert(id(1), RentalProgress::Released);
        let mut active = restored();
        active.states.insert(id(1), "active".to_owned());
        for (has_events, violations) in [(false, 0), (true, 1)] {
            assert_eq!(judge(&ended, &active, at(0), &report(&[]), has_events).violations.len(), violations);
        }
    }

    #[test]
    fn loss_without_a_cause_is_a_violation() {
        for stranger in [
            ("tenant_without_allocation", "allocation", 2),
            ("allocation_without_tenant", "allocation", 2),
            ("money_without_posting", "payment", 6),
        ] {
            let verdict = judge(&records(), &restored(), at(1), &report(&[TENANT, stranger]), false);
            assert_eq!(verdict.violations.len(), 1, "{stranger:?}: {verdict:?}");
        }
        // Of a request without an answer no client knows the id.
        let mut unanswered = records();
        unanswered.unanswered_rentals = 1;
        let stranger = ("tenant_without_allocation", "allocation", 2);
        let verdict = judge(&unanswered, &restored(), at(1), &report(&[TENANT, stranger]), false);
        assert_eq!(verdict.violations, Vec::<String>::new());
        let mut running = restored();
        running.states.insert(id(1), "active".to_owned());
        let verdict = judge(&records(), &running, at(1), &report(&[TENANT]), false);
        assert!(verdict.violations.iter().any(|it| it.contains("which the database has as")), "{verdict:?}");
    }
}
