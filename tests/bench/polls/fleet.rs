//! Nodes with identities, created concurrently through the API as every node is.

use anyhow::{Context, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use reqwest::{Client, StatusCode};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use secrecy::ExposeSecret as _;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tests::cluster::fake_agent::EnrollmentAttempt;
use tests::cluster::{TestCluster, id_of, node_body};
use uuid::Uuid;
use wire::bundle::BootstrapBundle;

pub(crate) const SKU: &str = "parked";
const GPUS: u32 = 8;
const AT_ONCE: usize = 32;

/// The identity of a node.
pub(crate) struct Identity {
    pub(crate) node: Uuid,
    pub(crate) chain: Vec<CertificateDer<'static>>,
    pub(crate) key: PrivateKeyDer<'static>,
}

pub(crate) struct Fleet {
    nodes: Vec<Arc<Identity>>,
    /// The authorities of their certificates, PEM.
    authorities: String,
}

impl Fleet {
    pub(crate) async fn enroll(cluster: &mut TestCluster, count: usize) -> anyhow::Result<Self> {
        cluster.offer_sku(SKU, GPUS).await;
        let authority = reqwest::Certificate::from_pem_bundle(&std::fs::read(cluster.authority.certificate_path())?)?;
        let http = Client::builder().tls_certs_only(authority).no_proxy().timeout(Duration::from_secs(60)).build()?;
        let token = cluster.identity.token_of("admin")?.expose_secret().to_owned();
        let (admin, nodes) = (cluster.replicas[0].public_url(), cluster.replicas[0].node_url());
        let enrolled = stream::iter(0..count).map(|number| {
            let (http, token, admin, nodes) = (&http, &token, &admin, &nodes);
            async move {
                let post = async |path: &str, body: &Value| {
                    let request = http.post(format!("{admin}{path}")).bearer_auth(token).json(body);
                    sent(request.header("Idempotency-Key", Uuid::new_v4().to_string())).await
                };
                let node =
                    id_of(&post("/api/v1/admin/nodes", &node_body(&format!("parked-{number}"), SKU, GPUS)).await?);
                let issued = post(&format!("/api/v1/admin/nodes/{node}/enrollment-token"), &json!({})).await?;
                let bundle: BootstrapBundle = serde_json::from_value(issued["bootstrap_bundle"].clone())?;
                let (enrollment, key) = EnrollmentAttempt::valid(&bundle, GPUS);
                let url = format!("{nodes}/internal/v1/nodes/{node}/enroll");
                let answer = sent(http.post(url).json(&enrollment.body())).await?;
                let text = |name: &str| answer[name].as_str().context("an answer to an enrollment lacks a field");
                let chain = CertificateDer::pem_slice_iter(text("certificate_pem")?.as_bytes());
                let chain = chain.collect::<Result<_, _>>()?;
                let key = PrivateKeyDer::from_pem_slice(key.serialize_pem().as_bytes())?;
                anyhow::Ok((Arc::new(Identity { node, chain, key }), text("chain_pem")?.to_owned()))
            }
        });
        let enrolled: Vec<_> = enrolled.buffer_unordered(AT_ONCE).try_collect().await?;
        let authorities = enrolled.first().context("there are no nodes")?.1.clone();
        Ok(Self { nodes: enrolled.into_iter().map(|(identity, _)| identity).collect(), authorities })
    }

    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }

    pub(crate) fn authorities(&self) -> &str {
        &self.authorities
    }

    pub(crate) fn node(&self, number: usize) -> Uuid {
        self.nodes[number].node
    }

    pub(crate) fn identity(&self, number: usize) -> Arc<Identity> {
        Arc::clone(&self.nodes[number])
    }
}

/// Retries until the response is not transient: the database does not take as many requests at once.
async fn sent(request: reqwest::RequestBuilder) -> anyhow::Result<Value> {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let answer = request.try_clone().context("the request has a body that flows")?.send().await?;
        let status = answer.status();
        let text = answer.text().await?;
        if status == StatusCode::SERVICE_UNAVAILABLE && Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(200)).await;
            continue;
        }
        ensure!(status.is_success(), "{status}: {text}");
        return Ok(serde_json::from_str(&text)?);
    }
}
