//! Monthly statements (decision 0025): for the holder of an account, and for callers who may see all accounts.
//!
//! Each format has a path of its own, as for recordings: a link says what it leads to, and a generated client has one type for each.

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use domain::EntityKind;
use domain::allocation::Allocation;
use domain::billing_account::BillingAccount;
use persistence::StoreError;
use persistence::queries::{LedgerPosition, LedgerSum, SUM_TIMEOUT};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tokio::sync::Semaphore;
use utoipa::ToSchema;
use uuid::Uuid;

use super::billing::view::named;
use super::billing::{holder_of, id_of};
use super::request_context::{Authorized, RequestContext, SeeBilling, UserRequest};
use crate::app_state::AppState;
use crate::app_state::read_model::{StoredEntity, current};
use crate::http::correlation::no_store;
use crate::http::error::{ApiError, Code};
use crate::http::pagination::{Items, Listing, Order, Page, PageQuery, Position};
use crate::http::request_body::Path;
use crate::statement::{AllocationUsage, CSV, Line, Month, PDF, Rows, Statement, printed};

/// The most lines of a statement by allocation and kind; the rest is summed by kind.
const MAX_LINES: u32 = 500;
/// Concurrent sums, each on a connection to the database; others wait.
static SUM_PERMITS: Semaphore = Semaphore::const_new(4);
/// Concurrent PDF renderings; others wait.
static PRINT_PERMITS: Semaphore = Semaphore::const_new(2);

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

/// A month of an account with the sums of its postings: opening and lines add up to closing, to the millionth of a minor unit.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = MonthlyStatement)]
pub(super) struct StatementView {
    account_id: Uuid,
    /// The user of the account; null where it is an organisation's.
    user_id: Option<String>,
    /// The organisation that it belongs to; null where it is a user's.
    org_id: Option<String>,
    #[serde(flatten)]
    summary: SummaryView,
    /// The postings by allocation and kind. Those with the largest amounts have lines of their own; the rest is summed by kind.
    lines: Vec<LineView>,
    as_of: DateTime<Utc>,
}

/// The sum of the postings of one kind for one allocation.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = MonthlyStatementLine)]
pub(super) struct LineView {
    kind: String,
    /// Null where it is for none, or for many.
    allocation_id: Option<Uuid>,
    /// How many allocations are summed; 0 where it is a line of its own.
    together: u64,
    /// The SKU that was rented; null where several allocations are summed.
    sku: Option<String>,
    gpu_count: Option<u32>,
    /// The user who rented it; an organisation's account has several.
    user_id: Option<String>,
    postings: u64,
    /// How they changed the balance, in millionths of a minor unit; 0 for what was written off.
    change_micro: i64,
    /// The amount that they moved, in millionths of a minor unit.
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
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    listing: Listing<Unfiltered>,
) -> Result<Json<Items<SummaryView>>, ApiError> {
    let id = id_of(&holder_of(&context));
    let page = listing.page("billing/statements", &id.to_string(), Order::NewestFirst)?;
    match current::<BillingAccount>(&app, id).await? {
        Some(found) => months(&app, &found.it, &page).await,
        None => Ok(Json(Items { items: Vec::new(), next_page: None })),
    }
}

/// The statement of your account for a month, by allocation and kind of posting.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The statement.", body = StatementView)),
)]
pub(super) async fn get(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    Path(month): Path<Month>,
) -> Result<Json<StatementView>, ApiError> {
    Ok(Json(StatementView::of(own_statement(&app, &context, month).await?)))
}

/// The same as CSV, with every posting.
///
/// A line for the opening balance, one for each posting in the ledger's order, one for what the postings of an allocation and kind come to, and one
/// for the closing balance; the first column says which. A file that could not be written to its end breaks off, and has no such last line. Texts that
/// a spreadsheet would take for a formula begin with an apostrophe.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The file.", content_type = "text/csv", body = String)),
    extensions(("x-without-console" = json!("a link on the page of statements"))),
)]
pub(super) async fn csv(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    Path(month): Path<Month>,
) -> Result<Response, ApiError> {
    csv_response(&app, own_statement(&app, &context, month).await?)
}

/// The same as PDF, to read and to file.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The file, PDF/A-2b.", content_type = "application/pdf", body = String)),
    extensions(("x-without-console" = json!("a link on the page of statements"))),
)]
pub(super) async fn pdf(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    Path(month): Path<Month>,
) -> Result<Response, ApiError> {
    pdf_response(own_statement(&app, &context, month).await?).await
}

