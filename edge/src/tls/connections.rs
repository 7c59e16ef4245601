//! The open connections by node, so that all connections of a removed node can be closed, with what it has open through a proxy.

use std::{
    any::Any,
    collections::HashMap,
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
};

use dashmap::DashMap;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use uuid::Uuid;

/// The connections of nodes to this replica.
#[derive(Clone, Debug, Default)]
pub struct Connections(Arc<Registry>);

#[derive(Debug, Default)]
struct Registry {
    next: AtomicU64,
    by_node: DashMap<Uuid, HashMap<u64, OpenConnection>>,
}

#[derive(Debug)]
struct OpenConnection {
    cut: CancellationToken,
    /// The key identifier of the authority of its certificate.
    authority: String,
}

/// The owner of a connection.
pub(crate) struct ConnectionOwner {
    pub(crate) node_id: Uuid,
    pub(crate) authority: String,
}

impl Connections {
    /// Cuts every connection of the node, whatever runs on it, upgraded ones too. Answers how many there were.
    pub fn close_node(&self, node_id: Uuid) -> usize {
        let Some((_, connections)) = self.0.by_node.remove(&node_id) else { return 0 };
        for connection in connections.values() {
            connection.cut.cancel();
        }
        connections.len()
    }

    /// Closes every connection whose authority `is_trusted` does not accept. Returns how many there were.
    pub fn close_untrusted(&self, is_trusted: impl Fn(&str) -> bool) -> usize {
        let mut closed = 0;
        for connections in &self.0.by_node {
            for connection in connections.values().filter(|it| !is_trusted(&it.authority)) {
                connection.cut.cancel();
                closed += 1;
            }
        }
        closed
    }

    /// Registers something of a node that outlives its request, over any connection: it is closed like the node's own connections. Register
    /// before querying the node, so that a removal in between is not missed.
    #[must_use]
    pub fn hold(&self, node_id: Uuid, authority: String) -> ConnectionGuard {
        let cut = CancellationToken::new();
        let registered = self.register(ConnectionOwner { node_id, authority }, &cut);
        ConnectionGuard { cut, _registered: registered }
    }

    fn register(
        &self,
        ConnectionOwner { node_id, authority }: ConnectionOwner,
        cut: &CancellationToken,
    ) -> ConnectionRegistration {
        let number = self.0.next.fetch_add(1, Ordering::Relaxed);
        self.0.by_node.entry(node_id).or_default().insert(number, OpenConnection { cut: cut.clone(), authority });
        ConnectionRegistration { registry: Arc::clone(&self.0), node_id, number }
    }

    /// How many connections the node has to this replica.
    #[must_use]
    pub fn count(&self, node_id: Uuid) -> usize {
        self.0.by_node.get(&node_id).map_or(0, |connections| connections.len())
    }

    /// How many connections all nodes have to this replica.
    #[must_use]
    pub fn all(&self) -> usize {
        self.0.by_node.iter().map(|connections| connections.len()).sum()
    }

    /// Wraps a node's connection so that [`Connections::close_node`] reaches it, and any connection so that it holds its slot for as long
    /// as it exists.
    pub(crate) fn watch<T>(
        &self,
        whose: Option<ConnectionOwner>,
        io: T,
        slot: Arc<dyn Any + Send + Sync>,
    ) -> RevocableStream<T> {
        let cut = CancellationToken::new();
        let registered = whose.map(|whose| self.register(whose, &cut));
        RevocableStream {
            io,
            cut: registered.is_some().then(|| Box::pin(cut.cancelled_owned())),
            _registered: registered,
            _slot: slot,
        }
    }
}

#[derive(Debug)]
struct ConnectionRegistration {
    registry: Arc<Registry>,
    node_id: Uuid,
    number: u64,
}

impl Drop for ConnectionRegistration {
    fn drop(&mut self) {
        self.registry.by_node.remove_if_mut(&self.node_id, |_, connections| {
            connections.remove(&self.number);
            connections.is_empty()
        });
    }
}

/// A node's terminal, or the like, while it is open.
#[derive(Debug)]
pub struct ConnectionGuard {
    cut: CancellationToken,
    _registered: ConnectionRegistration,
}

impl ConnectionGuard {
    /// Until it is to be cut.
    pub async fn cut(&self) {
        self.cut.cancelled().await;
    }
}

/// A stream that can be closed from outside. It stays wrapped through an upgrade, so a WebSocket is closed too.
pub(crate) struct RevocableStream<T> {
    io: T,
    cut: Option<Pin<Box<WaitForCancellationFutureOwned>>>,
    _registered: Option<ConnectionRegistration>,
    _slot: Arc<dyn Any + Send + Sync>,
}

