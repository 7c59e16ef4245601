//! Billing: balance, ledger, estimates, and monthly statements as files. Payments and refunds are in [`payments`].

pub(crate) mod accounts;
mod payments;

use crate::amount;
use crate::api::{Api, Query};
use crate::completion;
use crate::failure::Failure;
use crate::output::Column;
use crate::resource_ref::{self, ACCOUNT, ALLOCATION, PAYMENT, Ref};
use crate::{download, duration, instant, skus};
use chrono::{DateTime, Utc};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::Duration;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Shows the balance, how fast it is spent and how long it lasts.
    Balance {
        #[command(flatten)]
        of: AccountSelector,
    },
    /// Lists the postings of the account, newest first.
    Ledger(Ledger),
    /// Shows what a rental would cost, and whether your balance covers it.
    Estimate {
        /// The kind of machine: `gpuctl skus list` shows them.
        #[arg(long, add = completion::sku_names())]
        sku: String,
        /// How many GPUs, all on one node.
        #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
        gpus: u16,
        /// How long it would run (`90m`, `8h`).
        #[arg(long = "for", value_name = "TIME", value_parser = duration::parse)]
        time: Option<Duration>,
    },
    /// Lists the months of which there are statements, latest first.
    Statements {
        #[command(flatten)]
        of: AccountSelector,
        /// Show at most this many.
        #[arg(long, value_name = "N", default_value_t = 12, value_parser = clap::value_parser!(u16).range(1..=10000))]
        limit: u16,
    },
    /// Shows the statement of a month, or saves it as a file (--as).
    Statement(Statement),
    /// Pays money in: opens the page of the payment.
    TopUp(payments::TopUp),
    /// Lists the payments, oldest first.
    Payments(payments::Payments),
    /// Shows one payment, with its refunds.
    Payment {
        #[arg(add = completion::of(&PAYMENT))]
        payment: Ref,
    },
    /// Opens the page of a payment that was begun and is not paid.
    Pay(payments::Pay),
    /// Cancels a payment that is not paid.
    CancelPayment {
        #[arg(add = completion::of(&PAYMENT))]
        payment: Ref,
    },
    /// Billing operators: ends the review of a payment whose worth you have credited or paid back.
    SettleReview(payments::ReviewDecision),
    /// Billing operators: ends the review of a payment of which nothing is credited.
    DismissReview(payments::ReviewDecision),
    /// Refunds a payment, or credits what an allocation has cost.
    Refund(payments::Refund),
    /// Administrators: lists all accounts, oldest first.
    Accounts(accounts::Accounts),
    /// Billing operators: opens an account.
    OpenAccount(accounts::Open),
    /// Billing operators: credits or debits an account by hand.
    Adjust(accounts::Adjust),
}

