//! Monthly statements (decision 0028): for whoever holds an account, and for those who may see all of them.
//!
//! Each form is a path of its own, as recordings have it: a link says what it leads to, and a generated client has one type for each.

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use domain::Kind;
use domain::allocation::Allocation;
use domain::billing_account::BillingAccount;
use persistence::StoreError;
use persistence::read::{ADDED_UP_WITHIN, LedgerPlace, LedgerSum};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tokio::sync::Semaphore;
use utoipa::ToSchema;
use uuid::Uuid;

use super::asking::{Asking, ByUser, May, SeeBilling};
use super::billing::view::named;
use super::billing::{holder_of, id_of};
use super::stored::{Stored, current};
use crate::body::Path;
use crate::correlation::no_store;
use crate::error::{ApiError, Code};
use crate::page::{Items, Listing, Order, Page, PageQuery, Position};
use crate::services::Services;
use crate::statement::{CSV, Line, Month, PDF, Rented, Rows, Statement, printed};

/// Allocations and kinds that a statement has lines of their own for; the rest is put together by kind.
const LINES: u32 = 500;
/// Added up at the same time, each on a connection to the database; others wait.
static ADDING_UP: Semaphore = Semaphore::const_new(4);
/// Printed at the same time; others wait.
static PRINTING: Semaphore = Semaphore::const_new(2);

#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Unfiltered {}

/// A month of an account. Amounts in minor units are rounded down; those in millionths of one are exact.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = MonthlyStatementSummary)]
pub(super) struct SummaryView {
    /// `2026-11`.
    month: String,
    from: DateTime<Utc>,
    /// The first instant that is not in it.
    until: DateTime<Utc>,
    /// True once the month is over: nothing is added to it any more.
    is_final: bool,
    currency: String,
    opening_minor: i64,
    opening_micro: i64,
    closing_minor: i64,
    closing_micro: i64,
    /// How many postings there are in it.
    postings: i64,
}

/// A month of an account, with what its postings come to: opening and lines add up to closing, to the millionth of a minor unit.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = MonthlyStatement)]
pub(super) struct StatementView {
    account_id: Uuid,
    /// The user whom the account belongs to; null where it is an organisation's.
    user_id: Option<String>,
    /// The organisation that it belongs to; null where it is a user's.
    org_id: Option<String>,
    #[serde(flatten)]
    summary: SummaryView,
    /// The postings by allocation and kind. Those that moved most have lines of their own; the rest is put together by kind.
    lines: Vec<LineView>,
    as_of: DateTime<Utc>,
}

/// What the postings of one kind for one allocation come to.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = MonthlyStatementLine)]
pub(super) struct LineView {
    kind: String,
    /// Null where it is for none, or for many.
    allocation_id: Option<Uuid>,
    /// How many allocations were put together; 0 where it is a line of its own.
    together: u64,
    /// What was rented; null where many were put together.
    sku: Option<String>,
    gpu_count: Option<u32>,
    /// Who rented it; in an organisation's account there are many.
    user_id: Option<String>,
    postings: u64,
    /// How they changed the balance, in millionths of a minor unit; 0 for what was written off.
    change_micro: i64,
    /// What they moved, in millionths of a minor unit.
    amount_micro: i64,
    used_from: Option<DateTime<Utc>>,
    used_until: Option<DateTime<Utc>>,
}

/// The months of your account, or of your organisation's where your token names one, latest first.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery),
    responses((status = 200, description = "A page of months; none where there never was an account.", body = Items<SummaryView>)),
)]
pub(super) async fn list(
    ByUser(asking): ByUser,
    State(services): State<Services>,
    listing: Listing<Unfiltered>,
) -> Result<Json<Items<SummaryView>>, ApiError> {
    let id = id_of(&holder_of(&asking));
    let page = listing.page("billing/statements", &id.to_string(), Order::NewestFirst)?;
    match current::<BillingAccount>(&services, id).await? {
        Some(found) => months(&services, &found.it, &page).await,
        None => Ok(Json(Items { items: Vec::new(), next_page: None })),
    }
}

