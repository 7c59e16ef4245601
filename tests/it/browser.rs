//! A real Chromium that does what a test says: npm's playwright-core, told by lines of JSON (`tests/browser/driver.mjs`).

use crate::tool::{chromium, installed};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};
use tests::world::PATIENCE;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

const LOOKS_EVERY: Duration = Duration::from_millis(100);

/// A browser with one page.
pub(crate) struct Browser {
    process: Child,
    tell: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

/// What the page did beside what is seen.
#[derive(Debug, serde::Deserialize)]
pub(crate) struct Seen {
    /// Errors, and what the browser complained about.
    pub(crate) complaints: Vec<String>,
    pub(crate) dialogs: Vec<String>,
    pub(crate) windows: u32,
    /// Every address that was asked.
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
        let tell = process.stdin.take().unwrap();
        let answers = BufReader::new(process.stdout.take().unwrap()).lines();
        let mut browser = Self { process, tell, answers };
        browser.answer().await.expect("the browser starts");
        browser
    }

    /// The page at this address, and how it was answered.
    pub(crate) async fn open(&mut self, url: &str) -> u64 {
        self.act(json!({ "act": "open", "url": url })).await.as_u64().unwrap()
    }

    pub(crate) async fn reload(&mut self) {
        self.act(json!({ "act": "reload" })).await;
    }

    pub(crate) async fn url(&mut self) -> String {
        self.act(json!({ "act": "url" })).await.as_str().unwrap().to_owned()
    }

    pub(crate) async fn title(&mut self) -> String {
        self.act(json!({ "act": "title" })).await.as_str().unwrap().to_owned()
    }

    pub(crate) async fn fill(&mut self, at: &str, text: &str) {
        self.act(json!({ "act": "fill", "at": at, "text": text })).await;
    }

    pub(crate) async fn click(&mut self, at: &str) {
        self.act(json!({ "act": "click", "at": at })).await;
    }

    /// At a place within it.
    pub(crate) async fn click_at(&mut self, at: &str, x: u32, y: u32) {
        self.act(json!({ "act": "click", "at": at, "position": { "x": x, "y": y } })).await;
    }

    /// Types a line into whatever has the focus.
    pub(crate) async fn enter(&mut self, line: &str) {
        self.act(json!({ "act": "type", "text": line })).await;
        self.press("Enter").await;
    }

    pub(crate) async fn press(&mut self, key: &str) {
        self.act(json!({ "act": "press", "key": key })).await;
    }

    pub(crate) async fn resize(&mut self, width: u32, height: u32) {
        self.act(json!({ "act": "resize", "width": width, "height": height })).await;
    }

    /// What can be read there; nothing where it is not shown.
    pub(crate) async fn shown(&mut self, at: &str) -> Option<String> {
        self.act(json!({ "act": "shown", "at": at })).await.as_str().map(str::to_owned)
    }

    pub(crate) async fn markup(&mut self, at: &str) -> String {
        self.act(json!({ "act": "markup", "at": at })).await.as_str().unwrap().to_owned()
    }

    /// Waits until that is to be read there.
    pub(crate) async fn reads(&mut self, at: &str, text: &str) {
        let until = Instant::now() + PATIENCE;
        loop {
            let shown = self.shown(at).await.unwrap_or_default();
            if shown.contains(text) {
                return;
            }
            assert!(Instant::now() < until, "{at} never reads {text:?}: {shown:?}\n{}", self.screen().await);
            tokio::time::sleep(LOOKS_EVERY).await;
        }
    }

    /// The rows of the terminal as they are drawn, without what ends them, so that what was too long for a row is whole.
    pub(crate) async fn screen(&mut self) -> String {
        let rows = self.act(json!({ "act": "screen" })).await;
        rows.as_array().unwrap().iter().filter_map(Value::as_str).collect::<String>().replace('\u{a0}', " ")
    }

    /// Waits until the terminal shows that.
    pub(crate) async fn draws(&mut self, text: &str) {
        let until = Instant::now() + PATIENCE;
        loop {
            let screen = self.screen().await;
            if screen.contains(text) {
                return;
            }
            let state = self.shown("#state").await;
            assert!(Instant::now() < until, "{text:?} is never drawn ({state:?}): {screen}");
            tokio::time::sleep(LOOKS_EVERY).await;
        }
    }

    /// What this function of JavaScript returns in the page.
    pub(crate) async fn run(&mut self, script: &str, given: Value) -> Value {
        self.act(json!({ "act": "run", "script": script, "given": given })).await
    }

    pub(crate) async fn seen(&mut self) -> Seen {
        serde_json::from_value(self.act(json!({ "act": "seen" })).await).unwrap()
    }

    pub(crate) async fn end(mut self) {
        drop(self.tell);
        let ended = tokio::time::timeout(PATIENCE, self.process.wait()).await;
        assert!(ended.is_ok(), "the browser does not end");
    }

    async fn act(&mut self, act: Value) -> Value {
        self.tell.write_all(format!("{act}\n").as_bytes()).await.unwrap();
        self.answer().await.unwrap_or_else(|failed| panic!("{failed}"))
    }

    async fn answer(&mut self) -> Result<Value, String> {
        let line = tokio::time::timeout(2 * PATIENCE, self.answers.next_line()).await.expect("the browser answers");
        let line = line.unwrap().expect("the browser lives");
        let mut answer: Value = serde_json::from_str(&line).expect("an answer is JSON");
        match answer["failed"].as_str() {
            Some(why) => Err(why.to_owned()),
            None => Ok(answer["done"].take()),
        }
    }
}
