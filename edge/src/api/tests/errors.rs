//! `deploy/docs/src/reference/errors.md` matches the error codes. Where it does not, the test names the command that regenerates it.

use super::contract::{document, operations};
use crate::api::document::CODES;
use crate::http::error::Code;
use crate::node_api::ROUTES;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

type Route = (String, String);

/// Every operation of the public API with the codes that it lists.
struct Public(Vec<(Route, BTreeSet<String>)>);

impl Public {
    fn read() -> Self {
        let codes = |operation: &serde_json::Value| {
            let responses = operation["responses"].as_object().cloned().unwrap_or_default();
            let lists = responses.into_iter().filter_map(|(_, response)| response[CODES].as_array().cloned());
            lists.flatten().filter_map(|code| code.as_str().map(str::to_owned)).collect()
        };
        Self(operations(&document()).into_iter().map(|(method, path, it)| ((method, path), codes(&it))).collect())
    }

    fn with(&self, code: Code) -> BTreeSet<Route> {
        let listing = self.0.iter().filter(|(_, codes)| codes.contains(code.as_str()));
        listing.map(|(route, _)| route.clone()).collect()
    }
}

/// The routes that respond with the code.
fn routes_of(code: Code, public: &Public) -> String {
    if code == Code::MethodNotAllowed {
        return "Every path of every API, for a method that it does not have.\n".to_owned();
    }
    if code == Code::HeadersTooLarge {
        return "Every listener, before it looks at the path.\n".to_owned();
    }
    let (with, guarded) = (public.with(code), public.with(Code::Unauthenticated));
    let of_nodes: Vec<_> = ROUTES.iter().filter(|route| route.codes().any(|its| its == code)).collect();
    let mut text = String::new();
    let rest = if with.len() == public.0.len() {
        text.push_str("- every route of the public API\n");
        BTreeSet::new()
    } else if guarded.is_subset(&with) {
        text.push_str("- every route of the public API that takes an access token\n");
        with.difference(&guarded).cloned().collect()
    } else {
        with
    };
    for (method, path) in rest {
        writeln!(text, "- `{method} {path}`").unwrap();
    }
    if of_nodes.len() == ROUTES.len() {
        text.push_str("- every route of the node API\n");
    } else {
        for route in of_nodes {
            writeln!(text, "- `{} {}`", route.method, route.path).unwrap();
        }
    }
    if text.is_empty() { "No route of this release.\n".to_owned() } else { text }
}

fn page() -> String {
    let public = Public::read();
    let mut text = String::from(HEAD);
    for &code in Code::ALL {
        writeln!(text, "| {} | [`{code}`](#{code}) | {} |", code.status().as_u16(), code.meaning()).unwrap();
    }
    for &code in Code::ALL {
        writeln!(text, "\n## {code}\n\n{}: {}.\n\n**What leads to it**\n", code.status(), code.meaning()).unwrap();
        for cause in code.causes() {
            writeln!(text, "- {cause}").unwrap();
        }
        write!(text, "\n**What to do** — {}\n\n**Who answers with it**\n\n{}", code.remedy(), routes_of(code, &public))
            .unwrap();
    }
    text
}

const HEAD: &str = r#"# Errors

<!-- Made by the code: `UPDATE_DOCS=1 cargo test -p edge errors_md` regenerates it. -->

Every answer that is no success has one shape, on every route of the public API and of the node API:

```json
{
  "code": "node_in_use",
  "message": "Allocation 0199e3f4-5c1b-7a00-8000-3f2a10c0ffee is on the node; release it first, or retire with \"drain\": true.",
  "correlation_id": "0199e3f4-5c1b-7a00-8000-0c0ffee0c0de",
  "details": { "service": "api", "allocation_id": "0199e3f4-5c1b-7a00-8000-3f2a10c0ffee" }
}
```

`code` is for programs and one of those below; `message` is for people and says what to do next; `correlation_id` is also in the
header `X-Correlation-Id`, and is what an operator looks for in logs, events and the audit log. `details` has `service`, `trace_id` and
`span_id` where the request carried a `traceparent`, `field` where one field is at fault, and what the code's own text names.

| status | code | meaning |
| --- | --- | --- |
"#;

#[test]
fn errors_md_matches_the_error_codes() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/docs/src/reference/errors.md");
    let made = page();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, &made).unwrap();
    }
    let stored = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = made.lines().zip(stored.lines()).find(|(made, stored)| made != stored);
    assert!(
        made == stored,
        "deploy/docs/src/reference/errors.md is not what the code says; regenerate it with UPDATE_DOCS=1. First difference: {differs:?}"
    );
}

#[test]
fn every_error_code_has_an_example_in_the_openapi_document() {
    let document = document();
    for &code in Code::ALL {
        let example = &document["components"]["examples"][code.as_str()]["value"];
        assert_eq!(example["code"], code.as_str());
        assert_eq!(example["message"], code.remedy());
    }
}