/// The months of an account, latest first.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery),
    responses((status = 200, description = "A page of months.", body = Items<SummaryView>)),
)]
pub(super) async fn list_of(
    _: Authorized<SeeBilling>,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
    listing: Listing<Unfiltered>,
) -> Result<Json<Items<SummaryView>>, ApiError> {
    let found = current::<BillingAccount>(&app, id).await?;
    let found = found.ok_or_else(|| ApiError::not_found("billing account"))?;
    let page = listing.page("admin/billing/statements", &id.to_string(), Order::NewestFirst)?;
    months(&app, &found.it, &page).await
}

/// The statement of an account for a month, by allocation and kind of posting.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The statement.", body = StatementView)),
)]
pub(super) async fn get_of(
    _: Authorized<SeeBilling>,
    State(app): State<AppState>,
    Path((id, month)): Path<(Uuid, Month)>,
) -> Result<Json<StatementView>, ApiError> {
    Ok(Json(StatementView::of(build_statement(&app, id, month).await?)))
}

/// The same as CSV, with every posting.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The file, as the account's holder gets it.", content_type = "text/csv", body = String)),
    extensions(("x-without-console" = json!("a link on the page of statements"))),
)]
pub(super) async fn csv_of(
    _: Authorized<SeeBilling>,
    State(app): State<AppState>,
    Path((id, month)): Path<(Uuid, Month)>,
) -> Result<Response, ApiError> {
    csv_response(&app, build_statement(&app, id, month).await?)
}

/// The same as PDF, to read and to file.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The file, PDF/A-2b.", content_type = "application/pdf", body = String)),
    extensions(("x-without-console" = json!("a link on the page of statements"))),
)]
pub(super) async fn pdf_of(
    _: Authorized<SeeBilling>,
    State(app): State<AppState>,
    Path((id, month)): Path<(Uuid, Month)>,
) -> Result<Response, ApiError> {
    pdf_response(build_statement(&app, id, month).await?).await
}

async fn own_statement(app: &AppState, context: &RequestContext, month: Month) -> Result<Statement, ApiError> {
    build_statement(app, id_of(&holder_of(context)), month).await
}

/// Whether the account has a statement for the month: from the month in which it was opened to the current one.
fn has_statement(account: &BillingAccount, month: Month, now: DateTime<Utc>) -> bool {
    (Month::of(account.opened_at)..=Month::of(now)).contains(&month)
}

