//! The identity provider of the harness.

use crate::auth::jwks::{Jwks, JwksSettings};
use crate::auth::{Authenticator, TokenRules};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use chrono::Utc;
use jsonwebtoken::{Algorithm, EncodingKey};
use rcgen::{KeyPair, PKCS_ED25519};
use serde_json::{Value, json};
use wiremock::matchers::path;
use wiremock::{Mock, MockServer, ResponseTemplate};

/// An identity provider on loopback with one key.
pub(super) struct IdentityProvider {
    pub(super) server: MockServer,
    key: EncodingKey,
}

impl IdentityProvider {
    pub(super) async fn start() -> Self {
        let server = MockServer::start().await;
        let pair = KeyPair::generate_for(&PKCS_ED25519).unwrap();
        let x = URL_SAFE_NO_PAD.encode(pair.public_key_raw());
        let jwk = json!({"kty": "OKP", "crv": "Ed25519", "x": x, "kid": "one", "use": "sig"});
        let issuer = format!("{}/realms/gpu", server.uri());
        let discovery = json!({"issuer": issuer, "jwks_uri": format!("{issuer}/certs")});
        for (at, body) in
            [("/realms/gpu/.well-known/openid-configuration", discovery), ("/realms/gpu/certs", json!({"keys": [jwk]}))]
        {
            Mock::given(path(at)).respond_with(ResponseTemplate::new(200).set_body_json(body)).mount(&server).await;
        }
        Self { server, key: EncodingKey::from_ed_pem(pair.serialize_pem().as_bytes()).unwrap() }
    }

    fn issuer(&self) -> String {
        format!("{}/realms/gpu", self.server.uri())
    }

    pub(super) fn authenticator(&self) -> Authenticator {
        let jwks = Jwks::new(JwksSettings::new(self.issuer())).unwrap();
        Authenticator::new(TokenRules::new(self.issuer(), "gpuaas"), jwks)
    }

    pub(super) fn token(&self, user: &str, org: &str, roles: &[&str]) -> String {
        self.signed(&self.claims(user, org, roles))
    }

    /// The token of a user whose address is verified.
    pub(super) fn token_with_email(&self, user: &str, address: &str) -> String {
        let mut claims = self.claims(user, "acme", &["user"]);
        (claims["email"], claims["email_verified"]) = (address.into(), true.into());
        self.signed(&claims)
    }

    fn claims(&self, user: &str, org: &str, roles: &[&str]) -> Value {
        let now = Utc::now().timestamp();
        json!({
            "iss": self.issuer(), "aud": "gpuaas", "sub": user, "typ": "Bearer", "iat": now, "exp": now + 300,
            "org_id": org, "project_id": "p1", "plan": "gold", "realm_access": {"roles": roles},
        })
    }

    fn signed(&self, claims: &Value) -> String {
        let header = json!({"typ": "JWT", "alg": "EdDSA", "kid": "one"});
        let part = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let signed = format!("{}.{}", part(&header), part(claims));
        let signature = jsonwebtoken::crypto::sign(signed.as_bytes(), &self.key, Algorithm::EdDSA).unwrap();
        format!("{signed}.{signature}")
    }
}
