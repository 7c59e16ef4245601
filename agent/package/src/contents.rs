//! What the package has in it.

/// A unit of `deploy/systemd`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unit {
    pub name: &'static str,
    /// The agent's own unit gets the name that the bundle gives it.
    pub is_agent: bool,
    /// The link in the installation's folder through which it starts its program.
    pub link: &'static str,
    /// Whether an installation enables it: it does nothing until it is needed.
    pub is_enabled: bool,
}

/// The link that names the version in use.
pub const CURRENT: &str = "current";
/// The link that names the version whose finalizer carries an update out: the one of before the update.
pub const FINALIZER_LINK: &str = "finalizer";
/// The unit that carries an update out.
pub const FINALIZER_UNIT: &str = "gpuaas-finalizer.service";

/// Programs, which are installed in `bin/`.
pub const PROGRAMS: &[&str] =
    &["gpuaas-agent", "gpuaas-finalizer", "gpuaas-installer", "gpuaas-log-collector", "gpuaas-telemetry-edge"];

/// Units, which are installed in `units/` and copied from there to systemd's folder.
pub const UNITS: &[Unit] = &[
    Unit { name: "gpuaas-agent.service", is_agent: true, link: CURRENT, is_enabled: false },
    Unit { name: FINALIZER_UNIT, is_agent: false, link: FINALIZER_LINK, is_enabled: true },
    Unit { name: "gpuaas-log-collector.service", is_agent: false, link: CURRENT, is_enabled: false },
    Unit { name: "gpuaas-telemetry-edge.service", is_agent: false, link: CURRENT, is_enabled: false },
];

/// The folders of the package.
pub const PROGRAM_FOLDER: &str = "bin";
pub const UNIT_FOLDER: &str = "units";
/// The agent's program.
pub const AGENT: &str = "gpuaas-agent";

/// What is known of a unit in a package.
#[must_use]
pub fn unit(name: &str) -> Option<Unit> {
    UNITS.iter().copied().find(|unit| unit.name == name)
}
