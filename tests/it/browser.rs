//! A real Chromium under the control of a test: npm's playwright-core, driven by lines of JSON (`tests/browser/driver.mjs`).

use crate::external_tools::{chromium, installed};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};
use tests::cluster::WAIT_TIMEOUT;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// A browser with one page.
pub(crate) struct Browser {
    process: Child,
    commands: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

/// What the page did besides its content.
#[derive(Debug, serde::Deserialize)]
pub(crate) struct PageActivity {
    /// Errors and warnings of the page and the browser.
    pub(crate) complaints: Vec<String>,
    pub(crate) dialogs: Vec<String>,
    pub(crate) windows: u32,
    /// Every URL that was requested.
    pub(crate) asked: Vec<String>,
}

impl Browser {
    pub(crate) async fn start(flags: &[String]) -> Self {
        let mut process = Command::new("node")
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("browser/driver.mjs"))
            .args([installed("browser").as_path(), chromium()])
            .args(flags)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("node starts");
        let commands = process.stdin.take().unwrap();
        let answers = BufReader::new(process.stdout.take().unwrap()).lines();
        let mut browser = Self { process, commands, answers };
        browser.answer().await.expect("the browser starts");
        browser
    }

    /// Opens the page at this URL and returns the status of the response.
    pub(crate) async fn open(&mut self, url: &str) -> u64 {
        self.perform(json!({ "act": "open", "url": url })).await.as_u64().unwrap()
    }

    pub(crate) async fn reload(&mut self) {
        self.perform(json!({ "act": "reload" })).await;
    }

    pub(crate) async fn url(&mut self) -> String {
        self.perform(json!({ "act": "url" })).await.as_str().unwrap().to_owned()
    }

    pub(crate) async fn title(&mut self) -> String {
        self.perform(json!({ "act": "title" })).await.as_str().unwrap().to_owned()
    }

    pub(crate) async fn fill(&mut self, at: &str, text: &str) {
        self.perform(json!({ "act": "fill", "at": at, "text": text })).await;
    }

    pub(crate) async fn click(&mut self, at: &str) {
        self.perform(json!({ "act": "click", "at": at })).await;
    }

    /// Clicks at a position within the element.
    pub(crate) async fn click_at(&mut self, at: &str, x: u32, y: u32) {
        self.perform(json!({ "act": "click", "at": at, "position": { "x": x, "y": y } })).await;
    }

    /// Types a line into the element with the focus.
    pub(crate) async fn enter(&mut self, line: &str) {
        self.perform(json!({ "act": "type", "text": line })).await;
        self.press("Enter").await;
    }

    pub(crate) async fn press(&mut self, key: &str) {
        self.perform(json!({ "act": "press", "key": key })).await;
    }

    pub(crate) async fn resize(&mut self, width: u32, height: u32) {
        self.perform(json!({ "act": "resize", "width": width, "height": height })).await;
    }

    /// The visible text of the element; `None` if it is not visible.
    pub(crate) async fn text_of(&mut self, at: &str) -> Option<String> {
        self.perform(json!({ "act": "shown", "at": at })).await.as_str().map(str::to_owned)
    }

    pub(crate) async fn markup(&mut self, at: &str) -> String {
        self.perform(json!({ "act": "markup", "at": at })).await.as_str().unwrap().to_owned()
    }

    /// Waits until the element contains this text.
    pub(crate) async fn expect_text(&mut self, at: &str, text: &str) {
        let until = Instant::now() + WAIT_TIMEOUT;
        loop {
            let shown = self.text_of(at).await.unwrap_or_default();
            if shown.contains(text) {
                return;
            }
            assert!(Instant::now() < until, "{at} never reads {text:?}: {shown:?}\n{}", self.screen().await);
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// The rows of the terminal as they are drawn, without line ends, so that text that was wrapped is whole.
    pub(crate) async fn screen(&mut self) -> String {
        let rows = self.perform(json!({ "act": "screen" })).await;
        rows.as_array().unwrap().iter().filter_map(Value::as_str).collect::<String>().replace('\u{a0}', " ")
    }

    /// Waits until the terminal shows this text.
    pub(crate) async fn expect_screen(&mut self, text: &str) {
        let until = Instant::now() + WAIT_TIMEOUT;
        loop {
            let screen = self.screen().await;
            if screen.contains(text) {
                return;
            }
            let state = self.text_of("#state").await;
            assert!(Instant::now() < until, "{text:?} is never drawn ({state:?}): {screen}");
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Evaluates this JavaScript function in the page and returns its result.
    pub(crate) async fn run(&mut self, script: &str, given: Value) -> Value {
        self.perform(json!({ "act": "run", "script": script, "given": given })).await
    }

    pub(crate) async fn activity(&mut self) -> PageActivity {
        serde_json::from_value(self.perform(json!({ "act": "seen" })).await).unwrap()
    }

    pub(crate) async fn close(mut self) {
        drop(self.commands);
        let ended = tokio::time::timeout(WAIT_TIMEOUT, self.process.wait()).await;
        assert!(ended.is_ok(), "the browser does not end");
    }

    async fn perform(&mut self, act: Value) -> Value {
        self.commands.write_all(format!("{act}\n").as_bytes()).await.unwrap();
        self.answer().await.unwrap_or_else(|failed| panic!("{failed}"))
    }

    async fn answer(&mut self) -> Result<Value, String> {
        let line = tokio::time::timeout(2 * WAIT_TIMEOUT, self.answers.next_line()).await.expect("the browser answers");
        let line = line.unwrap().expect("the browser lives");
        let mut answer: Value = serde_json::from_str(&line).expect("an answer is JSON");
        match answer["failed"].as_str() {
            Some(why) => Err(why.to_owned()),
            None => Ok(answer["done"].take()),
        }
    }
}
