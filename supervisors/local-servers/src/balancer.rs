//! A small TCP balancer: one address for several replicas, skipping the dead ones. It works on TCP alone, so that
//! TLS is terminated in the replica.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;

/// Connections that are forwarded at once; more wait in the listener's backlog.
const CONNECTIONS: usize = 8192;
const CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// Beyond the first resends of a packet that a busy kernel dropped.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Between attempts to accept when the process is out of file descriptors.
const ACCEPT_RETRY_AFTER: Duration = Duration::from_millis(50);

/// A running balancer. Dropping it closes its listener and its connections.
#[derive(Debug)]
pub struct Balancer {
    address: SocketAddr,
    tasks: [JoinHandle<()>; 2],
}

#[derive(Debug)]
struct Target {
    address: SocketAddr,
    alive: AtomicBool,
}

#[derive(Debug)]
struct Targets {
    all: Vec<Target>,
    next: AtomicUsize,
}

impl Balancer {
    /// Listens on a random port of 127.0.0.1. Connections go to the targets in turns.
    pub async fn start(targets: Vec<SocketAddr>) -> std::io::Result<Self> {
        Self::start_at(0, targets).await
    }

    /// The same, on this port.
    pub async fn start_at(port: u16, targets: Vec<SocketAddr>) -> std::io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", port)).await?;
        let address = listener.local_addr()?;
        let all = targets.into_iter().map(|address| Target { address, alive: AtomicBool::new(true) }).collect();
        let targets = Arc::new(Targets { all, next: AtomicUsize::new(0) });
        let tasks =
            [tokio::spawn(accept(listener, Arc::clone(&targets))), tokio::spawn(async move { targets.watch().await })];
        Ok(Self { address, tasks })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Balancer {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

async fn accept(listener: TcpListener, targets: Arc<Targets>) {
    let room = Arc::new(Semaphore::new(CONNECTIONS));
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        // The semaphore is never closed.
        let Ok(permit) = Arc::clone(&room).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((client, _)) => {
                let targets = Arc::clone(&targets);
                connections.spawn(async move {
                    let _permit = permit;
                    carry(client, &targets).await;
                });
            }
            Err(_) => tokio::time::sleep(ACCEPT_RETRY_AFTER).await,
        }
    }
}

/// Copies both directions until both have ended; the end of one is passed on as such (half-close).
async fn carry(mut client: TcpStream, targets: &Targets) {
    let Some(mut server) = targets.connect().await else { return };
    let _ = client.set_nodelay(true);
    let _ = server.set_nodelay(true);
    // A broken connection breaks the other side too, by being dropped.
    let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
}

impl Targets {
    /// The next target that accepts the connection: those considered alive first, then the others, round robin.
    async fn connect(&self) -> Option<TcpStream> {
        let count = self.all.len().max(1);
        let first = self.next.fetch_add(1, Ordering::Relaxed) % count;
        let turns = || self.all.iter().cycle().skip(first).take(self.all.len());
        let alive = turns().filter(|target| target.is_alive());
        let dead = turns().filter(|target| !target.is_alive());
        for target in alive.chain(dead) {
            if let Some(stream) = target.connect().await {
                return Some(stream);
            }
        }
        None
    }

    async fn watch(&self) {
        let mut clock = tokio::time::interval(CHECK_INTERVAL);
        clock.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            clock.tick().await;
            futures::future::join_all(self.all.iter().map(Target::connect)).await;
        }
    }
}

impl Target {
    fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Relaxed)
    }

    async fn connect(&self) -> Option<TcpStream> {
        let stream = timeout(CONNECT_TIMEOUT, TcpStream::connect(self.address)).await.ok().and_then(Result::ok);
        self.alive.store(stream.is_some(), Ordering::Relaxed);
        stream
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::ports::free_port;

    /// A server that answers a whole request (ended by a half-close) with its name and the request's length.
    async fn server(name: &'static str) -> (SocketAddr, JoinHandle<()>) {
        // Claimed: no other process has it once this server has ended.
        let listener = TcpListener::bind(("127.0.0.1", free_port().unwrap())).await.unwrap();
        let address = listener.local_addr().unwrap();
        let task = tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                tokio::spawn(async move {
                    let mut request = Vec::new();
                    // The balancer's probe is a connection without a byte.
                    if stream.read_to_end(&mut request).await.is_ok_and(|read| read > 0) {
                        let _ = stream.write_all(format!("{name} {}", request.len()).as_bytes()).await;
                    }
                });
            }
        });
        (address, task)
    }

    async fn ask(balancer: &Balancer, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(balancer.address()).await.unwrap();
        let mut answer = String::new();
        // Without a replica, the connection is closed while the request is in flight.
        let _ = stream.write_all(request).await;
        let _ = stream.shutdown().await;
        let _ = stream.read_to_string(&mut answer).await;
        answer
    }

    #[tokio::test]
    async fn connections_are_balanced_round_robin_and_survive_a_half_close() {
        let (one, _one) = server("one").await;
        let (two, _two) = server("two").await;
        let balancer = Balancer::start(vec![one, two]).await.unwrap();
        let request = vec![b'x'; 1_000_000];
        let mut answers = Vec::new();
        for _ in 0..4 {
            answers.push(ask(&balancer, &request).await);
        }
        assert_eq!(answers, ["one 1000000", "two 1000000", "one 1000000", "two 1000000"]);
    }

    #[tokio::test]
    async fn dead_replica_is_skipped_until_it_returns() {
        let (one, first) = server("one").await;
        let (two, _two) = server("two").await;
        let balancer = Balancer::start(vec![one, two]).await.unwrap();
        first.abort();
        let _ = first.await;
        for _ in 0..4 {
            assert_eq!(ask(&balancer, b"x").await, "two 1");
        }
        let repeated = TcpListener::bind(one).await.unwrap();
        let is_served = async {
            loop {
                let mut stream = TcpStream::connect(balancer.address()).await.unwrap();
                stream.write_all(b"x").await.unwrap();
                // The balancer's probes among them have no byte.
                while let Ok(Ok((mut found, _))) = timeout(CHECK_INTERVAL / 2, repeated.accept()).await {
                    if found.read_u8().await.is_ok() {
                        return;
                    }
                }
            }
        };
        timeout(Duration::from_secs(60), is_served).await.expect("the replica that came back is served again");
    }

    #[tokio::test]
    async fn connection_is_closed_when_no_replica_is_alive() {
        let (one, first) = server("one").await;
        let balancer = Balancer::start(vec![one]).await.unwrap();
        first.abort();
        let _ = first.await;
        assert_eq!(ask(&balancer, b"x").await, "");
    }
}
