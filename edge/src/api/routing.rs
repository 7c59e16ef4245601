//! Turns the table of routes into a router and its OpenAPI description. What all routes have in common is here.

use std::time::Duration;

use axum::middleware::{from_fn, from_fn_with_state};
use axum::{Extension, Router};
use utoipa::openapi::header::HeaderBuilder;
use utoipa::openapi::path::{Operation, ParameterBuilder, ParameterIn, PathItem};
use utoipa::openapi::schema::{ObjectBuilder, SchemaType, Type};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{OpenApi, RefOr, Required, Response};
use utoipa::{OpenApi as _, PartialSchema as _, ToSchema as _};
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouter};

use super::allocation;
use super::deprecation::Deprecation;
use super::document::{PROVIDER, SERVICE_ACCOUNT, add_common_parts, error_responses};
use super::path_parameters::path_parameters;
use super::request_fields::LabelSelector;
use crate::api::idempotency;
use crate::api::idempotency::request_layer::store_response;
use crate::app_state::AppState;
use crate::http::error::{Code, Envelope};
use crate::http::request_body::reject_query;
use crate::http::router_layers::{Concurrency, RequestTimeout, bounded};
use crate::limits::body_admission::{BodyAdmission, BodyAdmissionLimits, admit_bodies};
use crate::limits::rate_limit::{RateLimitGroup, in_group};

/// The security scheme for access tokens in the description.
const BEARER: &str = "bearer";
/// The security scheme for a service account's credentials in the header, where they are not in the form.
const CLIENT_CREDENTIALS: &str = "service_account";
/// The security scheme for the operator's token.
const INTERNAL: &str = "internal";

/// The description of a body that is optional, as the handlers write it.
const OPTIONAL_BODY: &str = "May be left out.";

/// Which callers may use a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// Without a token.
    Anyone,
    /// With the role `user` or `admin`.
    User,
    /// With the role `admin`.
    Admin,
    /// With a platform role that is bound here; being an administrator is not enough.
    Bound,
    /// With the id and a key of a service account, in the form or by HTTP Basic (RFC 6749, section 2.3.1).
    Client,
    /// With the operator's token for this route, where one is configured.
    Internal,
}

/// The method of a route, and how repetitions and long reads are treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RouteKind {
    Get,
    /// A long read: its timeout is longer, and few run concurrently.
    GetLong,
    /// Idempotent by nature.
    Put,
    Patch,
    Delete,
    /// A repetition with the same `Idempotency-Key` gets the stored response.
    PostOnce,
    /// As `PostOnce`, and refused without a key: a request that is repeated after a lost response would otherwise be executed, and paid,
    /// twice.
    PostKeyed,
    /// No response is stored: it is a secret, or the request is idempotent by nature.
    Post,
}

impl RouteKind {
    const fn method(self) -> &'static str {
        match self {
            Self::Get | Self::GetLong => "GET",
            Self::Put => "PUT",
            Self::Patch => "PATCH",
            Self::Delete => "DELETE",
            Self::PostOnce | Self::PostKeyed | Self::Post => "POST",
        }
    }
}

/// The timeout of a [`RouteKind::GetLong`]: waiting for a permit, the sums, and rendering the result.
const LONG_READ_TIMEOUT: Duration = Duration::from_secs(90);
/// How many of these are served, or wait for a permit, concurrently.
const MAX_CONCURRENT_LONG_READS: usize = 64;

/// The largest body that holds credentials, in bytes; a form with an id and a key has some hundreds.
const MAX_CREDENTIALS_BYTES: usize = 16 * 1024;
/// How many requests with credentials in their body are served concurrently, each with its whole body in memory.
const MAX_CONCURRENT_TOKEN_REQUESTS: usize = 256;

