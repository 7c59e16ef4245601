//! The benchmarks (`tests/bench`), compiled with the tests: the gate checks their types and lints, and links none of them. As programs of
//! their own they link the whole workspace once each, which `deploy/bench` and `deploy/test --all` do.
#![allow(dead_code, reason = "nothing calls the `main` of a benchmark here")]
#![deny(clippy::unwrap_used, clippy::expect_used)]

#[path = "../bench/allocate.rs"]
mod allocate;
#[path = "../bench/api.rs"]
mod api;
#[path = "../bench/billing.rs"]
mod billing;
#[path = "../bench/commit.rs"]
mod commit;
#[path = "../bench/console.rs"]
mod console;
#[path = "../bench/fleet.rs"]
mod fleet;
#[path = "../bench/fleet_telemetry.rs"]
mod fleet_telemetry;
#[path = "../bench/health_probes.rs"]
mod health_probes;
#[path = "../bench/limiter.rs"]
mod limiter;
#[path = "../bench/log_gateway.rs"]
mod log_gateway;
#[path = "../bench/polls.rs"]
mod polls;
#[path = "../bench/rollout.rs"]
mod rollout;
