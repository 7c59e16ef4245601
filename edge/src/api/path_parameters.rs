//! The parameters in the paths of routes, for the API's description: a route's row names them, and the table here says what each is.

use utoipa::openapi::path::{Parameter, ParameterBuilder, ParameterIn};
use utoipa::openapi::schema::{KnownFormat, ObjectBuilder, SchemaFormat, SchemaType, Type};
use utoipa::openapi::{Ref, RefOr, Required, Schema};
use utoipa::{PartialSchema, ToSchema};

use super::request_fields::{ClaimId, GpuUuid, WorkerName};
use crate::app_state::runtime_interface::kinds;
use crate::statement::Month;

/// A parameter of a path.
struct PathParameter {
    /// The parameter and the segment before it, as in the rows of the routes.
    segments: &'static str,
    schema: fn() -> RefOr<Schema>,
    description: &'static str,
    example: Option<&'static str>,
}

#[rustfmt::skip]
const PATH_PARAMETERS: [PathParameter; 32] = [
    id("skus/{id}", "The SKU's id"),
    id("nodes/{id}", "The node's id"),
    id("findings/{finding_id}", "The finding's id"),
    of("gpus/{gpu_uuid}", GpuUuid::schema, "The GPU's UUID, as the driver and the node's agent name it"),
    id("rollouts/{id}", "The rollout's id"),
    id("tasks/{task_id}", "The task's id"),
    id("allocations/{id}", "The allocation's id"),
    id("terminal/{allocation_id}", "The allocation's id"),
    id("terminal-sessions/{id}", "The session's id"),
    id("terminal-sessions/{session_id}", "The session's id"),
    id("sessions/{id}", "The session's id"),
    id("browser-sessions/{id}", "The session's id"),
    id("recordings/{id}", "The terminal session's id"),
    id("recordings/{session_id}", "The terminal session's id"),
    id("payments/{id}", "The payment's id"),
    id("checkout/{payment_id}", "The payment's id"),
    text("terms/{processor_id}", "What the processor calls it, as in the page's address", "pi_1"),
    text("assets/{name}", "The file's name, as the page asks for it", "main.js"),
    id("accounts/{id}", "The account's id"),
    id("processor-events/{id}", "The event's id here"),
    PathParameter { segments: "statements/{month}", schema: Month::schema, description: "The month, in UTC", example: Some("2026-11") },
    id("notification-endpoints/{id}", "The endpoint's id"),
    id("ssh-keys/{id}", "The key's id"),
    of("users/{user_id}", reference::<ClaimId>, "Whose, as the identity provider names them"),
    id("service-accounts/{id}", "The service account's id"),
    id("keys/{key_id}", "The key's id"),
    id("bindings/{id}", "The binding's id"),
    id("policy-values/{id}", "The value's id"),
    of("entities/{kind}", || kinds().into(), "What kind of entity"),
    id("{kind}/{id}", "The entity's id"),
    id("members/{member}", "The member's id, as the tree names it"),
    of("workers/{worker}", WorkerName::schema, "The row's name"),
];

const fn id(segments: &'static str, description: &'static str) -> PathParameter {
    of(segments, uuid, description)
}

const fn text(segments: &'static str, description: &'static str, example: &'static str) -> PathParameter {
    PathParameter { segments, schema: String::schema, description, example: Some(example) }
}

const fn of(segments: &'static str, schema: fn() -> RefOr<Schema>, description: &'static str) -> PathParameter {
    PathParameter { segments, schema, description, example: None }
}

fn uuid() -> RefOr<Schema> {
    let text = ObjectBuilder::new().schema_type(SchemaType::new(Type::String));
    text.format(Some(SchemaFormat::KnownFormat(KnownFormat::Uuid))).into()
}

fn reference<T: ToSchema>() -> RefOr<Schema> {
    RefOr::Ref(Ref::from_schema_name(T::name()))
}

/// The parameters of a path, in its order.
pub(super) fn path_parameters(path: &str) -> Vec<RefOr<Parameter>> {
    let before = path.split('/');
    let names =
        path.split('/').skip(1).map(|segment| segment.strip_prefix('{').and_then(|name| name.strip_suffix('}')));
    let parameters = before.zip(names).filter_map(|(before, name)| Some((before, name?)));
    parameters.map(|(before, name)| RefOr::T(described(path, before, name))).collect()
}

fn described(path: &str, before: &str, name: &str) -> Parameter {
    let segments = format!("{before}/{{{name}}}");
    let found = PATH_PARAMETERS.iter().find(|parameter| parameter.segments == segments);
    assert!(found.is_some(), "PATH_PARAMETERS does not describe {segments} of {path}");
    let parameter = ParameterBuilder::new().name(name).parameter_in(ParameterIn::Path).required(Required::True);
    let parameter = match found {
        Some(found) => parameter
            .schema(Some((found.schema)()))
            .description(Some(found.description))
            .example(found.example.map(Into::into)),
        None => parameter,
    };
    parameter.build()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_described_parameter_is_in_the_path_of_a_route() {
        let api = crate::api::routes().1.complete();
        for parameter in PATH_PARAMETERS {
            let is_used = |path: &String| format!("{path}/").contains(&format!("/{}/", parameter.segments));
            assert!(api.paths.paths.keys().any(is_used), "no route has {}", parameter.segments);
        }
    }
}