/// One row of the table of routes.
pub(super) struct Row {
    pub(super) access: Access,
    pub(super) kind: RouteKind,
    pub(super) path: &'static str,
    /// The rate-limit group, where the route requires a token.
    pub(super) group: RateLimitGroup,
    /// Unique, for generated clients.
    pub(super) operation_id: &'static str,
    pub(super) tag: &'static str,
    /// Error codes beside those that follow from the access and the kind.
    pub(super) refuses: &'static [Code],
}

/// An extension of requests to routes that require an `Idempotency-Key`.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeyRequired;

/// An extension of requests to routes that take no query parameters.
#[derive(Clone, Copy, Debug)]
pub(super) struct NoQuery;

/// A builder of the router and its description.
pub(super) struct Routes {
    deprecations: &'static [Deprecation],
    open: Router<AppState>,
    guarded: Router<AppState>,
    long: Router<AppState>,
    /// Routes that authenticate the caller by credentials in the body.
    form_credentials: Router<AppState>,
    api: OpenApi,
}

impl Routes {
    pub(super) fn new(deprecations: &'static [Deprecation]) -> Self {
        Self {
            deprecations,
            open: Router::new(),
            guarded: Router::new(),
            long: Router::new(),
            form_credentials: Router::new(),
            api: description(),
        }
    }

    /// Adds a row with its handler. The handler's own description has no path and no parameters in it; the row has them.
    pub(super) fn row(mut self, row: &Row, (schemas, mut paths, handler): UtoipaMethodRouter<AppState>) -> Self {
        let described = std::mem::take(&mut paths.paths).into_iter().next().map(|(_, item)| item);
        let mut item = described.unwrap_or_default();
        let operation = operation_mut(&mut item, row.kind);
        assert!(operation.is_some(), "{} {}: its handler is for another method", row.kind.method(), row.path);
        let deprecation = self.deprecations.iter().find(|it| it.is_of(row.kind.method(), row.path));
        if let Some(operation) = operation {
            describe(operation, row);
            if let Some(deprecation) = deprecation {
                deprecation.describe(operation);
            }
        }
        let takes_query = operation_mut(&mut item, row.kind).is_some_and(|operation| takes_query(operation));
        let refuses_query = is_strict(row) && !takes_query;
        paths.paths.insert(row.path.to_owned(), item);
        let mut route = OpenApiRouter::new().routes((schemas, paths, handler));
        self.api.merge(route.to_openapi());
        let (mut router, _) = route.split_for_parts();
        if matches!(row.kind, RouteKind::PostOnce | RouteKind::PostKeyed) {
            router = router.route_layer(from_fn(store_response));
        }
        if row.kind == RouteKind::PostKeyed {
            router = router.route_layer(Extension(KeyRequired));
        }
        if refuses_query {
            router = match row.access {
                Access::Anyone | Access::Client | Access::Internal => router.route_layer(from_fn(reject_query)),
                // Refused after authentication.
                Access::User | Access::Admin | Access::Bound => router.route_layer(Extension(NoQuery)),
            };
        }
        // Open routes have limits of their own, so that load on the others does not block operators.
        if matches!(row.access, Access::Anyone | Access::Internal) {
            self.open = self.open.merge(Deprecation::announced(deprecation, router));
        } else {
            let limited = router.route_layer(from_fn_with_state(row.group, in_group));
            let routes = match (row.access, row.kind) {
                (Access::Client, _) => &mut self.form_credentials,
                (_, RouteKind::GetLong) => &mut self.long,
                _ => &mut self.guarded,
            };
            *routes = std::mem::take(routes).merge(Deprecation::announced(deprecation, limited));
        }
        self
    }

