//! What a measurement needs of a browser beyond what tests do.

use super::browser::Browser;
use serde_json::json;

impl Browser {
    /// Has each document run this JavaScript function before its own scripts.
    pub(crate) async fn before_each_document(&mut self, script: &str) {
        self.perform(json!({ "act": "beforeEach", "script": script })).await;
    }

    /// Has the page's processor be this many times slower.
    pub(crate) async fn slow_down(&mut self, times: u32) {
        self.perform(json!({ "act": "slowDown", "times": times })).await;
    }

    /// The bytes of the page's objects after a collection.
    pub(crate) async fn heap_bytes(&mut self) -> f64 {
        self.perform(json!({ "act": "heap" })).await.as_f64().unwrap_or_default()
    }
}
