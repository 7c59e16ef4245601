//! Billing accounts: balance, ledger, estimates, and what operators adjust (decisions 6).

pub(super) mod view;

use actors::sharding::id_of_name;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use chrono::{DateTime, TimeDelta, Utc};
use domain::billing_account::{BillingAccount, Holder, Reply, Request};
use domain::ledger::PostingKind;
use domain::money::{Currency, HourlyRate};
use domain::policy::{PolicyKey, Scopes};
use domain::{AllocationId, BillingAccountId, EntityKind};
use persistence::queries::{LedgerFilter, LedgerRow, ListFilter};
use serde::{Deserialize, Serialize};
use utoipa::openapi::schema::{Object, ObjectBuilder, SchemaType, Type};
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use super::request_context::{AdjustBilling, Authorized, RequestContext, SeeBilling, UserRequest, replayed};
use super::request_fields::{
    AdjustmentMinor, ClaimId, CurrencyCode, EstimatedSeconds, GpuCount, Reason, SkuRef, instant_or_none,
};
use super::sku;
use crate::api::idempotency::request_layer::Idempotent;
use crate::app_state::AppState;
use crate::app_state::read_model::{self, current};
use crate::http::error::ApiError;
use crate::http::pagination::{Items, Listing, Order, Page, PageQuery, Position};
use crate::http::request_body::{self, Path, Query};
use view::{AccountView, EstimateView, LedgerView, MeteredView};

/// The parameters of an estimate.
#[derive(Debug, Deserialize, Serialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct EstimateQuery {
    /// A SKU's name or id.
    sku: SkuRef,
    gpu_count: GpuCount,
    /// For how long, where that is known; up to a year.
    #[param(inline)]
    seconds: Option<EstimatedSeconds>,
}

/// An account to be opened, for a user or an organisation.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "user_id": "4f1c2a", "currency": "EUR" }))]
pub(super) struct NewAccount {
    /// The `sub` of their access tokens.
    user_id: Option<ClaimId>,
    /// The organisation that their access tokens name.
    org_id: Option<ClaimId>,
    /// The currency of the account; it cannot be changed.
    currency: CurrencyCode,
}

/// An adjustment of an account by an operator.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "amount_minor": 500, "currency": "EUR", "reason": "two hours were lost to a faulty switch" }))]
pub(super) struct NewAdjustment {
    amount_minor: AdjustmentMinor,
    /// The account's own.
    currency: CurrencyCode,
    reason: Reason,
}

/// A filter of accounts.
#[derive(Debug, Deserialize, Serialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct AccountFilter {
    /// Its user.
    user_id: Option<ClaimId>,
    /// The organisation that it belongs to.
    org_id: Option<ClaimId>,
}

/// A filter of postings; absent fields admit all.
#[derive(Debug, Deserialize, Serialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct PostingFilter {
    /// Postings of this kind.
    #[param(schema_with = kinds)]
    kind: Option<PostingKind>,
    /// For this allocation.
    allocation_id: Option<Uuid>,
    /// Posted at this instant or later.
    #[serde(default, deserialize_with = "instant_or_none")]
    from: Option<DateTime<Utc>>,
    /// Posted before this instant.
    #[serde(default, deserialize_with = "instant_or_none")]
    until: Option<DateTime<Utc>>,
}

fn kinds() -> Object {
    let names = PostingKind::ALL.iter().map(|kind| kind.name()).collect::<Vec<_>>();
    ObjectBuilder::new().schema_type(SchemaType::new(Type::String)).enum_values(Some(names)).build()
}

/// The balance of your account, or of your organisation's where your token names one.
#[utoipa::path(get, path = "/", responses((status = 200, description = "The account.", body = AccountView)))]
pub(super) async fn balance(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
) -> Result<Json<AccountView>, ApiError> {
    let holder = holder_of(&context);
    let account = current::<BillingAccount>(&app, id_of(&holder)).await?;
    let now = app.environment.now();
    Ok(Json(match account {
        Some(found) => AccountView::of(&found.it, now, window_of(&app, &found.it.scopes(), now)),
        None => AccountView::empty(id_of(&holder), &holder, now),
    }))
}

