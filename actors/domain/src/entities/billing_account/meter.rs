//! The meter of one allocation: its cost so far.

use crate::id::UserId;
use crate::money::{HourlyRate, MicroAmount};
use crate::state_machine::Timestamp;
use serde::{Deserialize, Serialize};

/// An account is written whole at the end of each window, and most of it is meters: fields with default values are left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageMeter {
    /// The user who rents it, where that is not the account's holder: an organization's account has many.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_id: Option<UserId>,
    /// The rate at its start: later prices apply to other allocations.
    pub rate: HourlyRate,
    /// The hold for a first window, until the allocation is active.
    #[serde(default, skip_serializing_if = "MicroAmount::is_zero")]
    pub held: MicroAmount,
    /// `None` until the allocation is active.
    pub run: Option<MeterRun>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MeterRun {
    pub from: Timestamp,
    /// Everything until this time is posted.
    pub billed_until: Timestamp,
    /// Charged to the account.
    pub charged: MicroAmount,
    /// Written off.
    #[serde(default, skip_serializing_if = "MicroAmount::is_zero")]
    pub written_off: MicroAmount,
    /// From this time on its cost is written off: the account was depleted and its grace period had ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cut_at: Option<Timestamp>,
}

impl UsageMeter {
    /// The amount that covers it: its hold; or its cost by `until` that is not posted yet; or, where its cut-off is set, its cost by then.
    pub(super) fn reserved(&self, until: Timestamp) -> MicroAmount {
        self.run.as_ref().map_or(self.held, |run| run.due(self.rate, run.cut_at.unwrap_or(until)))
    }

    /// True where it runs, has a price, and no cut-off is set.
    pub(super) fn accrues(&self) -> bool {
        self.rate.minor_per_hour() > 0 && self.run.is_some_and(|run| run.cut_at.is_none())
    }
}

impl MeterRun {
    pub(super) const fn begins(from: Timestamp) -> Self {
        Self { from, billed_until: from, charged: MicroAmount::ZERO, written_off: MicroAmount::ZERO, cut_at: None }
    }

    /// What the account owes for it until `until` and was not charged.
    pub(super) fn due(&self, rate: HourlyRate, until: Timestamp) -> MicroAmount {
        rate.over(self.from, self.written_off_from(until)).minus(self.charged).max(MicroAmount::ZERO)
    }

    /// From when on its cost is written off; `until` where it is not.
    pub(super) fn written_off_from(&self, until: Timestamp) -> Timestamp {
        self.cut_at.map_or(until, |cut_at| until.min(cut_at))
    }

    /// What is to be written off until `until`, beside what was.
    pub(super) fn lost(&self, rate: HourlyRate, until: Timestamp) -> MicroAmount {
        rate.over(self.from, until)
            .minus(rate.over(self.from, self.written_off_from(until)))
            .minus(self.written_off)
            .max(MicroAmount::ZERO)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, from_value, json, to_value};

    fn read(snapshot: &Value) -> UsageMeter {
        from_value(snapshot.clone()).expect("a meter")
    }

    #[test]
    fn default_fields_are_omitted_from_a_meter_snapshot() {
        let short = json!({ "rate": 498, "run": { "from": "2026-01-01T00:00:00Z", "billed_until": "2026-01-01T01:00:00Z", "charged": 498 } });
        assert_eq!(to_value(read(&short)).expect("a snapshot"), short);

        let mut whole = short.clone();
        whole["user_id"] = json!("ann");
        whole["held"] = json!(1);
        whole["run"]["written_off"] = json!(2);
        whole["run"]["cut_at"] = json!("2026-01-01T02:00:00Z");
        assert_eq!(to_value(read(&whole)).expect("a snapshot"), whole);

        let of_before = json!({ "user_id": "ann", "rate": 498, "held": 7, "run": null });
        assert_eq!(
            read(&of_before),
            UsageMeter { user_id: Some("ann".into()), ..read(&json!({ "rate": 498, "held": 7 })) }
        );
    }
}
