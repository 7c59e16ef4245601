//! What the running service says of itself: on its operators' address, and, with an administrator's token, on the public API.

use super::SupportBundleArgs;
use super::archive::LONGEST_ITEM;
use super::items::{BundleItem, Collecting};
use crate::config::installed_settings::InstalledSettings;
use reqwest::{Certificate, Client, redirect};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
const LIMIT: Duration = Duration::from_secs(15);

pub(super) fn table(settings: &Arc<InstalledSettings>, args: &SupportBundleArgs) -> Vec<BundleItem> {
    let item = |name, what, collect| BundleItem { name, what, limit: LIMIT, collect };
    let own = |path: &'static str, needs_token| own_process(settings, path, needs_token);
    let public = |path: &'static str| public_api(settings, args.token_file.clone(), path);
    vec![
        item(
            "process/readiness.json",
            "whether the process on this machine can serve, and why not",
            own("/api/v1/readyz", false),
        ),
        item("process/metrics.txt", "the metrics of the process on this machine", own("/metrics", false)),
        item(
            "process/stats.json",
            "the statistics of the process on this machine",
            own("/api/v1/internal/stats", true),
        ),
        item("cluster/tree.json", "the supervision tree of the whole cluster", public("/api/v1/admin/runtime/tree")),
        item("cluster/members.json", "the members and what each owns", public("/api/v1/admin/runtime/cluster")),
    ]
}

/// On the operators' address, in clear.
fn own_process(settings: &Arc<InstalledSettings>, path: &'static str, needs_token: bool) -> Collecting {
    let address = settings.operations_address();
    let token = settings.get("INTERNAL_STATS_TOKEN");
    Box::pin(async move {
        let mut request = client(None)?.get(format!("http://{}{path}", address?));
        if needs_token {
            request = request.bearer_auth(token.ok_or("INTERNAL_STATS_TOKEN is not set, which opens it")?);
        }
        answer(request, true).await
    })
}

fn public_api(settings: &Arc<InstalledSettings>, token_file: Option<PathBuf>, path: &'static str) -> Collecting {
    let (url, ca) = (settings.get("SVC_PUBLIC_URL"), settings.get("SVC_TLS_CA_PATH"));
    Box::pin(async move {
        let token_file =
            token_file.ok_or("the public API shows it to administrators: name a file with a token, --token-file")?;
        let token =
            std::fs::read_to_string(&token_file).map_err(|error| format!("{}: {error}", token_file.display()))?;
        let url = url.ok_or("SVC_PUBLIC_URL is not set")?;
        let authorities = ca.and_then(|path| std::fs::read(path).ok());
        let request = client(authorities.as_deref())?.get(format!("{}{path}", url.trim_end_matches('/')));
        answer(request.bearer_auth(token.trim()), false).await
    })
}

fn client(authorities_pem: Option<&[u8]>) -> Result<Client, String> {
    let mut builder = Client::builder()
        .redirect(redirect::Policy::none())
        .connect_timeout(CONNECT_TIMEOUT)
        .timeout(REQUEST_TIMEOUT)
        .no_proxy();
    if let Some(authorities) = authorities_pem.and_then(|pem| Certificate::from_pem_bundle(pem).ok()) {
        builder = builder.tls_certs_merge(authorities);
    }
    builder.build().map_err(|error| error.to_string())
}

/// `keeps_refusals`: the body of an answer that is no success is the content.
async fn answer(request: reqwest::RequestBuilder, keeps_refusals: bool) -> Result<Vec<u8>, String> {
    let shown = |error: reqwest::Error| {
        let error = anyhow::Error::from(error.without_url());
        format!("{error:#}")
    };
    let mut response = request.send().await.map_err(shown)?;
    let status = response.status();
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(shown)? {
        body.extend_from_slice(&chunk);
        if body.len() > LONGEST_ITEM {
            break;
        }
    }
    let is_unavailable = keeps_refusals && status == reqwest::StatusCode::SERVICE_UNAVAILABLE;
    match status.is_success() || is_unavailable {
        true => Ok(body),
        false => Err(format!("the service answered {status}")),
    }
}
