//! The effects of commits: they are performed in this process directly, and at the other replicas by a message over NATS.

use crate::cluster::bus::{Bus, PeerSignal};
use crate::entity_environment::EntityEnvironment;
use actors::shell_dependencies::Effects;
use domain::Effect;
use edge::http::long_poll::LongPolls;
use edge::terminal::Terminals;
use edge::tls::connections::Connections;
use std::sync::Arc;
use tokio::sync::Notify;

/// What effects act on: the waiting requests and connections of this process, and its caches.
#[derive(Clone)]
pub struct ProcessEffects {
    pub polls: LongPolls,
    pub terminals: Terminals,
    pub connections: Connections,
    pub environment: Arc<EntityEnvironment>,
    /// Notified when the keys are to be read at once.
    pub keys_changed: Arc<Notify>,
    pub bus: Bus,
}

impl Effects for ProcessEffects {
    fn perform(&self, effect: Effect) {
        let signal = match effect {
            Effect::WakeNode(node) => PeerSignal::Wake(node),
            Effect::CloseNode(node) => PeerSignal::Close(node),
            Effect::WakeTerminal(session) => PeerSignal::Terminal(session),
            // The others receive the event.
            Effect::ReadPolicy => return self.environment.policy_written.notify_one(),
            Effect::ReadKeys => return self.keys_changed.notify_one(),
        };
        self.apply(signal);
        let bus = self.bus.clone();
        tokio::spawn(async move { bus.send_signal(signal).await });
    }
}

impl ProcessEffects {
    /// Applies a signal in this process.
    pub fn apply(&self, signal: PeerSignal) {
        match signal {
            PeerSignal::Wake(node) => self.polls.wake(node),
            PeerSignal::Terminal(session) => self.terminals.wake(session),
            PeerSignal::Close(node) => {
                self.polls.wake(node);
                self.connections.close_node(node.0);
            }
        }
    }
}
