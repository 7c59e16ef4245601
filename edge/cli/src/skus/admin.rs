//! The SKU catalog for administrators. A change of status requires the approval of two people in two roles.

use crate::amount::Amount;
use crate::api::Api;
use crate::completion;
use crate::failure::Failure;
use crate::output::Column;
use crate::printable::cell;
use crate::resource_ref::{Ref, SKU};
use clap::ValueEnum;
use serde_json::{Value, json};
use uuid::Uuid;

#[derive(Debug, clap::Args)]
pub(crate) struct Create {
    /// Its name, such as h100x8.
    name: String,
    /// What a GPU costs an hour, with its currency: "2.50 EUR".
    #[arg(long, value_name = "AMOUNT")]
    price: Amount,
    /// A region where its nodes may be; repeatable.
    #[arg(long = "region", value_name = "CODE", required = true)]
    regions: Vec<String>,
    /// The GPU's vendor.
    #[arg(long, value_name = "NAME", default_value = "NVIDIA")]
    gpu_vendor: String,
    /// The GPU's model.
    #[arg(long, value_name = "NAME")]
    gpu_model: String,
    /// A GPU's memory.
    #[arg(long, value_name = "MIB")]
    gpu_memory_mib: u32,
    /// How many GPUs a node has.
    #[arg(long, value_name = "N")]
    gpus: u16,
    /// The CPU's model.
    #[arg(long, value_name = "NAME")]
    cpu_model: String,
    /// How many cores a node has.
    #[arg(long, value_name = "N")]
    cores: u16,
    /// A node's memory.
    #[arg(long, value_name = "MIB")]
    memory_mib: u32,
    /// A node's storage.
    #[arg(long, value_name = "GIB")]
    storage_gib: u32,
    /// What links the GPUs, such as NVLink.
    #[arg(long, value_name = "NAME")]
    interconnect: Option<String>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Update {
    #[arg(add = completion::of(&SKU))]
    sku: Ref,
    /// What a GPU costs an hour from now on, with its currency: "2.50 EUR".
    #[arg(long, value_name = "AMOUNT", required_unless_present_any = ["regions", "ExpectedHardware", "expect_nothing", "minimums", "no_minimums"])]
    price: Option<Amount>,
    /// A region where its nodes may be; repeatable; replaces the regions there are.
    #[arg(long = "region", value_name = "CODE")]
    regions: Vec<String>,
    #[command(flatten)]
    expected: ExpectedHardware,
    /// Nothing is expected of its machines beside their GPUs.
    #[arg(long, conflicts_with = "ExpectedHardware")]
    expect_nothing: bool,
    /// What a validation of its nodes has to reach; repeatable; in place of those there are: disk_read_mib_per_second=500.
    #[arg(long = "minimum", value_name = "MEASUREMENT=N", value_parser = minimum)]
    minimums: Vec<(String, u64)>,
    /// A validation has to reach nothing any more.
    #[arg(long, conflicts_with = "minimums")]
    no_minimums: bool,
}

/// What its machines must have, in place of all that was expected before; a node that has less is quarantined.
#[derive(Debug, clap::Args)]
pub(crate) struct ExpectedHardware {
    /// A part of the processor's name as the kernel reports it.
    #[arg(long, value_name = "TEXT")]
    expect_cpu_model: Option<String>,
    /// Logical processors, at least.
    #[arg(long, value_name = "N")]
    expect_cores: Option<u32>,
    /// Memory, of which 95 % are enough.
    #[arg(long, value_name = "MIB")]
    expect_memory_mib: Option<u64>,
    /// Storage of all local file systems, of which 95 % are enough.
    #[arg(long, value_name = "GIB")]
    expect_storage_gib: Option<u64>,
    /// The oldest version of the GPU driver.
    #[arg(long, value_name = "VERSION")]
    expect_driver_version_min: Option<String>,
}

impl ExpectedHardware {
    /// `None` where no argument is given.
    fn body(self) -> Option<Value> {
        let given = [
            ("cpu_model", self.expect_cpu_model.map(Value::from)),
            ("cpu_cores", self.expect_cores.map(Value::from)),
            ("memory_mib", self.expect_memory_mib.map(Value::from)),
            ("storage_gib", self.expect_storage_gib.map(Value::from)),
            ("driver_version_min", self.expect_driver_version_min.map(Value::from)),
        ];
        let body: serde_json::Map<String, Value> =
            given.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect();
        (!body.is_empty()).then_some(Value::Object(body))
    }
}

#[derive(Debug, clap::Args)]
pub(crate) struct Decision {
    #[arg(add = completion::of(&SKU))]
    sku: Ref,
    /// The reason, for the audit log.
    #[arg(long, value_name = "TEXT")]
    reason: String,
    /// The role in which you approve, if you have both.
    #[arg(long, value_enum)]
    role: Option<ApprovalRole>,
    /// For the deactivation of a SKU in use: who is affected.
    #[arg(long, value_name = "TEXT")]
    impact_review: Option<String>,
    /// For the deactivation of a SKU in use: the way back.
    #[arg(long, value_name = "TEXT")]
    rollback_plan: Option<String>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum ApprovalRole {
    PlatformOperations,
    InventoryOwner,
}

const ALONE: [Column; 19] = [
    ("id", "/id"),
    ("name", "/name"),
    ("status", "/status"),
    ("a GPU an hour", "/price/amount_per_gpu_hour"),
    ("regions", "/allowed_regions"),
    ("GPU", "/gpu/model"),
    ("GPUs", "/gpu/count"),
    ("GPU MiB", "/gpu/memory_mib"),
    ("CPU", "/cpu/model"),
    ("cores", "/cpu/cores"),
    ("MiB", "/memory_mib"),
    ("storage GiB", "/storage_gib"),
    ("interconnect", "/interconnect"),
    ("expected CPU", "/expected_hardware/cpu_model"),
    ("expected cores", "/expected_hardware/cpu_cores"),
    ("expected MiB", "/expected_hardware/memory_mib"),
    ("expected storage GiB", "/expected_hardware/storage_gib"),
    ("expected driver", "/expected_hardware/driver_version_min"),
    ("minimums", "/validation"),
];

const APPROVALS: [Column; 6] = [
    ("CHANGE", "/change"),
    ("ROLE", "/role"),
    ("BY", "/actor"),
    ("AT", "/at"),
    ("UNTIL", "/expires_at"),
    ("WHY", "/reason"),
];

fn path(id: Uuid) -> String {
    format!("{}/{id}", SKU.path)
}

pub(super) async fn show(sku: &Ref, api: &Api) -> Result<(), Failure> {
    let found = api.get(&path(sku.id(&SKU, api).await?), &[]).await?;
    shown(&found, api)
}

fn shown(sku: &Value, api: &Api) -> Result<(), Failure> {
    if api.out.is_json() {
        return api.out.json(sku);
    }
    api.out.show(sku, &ALONE)?;
    api.out.rows_below(&sku["approvals"], &APPROVALS)
}

pub(super) async fn create(wanted: Create, api: &Api) -> Result<(), Failure> {
    let mut body = json!({
        "name": wanted.name,
        "price": price(&wanted.price)?,
        "allowed_regions": wanted.regions,
        "gpu": {
            "vendor": wanted.gpu_vendor,
            "model": wanted.gpu_model,
            "memory_mib": wanted.gpu_memory_mib,
            "count": wanted.gpus,
        },
        "cpu": { "model": wanted.cpu_model, "cores": wanted.cores },
        "memory_mib": wanted.memory_mib,
        "storage_gib": wanted.storage_gib,
    });
    if let Some(interconnect) = wanted.interconnect {
        body["interconnect"] = interconnect.into();
    }
    let made = api.post(SKU.path, &body).await?;
    shown(&made, api)?;
    api.out.notice(&format!("It is a draft. Offer it with: gpuctl skus activate {} --reason …", cell(&made["name"])));
    Ok(())
}

pub(super) async fn update(change: Update, api: &Api) -> Result<(), Failure> {
    let mut body = json!({});
    if let Some(amount) = &change.price {
        body["price"] = price(amount)?;
    }
    if !change.regions.is_empty() {
        body["allowed_regions"] = json!(change.regions);
    }
    if change.expect_nothing {
        body["expected_hardware"] = json!({});
    } else if let Some(expected) = change.expected.body() {
        body["expected_hardware"] = expected;
    }
    if change.no_minimums || !change.minimums.is_empty() {
        body["validation"] = change.minimums.into_iter().map(|(name, least)| (name, Value::from(least))).collect();
    }
    shown(&api.patch(&path(change.sku.id(&SKU, api).await?), &body).await?, api)
}

pub(super) async fn decide(decision: Decision, verb: &str, api: &Api) -> Result<(), Failure> {
    let role = decision.role.map(|role| match role {
        ApprovalRole::PlatformOperations => "platform_operations".to_owned(),
        ApprovalRole::InventoryOwner => "inventory_owner".to_owned(),
    });
    let given = [
        ("reason", Some(decision.reason)),
        ("role", role),
        ("impact_review", decision.impact_review),
        ("rollback_plan", decision.rollback_plan),
    ];
    let body: Value =
        given.into_iter().filter_map(|(name, value)| Some((name.to_owned(), Value::from(value?)))).collect();
    let decided = api.post(&format!("{}/{verb}", path(decision.sku.id(&SKU, api).await?)), &body).await?;
    shown(&decided, api)?;
    if let Some(notice) = missing_approval(&decided, verb) {
        api.out.notice(&notice);
    }
    Ok(())
}

/// Who has to approve next, where the approval for this change is the first one.
fn missing_approval(sku: &Value, verb: &str) -> Option<String> {
    let approvals = sku["approvals"].as_array()?;
    let first = approvals.iter().find(|given| given["change"] == verb && given["expires_at"].is_string())?;
    let role = match first["role"].as_str()? {
        "inventory_owner" => "platform_operations",
        _ => "inventory_owner",
    };
    Some(format!(
        "It is {} as before: until {} a second person, in role {role}, has to run: gpuctl skus {verb} {} --reason …",
        cell(&sku["status"]),
        cell(&first["expires_at"]),
        cell(&sku["name"])
    ))
}

fn minimum(text: &str) -> Result<(String, u64), String> {
    let parsed = text.split_once('=').and_then(|(name, least)| Some((name.to_owned(), least.parse().ok()?)));
    parsed.ok_or_else(|| "write it as MEASUREMENT=N, such as disk_read_mib_per_second=500".to_owned())
}

/// A price must name its currency, since there is no account to take it from.
fn price(amount: &Amount) -> Result<Value, Failure> {
    let Some(currency) = amount.currency() else {
        return Err(Failure::usage("the price names no currency").next("Write it as \"2.50 EUR\"."));
    };
    let minor = amount.minor(currency).map_err(Failure::usage)?;
    Ok(json!({ "currency": currency, "amount_minor_per_gpu_hour": minor }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_approval_names_the_role_of_the_second_one() {
        let approval =
            |change: &str, role: &str, until: Value| json!({ "change": change, "role": role, "expires_at": until });
        let sku = |approvals: &[Value]| json!({ "name": "h100x8", "status": "draft", "approvals": approvals });
        let first = |role| sku(&[approval("activate", role, json!("2026-11-27T00:00:00Z"))]);
        let notice = missing_approval(&first("platform_operations"), "activate").unwrap();
        assert!(notice.starts_with("It is draft as before: until 2026-11-27"), "{notice}");
        assert!(
            notice.ends_with("in role inventory_owner, has to run: gpuctl skus activate h100x8 --reason …"),
            "{notice}"
        );
        let notice = missing_approval(&first("inventory_owner"), "activate").unwrap();
        assert!(notice.contains("in role platform_operations"), "{notice}");
        // Both approvals are there; the pending one is for another change.
        let both = sku(&[approval("activate", "platform_operations", Value::Null)]);
        assert_eq!(missing_approval(&both, "activate"), None);
        assert_eq!(missing_approval(&first("inventory_owner"), "deactivate"), None);
    }
}
