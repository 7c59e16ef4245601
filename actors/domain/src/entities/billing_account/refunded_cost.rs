//! What operators have refunded of an allocation's cost.

use crate::id::RefundId;
use crate::money::MicroAmount;
use crate::state_machine::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The refunds of an allocation's cost.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefundedCost {
    /// The amount of each refund.
    pub refunds: BTreeMap<RefundId, MicroAmount>,
    /// The last refund, or the allocation's end.
    pub at: Timestamp,
}

impl RefundedCost {
    #[must_use]
    pub fn amount(&self) -> MicroAmount {
        self.refunds.values().copied().sum()
    }
}
