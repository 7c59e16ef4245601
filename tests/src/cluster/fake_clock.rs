//! A fake clock of a process, which a test sets forward and back while the process runs: libfaketime between it and the C library
//! (`deploy/lib.sh` takes it out of Debian's package). The monotonic clock is not affected, as when an operator or NTP sets a machine's
//! clock; nor is the clock of the machine itself.

use anyhow::Context as _;
use chrono::TimeDelta;
use local_servers::private_files;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

const LIBRARY: &str = "libfaketimeMT.so.1";

/// The clock of one process, or of several that share it.
#[derive(Debug)]
pub struct FakeClock {
    /// The file with the clock's offset in seconds.
    offset_file: PathBuf,
    library: PathBuf,
}

impl FakeClock {
    /// A clock without an offset, in a folder that every user can reach.
    pub(super) fn new(folder: &Path) -> anyhow::Result<Self> {
        private_files::traversable_folder(folder)?;
        let library = folder.join(LIBRARY);
        std::fs::copy(installed()?, &library)?;
        std::fs::set_permissions(&library, std::fs::Permissions::from_mode(0o755))?;
        let clock = Self { offset_file: folder.join("ahead"), library };
        clock.set_offset(TimeDelta::zero());
        Ok(clock)
    }

    /// The environment variables that a process with this clock needs.
    pub(super) fn variables(&self) -> Vec<(String, String)> {
        let path = |path: &Path| path.to_string_lossy().into_owned();
        [
            ("LD_PRELOAD", path(&self.library)),
            ("FAKETIME_TIMESTAMP_FILE", path(&self.offset_file)),
            // The file is read at each use of the clock.
            ("FAKETIME_NO_CACHE", "1".to_owned()),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .to_vec()
    }

    /// Sets the clock this much ahead of the real time, or behind it if the offset is negative.
    pub fn set_offset(&self, ahead: TimeDelta) {
        // Renamed into place, so that no process reads half of it.
        let half = self.offset_file.with_extension("half");
        std::fs::write(&half, format!("{:+}", ahead.num_seconds())).expect("the clock can be put");
        std::fs::set_permissions(&half, std::fs::Permissions::from_mode(0o644)).expect("the clock can be put");
        std::fs::rename(&half, &self.offset_file).expect("the clock can be put");
    }
}

/// The library's path: where it was unpacked, or where Debian's package puts it.
fn installed() -> anyhow::Result<PathBuf> {
    let tools = std::env::var_os("GPUAAS_TOOLS_DIR").map(PathBuf::from);
    let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.dev/tools");
    let unpacked = tools.into_iter().chain([beside]).map(|tools| tools.join("faketime").join(LIBRARY));
    let packaged = std::fs::read_dir("/usr/lib").into_iter().flatten().flatten();
    let packaged = packaged.map(|folder| folder.path().join("faketime").join(LIBRARY));
    let mut found = unpacked.chain(packaged);
    found.find(|library| library.is_file()).with_context(|| format!("{LIBRARY} is missing: run `deploy/test --tools`"))
}
