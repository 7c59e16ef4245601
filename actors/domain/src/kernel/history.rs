//! The history of an entity, and the invariants that are judged by it.

/// An invariant of the service (design 2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, strum::IntoStaticStr)]
#[strum(const_into_str)]
pub enum Invariant {
    /// An acknowledged transition is never lost, an unacknowledged one applied at most once.
    I1,
    /// A GPU is held by at most one allocation, and a node is schedulable only with the clean-up proof of its last tenant.
    I2,
    /// The balance is the sum of the entries, and what can accrue is covered.
    I3,
    /// A token is consumed at most once.
    I4,
    /// A task's effect happens at most once for each attempt.
    I5,
    /// What is removed or revoked gets nothing.
    I6,
    /// What people do is audited in the transaction that does it.
    I7,
    /// A transient state has a deadline with a reason that an operator can read.
    I8,
}

impl Invariant {
    /// As the metrics name it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.into_str()
    }

    /// Those of them that do not hold.
    #[must_use]
    pub fn violated<const N: usize>(judged: [(Self, bool); N]) -> Vec<Self> {
        judged.into_iter().filter(|(_, holds)| !holds).map(|(invariant, _)| invariant).collect()
    }
}

/// A transition, as the history has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistoryEntry {
    pub version: i64,
    pub command: String,
    /// As the audit log names an actor.
    pub actor: String,
    pub to_state: String,
    /// It only records that the command was refused.
    pub refused: bool,
    /// Whether the commit wrote an audit row; `None` where that was not checked.
    pub audited: Option<bool>,
}
