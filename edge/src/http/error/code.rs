//! The closed table of codes: status, meaning, causes and remedy. The API's description and `deploy/docs/src/reference/errors.md` are generated from it.

use std::{fmt, time::Duration};

use axum::http::StatusCode;
use serde::Serialize;

/// What went wrong, as a caller's program reads it. Closed: a code that is not here is never answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, strum::VariantArray)]
pub enum Code {
    InvalidRequest,
    ProbeTargetDenied,
    PolicyOutOfBounds,
    Unauthenticated,
    SessionEnded,
    InvalidNodeIdentity,
    TokenInvalid,
    EnrollmentRejected,
    InsufficientBalance,
    Forbidden,
    NotFound,
    MethodNotAllowed,
    PayloadTooLarge,
    UnsupportedMediaType,
    UpgradeRequired,
    NodeInUse,
    StateConflict,
    ConcurrencyLimitExceeded,
    InsufficientCapacity,
    StaleAttempt,
    IdempotencyInProgress,
    IdempotencyKeyReused,
    RateLimited,
    HeadersTooLarge,
    InternalError,
    UpstreamError,
    ServiceUnavailable,
    Overloaded,
}

/// One row of the table.
struct Row {
    text: &'static str,
    status: StatusCode,
    retry_after: Option<Duration>,
    /// In half a sentence.
    meaning: &'static str,
    /// Its causes, a sentence each.
    causes: &'static [&'static str],
    /// The caller's next step.
    remedy: &'static str,
}

impl Row {
    const fn after(self, seconds: u64) -> Self {
        Self { retry_after: Some(Duration::from_secs(seconds)), ..self }
    }
}

const fn row(
    text: &'static str,
    status: StatusCode,
    meaning: &'static str,
    causes: &'static [&'static str],
    remedy: &'static str,
) -> Row {
    Row { text, status, retry_after: None, meaning, causes, remedy }
}

impl Code {
    /// Every code, in the order of the table.
    pub const ALL: &[Self] = <Self as strum::VariantArray>::VARIANTS;

