//! Handles of nodes and allocations.

use super::WAIT_TIMEOUT;
use super::client::Client;
use serde_json::{Value, json};
use std::time::Duration;
use uuid::Uuid;

/// A node in the inventory.
#[derive(Clone)]
pub struct NodeHandle {
    pub id: Uuid,
    /// The name of its host and of its agent.
    pub name: String,
    admin: Client,
}

impl NodeHandle {
    pub(super) fn new(id: Uuid, name: String, admin: Client) -> Self {
        Self { id, name, admin }
    }

    /// A node of this answer.
    #[must_use]
    pub fn of(answer: &Value, admin: Client) -> Self {
        let name = answer["host"].as_str().unwrap_or_default().to_owned();
        Self::new(super::id_of(answer), name, admin)
    }

    #[must_use]
    pub fn path(&self) -> String {
        format!("/api/v1/admin/nodes/{}", self.id)
    }

    pub async fn get(&self) -> Value {
        self.admin.get(&self.path()).await.ok()
    }

    /// Waits for the state.
    pub async fn expect_state(&self, state: &str) -> Value {
        let what = format!("{} is {state}", self.name);
        self.admin.wait_until(&self.path(), &what, |node| node["state"] == state).await
    }

    /// Waits until all of its GPUs are free.
    pub async fn expect_all_free(&self) -> Value {
        let what = format!("all GPUs of {} are free", self.name);
        self.admin.wait_until(&self.path(), &what, |node| node["gpus_free"] == node["gpus_total"]).await
    }

    /// Sends one of the lifecycle requests: `retire`, `remove`, `quarantine` and so on.
    pub async fn order(&self, action: &str) -> super::client::ApiResponse {
        self.admin.post(&format!("{}/{action}", self.path()), &json!({ "reason": "a test wants it" })).await
    }
}

/// An allocation, as the client of its user sees it.
#[derive(Clone)]
pub struct AllocationHandle {
    pub id: Uuid,
    by: Client,
}

impl AllocationHandle {
    #[must_use]
    pub fn new(id: Uuid, by: Client) -> Self {
        Self { id, by }
    }

    /// The same allocation, through another client.
    #[must_use]
    pub fn seen_by(&self, by: &Client) -> Self {
        Self { id: self.id, by: by.clone() }
    }

    #[must_use]
    pub fn path(&self) -> String {
        format!("/api/v1/allocations/{}", self.id)
    }

    pub async fn get(&self) -> Value {
        self.by.get(&self.path()).await.ok()
    }

    pub async fn expect_state(&self, state: &str) -> Value {
        self.expect_state_within(WAIT_TIMEOUT, state).await
    }

    pub async fn expect_state_within(&self, limit: Duration, state: &str) -> Value {
        let what = format!("allocation {} is {state}", self.id);
        self.by.wait_within(limit, &self.path(), &what, |allocation| allocation["state"] == state).await
    }

    /// Requests its release.
    pub async fn release(&self) {
        let answer = self.by.post(&format!("{}/release", self.path()), &json!({})).await;
        assert_eq!(answer.status.as_u16(), 202, "{answer}");
    }

    /// Requests its release, and waits until it is released.
    pub async fn release_fully(&self) {
        self.release().await;
        self.expect_state("released").await;
    }
}
