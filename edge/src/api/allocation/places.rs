//! Places for streams of events: so many in a process, and of these so many for one user, that nobody takes all of them.

use domain::policy::Key;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::{ApiError, Code};

/// How many streams one process keeps open.
const ALL: usize = 4096;

/// The places, by who has them.
#[derive(Clone, Default)]
pub(in crate::api) struct Streams(Arc<Mutex<Taken>>);

#[derive(Default)]
struct Taken {
    all: usize,
    by_user: HashMap<String, usize>,
}

impl Streams {
    /// A place for a stream of the user's, who may have `most`.
    ///
    /// # Errors
    /// `overloaded` where the user, or everybody together, has as many as there are.
    pub(super) fn take(&self, user: &str, most: usize) -> Result<Place, ApiError> {
        let mut taken = self.lock();
        if taken.all >= ALL {
            return Err(ApiError::overloaded().because("too many event streams"));
        }
        let own = taken.by_user.entry(user.to_owned()).or_default();
        if *own >= most {
            let message = format!("You have {own} event streams open here, and {most} are the most; close one first.");
            return Err(ApiError::new(Code::Overloaded, message)
                .detail("policy_key", Key::AllocationEventStreams.name())
                .detail("limit", most));
        }
        *own += 1;
        taken.all += 1;
        Ok(Place { places: self.clone(), user: user.to_owned() })
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A taken place, free again when it is dropped.
pub(super) struct Place {
    places: Streams,
    user: String,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.lock();
        taken.all -= 1;
        if let Some(own) = taken.by_user.get_mut(&self.user) {
            *own -= 1;
            if *own == 0 {
                taken.by_user.remove(&self.user);
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
        let streams = Streams::default();
        let mut anns: Vec<_> = (0..3).map(|_| streams.take("ann", 3).unwrap()).collect();
        assert_eq!(streams.take("ann", 3).err().unwrap().code(), Code::Overloaded);
        let bobs = streams.take("bob", 3).unwrap();
        anns.pop();
        anns.push(streams.take("ann", 3).unwrap());
        drop((anns, bobs));
        assert!(streams.lock().by_user.is_empty() && streams.lock().all == 0, "nothing is kept of those who left");
        let _all: Vec<_> = (0..ALL).map(|n| streams.take(&n.to_string(), 3).unwrap()).collect();
        assert!(streams.take("late", 3).is_err());
    }
}
