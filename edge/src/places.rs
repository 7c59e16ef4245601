//! Places for what stays open: so many in a process, and of these so many for one user in the whole cluster, so that nobody takes all of
//! them. Whoever cannot be asked about a user's others (`actors::places`) admits; then each process counts for itself.

use crate::error::{ApiError, Code};
use actors::Directory;
use actors::place::command_id;
use actors::places::{RENEWED_EVERY, Word};
use domain::policy::Key;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::task::AbortHandle;
use tokio::time::{MissedTickBehavior, interval};
use uuid::Uuid;

/// How long the owner of a user's shard may take to answer. It answers within milliseconds unless it hangs, and where nobody owns the shard the bus
/// says so at once. The bound is far above that, since a connection that is admitted without an answer is one too many for as long as it lives.
const ASK_WITHIN: Duration = Duration::from_secs(2);

/// What stays open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Open {
    /// An allocation's transitions.
    Events,
    Notifications,
}

impl Open {
    /// As a person calls several of it.
    const fn name(self) -> &'static str {
        match self {
            Self::Events => "event streams",
            Self::Notifications => "connections for notifications",
        }
    }

    /// How many one user may have.
    pub(crate) const fn key(self) -> Key {
        match self {
            Self::Events => Key::AllocationEventStreams,
            Self::Notifications => Key::NotificationConnections,
        }
    }

    /// How many one process keeps open.
    const fn all(self) -> usize {
        match self {
            Self::Events => 4096,
            Self::Notifications => 15_000,
        }
    }
}

/// Why there is no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Full {
    /// The user has as many as there may be.
    Own { what: Open, most: u32 },
    /// This process has.
    All,
}

impl From<Full> for ApiError {
    fn from(full: Full) -> Self {
        match full {
            Full::Own { what, most } => {
                let message = format!("You have {most} {} open, which are the most; close one first.", what.name());
                Self::new(Code::Overloaded, message).detail("policy_key", what.key().name()).detail("limit", most)
            }
            Full::All => Self::overloaded().because("too much is open at once"),
        }
    }
}

/// The places of this process. Cheap to clone.
#[derive(Clone)]
pub struct Places {
    directory: Directory,
    here: Here,
}

impl Places {
    #[must_use]
    pub fn new(directory: Directory) -> Self {
        Self { directory, here: Here::default() }
    }

    /// A place of the user's, who may have `most`.
    pub(crate) async fn take(&self, what: Open, user: &str, most: i64) -> Result<Place, Full> {
        let most = u32::try_from(most).unwrap_or(1);
        let here = self.here.take(what, user, most)?;
        let owner = command_id(&[b"places", what.name().as_bytes(), user.as_bytes()]).0;
        let id = Uuid::new_v4();
        let directory = self.directory.clone();
        match directory.place(owner, id, Word::Take { most }, ASK_WITHIN).await {
            Ok(true) => {}
            Ok(false) => return Err(Full::Own { what, most }),
            Err(error) => tracing::debug!(%error, "nobody said how much else the user has open"),
        }
        let renewing = tokio::spawn({
            let directory = directory.clone();
            async move {
                let mut turn = interval(RENEWED_EVERY);
                turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
                turn.tick().await;
                loop {
                    turn.tick().await;
                    // Where it is not heard it is said again.
                    let _ = directory.place(owner, id, Word::Keep, ASK_WITHIN).await;
                }
            }
        });
        Ok(Place { owner, id, directory, renewing: renewing.abort_handle(), _here: here })
    }
}

/// A taken place, free again when it is dropped.
pub(crate) struct Place {
    owner: Uuid,
    id: Uuid,
    directory: Directory,
    renewing: AbortHandle,
    _here: PlaceHere,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.renewing.abort();
        let (directory, owner, id) = (self.directory.clone(), self.owner, self.id);
        // Where it is not heard, the place is free when nothing has been heard of it for a while.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move { directory.place(owner, id, Word::Leave, ASK_WITHIN).await });
        }
    }
}

/// What this process has open.
#[derive(Clone, Default)]
struct Here(Arc<Mutex<Taken>>);

#[derive(Default)]
struct Taken {
    all: HashMap<Open, usize>,
    by_user: HashMap<(Open, String), u32>,
}

impl Here {
    fn take(&self, what: Open, user: &str, most: u32) -> Result<PlaceHere, Full> {
        let mut taken = self.lock();
        if taken.all.get(&what).is_some_and(|all| *all >= what.all()) {
            return Err(Full::All);
        }
        let key = (what, user.to_owned());
        let own = taken.by_user.get(&key).copied().unwrap_or_default();
        if own >= most {
            return Err(Full::Own { what, most });
        }
        taken.by_user.insert(key.clone(), own + 1);
        *taken.all.entry(what).or_default() += 1;
        Ok(PlaceHere { here: self.clone(), key })
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct PlaceHere {
    here: Here,
    key: (Open, String),
}

impl Drop for PlaceHere {
    fn drop(&mut self) {
        let mut taken = self.here.lock();
        if let Some(all) = taken.all.get_mut(&self.key.0) {
            *all -= 1;
        }
        if let Some(own) = taken.by_user.get_mut(&self.key) {
            *own -= 1;
            if *own == 0 {
                taken.by_user.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn nobody_takes_all_places_and_who_leaves_one_can_take_one() {
        let here = Here::default();
        let take = |user: &str| here.take(Open::Events, user, 3);
        let mut anns: Vec<_> = (0..3).map(|_| take("ann").unwrap()).collect();
        assert_eq!(take("ann").err(), Some(Full::Own { what: Open::Events, most: 3 }));
        let others = (take("bob").unwrap(), here.take(Open::Notifications, "ann", 3).unwrap());
        anns.pop();
        anns.push(take("ann").unwrap());
        drop((anns, others));
        assert!(here.lock().by_user.is_empty(), "nothing is kept of those who left");
        let all: Vec<_> = (0..Open::Events.all()).map(|n| take(&n.to_string()).unwrap()).collect();
        assert_eq!(take("late").err(), Some(Full::All));
        assert!(
            here.take(Open::Notifications, "late", 3).is_ok(),
            "what is open of one kind takes no place of another"
        );
        drop(all);
        assert!(take("late").is_ok());
    }

    #[test]
    fn who_has_too_much_open_is_told_what_and_by_which_policy() {
        let refused = ApiError::from(Full::Own { what: Open::Notifications, most: 32 });
        assert_eq!(refused.code(), Code::Overloaded);
        assert!(refused.message().contains("32 connections for notifications"), "{}", refused.message());
        assert_eq!(refused.details()["policy_key"], "notification.connections_per_user");
    }
}
