//! The console by the keyboard alone, in a real Chromium over a real cluster: an administrator brings a machine in, and an operator repairs a
//! fenced node. No element is clicked or filled by its selector: each is reached by the Tab key.

use crate::browser::Browser;
use reqwest::Method;
use serde_json::{Value, json};
use tests::cluster::{REGION, TestCluster, ssh_public_key};
use wire::secret::SecretToken;

/// More than the controls of any of these pages and their navigation.
const MAX_TABS: usize = 150;

/// What has the focus: a field by its name, a button or a link by its text.
const FOCUSED: &str = "() => {
    const it = document.activeElement;
    return it === null || it === document.body ? '' : (it.getAttribute('name') ?? it.textContent.trim());
}";

impl Browser {
    /// Presses Tab until the field of this name, or the button or link of this text, has the focus.
    async fn tab_to(&mut self, wanted: &str) {
        let mut passed = Vec::new();
        for _ in 0..MAX_TABS {
            let focused = self.run(FOCUSED, json!(null)).await;
            if focused == wanted {
                return;
            }
            passed.push(focused.to_string());
            self.press("Tab").await;
        }
        panic!("{wanted} never has the focus; passed: {passed:?}");
    }

    /// Presses the button or the link of this text.
    async fn press_button(&mut self, text: &str) {
        self.tab_to(text).await;
        self.press("Enter").await;
    }

    /// Types a text into the field of this name, in place of what it has.
    async fn type_into(&mut self, field: &str, text: &str) {
        self.tab_to(field).await;
        self.press("Control+A").await;
        self.type_text(text).await;
    }

    /// Opens a page by its shortcut: `g`, and its letter.
    async fn go_by_shortcut(&mut self, letter: &str, title: &str) {
        self.press("g").await;
        self.press(letter).await;
        self.expect_text("h1", title).await;
    }
}

/// The value of an assignment in the set-up script.
fn assigned(script: &str, prefix: &str) -> String {
    let begin = script.find(prefix).unwrap_or_else(|| panic!("{prefix} is not in the script"));
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    script[begin..].chars().take_while(|c| is_part(*c)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn administrator_brings_a_machine_in_by_the_keyboard_alone() {
    let mut cluster = TestCluster::start().await;
    // The catalog has the SKU; another node of it tells the test how agents reach this cluster.
    let other = cluster.register("h100").await;
    let mut bundle = cluster.bundle(&other).await;
    let gpus = other.get().await["gpus_total"].as_u64().expect("a number").to_string();

    let mut browser = Browser::start(&[]).await;
    browser.log_in_to_console(&cluster, "admin").await;
    browser.go_by_shortcut("d", "Nodes").await;
    browser.press_button("Register…").await;
    browser.expect_text("[role=dialog] h2", "Register a node").await;
    browser.type_into("host", "bare-1.internal").await;
    browser.tab_to("sku").await;
    browser.type_text("h100").await;
    let key = ssh_public_key("bare-1");
    for (field, text) in
        [("region_code", REGION), ("gpus_total", &gpus), ("ssh_username", "gpuaas"), ("ssh_public_key", &key)]
    {
        browser.type_into(field, text).await;
    }
    browser.press("Enter").await;
    browser.expect_text("h1", "bare-1.internal").await;
    browser.expect_text("[aria-label=Onboarding] [aria-current=step]", "The set-up command is made").await;

    browser.press_button("Set-up command…").await;
    browser.expect_text("[role=dialog] h2", "Set the machine up").await;
    browser.press_button("Set-up command").await;
    browser.expect_text("[role=dialog]", "This is the only time that it is shown.").await;
    let script =
        browser.run("() => document.querySelector('[role=dialog] details code').textContent", json!(null)).await;
    let token = assigned(script.as_str().expect("a script"), "gpuenr_");
    cluster.register_secret("a token in a bootstrap script", &token);
    browser.press_button("Close").await;

    // What the script does on the machine.
    let listed = cluster.admin.get("/api/v1/admin/nodes").await.ok();
    let is_new = |node: &&Value| node["host"] == "bare-1.internal";
    let node = listed["items"].as_array().and_then(|nodes| nodes.iter().find(is_new)).expect("the node is listed");
    bundle.node_id = serde_json::from_value(node["id"].clone()).expect("a UUID");
    bundle.enrollment_token = SecretToken::new(token);
    cluster.start_agent("bare-1", &bundle);

    // Its steps are over with the last one.
    browser.expect_text("main p.why .state", "active").await;
    browser.expect_gone("[aria-label=Onboarding]").await;
    let rented = cluster.rent("h100", 1).await;
    let rented = rented.expect_state("active").await;
    assert_eq!(rented["node_id"], node["id"]);
    browser.expect_text("[aria-label=Tenants]", "active").await;
    browser.expect_no_complaint().await;
    browser.close().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn operator_finds_and_repairs_a_fenced_node_by_the_keyboard_alone() {
    let mut cluster = TestCluster::builder()
        .policy("allocation.release_max_attempts", 2)
        .policy("allocation.release_backoff_max_seconds", 1)
        .start()
        .await;
    cluster.allow_error("simulated_failure");
    cluster.allow_error("node_fenced");
    let node = cluster.node_with("h100", &["--simulate-failure", "release"]).await;
    let allocation = cluster.rent_active("h100", 4).await;
    allocation.release().await;

    let mut browser = Browser::start(&[]).await;
    browser.log_in_to_console(&cluster, "admin").await;
    // The operator does not know which machine it is: *Stuck* has the allocation, with its cause and its remedy.
    browser.go_by_shortcut("x", "Stuck").await;
    browser.expect_text("main", "Retry the release…").await;
    browser.expect_text("main", "allocation:").await;
    cluster.restart_agent_with_flags(&node, &[]).await;
    let wanted = json!({ "sku": "h100", "region_code": REGION, "gpu_count": 1 });
    let refused = cluster.other_user.request_until_final(Method::POST, "/api/v1/allocations", Some(&wanted)).await;
    refused.expect_error(409, "insufficient_capacity");

    browser.press_button("Retry the release…").await;
    browser.expect_text("[role=dialog]", "Reason").await;
    browser.type_into("reason", "the machine was repaired").await;
    browser.press("Enter").await;
    allocation.expect_state("released").await;
    node.expect_all_free().await;
    browser.expect_text("main", "Nothing is stuck.").await;
    browser.expect_gone("[role=dialog]").await;
    browser.expect_no_complaint().await;
    browser.close().await;
    cluster.shutdown().await;
}
