//! Access tokens of service accounts: JSON Web Tokens (RFC 9068) that the control plane signs itself, with an Ed25519 key of the
//! cluster's that operators rotate ([`crate::trust::current_keys::ServiceKeys`]).
//!
//! The signature proves that a token was issued, not that it is still valid: each request with one reads its account from Postgres, so that
//! every replica refuses a revoked key from the moment the revocation was answered. The account's permissions are read from there too.

use chrono::{DateTime, Duration, Utc};
use domain::service_account::ServiceAccount;
use domain::{EntityKind, EntityRef, ServiceAccountId, ServiceAccountKeyId};
use persistence::{Reads, StoreError};
use secrecy::SecretString;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{sign, verify};
use crate::auth::claims::{TokenFault, UnverifiedToken, read_times};
use crate::auth::{ActingServiceAccount, Caller};
use crate::http::error::ApiError;
use crate::trust::current_keys::CurrentKeys;

/// How far the clock of the replica that issued a token may be ahead of this one's.
const SKEW: Duration = Duration::seconds(10);

/// The header `typ` of these tokens (RFC 9068, section 2.1).
const TOKEN_TYPE: &str = "at+jwt";

/// Issues and verifies them.
pub struct ServiceTokens {
    /// `iss` and `aud`: the public URL. Tokens are issued for this service only.
    issuer: String,
    keys: CurrentKeys,
    reads: Reads,
}

#[derive(Serialize, Deserialize)]
struct Claims {
    iss: String,
    aud: String,
    /// The account's id.
    sub: Uuid,
    client_id: Uuid,
    /// The account's key that it was got with.
    key_id: Uuid,
    iat: i64,
    exp: i64,
    jti: Uuid,
}

impl ServiceTokens {
    #[must_use]
    pub fn new(public_url: impl Into<String>, keys: CurrentKeys, reads: Reads) -> Self {
        Self { issuer: public_url.into(), keys, reads }
    }

    /// Whether a token that names this key is to be one of these, whether or not the key is still trusted.
    pub(in crate::auth) fn is_own_key(&self, key_id: &str) -> bool {
        self.keys.load().service.is_ours(key_id)
    }

    /// A token for an account that has shown a key of its own.
    ///
    /// # Errors
    /// Where the claims cannot be written down.
    pub fn issue(
        &self,
        account: ServiceAccountId,
        key: ServiceAccountKeyId,
        now: DateTime<Utc>,
        life: Duration,
    ) -> Result<SecretString, ApiError> {
        let claims = Claims {
            iss: self.issuer.clone(),
            aud: self.issuer.clone(),
            sub: account.0,
            client_id: account.0,
            key_id: key.0,
            iat: now.timestamp(),
            exp: (now + life).timestamp(),
            jti: Uuid::new_v4(),
        };
        sign(&self.keys, TOKEN_TYPE, &claims)
    }

    pub(in crate::auth) async fn caller(
        &self,
        token: &UnverifiedToken<'_>,
        now: DateTime<Utc>,
    ) -> Result<Caller, TokenFault> {
        verify(&self.keys, token)?;
        let read = token.claims()?;
        let token_expires_at = read_times(&read, SKEW, now)?;
        let claims: Claims = strict_json::from_value(read.into()).map_err(|_| TokenFault::Malformed)?;
        if claims.iss != self.issuer {
            return Err(TokenFault::Issuer);
        }
        if claims.aud != self.issuer {
            return Err(TokenFault::Audience);
        }
        let acting = ActingServiceAccount {
            account: claims.sub.into(),
            key: claims.key_id.into(),
            signed_by: token.kid.clone(),
        };
        let account = self.account_of(&acting).await.map_err(TokenFault::Store)?.ok_or(TokenFault::Revoked)?;
        let owner = account.owner;
        Ok(Caller {
            user_id: owner.user_id,
            roles: account.roles,
            org_id: owner.org_id,
            project_id: owner.project_id,
            plan: owner.plan,
            token_expires_at,
            acting: Some(acting),
            browser_session: None,
            username: None,
            verified_email: None,
        })
    }

    /// The account, where it exists, the key is one of its own, and the token's signing key is trusted.
    pub(in crate::auth) async fn account_of(
        &self,
        acting: &ActingServiceAccount,
    ) -> Result<Option<ServiceAccount>, StoreError> {
        if self.keys.load().service.trusted(&acting.signed_by).is_none() {
            return Ok(None);
        }
        Ok(self.account(acting.account).await?.filter(|account| account.keys.contains_key(&acting.key)))
    }

    /// The account as committed in Postgres, where it exists. Never from a cache that may be stale.
    ///
    /// # Errors
    /// Where Postgres cannot be read.
    pub async fn account(&self, id: ServiceAccountId) -> Result<Option<ServiceAccount>, StoreError> {
        let entity = EntityRef { kind: EntityKind::ServiceAccount, id: id.0 };
        let Some(snapshot) = self.reads.snapshot(entity).await? else { return Ok(None) };
        // An unreadable account authenticates no caller.
        let account = serde_json::from_str::<ServiceAccount>(&snapshot.body).inspect_err(|error| {
            tracing::error!(entity.id = %entity.id, %error, "a service account cannot be read; its tokens are refused");
        });
        Ok(account.ok().filter(ServiceAccount::is_active))
    }
}
