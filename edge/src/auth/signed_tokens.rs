//! JSON Web Tokens that the control plane signs itself, with the active Ed25519 key of service tokens.

pub mod node_log;
pub mod service_account;

use crate::auth::claims::{TokenFault, UnverifiedToken};
use crate::http::error::ApiError;
use crate::trust::current_keys::CurrentKeys;
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use ed25519_dalek::{Signature, Signer};
use secrecy::SecretString;
use serde::Serialize;
use serde_json::json;

/// The algorithm of the header (RFC 8037).
const ALGORITHM: &str = "EdDSA";

/// Signs a token of this `typ`.
///
/// # Errors
/// Where there is no signing key, or the claims cannot be serialised.
fn sign(keys: &CurrentKeys, typ: &str, claims: &impl Serialize) -> Result<SecretString, ApiError> {
    let keys = keys.load();
    let (key_id, key) = keys.service.signing().ok_or_else(|| ApiError::internal("no key signs tokens"))?;
    let header = json!({ "typ": typ, "alg": ALGORITHM, "kid": key_id }).to_string();
    let claims = serde_json::to_vec(claims).map_err(ApiError::internal)?;
    let signed = format!("{}.{}", URL_SAFE_NO_PAD.encode(header), URL_SAFE_NO_PAD.encode(claims));
    let signature = URL_SAFE_NO_PAD.encode(key.sign(signed.as_bytes()).to_bytes());
    Ok(format!("{signed}.{signature}").into())
}

/// Verifies that one of the trusted keys has signed the token. Its claims are the caller's to check.
fn verify(keys: &CurrentKeys, token: &UnverifiedToken<'_>) -> Result<(), TokenFault> {
    if token.algorithm != ALGORITHM {
        return Err(TokenFault::Algorithm);
    }
    let (signed, signature) = token.signed()?;
    let signature = Signature::from_slice(&signature).map_err(|_| TokenFault::Signature)?;
    let key = keys.load().service.trusted(&token.kid).ok_or(TokenFault::Retired)?;
    key.verify_strict(signed, &signature).map_err(|_| TokenFault::Signature)
}
