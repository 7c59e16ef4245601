//! What the package has in it.

/// A unit of `deploy/systemd`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unit {
    pub name: &'static str,
    /// The agent's own unit gets the name that the bundle gives it.
    pub is_agent: bool,
}

/// Programs, which are installed in `bin/`.
pub const PROGRAMS: &[&str] = &["gpuaas-agent", "gpuaas-installer", "gpuaas-log-collector", "gpuaas-telemetry-edge"];

/// Units, which are installed in `units/` and copied from there to systemd's folder.
pub const UNITS: &[Unit] = &[
    Unit { name: "gpuaas-agent.service", is_agent: true },
    Unit { name: "gpuaas-log-collector.service", is_agent: false },
    Unit { name: "gpuaas-telemetry-edge.service", is_agent: false },
];

/// The folders of the package.
pub const PROGRAM_FOLDER: &str = "bin";
pub const UNIT_FOLDER: &str = "units";

/// The unit of the agent in a package.
#[must_use]
pub fn is_agent_unit(name: &str) -> bool {
    UNITS.iter().any(|unit| unit.is_agent && unit.name == name)
}