async fn build_statement(app: &AppState, id: Uuid, month: Month) -> Result<Statement, ApiError> {
    let now = app.environment.now();
    let found = current::<BillingAccount>(app, id).await?.filter(|found| has_statement(&found.it, month, now));
    let account = found.ok_or_else(|| ApiError::not_found("statement"))?.it;
    let ends = ledger_positions(app, &account, &[month.begins(), month.ends()]).await?;
    let [opening, closing] = ends[..] else { return Err(ApiError::internal("the ledger has not found two instants")) };
    let sums = posting_sums(app, &account, opening, closing).await?;
    let ids: Vec<Uuid> = sums.iter().filter_map(|sum| sum.allocation.map(|id| id.0)).collect();
    let rented = rented(app, &ids).await?;
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

async fn posting_sums(
    app: &AppState,
    account: &BillingAccount,
    opening: LedgerPosition,
    closing: LedgerPosition,
) -> Result<Vec<LedgerSum>, ApiError> {
    let _permit = SUM_PERMITS.acquire().await.map_err(ApiError::internal)?;
    let sums = app.reads.ledger_sums(account.id, opening.number, closing.number, MAX_LINES).await;
    sums.map_err(|error| if error.took_too_long() { too_large(error) } else { error.into() })
}

fn too_large(error: StoreError) -> ApiError {
    let message = format!(
        "The month has more postings than can be added up within {} s; read them page by page from the ledger, or ask again when less goes on.",
        SUM_TIMEOUT.as_secs()
    );
    ApiError::new(Code::ServiceUnavailable, message).because(error)
}

async fn ledger_positions(
    app: &AppState,
    account: &BillingAccount,
    instants: &[DateTime<Utc>],
) -> Result<Vec<LedgerPosition>, ApiError> {
    Ok(app.reads.ledger_positions(account.id, instants).await?)
}

/// The SKU, size and user of these allocations. One that cannot be decoded is left out: its postings are listed without them.
async fn rented(app: &AppState, ids: &[Uuid]) -> Result<BTreeMap<Uuid, AllocationUsage>, ApiError> {
    let rows = app.reads.entities(EntityKind::Allocation, ids).await?;
    let read = |row: &persistence::queries::EntityRow| {
        let asked = StoredEntity::<Allocation>::of(row).ok()?.it.asked;
        Some((
            row.entity.id,
            AllocationUsage { sku: asked.sku, gpu_count: asked.gpu_count, user_id: asked.owner.user_id.0 },
        ))
    };
    Ok(rows.iter().filter_map(read).collect())
}

async fn months(app: &AppState, account: &BillingAccount, page: &Page) -> Result<Json<Items<SummaryView>>, ApiError> {
    let now = app.environment.now();
    let last = page.after.map_or(now, |after| after.created_at);
    // A page token has the last month that was shown: the next page begins with the month before it.
    let shown = usize::from(page.after.is_some());
    let most = usize::try_from(page.rows_to_read()).unwrap_or(usize::MAX);
    let months: Vec<Month> = Month::of(last)
        .and_before()
        .skip(shown)
        .take_while(|month| has_statement(account, *month, now))
        .take(most)
        .collect();
    let instants: Vec<_> = months.iter().flat_map(|month| [month.begins(), month.ends()]).collect();
    let ends = ledger_positions(app, account, &instants).await?;
    let rows = months.into_iter().zip(ends.chunks_exact(2)).map(|(month, ends)| {
        let (opening, closing) = (ends[0], ends[1]);
        SummaryView::of(account.currency.as_str(), month, opening, closing, now >= month.ends())
    });
    let place = |row: &SummaryView| Position { created_at: row.from, id: Uuid::nil() };
    Ok(Json(page.answer(rows.collect(), place, |row| row)))
}

fn csv_response(app: &AppState, statement: Statement) -> Result<Response, ApiError> {
    let headers = file_headers(CSV, &statement.file_name("csv"))?;
    let rows = Rows::of(app.reads.clone(), statement);
    Ok((headers, no_store(), Body::from_stream(rows.stream())).into_response())
}

async fn pdf_response(statement: Statement) -> Result<Response, ApiError> {
    let headers = file_headers(PDF, &statement.file_name("pdf"))?;
    let printed = run_with_permit(&PRINT_PERMITS, move || printed(&statement)).await?;
    Ok((headers, no_store(), printed.map_err(ApiError::internal)?).into_response())
}

/// Runs the work once a permit is free. The permit is released when the work ends, which runs on even if the request was canceled.
async fn run_with_permit<T: Send + 'static>(
    permits: &'static Semaphore,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ApiError> {
    let permit = permits.acquire().await.map_err(ApiError::internal)?;
    let working = tokio::task::spawn_blocking(move || {
        let done = work();
        drop(permit);
        done
    });
    working.await.map_err(ApiError::internal)
}

type FileHeaders = [(header::HeaderName, HeaderValue); 3];

fn file_headers(kind: &'static str, name: &str) -> Result<FileHeaders, ApiError> {
    let disposition = HeaderValue::try_from(format!("attachment; filename=\"{name}\"")).map_err(ApiError::internal)?;
    Ok([
        (header::CONTENT_TYPE, HeaderValue::from_static(kind)),
        (header::CONTENT_DISPOSITION, disposition),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    ])
}

impl SummaryView {
    fn of(currency: &str, month: Month, opening: LedgerPosition, closing: LedgerPosition, is_final: bool) -> Self {
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
            Some(AllocationUsage { sku, gpu_count, user_id }) => (Some(sku), Some(gpu_count), Some(user_id)),
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
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[tokio::test]
    async fn permit_is_held_until_the_work_ends_though_the_request_was_canceled() {
        static PERMITS: Semaphore = Semaphore::const_new(1);
        let (begun, has_begun) = tokio::sync::oneshot::channel();
        let (end, ends) = mpsc::channel::<()>();
        let waiting = tokio::spawn(run_with_permit(&PERMITS, move || {
            begun.send(()).unwrap();
            let _ = ends.recv();
        }));
        has_begun.await.unwrap();
        waiting.abort();
        assert!(waiting.await.unwrap_err().is_cancelled());
        assert_eq!(PERMITS.available_permits(), 0, "it is still at work");
        drop(end);
        run_with_permit(&PERMITS, || ()).await.unwrap();
    }
}
