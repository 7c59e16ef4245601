//! A clock of its own for a process, which a test puts on and back while the process runs: libfaketime between it and the C library
//! (`deploy/lib.sh` takes it out of Debian's package). What measures how long something takes goes on as ever, as where an operator or
//! NTP sets a machine's clock; the machine's own is left alone.

use anyhow::Context as _;
use chrono::TimeDelta;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use supervisors::dev::files;

const LIBRARY: &str = "libfaketimeMT.so.1";

/// The clock of one process, or of several that share it.
#[derive(Debug)]
pub struct Clock {
    /// Says by how many seconds it is ahead.
    told: PathBuf,
    library: PathBuf,
}

impl Clock {
    /// One that goes right, in a folder that everybody can reach.
    pub(super) fn new(folder: &Path) -> anyhow::Result<Self> {
        files::passable_folder(folder)?;
        let library = folder.join(LIBRARY);
        std::fs::copy(installed()?, &library)?;
        std::fs::set_permissions(&library, std::fs::Permissions::from_mode(0o755))?;
        let clock = Self { told: folder.join("ahead"), library };
        clock.put(TimeDelta::zero());
        Ok(clock)
    }

    /// What the process's environment has to hold.
    pub(super) fn variables(&self) -> Vec<(String, String)> {
        let path = |path: &Path| path.to_string_lossy().into_owned();
        [
            ("LD_PRELOAD", path(&self.library)),
            ("FAKETIME_TIMESTAMP_FILE", path(&self.told)),
            // Read at each look at the clock.
            ("FAKETIME_NO_CACHE", "1".to_owned()),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .to_vec()
    }

    /// From here on it is so much ahead of what it should be; with a negative one, behind.
    pub fn put(&self, ahead: TimeDelta) {
        // Renamed into place, so that nobody reads half of it.
        let half = self.told.with_extension("half");
        std::fs::write(&half, format!("{:+}", ahead.num_seconds())).expect("the clock can be put");
        std::fs::set_permissions(&half, std::fs::Permissions::from_mode(0o644)).expect("the clock can be put");
        std::fs::rename(&half, &self.told).expect("the clock can be put");
    }
}

/// Where it was unpacked, or where Debian's package puts it.
fn installed() -> anyhow::Result<PathBuf> {
    let tools = std::env::var_os("GPUAAS_TOOLS_DIR").map(PathBuf::from);
    let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.dev/tools");
    let unpacked = tools.into_iter().chain([beside]).map(|tools| tools.join("faketime").join(LIBRARY));
    let packaged = std::fs::read_dir("/usr/lib").into_iter().flatten().flatten();
    let packaged = packaged.map(|folder| folder.path().join("faketime").join(LIBRARY));
    let mut found = unpacked.chain(packaged);
    found.find(|library| library.is_file()).with_context(|| format!("{LIBRARY} is missing: run `deploy/test --tools`"))
}
