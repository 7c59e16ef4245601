//! What entities add to the sums that operators see: GPUs by SKU and region, and balances by currency. Each commit writes by how much they
//! change, so that no reader adds up the entities themselves (deploy/decisions/0104).

use crate::id::{EntityKind, SkuId};
use std::collections::BTreeMap;
use std::fmt;

/// The entities that are added up together.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SumGroup {
    /// Nodes that are neither removed nor being removed.
    Gpus {
        sku_id: SkuId,
        /// The SKU's name.
        sku: String,
        region_code: String,
        /// How many GPUs new allocations can get on each of these nodes.
        gpus_free: u32,
    },
    /// Billing accounts.
    Money {
        currency: String,
        /// The accounts' state.
        state: String,
    },
}

impl SumGroup {
    /// The kind of its entities.
    #[must_use]
    pub const fn kind(&self) -> EntityKind {
        match self {
            Self::Gpus { .. } => EntityKind::Node,
            Self::Money { .. } => EntityKind::BillingAccount,
        }
    }
}

impl fmt::Display for SumGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gpus { sku_id: _, sku, region_code, gpus_free } => {
                write!(f, "GPUs of {sku} in {region_code}, nodes with {gpus_free} free")
            }
            Self::Money { currency, state } => write!(f, "balances in {currency}, accounts in state {state}"),
        }
    }
}

/// The amounts of a group, or by how much they change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amounts {
    pub entities: i64,
    /// The GPUs of nodes, as they are registered.
    pub gpus_total: i64,
    /// GPUs of tenants that are set up.
    pub gpus_sold: i64,
    /// GPUs of the other tenants: they are being set up or cleaned up, or their clean-up is not proved.
    pub gpus_held: i64,
    /// The balances of accounts, in millionths of a minor unit.
    pub balance: i64,
}

impl Amounts {
    /// Adds amounts. At the bound of the type it stays there, which the auditor then finds.
    pub const fn add(&mut self, other: Self) {
        self.entities = self.entities.saturating_add(other.entities);
        self.gpus_total = self.gpus_total.saturating_add(other.gpus_total);
        self.gpus_sold = self.gpus_sold.saturating_add(other.gpus_sold);
        self.gpus_held = self.gpus_held.saturating_add(other.gpus_held);
        self.balance = self.balance.saturating_add(other.balance);
    }

    #[must_use]
    pub const fn negated(self) -> Self {
        Self {
            entities: self.entities.saturating_neg(),
            gpus_total: self.gpus_total.saturating_neg(),
            gpus_sold: self.gpus_sold.saturating_neg(),
            gpus_held: self.gpus_held.saturating_neg(),
            balance: self.balance.saturating_neg(),
        }
    }
}

impl fmt::Display for Amounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { entities, gpus_total, gpus_sold, gpus_held, balance } = self;
        write!(f, "entities {entities}, GPUs {gpus_total}, sold {gpus_sold}, held {gpus_held}, balance {balance}")
    }
}

/// What one entity adds to its group, or what a transition changes of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summand {
    pub group: SumGroup,
    pub amounts: Amounts,
}

/// The amounts of each group.
pub type Sums = BTreeMap<SumGroup, Amounts>;

/// What a transition changes of the sums: one row for a group, and two where the entity moves to another one. None where nothing changes.
#[must_use]
pub fn differences(before: Option<Summand>, next: Option<Summand>) -> Vec<Summand> {
    let mut changed = Sums::new();
    let before = before.map(|it| Summand { amounts: it.amounts.negated(), ..it });
    for Summand { group, amounts } in before.into_iter().chain(next) {
        changed.entry(group).or_default().add(amounts);
    }
    let changed = changed.into_iter().filter(|(_, amounts)| *amounts != Amounts::default());
    changed.map(|(group, amounts)| Summand { group, amounts }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn account(state: &str, balance: i64) -> Summand {
        let group = SumGroup::Money { currency: "EUR".to_owned(), state: state.to_owned() };
        Summand { group, amounts: Amounts { entities: 1, balance, ..Amounts::default() } }
    }

    #[test]
    fn transition_within_a_group_is_one_difference_and_to_another_one_two() {
        assert_eq!(differences(None, Some(account("open", 7))), [account("open", 7)]);
        assert_eq!(differences(Some(account("open", 7)), Some(account("open", 7))), []);
        let less = Amounts { balance: -3, ..Amounts::default() };
        let within = differences(Some(account("open", 7)), Some(account("open", 4)));
        assert_eq!(within, [Summand { amounts: less, ..account("open", 0) }]);
        let left = Summand { amounts: account("open", 7).amounts.negated(), ..account("open", 7) };
        assert_eq!(
            differences(Some(account("open", 7)), Some(account("grace", 4))),
            [account("grace", 4), left.clone()]
        );
        assert_eq!(differences(Some(account("open", 7)), None), [left]);
    }

    proptest! {
        /// Whatever an entity goes through, its differences add up to what it is.
        #[test]
        fn differences_of_a_life_add_up_to_its_end(life in prop::collection::vec(prop::option::of((0..3_usize, -9..9_i64)), 1..12)) {
            let summand = |it: Option<(usize, i64)>| it.map(|(state, balance)| account(["open", "grace", "depleted"][state], balance));
            let mut sums = Sums::new();
            let mut before = None;
            for step in life {
                let next = summand(step);
                for change in differences(before.clone(), next.clone()) {
                    prop_assert_ne!(change.amounts, Amounts::default());
                    sums.entry(change.group).or_default().add(change.amounts);
                }
                before = next;
            }
            sums.retain(|_, amounts| *amounts != Amounts::default());
            let expected: Sums = before.into_iter().map(|it| (it.group, it.amounts)).collect();
            prop_assert_eq!(sums, expected);
        }
    }
}