    const fn row(self) -> Row {
        use StatusCode as S;
        match self {
            Self::InvalidRequest => row(
                "invalid_request",
                S::BAD_REQUEST,
                "the request cannot be acted on as it is",
                &[
                    "The body is missing, is not one JSON object, has an unknown or repeated field, or a field is of a wrong type or \
                     outside of its bounds.",
                    "An id in the path is not a UUID, or a query parameter is unknown, given twice or outside of its bounds.",
                    "An `Idempotency-Key` is required and missing, or is not 1 to 255 printable ASCII characters.",
                    "A precondition of a lifecycle action does not hold, as for the removal of a node that is not retired or still has \
                     allocations.",
                    "`sku` is not the name or id of an active SKU, or a node's GPUs or region are not those of its SKU.",
                ],
                "Read `message`, which says what is expected, and `details.field`, which names the field; correct it and send the \
                 request again. Unchanged, it gets the same answer.",
            ),
            Self::ProbeTargetDenied => row(
                "probe_target_denied",
                S::BAD_REQUEST,
                "the service does not connect to this address",
                &[
                    "The node's `host` is, or resolves to, a loopback, unspecified, multicast, link-local or metadata address.",
                    "An allowlist is configured (`NODE_PROBE_ALLOWED_CIDRS`) and the address is outside of it.",
                ],
                "Give the address at which the node is reached from the control plane, or register it with `probe: false`. An operator \
                 can extend the allowlist.",
            ),
            Self::PolicyOutOfBounds => row(
                "policy_out_of_bounds",
                S::BAD_REQUEST,
                "the value is outside the key's bounds",
                &["The value of a policy key is below its minimum, above its maximum, not one of its choices, or of another type."],
                "Choose a value within the bounds that the policy catalog gives for the key.",
            ),
            Self::Unauthenticated => row(
                "unauthenticated",
                S::UNAUTHORIZED,
                "no usable access token",
                &[
                    "`Authorization` is missing, given twice, or is not `Bearer` and a token.",
                    "The token has ended, is not yet valid, or is not signed by a key of the identity provider.",
                    "The token is of another issuer or for another audience.",
                ],
                "Get a fresh access token from the identity provider and send it as `Authorization: Bearer <token>`. The header \
                 `WWW-Authenticate` says whether a token was missing, invalid or expired.",
            ),
            Self::SessionEnded => row(
                "session_ended",
                S::UNAUTHORIZED,
                "the login of this browser has ended; see details.reason",
                &[
                    "`logged_out`, `ended_by_user`, `ended_by_administrator`, `displaced`: the login was ended, here or from another browser.",
                    "`idle`, `lifetime`: it lasted as long as policies `auth.browser_session_idle_seconds` and \
                     `auth.browser_session_max_ttl_seconds` allow.",
                    "`provider_logout`, `provider_refused`, `token_refused`: the identity provider ended it, or its tokens are not accepted \
                     any more.",
                    "`unknown`: the cookie is of no login of this service.",
                ],
                "Log in again at `/console/login`.",
            ),
            Self::InvalidNodeIdentity => row(
                "invalid_node_identity",
                S::UNAUTHORIZED,
                "the node's certificate is not accepted; see details.reason",
                &[
                    "`certificate_missing`: no client certificate reached the service; a proxy in between may have dropped it.",
                    "`certificate_unknown`: it is of another authority or another node, or a later identity has replaced it.",
                    "`certificate_expired`: its time is over.",
                    "`node_fenced`: a release that failed keeps the node; `details.allocation_id` names the allocation.",
                    "`node_removed`: the node was removed and does not come back under this id.",
                ],
                "Look at `details.reason`. An expired or replaced certificate is renewed by recovery, or by a reissued enrollment; a \
                 fenced node is freed with retry-release or force-release of the allocation; a removed one is registered as a new node.",
            ),
            Self::TokenInvalid => row(
                "token_invalid",
                S::UNAUTHORIZED,
                "the single-use token is unknown, used or expired",
                &["A terminal token was used before, has ended, or was never issued."],
                "Ask for a new token; each opens one session, once.",
            ),
            Self::EnrollmentRejected => row(
                "enrollment_rejected",
                S::UNAUTHORIZED,
                "the enrollment token is not accepted",
                &[
                    "The token was used before, has ended, was replaced by a later one, or is another node's. Only the audit log \
                     and the service's log say which of these it was.",
                ],
                "Issue a new enrollment token for the node (or reissue its enrollment), and start the agent with the new bundle.",
            ),
            Self::InsufficientBalance => row(
                "insufficient_balance",
                S::PAYMENT_REQUIRED,
                "the balance does not cover this",
                &["The account's balance, less what is held already, is below what the allocation needs to begin."],
                "Pay money in, or ask for less, and send the request again under a new `Idempotency-Key`.",
            ),
            Self::Forbidden => row(
                "forbidden",
                S::FORBIDDEN,
                "the caller may not do this",
                &[
                    "The route needs a role that the caller does not have.",
                    "The request names a project or a user that the access token does not speak for.",
                ],
                "Ask an administrator for the role, or use a token of a user who has it. A role that was just given counts from the \
                 next token on.",
            ),
            Self::NotFound => row(
                "not_found",
                S::NOT_FOUND,
                "there is no such thing, or not for this caller",
                &[
                    "No resource has this id.",
                    "The resource belongs to another user; the answer does not reveal whether it exists.",
                    "The path is no route of this API.",
                ],
                "Check the id against the list that it comes from, with a token of its owner, and the path against \
                 `/api/v1/openapi.json`.",
            ),
            Self::MethodNotAllowed => row(
                "method_not_allowed",
                S::METHOD_NOT_ALLOWED,
                "the path has no such method",
                &["The path is a route, but not with this method."],
                "Use one of the methods in the header `Allow`.",
            ),
            Self::PayloadTooLarge => row(
                "payload_too_large",
                S::PAYLOAD_TOO_LARGE,
                "the body is over the limit",
                &["The body is longer than `details.limit_bytes`."],
                "Send less; no request of this API needs a body of that size.",
            ),
            Self::UnsupportedMediaType => row(
                "unsupported_media_type",
                S::UNSUPPORTED_MEDIA_TYPE,
                "the body is not application/json",
                &[
                    "`Content-Type` is missing, is not `application/json`, or names a charset other than UTF-8 (`utf-8`, `utf8`, `us-ascii`).",
                    "The body is compressed (`Content-Encoding`).",
                ],
                "Send the body as plain JSON in UTF-8 with `Content-Type: application/json`.",
            ),
            Self::UpgradeRequired => row(
                "upgrade_required",
                S::UPGRADE_REQUIRED,
                "the agent's protocol version is not supported",
                &["The agent's protocol number is newer than this control plane's, or more than two older."],
                "Update the agent to the release of the control plane; `details` names the protocols that are understood.",
            ),
            Self::NodeInUse => row(
                "node_in_use",
                S::CONFLICT,
                "an allocation holds the node",
                &["An allocation is provisioning, active, releasing or release_failed on the node; `details.allocation_id` names one."],
                "Wait for its release, release it, or retire the node with `drain: true`, which takes no new allocation and retires it \
                 when the last one ends.",
            ),
            Self::StateConflict => row(
                "state_conflict",
                S::CONFLICT,
                "the resource is not in a state that allows this",
                &[
                    "The resource's state does not allow the action; `details.state` names it.",
                    "It has changed since the version in `If-Match`.",
                    "There is one of this name, or this key, already.",
                    "A value that the request took as a precondition no longer holds.",
                    "A task's result differs from the one that was recorded first.",
                ],
                "Read the resource again, decide on what it is, and repeat the action only if it still makes sense.",
            ),
            Self::ConcurrencyLimitExceeded => row(
                "concurrency_limit_exceeded",
                S::CONFLICT,
                "the limit of active allocations is reached",
                &["The user has as many allocations as policy `allocation.max_concurrent_per_user` allows."],
                "Release an allocation, or ask an administrator to raise the limit; then send the request under a new \
                 `Idempotency-Key`.",
            ),
            Self::InsufficientCapacity => row(
                "insufficient_capacity",
                S::CONFLICT,
                "no node has the GPUs asked for; see details.suggestion",
                &["No active node of the SKU, in the region or of the id asked for, has so many free GPUs."],
                "Follow `details.suggestion`: ask for fewer GPUs, another region or SKU, or wait in line with `queue_seconds`; under a \
                 new `Idempotency-Key`.",
            ),
            Self::StaleAttempt => row(
                "stale_attempt",
                S::CONFLICT,
                "the task has a later attempt",
                &["The agent reports on an attempt that was given up and is being made again."],
                "Nothing: the agent gets the later attempt with its next poll.",
            ),
            Self::IdempotencyInProgress => row(
                "idempotency_in_progress",
                S::CONFLICT,
                "the first request with this key is still running",
                &["A request with the same `Idempotency-Key` came a moment ago and has not been answered."],
                "Send the same request again, with the same key, in a moment; it gets the first one's answer.",
            ),
            Self::IdempotencyKeyReused => row(
                "idempotency_key_reused",
                S::UNPROCESSABLE_ENTITY,
                "the key belongs to another request",
                &["The `Idempotency-Key` was used with another path or body, or by a token of another organization or project, and is still stored: for 24 hours, or as policy `retention.command_ids_hours` says."],
                "Use a new key for a new request; a UUID serves well.",
            ),
            Self::RateLimited => row(
                "rate_limited",
                S::TOO_MANY_REQUESTS,
                "too many requests; see Retry-After",
                &[
                    "The caller has used up the limit of the route's group; `details` names the policy key, the limit and its window.",
                    "Too many enrollments came from one address.",
                    "Too many tokens wait whose key the identity provider has not published.",
                ],
                "Wait as long as `Retry-After` says, then send the same request again, and keep to the rate in `RateLimit-Policy`.",
            )
            .after(1),
            Self::HeadersTooLarge => row(
                "headers_too_large",
                S::REQUEST_HEADER_FIELDS_TOO_LARGE,
                "the target and the headers are over the limit",
                &["The request line and the headers together are over `details.limit_bytes`, or there are more than `details.limit_count` headers."],
                "Send a shorter target and fewer or shorter headers; the connection may have been closed, so open another one.",
            ),
            Self::InternalError => row(
                "internal_error",
                S::INTERNAL_SERVER_ERROR,
                "the service failed; quote the correlation id",
                &["A fault of the service; it was logged with its cause under the correlation id."],
                "Report the `correlation_id` to the operator. A request with an `Idempotency-Key` can be repeated safely.",
            ),
            Self::UpstreamError => row(
                "upstream_error",
                S::BAD_GATEWAY,
                "a service behind this one failed",
                &["The payment processor, the bare-metal provider or the identity provider answered with an error."],
                "Try again in a while, with the same `Idempotency-Key`; if it stays, report the `correlation_id` to the operator.",
            ),
            Self::ServiceUnavailable => row(
                "service_unavailable",
                S::SERVICE_UNAVAILABLE,
                "not possible at the moment; see Retry-After",
                &[
                    "The database, the owner of the entity or another member of the cluster cannot be reached; after a failure this \
                     takes a few seconds.",
                    "The process is starting or stopping.",
                    "`onboarding_mode` is maas, and the bare-metal provider is missing, unreachable or failed in its prepare hook.",
                    "The operator has configured no payment processor, so no payment is possible.",
                ],
                "Try again after `Retry-After`, with the same `Idempotency-Key`: what was carried out is not carried out again.",
            )
            .after(2),
            Self::Overloaded => row(
                "overloaded",
                S::SERVICE_UNAVAILABLE,
                "too busy; see Retry-After",
                &["More requests wait for the entity, its shard or the process than may."],
                "Try again after `Retry-After`, with the same `Idempotency-Key` and less at once.",
            )
            .after(1),
        }
    }

