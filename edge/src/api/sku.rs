//! The SKU catalog: kinds of machines, their regions and prices (decisions 3, *SKU*).

mod approval;
mod expected_hardware;
mod validation;

use actors::CommandReply;
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use domain::EntityKind;
use domain::money::{Currency, HIGHEST_PRICE_MINOR, InvalidPrice, Price, minor_in_currency};
use domain::sku::{CatalogStatus, Command, Sku, SkuSpec};
use persistence::queries::ListFilter;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

pub(super) use approval::*;
use expected_hardware::{ExpectedHardwareView, NewExpectedHardware};
use validation::SkuMinimums;

use super::request_context::{AdminRequest, Authorized, RequestContext, SeeSkus, UserRequest, replayed};
use super::request_fields::{
    CpuCores, CurrencyCode, GpuCount, Label, MemoryMib, PriceMinor, RegionCode, SkuName, SkuRef, StorageGib, set,
    set_or_none,
};
use super::ssh_key::NoFilter;
use crate::api::idempotency::request_layer::Idempotent;
use crate::app_state::AppState;
use crate::app_state::read_model::{self, IfMatch, StoredEntity, etag, find, if_match};
use crate::http::error::ApiError;
use crate::http::pagination::{Items, Listing, Order, PageQuery};
use crate::http::request_body::{self, Path};

/// A kind of machine to be put into the catalog, as a draft.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NewSku {
    name: SkuName,
    gpu: NewGpu,
    cpu: NewCpu,
    memory_mib: MemoryMib,
    storage_gib: StorageGib,
    interconnect: Option<Label>,
    /// Where nodes of it may stand.
    #[serde(deserialize_with = "set::<_, _, 64>")]
    #[schema(max_items = 64)]
    allowed_regions: Vec<RegionCode>,
    price: NewPrice,
    #[serde(default)]
    validation: SkuMinimums,
}

/// The GPUs of one machine.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NewGpu {
    vendor: Label,
    /// The model as the agent reports it; a node whose GPUs are of another model does not become active.
    model: Label,
    /// The memory of one GPU.
    memory_mib: MemoryMib,
    count: GpuCount,
}

#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NewCpu {
    #[schema(example = "AMD EPYC 9654")]
    model: Label,
    cores: CpuCores,
}

#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NewPrice {
    currency: CurrencyCode,
    amount_minor_per_gpu_hour: PriceMinor,
}

/// A change of a SKU. Absent fields stay; give at least one.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(min_properties = 1)]
pub(super) struct SkuChange {
    /// A new version of the price. Running allocations keep the price that they began with.
    price: Option<NewPrice>,
    #[serde(default, deserialize_with = "set_or_none::<_, _, 64>")]
    #[schema(max_items = 64)]
    allowed_regions: Option<Vec<RegionCode>>,
    /// What the inventories of its nodes are compared with from their next contact on, in place of what was expected before. `{}` expects
    /// nothing.
    expected_hardware: Option<NewExpectedHardware>,
    /// In place of all minimums that there are; `{}`: there are none any more. The next validation of a node is judged by them.
    validation: Option<SkuMinimums>,
}

/// A filter of SKUs.
#[derive(Debug, Deserialize, Serialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct SkuFilter {
    status: Option<SkuStatus>,
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum SkuStatus {
    Draft,
    Active,
    Deprecated,
    Inactive,
}

/// A kind of machine in the catalog, with who decided on its status.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Sku)]
pub(super) struct SkuView {
    #[serde(flatten)]
    entry: OfferedView,
    /// Rises with each change; quoted it is the `ETag`, for `If-Match` of a change.
    generation: i64,
    /// What the machines of its nodes must have beside their GPUs; null where nothing is expected.
    expected_hardware: Option<ExpectedHardwareView>,
    validation: SkuMinimums,
    /// The two approvals of its status, and a pending one that waits for the second.
    approvals: Vec<ApprovalView>,
}

/// A kind of machine that can be rented.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OfferedSku)]
pub(super) struct OfferedView {
    id: Uuid,
    name: String,
    status: SkuStatus,
    gpu: GpuView,
    cpu: CpuView,
    memory_mib: u64,
    storage_gib: u64,
    interconnect: Option<String>,
    allowed_regions: Vec<String>,
    /// The price of a new allocation; null only where it has none.
    price: Option<PriceView>,
    created_at: DateTime<Utc>,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Gpu)]
pub(super) struct GpuView {
    vendor: String,
    model: String,
    memory_mib: u64,
    count: u32,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Cpu)]
pub(super) struct CpuView {
    #[schema(example = "AMD EPYC 9654")]
    model: String,
    cores: u32,
}

/// Money is in minor units of its currency (cents).
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Price)]
pub(super) struct PriceView {
    currency: String,
    amount_minor_per_gpu_hour: i64,
}

