//! Turns the page of routes into a router and its description: what every route has in common is said once, here.

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
use super::document::{PROVIDER, SERVICE_ACCOUNT, complete, refusals};
use super::field::LabelSelector;
use crate::body::takes_no_query;
use crate::error::{Code, Envelope};
use crate::idempotency;
use crate::idempotency::keyed::stores_its_answer;
use crate::limits::{Concurrency, RequestTimeout, bounded};
use crate::rate_limit::{Group, in_group};
use crate::reception::{Reception, ReceptionLimits, received};
use crate::services::Services;

/// The name of the security scheme in the description.
const BEARER: &str = "bearer";
/// The credentials of a service account, where they are not in the form.
const CLIENT: &str = "service_account";
/// The operator's token.
const INTERNAL: &str = "internal";

/// How handlers describe a body that may be left out.
const OPTIONAL: &str = "May be left out.";

/// Who may use a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Who {
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
    /// With the operator's own token for this route, where one is configured.
    Internal,
}

/// What a route does with its method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    Get,
    /// It reads so much that it may take longer than others, and few do so at once.
    GetLong,
    /// Repeated, it comes to the same.
    Put,
    Patch,
    Delete,
    /// A repetition with the same `Idempotency-Key` gets the first answer.
    PostOnce,
    /// As `PostOnce`, and refused without a key: a lost answer that is asked for again would be carried out, and paid, twice.
    PostKeyed,
    /// Nothing is stored of it: its answer is a secret, or asking twice is asking once.
    Post,
}

impl Verb {
    const fn name(self) -> &'static str {
        match self {
            Self::Get | Self::GetLong => "GET",
            Self::Put => "PUT",
            Self::Patch => "PATCH",
            Self::Delete => "DELETE",
            Self::PostOnce | Self::PostKeyed | Self::Post => "POST",
        }
    }
}

/// How long a [`Verb::GetLong`] may take: what it adds up, a turn to do so, and what is made of it.
const LONG_READ_WITHIN: Duration = Duration::from_secs(90);
/// How many of these are served, or wait for their turn, at once.
const LONG_READS_AT_ONCE: usize = 64;

/// The largest body that holds credentials, in bytes; a form with an id and a key has some hundreds.
const CREDENTIALS_BYTES: usize = 16 * 1024;
/// How many requests with credentials in their body are served at once, each with its whole body read.
const TOKENS_AT_ONCE: usize = 256;

/// One row of the page.
pub(super) struct Row {
    pub(super) who: Who,
    pub(super) verb: Verb,
    pub(super) path: &'static str,
    /// Whose rate limit holds, where the route asks for a token.
    pub(super) group: Group,
    /// Unique, for generated clients.
    pub(super) operation_id: &'static str,
    pub(super) tag: &'static str,
    /// What it may refuse, beside what follows from its form.
    pub(super) refuses: &'static [Code],
}

/// Goes along with a request to a route that is refused without an `Idempotency-Key`.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeyRequired;

/// Goes along with a request to a route that takes no query parameters.
#[derive(Clone, Copy, Debug)]
pub(super) struct NoQuery;

/// The routes so far.
pub(super) struct Routes {
    open: Router<Services>,
    guarded: Router<Services>,
    long: Router<Services>,
    /// Whoever asks is known by the body alone.
    by_body: Router<Services>,
    api: OpenApi,
}

impl Routes {
    pub(super) fn new() -> Self {
        Self {
            open: Router::new(),
            guarded: Router::new(),
            long: Router::new(),
            by_body: Router::new(),
            api: description(),
        }
    }

    /// Adds a row with its handler, which is described without a path of its own.
    pub(super) fn row(mut self, row: &Row, (schemas, mut paths, handler): UtoipaMethodRouter<Services>) -> Self {
        let described = std::mem::take(&mut paths.paths).into_iter().next().map(|(_, item)| item);
        let mut item = described.unwrap_or_default();
        let operation = operation_mut(&mut item, row.verb);
        assert!(operation.is_some(), "{} {}: its handler is for another method", row.verb.name(), row.path);
        if let Some(operation) = operation {
            describe(operation, row);
        }
        let takes_query = operation_mut(&mut item, row.verb).is_some_and(|operation| takes_query(operation));
        let refuses_query = is_strict(row) && !takes_query;
        paths.paths.insert(row.path.to_owned(), item);
        let mut one = OpenApiRouter::new().routes((schemas, paths, handler));
        self.api.merge(one.to_openapi());
        let (mut router, _) = one.split_for_parts();
        if matches!(row.verb, Verb::PostOnce | Verb::PostKeyed) {
            router = router.route_layer(from_fn(stores_its_answer));
        }
        if row.verb == Verb::PostKeyed {
            router = router.route_layer(Extension(KeyRequired));
        }
        if refuses_query {
            router = match row.who {
                Who::Anyone | Who::Client | Who::Internal => router.route_layer(from_fn(takes_no_query)),
                // Once the caller is known.
                Who::User | Who::Admin | Who::Bound => router.route_layer(Extension(NoQuery)),
            };
        }
        // Operators are answered however busy the rest is.
        if matches!(row.who, Who::Anyone | Who::Internal) {
            self.open = self.open.merge(router);
        } else {
            let limited = router.route_layer(from_fn_with_state(row.group, in_group));
            let routes = match (row.who, row.verb) {
                (Who::Client, _) => &mut self.by_body,
                (_, Verb::GetLong) => &mut self.long,
                _ => &mut self.guarded,
            };
            *routes = std::mem::take(routes).merge(limited);
        }
        self
    }

