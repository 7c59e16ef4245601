//! A real Chromium under the control of a test: npm's playwright-core, driven by lines of JSON (`tests/browser/driver.mjs`).

use crate::external_tools::{chromium, installed};
use secrecy::{ExposeSecret as _, SecretString};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};
use tests::cluster::{TestCluster, WAIT_TIMEOUT};
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
    /// Everything that the console of the browser shows as an error or a warning, and answers of 500 and above.
    pub(crate) messages: Vec<String>,
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

    /// Goes on in this tab of this profile, which has cookies and storage of its own. Either is made where it is not there.
    pub(crate) async fn go_to(&mut self, profile: &str, tab: &str) {
        self.perform(json!({ "act": "goTo", "profile": profile, "tab": tab })).await;
    }

    /// The text in the window that a page has opened last; `None` once it is closed.
    pub(crate) async fn popup_text(&mut self) -> Option<String> {
        self.perform(json!({ "act": "popup" })).await.as_str().map(str::to_owned)
    }

    pub(crate) async fn double_click(&mut self, at: &str) {
        self.perform(json!({ "act": "doubleClick", "at": at })).await;
    }

    /// The browser's way back in its history.
    pub(crate) async fn back(&mut self) {
        self.perform(json!({ "act": "back" })).await;
    }

    /// The profile's cookies, as `name=value`.
    pub(crate) async fn cookies(&mut self) -> Vec<String> {
        let cookies = self.perform(json!({ "act": "cookies" })).await;
        let pair = |cookie: &Value| Some(format!("{}={}", cookie["name"].as_str()?, cookie["value"].as_str()?));
        cookies.as_array().unwrap().iter().filter_map(pair).collect()
    }

    /// Logs this user in to the console of the cluster.
    pub(crate) async fn log_in_to_console(&mut self, cluster: &TestCluster, username: &str) {
        let password = cluster.identity.person(username).expect("the person can log in").password;
        self.log_in_at(&format!("{}/console/", cluster.anonymous_client().base()), username, &password).await;
    }

    /// Logs this user in to the console at this address, by the identity provider's form.
    pub(crate) async fn log_in_at(&mut self, console: &str, username: &str, password: &SecretString) {
        self.open(console).await;
        self.expect_text("main", "Log in").await;
        self.click("main a.primary").await;
        self.fill("input[name=username]", username).await;
        self.fill("input[name=password]", password.expose_secret()).await;
        self.click("button").await;
        self.expect_text("h1", "Overview").await;
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

    /// Chooses the option with this text in a list.
    pub(crate) async fn choose(&mut self, at: &str, option: &str) {
        self.perform(json!({ "act": "choose", "at": at, "option": option })).await;
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
        self.type_text(line).await;
        self.press("Enter").await;
    }

    /// Types a text into the element with the focus.
    pub(crate) async fn type_text(&mut self, text: &str) {
        self.perform(json!({ "act": "type", "text": text })).await;
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

    pub(crate) async fn perform(&mut self, act: Value) -> Value {
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
