//! Prepaid money: what there is, what it went to, what something would cost, and a month of it in a file. How it comes and goes back is in
//! `payments.rs`.

use crate::api::{Api, Query};
use crate::failure::Failure;
use crate::out::Column;
use crate::{duration, file, payments};
use chrono::{DateTime, Utc};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::Duration;
use uuid::Uuid;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// What there is, how fast it is spent and how long it lasts.
    Balance {
        #[command(flatten)]
        of: Of,
    },
    /// What it went to and came from, newest first.
    Ledger(Ledger),
    /// What something would cost, and whether your balance covers its beginning.
    Estimate {
        /// What kind of machine: `gpuctl skus list` shows them.
        #[arg(long)]
        sku: String,
        /// How many GPUs, all on one node.
        #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
        gpus: u16,
        /// For so long (`90m`, `8h`).
        #[arg(long = "for", value_name = "TIME", value_parser = duration::parse)]
        time: Option<Duration>,
    },
    /// The months of which there are statements, latest first.
    Statements {
        #[command(flatten)]
        of: Of,
        /// At most so many.
        #[arg(long, value_name = "N", default_value_t = 12, value_parser = clap::value_parser!(u16).range(1..=10000))]
        limit: u16,
    },
    /// What a month came to; with --as as a file.
    Statement(Statement),
    /// Pays in: opens the page on which you do.
    TopUp(payments::TopUp),
    /// What was paid in, oldest first.
    Payments(payments::Payments),
    /// One payment, and what went back of it.
    Payment { payment: Uuid },
    /// Asks a payment back, or gives back of what an allocation has cost.
    Refund(payments::Refund),
    /// Administrators: all accounts, oldest first.
    Accounts {
        /// This user's.
        #[arg(long, value_name = "ID", conflicts_with = "org")]
        user: Option<String>,
        /// This organisation's.
        #[arg(long, value_name = "ID")]
        org: Option<String>,
        /// At most so many.
        #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=10000))]
        limit: u16,
    },
}