    /// The router and its description. Who asks for health is answered however busy the rest is.
    pub(super) fn finish(mut self, timeout: RequestTimeout, at_most: Concurrency) -> (Router<Services>, OpenApi) {
        complete(&mut self.api);
        let open = bounded(self.open, timeout, Concurrency::at_most(256));
        let long = bounded(self.long, RequestTimeout(LONG_READ_WITHIN), Concurrency::at_most(LONG_READS_AT_ONCE));
        let by_body = bounded(self.by_body, timeout, Concurrency::at_most(TOKENS_AT_ONCE));
        let by_body = received(by_body, Reception::new(ReceptionLimits::of_bodies_up_to(CREDENTIALS_BYTES)));
        (open.merge(long).merge(by_body).merge(bounded(self.guarded, timeout, at_most)), self.api)
    }
}

fn description() -> OpenApi {
    #[derive(utoipa::OpenApi)]
    #[openapi(info(
        title = "GPU node control plane",
        description = "Rents GPU nodes. Every refusal is one `Error` with a code from a closed table. Lists are read page by \
                       page. A POST with an `Idempotency-Key` is carried out once, however often it is sent within a day."
    ))]
    struct Description;
    let mut api = Description::openapi();
    let components = api.components.get_or_insert_default();
    components.schemas.insert(Envelope::name().into_owned(), Envelope::schema());
    // What is inside of another body's text is not found by way of its route.
    components.schemas.insert(allocation::Transition::name().into_owned(), allocation::Transition::schema());
    // Nor is what a list in a query is of.
    components.schemas.insert(LabelSelector::name().into_owned(), LabelSelector::schema());
    let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).bearer_format("JWT").build();
    components.add_security_scheme(BEARER, SecurityScheme::Http(bearer));
    components
        .add_security_scheme(CLIENT, SecurityScheme::Http(HttpBuilder::new().scheme(HttpAuthScheme::Basic).build()));
    let internal = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).description(Some("The operator's own token."));
    components.add_security_scheme(INTERNAL, SecurityScheme::Http(internal.build()));
    api
}

fn operation_mut(item: &mut PathItem, verb: Verb) -> Option<&mut Operation> {
    match verb {
        Verb::Get | Verb::GetLong => item.get.as_mut(),
        Verb::Put => item.put.as_mut(),
        Verb::PostOnce | Verb::PostKeyed | Verb::Post => item.post.as_mut(),
        Verb::Patch => item.patch.as_mut(),
        Verb::Delete => item.delete.as_mut(),
    }
}

/// Whether unknown query parameters are refused: of the API, always. Pages for people, and what they load, are also reached with what others
/// add to an address.
fn is_strict(row: &Row) -> bool {
    row.path.starts_with("/api/") || row.path.starts_with("/internal/")
}

fn takes_query(operation: &Operation) -> bool {
    let mut parameters = operation.parameters.iter().flatten();
    parameters.any(|parameter| matches!(parameter, RefOr::T(it) if it.parameter_in == ParameterIn::Query))
}

/// Adds what follows from who may use the route and what it takes.
fn describe(operation: &mut Operation, row: &Row) {
    operation.operation_id = Some(row.operation_id.to_owned());
    operation.tags = Some(vec![row.tag.to_owned()]);
    let mut codes = row.refuses.to_vec();
    codes.extend([Code::InternalError, Code::ServiceUnavailable, Code::Overloaded]);
    match row.who {
        Who::Anyone => {}
        Who::Client => {
            codes.extend([Code::Unauthenticated, Code::RateLimited]);
            operation.responses.responses.values_mut().for_each(describe_limit);
            operation.security = Some(vec![SecurityRequirement::default(), requirement(CLIENT)]);
        }
        Who::Internal => {
            codes.extend([Code::Unauthenticated, Code::NotFound, Code::RateLimited]);
            operation.security = Some(vec![requirement(INTERNAL)]);
        }
        Who::User | Who::Admin | Who::Bound => {
            codes.extend([Code::Unauthenticated, Code::Forbidden, Code::RateLimited]);
            operation.responses.responses.values_mut().for_each(describe_limit);
            operation.security = Some([BEARER, PROVIDER, SERVICE_ACCOUNT].map(requirement).to_vec());
        }
    }
    if let Some(RefOr::T(body)) = &mut operation.request_body {
        if body.description.as_deref() == Some(OPTIONAL) {
            body.required = Some(Required::False);
        }
        codes.extend([Code::InvalidRequest, Code::PayloadTooLarge, Code::UnsupportedMediaType]);
    }
    if is_strict(row) || operation.parameters.as_ref().is_some_and(|parameters| !parameters.is_empty()) {
        codes.push(Code::InvalidRequest);
    }
    match row.verb {
        Verb::PostOnce | Verb::PostKeyed => {
            let required = if row.verb == Verb::PostKeyed { Required::True } else { Required::False };
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
        Verb::Post => {
            describe_key(operation, Required::False, "Taken and of no effect: the answer of this route is not stored.");
            codes.push(Code::InvalidRequest);
        }
        Verb::Get | Verb::GetLong | Verb::Put | Verb::Patch | Verb::Delete => {}
    }
    for (status, response) in refusals(&codes).responses {
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
