//! A statement as CSV (RFC 4180): the opening balance, every posting, their sum, and the closing balance.

use axum::body::Bytes;
use csv::{Terminator, Writer, WriterBuilder};
use domain::Timestamp;
use domain::id::BillingAccountId;
use domain::money::MicroAmount;
use futures::stream::{self, Stream};
use persistence::Reads;
use persistence::queries::{LedgerPosition, LedgerRow};
use std::borrow::Cow;
use std::io;

use super::amount::exact;
use super::{Line, Statement};

pub(crate) const MEDIA_TYPE: &str = "text/csv; charset=utf-8; header=present";

/// The file begins with it: without it spreadsheets read the text in the encoding of their system, and umlauts wrongly.
const BYTE_ORDER_MARK: char = '\u{feff}';

/// Postings in memory at once.
const BATCH_ROWS: u32 = 1000;

/// `line` is `opening`, `posting`, `total` or `closing`. The columns in millionths of a minor unit repeat those before them.
const COLUMNS: [&str; 17] = [
    "line",
    "number",
    "at",
    "kind",
    "allocation_id",
    "used_from",
    "used_until",
    "payment_id",
    "postings",
    "currency",
    "change",
    "amount",
    "balance",
    "change_micro",
    "amount_micro",
    "balance_micro",
    "reason",
];

/// A streamed file: a batch of postings at a time, as fast as the client reads.
pub(crate) struct Rows {
    reads: Reads,
    statement: Statement,
    next: CsvPosition,
}

enum CsvPosition {
    Opening,
    /// The postings after this one.
    After(LedgerPosition),
    Closing,
    Nothing,
}

/// Why a file was cut off: the client sees a broken connection, and not a file that seems complete.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CsvError {
    #[error("the next part of the ledger cannot be read")]
    Read(#[from] persistence::StoreError),
    #[error("a line cannot be written")]
    Write(#[from] csv::Error),
    #[error("the written lines cannot be read back")]
    Flush(#[from] io::Error),
    #[error("the postings do not lead to the balance that the statement closes with")]
    DoesNotAddUp,
}

/// One line of the file.
#[derive(Default)]
struct Cells<'a> {
    line: &'static str,
    number: Option<i64>,
    at: Option<Timestamp>,
    kind: &'a str,
    allocation: Option<uuid::Uuid>,
    used_from: Option<Timestamp>,
    used_until: Option<Timestamp>,
    payment: Option<uuid::Uuid>,
    postings: Option<u64>,
    change: Option<MicroAmount>,
    amount: Option<MicroAmount>,
    balance: Option<MicroAmount>,
    reason: &'a str,
}

impl Rows {
    pub(crate) const fn of(reads: Reads, statement: Statement) -> Self {
        Self { reads, statement, next: CsvPosition::Opening }
    }

    pub(crate) fn stream(self) -> impl Stream<Item = Result<Bytes, CsvError>> {
        stream::try_unfold(self, |mut rows| async move {
            let part = rows.part().await.inspect_err(|error| {
                tracing::warn!(%error, account = %rows.statement.account, "a statement cannot be written to its end");
            })?;
            Ok(part.map(|bytes| (bytes, rows)))
        })
    }

    async fn part(&mut self) -> Result<Option<Bytes>, CsvError> {
        let mut file = File::of(&self.statement);
        match self.next {
            CsvPosition::Opening => {
                let (first, others) = COLUMNS.split_first().unwrap_or((&"", &[]));
                let first = format!("{BYTE_ORDER_MARK}{first}");
                file.writer.write_record([first.as_str()].into_iter().chain(others.iter().copied()))?;
                let (place, at) = (self.statement.opening, self.statement.month.begins());
                file.line(&Cells { line: "opening", at: Some(at), balance: Some(place.balance), ..Cells::default() })?;
                self.next = CsvPosition::After(place);
            }
            CsvPosition::After(place) => {
                let (account, until) = (BillingAccountId(self.statement.account), self.statement.closing.number);
                let found = self.reads.ledger_stretch(account, place.number, until, BATCH_ROWS).await?;
                found.iter().try_for_each(|row| file.posting(row))?;
                self.next = match found.last() {
                    Some(last) => CsvPosition::After(LedgerPosition { number: last.number, balance: last.balance }),
                    None if place == self.statement.closing => CsvPosition::Closing,
                    None => return Err(CsvError::DoesNotAddUp),
                };
            }
            CsvPosition::Closing => {
                self.statement.lines.iter().try_for_each(|line| file.total(line))?;
                let at = self.statement.as_of.min(self.statement.month.ends());
                let balance = Some(self.statement.closing.balance);
                let postings = u64::try_from(self.statement.postings()).ok();
                file.line(&Cells { line: "closing", at: Some(at), postings, balance, ..Cells::default() })?;
                self.next = CsvPosition::Nothing;
            }
            CsvPosition::Nothing => return Ok(None),
        }
        Ok(Some(file.bytes()?))
    }
}

struct File<'a> {
    statement: &'a Statement,
    writer: Writer<Vec<u8>>,
}

