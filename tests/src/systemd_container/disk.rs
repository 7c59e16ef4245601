//! What is on a machine's disk before its first boot: the files of its image, and the seed of cloud-init.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

/// With this file in the tree, cloud-init does nothing at a boot.
const DISABLED: &str = "/etc/cloud/cloud-init.disabled";
/// Where cloud-init looks for the user data of a machine without a network.
const SEED: &str = "/var/lib/cloud/seed/nocloud";

/// A file of an image. It belongs to root.
#[derive(Clone, Debug)]
pub struct DiskFile {
    pub(super) path: String,
    pub(super) mode: u32,
    pub(super) content: Vec<u8>,
}

impl DiskFile {
    pub fn new(path: impl Into<String>, mode: u32, content: impl Into<Vec<u8>>) -> Self {
        Self { path: path.into(), mode, content: content.into() }
    }
}

/// One deployment of a machine: what cloud-init is given.
#[derive(Clone, Debug)]
pub struct Deployment {
    /// Another one than that of before makes a boot a first one.
    pub instance: String,
    pub user_data: String,
}

impl Deployment {
    /// The files of its seed.
    #[must_use]
    pub fn seed(&self) -> [DiskFile; 2] {
        let meta_data = format!("instance-id: {}\nlocal-hostname: gpu-1\n", self.instance);
        [
            DiskFile::new(format!("{SEED}/meta-data"), 0o600, meta_data),
            DiskFile::new(format!("{SEED}/user-data"), 0o600, self.user_data.clone()),
        ]
    }
}

/// Writes an image's files, and the deployment's seed, below the root of a disk.
pub(super) fn prepare(root: &Path, image: &[DiskFile], deployment: Option<&Deployment>) -> io::Result<()> {
    for file in image {
        write(root, file)?;
    }
    let Some(deployment) = deployment else { return Ok(()) };
    for file in &deployment.seed() {
        write(root, file)?;
    }
    std::fs::remove_file(below(root, DISABLED))
}

fn write(root: &Path, file: &DiskFile) -> io::Result<()> {
    let path = below(root, &file.path);
    std::fs::create_dir_all(path.parent().unwrap_or(root))?;
    std::fs::write(&path, &file.content)?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(file.mode))
}

fn below(root: &Path, path: &str) -> PathBuf {
    root.join(path.trim_start_matches('/'))
}
