//! Pages of others in the browser of a user who is logged in: on another host, and on another port of this one, to which browsers send the
//! session's cookie (`SameSite` compares hosts, not ports).

use super::{Browser, page};
use axum::Router;
use axum::response::Html;
use axum::routing::get;
use serde_json::json;
use std::time::Instant;
use test_host::TlsListener;
use tests::cluster::{TestCluster, WAIT_TIMEOUT};

#[tokio::test(flavor = "multi_thread")]
async fn foreign_page_posts_frames_connects_and_opens_nothing() {
    let cluster = TestCluster::start().await;
    let certificate = cluster.authority.server_certificate("foreign").unwrap();
    let listener = TlsListener::bind(&certificate.certificate_path, &certificate.key_path).await.unwrap();
    let port = listener.port().unwrap();
    let router = Router::new().fallback(get(|| async { Html("<!doctype html><title>foreign</title><p>foreign") }));
    let serving = tokio::spawn(async move { axum::serve(listener, router).await });
    let mut browser = Browser::start(&[]).await;
    browser.log_in_to_console(&cluster, "user").await;
    let base = cluster.anonymous_client().base().to_owned();
    let gateway = format!("{}/api/v1/notifications/ws", base.replace("https://", "wss://"));
    for host in ["127.0.0.1", "localhost"] {
        browser.go_to("main", host).await;
        browser.open(&format!("https://{host}:{port}/")).await;

        let post = "({ path, type }) => fetch(path, { method: 'POST', mode: type ? 'cors' : 'no-cors', credentials: 'include', \
                    headers: type ? { 'content-type': type } : {}, body: JSON.stringify({ name: 'foreign' }) }) \
                    .then(answer => answer.type, () => 'refused')";
        let accounts = format!("{base}/api/v1/service-accounts");
        let cors = json!({ "path": accounts, "type": "application/json" });
        assert_eq!(browser.run(post, cors).await, "refused", "{host}: its answer is for no foreign page");
        // One that browsers send without asking first.
        browser.run(post, json!({ "path": accounts, "type": null })).await;
        browser.run(post, json!({ "path": format!("{base}/console/logout"), "type": null })).await;
        let form = "path => new Promise(done => { const frame = document.createElement('iframe'); frame.name = 'answer'; \
                    document.body.append(frame); const form = document.createElement('form'); form.method = 'post'; form.action = path; \
                    form.target = 'answer'; document.body.append(form); frame.onload = () => done(null); form.submit(); \
                    setTimeout(() => done(null), 5000); })";
        browser.run(form, json!(format!("{base}/console/logout"))).await;

        let socket = "url => new Promise(done => { const socket = new WebSocket(url, ['gpu.notifications.v1']); \
                      socket.onopen = () => done('open'); socket.onclose = event => done(event.code); })";
        assert_eq!(browser.run(socket, json!(gateway)).await, 1006, "{host}");

        let frame = "url => new Promise(done => { const frame = document.createElement('iframe'); frame.onload = done; \
                     frame.src = url; document.body.append(frame); }).then(() => null)";
        browser.run(frame, json!(page(&cluster, "/"))).await;

        // The console's own window is none that its opener can reach.
        let window = "url => new Promise(done => { const opened = window.open(url); const until = Date.now() + 60000; \
                      const look = () => opened.closed ? done('severed') : Date.now() > until ? done('reached') : setTimeout(look, 50); \
                      look(); })";
        assert_eq!(browser.run(window, json!(page(&cluster, "/"))).await, "severed", "{host}");
    }
    // The browser reports a frame that it does not show a moment later.
    let until = Instant::now() + WAIT_TIMEOUT;
    loop {
        let refused = browser.activity().await.complaints;
        if refused.iter().filter(|line| line.contains("frame-ancestors")).count() >= 2 {
            break;
        }
        assert!(Instant::now() < until, "{refused:?}");
        tokio::time::sleep(super::POLL_INTERVAL).await;
    }

    // None of it had an effect: the login is there, and nothing was made.
    browser.go_to("main", "main").await;
    browser.open(&page(&cluster, "/service-accounts")).await;
    browser.expect_text("main", "You have no service account").await;
    browser.close().await;
    serving.abort();
    cluster.shutdown().await;
}
