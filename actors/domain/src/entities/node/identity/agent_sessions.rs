//! Which processes of the agent have used an identity: a copy of the machine uses it at the same time.

use serde::{Deserialize, Serialize};

/// The sessions that have sent heartbeats with this identity. A process that another one has replaced never returns: where some take turns, they
/// run at the same time, on two machines or with two copies of the state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentSessions {
    present: Option<String>,
    /// Oldest first, at most [`REPLACED`].
    replaced: Vec<String>,
    /// How many changes in a row were to a replaced one.
    returns: u32,
}

/// The bound of replaced sessions that are remembered.
const REPLACED: usize = 8;

/// One heartbeat that was delayed until after a restart is two changes: to the session before and back.
const RETURNS: u32 = 3;

impl AgentSessions {
    pub(super) const fn is_unknown(&self) -> bool {
        self.present.is_none()
    }

    pub(in crate::entities::node) fn is_present(&self, session: &str) -> bool {
        self.present.as_deref() == Some(session)
    }

    pub(in crate::entities::node) fn note(&mut self, session: &str) {
        if self.is_present(session) {
            return;
        }
        self.returns = match self.replaced.iter().position(|replaced| replaced == session) {
            Some(at) => {
                self.replaced.remove(at);
                self.returns.saturating_add(1)
            }
            None => 0,
        };
        self.replaced.extend(self.present.replace(session.to_owned()));
        let beyond = self.replaced.len().saturating_sub(REPLACED);
        self.replaced.drain(..beyond);
    }

    /// Whether a session runs beside the present one.
    #[must_use]
    pub const fn run_beside_each_other(&self) -> bool {
        self.returns >= RETURNS
    }

    /// An operator has found the copy.
    pub(in crate::entities::node) const fn settle(&mut self) {
        self.returns = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(sessions: &str) -> AgentSessions {
        let mut known = AgentSessions::default();
        sessions.split(' ').for_each(|session| known.note(session));
        known
    }

    #[test]
    fn sessions_that_alternate_are_noticed_with_the_second_heartbeat_after_both_are_known() {
        assert!(!after("a b a b").run_beside_each_other());
        assert!(after("a b a b a").run_beside_each_other());
        assert!(after("a a b b a a b b a a").run_beside_each_other());
        assert!(after("a b c a b c").run_beside_each_other(), "three of them");
    }

    #[test]
    fn restarts_and_a_heartbeat_that_was_delayed_over_one_are_of_one_agent() {
        assert!(!after("a b c d e f g h i j k l").run_beside_each_other());
        assert!(!after("a b a b b b c").run_beside_each_other());
        assert!(
            !after("a b a b c b c d c d").run_beside_each_other(),
            "one delayed heartbeat at each of three restarts"
        );
    }

    #[test]
    fn few_replaced_sessions_are_remembered() {
        let names: Vec<_> = (0..100).map(|n| n.to_string()).collect();
        assert_eq!(after(&names.join(" ")).replaced.len(), REPLACED);
    }
}
