//! An operator at a terminal: which control plane, as whom.

use anyhow::{Context, bail};
use secrecy::{ExposeSecret, SecretString};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::path::PathBuf;

/// Whom to ask, and as whom.
#[derive(Debug, clap::Args)]
pub struct OperatorArgs {
    /// A replica, or the balancer in front of them.
    #[arg(long, env = "SVC_BASE_URL")]
    base_url: String,
    /// What the server's certificate is verified by.
    #[arg(long, env = "SVC_CA_BUNDLE_PATH")]
    ca_bundle: Option<PathBuf>,
    #[arg(long, env = "SVC_AUTH_URL")]
    auth_url: String,
    #[arg(long, env = "SVC_REALM")]
    realm: String,
    #[arg(long, env = "SVC_CLIENT_ID")]
    client_id: String,
    #[arg(long, env = "SVC_CLIENT_SECRET", hide_env_values = true)]
    client_secret: SecretString,
    #[arg(long, env = "SVC_ADMIN_USERNAME")]
    username: String,
    #[arg(long, env = "SVC_ADMIN_PASSWORD", hide_env_values = true)]
    password: SecretString,
}

/// An operator who has logged in.
pub struct Operator {
    client: reqwest::Client,
    base_url: String,
    token: SecretString,
}

impl OperatorArgs {
    /// Logs in.
    ///
    /// # Errors
    /// Where the identity provider does not answer, or refuses: it is quoted.
    pub async fn log_in(&self) -> anyhow::Result<Operator> {
        let client = self.client().await?;
        let token = self.token(&client).await?;
        Ok(Operator { client, base_url: self.base_url.clone(), token })
    }

    async fn client(&self) -> anyhow::Result<reqwest::Client> {
        let mut client = reqwest::Client::builder();
        if let Some(path) = &self.ca_bundle {
            let pem = tokio::fs::read(path).await.with_context(|| format!("cannot read {}", path.display()))?;
            client = client.tls_certs_only(reqwest::Certificate::from_pem_bundle(&pem)?);
        }
        Ok(client.build()?)
    }

    async fn token(&self, client: &reqwest::Client) -> anyhow::Result<SecretString> {
        #[derive(serde::Deserialize)]
        struct Granted {
            access_token: SecretString,
        }
        let form = [
            ("grant_type", "password"),
            ("client_id", &self.client_id),
            ("client_secret", self.client_secret.expose_secret()),
            ("username", &self.username),
            ("password", self.password.expose_secret()),
        ];
        let url = format!("{}/realms/{}/protocol/openid-connect/token", self.auth_url, self.realm);
        let answer = client.post(url).form(&form).send().await.context("the identity provider cannot be reached")?;
        if !answer.status().is_success() {
            bail!("the identity provider refused: {}", answer.text().await?);
        }
        Ok(answer.json::<Granted>().await?.access_token)
    }
}

impl Operator {
    /// Gets what is at `path`.
    ///
    /// # Errors
    /// Where nobody answers, or the answer is a refusal: it is quoted.
    pub async fn get<T: DeserializeOwned>(&self, path: &str, query: &[(&str, &str)]) -> anyhow::Result<T> {
        answer(self.client.get(self.at(path)).query(query).bearer_auth(self.token.expose_secret())).await
    }

    /// Posts `body` to `path`.
    ///
    /// # Errors
    /// As [`Operator::get`].
    pub async fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> anyhow::Result<T> {
        answer(self.client.post(self.at(path)).json(body).bearer_auth(self.token.expose_secret())).await
    }

    fn at(&self, path: &str) -> String {
        format!("{}{path}", self.base_url)
    }
}

async fn answer<T: DeserializeOwned>(request: reqwest::RequestBuilder) -> anyhow::Result<T> {
    let answer = request.send().await.context("the control plane cannot be reached")?;
    if !answer.status().is_success() {
        bail!("the control plane refused: {}", answer.text().await?);
    }
    Ok(answer.json().await?)
}
