//! All billing accounts, for administrators and billing operators.

use super::{BALANCE, METERS};
use crate::amount::Amount;
use crate::api::{Api, Query};
use crate::completion;
use crate::failure::Failure;
use crate::output::Column;
use crate::resource_ref::{self, ACCOUNT, Ref};
use serde_json::{Value, json};
use uuid::Uuid;

#[derive(Debug, clap::Args)]
pub(crate) struct Accounts {
    /// The account of this user.
    #[arg(long, value_name = "ID", conflicts_with = "org")]
    user: Option<String>,
    /// The account of this organisation.
    #[arg(long, value_name = "ID")]
    org: Option<String>,
    /// Show at most this many.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=10000))]
    limit: u16,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Open {
    /// The account of this user.
    #[arg(long, value_name = "ID", conflicts_with = "org", required_unless_present = "org")]
    user: Option<String>,
    /// The account of this organisation.
    #[arg(long, value_name = "ID")]
    org: Option<String>,
    /// Its currency (ISO 4217).
    #[arg(long, value_name = "CODE")]
    currency: String,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Adjust {
    /// The account's id, or that of its user or organisation.
    #[arg(add = completion::of(&ACCOUNT))]
    account: Ref,
    /// What is credited, or debited where it is negative: 20.00, "-5.00 EUR".
    #[arg(long, allow_hyphen_values = true)]
    amount: Amount,
    /// The reason, for the ledger and the audit log.
    #[arg(long, value_name = "TEXT")]
    reason: String,
}

const ACCOUNTS: [Column; 7] = [
    ("ID", "/id"),
    ("USER", "/user_id"),
    ("ORG", "/org_id"),
    ("STATE", "/state"),
    ("BALANCE", "/balance"),
    ("AN HOUR", "/burn_per_hour"),
    ("LASTS UNTIL", "/lasts_until"),
];

fn path(account: Uuid) -> String {
    format!("{}/{account}", ACCOUNT.path)
}

pub(super) async fn list(which: Accounts, api: &Api) -> Result<(), Failure> {
    let given = [("user_id", which.user), ("org_id", which.org)];
    let query: Query<'_> = given.into_iter().filter_map(|(name, value)| Some((name, value?))).collect();
    api.out.list(&api.list(ACCOUNT.path, &query, which.limit.into()).await?, &ACCOUNTS)
}

pub(super) async fn open(wanted: Open, api: &Api) -> Result<(), Failure> {
    let given = [("user_id", wanted.user), ("org_id", wanted.org), ("currency", Some(wanted.currency))];
    let body: Value =
        given.into_iter().filter_map(|(name, value)| Some((name.to_owned(), Value::from(value?)))).collect();
    api.out.show(&api.post(ACCOUNT.path, &body).await?, &BALANCE)
}

pub(super) async fn adjust(wanted: Adjust, api: &Api) -> Result<(), Failure> {
    let id = resource_ref::account(&wanted.account, api).await?;
    let currency = match wanted.amount.currency() {
        Some(currency) => currency.to_owned(),
        None => currency_of(&api.get(&path(id), &[]).await?["account"])?,
    };
    let minor = wanted.amount.minor(&currency).map_err(Failure::usage)?;
    let body = json!({ "amount_minor": minor, "currency": currency, "reason": wanted.reason });
    let adjusted = api.post(&format!("{}/adjustments", path(id)), &body).await;
    api.out.show(&adjusted.map_err(|failure| failure.in_currency(&currency))?, &BALANCE)
}

/// An account with its meters, as administrators see it.
pub(super) async fn metered(account: &Ref, api: &Api) -> Result<(), Failure> {
    let mut found = api.get(&path(resource_ref::account(account, api).await?), &[]).await?;
    if api.out.is_json() {
        return api.out.json(&found);
    }
    let mut account = found["account"].take();
    account["opened_at"] = found["opened_at"].take();
    api.out.show(&account, &BALANCE)?;
    // Meters are in the account's currency.
    for meter in found["meters"].as_array_mut().into_iter().flatten() {
        meter["currency"] = account["currency"].clone();
    }
    api.out.rows_below(&found["meters"], &METERS)
}

/// The currency of an account: it has one from its first posting on.
pub(crate) fn currency_of(account: &Value) -> Result<String, Failure> {
    let currency = account["currency"].as_str().map(str::to_owned);
    currency.ok_or_else(|| {
        Failure::usage("the account has no currency yet").next("Name one beside the amount: \"20.00 USD\".")
    })
}
