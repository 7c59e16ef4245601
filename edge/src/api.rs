//! The public API: one table of routes, one file per noun (decisions 4, 5 and 7).
//!
//! | module | what |
//! | --- | --- |
//! | `allocation`, `capacity`, `sku`, `ssh_key`, `terminal`, `recording` | what tenants rent and use |
//! | `billing`, `payment`, `refund`, `statement`, `processor_event` | what they pay |
//! | `node`, `alert`, `fleet_history`, `health_rule`, `rollout`, `telemetry` | the fleet |
//! | `overview`, `runtime`, `policy`, `audit`, `key_set`, `platform_role` | the running service and its rules |
//! | `me`, `access_token`, `service_account`, `browser_session`, `notification`, `notification_endpoint` | the caller, and how the service reaches them |
//! | `health`, `internal`, `identity_keys`, `protected_resource` | for probes, other programs and the operator's tokens |
//! | `browser_page`, `console_files`, `payment_page`, `terminal_page` | pages for browsers |
//! | `routing`, `document`, `deprecation`, `path_parameters` | the table of routes as a router and as a description |
//! | `request_context`, `request_fields`, `idempotency`, `commands_with_reason` | the way of a request to a state machine |
//! | `cached_read`, `rejection_response` | reads that requests share; the responses to rejected commands |

mod access_token;
mod alert;
mod allocation;
mod audit;
mod billing;
mod browser_page;
mod browser_session;
mod cached_read;
mod capacity;
mod commands_with_reason;
#[cfg(feature = "console")]
mod console_files;
mod deprecation;
mod document;
mod fleet_history;
mod health;
mod health_rule;
pub mod idempotency;
mod identity_keys;
mod internal;
mod key_set;
mod me;
pub(crate) mod node;
mod notification;
mod notification_endpoint;
mod overview;
mod path_parameters;
mod payment;
mod payment_page;
mod platform_role;
mod policy;
mod processor_event;
mod protected_resource;
mod recording;
mod refund;
mod rejection_response;
mod request_context;
pub(crate) mod request_fields;
mod rollout;
mod routing;
mod runtime;
mod service_account;
mod sku;
mod ssh_key;
mod statement;
mod telemetry;
mod terminal;
mod terminal_page;
#[cfg(test)]
mod tests;

pub use node::machine_provider;

use crate::app_state::AppState;
use crate::http::correlation::Service;
use crate::http::error::Code;
use crate::http::router_layers::{Concurrency, RequestTimeout, bounded, with_common_layers};
use crate::limits::rate_limit::RateLimitGroup;
use axum::routing::get;
use axum::{Extension, Router};
use deprecation::{DEPRECATIONS, Deprecation};
use routing::{Access, RouteKind, Routes, Row, RowDescriptions};
use std::time::Duration;
use utoipa_axum::routes;

/// The timeout of a request, up to the head of its response: a command, the saga's first reply to it, and some reads.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(20);
/// How many requests are served concurrently.
const MAX_CONCURRENT_REQUESTS: usize = 1024;
/// The same, on the operators' listener.
const MAX_CONCURRENT_OPERATOR_REQUESTS: usize = 64;

/// The public API, ready to be served.
pub fn router(app: AppState) -> Router {
    served(routes(), app)
}

fn served((router, descriptions): (Router<AppState>, RowDescriptions), app: AppState) -> Router {
    let scope_settings = app.scope_settings(Service { name: "api", shows_route: false });
    #[cfg(feature = "console")]
    let router = router.merge(console_files::router());
    let router = router
        .layer(Extension(document::Document::of(descriptions, &app)))
        .layer(Extension(access_token::FailedAttempts::default()))
        .layer(Extension(capacity::CapacityCache::default()))
        .layer(Extension(alert::AlertCache::default()))
        .with_state(app);
    with_common_layers(router, scope_settings)
}