/// The ledger of your account, newest first.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery, PostingFilter),
    responses((status = 200, description = "A page of postings.", body = Items<LedgerView>)),
)]
pub(super) async fn ledger(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    listing: Listing<PostingFilter>,
) -> Result<Json<Items<LedgerView>>, ApiError> {
    let account = id_of(&holder_of(&context));
    let page = listing.page("billing/ledger", &account.to_string(), Order::NewestFirst)?;
    postings(&app, account, &listing.filter, &page).await
}

/// The estimated cost of an allocation, and whether your account covers its first window.
#[utoipa::path(
    get,
    path = "/",
    params(EstimateQuery),
    responses((status = 200, description = "The estimate.", body = EstimateView)),
)]
pub(super) async fn estimate(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    Query(query): Query<EstimateQuery>,
) -> Result<Json<EstimateView>, ApiError> {
    let sku = sku::rentable(&app, &query.sku).await?;
    let price = sku.price().ok_or_else(|| ApiError::internal("a SKU that can be rented has no price"))?;
    let holder = holder_of(&context);
    let account = current::<BillingAccount>(&app, id_of(&holder)).await?.map(|found| found.it);
    let now = app.environment.now();
    // A request begins a window by the caller's plan, where none runs.
    let running = account.as_ref().filter(|account| account.window.is_some());
    let scopes = running.map_or_else(|| holder.scopes(context.caller.plan.as_deref()), |account| account.scopes());
    let window = window_of(&app, &scopes, now);
    let rate = HourlyRate::of(price, query.gpu_count.0);
    let seconds = query.seconds.map(|seconds| seconds.0);
    Ok(Json(EstimateView::of(price, rate, seconds, account.as_deref(), now, window)))
}

/// All accounts, oldest first.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery, AccountFilter),
    responses((status = 200, description = "A page of accounts.", body = Items<AccountView>)),
)]
pub(super) async fn list(
    _: Authorized<SeeBilling>,
    State(app): State<AppState>,
    listing: Listing<AccountFilter>,
) -> Result<Json<Items<AccountView>>, ApiError> {
    let page = listing.page("admin/billing/accounts", "", Order::OldestFirst)?;
    let filter = &listing.filter;
    let now = app.environment.now();
    let show = |it: &BillingAccount| AccountView::of(it, now, window_of(&app, &it.scopes(), now));
    if filter.user_id.is_some() || filter.org_id.is_some() {
        let holder = one_holder(filter.user_id.as_ref(), filter.org_id.as_ref())?;
        let found = current::<BillingAccount>(&app, id_of(&holder)).await?;
        let items = found.iter().map(|found| show(&found.it)).collect();
        return Ok(Json(Items { items, next_page: None }));
    }
    let rows = read_model::list::<BillingAccount>(&app, &ListFilter::default(), &page).await?;
    Ok(Json(read_model::to_page(&page, rows, |stored| show(&stored.it))))
}

/// Opens an account, with nothing in it.
///
/// An existing account is answered with 200. Users without one get it with their first payment.
#[utoipa::path(
    post,
    path = "/",
    request_body = NewAccount,
    responses(
        (status = 201, description = "The account.", body = AccountView),
        (status = 200, description = "The account that there was.", body = AccountView),
    ),
)]
pub(super) async fn open(
    authorized: Authorized<AdjustBilling>,
    State(app): State<AppState>,
    Idempotent(request_body::Json(new)): Idempotent<request_body::Json<NewAccount>>,
) -> Result<impl IntoResponse, ApiError> {
    let holder = one_holder(new.user_id.as_ref(), new.org_id.as_ref())?;
    let id = id_of(&holder);
    let command = Request::Open { holder, currency: currency(&new.currency)? };
    let answered = authorized.context.ask::<BillingAccount>(id, command).await?;
    let status = if answered.written || answered.replayed { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, replayed(&answered), Json(account_view(&app, answered.reply)?)))
}

/// One account, with what it pays for at this moment.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The account.", body = MeteredView)),
)]
pub(super) async fn get(
    _: Authorized<SeeBilling>,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
) -> Result<Json<MeteredView>, ApiError> {
    let found = current::<BillingAccount>(&app, id).await?;
    let found = found.ok_or_else(|| ApiError::not_found("billing account"))?;
    let now = app.environment.now();
    Ok(Json(MeteredView::of(&found.it, now, window_of(&app, &found.it.scopes(), now))))
}

