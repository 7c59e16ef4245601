//! The SKU catalog: active SKUs for users, and the whole catalog with prices for administrators.

mod admin;

use crate::api::{Api, Query};
use crate::completion;
use crate::failure::{ExitStatus, Failure};
use crate::output::Column;
use crate::resource_ref::{Ref, SKU, items};
use admin::{Create, Decision, Update};

/// The most SKUs that are searched for one.
const MAX_LISTED: usize = 1000;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Lists the offered SKUs, with their prices.
    #[command(visible_alias = "ls")]
    List {
        /// Administrators: list SKUs that are not offered, too.
        #[arg(long)]
        all: bool,
        /// Administrators: list those in this status: draft, active, deprecated, inactive.
        #[arg(long, value_name = "STATUS", requires = "all")]
        status: Option<String>,
        /// Show at most this many.
        #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=10000))]
        limit: u16,
    },
    /// Administrators: shows one SKU, with who has approved what.
    Show {
        #[arg(add = completion::of(&SKU))]
        sku: Ref,
    },
    /// Administrators: makes a SKU, as a draft.
    Create(Create),
    /// Administrators: changes a SKU's price, its regions, or what its machines must have.
    Update(Update),
    /// Approves that a SKU is offered.
    Activate(Decision),
    /// Approves that a SKU is on its way out: it is listed no more and gets no further nodes. What runs goes on, and who knows its name rents
    /// it while its nodes last.
    Deprecate(Decision),
    /// Approves that a SKU is withdrawn: it can no more be rented, and what runs goes on. Where nodes or allocations refer to it, give --impact-review
    /// and --rollback-plan, too.
    Deactivate(Decision),
}

const OFFERED: [Column; 8] = [
    ("NAME", "/name"),
    ("GPU", "/gpu/model"),
    ("GPUS", "/gpu/count"),
    ("GPU MIB", "/gpu/memory_mib"),
    ("CORES", "/cpu/cores"),
    ("MIB", "/memory_mib"),
    ("REGIONS", "/allowed_regions"),
    ("PER GPU HOUR", "/price/amount_per_gpu_hour"),
];

const ALL: [Column; 7] = [
    ("ID", "/id"),
    ("NAME", "/name"),
    ("STATUS", "/status"),
    ("GPU", "/gpu/model"),
    ("GPUS", "/gpu/count"),
    ("REGIONS", "/allowed_regions"),
    ("PER GPU HOUR", "/price/amount_per_gpu_hour"),
];

pub(crate) async fn run(command: Command, api: &Api) -> Result<(), Failure> {
    match command {
        Command::List { all: false, limit, .. } => {
            api.out.list(&api.list("/api/v1/skus", &[], limit.into()).await?, &OFFERED)
        }
        Command::List { all: true, status, limit } => {
            let query: Query<'_> = status.map(|status| ("status", status)).into_iter().collect();
            api.out.list(&api.list(SKU.path, &query, limit.into()).await?, &ALL)
        }
        Command::Show { sku } => admin::show(&sku, api).await,
        Command::Create(wanted) => admin::create(wanted, api).await,
        Command::Update(change) => admin::update(change, api).await,
        Command::Activate(decision) => admin::decide(decision, "activate", api).await,
        Command::Deprecate(decision) => admin::decide(decision, "deprecate", api).await,
        Command::Deactivate(decision) => admin::decide(decision, "deactivate", api).await,
    }
}

/// Refuses more GPUs than a node of the SKU has: no wait makes room for them. Any other error is left to the request.
pub(crate) async fn expect_fits_one_node(sku: &str, gpus: u16, api: &Api) -> Result<(), Failure> {
    // One GPU is on every node.
    if gpus == 1 {
        return Ok(());
    }
    let Ok(page) = api.list("/api/v1/skus", &[], MAX_LISTED).await else { return Ok(()) };
    let named = items(&page).iter().find(|item| item["name"] == sku || item["id"] == sku);
    let Some(count) = named.and_then(|item| item["gpu"]["count"].as_u64()) else { return Ok(()) };
    if u64::from(gpus) <= count {
        return Ok(());
    }
    let why = format!("no node can ever hold {gpus} GPUs of SKU {sku}: each of its nodes has {count}");
    Err(Failure::new(ExitStatus::Refused, why).next(format!(
        "Ask for at most --gpus {count}; an allocation is on one node. `gpuctl skus list` shows other SKUs."
    )))
}
