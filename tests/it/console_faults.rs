//! Faults under an open tab of the console, in a real Chromium over real replicas. A cluster serves many cases, so a case is a function here, and
//! a test has those that can share one. Faults that need a made-up answer are in the console's own tests (`edge/console/test/chromium`).

mod foreign_pages;
mod policies_of_documents;
mod replicas;
mod sessions;
mod walker;

use crate::browser::Browser;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tests::cluster::{TestCluster, WAIT_TIMEOUT};

const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The button of an open dialog that sends it.
const SUBMIT: &str = "[role=dialog] button[type=submit]";

/// The address of a page of the console.
fn page(cluster: &TestCluster, path: &str) -> String {
    format!("{}/console{path}", cluster.anonymous_client().base())
}

impl Browser {
    /// Presses *Send again* until `done` is shown; what was typed is in its field each time. A browser may repeat a request of a connection that
    /// was reset by itself, so that the button never comes.
    async fn send_until(&mut self, typed: (&str, &str), done: &str) {
        let until = Instant::now() + WAIT_TIMEOUT;
        while self.text_of(done).await.is_none() {
            if self.text_of("button:text-is('Send again')").await.is_some() {
                let kept = self.run("at => document.querySelector(at)?.value ?? null", json!(typed.0)).await;
                // The answer may have come meanwhile, and closed the form.
                assert!(kept == typed.1 || kept == Value::Null, "{kept} is in the field, and {} was typed", typed.1);
                self.run(
                    "() => [...document.querySelectorAll('button')].find(it => it.textContent === 'Send again')?.click()",
                    json!(null),
                )
                .await;
            }
            assert!(Instant::now() < until, "{done} is not shown: {}", self.markup("body").await);
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Waits until the page has its heading and its data.
    async fn expect_loaded(&mut self) {
        self.expect_shown("main h1").await;
        self.expect_gone(".loading").await;
    }

    async fn expect_shown(&mut self, at: &str) {
        let until = Instant::now() + WAIT_TIMEOUT;
        while self.text_of(at).await.is_none() {
            assert!(Instant::now() < until, "{at} is not shown: {}", self.markup("body").await);
            tokio::time::sleep(POLL_INTERVAL / 5).await;
        }
    }

    pub(crate) async fn expect_gone(&mut self, at: &str) {
        let until = Instant::now() + WAIT_TIMEOUT;
        while let Some(text) = self.text_of(at).await {
            assert!(Instant::now() < until, "{at} stays: {text}");
            tokio::time::sleep(POLL_INTERVAL / 5).await;
        }
    }

    /// Closes the dialog by its key, which reaches it once it has the focus.
    async fn close_dialog(&mut self) {
        let until = Instant::now() + WAIT_TIMEOUT;
        while let Some(text) = self.text_of("[role=dialog]").await {
            assert!(Instant::now() < until, "the dialog stays: {text}");
            self.press("Escape").await;
            tokio::time::sleep(POLL_INTERVAL / 5).await;
        }
    }

    /// Everything that a script of the page can read, and the page itself.
    async fn readable(&mut self) -> String {
        let script = "async () => JSON.stringify([document.cookie, { ...localStorage }, { ...sessionStorage }, history.state, location.href, \
                      (await indexedDB.databases()).map(it => it.name), await caches.keys(), window.name, document.documentElement.outerHTML])";
        self.run(script, json!(null)).await.as_str().expect("a text").to_owned()
    }

    /// Asserts that a secret which a page has shown is not there any more: not in the page, its storage, its history or an address.
    async fn expect_nowhere(&mut self, secret: &str) {
        assert!(!self.readable().await.contains(secret), "the secret is in the page or its storage");
        let asked = self.activity().await.asked;
        assert!(!asked.iter().any(|url| url.contains(secret)), "the secret is in an address");
    }

    /// Asserts that no page has asked another host, and none has run what its policy forbids.
    pub(crate) async fn expect_no_complaint(&mut self) {
        let activity = self.activity().await;
        assert!(activity.complaints.is_empty() && activity.dialogs.is_empty(), "{activity:?}");
    }
}
