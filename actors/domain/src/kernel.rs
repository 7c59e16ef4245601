//! The lowest floor: the words of all state machines, as ids, time, money, policies, events and the trait `Machine`. No module here uses an
//! entity, and its modules form no circle.
//!
//! | module | what |
//! | --- | --- |
//! | `state_machine`, `commit`, `precondition` | what every entity is; what the store gets of it, and answers; versions of others that a decision rests on |
//! | `id`, `time`, `retry`, `resend_timer` | ids; time as decisions see it; backoff; when a message is resent |
//! | `event`, `history`, `audit` | events, history and audited actions |
//! | `authz`, `policy`, `gcra` | permissions; policies; rate limits |
//! | `explanation`, `reason_code` | what a caller reads of a rejection; codes of reasons |
//! | `money`, `ledger`, `account_holder`, `summand` | amounts; postings; who holds an account; what entities add to sums |
//! | `hardware`, `finding`, `validation`, `task_type`, `package_digest`, `rollout_outcome` | machines: GPUs, findings, measurements, tasks of agents, their package, their part in a rollout |
//! | `metadata`, `ssh_key`, `recording` | names and labels; keys that log in; the terms of a recording |
//! | `key_purpose`, `redact` | what the service's keys are for; secrets in stored JSON |

pub mod account_holder;
pub mod audit;
pub mod authz;
pub mod commit;
pub mod event;
pub mod explanation;
pub mod finding;
pub mod gcra;
pub mod hardware;
pub mod history;
pub mod id;
pub mod key_purpose;
pub mod ledger;
pub mod metadata;
pub mod money;
pub mod package_digest;
pub mod policy;
pub mod precondition;
pub mod reason_code;
pub mod recording;
pub mod redact;
pub mod resend_timer;
pub mod retry;
pub mod rollout_outcome;
pub mod ssh_key;
pub mod state_machine;
pub mod summand;
pub mod task_type;
pub mod time;
pub mod validation;
