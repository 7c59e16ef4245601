//! The service's own keys and what they certify: node certificates, their authority, and the nonces of recoveries.

pub mod keys_in_force;
pub mod node_ca;
pub mod node_certificate;
pub mod recovery_nonce;
