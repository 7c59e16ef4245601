//! The routes of this API as a table, for who documents and who tests them.

use crate::error::Code;

/// What an agent has to show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shows {
    /// Nothing: the answer says nothing of the node.
    Nothing,
    /// A token of the node, in the body.
    Token,
    /// The node's certificate, in TLS.
    Certificate,
}

/// One route.
#[derive(Clone, Copy, Debug)]
pub struct NodeRoute {
    pub method: &'static str,
    pub path: &'static str,
    pub shows: Shows,
    /// What it may refuse, beside what every route here may.
    pub refuses: &'static [Code],
}

impl NodeRoute {
    /// Everything that the route may refuse.
    pub fn codes(&self) -> impl Iterator<Item = Code> {
        let of_identity = match self.shows {
            Shows::Nothing => None,
            Shows::Token => Some(Code::EnrollmentRejected),
            Shows::Certificate => Some(Code::InvalidNodeIdentity),
        };
        // Each route is limited, per node or per address.
        let of_identity = of_identity.into_iter().chain([Code::RateLimited]);
        let always = [Code::InvalidRequest, Code::InternalError, Code::ServiceUnavailable, Code::Overloaded];
        let with_body = [Code::PayloadTooLarge, Code::UnsupportedMediaType];
        let body = with_body.into_iter().filter(|_| ["POST", "PUT"].contains(&self.method));
        always.into_iter().chain(of_identity).chain(body).chain(self.refuses.iter().copied())
    }
}

const fn route(method: &'static str, path: &'static str, shows: Shows, refuses: &'static [Code]) -> NodeRoute {
    NodeRoute { method, path, shows, refuses }
}

/// The page.
#[rustfmt::skip]
pub const PAGE: &[NodeRoute] = &[
    route("POST", "/internal/v1/nodes/{id}/enroll", Shows::Token, &[Code::UpgradeRequired, Code::StateConflict]),
    route("GET", "/internal/v1/nodes/{id}/recover/nonce", Shows::Nothing, &[]),
    route("POST", "/internal/v1/nodes/{id}/recover", Shows::Token, &[Code::UpgradeRequired, Code::StateConflict]),
    route("POST", "/internal/v1/nodes/{id}/certificate/renew", Shows::Certificate, &[Code::StateConflict]),
    route("POST", "/internal/v1/nodes/{id}/heartbeat", Shows::Certificate, &[Code::UpgradeRequired]),
    route("POST", "/internal/v1/nodes/{id}/tasks/{task_id}/result", Shows::Certificate, &[Code::NotFound, Code::StaleAttempt, Code::StateConflict]),
    route("GET", "/internal/v1/nodes/{id}/tasks/wait", Shows::Certificate, &[]),
    route("GET", "/internal/v1/nodes/{id}/terminals/{session_id}/stream", Shows::Certificate, &[Code::NotFound, Code::StateConflict, Code::UpgradeRequired]),
    route("PUT", "/internal/v1/nodes/{id}/terminals/{session_id}/recording/{seq}", Shows::Certificate, &[Code::NotFound, Code::StateConflict]),
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
    fn the_page_lists_what_is_served() {
        let listed = PAGE.iter().map(|route| (route.method.to_owned(), route.path.to_owned())).collect();
        assert_eq!(served(), listed);
    }
}
