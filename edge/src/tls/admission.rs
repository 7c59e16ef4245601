//! Admission of connections to a listener. A connection is *pending* until its first request is complete (or its node has presented a
//! certificate): until then its peer has proved nothing and cost us memory. Bounds per network keep one client from using up the slots of
//! all; where pending connections of many networks fill their bound, the oldest one is closed, which belongs to no honest client.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError},
};

use dashmap::{DashMap, Entry};
use prometheus::{IntCounterVec, Opts, Registry};
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::sync::CancellationToken;

use super::serve::ListenerLimits;

/// Connections that a listener of this process closed before their first request, by the bound that was exceeded.
pub static REFUSED: LazyLock<IntCounterVec> = LazyLock::new(|| {
    let opts = Opts::new(
        "listener_connections_refused_total",
        "Connections closed before their first request: the address had too many, or the oldest of too many pending ones",
    );
    IntCounterVec::new(opts, &["reason"]).unwrap_or_else(|error| unreachable!("{error}"))
});

/// Shows [`REFUSED`] on `/metrics`, each reason from the start.
///
/// # Errors
/// Where the registry has a metric of this name.
pub fn register(registry: &Registry) -> prometheus::Result<()> {
    for reason in ["address_pending", "address_open", "displaced"] {
        REFUSED.with_label_values(&[reason]).inc_by(0);
    }
    registry.register(Box::new(REFUSED.clone()))
}

/// The slots of one listener.
#[derive(Debug)]
pub(super) struct Admission {
    pending_most: usize,
    pending_per_address: u32,
    open_per_address: u32,
    by_network: DashMap<IpAddr, NetworkCounts>,
    pending: Mutex<PendingConnections>,
}

/// The connections of one network.
#[derive(Clone, Copy, Debug, Default)]
struct NetworkCounts {
    pending: u32,
    open: u32,
}

#[derive(Debug, Default)]
struct PendingConnections {
    next: u64,
    by_age: BTreeMap<u64, CancellationToken>,
}

impl Admission {
    pub(super) fn new(limits: &ListenerLimits) -> Arc<Self> {
        Arc::new(Self {
            pending_most: limits.pending,
            pending_per_address: limits.pending_per_address,
            open_per_address: limits.open_per_address,
            by_network: DashMap::new(),
            pending: Mutex::default(),
        })
    }

    /// Admits a connection; `network` is `None` for an address that many clients share. `None` where the network is at its bound.
    pub(super) fn admit(
        self: &Arc<Self>,
        network: Option<IpAddr>,
        slot: OwnedSemaphorePermit,
    ) -> Option<ConnectionSlot> {
        if let Some(network) = network {
            let mut held = self.by_network.entry(network).or_default();
            let over = match *held {
                NetworkCounts { pending, .. } if pending >= self.pending_per_address => Some("address_pending"),
                NetworkCounts { open, .. } if open >= self.open_per_address => Some("address_open"),
                NetworkCounts { .. } => None,
            };
            if let Some(reason) = over {
                REFUSED.with_label_values(&[reason]).inc();
                return None;
            }
            held.pending += 1;
            held.open += 1;
        }
        let displaced = CancellationToken::new();
        let number = {
            let mut pending = self.pending();
            let number = pending.next;
            pending.next += 1;
            pending.by_age.insert(number, displaced.clone());
            number
        };
        if self.pending().by_age.len() > self.pending_most {
            self.displace_oldest();
        }
        let state = Mutex::new(SlotState { network, is_pending: true, has_asked: false });
        Some(ConnectionSlot { admission: Arc::clone(self), number, state, displaced, _slot: slot })
    }

    /// Closes the connection that has been pending for longest, if there is any.
    pub(super) fn displace_oldest(&self) {
        let oldest = self.pending().by_age.pop_first();
        if let Some((_, displaced)) = oldest {
            REFUSED.with_label_values(&["displaced"]).inc();
            displaced.cancel();
        }
    }