    /// The router and its description. Health checks are answered however loaded the other routes are.
    pub(super) fn finish(
        self,
        timeout: RequestTimeout,
        concurrency: Concurrency,
    ) -> (Router<AppState>, RowDescriptions) {
        let open = bounded(self.open, timeout, Concurrency::at_most(256));
        let long =
            bounded(self.long, RequestTimeout(LONG_READ_TIMEOUT), Concurrency::at_most(MAX_CONCURRENT_LONG_READS));
        let form_credentials =
            bounded(self.form_credentials, timeout, Concurrency::at_most(MAX_CONCURRENT_TOKEN_REQUESTS));
        let form_credentials = admit_bodies(
            form_credentials,
            BodyAdmission::new(BodyAdmissionLimits::of_bodies_up_to(MAX_CREDENTIALS_BYTES)),
        );
        let router = open.merge(long).merge(form_credentials).merge(bounded(self.guarded, timeout, concurrency));
        (router, RowDescriptions(self.api))
    }
}

/// The description as the rows have it. The parts that all operations have in common are added when the description is read: they take half
/// of the time in which a router is made.
pub(super) struct RowDescriptions(OpenApi);

impl RowDescriptions {
    pub(super) fn complete(self) -> OpenApi {
        let Self(mut api) = self;
        add_common_parts(&mut api);
        api
    }
}

fn description() -> OpenApi {
    #[derive(utoipa::OpenApi)]
    #[openapi(info(
        title = "GPU node control plane",
        description = "Rents GPU nodes. Every refusal is one `Error` with a code from a closed table. Lists are read page by \
                       page. A POST with an `Idempotency-Key` is carried out once, however often it is sent while \
                       its key is stored: a day, or as policy `retention.command_ids_hours` says."
    ))]
    struct Description;
    let mut api = Description::openapi();
    let components = api.components.get_or_insert_default();
    components.schemas.insert(Envelope::name().into_owned(), Envelope::schema());
    // A schema that is embedded as text in another body is not found through its route.
    components.schemas.insert(allocation::Transition::name().into_owned(), allocation::Transition::schema());
    // Neither is the item schema of a list in a query.
    components.schemas.insert(LabelSelector::name().into_owned(), LabelSelector::schema());
    let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).bearer_format("JWT").build();
    components.add_security_scheme(BEARER, SecurityScheme::Http(bearer));
    components.add_security_scheme(
        CLIENT_CREDENTIALS,
        SecurityScheme::Http(HttpBuilder::new().scheme(HttpAuthScheme::Basic).build()),
    );
    let internal = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).description(Some("The operator's own token."));
    components.add_security_scheme(INTERNAL, SecurityScheme::Http(internal.build()));
    api
}

fn operation_mut(item: &mut PathItem, kind: RouteKind) -> Option<&mut Operation> {
    match kind {
        RouteKind::Get | RouteKind::GetLong => item.get.as_mut(),
        RouteKind::Put => item.put.as_mut(),
        RouteKind::PostOnce | RouteKind::PostKeyed | RouteKind::Post => item.post.as_mut(),
        RouteKind::Patch => item.patch.as_mut(),
        RouteKind::Delete => item.delete.as_mut(),
    }
}

/// Whether unknown query parameters are refused: always for the API. Browser pages and their assets accept them, since other sites add
/// parameters to links.
fn is_strict(row: &Row) -> bool {
    row.path.starts_with("/api/") || row.path.starts_with("/internal/")
}

fn takes_query(operation: &Operation) -> bool {
    let mut parameters = operation.parameters.iter().flatten();
    parameters.any(|parameter| matches!(parameter, RefOr::T(it) if it.parameter_in == ParameterIn::Query))
}

