//! The bearer tokens with which nodes push their logs to the gateway ([`crate::log_gateway`]).
//!
//! A token names its node and the certificate that it was issued for. It proves no more than that certificate does: the gateway asks the
//! node's state machine about both at every push, so that removing the node or revoking its certificate ends the token at once.

use super::{sign, verify};
use crate::auth::claims::{TokenFault, UnverifiedToken, read_times};
use crate::http::error::ApiError;
use crate::trust::current_keys::CurrentKeys;
use chrono::{DateTime, Duration, Utc};
use domain::NodeId;
use secrecy::{ExposeSecret as _, SecretString};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The header `typ` of these tokens: no other token of this service is accepted as one of them, nor one of them as another (RFC 8725,
/// section 3.11).
const TOKEN_TYPE: &str = "node-log+jwt";

/// The gateway's path below the address of the node API.
pub const GATEWAY_PATH: &str = "/internal/v1/node-logs";

/// How long a token is valid. Its node gets another one at any time.
const LIFETIME: Duration = Duration::hours(1);

/// How far the clock of the replica that issued a token may be ahead of this one's.
const SKEW: Duration = Duration::seconds(10);

/// Issues and verifies them.
#[derive(Clone)]
pub struct NodeLogTokens {
    /// `iss`: the public URL.
    issuer: String,
    /// `aud`: the address of the gateway.
    audience: String,
    keys: CurrentKeys,
}

#[derive(Serialize, Deserialize)]
struct Claims {
    iss: String,
    aud: String,
    /// The node's id.
    sub: Uuid,
    /// The serial number of the certificate that it was issued for.
    certificate_serial: String,
    iat: i64,
    exp: i64,
    jti: Uuid,
}

/// The subject of a valid token.
#[derive(Debug, PartialEq, Eq)]
pub struct NodeLogTokenSubject {
    pub node_id: NodeId,
    pub certificate_serial: String,
}

impl NodeLogTokens {
    #[must_use]
    pub fn new(public_url: &str, gateway_url: &str, keys: CurrentKeys) -> Self {
        Self { issuer: public_url.to_owned(), audience: gateway_url.to_owned(), keys }
    }

    /// A token, and when it expires.
    ///
    /// # Errors
    /// Where there is no signing key.
    pub fn issue(
        &self,
        subject: NodeLogTokenSubject,
        now: DateTime<Utc>,
    ) -> Result<(SecretString, DateTime<Utc>), ApiError> {
        let expires_at = now + LIFETIME;
        let claims = Claims {
            iss: self.issuer.clone(),
            aud: self.audience.clone(),
            sub: subject.node_id.0,
            certificate_serial: subject.certificate_serial,
            iat: now.timestamp(),
            exp: expires_at.timestamp(),
            jti: Uuid::new_v4(),
        };
        Ok((sign(&self.keys, TOKEN_TYPE, &claims)?, expires_at))
    }

    /// # Errors
    /// Where the token is not one of these, or has expired.
    pub fn verify(&self, token: &SecretString, now: DateTime<Utc>) -> Result<NodeLogTokenSubject, TokenFault> {
        let token = UnverifiedToken::parse_typed(token.expose_secret(), |kind| kind == Some(TOKEN_TYPE))?;
        verify(&self.keys, &token)?;
        let read = token.claims()?;
        read_times(&read, SKEW, now)?;
        let claims: Claims = strict_json::from_value(read.into()).map_err(|_| TokenFault::Malformed)?;
        if claims.iss != self.issuer {
            return Err(TokenFault::Issuer);
        }
        if claims.aud != self.audience {
            return Err(TokenFault::Audience);
        }
        Ok(NodeLogTokenSubject { node_id: NodeId(claims.sub), certificate_serial: claims.certificate_serial })
    }
}