/// The active SKUs, which can be rented, oldest first. GET /api/v1/capacity says how many GPUs of each are free.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery),
    responses((status = 200, description = "A page of SKUs.", body = Items<OfferedView>)),
)]
pub(super) async fn offered(
    _: UserRequest,
    State(app): State<AppState>,
    listing: Listing<NoFilter>,
) -> Result<Json<Items<OfferedView>>, ApiError> {
    let page = listing.page("skus", "", Order::OldestFirst)?;
    let filter = ListFilter { states: vec![CatalogStatus::Active.name().to_owned()], ..ListFilter::default() };
    let rows = read_model::list::<Sku>(&app, &filter, &page).await?;
    Ok(Json(read_model::to_page(&page, rows, |stored| entry(&stored.it))))
}

/// The whole catalog, oldest first.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery, SkuFilter),
    responses((status = 200, description = "A page of SKUs.", body = Items<SkuView>)),
)]
pub(super) async fn list(
    _: Authorized<SeeSkus>,
    State(app): State<AppState>,
    listing: Listing<SkuFilter>,
) -> Result<Json<Items<SkuView>>, ApiError> {
    let page = listing.page("admin/skus", "", Order::OldestFirst)?;
    let states = listing.filter.status.map(|status| status.name().to_owned()).into_iter().collect();
    let rows = read_model::list::<Sku>(&app, &ListFilter { states, ..ListFilter::default() }, &page).await?;
    Ok(Json(read_model::to_page(&page, rows, |stored| view(&stored.it, stored.version))))
}

/// Puts a SKU into the catalog, as a draft.
///
/// Nodes and allocations may refer to it once it is active.
#[utoipa::path(
    post,
    path = "/",
    request_body = NewSku,
    responses((status = 201, description = "The SKU.", body = SkuView)),
)]
pub(super) async fn create(
    AdminRequest(context): AdminRequest,
    Idempotent(request_body::Json(new)): Idempotent<request_body::Json<NewSku>>,
) -> Result<impl IntoResponse, ApiError> {
    let command =
        Command::Create { spec: Box::new(spec(&new)), price: price(&new.price)?, validation: (&new.validation).into() };
    let answered = context.ask::<Sku>(context.new_id(), command).await?;
    sku_response(&context, StatusCode::CREATED, &answered).await
}

/// One SKU.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The SKU; its generation is the `ETag` too.", body = SkuView)),
    extensions(("x-without-console" = json!("the list has the same fields"))),
)]
pub(super) async fn get(
    _: Authorized<SeeSkus>,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
) -> Result<Response, ApiError> {
    let stored = find::<Sku>(&app, id).await?.ok_or_else(|| ApiError::not_found("SKU"))?;
    Ok((etag(stored.version), Json(view(&stored.it, stored.version))).into_response())
}

/// Changes a SKU's price, its regions, its expected hardware, or what it wants of a validation.
///
/// Where the inventory of a node differs from the expected hardware, the node is quarantined (`inventory_drift`) until it agrees again; its
/// tenants run on. Of memory and storage 95 % are enough, and what an agent cannot read is no difference.
///
/// With `If-Match` it is refused with `state_conflict` where the SKU has changed since that version was read, so that of two administrators
/// the later one sees the change of the other.
#[utoipa::path(
    patch,
    path = "/",
    params(IfMatch),
    request_body = SkuChange,
    responses((status = 200, description = "The SKU.", body = SkuView)),
)]
pub(super) async fn revise(
    AdminRequest(context): AdminRequest,
    Path(id): Path<Uuid>,
    headers: HeaderMap,
    request_body::Json(change): request_body::Json<SkuChange>,
) -> Result<Response, ApiError> {
    let is_empty = change.price.is_none()
        && change.allowed_regions.is_none()
        && change.expected_hardware.is_none()
        && change.validation.is_none();
    if is_empty {
        return Err(ApiError::invalid_request(
            "Nothing is to be changed; give `price`, `allowed_regions`, `expected_hardware` or `validation`.",
        ));
    }
    let regions = change.allowed_regions.as_ref();
    let command = Command::Revise {
        price: change.price.as_ref().map(price).transpose()?,
        allowed_regions: regions.map(|regions| regions.iter().map(|region| region.to_string()).collect()),
        expected_hardware: change.expected_hardware.map(|expected| Box::new(expected.into())),
        validation: change.validation.as_ref().map(Into::into),
        if_version: if_match(&headers)?,
    };
    sku_response(&context, StatusCode::OK, &context.ask::<Sku>(id, command).await?).await
}

/// The SKU as a command has left it, with its version as the `ETag`.
async fn sku_response(
    context: &RequestContext,
    status: StatusCode,
    answered: &CommandReply<Box<Sku>>,
) -> Result<Response, ApiError> {
    let version = context.version_of(answered.reply.id.0, answered).await?;
    Ok((status, replayed(answered), etag(version), Json(view(&answered.reply, version))).into_response())
}

/// The active SKU that a request refers to by name or id.
pub(super) async fn active(app: &AppState, name_or_id: &SkuRef) -> Result<Sku, ApiError> {
    sku_in_status(app, name_or_id, &[CatalogStatus::Active]).await
}

