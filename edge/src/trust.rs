//! The service's own keys and what they certify: node certificates, their authority, and the nonces of recoveries.

pub mod current_keys;
pub mod node_ca;
pub mod node_certificate;
pub mod recovery_nonce;
