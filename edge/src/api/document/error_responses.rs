//! The error responses of an operation in the description: one response per status, with its error codes.

use std::collections::BTreeMap;

use utoipa::openapi::example::{Example, ExampleBuilder};
use utoipa::openapi::extensions::ExtensionsBuilder;
use utoipa::openapi::{ContentBuilder, Ref, RefOr, ResponseBuilder, Responses, ResponsesBuilder};

use crate::http::error::Code;

/// The extension of a response that lists its codes, for programs.
pub(in crate::api) const CODES: &str = "x-error-codes";

/// The responses for these codes.
pub(in crate::api) fn error_responses(codes: &[Code]) -> Responses {
    let mut by_status = BTreeMap::<u16, Vec<Code>>::new();
    for code in codes {
        let listed = by_status.entry(code.status().as_u16()).or_default();
        if !listed.contains(code) {
            listed.push(*code);
        }
    }
    let mut responses = ResponsesBuilder::new();
    for (status, codes) in by_status {
        let description =
            codes.iter().map(|code| format!("`{code}`: {}", code.meaning())).collect::<Vec<_>>().join("; ");
        let names = codes.iter().map(|code| code.as_str()).collect::<Vec<_>>();
        let examples = names.iter().map(|name| (*name, RefOr::Ref(Ref::new(format!("#/components/examples/{name}")))));
        let content = ContentBuilder::new()
            .schema(Some(RefOr::Ref(Ref::from_schema_name("Error"))))
            .examples_from_iter::<_, _, RefOr<Example>>(examples);
        let response = ResponseBuilder::new()
            .description(description)
            .content("application/json", content.build())
            .extensions(Some(ExtensionsBuilder::new().add(CODES, names.clone()).build()));
        responses = responses.response(status.to_string(), response);
    }
    responses.build()
}

/// An example of a code: its envelope, its causes and its remedy.
pub(super) fn error_example(code: Code) -> Example {
    let value = serde_json::json!({
        "code": code,
        "message": code.remedy(),
        "correlation_id": "0199e3f4-5c1b-7a00-8000-0c0ffee0c0de",
        "details": { "service": "api" },
    });
    ExampleBuilder::new().summary(code.meaning()).description(code.causes().join(" ")).value(Some(value)).build()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_codes_are_grouped_by_status() {
        let responses = error_responses(&[Code::NotFound, Code::NodeInUse, Code::StateConflict, Code::NodeInUse]);
        let json = serde_json::to_value(&responses).unwrap();
        assert_eq!(json.as_object().unwrap().keys().collect::<Vec<_>>(), ["404", "409"]);
        let conflict = json["409"]["description"].as_str().unwrap();
        assert!(conflict.contains("`node_in_use`") && conflict.contains("`state_conflict`"));
        assert_eq!(json["409"][CODES], serde_json::json!(["node_in_use", "state_conflict"]));
        assert_eq!(json["404"]["content"]["application/json"]["schema"]["$ref"], "#/components/schemas/Error");
    }
}