/// The operators' listener of a process, whatever its roles: metrics, health, stats. It is served in clear text, on an address that only
/// the operator reaches.
pub fn operations(app: AppState) -> Router {
    let scope_settings = app.scope_settings(Service { name: "operations", shows_route: false });
    let router = Router::new()
        .route("/metrics", get(health::metrics_page))
        .route("/api/v1/healthz", get(health::healthz))
        .route("/api/v1/readyz", get(health::readiness))
        .route("/api/v1/internal/stats", get(internal::stats));
    let router =
        bounded(router, RequestTimeout(REQUEST_TIMEOUT), Concurrency::at_most(MAX_CONCURRENT_OPERATOR_REQUESTS));
    with_common_layers(router.with_state(app), scope_settings)
}

/// A row: the access, the kind, the path (and the rate-limit group, where it is not `Api`) => the handler, and the error codes beside
/// those of every route of its kind.
macro_rules! route_table {
    (of $deprecations:ident; $($access:ident $kind:ident $path:literal $(($group:ident))? => $noun:ident :: $handler:ident $(, $refuses:ident)*;)+) => {
        Routes::new($deprecations)$(.row(
            &Row {
                access: Access::$access,
                kind: RouteKind::$kind,
                path: $path,
                group: group!($($group)?),
                operation_id: concat!(stringify!($noun), "_", stringify!($handler)),
                tag: stringify!($noun),
                refuses: &[$(Code::$refuses),*],
            },
            routes!($noun::$handler),
        ))+
    };
}

macro_rules! group {
    () => {
        RateLimitGroup::Api
    };
    ($group:ident) => {
        RateLimitGroup::$group
    };
}

fn routes() -> (Router<AppState>, RowDescriptions) {
    routes_deprecating(DEPRECATIONS)
}

