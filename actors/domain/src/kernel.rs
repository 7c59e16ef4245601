//! The lowest floor: the words of all state machines, as ids, time, money, policies, events and the trait `Machine`. No module here uses an
//! entity, and its modules form no circle.

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
