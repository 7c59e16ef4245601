//! Files that run with the rights of their owner or group, or with capabilities: a search of the machine's local file systems.
//!
//! Tenants write to some of them meanwhile, with any names and depth: the search is [`directory_walk`]'s. It yields the processor after each
//! slice, and ends after a bounded time. Homes are searched last, so that what tenants put there cannot keep the rest from being searched.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::stat::SFlag;

use super::accounts::below;
use super::bounded_file::{FileStamp, sha256};
use super::privileges::{Observed, PrivilegeKind, name_of};
use crate::system_executor::directory_walk::{self, WalkEntry, shortened};
use crate::system_executor::mounts::{self, Mounts};

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
const EXECUTES: u32 = 0o0111;
/// The extended attribute with the capabilities that a program starts with. The kernel takes them from executable files alone.
const CAPABILITIES: &str = "security.capability";
/// More than any version of it has.
const CAPABILITY_BYTES: usize = 64;
/// Of `linux/capability.h`: the version whose capabilities hold within user namespaces of one root user, whose uid follows them.
const VERSION_MASK: u32 = 0xff00_0000;
const NAMESPACED: u32 = 0x0300_0000;
const NAMESPACE_ROOT: std::ops::Range<usize> = 20..24;

/// Searches for such files. What was hashed is remembered.
pub struct SetuidSearch {
    hashed: BTreeMap<PathBuf, (FileStamp, String)>,
    /// The path of each entry.
    paths: BTreeMap<String, PathBuf>,
    limit: Duration,
}

impl Default for SetuidSearch {
    fn default() -> Self {
        Self { hashed: BTreeMap::new(), paths: BTreeMap::new(), limit: LIMIT }
    }
}

/// Where is searched.
#[derive(Debug, Clone)]
pub struct SearchedFolders {
    pub root: PathBuf,
    pub homes: PathBuf,
    /// Their uids, which are their gids, too.
    pub tenants: BTreeSet<u32>,
}

/// What a search has found.
#[derive(Debug, Default)]
pub struct FoundFiles {
    pub setuid: Observed,
    pub capabilities: Observed,
}

impl FoundFiles {
    fn fail(&mut self, why: &str) {
        self.setuid.fail(|| why.to_owned());
        self.capabilities.fail(|| why.to_owned());
    }

    fn add(&mut self, name: &str, rights: FileRights) {
        let FileRights { setuid, capabilities } = rights;
        setuid.into_iter().for_each(|state| self.setuid.add(name.to_owned(), state));
        capabilities.into_iter().for_each(|state| self.capabilities.add(name.to_owned(), state));
    }
}

/// The rights that a file gives, as the state of its entries.
#[derive(Debug, Default)]
struct FileRights {
    setuid: Option<String>,
    capabilities: Option<String>,
}

