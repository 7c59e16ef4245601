//! What waits at a worker: what somebody waits for, and what can wait, each in a queue of its own. They are written by turns, so that
//! neither waits for more than one batch of the other; ten thousand accounts whose window ends are not in front of anybody's command.

use super::batch::{Batch, Job, Limit};
use super::{CommitterConfig, Sequences};
use std::collections::VecDeque;
use tokio::sync::mpsc;

/// Both ends of a worker's queues.
pub(super) fn queues(config: &CommitterConfig) -> (Ways, Queues) {
    let bound = config.queue.max(1);
    let ((soon, from_soon), (patient, from_patient)) = (mpsc::channel(bound), mpsc::channel(bound));
    let transitions = config.batch.max(1);
    let queues = Queues {
        soon: Queue::new(from_soon, Limit { transitions, postings: usize::MAX }),
        patient: Queue::new(from_patient, Limit { transitions, postings: config.patient_postings }),
        patient_was_last: false,
        sequences: config.sequences.clone(),
    };
    (Ways { soon, patient }, queues)
}

/// The ways into a worker's queues.
pub(super) struct Ways {
    soon: mpsc::Sender<Job>,
    patient: mpsc::Sender<Job>,
}

impl Ways {
    /// The one for a transition that can wait, or cannot.
    pub(super) const fn of(&self, patient: bool) -> &mpsc::Sender<Job> {
        if patient { &self.patient } else { &self.soon }
    }

    /// Transitions that wait in front of the worker, and how many may.
    pub(super) fn filled(&self) -> (usize, usize) {
        let bound = self.soon.max_capacity() + self.patient.max_capacity();
        (bound - self.soon.capacity() - self.patient.capacity(), bound)
    }
}

pub(super) struct Queues {
    soon: Queue,
    patient: Queue,
    patient_was_last: bool,
    sequences: Sequences,
}

struct Queue {
    from: mpsc::Receiver<Job>,
    waiting: VecDeque<Job>,
    limit: Limit,
}

impl Queues {
    pub(super) fn len(&self) -> usize {
        self.soon.waiting.len() + self.patient.waiting.len()
    }

    pub(super) fn are_closed(&self) -> bool {
        self.soon.from.is_closed() && self.patient.from.is_closed()
    }

    /// Nothing more comes in.
    pub(super) fn close(&mut self) {
        self.soon.from.close();
        self.patient.from.close();
    }

    /// Waits for something to write; `false` where nothing will come any more. Nothing is lost where it is not waited to the end.
    pub(super) async fn wait(&mut self) -> bool {
        let Self { soon, patient, .. } = self;
        tokio::select! {
            biased;
            Some(job) = soon.from.recv() => soon.waiting.push_back(job),
            Some(job) = patient.from.recv() => patient.waiting.push_back(job),
            else => return false,
        }
        true
    }

    /// The next batch, of what waits *now*, and how many do not wait any more.
    pub(super) fn take(&mut self) -> (Batch, usize) {
        self.soon.gather();
        self.patient.gather();
        let patient = !self.patient.waiting.is_empty() && (self.soon.waiting.is_empty() || !self.patient_was_last);
        self.patient_was_last = patient;
        let queue = if patient { &mut self.patient } else { &mut self.soon };
        let before = queue.waiting.len();
        let batch = Batch::take(&mut queue.waiting, queue.limit, &self.sequences);
        (batch, before - queue.waiting.len())
    }
}

impl Queue {
    const fn new(from: mpsc::Receiver<Job>, limit: Limit) -> Self {
        Self { from, waiting: VecDeque::new(), limit }
    }

    /// Twice the batch is enough to fill it beside those that must stay.
    fn gather(&mut self) {
        while self.waiting.len() < 2 * self.limit.transitions {
            match self.from.try_recv() {
                Ok(job) => self.waiting.push_back(job),
                Err(_) => break,
            }
        }
    }
}