    fn pending(&self) -> MutexGuard<'_, PendingConnections> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn release(&self, network: IpAddr, pending: bool, open: bool) {
        if let Entry::Occupied(mut held) = self.by_network.entry(network) {
            held.get_mut().pending -= u32::from(pending);
            held.get_mut().open -= u32::from(open);
            if held.get().open == 0 {
                held.remove();
            }
        }
    }
}

/// A connection's slot, for as long as the connection exists.
#[derive(Debug)]
pub(super) struct ConnectionSlot {
    admission: Arc<Admission>,
    number: u64,
    state: Mutex<SlotState>,
    displaced: CancellationToken,
    _slot: OwnedSemaphorePermit,
}

#[derive(Clone, Copy, Debug)]
struct SlotState {
    network: Option<IpAddr>,
    is_pending: bool,
    has_asked: bool,
}

impl ConnectionSlot {
    /// The headers of a request are complete.
    pub(super) fn settle(&self) {
        self.state().has_asked = true;
        self.leave_pending();
    }

    /// No request is complete yet.
    pub(super) fn is_unasked(&self) -> bool {
        !self.state().has_asked
    }

    fn leave_pending(&self) {
        let mut state = self.state();
        if std::mem::replace(&mut state.is_pending, false) {
            self.admission.pending().by_age.remove(&self.number);
            if let Some(network) = state.network {
                self.admission.release(network, true, false);
            }
        }
    }

    /// The peer is a node with a certificate, which has bounds of its own: many nodes share one address.
    pub(super) fn settle_as_node(&self) {
        self.leave_pending();
        if let Some(network) = self.state().network.take() {
            self.admission.release(network, false, true);
        }
    }

    /// Completes when a newer connection has taken the slot.
    pub(super) async fn displaced(&self) {
        self.displaced.cancelled().await;
    }

    fn state(&self) -> MutexGuard<'_, SlotState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.leave_pending();
        if let Some(network) = self.state().network.take() {
            self.admission.release(network, false, true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;
    use tokio::sync::Semaphore;

    fn admission(pending: usize) -> Arc<Admission> {
        Admission::new(&ListenerLimits {
            pending,
            pending_per_address: 3,
            open_per_address: 5,
            ..ListenerLimits::default()
        })
    }

    fn admit(admission: &Arc<Admission>, address: &str) -> Option<ConnectionSlot> {
        let slot = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
        admission.admit(Some(address.parse().unwrap()), slot)
    }

    #[test]
    fn address_has_separate_bounds_for_pending_and_open_connections() {
        let admission = admission(100);
        let mut slots: Vec<_> = (0..3).filter_map(|_| admit(&admission, "192.0.2.1")).collect();
        assert!(admit(&admission, "192.0.2.1").is_none(), "three are pending");
        assert!(admit(&admission, "192.0.2.2").is_some());
        slots.iter().for_each(ConnectionSlot::settle);
        slots.extend((0..2).filter_map(|_| admit(&admission, "192.0.2.1")));
        assert_eq!(slots.len(), 5);
        assert!(admit(&admission, "192.0.2.1").is_none(), "five are open");
        slots.clear();
        assert!(admit(&admission, "192.0.2.1").is_some());
        assert!(admission.by_network.is_empty(), "nothing is remembered of an address without connections");
    }

    #[test]
    fn node_connections_do_not_count_against_an_address() {
        let admission = admission(100);
        let slots: Vec<_> = (0..20)
            .map_while(|_| {
                let slot = admit(&admission, "192.0.2.1")?;
                slot.settle_as_node();
                Some(slot)
            })
            .collect();
        assert_eq!(slots.len(), 20);
    }

    #[test]
    fn oldest_pending_connection_is_displaced_over_the_bound() {
        let admission = admission(3);
        let settled = admit(&admission, "192.0.2.1").unwrap();
        settled.settle();
        let slots: Vec<_> = (2..6).map(|n| admit(&admission, &format!("192.0.2.{n}")).unwrap()).collect();
        let displaced: Vec<_> = slots.iter().map(|slot| slot.displaced().now_or_never().is_some()).collect();
        assert_eq!(displaced, [true, false, false, false]);
        assert!(settled.displaced().now_or_never().is_none());
    }
}
