//! Examples of requests and responses, generated from the schemas: no handler writes one, and none names a field that does not exist.

use serde_json::{Map, Value, json};

/// Deeper than any body of the API; a recursive schema ends here.
const MAX_DEPTH: usize = 12;

/// Example texts by the name of a field or of a schema. The first that fits the schema is taken.
const TEXT_EXAMPLES: &[(&str, &str)] = &[
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
    ("cpu_model", "EPYC 9654"),
    ("driver_version_min", "570.86.15"),
    ("interconnect", "nvlink"),
    ("currency", "EUR"),
    ("CurrencyCode", "EUR"),
    ("PolicyKey", "allocation.max_concurrent_per_user"),
    ("FindingPattern", "xid/79"),
    ("Reason", "a fan is to be replaced"),
    ("review", "pi_3PqXyz:4200:GBP"),
    ("ReviewName", "pi_3PqXyz:4200:GBP"),
    ("Statement", "Two tenants; both are informed and can move to h200-8."),
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

/// The same for whole numbers.
const NUMBER_EXAMPLES: &[(&str, i64)] = &[
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

/// Which fields of an object an example has.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ExampleScope {
    /// A request: required fields; all of them where none is.
    Required,
    /// A response.
    Everything,
}

/// The schemas of the description, to look references up in.
pub(super) struct Schemas(pub(super) Map<String, Value>);

impl Schemas {
    /// An example that the schema allows; `None` where the schema says too little.
    pub(super) fn example(&self, schema: &Value, scope: ExampleScope) -> Option<Value> {
        self.of(schema, &[], scope, MAX_DEPTH)
    }

    /// `names`: the names of the field and its schemas, the most specific first.
    fn of(&self, schema: &Value, names: &[&str], scope: ExampleScope, depth: usize) -> Option<Value> {
        let depth = depth.checked_sub(1)?;
        let listed = |name: &str| schema[name].as_array().and_then(|all| all.first());
        if let Some(given) = schema.get("example").or_else(|| listed("examples")).or_else(|| schema.get("const")) {
            return Some(given.clone());
        }
        if let Some(reference) = schema["$ref"].as_str() {
            let name = reference.rsplit('/').next()?;
            let names: Vec<_> = names.iter().copied().chain([name]).collect();
            return self.of(self.0.get(name)?, &names, scope, depth);
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
                return self.of(first, names, scope, depth);
            }
        }
        if let Some(parts) = schema["allOf"].as_array() {
            let parts = parts.iter().filter_map(|part| self.of(part, names, scope, depth));
            let fields = parts.filter_map(|part| part.as_object().cloned()).flatten();
            return Some(Value::Object(fields.collect()));
        }
        match kind(schema)? {
            "object" => Some(self.object(schema, scope, depth)),
            "array" => {
                let item = self.of(&schema["items"], names, scope, depth);
                Some(Value::Array(item.into_iter().collect()))
            }
            "string" => Some(text(schema, names)),
            "integer" | "number" => Some(number(schema, names)),
            "boolean" => Some(json!(false)),
            _ => None,
        }
    }

    fn object(&self, schema: &Value, scope: ExampleScope, depth: usize) -> Value {
        let required = schema["required"].as_array().map(Vec::as_slice).unwrap_or_default();
        let wanted = |name: &str| {
            scope == ExampleScope::Everything || required.is_empty() || required.iter().any(|needed| needed == name)
        };
        let fields = schema["properties"].as_object().into_iter().flatten();
        let shown = fields
            .filter(|(name, _)| wanted(name))
            .filter_map(|(name, field)| Some((name.clone(), self.of(field, &[name], scope, depth)?)));
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
    let mut examples = TEXT_EXAMPLES.iter().filter(|(of, _)| names.contains(of)).map(|(_, example)| *example);
    let fits = |example: &&str| schema["maxLength"].as_u64().is_none_or(|most| example.len() as u64 <= most);
    json!(examples.find(fits).unwrap_or("text"))
}

fn number(schema: &Value, names: &[&str]) -> Value {
    let (least, most) = (schema["minimum"].as_i64().unwrap_or(1), schema["maximum"].as_i64().unwrap_or(i64::MAX));
    let count = NUMBER_EXAMPLES.iter().find(|(of, count)| names.contains(of) && (least..=most).contains(count));
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
    fn example_has_the_fields_of_the_schema() {
        let schema = json!({ "type": "object", "required": ["reason", "port"], "properties": {
            "reason": { "$ref": "#/components/schemas/Reason" },
            "port": { "$ref": "#/components/schemas/Port" },
            "drain": { "type": "boolean" },
            "state": { "oneOf": [{ "type": "null" }, { "$ref": "#/components/schemas/State" }] },
            "ids": { "type": ["array", "null"], "items": { "type": "string", "format": "uuid" } },
        }});
        assert_eq!(
            schemas().example(&schema, ExampleScope::Required),
            Some(json!({ "reason": "a fan is to be replaced", "port": 22 }))
        );
        assert_eq!(
            schemas().example(&schema, ExampleScope::Everything),
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
    fn example_of_a_recursive_schema_ends() {
        assert!(schemas().example(&json!({ "$ref": "#/components/schemas/Loop" }), ExampleScope::Everything).is_some());
    }
}
