//! A reading of the machine that may not return: a file system that does not answer keeps its caller in the kernel.
//!
//! ```text
//! read ──▶ thread ──in time──▶ Fresh(value)
//!             └───later──────▶ Late { since }     later reads look for its answer: there is never a second thread
//! ```
//!
//! Each kind of reading has a thread of its own, not one of the runtime: no other reading waits for it, nor does the end of the process. A
//! thread that not even a signal ends still keeps the kernel from ending the process, so that file systems that are served by a program or
//! by another machine are not asked in the first place (`system_executor/mounts.rs`).

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tracing::{info, warn};

/// A caller waits no longer for a reading. What it answers later is in the next one.
pub const WAIT: Duration = Duration::from_secs(1);
/// A reading that takes longer than this is a finding. A busy disk answers sooner.
pub const LATE_AFTER: Duration = Duration::from_secs(10);

/// A kind of reading, with the one that is in flight.
#[derive(Debug)]
pub struct BoundedReading<T> {
    /// What is read, for the log and for operators.
    subject: String,
    in_flight: Option<InFlight<T>>,
}

/// The answer of a reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reading<T> {
    Fresh(T),
    /// It has not answered yet.
    Late {
        since: Instant,
    },
}

impl<T> Reading<T> {
    /// The value, if it was read.
    pub fn fresh(self) -> Option<T> {
        match self {
            Self::Fresh(value) => Some(value),
            Self::Late { .. } => None,
        }
    }
}

#[derive(Debug)]
struct InFlight<T> {
    since: Instant,
    answer: Arc<Answer<T>>,
    /// It is logged once that it is late.
    is_logged: bool,
}

#[derive(Debug)]
struct Answer<T> {
    state: Mutex<AnswerState<T>>,
    /// For callers in a thread, and in a task.
    ended: (Condvar, Notify),
}

#[derive(Debug)]
enum AnswerState<T> {
    Pending,
    Is(T),
    /// The thread has panicked.
    None,
}

/// Ends the wait for a thread, also where it panics.
struct Answering<T>(Arc<Answer<T>>);

impl<T> Drop for Answering<T> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        if matches!(*state, AnswerState::Pending) {
            *state = AnswerState::None;
        }
        drop(state);
        self.0.ended.0.notify_all();
        self.0.ended.1.notify_one();
    }
}

