//! The routes of this API as a table, for documentation and tests.

use crate::http::error::Code;

/// The credential that an agent presents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequiredCredential {
    /// None: the response reveals nothing of the node.
    Nothing,
    /// A token of the node, in the body.
    Token,
    /// The node's certificate, in TLS.
    Certificate,
    /// Either: the certificate, or an enrollment token in `Authorization`.
    CertificateOrToken,
}

/// One route.
#[derive(Clone, Copy, Debug)]
pub struct NodeRoute {
    pub method: &'static str,
    pub path: &'static str,
    pub shows: RequiredCredential,
    /// The error codes of the route, besides those of every route here.
    pub refuses: &'static [Code],
}

impl NodeRoute {
    /// Everything that the route may refuse.
    pub fn codes(&self) -> impl Iterator<Item = Code> {
        let of_identity: &[Code] = match self.shows {
            RequiredCredential::Nothing => &[],
            RequiredCredential::Token => &[Code::EnrollmentRejected],
            RequiredCredential::Certificate => &[Code::InvalidNodeIdentity],
            RequiredCredential::CertificateOrToken => {
                &[Code::InvalidNodeIdentity, Code::EnrollmentRejected, Code::Unauthenticated]
            }
        };
        // Each route is limited, per node or per address.
        let of_identity = of_identity.iter().copied().chain([Code::RateLimited]);
        let always = [Code::InvalidRequest, Code::InternalError, Code::ServiceUnavailable, Code::Overloaded];
        let with_body = [Code::PayloadTooLarge, Code::UnsupportedMediaType];
        let body = with_body.into_iter().filter(|_| ["POST", "PUT"].contains(&self.method));
        always.into_iter().chain(of_identity).chain(body).chain(self.refuses.iter().copied())
    }
}

const fn route(
    method: &'static str,
    path: &'static str,
    shows: RequiredCredential,
    refuses: &'static [Code],
) -> NodeRoute {
    NodeRoute { method, path, shows, refuses }
}

/// The page.
#[rustfmt::skip]
pub const ROUTES: &[NodeRoute] = &[
    route("POST", "/internal/v1/nodes/{id}/enroll", RequiredCredential::Token, &[Code::UpgradeRequired, Code::StateConflict]),
    route("GET", "/internal/v1/nodes/{id}/recover/nonce", RequiredCredential::Nothing, &[]),
    route("POST", "/internal/v1/nodes/{id}/recover", RequiredCredential::Token, &[Code::UpgradeRequired, Code::StateConflict]),
    route("POST", "/internal/v1/nodes/{id}/certificate/renew", RequiredCredential::Certificate, &[Code::StateConflict]),
    route("POST", "/internal/v1/nodes/{id}/heartbeat", RequiredCredential::Certificate, &[Code::UpgradeRequired]),
    route("POST", "/internal/v1/nodes/{id}/log-token", RequiredCredential::Certificate, &[]),
    route("GET", "/internal/v1/nodes/{id}/package/manifests/{reference}", RequiredCredential::CertificateOrToken, &[Code::NotFound]),
    route("GET", "/internal/v1/nodes/{id}/package/blobs/{digest}", RequiredCredential::CertificateOrToken, &[Code::NotFound]),
    route("POST", "/internal/v1/nodes/{id}/tasks/{task_id}/result", RequiredCredential::Certificate, &[Code::NotFound, Code::StaleAttempt, Code::StateConflict]),
    route("GET", "/internal/v1/nodes/{id}/tasks/wait", RequiredCredential::Certificate, &[]),
    route("GET", "/internal/v1/nodes/{id}/terminals/{session_id}/stream", RequiredCredential::Certificate, &[Code::NotFound, Code::StateConflict, Code::UpgradeRequired]),
    route("PUT", "/internal/v1/nodes/{id}/terminals/{session_id}/recording/{seq}", RequiredCredential::Certificate, &[Code::NotFound, Code::StateConflict]),
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// The routes as the router's source has them.
    fn served() -> BTreeSet<(String, String)> {
        let source = include_str!("../node_api.rs");
        let calls = source.split(".route(").skip(1).filter_map(|call| {
            let (path, rest) = call.trim_start().strip_prefix('"')?.split_once('"')?;
            let verb = rest.trim_start_matches([',', ' ', '\n']).split('(').next()?;
            Some((verb.to_uppercase(), path.to_owned()))
        });
        calls.collect()
    }

    #[test]
    fn route_table_matches_the_router() {
        let listed = ROUTES.iter().map(|route| (route.method.to_owned(), route.path.to_owned())).collect();
        assert_eq!(served(), listed);
    }
}
