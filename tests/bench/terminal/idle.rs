//! Idle sessions, with a real shell each, and their memory in the process that serves them.

use anyhow::{Context, ensure};
use futures::{SinkExt as _, StreamExt as _, TryStreamExt as _, stream};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tests::bench::memory::{resident_kib, slope};
use tests::cluster::{AllocationHandle, GPUS, TestCluster};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;

use super::{OF_ONE_ALLOCATION, SKU, open, start_node};

/// The number of measurements of the memory, at evenly spaced counts.
const LOOKS: usize = 5;
const AT_ONCE: usize = 16;
/// The pause before the memory of a process is measured.
const SETTLES_IN: Duration = Duration::from_secs(4);

type Socket = WebSocketStream<TlsStream<TcpStream>>;

/// The memory of replica 0 for a connection without a request, in KiB. Such a connection is closed after half a minute, so
/// all are opened and measured within that.
pub(crate) async fn tls_kib(cluster: &TestCluster, count: usize) -> anyhow::Result<f64> {
    let address: SocketAddr = cluster.replicas[0].public_url().trim_start_matches("https://").parse()?;
    let connector = TlsConnector::from(Arc::new(cluster.gateway_at(0).client_config()));
    let mut held: Vec<TlsStream<TcpStream>> = Vec::new();
    let mut seen = Vec::new();
    for step in 1..=LOOKS {
        let missing = count * step / LOOKS - held.len();
        let connecting = stream::iter(0..missing).map(|_| async {
            let stream = TcpStream::connect(address).await?;
            anyhow::Ok(connector.connect(address.ip().into(), stream).await?)
        });
        held.extend(connecting.buffer_unordered(AT_ONCE).try_collect::<Vec<_>>().await?);
        tokio::time::sleep(SETTLES_IN / 2).await;
        seen.push((held.len() as f64, resident_kib(cluster.replicas[0].pid().context("the replica has ended")?)?));
    }
    Ok(slope(&seen))
}

/// Open sessions. Their output is read, so that they stay open.
pub(crate) struct Idle {
    pub(crate) kib_each: f64,
    reading: Vec<tokio::task::JoinHandle<()>>,
}

impl Drop for Idle {
    fn drop(&mut self) {
        self.reading.iter().for_each(tokio::task::JoinHandle::abort);
    }
}

/// Opens sessions, on as many nodes as that takes; the process's memory is measured as their number grows.
pub(crate) async fn grow(cluster: &mut TestCluster, count: usize) -> anyhow::Result<Idle> {
    let mut rented = Vec::new();
    for _ in 0..count.div_ceil(OF_ONE_ALLOCATION) {
        start_node(cluster).await;
        let allocation = cluster.rent(SKU, GPUS).await;
        allocation.expect_state("active").await;
        rented.push(allocation);
    }
    let cluster: &TestCluster = cluster;
    let pid = cluster.replicas[0].pid().context("the replica has ended")?;
    let (mut reading, mut seen) = (Vec::new(), Vec::new());
    for step in 1..=LOOKS {
        let numbers = reading.len()..count * step / LOOKS;
        let opening = stream::iter(numbers).map(|number| silent(cluster, &rented[number / OF_ONE_ALLOCATION]));
        let sockets: Vec<Socket> = opening.buffer_unordered(AT_ONCE).try_collect().await?;
        reading.extend(sockets.into_iter().map(|mut socket| {
            tokio::spawn(async move { while socket.next().await.is_some_and(|message| message.is_ok()) {} })
        }));
        tokio::time::sleep(SETTLES_IN).await;
        let ended = reading.iter().filter(|task| task.is_finished()).count();
        ensure!(ended == 0, "{ended} sessions have ended");
        seen.push((reading.len() as f64, resident_kib(pid)?));
    }
    Ok(Idle { kib_each: slope(&seen), reading })
}

/// A session whose shell is replaced by a program without output and with little memory.
async fn silent(cluster: &TestCluster, allocation: &AllocationHandle) -> anyhow::Result<Socket> {
    let mut socket = open(cluster, allocation.id).await?;
    socket.send(Message::Binary(b"exec sleep 100000\n".to_vec().into())).await?;
    Ok(socket)
}
