//! The pages with a terminal and with a recording, as they are served; what they do in a browser is tested in `tests/it/terminal_page.rs` and
//! `tests/it/recording_page.rs`.

use super::harness::ApiHarness;
use axum::http::StatusCode;
use axum::response::Response;

const ID: &str = "018f4e2a-7c1b-7000-8000-000000000001";

async fn text(response: Response) -> String {
    let bytes = axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap();
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The page without what differs in each response.
pub(super) fn without_nonce(page: &str) -> String {
    let (before, rest) = page.split_once("property=\"csp-nonce\" content=\"").expect("the page has a nonce");
    format!("{before}{}", rest.split_once('"').expect("a value").1)
}

#[tokio::test]
async fn nonce_of_styles_is_another_one_in_each_response_and_no_page_is_stored() {
    let api = ApiHarness::with_processor(&crate::payment_processor::fake::FakeProcessor::default()).await;
    let checkout = format!("/billing/checkout/{ID}");
    let mut nonces = std::collections::BTreeSet::new();
    for path in [format!("/terminal/{ID}"), format!("/recordings/{ID}"), checkout, "/api/v1/docs".to_owned()] {
        for _ in 0..2 {
            let page = api.get(&path).response().await;
            assert_eq!(page.headers()["cache-control"], "no-store", "{path}");
            let may = page.headers()["content-security-policy"].to_str().unwrap().to_owned();
            let nonce =
                may.split_once("'nonce-").unwrap_or_else(|| panic!("{path}: {may}")).1.split('\'').next().unwrap();
            assert!(nonce.len() >= 22, "{nonce} has fewer than 128 bits");
            assert!(!may.contains("unsafe-inline") && !may.contains("{{"), "{path}: {may}");
            let page = text(page).await;
            assert!(page.contains(&format!("<meta property=\"csp-nonce\" content=\"{nonce}\">")), "{path}: {page}");
            assert!(nonces.insert(nonce.to_owned()), "{nonce} is used twice");
        }
    }
}

#[tokio::test]
async fn terminal_page_policy_admits_its_own_scripts_and_service_alone() {
    let api = ApiHarness::new().await;
    let page = api.get(&format!("/terminal/{ID}")).response().await;
    assert_eq!(page.status(), StatusCode::OK);
    let header = |name: &str| page.headers()[name].to_str().unwrap().to_owned();
    let may = header("content-security-policy");
    for rule in [
        "default-src 'none';",
        "script-src 'self';",
        "connect-src 'self' wss://api.gpu.example;",
        "form-action 'none';",
        "frame-ancestors 'none';",
    ] {
        assert!(may.contains(rule), "{may}");
    }
    assert_eq!((header("referrer-policy"), header("x-content-type-options")), ("no-referrer".into(), "nosniff".into()));
    let page = text(page).await;
    // It has no inline script or handler and no user's data: it is the same for every id.
    for (at, _) in page.match_indices("<script") {
        let tag = page[at..].split('>').next().unwrap();
        assert!(tag.contains(" src=\"/terminal/assets/"), "{tag}");
    }
    assert!(!page.contains(" onload=") && !page.contains("http"), "{page}");
    let other = api.get(&format!("/terminal/{}", ID.replace("0001", "0002"))).response().await;
    assert_eq!(without_nonce(&text(other).await), without_nonce(&page));
    api.get("/terminal/somewhere").send().await.refused(400, "invalid_request");
}

#[tokio::test]
async fn recording_page_policy_admits_the_player_and_its_own_service_alone() {
    let api = ApiHarness::new().await;
    let page = api.get(&format!("/recordings/{ID}")).response().await;
    assert_eq!(page.status(), StatusCode::OK);
    let may = page.headers()["content-security-policy"].to_str().unwrap().to_owned();
    for rule in ["script-src 'self' 'wasm-unsafe-eval';", "connect-src 'self';", "require-trusted-types-for 'script';"]
    {
        assert!(may.contains(rule), "{may}");
    }
    let page = text(page).await;
    for (at, _) in page.match_indices("src=\"") {
        assert!(page[at..].starts_with("src=\"/terminal/assets/"), "{}", &page[at..at + 60]);
    }
    let other = api.get(&format!("/recordings/{}", ID.replace("0001", "0002"))).response().await;
    assert_eq!(without_nonce(&text(other).await), without_nonce(&page));
    api.get("/recordings/somewhere").send().await.refused(400, "invalid_request");
}

#[tokio::test]
async fn page_assets_are_served_and_revalidated() {
    let api = ApiHarness::new().await;
    let mut page = text(api.get(&format!("/terminal/{ID}")).response().await).await;
    page.push_str(&text(api.get(&format!("/recordings/{ID}")).response().await).await);
    let mut wanted: Vec<String> =
        page.split("\"/terminal/assets/").skip(1).map(|rest| rest.split('"').next().unwrap().to_owned()).collect();
    assert!(wanted.contains(&"main.js".to_owned()), "{wanted:?}");
    let mut served = 0;
    while let Some(name) = wanted.pop() {
        let path = format!("/terminal/assets/{name}");
        let answer = api.get(&path).response().await;
        assert_eq!(answer.status(), StatusCode::OK, "{path}");
        let kind = if name.ends_with(".css") { "text/css" } else { "text/javascript" };
        assert!(answer.headers()["content-type"].to_str().unwrap().starts_with(kind), "{path}");
        let etag = answer.headers()["etag"].to_str().unwrap().to_owned();
        let repeated = api.get(&path).header("if-none-match", &etag).response().await;
        assert_eq!(repeated.status(), StatusCode::NOT_MODIFIED, "{path}");
        let text = text(answer).await;
        assert!(!text.is_empty());
        wanted.extend(text.split("from \"./").skip(1).map(|rest| rest.split('"').next().unwrap().to_owned()));
        served += 1;
    }
    assert!(served >= 13, "only {served} files were asked for");
    for gone in ["package.json", "session.test.js", "..%2Findex.html", "xterm.mjs.map"] {
        api.get(&format!("/terminal/assets/{gone}")).send().await.refused(404, "not_found");
    }
}
