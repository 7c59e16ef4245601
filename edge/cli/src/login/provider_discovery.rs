//! Discovery of the service's identity provider: OAuth 2.0 Protected Resource Metadata (RFC 9728).

use super::oauth_answer;
use super::provider::{self, DocumentError};
use crate::failure::{ExitStatus, Failure, chain};
use crate::http_client::{self, Trust};
use reqwest::Url;
use serde::Deserialize;
use std::path::Path;
use std::time::Duration;

const PATH: &str = "/.well-known/oauth-protected-resource";
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
/// The client of `gpuctl` where the server names none.
const DEFAULT_CLIENT: &str = "gpuctl";

/// The identity provider of users, and the client for it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Resource {
    pub(crate) issuer: String,
    pub(crate) client_id: String,
}

/// The fields of the document that are used here (section 2). `gpuctl_client_id` is the service's own parameter.
#[derive(Debug, Deserialize)]
struct Metadata {
    resource: String,
    #[serde(default)]
    authorization_servers: Vec<String>,
    gpuctl_client_id: Option<String>,
}

/// Reads from the server where to log in. With an issuer that the user names, the server only has to respond, under any address; its
/// metadata is ignored then.
pub(crate) async fn discover(
    server: &Url,
    issuer: Option<String>,
    ca_bundle: Option<&Path>,
) -> Result<Resource, Failure> {
    let trust = ca_bundle.map_or(Trust::System, Trust::Only);
    let http = http_client::build(http_client::client(server, trust)?.timeout(ANSWER_TIMEOUT))?;
    let unreached = |why: String| {
        let failure = Failure::new(ExitStatus::Network, format!("{server} cannot be reached: {why}"));
        match why.contains("certificate") {
            true => failure.next("Give the authority of its certificate: --ca-bundle FILE"),
            false => failure.next("Check --server (or SVC_BASE_URL) and the network."),
        }
    };
    let url = format!("{}{PATH}", server.as_str().trim_end_matches('/'));
    if let Some(issuer) = issuer {
        http.get(&url).send().await.map_err(|error| unreached(chain(&error)))?;
        return Ok(Resource { issuer, client_id: DEFAULT_CLIENT.to_owned() });
    }
    let other = |why: String| {
        Failure::usage(format!("{server} is no server of this service: {why}"))
            .next("Check --server (or SVC_BASE_URL).")
    };
    let body = match provider::document(&http, &url).await {
        Ok(body) => body,
        Err(DocumentError::Unreached(why)) => return Err(unreached(why)),
        Err(DocumentError::Busy(status)) => return Err(provider::busy(server.as_str(), status)),
        Err(DocumentError::Other(why)) => return Err(other(format!("{why} where it would say how to log in"))),
    };
    let metadata = oauth_answer::object_of(&body).map_err(|_| other("it does not say how to log in".to_owned()))?;
    read(metadata, server).map_err(other)
}

/// Metadata of another resource is refused (section 3.3).
fn read(metadata: Metadata, server: &Url) -> Result<Resource, String> {
    if !super::same_server(&metadata.resource, server.as_str()) {
        return Err(format!("it describes {}; use that address", metadata.resource));
    }
    let issuer = metadata.authorization_servers.into_iter().next().ok_or("it names no identity provider")?;
    let client_id = metadata.gpuctl_client_id.filter(|id| !id.is_empty()).unwrap_or_else(|| DEFAULT_CLIENT.to_owned());
    Ok(Resource { issuer, client_id })
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::get;
    use axum::{Json, Router};
    use serde_json::{Value, json};

    async fn discovered(describe: impl Fn(&str) -> Value) -> Result<Resource, Failure> {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = format!("http://{}", listener.local_addr().unwrap());
        let description = describe(&server);
        let routes = Router::new().route(PATH, get(move || async move { Json(description) }));
        tokio::spawn(async move { axum::serve(listener, routes).await });
        discover(&http_client::address(&server).unwrap(), None, None).await
    }

    #[tokio::test]
    async fn server_names_its_identity_provider_and_the_client() {
        let found = discovered(|server| json!({ "resource": server, "authorization_servers": ["https://id.example"] }));
        let expected = Resource { issuer: "https://id.example".to_owned(), client_id: DEFAULT_CLIENT.to_owned() };
        assert_eq!(found.await.unwrap(), expected);
        let named = discovered(
            |server| json!({ "resource": server, "authorization_servers": ["https://id.example"], "gpuctl_client_id": "cli" }),
        );
        assert_eq!(named.await.unwrap().client_id, "cli");
    }

    #[tokio::test]
    async fn server_with_foreign_metadata_is_refused_before_login() {
        for description in [
            json!({ "resource": "https://other.example", "authorization_servers": ["https://id.example"] }),
            json!({ "hello": "world" }),
            // serde would read the fields in their order.
            json!(["https://gpu.example", ["https://id.example"], "cli"]),
        ] {
            let failure = discovered(|_| description.clone()).await.unwrap_err();
            assert_eq!(failure.exit_status, ExitStatus::Usage, "{failure}");
        }
        let unreachable_server = http_client::address("http://127.0.0.1:9").unwrap();
        let issuer = Some("https://id.example".to_owned());
        assert_eq!(
            discover(&unreachable_server, issuer, None).await.unwrap_err().exit_status,
            ExitStatus::Network,
            "also with an issuer of one's own"
        );
    }
}