/// Adds the parameters, the security, the error codes and the headers that follow from the row.
fn describe(operation: &mut Operation, row: &Row) {
    operation.operation_id = Some(row.operation_id.to_owned());
    operation.tags = Some(vec![row.tag.to_owned()]);
    let in_path = path_parameters(row.path);
    if !in_path.is_empty() {
        operation.parameters.get_or_insert_default().splice(..0, in_path);
    }
    let mut codes = row.refuses.to_vec();
    codes.extend([Code::InternalError, Code::ServiceUnavailable, Code::Overloaded]);
    match row.access {
        Access::Anyone => {}
        Access::Client => {
            codes.extend([Code::Unauthenticated, Code::RateLimited]);
            operation.responses.responses.values_mut().for_each(describe_limit);
            operation.security = Some(vec![SecurityRequirement::default(), requirement(CLIENT_CREDENTIALS)]);
        }
        Access::Internal => {
            codes.extend([Code::Unauthenticated, Code::NotFound, Code::RateLimited]);
            operation.security = Some(vec![requirement(INTERNAL)]);
        }
        Access::User | Access::Admin | Access::Bound => {
            codes.extend([Code::Unauthenticated, Code::SessionEnded, Code::Forbidden, Code::RateLimited]);
            operation.responses.responses.values_mut().for_each(describe_limit);
            operation.security = Some([BEARER, PROVIDER, SERVICE_ACCOUNT].map(requirement).to_vec());
        }
    }
    if let Some(RefOr::T(body)) = &mut operation.request_body {
        if body.description.as_deref() == Some(OPTIONAL_BODY) {
            body.required = Some(Required::False);
        }
        codes.extend([Code::InvalidRequest, Code::PayloadTooLarge, Code::UnsupportedMediaType]);
    }
    if is_strict(row) || operation.parameters.as_ref().is_some_and(|parameters| !parameters.is_empty()) {
        codes.push(Code::InvalidRequest);
    }
    match row.kind {
        RouteKind::PostOnce | RouteKind::PostKeyed => {
            let required = if row.kind == RouteKind::PostKeyed { Required::True } else { Required::False };
            describe_key(
                operation,
                required,
                "A value of the caller's own: a repetition with it gets the first answer.",
            );
            for response in operation.responses.responses.values_mut() {
                describe_replay(response);
            }
            codes.extend([Code::InvalidRequest, Code::IdempotencyInProgress, Code::IdempotencyKeyReused]);
        }
        RouteKind::Post => {
            describe_key(operation, Required::False, "Taken and of no effect: the answer of this route is not stored.");
            codes.push(Code::InvalidRequest);
        }
        RouteKind::Get | RouteKind::GetLong | RouteKind::Put | RouteKind::Patch | RouteKind::Delete => {}
    }
    for (status, response) in error_responses(&codes).responses {
        operation.responses.responses.entry(status).or_insert(response);
    }
}

fn requirement(scheme: &str) -> SecurityRequirement {
    SecurityRequirement::new::<_, [&str; 0], &str>(scheme, [])
}

fn describe_replay(response: &mut RefOr<Response>) {
    if let RefOr::T(response) = response {
        let header = HeaderBuilder::new().description(Some("`true` where this answer was given before."));
        response.headers.insert("Idempotency-Replayed".to_owned(), RefOr::T(header.build()));
    }
}

fn describe_limit(response: &mut RefOr<Response>) {
    if let RefOr::T(response) = response {
        for (name, what) in [
            ("RateLimit-Policy", "The limit: `\"api\";q=120;w=60` is 120 requests in 60 seconds."),
            ("RateLimit", "What is left of it, and the seconds until all of it is there again: `\"api\";r=119;t=1`."),
        ] {
            let header = HeaderBuilder::new().description(Some(what));
            response.headers.insert(name.to_owned(), RefOr::T(header.build()));
        }
    }
}

fn describe_key(operation: &mut Operation, required: Required, what: &str) {
    let text = ObjectBuilder::new()
        .schema_type(SchemaType::new(Type::String))
        .min_length(Some(1))
        .max_length(Some(idempotency::MAX_LEN))
        .pattern(Some(idempotency::PATTERN));
    let key = ParameterBuilder::new()
        .name("Idempotency-Key")
        .parameter_in(ParameterIn::Header)
        .required(required)
        .description(Some(what))
        .schema(Some(text));
    operation.parameters.get_or_insert_default().push(RefOr::T(key.build()));
}
