//! Responses and parameters that several operations have are written once, in the description's `components`, and the operations refer to
//! them. This is done to the finished description: a route states what it has, and not where that is written.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use axum::http::StatusCode;
use serde::Serialize;
use serde_json::Value;
use utoipa::openapi::path::{Parameter, ParameterIn};
use utoipa::openapi::{OpenApi, Ref, RefOr, Response};

use super::common_parts::operations;
use super::error_responses::CODES;

/// Replaces the responses and parameters that the description has more than once by references to its components.
pub(in crate::api) fn share_parts(api: &mut OpenApi) {
    let (mut responses, mut parameters) = (Parts::default(), Parts::default());
    for (path, item) in &mut api.paths.paths {
        for operation in operations(item) {
            for (status, response) in &operation.responses.responses {
                responses.add(response, |response| response_name(status, response));
            }
            for parameter in operation.parameters.iter().flatten() {
                parameters.add(parameter, |parameter| parameter_name(path, parameter));
            }
        }
    }
    let (responses, parameters) = (responses.shared("responses"), parameters.shared("parameters"));
    for operation in api.paths.paths.values_mut().flat_map(operations) {
        operation.responses.responses.values_mut().for_each(|response| responses.refer(response));
        operation.parameters.iter_mut().flatten().for_each(|parameter| parameters.refer(parameter));
    }
    let components = api.components.get_or_insert_default();
    components.responses.extend(responses.into_components());
    components.parameters.extend(parameters.into_components());
}

/// The parts of one kind in the description.
struct Parts<T> {
    /// By their JSON.
    found: BTreeMap<String, FoundPart<T>>,
}

struct FoundPart<T> {
    /// The name that it would have, if no other part had it.
    name: String,
    uses: usize,
    part: RefOr<T>,
}

impl<T> Default for Parts<T> {
    fn default() -> Self {
        Self { found: BTreeMap::new() }
    }
}

impl<T: Serialize + Clone> Parts<T> {
    fn add(&mut self, part: &RefOr<T>, name: impl FnOnce(&T) -> String) {
        if let (RefOr::T(described), Some(json)) = (part, json(part)) {
            let found = || FoundPart { name: name(described), uses: 0, part: part.clone() };
            self.found.entry(json).or_insert_with(found).uses += 1;
        }
    }

    /// Those that are used more than once. Of several with one name, the one with the most uses has the name as it is, so that another
    /// route seldom renames them; the others have a number too.
    fn shared(self, section: &'static str) -> SharedParts<T> {
        let mut shared: Vec<_> = self.found.into_iter().filter(|(_, found)| found.uses > 1).collect();
        shared.sort_by(|(json, one), (other_json, other)| {
            (&one.name, Reverse(one.uses), json).cmp(&(&other.name, Reverse(other.uses), other_json))
        });
        let mut taken = BTreeMap::<String, usize>::new();
        let parts = shared.into_iter().map(|(json, FoundPart { name, part, .. })| {
            let number = taken.entry(name.clone()).or_default();
            *number += 1;
            let name = if *number == 1 { name } else { format!("{name}.{number}") };
            (json, (name, part))
        });
        SharedParts { section, parts: parts.collect() }
    }
}

/// The parts of one kind that become components.
struct SharedParts<T> {
    section: &'static str,
    /// By their JSON: the name of the component, and the part.
    parts: BTreeMap<String, (String, RefOr<T>)>,
}

impl<T: Serialize> SharedParts<T> {
    fn refer(&self, part: &mut RefOr<T>) {
        if let Some((name, _)) = json(part).and_then(|json| self.parts.get(&json)) {
            *part = RefOr::Ref(Ref::new(format!("#/components/{}/{name}", self.section)));
        }
    }

    fn into_components(self) -> impl Iterator<Item = (String, RefOr<T>)> {
        self.parts.into_values()
    }
}

/// A part as JSON with sorted fields, by which equal parts are equal; `None` for a part that is a reference already.
fn json<T: Serialize>(part: &RefOr<T>) -> Option<String> {
    match part {
        RefOr::T(part) => Some(serde_json::to_value(part).ok()?.to_string()),
        RefOr::Ref(_) => None,
    }
}

