//! An account's month, to be read, filed and added up (decision 0025): as JSON where the API answers, as CSV with every posting, as PDF.
//!
//! A statement covers a period of the account's ledger without a gap. It opens with the closing balance of the one before, and the sum of
//! its lines is the difference to its closing balance, to the millionth of a minor unit.

mod amount;
mod csv;
mod font;
mod month;
mod pdf;

pub(crate) use self::csv::{MEDIA_TYPE as CSV, Rows};
pub(crate) use month::Month;
pub(crate) use pdf::{MEDIA_TYPE as PDF, printed};

use domain::Timestamp;
use domain::billing_account::Holder;
use domain::money::{Currency, MicroAmount};
use persistence::queries::{LedgerPosition, LedgerSum};
use uuid::Uuid;

/// One month of one account.
#[derive(Clone, Debug)]
pub(crate) struct Statement {
    pub(crate) account: Uuid,
    pub(crate) holder: Holder,
    pub(crate) currency: Currency,
    pub(crate) month: Month,
    pub(crate) opening: LedgerPosition,
    pub(crate) closing: LedgerPosition,
    /// The postings by allocation and kind.
    pub(crate) lines: Vec<Line>,
    pub(crate) as_of: Timestamp,
}

/// The sum of the postings of one kind for one allocation.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    pub(crate) sum: LedgerSum,
    /// The SKU and GPUs of the allocation; `None` where there is no allocation, or where many are summed up.
    pub(crate) rented: Option<AllocationUsage>,
}

#[derive(Clone, Debug)]
pub(crate) struct AllocationUsage {
    pub(crate) sku: String,
    pub(crate) gpu_count: u32,
    pub(crate) user_id: String,
}

impl Statement {
    /// Whether the month is over, so that nothing is added to it any more.
    pub(crate) fn is_final(&self) -> bool {
        self.as_of >= self.month.ends()
    }

    pub(crate) const fn postings(&self) -> i64 {
        self.closing.number - self.opening.number
    }

    /// Whether its lines lead from where it opens to where it closes.
    pub(crate) fn adds_up(&self) -> bool {
        let (effect, postings) = self.lines.iter().fold((MicroAmount::ZERO, 0_u64), |(effect, postings), line| {
            (effect.plus(line.sum.effect), postings + line.sum.postings)
        });
        self.opening.balance.plus(effect) == self.closing.balance && Ok(postings) == u64::try_from(self.postings())
    }

    /// The name of its file: `statement-2026-11-<account>.pdf`.
    pub(crate) fn file_name(&self, extension: &str) -> String {
        format!("statement-{}-{}.{extension}", self.month, self.account)
    }
}

#[cfg(test)]
mod tests;
