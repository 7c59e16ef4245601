//! Files that run with the rights of their owner or group: a search of the machine's local file systems.
//!
//! Tenants write to some of them meanwhile, with any names and depth: the search is [`directory_walk`]'s. It yields the processor after each
//! slice, and ends after a bounded time. Homes are searched last, so that what tenants put there cannot keep the rest from being searched.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::ops::{ControlFlow, RangeInclusive};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use nix::sys::stat::SFlag;

use super::accounts::below;
use super::bounded_file::{FileStamp, sha256};
use super::privileges::{Observed, name_of};
use crate::system::directory_walk::{self, shortened};
use crate::system::mounts::{self, Mounts};

/// Entries of folders after which the search pauses.
const SLICE: usize = 1000;
const PAUSE: Duration = Duration::from_millis(5);
/// One file system is searched no longer than this.
const LIMIT: Duration = Duration::from_secs(20 * 60);
/// The most bytes of a file that are hashed. Its size is compared too.
const HASHED: u64 = 64 * 1024 * 1024;
const SETUID: u32 = 0o4000;
const SETGID: u32 = 0o2000;
const GROUP_EXECUTES: u32 = 0o0010;

/// Searches for such files. What was hashed is remembered.
#[derive(Default)]
pub struct SetuidSearch {
    hashed: BTreeMap<PathBuf, (FileStamp, String)>,
    /// The path of each entry.
    paths: BTreeMap<String, PathBuf>,
}

/// Where is searched.
#[derive(Debug, Clone)]
pub struct SearchedFolders {
    pub root: PathBuf,
    pub homes: PathBuf,
    pub tenants: RangeInclusive<u32>,
}

impl SetuidSearch {
    /// Searches everything. `goes_on` is asked after each slice, and may end the search.
    pub fn search(&mut self, folders: &SearchedFolders, mut goes_on: impl FnMut() -> bool) -> Observed {
        let mut observed = Observed::default();
        let is_machine = folders.root == Path::new("/");
        let mounts = if is_machine { Mounts::of_this_machine() } else { Ok(Mounts::default()) };
        let starts = if is_machine { mounts::local_with_setuid() } else { Ok(vec![folders.root.clone()]) };
        let (mounts, mut starts) = match (mounts, starts) {
            (Ok(mounts), Ok(starts)) => (mounts, starts),
            (Err(error), _) | (_, Err(error)) => {
                observed.fail(|| format!("the table of mounts: {error}"));
                return observed;
            }
        };
        let homes = below(&folders.root, &folders.homes);
        starts.push(homes.clone());
        let mut seen = BTreeSet::new();
        for start in starts {
            let until = Instant::now() + LIMIT;
            let (mut count, mut ended) = (0_usize, None);
            let errors = directory_walk::visit(&start, &mounts, |entry, status| {
                count += 1;
                if count.is_multiple_of(SLICE) {
                    std::thread::sleep(PAUSE);
                    if !goes_on() {
                        ended = Some("the search was ended");
                    } else if Instant::now() >= until {
                        ended = Some("the search took too long");
                    }
                }
                if ended.is_some() {
                    return ControlFlow::Break(());
                }
                let kind = status.st_mode & SFlag::S_IFMT.bits();
                let gives_rights = gives_rights(status.st_mode, (status.st_uid, status.st_gid), &folders.tenants);
                if kind == SFlag::S_IFREG.bits() && gives_rights {
                    let path = entry.path();
                    self.note(folders, path.clone(), &mut observed);
                    seen.insert(path);
                }
                let is_folder = kind == SFlag::S_IFDIR.bits();
                // The last start is the homes themselves.
                ControlFlow::Continue(is_folder && (start == homes || entry.path() != homes))
            });
            if let Some(why) = ended {
                observed.fail(|| format!("{}: {why}", shortened(&start)));
            }
            if let Some(error) = errors.first() {
                observed.fail(|| error.to_string());
            }
        }
        self.hashed.retain(|path, _| seen.contains(path));
        observed
    }

    /// The present state of an entry that a search has found; `None` where it gives no rights any more.
    pub fn state_of(&mut self, name: &str, tenants: &RangeInclusive<u32>) -> Option<String> {
        let path = self.paths.get(name)?.clone();
        self.state(&path, tenants).ok().flatten()
    }

    fn note(&mut self, folders: &SearchedFolders, path: PathBuf, observed: &mut Observed) {
        let shown = path.strip_prefix(&folders.root).map_or_else(|_| path.clone(), |rest| Path::new("/").join(rest));
        let name = name_of(&shown);
        match self.state(&path, &folders.tenants) {
            Ok(Some(state)) => {
                self.paths.insert(name.clone(), path);
                observed.add(name, state);
            }
            // It is gone.
            Ok(None) => {}
            Err(error) => observed.fail(|| format!("{name}: {error}")),
        }
    }