impl<'a> File<'a> {
    fn of(statement: &'a Statement) -> Self {
        let writer = WriterBuilder::new().terminator(Terminator::CRLF).from_writer(Vec::new());
        Self { statement, writer }
    }

    fn posting(&mut self, row: &LedgerRow) -> Result<(), csv::Error> {
        self.line(&Cells {
            line: "posting",
            number: Some(row.number),
            at: Some(row.at),
            kind: &row.kind,
            allocation: row.allocation.map(|id| id.0),
            used_from: row.used_from,
            used_until: row.used_until,
            payment: row.payment.map(|id| id.0),
            postings: Some(1),
            change: Some(row.effect),
            amount: Some(row.amount),
            balance: Some(row.balance),
            reason: row.reason.as_deref().unwrap_or_default(),
        })
    }

    fn total(&mut self, Line { sum, .. }: &Line) -> Result<(), csv::Error> {
        self.line(&Cells {
            line: "total",
            kind: &sum.kind,
            allocation: sum.allocation.map(|id| id.0),
            used_from: sum.used_from,
            used_until: sum.used_until,
            postings: Some(sum.postings),
            change: Some(sum.effect),
            amount: Some(sum.amount),
            ..Cells::default()
        })
    }

    fn line(&mut self, cells: &Cells<'_>) -> Result<(), csv::Error> {
        let currency = &self.statement.currency;
        let time = |at: Option<Timestamp>| {
            at.map_or_else(String::new, |at| at.to_rfc3339_opts(chrono::SecondsFormat::AutoSi, true))
        };
        let whole = |amount: Option<MicroAmount>| amount.map_or_else(String::new, |amount| exact(amount, currency));
        let micro = |amount: Option<MicroAmount>| amount.map_or_else(String::new, |amount| amount.get().to_string());
        let id = |id: Option<uuid::Uuid>| id.map_or_else(String::new, |id| id.to_string());
        let count = |number: Option<u64>| number.map_or_else(String::new, |number| number.to_string());
        self.writer.write_record([
            cells.line,
            &cells.number.map_or_else(String::new, |number| number.to_string()),
            &time(cells.at),
            &text(cells.kind),
            &id(cells.allocation),
            &time(cells.used_from),
            &time(cells.used_until),
            &id(cells.payment),
            &count(cells.postings),
            currency.as_str(),
            &whole(cells.change),
            &whole(cells.amount),
            &whole(cells.balance),
            &micro(cells.change),
            &micro(cells.amount),
            &micro(cells.balance),
            &text(cells.reason),
        ])
    }

    fn bytes(self) -> Result<Bytes, CsvError> {
        self.writer.into_inner().map(Bytes::from).map_err(|error| CsvError::Flush(error.into_error()))
    }
}

/// A text from a user. A spreadsheet evaluates a text with such a beginning as a formula; an apostrophe before it prevents that (OWASP, CSV
/// injection).
fn text(written: &str) -> Cow<'_, str> {
    let begins = |c: char| matches!(c, '=' | '+' | '-' | '@' | '\t' | '\r' | '\n' | '＝' | '＋' | '－' | '＠');
    match written.trim_start_matches(' ').starts_with(begins) {
        true => Cow::Owned(format!("'{written}")),
        false => Cow::Borrowed(written),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formula_like_text_is_escaped_and_other_text_unchanged() {
        for formula in ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", " =1", "＝1", "=cmd|'/c calc'!A1"] {
            assert_eq!(text(formula), format!("'{formula}"));
        }
        for plain in ["", "a gift", "2 = 1 + 1", "'=1", "für Ä. Ö.", "a,b\"c"] {
            assert_eq!(text(plain), plain);
        }
    }
}
