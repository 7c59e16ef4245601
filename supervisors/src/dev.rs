//! `gpuaas dev`: a whole environment on one machine, of real parts.

pub mod balancer;
pub mod environment;
pub mod files;
pub mod identity;
pub mod nats;
pub mod pki;
pub mod postgres;
pub mod process;