    fn state(&mut self, path: &Path, tenants: &RangeInclusive<u32>) -> io::Result<Option<String>> {
        let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        let file = match fs::File::options().read(true).custom_flags(flags.bits()).open(path) {
            Ok(file) => file,
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let metadata = file.metadata()?;
        if !metadata.is_file() || !gives_rights(metadata.mode(), (metadata.uid(), metadata.gid()), tenants) {
            return Ok(None);
        }
        let stamp = FileStamp::of(&metadata);
        let digest = match self.hashed.get(path) {
            Some((known, digest)) if *known == stamp => digest.clone(),
            _ => sha256(file.into(), HASHED)?,
        };
        self.hashed.insert(path.to_owned(), (stamp, digest.clone()));
        let (mode, owner, group) = (metadata.mode() & 0o7777, metadata.uid(), metadata.gid());
        Ok(Some(format!("{mode:04o} {owner}:{group} {} {digest}", metadata.len())))
    }
}

/// Whether the file gives more rights than those of a tenant, who may do so with files of its own.
fn gives_rights(mode: u32, (owner, group): (u32, u32), tenants: &RangeInclusive<u32>) -> bool {
    let of = |bit: u32, id: u32| mode & bit == bit && !tenants.contains(&id);
    // Without the right to execute it for the group, the bit gives a program no group. Everyone can make such a file in a setgid folder.
    of(SETUID, owner) || of(SETGID | GROUP_EXECUTES, group)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    /// The user of the test is a tenant to itself where it is in this range.
    const NOBODY: RangeInclusive<u32> = 4_000_000_000..=4_000_000_001;

    fn write(path: &Path, content: &str, mode: u32) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    fn folders(root: &Path) -> SearchedFolders {
        SearchedFolders { root: root.to_owned(), homes: "/home".into(), tenants: NOBODY }
    }

    fn names(observed: &Observed) -> Vec<&str> {
        observed.entries.keys().map(String::as_str).collect()
    }

    #[test]
    fn setuid_and_setgid_files_are_found_at_any_depth_under_any_name() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        write(&at("usr/bin/su"), "su", 0o4755);
        write(&at("usr/bin/wall"), "wall", 0o2755);
        write(&at("usr/bin/plain"), "plain", 0o755);
        // What everyone can make in a setgid folder that is open to all.
        write(&at("scratch/data"), "data", 0o2644);
        write(&at("home/eve/a b\n\u{1b}"), "hidden", 0o4755);
        let deep = format!("home/eve/{}", ["d"; 200].join("/"));
        write(&at(&format!("{deep}/x")), "deep", 0o4711);
        fs::set_permissions(at("usr"), fs::Permissions::from_mode(0o2755)).unwrap();
        symlink("../..", at("usr/bin/loop")).unwrap();
        symlink("su", at("usr/bin/link")).unwrap();
        let mut search = SetuidSearch::default();
        let found = search.search(&folders(root.path()), || true);
        let deep = format!("/{deep}/x");
        assert_eq!(names(&found), ["/home/eve/a b\\n\\x1b", deep.as_str(), "/usr/bin/su", "/usr/bin/wall"]);
        assert_eq!(found.incomplete, None);
        let own = SearchedFolders { tenants: 0..=u32::MAX, ..folders(root.path()) };
        assert_eq!(names(&search.search(&own, || true)), Vec::<&str>::new(), "a tenant's own files");
    }

    #[test]
    fn replaced_content_shows_although_size_and_modification_time_are_as_before() {
        let root = tempfile::tempdir().unwrap();
        let su = root.path().join("bin/su");
        write(&su, "good", 0o4755);
        let modified = fs::metadata(&su).unwrap().modified().unwrap();
        let mut search = SetuidSearch::default();
        let before = search.search(&folders(root.path()), || true);
        fs::write(&su, "evil").unwrap();
        fs::set_permissions(&su, fs::Permissions::from_mode(0o4755)).unwrap();
        fs::File::options().write(true).open(&su).unwrap().set_modified(modified).unwrap();
        let after = search.search(&folders(root.path()), || true);
        assert_ne!(before.entries["/bin/su"], after.entries["/bin/su"]);
        assert_eq!(search.state_of("/bin/su", &NOBODY).as_ref(), after.entries.get("/bin/su"));
        fs::set_permissions(&su, fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(search.state_of("/bin/su", &NOBODY), None, "it gives no rights any more");
    }

    #[test]
    fn ended_search_is_incomplete() {
        let root = tempfile::tempdir().unwrap();
        for n in 0..=SLICE {
            write(&root.path().join(format!("many/{n}")), "", 0o644);
        }
        let found = SetuidSearch::default().search(&folders(root.path()), || false);
        assert!(found.incomplete.unwrap().ends_with("the search was ended"));
        assert_eq!(SetuidSearch::default().search(&folders(root.path()), || true).incomplete, None);
    }
}
