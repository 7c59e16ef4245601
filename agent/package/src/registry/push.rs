//! Pushes an OCI image layout: its blobs, and then its images under their tags.

use std::fs;
use std::path::Path;

use ureq::Body;
use ureq::http::header::{AUTHORIZATION, CONTENT_TYPE, LOCATION};
use ureq::http::{HeaderValue, Response, StatusCode};
use wire::package::Digest;

use super::{Registry, RegistryError};
use crate::build::Index;
use crate::manifest::{ImageManifest, MANIFEST_TYPE};

/// Why a layout was not pushed.
#[derive(Debug, thiserror::Error)]
pub enum PushError {
    #[error("{0} is not a file of an OCI image layout that can be read")]
    Layout(String),
    #[error(transparent)]
    Registry(#[from] RegistryError),
}

/// Pushes every image of the layout, the package before its signature: a package without one cannot be installed, and the other way
/// round the signature would name what is not there.
///
/// # Errors
/// [`PushError`]; pushing again continues.
pub fn push_layout(registry: &mut Registry, layout: &Path) -> Result<Vec<(String, Digest)>, PushError> {
    let index: Index = strict_json::from_slice(&read(layout, "index.json")?).map_err(|_| unreadable("index.json"))?;
    let mut pushed = Vec::new();
    for (tag, image) in index.tags() {
        let manifest = blob(layout, image.digest)?;
        let parsed: ImageManifest = strict_json::from_slice(&manifest).map_err(|_| unreadable(tag))?;
        for part in parsed.layers.iter().chain([&parsed.config]) {
            registry.push_blob(part.digest, &blob(layout, part.digest)?)?;
        }
        registry.push_manifest(tag, &manifest)?;
        pushed.push((tag.to_owned(), image.digest));
    }
    Ok(pushed)
}

fn unreadable(name: &str) -> PushError {
    PushError::Layout(name.to_owned())
}

fn blob(layout: &Path, digest: Digest) -> Result<Vec<u8>, PushError> {
    read(layout, &format!("blobs/sha256/{}", digest.hex()))
}

fn read(layout: &Path, name: &str) -> Result<Vec<u8>, PushError> {
    fs::read(layout.join(name)).map_err(|_| unreadable(name))
}

impl Registry {
    fn push_blob(&mut self, digest: Digest, content: &[u8]) -> Result<(), RegistryError> {
        let what = format!("the blob {digest}");
        let begun = self.upload("POST", &format!("{}/blobs/uploads/", self.base), None, &[], &what)?;
        let location = begun.headers().get(LOCATION).and_then(|value| value.to_str().ok()).unwrap_or_default();
        // The specification allows a path alone.
        let origin = format!("https://{}", self.host);
        let location = if location.starts_with('/') { format!("{origin}{location}") } else { location.to_owned() };
        let separator = if location.contains('?') { '&' } else { '?' };
        let url = format!("{location}{separator}digest={digest}");
        // The credential goes to no other host.
        if !url.starts_with(&format!("{origin}/")) {
            return Err(RegistryError::Redirects { host: self.host.clone(), what, why: "an upload to another host" });
        }
        self.upload("PUT", &url, Some("application/octet-stream"), content, &what).map(drop)
    }

    fn push_manifest(&mut self, tag: &str, manifest: &[u8]) -> Result<(), RegistryError> {
        let url = format!("{}/manifests/{tag}", self.base);
        self.upload("PUT", &url, Some(MANIFEST_TYPE), manifest, &format!("the manifest of the tag {tag}")).map(drop)
    }

    /// A successful response to a request with a body.
    fn upload(
        &mut self,
        method: &str,
        url: &str,
        content_type: Option<&'static str>,
        content: &[u8],
        what: &str,
    ) -> Result<Response<Body>, RegistryError> {
        let mut response = self.upload_once(method, url, content_type, content, what)?;
        if response.status() == StatusCode::UNAUTHORIZED && self.authorization.is_none() {
            self.authorization = Some(self.authorize(&response)?);
            response = self.upload_once(method, url, content_type, content, what)?;
        }
        self.expect_success(response, what)
    }

    fn upload_once(
        &self,
        method: &str,
        url: &str,
        content_type: Option<&'static str>,
        content: &[u8],
        what: &str,
    ) -> Result<Response<Body>, RegistryError> {
        let left = self.time_left(what)?;
        let request = if method == "POST" { self.agent.post(url) } else { self.agent.put(url) };
        let mut request = request.config().timeout_global(Some(left)).build();
        if let Some(content_type) = content_type {
            request = request.header(CONTENT_TYPE, HeaderValue::from_static(content_type));
        }
        if let Some(authorization) = self.authorization.clone() {
            request = request.header(AUTHORIZATION, authorization);
        }
        request.send(content).map_err(|error| self.no_answer(error, what))
    }
}
