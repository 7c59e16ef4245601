//! What the execution of a task comes to: its output, or why it failed.

use serde_json::{Map, Value, json};
use wire::inventory::DeviceRef;

/// The output of a task, as it goes into its result.
pub type TaskOutput = Map<String, Value>;

/// Why a task failed, as reported to the control plane.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct TaskFailure {
    /// Machine-readable, such as `device_in_use`.
    pub code: &'static str,
    /// For the operator.
    pub message: String,
}

impl TaskFailure {
    /// A failure with its code and message.
    pub fn new(code: &'static str, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

impl From<crate::atomic_file::FileError> for TaskFailure {
    fn from(error: crate::atomic_file::FileError) -> Self {
        Self::new("node_storage", crate::chain(&error))
    }
}

/// An output with these fields.
pub fn output<const N: usize>(pairs: [(&str, Value); N]) -> TaskOutput {
    pairs.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// The UUIDs of devices, as in an output.
#[must_use]
pub fn uuids(devices: &[DeviceRef]) -> Value {
    json!(devices.iter().map(|device| device.uuid.as_str()).collect::<Vec<_>>())
}
