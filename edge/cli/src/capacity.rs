//! Free GPUs by SKU and region.

use crate::api::Api;
use crate::failure::Failure;
use crate::output::Column;
use crate::printable::cell;
use crate::resource_ref::items;
use serde_json::{Value, json};

/// The most SKUs that are read.
const MAX_LISTED: usize = 1000;

const FREE: [Column; 4] =
    [("SKU", "/sku"), ("REGION", "/region_code"), ("FREE GPUS", "/gpus_free"), ("MOST ON ONE NODE", "/largest_free")];

pub(crate) async fn run(api: &Api) -> Result<(), Failure> {
    let found = api.get("/api/v1/capacity", &[]).await?;
    if api.out.is_json() {
        return api.out.json(&found);
    }
    api.out.list(&json!({ "items": found["items"], "next_page": null }), &FREE)?;
    // The counts are the answer; the notice is beside it.
    let Ok(offered) = api.list("/api/v1/skus", &[], MAX_LISTED).await else { return Ok(()) };
    if let Some(notice) = without_nodes(items(&found), items(&offered)) {
        api.out.notice(&notice);
    }
    Ok(())
}

/// The offered SKUs that have no node, where there are any: the counts are of nodes.
fn without_nodes(counted: &[Value], offered: &[Value]) -> Option<String> {
    let has_nodes = |sku: &&Value| counted.iter().any(|row| row["sku"] == sku["name"]);
    let without: Vec<_> = offered.iter().filter(|sku| !has_nodes(sku)).map(|sku| cell(&sku["name"])).collect();
    let (last, others) = without.split_last()?;
    let (names, have) =
        if others.is_empty() { (last.clone(), "has") } else { (format!("{} and {last}", others.join(", ")), "have") };
    Some(format!("{names} {have} no nodes, so there is no capacity at present."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offered_sku_without_nodes_is_named() {
        let counted = [json!({ "sku": "h100x8", "gpus_free": 0 })];
        let offered = ["a100x8", "h100x8", "l40x4", "l4x1"].map(|name| json!({ "name": name }));
        assert_eq!(without_nodes(&counted, &offered[1..2]), None, "a full one has nodes");
        let one = without_nodes(&counted, &offered[..2]).unwrap();
        assert_eq!(one, "a100x8 has no nodes, so there is no capacity at present.");
        let more = without_nodes(&counted, &offered).unwrap();
        assert!(more.starts_with("a100x8, l40x4 and l4x1 have no nodes"), "{more}");
    }
}
