//! Examples of what goes in and comes out, made from the schemas themselves: a route has them without anybody writing them, and they
//! cannot name a field that is not there.

use serde_json::{Map, Value, json};

/// Deeper than any of our bodies; a schema that refers to itself ends here.
const DEEPEST: usize = 12;

/// What a field of this name, or a schema of this name, looks like. The first that fits the schema's kind is taken.
const LOOKS: &[(&str, &str)] = &[
    ("host", "gpu-17.example.net"),
    ("ssh_username", "gpuaas"),
    ("public_key", "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHljwaG/IIDOAyX8sBd6dFhjytL6vAi5Gh4CqwpunUqG laptop"),
    ("ssh_public_key", "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHljwaG/IIDOAyX8sBd6dFhjytL6vAi5Gh4CqwpunUqG operator"),
    ("fingerprint", "SHA256:nThbg6kXUpJWGl7E1IGOCspRomTxdCARLviKw6E5SY8"),
    ("ssh_key_fingerprint", "SHA256:nThbg6kXUpJWGl7E1IGOCspRomTxdCARLviKw6E5SY8"),
    ("key_fingerprints", "SHA256:nThbg6kXUpJWGl7E1IGOCspRomTxdCARLviKw6E5SY8"),
    ("key_type", "ssh-ed25519"),
    ("sku", "h100-8"),
    ("SkuName", "h100-8"),
    ("SkuRef", "h100-8"),
    ("region_code", "eu-west-1"),
    ("RegionCode", "eu-west-1"),
    ("allowed_regions", "eu-west-1"),
    ("vendor", "NVIDIA"),
    ("model", "H100"),
    ("interconnect", "nvlink"),
    ("currency", "EUR"),
    ("CurrencyCode", "EUR"),
    ("PolicyKey", "allocation.max_concurrent_per_user"),
    ("Reason", "a fan is to be replaced"),
    ("Statement", "Two tenants; both have been told, and can move to h200-8."),
    ("Label", "laptop"),
    ("ResourceName", "training-7"),
    ("ReceiverUrl", "https://receiver.example/hooks"),
    ("EventName", "billing.balance_low"),
    ("user_id", "6f1c0b0e-41f2-4f0e-9d9b-0b8f6f5f2a11"),
    ("owner_user_id", "6f1c0b0e-41f2-4f0e-9d9b-0b8f6f5f2a11"),
    ("created_by", "6f1c0b0e-41f2-4f0e-9d9b-0b8f6f5f2a11"),
    ("ClaimId", "6f1c0b0e-41f2-4f0e-9d9b-0b8f6f5f2a11"),
    ("actor", "user:6f1c0b0e-41f2-4f0e-9d9b-0b8f6f5f2a11"),
    ("correlation_id", "0199e3f4-5c1b-7a00-8000-0c0ffee0c0de"),
    ("uuid", "GPU-5f0d1c2e-8a77-4f0b-9a34-2d6c1b9e7f10"),
    ("status", "ok"),
    ("version", "0.1.0"),
    ("username", "t-0199e3f4"),
    ("kind", "allocation"),
    ("name", "h100-8"),
];

/// The same of whole numbers.
const COUNTS: &[(&str, i64)] = &[
    ("port", 22),
    ("gpus_total", 8),
    ("gpus_free", 6),
    ("count", 8),
    ("gpu_count", 2),
    ("cores", 96),
    ("memory_mib", 81_920),
    ("storage_gib", 7680),
    ("amount_minor_per_gpu_hour", 250),
    ("ttl_seconds", 3600),
    ("queue_seconds", 600),
    ("generation", 7),
    ("value", 40),
];

/// Whether everything is shown, or what has to be given.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Shows {
    /// A request: required fields; all of them where none is.
    Required,
    /// An answer.
    Everything,
}

/// The schemas of the description, to look references up in.
pub(super) struct Schemas(pub(super) Map<String, Value>);

impl Schemas {
    /// An example of what the schema allows; `None` where it says too little.
    pub(super) fn example(&self, schema: &Value, shows: Shows) -> Option<Value> {
        self.of(schema, &[], shows, DEEPEST)
    }

