//! What one allocation has cost so far.

use crate::machine::Timestamp;
use crate::money::{Micro, Rate};
use serde::{Deserialize, Serialize};

/// An account is written whole at the end of each window, and most of it is meters: what says nothing is left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Meter {
    /// Who rents it, where that is not the account's holder: in an org's account there are many.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_id: Option<String>,
    /// The price that it began with: a later one is for others.
    pub rate: Rate,
    /// What a window costs, set aside until it runs.
    #[serde(default, skip_serializing_if = "Micro::is_zero")]
    pub held: Micro,
    /// `None` until the allocation is active.
    pub run: Option<Run>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    pub from: Timestamp,
    /// All until then is posted.
    pub billed_until: Timestamp,
    /// To the account.
    pub charged: Micro,
    /// To ourselves.
    #[serde(default, skip_serializing_if = "Micro::is_zero")]
    pub written_off: Micro,
    /// From then on it is ours to bear: the account was depleted and its grace over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cut_at: Option<Timestamp>,
}

impl Meter {
    /// What must be there for it: what is set aside; or what it will have cost by `until` and was not posted; or, where its end is set
    /// already, what it will have cost by then.
    pub(super) fn reserved(&self, until: Timestamp) -> Micro {
        self.run.as_ref().map_or(self.held, |run| run.due(self.rate, run.cut_at.unwrap_or(until)))
    }

    /// It runs, costs something, and no end is set for it.
    pub(super) fn accrues(&self) -> bool {
        self.rate.minor_per_hour() > 0 && self.run.is_some_and(|run| run.cut_at.is_none())
    }
}

impl Run {
    pub(super) const fn begins(from: Timestamp) -> Self {
        Self { from, billed_until: from, charged: Micro::ZERO, written_off: Micro::ZERO, cut_at: None }
    }

    /// What the account owes for it until then and was not charged.
    pub(super) fn due(&self, rate: Rate, until: Timestamp) -> Micro {
        rate.over(self.from, self.ours_from(until)).minus(self.charged).max(Micro::ZERO)
    }

    /// Where of the while until then our part begins; its end where there is none.
    pub(super) fn ours_from(&self, until: Timestamp) -> Timestamp {
        self.cut_at.map_or(until, |cut_at| until.min(cut_at))
    }

    /// What is to be written off until then, beside what was.
    pub(super) fn lost(&self, rate: Rate, until: Timestamp) -> Micro {
        rate.over(self.from, until)
            .minus(rate.over(self.from, self.ours_from(until)))
            .minus(self.written_off)
            .max(Micro::ZERO)
    }
}

#[cfg(test)]
#[allow(clippy::expect_used)]
mod tests {
    use super::*;
    use serde_json::{Value, from_value, json, to_value};

    fn read(snapshot: &Value) -> Meter {
        from_value(snapshot.clone()).expect("a meter")
    }

    #[test]
    fn what_says_nothing_is_left_out_of_a_snapshot_and_need_not_be_in_it() {
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
            Meter { user_id: Some("ann".to_owned()), ..read(&json!({ "rate": 498, "held": 7 })) }
        );
    }
}
