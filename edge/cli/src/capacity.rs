//! Free GPUs by SKU and region.

use crate::api::Api;
use crate::failure::Failure;
use crate::output::Column;
use serde_json::json;

const FREE: [Column; 4] =
    [("SKU", "/sku"), ("REGION", "/region_code"), ("FREE GPUS", "/gpus_free"), ("MOST ON ONE NODE", "/largest_free")];

pub(crate) async fn run(api: &Api) -> Result<(), Failure> {
    let found = api.get("/api/v1/capacity", &[]).await?;
    if api.out.is_json() {
        return api.out.json(&found);
    }
    api.out.list(&json!({ "items": found["items"], "next_page": null }), &FREE)
}