    /// `names`: what it is called, from the most particular on.
    fn of(&self, schema: &Value, names: &[&str], shows: Shows, deepest: usize) -> Option<Value> {
        let deepest = deepest.checked_sub(1)?;
        let listed = |name: &str| schema[name].as_array().and_then(|all| all.first());
        if let Some(given) = schema.get("example").or_else(|| listed("examples")).or_else(|| schema.get("const")) {
            return Some(given.clone());
        }
        if let Some(reference) = schema["$ref"].as_str() {
            let name = reference.rsplit('/').next()?;
            let names: Vec<_> = names.iter().copied().chain([name]).collect();
            return self.of(self.0.get(name)?, &names, shows, deepest);
        }
        if let Some(default) = schema.get("default").filter(|default| !default.is_null()) {
            return Some(default.clone());
        }
        if let Some(choice) = listed("enum") {
            return Some(choice.clone());
        }
        for several in ["oneOf", "anyOf"] {
            if let Some(choices) = schema[several].as_array() {
                let first = choices.iter().find(|choice| choice["type"] != "null")?;
                return self.of(first, names, shows, deepest);
            }
        }
        if let Some(parts) = schema["allOf"].as_array() {
            let parts = parts.iter().filter_map(|part| self.of(part, names, shows, deepest));
            let fields = parts.filter_map(|part| part.as_object().cloned()).flatten();
            return Some(Value::Object(fields.collect()));
        }
        match kind(schema)? {
            "object" => Some(self.object(schema, shows, deepest)),
            "array" => {
                let item = self.of(&schema["items"], names, shows, deepest);
                Some(Value::Array(item.into_iter().collect()))
            }
            "string" => Some(text(schema, names)),
            "integer" | "number" => Some(number(schema, names)),
            "boolean" => Some(json!(false)),
            _ => None,
        }
    }

    fn object(&self, schema: &Value, shows: Shows, deepest: usize) -> Value {
        let required = schema["required"].as_array().map(Vec::as_slice).unwrap_or_default();
        let wanted = |name: &str| {
            shows == Shows::Everything || required.is_empty() || required.iter().any(|needed| needed == name)
        };
        let fields = schema["properties"].as_object().into_iter().flatten();
        let shown = fields
            .filter(|(name, _)| wanted(name))
            .filter_map(|(name, field)| Some((name.clone(), self.of(field, &[name], shows, deepest)?)));
        Value::Object(shown.collect())
    }
}

/// The type of a schema, without `null` beside it.
fn kind(schema: &Value) -> Option<&str> {
    match &schema["type"] {
        Value::String(one) => Some(one),
        Value::Array(several) => several.iter().filter_map(Value::as_str).find(|one| *one != "null"),
        _ => schema["properties"].is_object().then_some("object"),
    }
}

fn text(schema: &Value, names: &[&str]) -> Value {
    match schema["format"].as_str() {
        Some("uuid") => return json!("0199e3f4-5c1b-7a00-8000-3f2a10c0ffee"),
        Some("date-time") => return json!("2026-11-21T12:00:00Z"),
        Some(_) | None => {}
    }
    let mut looks = LOOKS.iter().filter(|(of, _)| names.contains(of)).map(|(_, look)| *look);
    let fits = |look: &&str| schema["maxLength"].as_u64().is_none_or(|most| look.len() as u64 <= most);
    json!(looks.find(fits).unwrap_or("text"))
}

fn number(schema: &Value, names: &[&str]) -> Value {
    let (least, most) = (schema["minimum"].as_i64().unwrap_or(1), schema["maximum"].as_i64().unwrap_or(i64::MAX));
    let count = COUNTS.iter().find(|(of, count)| names.contains(of) && (least..=most).contains(count));
    json!(count.map_or(least.max(1).min(most), |(_, count)| *count))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schemas() -> Schemas {
        let schemas = json!({
            "Reason": { "type": "string", "maxLength": 500 },
            "Port": { "type": "integer", "minimum": 1 },
            "State": { "type": "string", "enum": ["active", "retired"] },
            "Loop": { "type": "object", "properties": { "again": { "$ref": "#/components/schemas/Loop" } } },
        });
        Schemas(schemas.as_object().cloned().unwrap_or_default())
    }

    #[test]
    fn an_example_has_what_the_schema_has() {
        let schema = json!({ "type": "object", "required": ["reason", "port"], "properties": {
            "reason": { "$ref": "#/components/schemas/Reason" },
            "port": { "$ref": "#/components/schemas/Port" },
            "drain": { "type": "boolean" },
            "state": { "oneOf": [{ "type": "null" }, { "$ref": "#/components/schemas/State" }] },
            "ids": { "type": ["array", "null"], "items": { "type": "string", "format": "uuid" } },
        }});
        assert_eq!(
            schemas().example(&schema, Shows::Required),
            Some(json!({ "reason": "a fan is to be replaced", "port": 22 }))
        );
        assert_eq!(
            schemas().example(&schema, Shows::Everything),
            Some(json!({
                "reason": "a fan is to be replaced",
                "port": 22,
                "drain": false,
                "state": "active",
                "ids": ["0199e3f4-5c1b-7a00-8000-3f2a10c0ffee"],
            }))
        );
    }

    #[test]
    fn a_schema_that_refers_to_itself_ends() {
        assert!(schemas().example(&json!({ "$ref": "#/components/schemas/Loop" }), Shows::Everything).is_some());
    }
}