/// What your account came to in a month, by allocation and kind of posting.
#[utoipa::path(
    get,
    path = "/",
    params(("month" = inline(Month), Path, description = "The month, in UTC", example = "2026-11")),
    responses((status = 200, description = "The statement.", body = StatementView)),
)]
pub(super) async fn get(
    ByUser(asking): ByUser,
    State(services): State<Services>,
    Path(month): Path<Month>,
) -> Result<Json<StatementView>, ApiError> {
    Ok(Json(StatementView::of(own(&services, &asking, month).await?)))
}

/// The same as CSV, with every posting.
///
/// A line for the opening balance, one for each posting in the ledger's order, one for what the postings of an allocation and kind come to, and one
/// for the closing balance; the first column says which. A file that could not be written to its end breaks off, and has no such last line. Texts that
/// a spreadsheet would take for a formula begin with an apostrophe.
#[utoipa::path(
    get,
    path = "/",
    params(("month" = inline(Month), Path, description = "The month, in UTC", example = "2026-11")),
    responses((status = 200, description = "The file.", content_type = "text/csv", body = String)),
)]
pub(super) async fn csv(
    ByUser(asking): ByUser,
    State(services): State<Services>,
    Path(month): Path<Month>,
) -> Result<Response, ApiError> {
    streamed(&services, own(&services, &asking, month).await?)
}

/// The same as PDF, to read and to file.
#[utoipa::path(
    get,
    path = "/",
    params(("month" = inline(Month), Path, description = "The month, in UTC", example = "2026-11")),
    responses((status = 200, description = "The file, PDF/A-2b.", content_type = "application/pdf", body = String)),
)]
pub(super) async fn pdf(
    ByUser(asking): ByUser,
    State(services): State<Services>,
    Path(month): Path<Month>,
) -> Result<Response, ApiError> {
    pages(own(&services, &asking, month).await?).await
}

/// The months of an account, latest first.
#[utoipa::path(
    get,
    path = "/",
    params(("id" = Uuid, Path, description = "The account's id"), PageQuery),
    responses((status = 200, description = "A page of months.", body = Items<SummaryView>)),
)]
pub(super) async fn list_of(
    _: May<SeeBilling>,
    State(services): State<Services>,
    Path(id): Path<Uuid>,
    listing: Listing<Unfiltered>,
) -> Result<Json<Items<SummaryView>>, ApiError> {
    let found = current::<BillingAccount>(&services, id).await?;
    let found = found.ok_or_else(|| ApiError::not_found("billing account"))?;
    let page = listing.page("admin/billing/statements", &id.to_string(), Order::NewestFirst)?;
    months(&services, &found.it, &page).await
}

/// What an account came to in a month, by allocation and kind of posting.
#[utoipa::path(
    get,
    path = "/",
    params(
        ("id" = Uuid, Path, description = "The account's id"),
        ("month" = inline(Month), Path, description = "The month, in UTC", example = "2026-11"),
    ),
    responses((status = 200, description = "The statement.", body = StatementView)),
)]
pub(super) async fn get_of(
    _: May<SeeBilling>,
    State(services): State<Services>,
    Path((id, month)): Path<(Uuid, Month)>,
) -> Result<Json<StatementView>, ApiError> {
    Ok(Json(StatementView::of(made(&services, id, month).await?)))
}

/// The same as CSV, with every posting.
#[utoipa::path(
    get,
    path = "/",
    params(
        ("id" = Uuid, Path, description = "The account's id"),
        ("month" = inline(Month), Path, description = "The month, in UTC", example = "2026-11"),
    ),
    responses((status = 200, description = "The file, as the account's holder gets it.", content_type = "text/csv", body = String)),
)]
pub(super) async fn csv_of(
    _: May<SeeBilling>,
    State(services): State<Services>,
    Path((id, month)): Path<(Uuid, Month)>,
) -> Result<Response, ApiError> {
    streamed(&services, made(&services, id, month).await?)
}

/// The same as PDF, to read and to file.
#[utoipa::path(
    get,
    path = "/",
    params(
        ("id" = Uuid, Path, description = "The account's id"),
        ("month" = inline(Month), Path, description = "The month, in UTC", example = "2026-11"),
    ),
    responses((status = 200, description = "The file, PDF/A-2b.", content_type = "application/pdf", body = String)),
)]
pub(super) async fn pdf_of(
    _: May<SeeBilling>,
    State(services): State<Services>,
    Path((id, month)): Path<(Uuid, Month)>,
) -> Result<Response, ApiError> {
    pages(made(&services, id, month).await?).await
}

