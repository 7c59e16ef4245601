//! Payments and refunds: the commands of `gpuctl billing` that use the payment processor.

use crate::amount::Amount;
use crate::api::{Api, Query};
use crate::billing::OWN_BALANCE;
use crate::billing::accounts::currency_of;
use crate::completion;
use crate::duration;
use crate::failure::{ExitStatus, Failure};
use crate::output::{Column, Output};
use crate::printable::plain;
use crate::progress::Progress;
use crate::resource_ref::{self, ACCOUNT, ALLOCATION, PAYMENT as PAYMENT_KIND, Ref};
use serde_json::{Value, json};
use std::time::Duration;
use uuid::Uuid;

/// How often a payment is polled while it is awaited.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug, clap::Args)]
pub(crate) struct TopUp {
    /// The amount: 20.00, in your account's currency, or "20.00 USD".
    #[arg(long)]
    amount: Amount,
    /// The currency; the account's own by default.
    #[arg(long, value_name = "CODE")]
    currency: Option<String>,
    /// Where your browser goes once it is paid; a page that says so where it is left out.
    #[arg(long, value_name = "URL")]
    success_url: Option<String>,
    /// Where your browser goes if you cancel.
    #[arg(long, value_name = "URL")]
    cancel_url: Option<String>,
    /// Print the address at which to pay, and open no browser.
    #[arg(long)]
    no_open: bool,
    /// Wait until the money is in your account.
    #[arg(long)]
    wait: bool,
    /// How long to wait (`90s`, `10m`).
    #[arg(long, value_name = "TIME", default_value = "15m", value_parser = duration::parse, requires = "wait")]
    timeout: Duration,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Pay {
    /// A payment that you began.
    #[arg(add = completion::of(&PAYMENT_KIND))]
    payment: Ref,
    /// Print the address at which to pay, and open no browser.
    #[arg(long)]
    no_open: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Payments {
    /// Administrators: list those into this account.
    #[arg(long, value_name = "ID|USER", add = completion::of(&ACCOUNT))]
    account: Option<Ref>,
    /// List those in this state: created, open, paid, deposited, refused, under_review, canceled, expired.
    #[arg(long)]
    state: Option<String>,
    /// Show at most this many.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=10000))]
    limit: u16,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Refund {
    /// A payment that you made.
    #[arg(long, value_name = "ID", required_unless_present = "allocation", conflicts_with = "allocation", add = completion::of(&PAYMENT_KIND))]
    payment: Option<Ref>,
    /// Billing operators: an allocation whose cost is credited.
    #[arg(long, value_name = "ID", add = completion::of(&ALLOCATION))]
    allocation: Option<Ref>,
    /// The amount: 5.00, or "5.00 USD"; all of it where it is left out.
    #[arg(long)]
    amount: Option<Amount>,
    /// The reason.
    #[arg(long, value_name = "TEXT")]
    reason: String,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ReviewDecision {
    /// A payment that waits for a decision.
    #[arg(add = completion::of(&PAYMENT_KIND))]
    payment: Ref,
    /// What was paid, as `gpuctl billing payment` shows it behind `review`. Where something else waits by now, nothing is decided.
    #[arg(long, value_name = "REVIEW")]
    review: String,
    /// The reason, for the audit log.
    #[arg(long, value_name = "TEXT")]
    reason: String,
}

const CHECKOUT: [Column; 3] = [("payment", "/id"), ("pay at", "/url"), ("until", "/expires_at")];

const PAYMENTS: [Column; 7] = [
    ("ID", "/id"),
    ("STATE", "/state"),
    ("AMOUNT", "/amount"),
    ("LEFT", "/left"),
    ("BY", "/payer"),
    ("BEGUN", "/created_at"),
    ("WHY", "/reason"),
];

const PAYMENT: [Column; 12] = [
    ("payment", "/id"),
    ("state", "/state"),
    ("why", "/reason"),
    ("review", "/review"),
    ("amount", "/amount"),
    ("left of it", "/left"),
    ("account", "/account_id"),
    ("paid by", "/payer"),
    ("begun", "/created_at"),
    ("to be paid until", "/pay_until"),
    ("paid", "/paid_at"),
    ("in the account", "/deposited_at"),
];

const REFUNDS: [Column; 6] = [
    ("REFUND", "/id"),
    ("STATE", "/state"),
    ("AMOUNT", "/amount"),
    ("REQUESTED", "/requested_at"),
    ("REASON", "/reason"),
    ("REFUSED BECAUSE", "/refused_because"),
];

const REVERSALS: [Column; 5] = [
    ("AT THE PROCESSOR", "/id"),
    ("KIND", "/kind"),
    ("AMOUNT", "/amount"),
    ("UNDONE", "/is_undone"),
    ("RECEIVED", "/heard_at"),
];

const REFUND: [Column; 7] = [
    ("refund", "/id"),
    ("state", "/state"),
    ("amount", "/amount"),
    ("payment", "/payment_id"),
    ("allocation", "/allocation_id"),
    ("reason", "/reason"),
    ("requested", "/requested_at"),
];

fn path(payment: Uuid) -> String {
    format!("/api/v1/billing/payments/{payment}")
}

pub(crate) async fn top_up(wanted: TopUp, api: &Api) -> Result<(), Failure> {
    let returned = || api.at("/billing/returned");
    let amount = &wanted.amount;
    let currency = match wanted.currency.as_deref().or(amount.currency()) {
        Some(currency) => currency.to_owned(),
        None => currency_of(&api.get(OWN_BALANCE, &[]).await?)?,
    };
    let mut body = json!({
        "amount_minor": amount.minor(&currency).map_err(Failure::usage)?,
        "success_url": wanted.success_url.unwrap_or_else(returned),
        "cancel_url": wanted.cancel_url.unwrap_or_else(returned),
    });
    if wanted.currency.is_some() || amount.currency().is_some() {
        body["currency"] = currency.clone().into();
    }
    let begun = api.post("/api/v1/billing/checkout-sessions", &body).await;
    let begun = begun.map_err(|failure| failure.in_currency(&currency))?;
    let (id, url) = checkout_of(&begun)?;
    if !wanted.wait {
        api.out.show(&begun, &CHECKOUT)?;
        open_page(url, wanted.no_open, api.out);
        return Ok(());
    }
    // The result is the payment, once it is deposited.
    let is_open = open_page(url, wanted.no_open, api.out);
    api.out.instruction(&format!("Pay at: {url}"), is_open);
    wait_until_deposited(id, wanted.timeout, api).await
}

pub(crate) async fn pay(wanted: Pay, api: &Api) -> Result<(), Failure> {
    let id = wanted.payment.id(&PAYMENT_KIND, api).await?;
    let checkout = api.post_empty(&format!("{}/checkout-session", path(id))).await?;
    let (_, url) = checkout_of(&checkout)?;
    api.out.show(&checkout, &CHECKOUT)?;
    open_page(url, wanted.no_open, api.out);
    Ok(())
}

pub(crate) async fn cancel(payment: &Ref, api: &Api) -> Result<(), Failure> {
    let id = payment.id(&PAYMENT_KIND, api).await?;
    api.out.show(&api.post_empty(&format!("{}/cancel", path(id))).await?, &PAYMENT)
}

/// Ends the review of a payment; `way` is the last part of the route.
pub(crate) async fn decide_review(wanted: &ReviewDecision, way: &str, api: &Api) -> Result<(), Failure> {
    let id = wanted.payment.id(&PAYMENT_KIND, api).await?;
    let body = json!({ "review": wanted.review, "reason": wanted.reason });
    api.out.show(&api.post(&format!("/api/v1/admin/billing/payments/{id}/{way}"), &body).await?, &PAYMENT)
}

/// Whether the page is open in the user's browser.
fn open_page(url: &str, no_open: bool, out: Output) -> bool {
    let is_open = !no_open && open::that_detached(url).is_ok();
    if !no_open && !is_open {
        out.notice("No browser could be opened here; open the address yourself.");
    }
    is_open
}

pub(crate) async fn list(which: Payments, api: &Api) -> Result<(), Failure> {
    let query: Query<'_> = which.state.map(|state| ("state", state)).into_iter().collect();
    let path = match &which.account {
        Some(account) => format!("{}/{}/payments", ACCOUNT.path, resource_ref::account(account, api).await?),
        None => PAYMENT_KIND.path.to_owned(),
    };
    api.out.list(&api.list(&path, &query, which.limit.into()).await?, &PAYMENTS)
}

pub(crate) async fn show(payment: &Ref, api: &Api) -> Result<(), Failure> {
    let mut found = api.get(&path(payment.id(&PAYMENT_KIND, api).await?), &[]).await?;
    if api.out.is_json() {
        return api.out.json(&found);
    }
    // Reversals are in the payment's currency.
    let currency = found["currency"].clone();
    for reversal in found["reversals"].as_array_mut().into_iter().flatten() {
        reversal["currency"] = currency.clone();
    }
    api.out.show(&found, &PAYMENT)?;
    api.out.rows_below(&found["refunds"], &REFUNDS)?;
    api.out.rows_below(&found["reversals"], &REVERSALS)?;
    if let (Some("created" | "open"), Some(id)) = (found["state"].as_str(), found["id"].as_str()) {
        api.out.notice(&format!(
            "Its payer can pay it: gpuctl billing pay {id}\nor cancel it: gpuctl billing cancel-payment {id}",
            id = plain(id)
        ));
    }
    Ok(())
}

pub(crate) async fn refund(wanted: Refund, api: &Api) -> Result<(), Failure> {
    let mut body = json!({ "reason": wanted.reason });
    let payment = match &wanted.payment {
        Some(payment) => Some(payment.id(&PAYMENT_KIND, api).await?),
        None => None,
    };
    let allocation = match &wanted.allocation {
        Some(allocation) => Some(resource_ref::allocation(allocation, api).await?),
        None => None,
    };
    // The API takes no currency for a refund, so the amount's own must be that of the payment.
    let given = match wanted.amount {
        Some(amount) => Some((amount, refund_currency(payment, allocation, api).await?)),
        None => None,
    };
    let amount = given.as_ref().map(|(amount, currency)| amount.minor(currency)).transpose().map_err(Failure::usage)?;
    let fields = [
        ("payment_id", payment.map(|id| Value::from(id.to_string()))),
        ("allocation_id", allocation.map(|id| Value::from(id.to_string()))),
        ("amount_minor", amount.map(Value::from)),
    ];
    for (name, value) in fields {
        if let Some(value) = value {
            body[name] = value;
        }
    }
    let refunded = api.post("/api/v1/billing/refunds", &body).await;
    let refunded = refunded.map_err(|failure| match &given {
        Some((_, currency)) => failure.in_currency(currency),
        None => failure,
    });
    api.out.show(&refunded?, &REFUND)
}

/// The currency of what is refunded.
async fn refund_currency(payment: Option<Uuid>, allocation: Option<Uuid>, api: &Api) -> Result<String, Failure> {
    match (payment, allocation) {
        (Some(payment), _) => currency_of(&api.get(&path(payment), &[]).await?),
        (None, Some(allocation)) => currency_of(&api.get(&crate::allocations::path(allocation), &[]).await?["price"]),
        (None, None) => Err(Failure::usage("neither a payment nor an allocation was named")),
    }
}

/// Waits until the payment is deposited, or has failed.
async fn wait_until_deposited(id: Uuid, limit: Duration, api: &Api) -> Result<(), Failure> {
    let what = format!("Payment {id}");
    let progress = Progress::begin(api.out, &what);
    let mut last = String::new();
    let watched = async {
        loop {
            let found = api.get(&path(id), &[]).await?;
            let state = found["state"].as_str().unwrap_or_default();
            let so = match found["reason"].as_str() {
                Some(why) => format!("{what}: {state}, {why}"),
                None => format!("{what}: {state}"),
            };
            if so != last {
                progress.step(&so);
                last = so;
            }
            if matches!(state, "deposited" | "refused" | "under_review" | "canceled" | "expired") {
                return Ok::<Value, Failure>(found);
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    };
    let shown_by = format!("gpuctl billing payment {id}");
    let watched = progress.wait(watched, limit, &what, &shown_by).await;
    drop(progress);
    let goes_on = format!("It goes on: {shown_by}");
    let Ok(found) = watched else {
        let seconds = limit.as_secs();
        return Err(
            Failure::new(ExitStatus::TooLate, format!("{what} is not in your account after {seconds} s")).next(goes_on)
        );
    };
    let found = found.map_err(|failure| failure.next(goes_on))?;
    api.out.show(&found, &PAYMENT)?;
    match found["state"].as_str() {
        Some("deposited") => Ok(()),
        Some("refused") => {
            let why = found["reason"].as_str().unwrap_or("the account cannot have it");
            Err(Failure::new(ExitStatus::Refused, format!("what was paid goes back to its payer: {why}")))
        }
        Some("under_review") => {
            let why = found["reason"].as_str().unwrap_or("an operator settles what was paid");
            Err(Failure::new(ExitStatus::Refused, why.to_owned())
                .next(format!("Look again: gpuctl billing payment {id}")))
        }
        state => Err(Failure::new(ExitStatus::Refused, format!("nothing was paid: it is {}", state.unwrap_or("lost")))),
    }
}

fn checkout_of(begun: &Value) -> Result<(Uuid, &str), Failure> {
    let id = begun["id"].as_str().and_then(|id| id.parse().ok());
    let is_of_the_web = |url: &&str| {
        (url.starts_with("https://") || url.starts_with("http://")) && url.bytes().all(|byte| byte.is_ascii_graphic())
    };
    let url = begun["url"].as_str().filter(is_of_the_web);
    id.zip(url).ok_or_else(|| Failure::unusable_answer("the server's answer has no address of a payment page"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_web_addresses_are_opened_in_a_browser() {
        let id = "018f4e2a-7c1b-7000-8000-000000000001";
        assert!(checkout_of(&json!({"id": id, "url": "https://pay.example/#s"})).is_ok());
        for url in ["file:///etc/passwd", "javascript:alert(1)", "--help", "https://a\u{1b}[2J", ""] {
            assert!(checkout_of(&json!({"id": id, "url": url})).is_err(), "{url}");
        }
    }
}
