//! The plain handler: axum over TLS, the token verified as the documentation of `jsonwebtoken` does it, one statement through a pool of
//! sqlx, and nothing else. It runs as a process of its own, as the control plane does: this program, selected by a variable.

use anyhow::Context;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::routing::{get, post};
use axum::{Json, Router};
use jsonwebtoken::jwk::JwkSet;
use jsonwebtoken::{Algorithm, DecodingKey, Validation};
use local_servers::identity::AUDIENCE;
use secrecy::ExposeSecret as _;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sqlx::postgres::{PgPool, PgPoolOptions};
use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use test_host::TlsListener;
use tests::cluster::TestCluster;
use uuid::Uuid;

const VARIABLE: &str = "BENCH_API_BASELINE";

/// The running process.
pub(crate) struct Baseline {
    pub(crate) url: String,
    process: Child,
}

#[derive(Deserialize, Serialize)]
pub(crate) struct Settings {
    database: String,
    issuer: String,
    certificate: PathBuf,
    key: PathBuf,
}

impl Baseline {
    /// The settings of the plain handler, if this process is it.
    pub(crate) fn asked_for() -> anyhow::Result<Option<Settings>> {
        std::env::var(VARIABLE).ok().map(|text| Ok(serde_json::from_str(&text)?)).transpose()
    }

    /// Starts it with a row of two keys for each user.
    pub(crate) async fn start(cluster: &TestCluster, users: &[(String, [Uuid; 2])]) -> anyhow::Result<Self> {
        sqlx::query("CREATE TABLE plain (name text PRIMARY KEY, body jsonb NOT NULL)").execute(&cluster.pool).await?;
        for (name, keys) in users {
            let body = json!({ "default": keys[0], "keys": keys.map(|key| json!({
                "id": key, "owner_user_id": name, "name": "a key", "key_type": "ssh-ed25519", "public_key": "x".repeat(80),
                "fingerprint": "y".repeat(50), "created_at": "2026-11-21T08:00:00Z",
            })) });
            let statement = "INSERT INTO plain (name, body) VALUES ($1, $2)";
            sqlx::query(statement).bind(name).bind(body).execute(&cluster.pool).await?;
        }
        let certificate = cluster.authority.server_certificate("plain")?;
        let settings = Settings {
            database: cluster.postgres.url().expose_secret().to_owned(),
            issuer: cluster.identity.issuer(),
            certificate: certificate.certificate_path,
            key: certificate.key_path,
        };
        let mut command = Command::new(std::env::current_exe()?);
        command.env(VARIABLE, serde_json::to_string(&settings)?).stdout(Stdio::piped());
        let mut process = command.spawn().context("the baseline does not start")?;
        let out = process.stdout.take().context("the baseline has no output")?;
        let mut port = String::new();
        BufReader::new(out).read_line(&mut port)?;
        Ok(Self { url: format!("https://127.0.0.1:{}", port.trim()), process })
    }
}

impl Drop for Baseline {
    fn drop(&mut self) {
        // It has no state to lose.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[derive(Clone)]
struct BaselineState {
    pool: PgPool,
    keys: Arc<BTreeMap<String, DecodingKey>>,
    rules: Arc<Validation>,
}

#[derive(Deserialize)]
struct Claims {
    preferred_username: String,
}

/// Serves until it is killed; prints its port first.
pub(crate) async fn serve(settings: Settings) -> anyhow::Result<()> {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let pool = PgPoolOptions::new().max_connections(16).connect(&settings.database).await?;
    let url = format!("{}/protocol/openid-connect/certs", settings.issuer);
    let published: JwkSet = reqwest::get(url).await?.json().await?;
    let named =
        published.keys.iter().filter_map(|key| Some((key.common.key_id.clone()?, DecodingKey::from_jwk(key).ok()?)));
    let mut rules = Validation::new(Algorithm::ES256);
    rules.set_audience(&[AUDIENCE]);
    rules.set_issuer(&[&settings.issuer]);
    let plain = BaselineState { pool, keys: Arc::new(named.collect()), rules: Arc::new(rules) };
    let router = Router::new()
        .route("/api/v1/ssh-keys", get(read))
        .route("/api/v1/ssh-keys/{id}/default", post(write))
        .with_state(plain);

    let listener = TlsListener::bind(&settings.certificate, &settings.key).await?;
    let mut out = std::io::stdout();
    writeln!(out, "{}", listener.port()?)?;
    out.flush()?;
    axum::serve(listener, router).await?;
    Ok(())
}

async fn read(State(plain): State<BaselineState>, headers: HeaderMap) -> Result<Json<Value>, StatusCode> {
    let user = plain.user(&headers)?;
    let body: Value = sqlx::query_scalar("SELECT body FROM plain WHERE name = $1")
        .bind(user)
        .fetch_one(&plain.pool)
        .await
        .map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    Ok(Json(body))
}

async fn write(
    State(plain): State<BaselineState>,
    headers: HeaderMap,
    Path(key): Path<Uuid>,
) -> Result<Json<Value>, StatusCode> {
    let user = plain.user(&headers)?;
    let statement = "UPDATE plain SET body = jsonb_set(body, '{default}', $2) WHERE name = $1 RETURNING body";
    let body: Value = sqlx::query_scalar(statement)
        .bind(user)
        .bind(json!(key))
        .fetch_one(&plain.pool)
        .await
        .map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    Ok(Json(body))
}

impl BaselineState {
    fn user(&self, headers: &HeaderMap) -> Result<String, StatusCode> {
        let token = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
        let token = token.ok_or(StatusCode::UNAUTHORIZED)?;
        let refused = |_| StatusCode::UNAUTHORIZED;
        let kid = jsonwebtoken::decode_header(token).map_err(refused)?.kid.ok_or(StatusCode::UNAUTHORIZED)?;
        let key = self.keys.get(&kid).ok_or(StatusCode::UNAUTHORIZED)?;
        Ok(jsonwebtoken::decode::<Claims>(token, key, &self.rules).map_err(refused)?.claims.preferred_username)
    }
}