async fn own(services: &Services, asking: &Asking, month: Month) -> Result<Statement, ApiError> {
    made(services, id_of(&holder_of(asking)), month).await
}

/// There is one for each month from that in which the account was opened to this one.
fn has(account: &BillingAccount, month: Month, now: DateTime<Utc>) -> bool {
    (Month::of(account.opened_at)..=Month::of(now)).contains(&month)
}

async fn made(services: &Services, id: Uuid, month: Month) -> Result<Statement, ApiError> {
    let now = services.world.now();
    let found = current::<BillingAccount>(services, id).await?.filter(|found| has(&found.it, month, now));
    let account = found.ok_or_else(|| ApiError::not_found("statement"))?.it;
    let ends = places(services, &account, &[month.begins(), month.ends()]).await?;
    let [opening, closing] = ends[..] else { return Err(ApiError::internal("the ledger has not found two instants")) };
    let sums = added_up(services, &account, opening, closing).await?;
    let ids: Vec<Uuid> = sums.iter().filter_map(|sum| sum.allocation.map(|id| id.0)).collect();
    let rented = rented(services, &ids).await?;
    let line = |sum: LedgerSum| Line { rented: sum.allocation.and_then(|id| rented.get(&id.0).cloned()), sum };
    let statement = Statement {
        account: account.id.0,
        holder: account.holder.clone(),
        currency: account.currency.clone(),
        month,
        opening,
        closing,
        lines: sums.into_iter().map(line).collect(),
        as_of: now,
    };
    if !statement.adds_up() {
        return Err(ApiError::internal(format!("the postings of {id} in {month} do not lead from balance to balance")));
    }
    Ok(statement)
}

async fn added_up(
    services: &Services,
    account: &BillingAccount,
    opening: LedgerPlace,
    closing: LedgerPlace,
) -> Result<Vec<LedgerSum>, ApiError> {
    let _turn = ADDING_UP.acquire().await.map_err(ApiError::internal)?;
    let sums = services.reads.ledger_sums(account.id, opening.number, closing.number, LINES).await;
    sums.map_err(|error| if error.took_too_long() { too_large(error) } else { error.into() })
}

fn too_large(error: StoreError) -> ApiError {
    let message = format!(
        "The month has more postings than can be added up within {} s; read them page by page from the ledger, or ask again when less goes on.",
        ADDED_UP_WITHIN.as_secs()
    );
    ApiError::new(Code::ServiceUnavailable, message).because(error)
}

async fn places(
    services: &Services,
    account: &BillingAccount,
    instants: &[DateTime<Utc>],
) -> Result<Vec<LedgerPlace>, ApiError> {
    Ok(services.reads.ledger_places(account.id, instants).await?)
}

/// What these allocations are. One that cannot be read is left out: its postings say what they say.
async fn rented(services: &Services, ids: &[Uuid]) -> Result<BTreeMap<Uuid, Rented>, ApiError> {
    let rows = services.reads.entities(Kind::Allocation, ids).await?;
    let read = |row: &persistence::read::EntityRow| {
        let asked = Stored::<Allocation>::of(row).ok()?.it.asked;
        Some((row.entity.id, Rented { sku: asked.sku, gpu_count: asked.gpu_count, user_id: asked.user_id }))
    };
    Ok(rows.iter().filter_map(read).collect())
}

async fn months(
    services: &Services,
    account: &BillingAccount,
    page: &Page,
) -> Result<Json<Items<SummaryView>>, ApiError> {
    let now = services.world.now();
    let last = page.after.map_or(now, |after| after.created_at);
    // A token stands for a month that was shown: the page begins with the one before.
    let shown = usize::from(page.after.is_some());
    let most = usize::try_from(page.rows_to_read()).unwrap_or(usize::MAX);
    let months: Vec<Month> =
        Month::of(last).and_before().skip(shown).take_while(|month| has(account, *month, now)).take(most).collect();
    let instants: Vec<_> = months.iter().flat_map(|month| [month.begins(), month.ends()]).collect();
    let ends = places(services, account, &instants).await?;
    let rows = months.into_iter().zip(ends.chunks_exact(2)).map(|(month, ends)| {
        let (opening, closing) = (ends[0], ends[1]);
        SummaryView::of(account.currency.as_str(), month, opening, closing, now >= month.ends())
    });
    let place = |row: &SummaryView| Position { created_at: row.from, id: Uuid::nil() };
    Ok(Json(page.answer(rows.collect(), place, |row| row)))
}