#[rustfmt::skip]
fn routes_deprecating(deprecations: &'static [Deprecation]) -> (Router<AppState>, RowDescriptions) {
    route_table! {
        of deprecations;
        Anyone Get       "/api/v1/healthz"                                  => health::healthz;
        Internal Get     "/api/v1/readyz"                                   => health::readyz;
        Internal Get     "/metrics"                                         => health::metrics;
        Anyone Get       "/.well-known/oauth-protected-resource"            => protected_resource::metadata;
        Anyone Get       "/api/v1/openapi.json"                             => document::openapi;
        Anyone Get       "/api/v1/docs"                                     => document::page;
        Anyone Get       "/api/v1/docs/reader.js"                           => document::reader;
        Internal Get     "/api/v1/internal/stats"                           => internal::stats;

        User   Get       "/api/v1/me"                                       => me::get;
        User   Get       "/api/v1/me/sessions"                              => browser_session::list_own;
        User   PostOnce  "/api/v1/me/sessions/{id}/end"                     => browser_session::end_own, NotFound;
        Admin  Get       "/api/v1/admin/browser-sessions"                   => browser_session::list;
        Admin  PostOnce  "/api/v1/admin/browser-sessions/{id}/end"          => browser_session::end, NotFound;

        User   Get       "/api/v1/skus"                                     => sku::offered;
        User   Get       "/api/v1/capacity"                                 => capacity::free;
        Admin  Get       "/api/v1/admin/skus"                               => sku::list;
        Admin  PostOnce  "/api/v1/admin/skus"                               => sku::create, StateConflict;
        Admin  Get       "/api/v1/admin/skus/{id}"                          => sku::get, NotFound;
        Admin  Patch     "/api/v1/admin/skus/{id}"                          => sku::revise, NotFound;
        Bound  PostOnce  "/api/v1/admin/skus/{id}/activate"                 => sku::activate, NotFound, StateConflict;
        Bound  PostOnce  "/api/v1/admin/skus/{id}/deprecate"                => sku::deprecate, NotFound, StateConflict;
        Bound  PostOnce  "/api/v1/admin/skus/{id}/deactivate"               => sku::deactivate, NotFound, StateConflict;

        Admin  Get       "/api/v1/admin/nodes"                              => node::list;
        Admin  PostOnce  "/api/v1/admin/nodes"                              => node::create, ProbeTargetDenied;
        Admin  Get       "/api/v1/admin/nodes/{id}"                         => node::get, NotFound;
        Admin  Patch     "/api/v1/admin/nodes/{id}"                         => node::revise, NotFound, StateConflict, ProbeTargetDenied;
        Admin  Post      "/api/v1/admin/nodes/{id}/enrollment-token"        => node::issue_token, NotFound;
        Admin  Post      "/api/v1/admin/nodes/{id}/reissue-enrollment"      => node::reissue_enrollment, NotFound;
        Admin  Post      "/api/v1/admin/nodes/{id}/bootstrap-script"        => node::write_script, NotFound;
        Admin  PostOnce  "/api/v1/admin/nodes/{id}/retire"                  => node::retire, NotFound, NodeInUse;
        Admin  PostOnce  "/api/v1/admin/nodes/{id}/reactivate"              => node::reactivate, NotFound, StateConflict;
        Admin  PostOnce  "/api/v1/admin/nodes/{id}/remove"                  => node::remove, NotFound;
        Admin  PostOnce  "/api/v1/admin/nodes/{id}/quarantine"              => node::quarantine, NotFound;
        Admin  PostOnce  "/api/v1/admin/nodes/{id}/release-quarantine"      => node::release_quarantine, NotFound, StateConflict;
        Admin  PostOnce  "/api/v1/admin/nodes/{id}/reimage"                 => node::reimage, NotFound, StateConflict, NodeInUse;
        Admin  Get       "/api/v1/admin/nodes/{id}/tasks"                   => node::tasks, NotFound;
        Admin  PostOnce  "/api/v1/admin/nodes/{id}/tasks"                   => node::order_task, NotFound, StateConflict;
        Admin  PostOnce  "/api/v1/admin/nodes/{id}/validate"                => node::validate, NotFound, NodeInUse, StateConflict;
        Admin  PostOnce  "/api/v1/admin/nodes/{id}/update-agent"            => node::update_agent, NotFound, StateConflict;
        Admin  PostOnce  "/api/v1/admin/nodes/{id}/gpus/{gpu_uuid}/reset"   => node::reset_gpu, NotFound, NodeInUse, StateConflict;
        Admin  PostOnce  "/api/v1/admin/nodes/{id}/findings/{finding_id}/clear" => node::clear_finding, NotFound;
        Admin  PostOnce  "/api/v1/admin/nodes/{id}/tasks/{task_id}/resume"  => node::resume_task, NotFound, StateConflict;

        Admin  Get       "/api/v1/admin/rollouts"                           => rollout::list;
        Admin  PostOnce  "/api/v1/admin/rollouts"                           => rollout::create, StateConflict;
        Admin  Get       "/api/v1/admin/rollouts/{id}"                      => rollout::get, NotFound;
        Admin  Get       "/api/v1/admin/rollouts/{id}/nodes"                => rollout::nodes, NotFound;
        Admin  PostOnce  "/api/v1/admin/rollouts/{id}/pause"                => rollout::pause, NotFound, StateConflict;
        Admin  PostOnce  "/api/v1/admin/rollouts/{id}/resume"               => rollout::resume, NotFound, StateConflict;
        Admin  PostOnce  "/api/v1/admin/rollouts/{id}/abort"                => rollout::abort, NotFound, StateConflict;

        Admin  Get       "/api/v1/admin/audit-log"                          => audit::log;

        User   Get       "/api/v1/allocations"                              => allocation::list;
        User   PostKeyed "/api/v1/allocations"                              => allocation::create, InsufficientBalance, InsufficientCapacity, ConcurrencyLimitExceeded;
        User   Get       "/api/v1/allocations/{id}"                         => allocation::get, NotFound;
        User   Patch     "/api/v1/allocations/{id}"                         => allocation::revise, NotFound, StateConflict;
        User   Get       "/api/v1/allocations/{id}/events"                  => allocation::events, NotFound;
        User   PostOnce  "/api/v1/allocations/{id}/release"                 => allocation::release, NotFound;
        User   Put       "/api/v1/allocations/{id}/ssh-keys"                => allocation::choose_ssh_keys, NotFound, StateConflict;
        User   Get       "/api/v1/allocations/{id}/telemetry"               => telemetry::of_allocation, NotFound;
        Admin  PostOnce  "/api/v1/admin/allocations/{id}/retry-release"     => allocation::retry_release, NotFound, StateConflict;
        Admin  PostOnce  "/api/v1/admin/allocations/{id}/force-release"     => allocation::force_release, NotFound, StateConflict;

        User   Post      "/api/v1/allocations/{id}/terminal-tokens" (TerminalToken) => terminal::issue_token, NotFound, StateConflict;
        User   Get       "/api/v1/allocations/{id}/terminal-sessions"       => terminal::list_open, NotFound;
        User   Delete    "/api/v1/allocations/{id}/terminal-sessions/{session_id}" => terminal::end, NotFound;
        Anyone Get       "/terminal/{allocation_id}"                        => terminal_page::page, NotFound;
        Anyone Get       "/terminal/assets/{name}"                          => terminal_page::asset, NotFound;
        Anyone Get       "/recordings/{session_id}"                         => terminal_page::recording, NotFound;
        Admin  Get       "/api/v1/admin/terminal-sessions"                  => terminal::list;
        Admin  Get       "/api/v1/admin/terminal-sessions/{id}"             => terminal::get, NotFound;
        Admin  PostOnce  "/api/v1/admin/terminal-sessions/{id}/kill"        => terminal::kill, NotFound;

        User   Get       "/api/v1/allocations/{id}/recordings"              => recording::of_allocation, NotFound;
        User   Get       "/api/v1/recordings/{id}"                          => recording::get, NotFound;
        User   Get       "/api/v1/recordings/{id}/asciicast"                => recording::download, NotFound;
        Admin  Get       "/api/v1/admin/recordings"                         => recording::list;

        User   Get       "/api/v1/billing/balance" (Financial)              => billing::balance;
        User   Get       "/api/v1/billing/ledger"                           => billing::ledger;
        User   Get       "/api/v1/billing/estimate"                         => billing::estimate;
        User   PostKeyed "/api/v1/billing/checkout-sessions" (Financial)    => payment::checkout, NotFound, StateConflict, UpstreamError;
        Anyone Get       "/billing/checkout/{payment_id}"                   => payment_page::page, NotFound;
        Anyone Get       "/billing/checkout/{payment_id}/terms/{processor_id}" => payment_page::terms, NotFound, RateLimited;
        Anyone Get       "/billing/returned"                                => payment_page::returned;
        Anyone Get       "/billing/assets/{name}"                           => payment_page::asset, NotFound;
        User   Get       "/api/v1/billing/payments" (Financial)             => payment::list;
        User   Get       "/api/v1/billing/payments/{id}" (Financial)        => payment::get, NotFound;
        User   Post      "/api/v1/billing/payments/{id}/checkout-session" (Financial) => payment::resume, NotFound, StateConflict, UpstreamError;
        User   PostOnce  "/api/v1/billing/payments/{id}/cancel" (Financial) => payment::cancel, NotFound, StateConflict, UpstreamError;
        User   PostKeyed "/api/v1/billing/refunds" (Financial)              => refund::create, NotFound, StateConflict, InsufficientBalance;
        Admin  Get       "/api/v1/admin/billing/accounts" (Financial)       => billing::list;
        Bound  PostOnce  "/api/v1/admin/billing/accounts" (Financial)       => billing::open, StateConflict;
        Admin  Get       "/api/v1/admin/billing/accounts/{id}" (Financial)  => billing::get, NotFound;
        Admin  Get       "/api/v1/admin/billing/accounts/{id}/ledger"       => billing::ledger_of, NotFound;
        Admin  Get       "/api/v1/admin/billing/accounts/{id}/payments" (Financial) => payment::list_of, NotFound;
        Bound  PostKeyed "/api/v1/admin/billing/accounts/{id}/adjustments" (Financial) => billing::adjust, NotFound, StateConflict, InsufficientBalance;

        Bound  PostOnce  "/api/v1/admin/billing/payments/{id}/settle-review" (Financial) => payment::settle_review, NotFound, StateConflict;
        Bound  PostOnce  "/api/v1/admin/billing/payments/{id}/dismiss-review" (Financial) => payment::dismiss_review, NotFound, StateConflict;

        Admin  Get       "/api/v1/admin/billing/processor-events" (Financial) => processor_event::list;
        Admin  Get       "/api/v1/admin/billing/processor-events/{id}" (Financial) => processor_event::get, NotFound;
        Bound  PostOnce  "/api/v1/admin/billing/processor-events/{id}/retry" (Financial) => processor_event::retry, NotFound, StateConflict;
        Bound  PostOnce  "/api/v1/admin/billing/processor-events/{id}/dismiss" (Financial) => processor_event::dismiss, NotFound, StateConflict;

        User   Get       "/api/v1/billing/statements"                       => statement::list;
        User   GetLong   "/api/v1/billing/statements/{month}" (Financial)   => statement::get, NotFound;
        User   GetLong   "/api/v1/billing/statements/{month}/csv" (Financial) => statement::csv, NotFound;
        User   GetLong   "/api/v1/billing/statements/{month}/pdf" (Financial) => statement::pdf, NotFound;
        Admin  Get       "/api/v1/admin/billing/accounts/{id}/statements"   => statement::list_of, NotFound;
        Admin  GetLong   "/api/v1/admin/billing/accounts/{id}/statements/{month}" (Financial) => statement::get_of, NotFound;
        Admin  GetLong   "/api/v1/admin/billing/accounts/{id}/statements/{month}/csv" (Financial) => statement::csv_of, NotFound;
        Admin  GetLong   "/api/v1/admin/billing/accounts/{id}/statements/{month}/pdf" (Financial) => statement::pdf_of, NotFound;
        User   Get       "/api/v1/notifications/ws"                         => notification::listen, InvalidRequest, UpgradeRequired;
        Admin  PostOnce  "/api/v1/admin/notifications/broadcast"            => notification::broadcast;

        User   Get       "/api/v1/notification-endpoints"                   => notification_endpoint::list;
        User   PostOnce  "/api/v1/notification-endpoints"                   => notification_endpoint::create, StateConflict;
        User   Get       "/api/v1/notification-endpoints/{id}"              => notification_endpoint::get, NotFound;
        User   Patch     "/api/v1/notification-endpoints/{id}"              => notification_endpoint::revise, NotFound;
        User   Delete    "/api/v1/notification-endpoints/{id}"              => notification_endpoint::delete, NotFound;
        User   Get       "/api/v1/notification-endpoints/{id}/secret"       => notification_endpoint::secret, NotFound;
        User   Post      "/api/v1/notification-endpoints/{id}/secret"       => notification_endpoint::rotate_secret, NotFound;
        User   PostOnce  "/api/v1/notification-endpoints/{id}/test"         => notification_endpoint::test, NotFound, StateConflict;
        User   Get       "/api/v1/notification-endpoints/{id}/dead-letters" => notification_endpoint::dead_letters, NotFound;
        User   PostOnce  "/api/v1/notification-endpoints/{id}/dead-letters/resend" => notification_endpoint::resend, NotFound, StateConflict;
        User   PostOnce  "/api/v1/notification-endpoints/{id}/dead-letters/dismiss" => notification_endpoint::dismiss, NotFound;
        Admin  Get       "/api/v1/admin/notification-endpoints"             => notification_endpoint::list_all;

        User   Get       "/api/v1/ssh-keys"                                 => ssh_key::list;
        User   PostOnce  "/api/v1/ssh-keys"                                 => ssh_key::add, StateConflict;
        User   Get       "/api/v1/ssh-keys/{id}"                            => ssh_key::get, NotFound;
        User   Delete    "/api/v1/ssh-keys/{id}"                            => ssh_key::delete, NotFound;
        User   PostOnce  "/api/v1/ssh-keys/{id}/default"                    => ssh_key::make_default, NotFound;
        Admin  Get       "/api/v1/admin/users/{user_id}/ssh-keys"           => ssh_key::list_of_user, NotFound;
        Admin  Get       "/api/v1/admin/users/{user_id}/ssh-keys/{id}"      => ssh_key::get_of_user, NotFound;
        Admin  Delete    "/api/v1/admin/users/{user_id}/ssh-keys/{id}"      => ssh_key::delete_of_user, NotFound;
        Admin  PostOnce  "/api/v1/admin/users/{user_id}/ssh-keys/{id}/default" => ssh_key::make_default_of_user, NotFound;

        User   Get       "/api/v1/service-accounts"                         => service_account::list;
        User   PostOnce  "/api/v1/service-accounts"                         => service_account::create, StateConflict;
        Client Post      "/api/v1/service-accounts/token"                   => access_token::issue;
        User   Get       "/api/v1/service-accounts/{id}"                    => service_account::get, NotFound;
        User   Delete    "/api/v1/service-accounts/{id}"                    => service_account::delete, NotFound;
        User   Post      "/api/v1/service-accounts/{id}/keys"               => service_account::add_key, NotFound, StateConflict;
        User   Delete    "/api/v1/service-accounts/{id}/keys/{key_id}"      => service_account::revoke_key, NotFound;
        Internal Post    "/internal/auth/jwks/refresh"                      => identity_keys::refresh, RateLimited, UpstreamError;

        Admin  Get       "/api/v1/admin/platform-roles/bindings"            => platform_role::list;
        Admin  PostOnce  "/api/v1/admin/platform-roles/bindings"            => platform_role::bind;
        Admin  Delete    "/api/v1/admin/platform-roles/bindings"            => platform_role::revoke, NotFound;
        Admin  Get       "/api/v1/admin/platform-roles/bindings/{id}"       => platform_role::get, NotFound;

        Admin  Get       "/api/v1/admin/overview" (AdminOverview)           => overview::overview;

        Admin  Get       "/api/v1/admin/fleet-history"                      => fleet_history::fleet_history;

        Admin  Get       "/api/v1/admin/alerts"                             => alert::list, UpstreamError;

        Admin  Get       "/api/v1/admin/telemetry/fleet"                    => telemetry::fleet;

        Admin  Get       "/api/v1/admin/policies"                           => policy::catalog;
        Admin  Get       "/api/v1/admin/health-rules"                       => health_rule::list;
        Admin  PostOnce  "/api/v1/admin/health-rules"                       => health_rule::write, StateConflict;
        Admin  Delete    "/api/v1/admin/health-rules"                       => health_rule::take_back, NotFound;

        Admin  Get       "/api/v1/admin/policy-values"                      => policy::list;
        Admin  PostOnce  "/api/v1/admin/policy-values"                      => policy::write, PolicyOutOfBounds, StateConflict;
        Admin  Delete    "/api/v1/admin/policy-values"                      => policy::take_back, NotFound, PolicyOutOfBounds, StateConflict;
        Admin  Get       "/api/v1/admin/policy-values/resolve"              => policy::resolve;
        Admin  Get       "/api/v1/admin/policy-values/{id}"                 => policy::get, NotFound;

        Admin  Get       "/api/v1/admin/keys"                               => key_set::list;
        Admin  PostOnce  "/api/v1/admin/keys/stage"                         => key_set::stage, StateConflict;
        Admin  PostOnce  "/api/v1/admin/keys/activate"                      => key_set::activate, NotFound, StateConflict;
        Admin  PostOnce  "/api/v1/admin/keys/retire"                        => key_set::retire, NotFound, StateConflict;
        Admin  PostOnce  "/api/v1/admin/keys/rewrap"                        => key_set::rewrap, StateConflict;

        Admin  Get       "/api/v1/admin/runtime/tree"                       => runtime::tree;
        Admin  Get       "/api/v1/admin/runtime/cluster"                    => runtime::cluster;
        Admin  Get       "/api/v1/admin/runtime/entities/{kind}/{id}"       => runtime::entity, NotFound;
        Admin  Post      "/api/v1/admin/runtime/entities/{kind}/{id}/restart" => runtime::restart, NotFound;
        Admin  Post      "/api/v1/admin/runtime/members/{member}/workers/{worker}/restart" => runtime::restart_worker, NotFound, StateConflict;
    }
    .finish(RequestTimeout(REQUEST_TIMEOUT), Concurrency::at_most(MAX_CONCURRENT_REQUESTS))
}