/// An error response is named by its codes: `unauthenticated_or_session_ended`. Another one by its content and its status: `Node.200`.
fn response_name(status: &str, response: &Response) -> String {
    let codes = response.extensions.as_ref().and_then(|extensions| extensions.get(CODES)).and_then(Value::as_array);
    if let Some(codes) = codes {
        return codes.iter().filter_map(Value::as_str).collect::<Vec<_>>().join("_or_");
    }
    let content = response.content.iter().next().map(|(media_type, content)| {
        let schema = match content {
            RefOr::T(content) => content.schema.as_ref(),
            RefOr::Ref(_) => None,
        };
        match schema {
            Some(RefOr::Ref(schema)) => last_part(&schema.ref_location),
            Some(RefOr::T(_)) | None => last_part(media_type),
        }
    });
    let content = content.unwrap_or_else(|| {
        let status = StatusCode::from_bytes(status.as_bytes()).ok();
        status.and_then(|status| status.canonical_reason()).unwrap_or("Response").to_owned()
    });
    component_name(&format!("{content}.{status}"))
}

/// A parameter is named as it is; one of a path after what it is in too, since most are called `id`: `nodes.id`.
fn parameter_name(path: &str, parameter: &Parameter) -> String {
    let placeholder = format!("{{{}}}", parameter.name);
    let before = path.split('/').zip(path.split('/').skip(1)).find(|(_, part)| *part == placeholder);
    match before.filter(|_| parameter.parameter_in == ParameterIn::Path) {
        Some((before, _)) => component_name(&format!("{}.{}", before.trim_matches(['{', '}']), parameter.name)),
        None => component_name(&parameter.name),
    }
}

fn last_part(path: &str) -> String {
    path.rsplit('/').next().unwrap_or(path).to_owned()
}

/// The characters that the name of a component may have (OpenAPI 3.1, *Components Object*).
fn component_name(name: &str) -> String {
    let allowed = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '.' | '-' | '_');
    name.chars().map(|letter| if allowed(letter) { letter } else { '_' }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use utoipa::openapi::path::{OperationBuilder, ParameterBuilder};
    use utoipa::openapi::{HttpMethod, InfoBuilder, PathItem, PathsBuilder, Required, ResponseBuilder};

    #[test]
    fn parts_of_several_operations_are_components_and_others_stay() {
        let parameter = |name: &str, required: Required| {
            let place = if name == "id" { ParameterIn::Path } else { ParameterIn::Query };
            ParameterBuilder::new().name(name).parameter_in(place).required(required).build()
        };
        let item = |parameters: &[Parameter], described: &str| {
            let operation = parameters.iter().fold(OperationBuilder::new(), |it, one| it.parameter(one.clone()));
            let gone = ResponseBuilder::new().description("It is gone.").build();
            let own = ResponseBuilder::new().description(described).build();
            PathItem::new(HttpMethod::Get, operation.response("204", gone).response("200", own).build())
        };
        let id = parameter("id", Required::True);
        let paths = PathsBuilder::new()
            .path("/a/{id}", item(&[id.clone(), parameter("limit", Required::True)], "A."))
            .path("/b/{id}", item(&[id, parameter("limit", Required::False)], "B."))
            .path("/c", item(&[parameter("limit", Required::True), parameter("own", Required::True)], "C."))
            .path("/d", item(&[parameter("limit", Required::False)], "D."))
            .path("/e", item(&[parameter("limit", Required::False)], "E."));
        let mut api = OpenApi::new(InfoBuilder::new().title("t").version("1").build(), paths.build());
        share_parts(&mut api);
        let api = serde_json::to_value(&api).unwrap();

        let names = |section: &str| api["components"][section].as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        assert_eq!(names("responses"), ["No_Content.204"]);
        // Three routes have `limit` when it is optional, two when it is required.
        assert_eq!(names("parameters"), ["a.id", "limit", "limit.2"]);
        assert_eq!(api["components"]["parameters"]["limit"]["required"], false);
        let at = |path: &str| &api["paths"][path]["get"];
        assert_eq!(at("/b/{id}")["parameters"][0]["$ref"], "#/components/parameters/a.id");
        assert_eq!(at("/c")["parameters"][0]["$ref"], "#/components/parameters/limit.2");
        assert_eq!(at("/c")["parameters"][1]["name"], "own");
        assert_eq!(at("/d")["responses"]["204"]["$ref"], "#/components/responses/No_Content.204");
        assert_eq!(at("/d")["responses"]["200"]["description"], "D.");
    }
}