/// An account's postings, newest first.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery, PostingFilter),
    responses((status = 200, description = "A page of postings.", body = Items<LedgerView>)),
)]
pub(super) async fn ledger_of(
    _: Authorized<SeeBilling>,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
    listing: Listing<PostingFilter>,
) -> Result<Json<Items<LedgerView>>, ApiError> {
    current::<BillingAccount>(&app, id).await?.ok_or_else(|| ApiError::not_found("billing account"))?;
    let page = listing.page("admin/billing/ledger", &id.to_string(), Order::NewestFirst)?;
    postings(&app, id, &listing.filter, &page).await
}

/// Gives to an account, or takes from it what is there, for a reason.
#[utoipa::path(
    post,
    path = "/",
    request_body = NewAdjustment,
    responses((status = 201, description = "The account after it.", body = AccountView)),
)]
pub(super) async fn adjust(
    authorized: Authorized<AdjustBilling>,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
    Idempotent(request_body::Json(new)): Idempotent<request_body::Json<NewAdjustment>>,
) -> Result<impl IntoResponse, ApiError> {
    let command = Request::Adjust {
        amount_minor: new.amount_minor.0,
        currency: currency(&new.currency)?,
        reason: new.reason.to_string(),
    };
    let answered = authorized.context.ask::<BillingAccount>(id, command).await?;
    Ok((StatusCode::CREATED, replayed(&answered), Json(account_view(&app, answered.reply)?)))
}

/// The holder of the account that pays for the caller's allocations.
pub(super) fn holder_of(context: &RequestContext) -> Holder {
    Holder::paying_for(&context.caller.user_id, context.caller.org_id.as_ref())
}

pub(super) fn id_of(holder: &Holder) -> Uuid {
    id_of_name(EntityKind::BillingAccount, &holder.to_string())
}

fn one_holder(user_id: Option<&ClaimId>, org_id: Option<&ClaimId>) -> Result<Holder, ApiError> {
    match (user_id, org_id) {
        (Some(user), None) => Ok(Holder::User(user.to_string().into())),
        (None, Some(org)) => Ok(Holder::Org(org.to_string().into())),
        (Some(_), Some(_)) | (None, None) => Err(ApiError::invalid_request(
            "An account belongs to a user or to an organisation: give `user_id` or `org_id`, and not both.",
        )
        .detail("field", "user_id")),
    }
}

fn currency(code: &CurrencyCode) -> Result<Currency, ApiError> {
    Currency::parse(code).map_err(|error| ApiError::invalid_request(format!("{error}.")).detail("field", "currency"))
}

fn account_view(app: &AppState, reply: Reply) -> Result<AccountView, ApiError> {
    let Reply::Account { account } = reply else {
        return Err(ApiError::internal("the billing account answered another question"));
    };
    let now = app.environment.now();
    Ok(AccountView::of(&account, now, window_of(app, &account.scopes(), now)))
}

/// The length of a billing window.
fn window_of(app: &AppState, scopes: &Scopes, now: DateTime<Utc>) -> TimeDelta {
    app.environment.policy().seconds(PolicyKey::BillingWindow, scopes, now)
}

async fn postings(
    app: &AppState,
    account: Uuid,
    given: &PostingFilter,
    page: &Page,
) -> Result<Json<Items<LedgerView>>, ApiError> {
    let account = BillingAccountId(account);
    let filter = LedgerFilter {
        kind: given.kind,
        allocation: given.allocation_id.map(AllocationId),
        after: number_before(app, account, given.from).await?,
        until: number_before(app, account, given.until).await?,
    };
    let rows = u32::try_from(page.rows_to_read()).unwrap_or(u32::MAX);
    let before = page.after.and_then(|at| i64::try_from(at.id.as_u128()).ok());
    let found = app.reads.ledger(account, &filter, before, rows).await?;
    // The position of a posting has its number in place of an id.
    let place =
        |row: &LedgerRow| Position { created_at: row.at, id: Uuid::from_u128(u128::from(row.number.unsigned_abs())) };
    Ok(Json(page.answer(found.items, place, LedgerView::from)))
}

/// The number of the last posting before that instant, where an instant was given.
async fn number_before(
    app: &AppState,
    account: BillingAccountId,
    at: Option<DateTime<Utc>>,
) -> Result<Option<i64>, ApiError> {
    let Some(at) = at else { return Ok(None) };
    Ok(app.reads.ledger_positions(account, &[at]).await?.first().map(|place| place.number))
}
