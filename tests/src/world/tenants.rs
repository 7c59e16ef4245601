//! Nodes and allocations as a test speaks of them.

use super::PATIENCE;
use super::client::Client;
use serde_json::{Value, json};
use std::time::Duration;
use uuid::Uuid;

/// A node in the inventory.
#[derive(Clone)]
pub struct OnboardedNode {
    pub id: Uuid,
    /// Its host's name and its agent's.
    pub name: String,
    admin: Client,
}

impl OnboardedNode {
    pub(super) fn new(id: Uuid, name: String, admin: Client) -> Self {
        Self { id, name, admin }
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

    /// Waits until nobody holds a GPU of it.
    pub async fn expect_all_free(&self) -> Value {
        let what = format!("all GPUs of {} are free", self.name);
        self.admin.wait_until(&self.path(), &what, |node| node["gpus_free"] == node["gpus_total"]).await
    }

    /// One of the lifecycle calls: `retire`, `remove`, `quarantine` and their like.
    pub async fn order(&self, action: &str) -> super::client::Answer {
        self.admin.post(&format!("{}/{action}", self.path()), &json!({ "reason": "a test wants it" })).await
    }
}

/// An allocation, seen by who rented it.
#[derive(Clone)]
pub struct Rented {
    pub id: Uuid,
    by: Client,
}

impl Rented {
    #[must_use]
    pub fn new(id: Uuid, by: Client) -> Self {
        Self { id, by }
    }

    /// The same, asked for elsewhere.
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
        self.expect_state_within(PATIENCE, state).await
    }

    pub async fn expect_state_within(&self, limit: Duration, state: &str) -> Value {
        let what = format!("allocation {} is {state}", self.id);
        self.by.wait_within(limit, &self.path(), &what, |allocation| allocation["state"] == state).await
    }

    /// Asks for its end.
    pub async fn release(&self) {
        let answer = self.by.post(&format!("{}/release", self.path()), &json!({})).await;
        assert_eq!(answer.status.as_u16(), 202, "{answer}");
    }
}
