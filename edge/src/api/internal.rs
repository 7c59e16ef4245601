//! What a process says of itself to those who operate it, under a token of their own.

use axum::Json;
use axum::extract::{FromRequestParts, State};
use axum::http::{HeaderValue, header, request};
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

use crate::error::{ApiError, Code};
use crate::runtime::Stats;
use crate::services::Services;

/// A token of the operator's own (`INTERNAL_STATS_TOKEN`), as its hash.
#[derive(Clone)]
pub struct InternalToken([u8; 32]);

impl InternalToken {
    #[must_use]
    pub fn new(token: &str) -> Self {
        Self(Sha256::digest(token).into())
    }

    fn is(&self, token: &str) -> bool {
        // Hashes are of one length and say nothing of how much of the token was right.
        self.0.ct_eq(&<[u8; 32]>::from(Sha256::digest(token))).into()
    }
}

/// A request with the token for figures. Where no token is configured there is no such route.
pub(super) struct ByOperator;

impl FromRequestParts<Services> for ByOperator {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, services: &Services) -> Result<Self, ApiError> {
        let Some(expected) = &services.stats_token else {
            return Err(ApiError::new(
                Code::NotFound,
                "This route is not enabled; the operator sets INTERNAL_STATS_TOKEN to enable it.",
            ));
        };
        let mut given = parts.headers.get_all(header::AUTHORIZATION).iter();
        let token = match (given.next(), given.next()) {
            (Some(one), None) => one.to_str().ok().and_then(bearer),
            _ => None,
        };
        if token.is_some_and(|token| expected.is(token)) {
            return Ok(Self);
        }
        let refused =
            ApiError::new(Code::Unauthenticated, "Send the internal token as `Authorization: Bearer <token>`.");
        Err(refused.header(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"internal\"")))
    }
}

fn bearer(value: &str) -> Option<&str> {
    let (scheme, token) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then_some(token)
}

/// What the process that answers has and does.
///
/// For the operator's own tools, with the internal token; 404 where none is configured.
#[utoipa::path(get, path = "/", responses((status = 200, description = "The process as it stands.", body = Stats)))]
pub(super) async fn stats(_: ByOperator, State(services): State<Services>) -> Json<Stats> {
    Json(services.runtime.stats())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_itself_and_nothing_else() {
        let token = InternalToken::new("a long secret");
        assert!(token.is("a long secret"));
        for other in ["", "a long secre", "a long secret ", "A long secret"] {
            assert!(!token.is(other), "{other:?}");
        }
        assert_eq!(bearer("bearer x"), Some("x"));
        assert_eq!((bearer("Basic x"), bearer("x")), (None, None));
    }
}