fn streamed(services: &Services, statement: Statement) -> Result<Response, ApiError> {
    let headers = file(CSV, &statement.file_name("csv"))?;
    let rows = Rows::of(services.reads.clone(), statement);
    Ok((headers, no_store(), Body::from_stream(rows.stream())).into_response())
}

async fn pages(statement: Statement) -> Result<Response, ApiError> {
    let headers = file(PDF, &statement.file_name("pdf"))?;
    let printed = in_turn(&PRINTING, move || printed(&statement)).await?;
    Ok((headers, no_store(), printed.map_err(ApiError::internal)?).into_response())
}

/// Does the work when it has a turn. The turn is over with the work, which goes on where nobody waits for it any more.
async fn in_turn<T: Send + 'static>(
    turns: &'static Semaphore,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ApiError> {
    let turn = turns.acquire().await.map_err(ApiError::internal)?;
    let working = tokio::task::spawn_blocking(move || {
        let done = work();
        drop(turn);
        done
    });
    working.await.map_err(ApiError::internal)
}

type FileHeaders = [(header::HeaderName, HeaderValue); 3];

fn file(kind: &'static str, name: &str) -> Result<FileHeaders, ApiError> {
    let disposition = HeaderValue::try_from(format!("attachment; filename=\"{name}\"")).map_err(ApiError::internal)?;
    Ok([
        (header::CONTENT_TYPE, HeaderValue::from_static(kind)),
        (header::CONTENT_DISPOSITION, disposition),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    ])
}

impl SummaryView {
    fn of(currency: &str, month: Month, opening: LedgerPlace, closing: LedgerPlace, is_final: bool) -> Self {
        Self {
            month: month.to_string(),
            from: month.begins(),
            until: month.ends(),
            is_final,
            currency: currency.to_owned(),
            opening_minor: opening.balance.minor(),
            opening_micro: opening.balance.get(),
            closing_minor: closing.balance.minor(),
            closing_micro: closing.balance.get(),
            postings: closing.number - opening.number,
        }
    }
}

impl StatementView {
    fn of(it: Statement) -> Self {
        let (user_id, org_id) = named(&it.holder);
        Self {
            account_id: it.account,
            user_id,
            org_id,
            summary: SummaryView::of(it.currency.as_str(), it.month, it.opening, it.closing, it.is_final()),
            lines: it.lines.into_iter().map(LineView::from).collect(),
            as_of: it.as_of,
        }
    }
}

impl From<Line> for LineView {
    fn from(Line { sum, rented }: Line) -> Self {
        let (sku, gpu_count, user_id) = match rented {
            Some(Rented { sku, gpu_count, user_id }) => (Some(sku), Some(gpu_count), Some(user_id)),
            None => (None, None, None),
        };
        Self {
            kind: sum.kind,
            allocation_id: sum.allocation.map(|id| id.0),
            together: sum.together,
            sku,
            gpu_count,
            user_id,
            postings: sum.postings,
            change_micro: sum.effect.get(),
            amount_micro: sum.amount.get(),
            used_from: sum.used_from,
            used_until: sum.used_until,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[tokio::test]
    async fn a_turn_lasts_as_long_as_its_work_though_whoever_asked_has_left() {
        static TURNS: Semaphore = Semaphore::const_new(1);
        let (begun, has_begun) = tokio::sync::oneshot::channel();
        let (end, ends) = mpsc::channel::<()>();
        let asking = tokio::spawn(in_turn(&TURNS, move || {
            begun.send(()).unwrap();
            let _ = ends.recv();
        }));
        has_begun.await.unwrap();
        asking.abort();
        assert!(asking.await.unwrap_err().is_cancelled());
        assert_eq!(TURNS.available_permits(), 0, "it is still at work");
        drop(end);
        in_turn(&TURNS, || ()).await.unwrap();
    }
}
