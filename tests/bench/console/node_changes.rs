//! A fleet of registered nodes, and another client that changes them.

use anyhow::{Context, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use reqwest::Method;
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};
use tests::cluster::client::Client;
use tests::cluster::{GPUS, TestCluster, id_of, node_body};
use tokio::task::JoinHandle;

const SKU: &str = "shown";
/// Requests at once: more than this, and the replica's queue is measured.
const AT_ONCE: usize = 16;

pub(crate) struct NodeChanges {
    admin: Client,
    /// The paths of the nodes, the oldest first.
    nodes: Arc<[String]>,
}

/// Changes that go on.
pub(crate) struct Running {
    task: JoinHandle<anyhow::Result<()>>,
    ends: Arc<AtomicBool>,
    done: Arc<AtomicUsize>,
    began: Instant,
}

impl NodeChanges {
    pub(crate) async fn register(cluster: &mut TestCluster, count: usize) -> anyhow::Result<Self> {
        cluster.offer_sku(SKU, GPUS).await;
        let admin = cluster.admin.clone();
        let registered = stream::iter(0..count).map(|number| {
            let admin = admin.clone();
            async move {
                let body = node_body(&format!("shown-{number}"), SKU, GPUS);
                id_of(&admin.post("/api/v1/admin/nodes", &body).await.created())
            }
        });
        let ids: Vec<_> = registered.buffered(AT_ONCE).collect().await;
        let nodes = ids.into_iter().map(|id| format!("/api/v1/admin/nodes/{id}")).collect();
        Ok(Self { admin, nodes })
    }

    /// Changes the fleet at this rate, one node after the other.
    pub(crate) fn start(&self, a_second: u32) -> Running {
        let (ends, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (admin, nodes) = (self.admin.clone(), self.nodes.clone());
        let (until, counted, began) = (ends.clone(), done.clone(), Instant::now());
        let task = tokio::spawn(async move {
            let numbers = stream::iter(0_u32..).take_while(|_| {
                let goes_on = !until.load(Ordering::Relaxed);
                async move { goes_on }
            });
            numbers
                .map(|number| {
                    let (admin, node) = (&admin, &nodes[number as usize % nodes.len()]);
                    async move {
                        let due = began + Duration::from_secs(1) / a_second * number;
                        tokio::time::sleep_until(due.into()).await;
                        rename(admin, node, &format!("changed-{number}")).await
                    }
                })
                .buffer_unordered(AT_ONCE)
                .try_for_each(|()| {
                    counted.fetch_add(1, Ordering::Relaxed);
                    async { Ok(()) }
                })
                .await
        });
        Running { task, ends, done, began }
    }

    /// Gives the node that is listed first another name, and returns when the request began, in milliseconds since 1970.
    pub(crate) async fn rename_first(&self, name: &str) -> anyhow::Result<f64> {
        let began = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs_f64() * 1000.0;
        rename(&self.admin, self.nodes.first().context("there is a node")?, name).await?;
        Ok(began)
    }
}

impl Running {
    /// Ends the changes and returns their number in a second.
    pub(crate) async fn stop(self) -> anyhow::Result<f64> {
        self.ends.store(true, Ordering::Relaxed);
        self.task.await??;
        Ok(self.done.load(Ordering::Relaxed) as f64 / self.began.elapsed().as_secs_f64())
    }
}

async fn rename(admin: &Client, node: &str, name: &str) -> anyhow::Result<()> {
    let answer = admin.send_once(Method::PATCH, node, Some(&json!({ "name": name }))).await;
    ensure!(answer.status.is_success(), "{}: {}", answer.status, answer.text);
    Ok(())
}