impl<T> Answer<T> {
    fn state(&self) -> MutexGuard<'_, AnswerState<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Send + 'static> BoundedReading<T> {
    /// `subject` is what is read, such as a path.
    #[must_use]
    pub fn of(subject: impl Into<String>) -> Self {
        Self { subject: subject.into(), in_flight: None }
    }

    /// What is read.
    #[must_use]
    pub fn subject(&self) -> &str {
        &self.subject
    }

    /// Reads in a thread. Where the reading before is in flight, its answer is taken, without a wait, and nothing else is read.
    pub async fn read(&mut self, read: impl FnOnce() -> T + Send + 'static) -> Reading<T> {
        if let Some(answer) = self.start(read) {
            // The notification is stored where the thread ends first.
            let _ = tokio::time::timeout(WAIT, answer.ended.1.notified()).await;
        }
        self.take()
    }

    /// The same for a caller in a thread, which waits this long.
    pub fn read_within(&mut self, wait: Duration, read: impl FnOnce() -> T + Send + 'static) -> Reading<T> {
        if let Some(answer) = self.start(read) {
            let is_pending = |state: &mut AnswerState<T>| matches!(state, AnswerState::Pending);
            drop(answer.ended.0.wait_timeout_while(answer.state(), wait, is_pending));
        }
        self.take()
    }

    /// Since when the reading has not answered, where that is a finding.
    #[must_use]
    pub fn late_since(&self) -> Option<Instant> {
        self.in_flight.as_ref().map(|in_flight| in_flight.since).filter(|since| since.elapsed() >= LATE_AFTER)
    }

    /// Whether the last reading has not answered yet: what was known before may not be so any more.
    #[must_use]
    pub const fn is_in_flight(&self) -> bool {
        self.in_flight.is_some()
    }

    /// Starts a thread, where none is in flight.
    fn start(&mut self, read: impl FnOnce() -> T + Send + 'static) -> Option<Arc<Answer<T>>> {
        if self.in_flight.is_some() {
            return None;
        }
        let answer =
            Arc::new(Answer { state: Mutex::new(AnswerState::Pending), ended: (Condvar::new(), Notify::new()) });
        let answering = Answering(Arc::clone(&answer));
        let started = std::thread::Builder::new().name("reading".to_owned()).spawn(move || {
            let answering = answering;
            let value = read();
            *answering.0.state() = AnswerState::Is(value);
        });
        if let Err(error) = started {
            // The answer is none; the next reading tries again.
            warn!(error_code = "reading", %error, subject = self.subject, "no thread can be started for a reading");
        }
        self.in_flight = Some(InFlight { since: Instant::now(), answer: Arc::clone(&answer), is_logged: false });
        Some(answer)
    }

    fn take(&mut self) -> Reading<T> {
        let Some(in_flight) = &mut self.in_flight else { return Reading::Late { since: Instant::now() } };
        let state = std::mem::replace(&mut *in_flight.answer.state(), AnswerState::Pending);
        let since = in_flight.since;
        match state {
            AnswerState::Pending => {
                if since.elapsed() >= LATE_AFTER && !std::mem::replace(&mut in_flight.is_logged, true) {
                    warn!(
                        error_code = "reading_late",
                        subject = self.subject,
                        "a reading of the machine does not answer"
                    );
                }
                Reading::Late { since }
            }
            AnswerState::None => {
                self.in_flight = None;
                Reading::Late { since }
            }
            AnswerState::Is(value) => {
                if in_flight.is_logged {
                    info!(subject = self.subject, "a reading of the machine has answered");
                }
                self.in_flight = None;
                Reading::Fresh(value)
            }
        }
    }
}

#[cfg(test)]
#[path = "../tests/hanging_mount/mod.rs"]
pub(crate) mod hanging_mount;

#[cfg(test)]
impl<T> BoundedReading<T> {
    /// What is in flight counts as late.
    pub(crate) fn make_late(&mut self) {
        self.in_flight.as_mut().unwrap().since -= LATE_AFTER;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn reading_that_answers_is_fresh_and_the_next_one_reads_again() {
        let mut reading = BoundedReading::of("a number");
        assert_eq!(reading.read(|| 1).await, Reading::Fresh(1));
        assert_eq!(reading.read(|| 2).await, Reading::Fresh(2));
        assert_eq!(reading.read_within(WAIT * 60, || 3), Reading::Fresh(3));
        assert!(!reading.is_in_flight() && reading.late_since().is_none());
    }

    #[tokio::test]
    async fn reading_that_hangs_has_one_thread_until_it_answers_and_the_next_one_reads_again() {
        let (answer, hanging) = mpsc::channel::<u32>();
        let mut reading = BoundedReading::of("a number");
        let first = reading.read(move || hanging.recv().unwrap()).await;
        let Reading::Late { since } = first else { panic!("{first:?}") };
        for _ in 0..3 {
            let again = reading.read(|| panic!("a second thread")).await;
            assert_eq!(again, Reading::Late { since });
            assert_eq!(reading.read_within(WAIT * 60, || panic!("a second thread")), Reading::Late { since });
        }
        assert_eq!(reading.late_since(), None, "it may be busy");
        reading.make_late();
        assert!(reading.late_since().is_some());
        answer.send(7).unwrap();
        let answered = loop {
            match reading.read(|| panic!("a second thread")).await {
                Reading::Late { .. } => tokio::time::sleep(Duration::from_millis(5)).await,
                Reading::Fresh(value) => break value,
            }
        };
        assert_eq!((answered, reading.late_since()), (7, None));
        assert_eq!(reading.read(|| 8).await, Reading::Fresh(8));
    }

    #[tokio::test]
    async fn reading_that_panics_is_late_once_and_hangs_nothing() {
        let mut reading = BoundedReading::of("a number");
        assert!(matches!(reading.read(|| -> u32 { panic!("no number") }).await, Reading::Late { .. }));
        assert_eq!(reading.read(|| 1).await, Reading::Fresh(1));
    }
}
