//! The alerts of the service's monitoring, for administrators.

use crate::api::Api;
use crate::failure::Failure;
use crate::output::Column;
use crate::printable::cell;
use serde_json::{Value, json};

const ALERTS: [Column; 6] = [
    ("SEVERITY", "/severity"),
    ("ALERT", "/name"),
    ("STATE", "/state"),
    ("SINCE", "/since"),
    ("RUNBOOK", "/runbook_id"),
    ("SUMMARY", "/summary"),
];

pub(crate) async fn run(api: &Api) -> Result<(), Failure> {
    let found = api.get("/api/v1/admin/alerts", &[]).await?;
    if api.out.is_json() {
        return api.out.json(&found);
    }
    if found["is_configured"] == json!(false) {
        api.out.notice(
            "No Alertmanager is configured (SVC_ALERTMANAGER_URL), so it is unknown whether something is wrong.",
        );
        return Ok(());
    }
    api.out.list(&json!({ "items": found["items"], "next_page": null }), &ALERTS)?;
    if let Some(more) = remark(&found) {
        api.out.notice(&more);
    }
    Ok(())
}

/// What the list leaves out.
fn remark(found: &Value) -> Option<String> {
    let listed = found["items"].as_array().map_or(0, Vec::len) as u64;
    (found["total"].as_u64()? > listed)
        .then(|| format!("There are {}; the Alertmanager shows all.", cell(&found["total"])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_that_is_cut_says_how_many_there_are() {
        assert_eq!(remark(&json!({ "items": [{}], "total": 1 })), None);
        assert_eq!(
            remark(&json!({ "items": [{}], "total": 700 })).unwrap(),
            "There are 700; the Alertmanager shows all."
        );
    }
}