impl<T> RevocableStream<T> {
    /// Ready with the error once the connection has been cut; wakes the task when it is.
    fn poll_cut(&mut self, context: &mut Context<'_>) -> Poll<io::Error> {
        match &mut self.cut {
            Some(cut) => cut.as_mut().poll(context).map(|()| {
                io::Error::new(io::ErrorKind::ConnectionAborted, "the node was removed, or its authority retired")
            }),
            None => Poll::Pending,
        }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for RevocableStream<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Poll::Ready(error) = self.poll_cut(context) {
            // A finished future may not be polled again, and the next read must fail as well.
            self.cut = Some(Box::pin(cancelled()));
            return Poll::Ready(Err(error));
        }
        Pin::new(&mut self.io).poll_read(context, buffer)
    }
}

fn cancelled() -> WaitForCancellationFutureOwned {
    let token = CancellationToken::new();
    token.cancel();
    token.cancelled_owned()
}

impl<T: AsyncWrite + Unpin> AsyncWrite for RevocableStream<T> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if let Poll::Ready(error) = self.poll_cut(context) {
            self.cut = Some(Box::pin(cancelled()));
            return Poll::Ready(Err(error));
        }
        Pin::new(&mut self.io).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if let Poll::Ready(error) = self.poll_cut(context) {
            self.cut = Some(Box::pin(cancelled()));
            return Poll::Ready(Err(error));
        }
        Pin::new(&mut self.io).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    fn slot() -> Arc<dyn Any + Send + Sync> {
        Arc::new(())
    }

    fn of(node_id: Uuid, authority: &str) -> Option<ConnectionOwner> {
        Some(ConnectionOwner { node_id, authority: authority.to_owned() })
    }

    #[tokio::test]
    async fn connection_is_closed_when_its_authority_is_no_longer_trusted() {
        let connections = Connections::default();
        let node_id = Uuid::now_v7();
        let (_far_a, near_a) = duplex(64);
        let (mut far_b, near_b) = duplex(64);
        let mut old = connections.watch(of(node_id, "old"), near_a, slot());
        let mut new = connections.watch(of(node_id, "new"), near_b, slot());
        assert_eq!(connections.close_untrusted(|authority| authority == "new"), 1);
        assert!(old.read_u8().await.is_err());
        far_b.write_u8(7).await.unwrap();
        assert_eq!(new.read_u8().await.unwrap(), 7);
    }

    #[tokio::test]
    async fn closing_a_node_closes_only_its_connections() {
        let connections = Connections::default();
        let (removed, other) = (Uuid::now_v7(), Uuid::now_v7());
        let (_far_a, near_a) = duplex(64);
        let (mut far_b, near_b) = duplex(64);
        let mut cut = connections.watch(of(removed, "a"), near_a, slot());
        let mut stored = connections.watch(of(other, "a"), near_b, slot());
        assert_eq!((connections.count(removed), connections.count(other)), (1, 1));
        let waiting = tokio::spawn(async move {
            let first = cut.read_u8().await.map_err(|error| error.kind());
            let second = cut.read_u8().await.map_err(|error| error.kind());
            (first, second, cut.write_all(b"x").await.map_err(|error| error.kind()))
        });
        tokio::task::yield_now().await;
        assert_eq!(connections.close_node(removed), 1);
        let aborted = io::ErrorKind::ConnectionAborted;
        assert_eq!(waiting.await.unwrap(), (Err(aborted), Err(aborted), Err(aborted)));
        far_b.write_u8(7).await.unwrap();
        assert_eq!(stored.read_u8().await.unwrap(), 7);
        assert_eq!(connections.close_node(removed), 0);
    }

    #[tokio::test]
    async fn closing_a_node_closes_what_it_has_open_through_a_proxy() {
        let connections = Connections::default();
        let (removed, other) = (Uuid::now_v7(), Uuid::now_v7());
        let (first, second) = (connections.hold(removed, "old".into()), connections.hold(other, "old".into()));
        let third = connections.hold(other, "new".into());
        assert_eq!(connections.close_node(removed), 1);
        first.cut().await;
        assert_eq!(connections.close_untrusted(|authority| authority == "new"), 1);
        second.cut().await;
        assert!(!third.cut.is_cancelled());
        drop((first, second, third));
        assert!(connections.0.by_node.is_empty());
    }

    #[tokio::test]
    async fn ended_connection_is_removed() {
        let connections = Connections::default();
        let node_id = Uuid::now_v7();
        let first = connections.watch(of(node_id, "a"), duplex(1).0, slot());
        let second = connections.watch(of(node_id, "a"), duplex(1).0, slot());
        drop(first);
        assert_eq!(connections.count(node_id), 1);
        drop(second);
        assert_eq!(connections.count(node_id), 0);
        assert!(connections.0.by_node.is_empty());
    }
}