/// Whose.
#[derive(Debug, clap::Args)]
pub(crate) struct Of {
    /// Administrators: this account; your own, or your organisation's, where it is left out.
    #[arg(long, value_name = "ID")]
    account: Option<Uuid>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Ledger {
    #[command(flatten)]
    of: Of,
    /// Of this kind, such as usage or credit.
    #[arg(long)]
    kind: Option<String>,
    /// For this allocation.
    #[arg(long, value_name = "ID")]
    allocation: Option<Uuid>,
    /// Posted at this instant (2026-11-22T12:00:00Z) or later.
    #[arg(long, value_name = "INSTANT")]
    from: Option<DateTime<Utc>>,
    /// Posted before this instant.
    #[arg(long, value_name = "INSTANT")]
    until: Option<DateTime<Utc>>,
    /// At most so many.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=10000))]
    limit: u16,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Statement {
    /// The month, in UTC: 2026-11.
    #[arg(value_parser = month)]
    month: String,
    #[command(flatten)]
    of: Of,
    /// In a file: every posting for a spreadsheet, or pages to file.
    #[arg(long = "as", value_enum, value_name = "FORM")]
    form: Option<Form>,
    /// The file, which must not be there; `-` is standard output. statement-MONTH.csv or .pdf where it is left out.
    #[arg(long, value_name = "FILE", requires = "form")]
    to: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Form {
    Csv,
    Pdf,
}

impl Form {
    const fn name(self) -> &'static str {
        match self {
            Self::Csv => "csv",
            Self::Pdf => "pdf",
        }
    }

    const fn media_type(self) -> &'static str {
        match self {
            Self::Csv => "text/csv",
            Self::Pdf => "application/pdf",
        }
    }
}

// Amounts are in minor units (cents), as everywhere in the API.
const BALANCE: [Column; 16] = [
    ("account", "/id"),
    ("user", "/user_id"),
    ("organisation", "/org_id"),
    ("state", "/state"),
    ("currency", "/currency"),
    ("balance", "/balance"),
    ("accrued since", "/accrued_minor"),
    ("set aside", "/held_minor"),
    ("available", "/available_minor"),
    ("low", "/is_low"),
    ("spent an hour", "/burn_minor_per_hour"),
    ("running", "/running"),
    ("lasts until", "/lasts_until"),
    ("released at", "/release_at"),
    ("opened", "/opened_at"),
    ("as of", "/as_of"),
];

const METERS: [Column; 7] = [
    ("ALLOCATION", "/allocation_id"),
    ("USER", "/user_id"),
    ("AN HOUR", "/minor_per_hour"),
    ("SET ASIDE", "/held"),
    ("CHARGED", "/charged"),
    ("FROM", "/from"),
    ("BILLED UNTIL", "/billed_until"),
];

const POSTINGS: [Column; 9] = [
    ("NUMBER", "/number"),
    ("AT", "/at"),
    ("KIND", "/kind"),
    ("CHANGE", "/change"),
    ("BALANCE", "/balance"),
    ("CURRENCY", "/currency"),
    ("ALLOCATION", "/allocation_id"),
    ("PAYMENT", "/payment_id"),
    ("WHY", "/reason"),
];

const ESTIMATE: [Column; 8] = [
    ("currency", "/currency"),
    ("a GPU an hour", "/amount_minor_per_gpu_hour"),
    ("all an hour", "/minor_per_hour"),
    ("together", "/cost"),
    ("needed to begin", "/needed"),
    ("available", "/available"),
    ("covered", "/is_covered"),
    ("seconds it lasts", "/lasts_seconds"),
];

const MONTHS: [Column; 6] = [
    ("MONTH", "/month"),
    ("FINAL", "/is_final"),
    ("CURRENCY", "/currency"),
    ("OPENING", "/opening"),
    ("CLOSING", "/closing"),
    ("POSTINGS", "/postings"),
];

const MONTH: [Column; 8] = [
    ("account", "/account_id"),
    ("month", "/month"),
    ("final", "/is_final"),
    ("currency", "/currency"),
    ("opening", "/opening"),
    ("closing", "/closing"),
    ("postings", "/postings"),
    ("as of", "/as_of"),
];

const LINES: [Column; 7] = [
    ("KIND", "/kind"),
    ("ALLOCATION", "/allocation_id"),
    ("SKU", "/sku"),
    ("GPUS", "/gpu_count"),
    ("USER", "/user_id"),
    ("POSTINGS", "/postings"),
    ("CHANGE", "/change"),
];

const ACCOUNTS: [Column; 8] = [
    ("ID", "/id"),
    ("USER", "/user_id"),
    ("ORG", "/org_id"),
    ("STATE", "/state"),
    ("CURRENCY", "/currency"),
    ("BALANCE", "/balance"),
    ("AN HOUR", "/burn_minor_per_hour"),
    ("LASTS UNTIL", "/lasts_until"),
];

impl Of {
    fn path(&self, own: &str) -> String {
        match self.account {
            Some(id) => format!("/api/v1/admin/billing/accounts/{id}/{own}"),
            None => format!("/api/v1/billing/{own}"),
        }
    }
}

pub(crate) async fn run(command: Command, api: &Api) -> Result<(), Failure> {
    match command {
        Command::Balance { of: Of { account: None } } => {
            api.out.show(&with_amounts(api.get("/api/v1/billing/balance", &[]).await?, api), &BALANCE)
        }
        Command::Balance { of: Of { account: Some(id) } } => metered(id, api).await,
        Command::Ledger(which) => ledger(which, api).await,
        Command::Estimate { sku, gpus, time } => {
            let mut query: Query<'_> = vec![("sku", sku), ("gpu_count", gpus.to_string())];
            query.extend(time.map(|time| ("seconds", time.as_secs().to_string())));
            api.out.show(&with_amounts(api.get("/api/v1/billing/estimate", &query).await?, api), &ESTIMATE)
        }
        Command::Statements { of, limit } => {
            let page = api.list(&of.path("statements"), &[], limit.into()).await?;
            api.out.list(&with_amounts(page, api), &MONTHS)
        }
        Command::Statement(Statement { month, of, form: None, .. }) => shown(&month, &of, api).await,
        Command::Statement(Statement { month, of, form: Some(form), to }) => {
            let path = of.path(&format!("statements/{month}/{}", form.name()));
            let to = to.unwrap_or_else(|| PathBuf::from(format!("statement-{month}.{}", form.name())));
            file::keep(api, &path, form.media_type(), "the statement", &to).await
        }
        Command::TopUp(wanted) => payments::top_up(wanted, api).await,
        Command::Payments(which) => payments::list(which, api).await,
        Command::Payment { payment } => payments::show(payment, api).await,
        Command::Refund(wanted) => payments::refund(wanted, api).await,
        Command::Accounts { user, org, limit } => {
            let given = [("user_id", user), ("org_id", org)];
            let query: Query<'_> = given.into_iter().filter_map(|(name, value)| Some((name, value?))).collect();
            let page = api.list("/api/v1/admin/billing/accounts", &query, limit.into()).await?;
            api.out.list(&with_amounts(page, api), &ACCOUNTS)
        }
    }
}

/// An account as administrators see it: with what it pays for.
async fn metered(id: Uuid, api: &Api) -> Result<(), Failure> {
    let found = api.get(&format!("/api/v1/admin/billing/accounts/{id}"), &[]).await?;
    if api.out.is_json() {
        return api.out.json(&found);
    }
    let found = with_amounts(found, api);
    let mut account = found["account"].clone();
    account["opened_at"] = found["opened_at"].clone();
    api.out.show(&account, &BALANCE)?;
    api.out.rows_below(&found["meters"], &METERS)
}

async fn ledger(which: Ledger, api: &Api) -> Result<(), Failure> {
    let given = [
        ("kind", which.kind),
        ("allocation_id", which.allocation.map(|id| id.to_string())),
        ("from", which.from.map(|at| at.to_rfc3339())),
        ("until", which.until.map(|at| at.to_rfc3339())),
    ];
    let query: Query<'_> = given.into_iter().filter_map(|(name, value)| Some((name, value?))).collect();
    let page = api.list(&which.of.path("ledger"), &query, which.limit.into()).await?;
    api.out.list(&with_amounts(page, api), &POSTINGS)
}

async fn shown(month: &str, of: &Of, api: &Api) -> Result<(), Failure> {
    let found = api.get(&of.path(&format!("statements/{month}")), &[]).await?;
    if api.out.is_json() {
        return api.out.json(&found);
    }
    let found = with_amounts(found, api);
    api.out.show(&found, &MONTH)?;
    api.out.rows_below(&found["lines"], &LINES)
}

/// For people: beside every `…_micro` the same in minor units with all six digits of the rest, under the name without it. Scripts get what the
/// service answered.
fn with_amounts(mut answer: Value, api: &Api) -> Value {
    if !api.out.is_json() {
        add_amounts(&mut answer);
    }
    answer
}

fn add_amounts(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(add_amounts),
        Value::Object(fields) => {
            fields.values_mut().for_each(add_amounts);
            let amount = |(name, value): (&String, &Value)| {
                Some((name.strip_suffix("_micro")?.to_owned(), in_minor(value.as_i64()?)))
            };
            let amounts: Vec<(String, String)> = fields.iter().filter_map(amount).collect();
            fields.extend(amounts.into_iter().map(|(name, text)| (name, json!(text))));
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn in_minor(micro: i64) -> String {
    let (sign, all) = (if micro < 0 { "-" } else { "" }, micro.unsigned_abs());
    format!("{sign}{}.{:06}", all / 1_000_000, all % 1_000_000)
}

fn month(text: &str) -> Result<String, String> {
    let is_month = chrono::NaiveDate::parse_from_str(&format!("{text}-01"), "%Y-%m-%d").is_ok() && text.len() == 7;
    is_month.then(|| text.to_owned()).ok_or_else(|| "a month is written as 2026-11".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_shown_with_all_their_digits() {
        let mut answer = json!({ "items": [{ "change_micro": -16_666_667, "balance_micro": 5, "held_micro": null }], "n_micro": 1_000_000 });
        add_amounts(&mut answer);
        assert_eq!(answer["n"], "1.000000");
        let item = &answer["items"][0];
        assert_eq!(
            (&item["change"], &item["balance"], &item["held"]),
            (&json!("-16.666667"), &json!("0.000005"), &Value::Null)
        );
    }

    #[test]
    fn a_month_is_a_year_and_a_month() {
        assert_eq!(month("2026-11").as_deref(), Ok("2026-11"));
        for wrong in ["", "2026", "2026-13", "2026-1", "11-2026", "2026-11-01", "2026/11", "../../x"] {
            assert!(month(wrong).is_err(), "{wrong}");
        }
    }
}
