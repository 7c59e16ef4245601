//! The queues of a worker: one for transitions with a waiting caller, one for patient ones. Batches alternate between them, so that
//! neither waits for more than one batch of the other; ten thousand accruals at the end of a window delay no command.

use super::batch::{Batch, BatchLimit, Job};
use super::{CommitterConfig, Sequences};
use std::collections::VecDeque;
use tokio::sync::mpsc;

/// Both ends of a worker's queues.
pub(super) fn queues(config: &CommitterConfig) -> (QueueSenders, Queues) {
    let bound = config.queue.max(1);
    let ((soon, from_soon), (patient, from_patient)) = (mpsc::channel(bound), mpsc::channel(bound));
    let transitions = config.batch.max(1);
    let queues = Queues {
        soon: Queue::new(from_soon, BatchLimit { transitions, postings: usize::MAX }),
        patient: Queue::new(from_patient, BatchLimit { transitions, postings: config.patient_postings }),
        patient_was_last: false,
        sequences: config.sequences.clone(),
    };
    (QueueSenders { soon, patient }, queues)
}

/// The senders of a worker's queues.
pub(super) struct QueueSenders {
    soon: mpsc::Sender<Job>,
    patient: mpsc::Sender<Job>,
}

impl QueueSenders {
    /// The sender for a patient transition, or for another.
    pub(super) const fn of(&self, patient: bool) -> &mpsc::Sender<Job> {
        if patient { &self.patient } else { &self.soon }
    }

    /// The transitions that wait for the worker, and the bound.
    pub(super) fn depth(&self) -> (usize, usize) {
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
    limit: BatchLimit,
}

impl Queues {
    pub(super) fn len(&self) -> usize {
        self.soon.waiting.len() + self.patient.waiting.len()
    }

    pub(super) fn are_closed(&self) -> bool {
        self.soon.from.is_closed() && self.patient.from.is_closed()
    }

    /// Refuses further transitions.
    pub(super) fn close(&mut self) {
        self.soon.from.close();
        self.patient.from.close();
    }

    /// Waits for a transition; `false` where none will come any more. Cancel-safe: nothing is lost.
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

    /// The next batch of the waiting transitions, and how many left the queue.
    pub(super) fn take(&mut self) -> (Batch, usize) {
        self.soon.fill();
        self.patient.fill();
        let patient = !self.patient.waiting.is_empty() && (self.soon.waiting.is_empty() || !self.patient_was_last);
        self.patient_was_last = patient;
        let queue = if patient { &mut self.patient } else { &mut self.soon };
        let before = queue.waiting.len();
        let batch = Batch::take(&mut queue.waiting, queue.limit, &self.sequences);
        (batch, before - queue.waiting.len())
    }
}

impl Queue {
    const fn new(from: mpsc::Receiver<Job>, limit: BatchLimit) -> Self {
        Self { from, waiting: VecDeque::new(), limit }
    }

    /// Twice the batch size is enough to fill a batch beside those that must stay.
    fn fill(&mut self) {
        while self.waiting.len() < 2 * self.limit.transitions {
            match self.from.try_recv() {
                Ok(job) => self.waiting.push_back(job),
                Err(_) => break,
            }
        }
    }
}