impl SetuidSearch {
    /// Searches everything. `goes_on` is asked after each slice, and may end the search.
    pub fn search(&mut self, folders: &SearchedFolders, mut goes_on: impl FnMut() -> bool) -> FoundFiles {
        let mut found = FoundFiles::default();
        // Root can set a file's change time back: what was hashed counts until the next search.
        self.hashed.clear();
        let is_machine = folders.root == Path::new("/");
        let mounts = if is_machine { Mounts::of_this_machine() } else { Ok(Mounts::default()) };
        let starts = if is_machine { mounts::local_with_setuid() } else { Ok(vec![folders.root.clone()]) };
        let (mounts, mut starts) = match (mounts, starts) {
            (Ok(mounts), Ok(starts)) => (mounts, starts),
            (Err(error), _) | (_, Err(error)) => {
                found.fail(&format!("the table of mounts: {error}"));
                return found;
            }
        };
        let homes = below(&folders.root, &folders.homes);
        // The homes of another machine, or of a program, are its affair, as what is mounted from there elsewhere.
        if !is_machine || mounts.is_on_local(&homes) {
            starts.push(homes.clone());
        }
        for start in starts {
            let until = Instant::now() + self.limit;
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
                let is_setuid = || is_setuid(status.st_mode, (status.st_uid, status.st_gid), &folders.tenants);
                if kind == SFlag::S_IFREG.bits() && (is_setuid() || may_have_capabilities(entry, status.st_mode)) {
                    self.note(folders, entry.path(), &mut found);
                }
                let is_folder = kind == SFlag::S_IFDIR.bits();
                // The last start is the homes themselves.
                ControlFlow::Continue(is_folder && (start == homes || entry.path() != homes))
            });
            if let Some(why) = ended {
                found.fail(&format!("{}: {why}", shortened(&start)));
            }
            if let Some(error) = errors.first() {
                found.fail(&error.to_string());
            }
        }
        found
    }

    /// The present state of an entry that a search has found; `None` where it gives no such rights any more.
    ///
    /// # Errors
    /// The file cannot be read: what it gives is unknown.
    pub fn state_of(&mut self, kind: PrivilegeKind, name: &str, tenants: &BTreeSet<u32>) -> io::Result<Option<String>> {
        let Some(path) = self.paths.get(name).cloned() else { return Ok(None) };
        let rights = self.rights(&path, tenants)?;
        Ok(if kind == PrivilegeKind::Setuid { rights.setuid } else { rights.capabilities })
    }

    fn note(&mut self, folders: &SearchedFolders, path: PathBuf, found: &mut FoundFiles) {
        let shown = path.strip_prefix(&folders.root).map_or_else(|_| path.clone(), |rest| Path::new("/").join(rest));
        let name = name_of(&shown);
        match self.rights(&path, &folders.tenants) {
            Ok(rights) => {
                self.paths.insert(name.clone(), path);
                found.add(&name, rights);
            }
            Err(error) => found.fail(&format!("{name}: {error}")),
        }
    }

    /// None where the file is gone, or a link is in its place.
    fn rights(&mut self, path: &Path, tenants: &BTreeSet<u32>) -> io::Result<FileRights> {
        let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        let file = match fs::File::options().read(true).custom_flags(flags.bits()).open(path) {
            Ok(file) => file,
            Err(error)
                if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
                    || error.raw_os_error() == Some(Errno::ELOOP as i32) =>
            {
                return Ok(FileRights::default());
            }
            Err(error) => return Err(error),
        };
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Ok(FileRights::default());
        }
        let is_setuid = is_setuid(metadata.mode(), (metadata.uid(), metadata.gid()), tenants);
        let capabilities = if metadata.mode() & EXECUTES == 0 { None } else { capabilities(&file, tenants)? };
        if !is_setuid && capabilities.is_none() {
            return Ok(FileRights::default());
        }
        let digest = self.digest(path, FileStamp::of(&metadata), file.into())?;
        let (mode, owner, group) = (metadata.mode() & 0o7777, metadata.uid(), metadata.gid());
        let state = format!("{mode:04o} {owner}:{group} {} {digest}", metadata.len());
        let capabilities = capabilities.map(|capabilities| format!("{state} {capabilities}"));
        Ok(FileRights { setuid: is_setuid.then_some(state), capabilities })
    }

    fn digest(&mut self, path: &Path, stamp: FileStamp, file: OwnedFd) -> io::Result<String> {
        let digest = match self.hashed.get(path) {
            Some((known, digest)) if *known == stamp => digest.clone(),
            _ => sha256(file, HASHED)?,
        };
        self.hashed.insert(path.to_owned(), (stamp, digest.clone()));
        Ok(digest)
    }
}

/// Whether the file gives more rights than those of a tenant, who may do so with files of its own.
fn is_setuid(mode: u32, (owner, group): (u32, u32), tenants: &BTreeSet<u32>) -> bool {
    let of = |bit: u32, id: u32| mode & bit == bit && !tenants.contains(&id);
    // Without the right to execute it for the group, the bit gives a program no group. Everyone can make such a file in a setgid folder.
    of(SETUID, owner) || of(SETGID | GROUP_EXECUTES, group)
}

/// Whether the file has capabilities, or it is not known.
fn may_have_capabilities(entry: &WalkEntry<'_>, mode: u32) -> bool {
    mode & EXECUTES != 0 && !matches!(entry.attribute(CAPABILITIES, &mut [0; CAPABILITY_BYTES]), Ok(None))
}

