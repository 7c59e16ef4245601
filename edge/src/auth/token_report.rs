//! How this service reads an access token, for its operator (`gpuaas doctor --token-file`).

use chrono::{DateTime, Utc};
use serde_json::{Map, Value};

use super::claims::{ClaimPaths, TokenFault, UnverifiedToken, kind_of, read};
use super::role_claims::RoleRemark;
use super::{Authenticator, Caller, MAX_TOKEN_LEN};

/// Claims whose values say for whom, by whom and as what a token was issued; no secret, and no name of a person.
const SHOWN: [&str; 8] = ["iss", "aud", "azp", "client_id", "typ", "token_use", "ver", "scope"];

/// How this service reads an access token.
#[derive(Debug)]
pub struct TokenReport {
    /// Each claim of the token with the kind of its value, by name. Values of those alone that say for whom the token was issued. Empty where
    /// the token is no JSON Web Token.
    pub claims: Vec<String>,
    /// The caller, or why the token is refused.
    pub verdict: Result<Caller, TokenFault>,
    /// Why it grants no role, or fewer than its provider may have meant.
    pub remark: Option<RoleRemark>,
}

impl Authenticator {
    /// Reads a token of the identity provider as a request with it is read.
    pub async fn report(&self, token: &str, now: DateTime<Utc>) -> TokenReport {
        let token = token.trim();
        if token.len() > MAX_TOKEN_LEN {
            return TokenReport { claims: Vec::new(), verdict: Err(TokenFault::Malformed), remark: None };
        }
        let claims = claims_of(token).map(|claims| described(&claims)).unwrap_or_default();
        let (verdict, remark) = match self.verified(token, now).await {
            Ok((caller, remark)) => (Ok(caller), remark),
            Err(fault) => (Err(fault), None),
        };
        TokenReport { claims, verdict, remark }
    }

    /// Where the claims of tokens are.
    #[must_use]
    pub const fn claim_paths(&self) -> &ClaimPaths {
        &self.rules.claims
    }

    async fn verified(&self, token: &str, now: DateTime<Utc>) -> Result<(Caller, Option<RoleRemark>), TokenFault> {
        let token = UnverifiedToken::parse(token)?;
        self.verify_provider_signature(&token).await?;
        read(&token.claims()?, &self.rules, now)
    }
}

/// The claims, whatever the token's header and signature are.
fn claims_of(token: &str) -> Option<Map<String, Value>> {
    UnverifiedToken::parse_typed(token, |_| true).ok()?.claims().ok()
}

fn described(claims: &Map<String, Value>) -> Vec<String> {
    let described = claims.iter().map(|(name, value)| match value {
        Value::Array(_) | Value::String(_) if SHOWN.contains(&name.as_str()) => format!("{name} = {value}"),
        Value::Array(entries) => format!("{name} (a list of {})", entries.len()),
        other => format!("{name} ({})", kind_of(other)),
    });
    described.collect()
}