/// Whose.
#[derive(Debug, clap::Args)]
pub(crate) struct AccountSelector {
    /// Administrators: this account; your own, or your organisation's, where it is left out.
    #[arg(long, value_name = "ID|USER", add = completion::of(&ACCOUNT))]
    account: Option<Ref>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Ledger {
    #[command(flatten)]
    of: AccountSelector,
    /// List postings of this kind, such as usage or credit.
    #[arg(long)]
    kind: Option<String>,
    /// List postings for this allocation.
    #[arg(long, value_name = "ID", add = completion::of(&ALLOCATION))]
    allocation: Option<Ref>,
    /// List what was posted at this instant (2026-11-22T12:00:00Z) or later.
    #[arg(long, value_name = "INSTANT", value_parser = instant::parse)]
    from: Option<DateTime<Utc>>,
    /// List what was posted before this instant.
    #[arg(long, value_name = "INSTANT", value_parser = instant::parse)]
    until: Option<DateTime<Utc>>,
    /// Show at most this many.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=10000))]
    limit: u16,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Statement {
    /// The month, in UTC: 2026-11.
    #[arg(value_parser = month)]
    month: String,
    #[command(flatten)]
    of: AccountSelector,
    /// Save it as a file of this form: csv has every posting, pdf is for people.
    #[arg(long = "as", value_enum, value_name = "FORM")]
    form: Option<Form>,
    /// The file, which must not be there; `-` is standard output. statement-MONTH.csv or .pdf where it is left out.
    #[arg(long, value_name = "FILE", requires = "form")]
    to: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
enum Form {
    Csv,
    Pdf,
}

impl Form {
    const fn name(self) -> &'static str {
        self.into_str()
    }

    const fn media_type(self) -> &'static str {
        match self {
            Self::Csv => "text/csv",
            Self::Pdf => "application/pdf",
        }
    }
}

const BALANCE: [Column; 17] = [
    ("account", "/id"),
    ("user", "/user_id"),
    ("organisation", "/org_id"),
    ("state", "/state"),
    ("currency", "/currency"),
    ("balance", "/balance"),
    ("accrued since", "/accrued"),
    ("set aside", "/held"),
    ("next window", "/next_window"),
    ("available", "/available"),
    ("low", "/is_low"),
    ("spent an hour", "/burn_per_hour"),
    ("running", "/running"),
    ("lasts until", "/lasts_until"),
    ("released at", "/release_at"),
    ("opened", "/opened_at"),
    ("as of", "/as_of"),
];

const METERS: [Column; 7] = [
    ("ALLOCATION", "/allocation_id"),
    ("USER", "/user_id"),
    ("AN HOUR", "/per_hour"),
    ("SET ASIDE", "/held"),
    ("CHARGED", "/charged"),
    ("FROM", "/from"),
    ("BILLED UNTIL", "/billed_until"),
];

const POSTINGS: [Column; 8] = [
    ("NUMBER", "/number"),
    ("AT", "/at"),
    ("KIND", "/kind"),
    ("CHANGE", "/change"),
    ("BALANCE", "/balance"),
    ("ALLOCATION", "/allocation_id"),
    ("PAYMENT", "/payment_id"),
    ("WHY", "/reason"),
];

const ESTIMATE: [Column; 8] = [
    ("a GPU an hour", "/amount_per_gpu_hour"),
    ("all an hour", "/per_hour"),
    ("together", "/cost"),
    ("needed to begin", "/needed"),
    ("available", "/available"),
    ("balance covers the start", "/is_covered"),
    ("covered to the end", "/whole_time"),
    ("lasts", "/lasts"),
];

const MONTHS: [Column; 5] = [
    ("MONTH", "/month"),
    ("FINAL", "/is_final"),
    ("OPENING", "/opening"),
    ("CLOSING", "/closing"),
    ("POSTINGS", "/postings"),
];

const MONTH: [Column; 7] = [
    ("account", "/account_id"),
    ("month", "/month"),
    ("final", "/is_final"),
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

impl AccountSelector {
    async fn path(&self, own: &str, api: &Api) -> Result<String, Failure> {
        Ok(match &self.account {
            Some(account) => format!("{}/{}/{own}", ACCOUNT.path, resource_ref::account(account, api).await?),
            None => format!("/api/v1/billing/{own}"),
        })
    }
}

/// The balance of the caller's own account.
pub(crate) const OWN_BALANCE: &str = "/api/v1/billing/balance";

pub(crate) async fn run(command: Command, api: &Api) -> Result<(), Failure> {
    match command {
        Command::Balance { of: AccountSelector { account: None } } => {
            api.out.show(&api.get(OWN_BALANCE, &[]).await?, &BALANCE)
        }
        Command::Balance { of: AccountSelector { account: Some(account) } } => accounts::metered(&account, api).await,
        Command::Ledger(which) => ledger(which, api).await,
        Command::Estimate { sku, gpus, time } => estimate(sku, gpus, time, api).await,
        Command::Statements { of, limit } => {
            let page = api.list(&of.path("statements", api).await?, &[], limit.into()).await?;
            api.out.list(&page, &MONTHS)
        }
        Command::Statement(Statement { month, of, form: None, .. }) => show_statement(&month, &of, api).await,
        Command::Statement(Statement { month, of, form: Some(form), to }) => {
            let path = of.path(&format!("statements/{month}/{}", form.name()), api).await?;
            let to = to.unwrap_or_else(|| PathBuf::from(format!("statement-{month}.{}", form.name())));
            download::save(api, &path, form.media_type(), "the statement", &to).await
        }
        Command::TopUp(wanted) => payments::top_up(wanted, api).await,
        Command::Payments(which) => payments::list(which, api).await,
        Command::Payment { payment } => payments::show(&payment, api).await,
        Command::Pay(wanted) => payments::pay(wanted, api).await,
        Command::CancelPayment { payment } => payments::cancel(&payment, api).await,
        Command::SettleReview(wanted) => payments::decide_review(&wanted, "settle-review", api).await,
        Command::DismissReview(wanted) => payments::decide_review(&wanted, "dismiss-review", api).await,
        Command::Refund(wanted) => payments::refund(wanted, api).await,
        Command::Accounts(which) => accounts::list(which, api).await,
        Command::OpenAccount(wanted) => accounts::open(wanted, api).await,
        Command::Adjust(wanted) => accounts::adjust(wanted, api).await,
    }
}

/// For people the output also says how long the balance lasts, including what runs already. Scripts get the service's response.
async fn estimate(sku: String, gpus: u16, time: Option<Duration>, api: &Api) -> Result<(), Failure> {
    skus::expect_fits_one_node(&sku, gpus, api).await?;
    let mut query: Query<'_> = vec![("sku", sku), ("gpu_count", gpus.to_string())];
    query.extend(time.map(|time| ("seconds", time.as_secs().to_string())));
    let mut found = api.get("/api/v1/billing/estimate", &query).await?;
    if api.out.is_json() {
        return api.out.json(&found);
    }
    if let Some(time) = time {
        let balance = api.get(OWN_BALANCE, &[]).await?;
        found["whole_time"] = coverage(&found, &balance, time).into();
    }
    let lasts = found["lasts_seconds"].as_u64().map(Duration::from_secs);
    found["lasts"] = json!(lasts.map(|time| format!("{}, alone", duration::to_text(time))));
    api.out.show(&found, &ESTIMATE)
}

/// Whether the balance covers the whole time, and how long it lasts where it does not. Running allocations are paid from it too.
fn coverage(estimate: &Value, balance: &Value, time: Duration) -> String {
    let number = |value: &Value| i128::from(value.as_i64().unwrap_or_default());
    let (seconds, burn) = (i128::from(time.as_secs()), number(&balance["burn_minor_per_hour"]));
    // Both sides are in millionths of a minor unit, times the seconds of an hour.
    let available = number(&estimate["available_micro"]) * 3600;
    let running = burn * amount::MICRO;
    let needed = number(&estimate["cost_micro"]) * 3600 + running * seconds;
    let beside = if burn > 0 { ", beside what runs now" } else { "" };
    if available >= needed {
        return format!("yes{beside}");
    }
    let each_second = running + number(&estimate["minor_per_hour"]) * amount::MICRO;
    let lasts =
        available.max(0).checked_div(each_second).and_then(|seconds| u64::try_from(seconds).ok()).unwrap_or_default();
    if lasts == 0 {
        "no".to_owned()
    } else {
        format!("no, for {}{beside}", duration::to_text(Duration::from_secs(lasts)))
    }
}

async fn ledger(which: Ledger, api: &Api) -> Result<(), Failure> {
    let allocation = match &which.allocation {
        Some(allocation) => Some(resource_ref::allocation(allocation, api).await?),
        None => None,
    };
    let given = [
        ("kind", which.kind),
        ("allocation_id", allocation.map(|id| id.to_string())),
        ("from", which.from.map(|at| at.to_rfc3339())),
        ("until", which.until.map(|at| at.to_rfc3339())),
    ];
    let query: Query<'_> = given.into_iter().filter_map(|(name, value)| Some((name, value?))).collect();
    let mut page = api.list(&which.of.path("ledger", api).await?, &query, which.limit.into()).await?;
    if api.out.is_json() {
        return api.out.json(&page);
    }
    let columns = with_write_offs(&POSTINGS, &mut page["items"]);
    api.out.list(&page, &columns)
}

/// With a column of what was written off, where any row is about that: it changes no balance.
fn with_write_offs(columns: &[Column], rows: &mut Value) -> Vec<Column> {
    let mut columns = columns.to_vec();
    let mut any = false;
    for row in rows.as_array_mut().into_iter().flatten() {
        let amount = row["amount_micro"].as_i64().unwrap_or_default();
        row["written_off_micro"] = match row["kind"].as_str() {
            Some("write_off") => amount.into(),
            Some("write_off_reversal") => amount.saturating_neg().into(),
            Some(_) | None => continue,
        };
        row["change_micro"] = Value::Null;
        any = true;
    }
    if any {
        let change = columns.iter().position(|(title, _)| *title == "CHANGE").unwrap_or(columns.len());
        columns.insert(columns.len().min(change + 1), ("WRITTEN OFF", "/written_off"));
    }
    columns
}

async fn show_statement(month: &str, of: &AccountSelector, api: &Api) -> Result<(), Failure> {
    let mut found = api.get(&of.path(&format!("statements/{month}"), api).await?, &[]).await?;
    if api.out.is_json() {
        return api.out.json(&found);
    }
    // Its lines are in its currency.
    let currency = found["currency"].clone();
    for line in found["lines"].as_array_mut().into_iter().flatten() {
        line["currency"] = currency.clone();
    }
    api.out.show(&found, &MONTH)?;
    let columns = with_write_offs(&LINES, &mut found["lines"]);
    api.out.rows_below(&found["lines"], &columns)
}

fn month(text: &str) -> Result<String, String> {
    let is_month = chrono::NaiveDate::parse_from_str(&format!("{text}-01"), "%Y-%m-%d").is_ok() && text.len() == 7;
    is_month.then(|| text.to_owned()).ok_or_else(|| "a month is written as 2026-11".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimate_says_whether_the_balance_covers_the_time_beside_running_allocations() {
        let estimate = |available: i64| json!({ "currency": "USD", "available_micro": available, "cost_micro": 800_000_000_i64, "minor_per_hour": 100, "is_covered": true });
        let time = Duration::from_secs(8 * 3600);
        let coverage_text =
            |available: i64, burn: i64| coverage(&estimate(available), &json!({ "burn_minor_per_hour": burn }), time);
        assert_eq!(coverage_text(800_000_000, 0), "yes");
        assert_eq!(coverage_text(799_999_999, 0), "no, for 7h 59m 59s");
        assert_eq!(coverage_text(800_000_000, 100), "no, for 4h, beside what runs now");
        assert_eq!(coverage_text(1_600_000_000, 100), "yes, beside what runs now");
        assert_eq!(coverage_text(-5, 0), "no");
    }

    #[test]
    fn write_offs_have_a_column_of_their_own_and_no_change_of_nothing() {
        let row = |kind: &str, change: i64, amount: i64| json!({ "kind": kind, "currency": "EUR", "change_micro": change, "amount_micro": amount });
        let mut rows = json!([
            row("usage", -4_166_666, 4_166_666),
            row("write_off", 0, 1_000_000),
            row("write_off_reversal", 0, 500_000)
        ]);
        let columns = with_write_offs(&[("KIND", "/kind"), ("CHANGE", "/change"), ("WHY", "/reason")], &mut rows);
        insta::assert_snapshot!(crate::output::table_text(rows.as_array().unwrap(), &columns), @r"
         KIND                CHANGE           WRITTEN OFF  WHY
         usage               -0.04166666 EUR  -            -
         write_off           -                0.01 EUR     -
         write_off_reversal  -                -0.005 EUR   -
        ");
        let mut usage = json!([row("usage", -1_000_000, 1_000_000)]);
        assert_eq!(with_write_offs(&POSTINGS, &mut usage), POSTINGS);
    }

    #[test]
    fn month_is_a_year_and_a_month() {
        assert_eq!(month("2026-11").as_deref(), Ok("2026-11"));
        for wrong in ["", "2026", "2026-13", "2026-1", "11-2026", "2026-11-01", "2026/11", "../../x"] {
            assert!(month(wrong).is_err(), "{wrong}");
        }
    }
}