/// The capabilities of a file as hexadecimal digits. Those that hold only within the user namespaces of a tenant are the tenant's affair.
fn capabilities(file: &fs::File, tenants: &BTreeSet<u32>) -> io::Result<Option<String>> {
    let mut buffer = [0; CAPABILITY_BYTES];
    let read = rustix::fs::fgetxattr(file, CAPABILITIES, &mut buffer);
    let Some(value) = directory_walk::attribute(read, &buffer)? else { return Ok(None) };
    let word = |at: std::ops::Range<usize>| Some(u32::from_le_bytes(value.get(at)?.try_into().ok()?));
    let is_namespaced = word(0..4).is_some_and(|version| version & VERSION_MASK == NAMESPACED);
    let is_tenants = is_namespaced && word(NAMESPACE_ROOT).is_some_and(|root| tenants.contains(&root));
    Ok((!is_tenants).then(|| hex::encode(value)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;
    use crate::terminal::skipped_tests;

    const NO_TENANT: BTreeSet<u32> = BTreeSet::new();

    fn write(path: &Path, content: &str, mode: u32) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    fn folders(root: &Path) -> SearchedFolders {
        SearchedFolders { root: root.to_owned(), homes: "/home".into(), tenants: NO_TENANT }
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
        let found = search.search(&folders(root.path()), || true).setuid;
        let deep = format!("/{deep}/x");
        assert_eq!(names(&found), ["/home/eve/a b\\n\\x1b", deep.as_str(), "/usr/bin/su", "/usr/bin/wall"]);
        assert_eq!(found.incomplete, None);
        let (uid, gid) = (nix::unistd::Uid::effective().as_raw(), nix::unistd::Gid::effective().as_raw());
        let own = SearchedFolders { tenants: BTreeSet::from([uid, gid]), ..folders(root.path()) };
        assert_eq!(names(&search.search(&own, || true).setuid), Vec::<&str>::new(), "a tenant's own files");
    }

    #[test]
    fn replaced_content_shows_although_size_and_modification_time_are_as_before() {
        let root = tempfile::tempdir().unwrap();
        let su = root.path().join("bin/su");
        write(&su, "good", 0o4755);
        let modified = fs::metadata(&su).unwrap().modified().unwrap();
        let mut search = SetuidSearch::default();
        let before = search.search(&folders(root.path()), || true).setuid;
        fs::write(&su, "evil").unwrap();
        fs::set_permissions(&su, fs::Permissions::from_mode(0o4755)).unwrap();
        fs::File::options().write(true).open(&su).unwrap().set_modified(modified).unwrap();
        let after = search.search(&folders(root.path()), || true).setuid;
        assert_ne!(before.entries["/bin/su"], after.entries["/bin/su"]);
        let state = |search: &mut SetuidSearch| search.state_of(PrivilegeKind::Setuid, "/bin/su", &NO_TENANT).unwrap();
        assert_eq!(state(&mut search).as_ref(), after.entries.get("/bin/su"));
        fs::set_permissions(&su, fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(state(&mut search), None, "it gives no rights any more");
    }

    #[test]
    fn entry_that_cannot_be_opened_is_unknown_and_one_behind_a_link_is_gone() {
        let root = tempfile::tempdir().unwrap();
        let su = root.path().join("bin/su");
        write(&su, "su", 0o4755);
        let mut search = SetuidSearch::default();
        search.search(&folders(root.path()), || true);
        let mut state = || search.state_of(PrivilegeKind::Setuid, "/bin/su", &NO_TENANT);
        assert!(state().unwrap().is_some());
        fs::remove_file(&su).unwrap();
        // The kernel refuses to open it, as it does with files of a file system that fails.
        let socket = std::os::unix::net::UnixListener::bind(&su).unwrap();
        assert!(state().is_err());
        drop(socket);
        fs::remove_file(&su).unwrap();
        write(&root.path().join("bin/other"), "other", 0o4755);
        symlink("other", &su).unwrap();
        assert_eq!(state().unwrap(), None, "the link gives nothing, and the other file has its own entry");
        fs::remove_file(&su).unwrap();
        assert_eq!(state().unwrap(), None);
    }

    #[test]
    fn homes_are_searched_last_and_keep_nothing_else_from_being_found() {
        let root = tempfile::tempdir().unwrap();
        for n in 0..=SLICE {
            write(&root.path().join(format!("home/tena/{n}")), "", 0o644);
        }
        write(&root.path().join("home/tena/x"), "", 0o4755);
        write(&root.path().join("usr/bin/su"), "su", 0o4755);
        let mut slow = SetuidSearch { limit: Duration::ZERO, ..SetuidSearch::default() };
        let found = slow.search(&folders(root.path()), || true).setuid;
        assert!(found.entries.contains_key("/usr/bin/su"));
        let why = found.incomplete.unwrap();
        assert!(why.contains("/home: ") && why.ends_with("the search took too long"), "{why}");
    }

    #[test]
    fn ended_search_is_incomplete() {
        let root = tempfile::tempdir().unwrap();
        for n in 0..=SLICE {
            write(&root.path().join(format!("many/{n}")), "", 0o644);
        }
        let found = SetuidSearch::default().search(&folders(root.path()), || false);
        assert!(found.setuid.incomplete.unwrap().ends_with("the search was ended"));
        assert!(found.capabilities.incomplete.unwrap().ends_with("the search was ended"));
        assert_eq!(SetuidSearch::default().search(&folders(root.path()), || true).setuid.incomplete, None);
    }

    #[test]
    fn executable_file_with_capabilities_is_found_unless_they_are_of_a_tenants_namespace() {
        if !nix::unistd::Uid::effective().is_root() {
            return skipped_tests::report_skipped("it needs root, to give capabilities to files");
        }
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        let set = |path: &str, value: &[u8]| {
            rustix::fs::setxattr(at(path), CAPABILITIES, value, rustix::fs::XattrFlags::empty()).unwrap();
        };
        for (path, mode) in [("bin/ping", 0o755), ("bin/data", 0o644), ("bin/spaced", 0o755), ("bin/plain", 0o755)] {
            write(&at(path), path, mode);
        }
        // cap_setuid=ep in version 2, and in version 3 for the root user 70001.
        let plain = [0x0200_0001_u32, 0x80, 0, 0, 0].map(u32::to_le_bytes).concat();
        let spaced = [0x0300_0001_u32, 0x80, 0, 0, 0, 70_001].map(u32::to_le_bytes).concat();
        set("bin/ping", &plain);
        set("bin/data", &plain);
        set("bin/spaced", &spaced);
        let mut search = SetuidSearch::default();
        let others = search.search(&folders(root.path()), || true);
        assert_eq!(names(&others.capabilities), ["/bin/ping", "/bin/spaced"]);
        assert_eq!((names(&others.setuid), others.capabilities.incomplete), (vec![], None));
        let tenants = BTreeSet::from([70_001]);
        let found = search.search(&SearchedFolders { tenants: tenants.clone(), ..folders(root.path()) }, || true);
        assert_eq!(names(&found.capabilities), ["/bin/ping"]);
        rustix::fs::removexattr(at("bin/ping"), CAPABILITIES).unwrap();
        assert_eq!(search.state_of(PrivilegeKind::FileCapability, "/bin/ping", &tenants).unwrap(), None);
    }

    #[test]
    fn each_search_hashes_again() {
        let root = tempfile::tempdir().unwrap();
        let su = root.path().join("bin/su");
        write(&su, "good", 0o4755);
        let mut search = SetuidSearch::default();
        let before = search.search(&folders(root.path()), || true).setuid;
        write(&su, "evil", 0o4755);
        // As if root had set the file's change time back: it looks as when it was hashed.
        let stamp = FileStamp::of(&fs::metadata(&su).unwrap());
        search.hashed.values_mut().for_each(|(known, _)| *known = stamp);
        let after = search.search(&folders(root.path()), || true).setuid;
        assert_ne!(before.entries["/bin/su"], after.entries["/bin/su"]);
    }

    #[test]
    fn folder_that_cannot_be_searched_is_incomplete() {
        let root = tempfile::tempdir().unwrap();
        symlink("home", root.path().join("home")).unwrap();
        let found = SetuidSearch::default().search(&folders(root.path()), || true);
        assert!(found.setuid.incomplete.is_some() && found.capabilities.incomplete.is_some());
    }
}