/// The same for a request to rent, where a deprecated SKU is valid too, as long as it has nodes.
pub(super) async fn rentable(app: &AppState, name_or_id: &SkuRef) -> Result<Sku, ApiError> {
    sku_in_status(app, name_or_id, &[CatalogStatus::Active, CatalogStatus::Deprecated]).await
}

async fn sku_in_status(app: &AppState, name_or_id: &SkuRef, admitted: &[CatalogStatus]) -> Result<Sku, ApiError> {
    let row = app.reads.find_by_name(EntityKind::Sku, name_or_id).await?;
    let sku = row.as_ref().map(StoredEntity::<Sku>::of).transpose()?.map(|stored| stored.it);
    sku.filter(|sku| admitted.contains(&sku.status)).ok_or_else(|| {
        ApiError::invalid_request(
            "`sku` is not the name or id of an active SKU; GET /api/v1/skus lists those there are.",
        )
        .detail("field", "sku")
    })
}

/// The id of the SKU that a list's filter refers to, active or not.
pub(super) async fn id_in_filter(app: &AppState, name_or_id: &SkuRef) -> Result<Uuid, ApiError> {
    let row = app.reads.find_by_name(EntityKind::Sku, name_or_id).await?;
    row.map(|row| row.entity.id).ok_or_else(|| {
        ApiError::invalid_request("Query parameter `sku` is not the name or id of a SKU.").detail("field", "sku")
    })
}

fn spec(new: &NewSku) -> SkuSpec {
    SkuSpec {
        name: new.name.to_string(),
        gpu_vendor: new.gpu.vendor.to_string(),
        gpu_model: new.gpu.model.to_string(),
        gpu_memory_mib: new.gpu.memory_mib.0,
        gpu_count: new.gpu.count.0,
        cpu_model: new.cpu.model.to_string(),
        cpu_cores: new.cpu.cores.0,
        memory_mib: new.memory_mib.0,
        storage_gib: new.storage_gib.0,
        interconnect: new.interconnect.as_ref().map(|label| label.to_string()),
        allowed_regions: new.allowed_regions.iter().map(|region| region.to_string()).collect(),
        expected_hardware: None,
    }
}

fn price(new: &NewPrice) -> Result<Price, ApiError> {
    Price::new(&new.currency, new.amount_minor_per_gpu_hour.0).map_err(|error| match error {
        InvalidPrice::Currency => {
            ApiError::invalid_request(format!("The price is refused: {error}.")).detail("field", "price.currency")
        }
        InvalidPrice::Amount => {
            let currency = Currency::parse(&new.currency).ok();
            let [least, most] = [0, HIGHEST_PRICE_MINOR].map(|minor| minor_in_currency(minor, currency.as_ref()));
            ApiError::invalid_request(format!("A price is from {least} to {most} for one GPU and hour."))
                .detail("field", "price.amount_minor_per_gpu_hour")
        }
    })
}

impl SkuStatus {
    const fn name(self) -> &'static str {
        match self {
            Self::Draft => CatalogStatus::Draft,
            Self::Active => CatalogStatus::Active,
            Self::Deprecated => CatalogStatus::Deprecated,
            Self::Inactive => CatalogStatus::Inactive,
        }
        .name()
    }
}

impl From<CatalogStatus> for SkuStatus {
    fn from(status: CatalogStatus) -> Self {
        match status {
            CatalogStatus::Draft => Self::Draft,
            CatalogStatus::Active => Self::Active,
            CatalogStatus::Deprecated => Self::Deprecated,
            CatalogStatus::Inactive => Self::Inactive,
        }
    }
}

impl From<&Price> for PriceView {
    fn from(price: &Price) -> Self {
        Self {
            currency: price.currency.as_str().to_owned(),
            amount_minor_per_gpu_hour: price.amount_minor_per_gpu_hour,
        }
    }
}

fn view(sku: &Sku, version: i64) -> SkuView {
    let expected_hardware = sku.spec.expected_hardware.as_deref().map(ExpectedHardwareView::from);
    SkuView {
        entry: entry(sku),
        generation: version,
        expected_hardware,
        validation: (&sku.validation).into(),
        approvals: approvals(sku),
    }
}

fn entry(sku: &Sku) -> OfferedView {
    let spec = sku.spec.clone();
    OfferedView {
        id: sku.id.0,
        name: spec.name,
        status: sku.status.into(),
        gpu: GpuView {
            vendor: spec.gpu_vendor,
            model: spec.gpu_model,
            memory_mib: spec.gpu_memory_mib,
            count: spec.gpu_count,
        },
        cpu: CpuView { model: spec.cpu_model, cores: spec.cpu_cores },
        memory_mib: spec.memory_mib,
        storage_gib: spec.storage_gib,
        interconnect: spec.interconnect,
        allowed_regions: spec.allowed_regions,
        price: sku.price().map(PriceView::from),
        created_at: sku.created_at,
    }
}