    /// The code in the envelope.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        self.row().text
    }

    /// The HTTP status that goes with the code.
    #[must_use]
    pub const fn status(self) -> StatusCode {
        self.row().status
    }

    /// The default `Retry-After` of the code.
    pub(super) const fn retry_after(self) -> Option<Duration> {
        self.row().retry_after
    }

    /// The meaning of the code, in half a sentence.
    #[must_use]
    pub const fn meaning(self) -> &'static str {
        self.row().meaning
    }

    /// Its causes, a sentence each.
    #[must_use]
    pub const fn causes(self) -> &'static [&'static str] {
        self.row().causes
    }

    /// The caller's next step.
    #[must_use]
    pub const fn remedy(self) -> &'static str {
        self.row().remedy
    }

    /// The code for an answer that a layer below gave with a bare status.
    pub(crate) fn of_status(status: StatusCode) -> Self {
        match status {
            StatusCode::UNAUTHORIZED => Self::Unauthenticated,
            StatusCode::FORBIDDEN => Self::Forbidden,
            StatusCode::NOT_FOUND => Self::NotFound,
            StatusCode::METHOD_NOT_ALLOWED => Self::MethodNotAllowed,
            StatusCode::PAYLOAD_TOO_LARGE => Self::PayloadTooLarge,
            StatusCode::UNSUPPORTED_MEDIA_TYPE => Self::UnsupportedMediaType,
            StatusCode::UPGRADE_REQUIRED => Self::UpgradeRequired,
            StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE | StatusCode::URI_TOO_LONG => Self::HeadersTooLarge,
            StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT => Self::ServiceUnavailable,
            StatusCode::BAD_GATEWAY => Self::UpstreamError,
            other if other.is_client_error() => Self::InvalidRequest,
            _ => Self::InternalError,
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Serialize for Code {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    #[test]
    fn the_table_of_codes_reads_as_decided() {
        let mut by_status = BTreeMap::<u16, Vec<&str>>::new();
        for &code in Code::ALL {
            by_status.entry(code.status().as_u16()).or_default().push(code.as_str());
        }
        let table: Vec<String> =
            by_status.iter().map(|(status, codes)| format!("{status} {}", codes.join(" "))).collect();
        assert_eq!(
            table,
            [
                "400 invalid_request probe_target_denied policy_out_of_bounds",
                "401 unauthenticated session_ended invalid_node_identity token_invalid enrollment_rejected",
                "402 insufficient_balance",
                "403 forbidden",
                "404 not_found",
                "405 method_not_allowed",
                "409 node_in_use state_conflict concurrency_limit_exceeded insufficient_capacity stale_attempt \
                 idempotency_in_progress",
                "413 payload_too_large",
                "415 unsupported_media_type",
                "422 idempotency_key_reused",
                "426 upgrade_required",
                "429 rate_limited",
                // RFC 6585; added to the decided codes, see decisions/0013.
                "431 headers_too_large",
                "500 internal_error",
                "502 upstream_error",
                "503 service_unavailable overloaded",
            ]
        );
        assert_eq!(Code::ALL.iter().map(|code| code.as_str()).collect::<BTreeSet<_>>().len(), Code::ALL.len());
    }

    #[test]
    fn every_code_says_what_leads_to_it_and_what_to_do_next() {
        for &code in Code::ALL {
            let sentence =
                |text: &str| text.len() > 20 && text.ends_with('.') && !text.contains('\n') && !text.contains("  ");
            assert!(!code.causes().is_empty() && code.causes().iter().all(|cause| sentence(cause)), "{code}");
            assert!(sentence(code.remedy()), "{code}");
            assert!((10..80).contains(&code.meaning().len()) && !code.meaning().ends_with('.'), "{code}");
        }
    }
}
