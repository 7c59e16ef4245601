use std::fs;
use std::ops::ControlFlow;
use std::os::unix::fs::symlink;

use super::removal::Removal;
use super::*;

fn own() -> u32 {
    nix::unistd::Uid::current().as_raw()
}

fn found_in(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let note = |entry: &WalkEntry<'_>| {
        found.push(entry.path());
        ControlFlow::Continue(())
    };
    let scope = SearchScope { id: own(), owners: None };
    let decisive = |error: &WalkError| matches!(error.cause, WalkErrorCause::Failed(_));
    assert!(!owned_by(scope, &[folder.to_owned()], &Mounts::default(), note).iter().any(decisive));
    found.sort();
    found
}

fn remove(path: &Path) -> io::Result<()> {
    remove_at(path, &Mounts::default(), own())
}

fn run(start: &Path, visitor: &mut impl Visitor) -> Vec<WalkError> {
    let opened = openat(AT_FDCWD, start, FOLDER, Mode::empty()).unwrap();
    Walk::of(start, &Mounts::default()).run(opened, visitor)
}

/// Enters every folder, calls `seen` for each entry, and counts the folders that it leaves.
struct RecordingVisitor<F> {
    seen: F,
    left: usize,
}

impl<F: FnMut(&WalkEntry<'_>)> Visitor for RecordingVisitor<F> {
    fn entry(&mut self, entry: &WalkEntry<'_>, _: &FileStat) -> Result<bool, Errno> {
        (self.seen)(entry);
        Ok(entry.is_folder)
    }

    fn leave(&mut self, _: BorrowedFd<'_>, _: &OsStr) -> Result<(), Errno> {
        self.left += 1;
        Ok(())
    }
}

/// Folders within folders, deeper than paths are long and than files may be open.
fn nest(folder: &Path, depth: usize) -> OwnedFd {
    let mut at = openat(AT_FDCWD, folder, FOLDER, Mode::empty()).unwrap();
    for _ in 0..depth {
        nix::sys::stat::mkdirat(&at, "deep", Mode::from_bits_truncate(0o700)).unwrap();
        at = openat(&at, "deep", FOLDER, Mode::empty()).unwrap();
    }
    at
}

#[test]
fn owned_files_are_found_and_no_link_is_followed() {
    let (folder, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::write(elsewhere.path().join("file"), "x").unwrap();
    symlink(elsewhere.path(), folder.path().join("link")).unwrap();
    fs::create_dir(folder.path().join("own")).unwrap();
    fs::write(folder.path().join("own/below"), "x").unwrap();
    assert_eq!(found_in(folder.path()), ["link", "own"].map(|name| folder.path().join(name)));
    assert_eq!(found_in(&folder.path().join("not there")), Vec::<PathBuf>::new());
    remove(&folder.path().join("link")).unwrap();
    assert!(elsewhere.path().join("file").exists());
    assert!(found_in(folder.path()).len() == 1);
}

#[test]
fn tree_of_any_depth_is_walked_and_removed_with_few_open_files() {
    let folder = tempfile::tempdir().unwrap();
    let top = folder.path().join("top");
    fs::create_dir(&top).unwrap();
    let bottom = nest(&top, 3_000);
    drop(openat(&bottom, "file", OFlag::O_CREAT | OFlag::O_WRONLY, Mode::from_bits_truncate(0o600)).unwrap());
    drop(bottom);
    let mut seen = 0;
    let mut everything = RecordingVisitor { seen: |_: &WalkEntry<'_>| seen += 1, left: 0 };
    assert_eq!(run(&top, &mut everything), []);
    assert_eq!(seen, 3_001);
    remove(&top).unwrap();
    assert!(!top.exists());
}

#[test]
fn folder_moved_during_a_walk_affects_only_itself() {
    let folder = tempfile::tempdir().unwrap();
    let (top, elsewhere) = (folder.path().join("top"), folder.path().join("elsewhere"));
    fs::create_dir(&top).unwrap();
    fs::create_dir(&elsewhere).unwrap();
    let depth = 4 * OPEN;
    drop(nest(&top, depth));
    // When the bottom is reached, this one is closed.
    let below_the_pinned = ["deep"; 2 * PINNED].iter().fold(top.clone(), |path, name| path.join(name));
    let mut seen = 0;
    let swap = |_: &WalkEntry<'_>| {
        seen += 1;
        if seen == depth {
            fs::rename(&below_the_pinned, elsewhere.join("x")).unwrap();
        }
    };
    let mut everything = RecordingVisitor { seen: swap, left: 0 };
    let errors = run(&top, &mut everything);
    let (left, owner) = (everything.left, own());
    assert_eq!(errors, [WalkError { path: below_the_pinned.clone(), owner, cause: WalkErrorCause::Moved }]);
    assert_eq!(left, depth - 1, "all but the one that was moved");
}

#[test]
fn moved_ancestor_folder_is_reopened_from_the_top_or_abandoned() {
    let folder = tempfile::tempdir().unwrap();
    let (top, elsewhere) = (folder.path().join("top"), folder.path().join("elsewhere"));
    fs::create_dir(&top).unwrap();
    fs::create_dir(&elsewhere).unwrap();
    let depth = 4 * OPEN;
    drop(nest(&top, depth));
    let at = |level: usize| vec!["deep"; level].iter().fold(top.clone(), |path, name| path.join(name));
    let (upper, lower) = (at(PINNED + 10), at(PINNED + 20));
    let mut seen = 0;
    let swap = |_: &WalkEntry<'_>| {
        seen += 1;
        if seen == depth {
            fs::rename(&lower, elsewhere.join("lower")).unwrap();
            fs::rename(&upper, elsewhere.join("upper")).unwrap();
        }
    };
    let mut everything = RecordingVisitor { seen: swap, left: 0 };
    let errors = run(&top, &mut everything);
    let left = everything.left;
    let paths: Vec<_> = errors.iter().map(|error| (&error.path, error.cause)).collect();
    assert_eq!(paths, [(&lower, WalkErrorCause::Moved), (&upper, WalkErrorCause::Moved)]);
    // Those between the two are abandoned; everything above is left in order.
    assert_eq!(left, depth - (PINNED + 20) + PINNED + 9);
}

#[test]
fn changes_of_another_account_in_its_folders_decide_no_search() {
    let error = |owner, cause| WalkError { path: "/tmp/x".into(), owner, cause };
    let (tenant, other) = (70_001, 70_002);
    for cause in [
        WalkErrorCause::Changed,
        WalkErrorCause::Moved,
        WalkErrorCause::Vanished(Errno::ENOENT),
        WalkErrorCause::Vanished(Errno::ELOOP),
    ] {
        assert!(!error(other, cause).is_decisive(tenant), "{cause:?}");
        assert!(error(tenant, cause).is_decisive(tenant), "{cause:?}");
    }
    for owner in [0, tenant, other] {
        assert!(error(owner, WalkErrorCause::Failed(Errno::EIO)).is_decisive(tenant));
    }
    assert_eq!(error(other, WalkErrorCause::Failed(Errno::EIO)).to_string(), "/tmp/x: EIO: I/O error");
}

#[test]
fn folder_under_removal_is_closed_to_other_writers() {
    let folder = tempfile::tempdir().unwrap();
    let open = folder.path().join("open");
    fs::create_dir_all(open.join("below")).unwrap();
    for path in [open.clone(), open.join("below")] {
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    }
    let status = nix::sys::stat::stat(&open).unwrap();
    let opened = openat(AT_FDCWD, &open, FOLDER, Mode::empty()).unwrap();
    Removal::by(own()).open(opened.as_fd(), &status);
    assert_eq!(nix::sys::stat::stat(&open).unwrap().st_mode & 0o777, 0o700);
    remove(&open).unwrap();
    assert!(!open.exists());
}

#[test]
fn entry_swapped_for_a_symlink_before_removal_is_not_followed() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for name in ["shared", "shared/mine", "precious", "precious/mine"] {
        fs::create_dir(at(name)).unwrap();
    }
    fs::write(at("shared/mine/file"), "x").unwrap();
    fs::write(at("precious/mine/file"), "x").unwrap();
    let swap_and_remove = |entry: &WalkEntry<'_>| {
        if entry.name == "mine" {
            fs::rename(at("shared"), at("moved")).unwrap();
            symlink(at("precious"), at("shared")).unwrap();
            entry.remove(&Mounts::default(), own()).unwrap();
        }
    };
    let mut everything = RecordingVisitor { seen: swap_and_remove, left: 0 };
    run(&at("shared"), &mut everything);
    assert!(at("precious/mine/file").exists());
    assert!(!at("moved/mine").exists());
}

#[test]
fn folder_that_replaced_another_is_not_removed() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for name in ["mine", "precious"] {
        fs::create_dir(at(name)).unwrap();
    }
    let mut refused = 0;
    let swap_and_remove = |entry: &WalkEntry<'_>| {
        if entry.name == "mine" {
            fs::rename(at("mine"), at("moved")).unwrap();
            fs::rename(at("precious"), at("mine")).unwrap();
            refused += usize::from(entry.remove(&Mounts::default(), own()).is_err());
        }
    };
    run(folder.path(), &mut RecordingVisitor { seen: swap_and_remove, left: 0 });
    assert_eq!(refused, 1);
    assert!(at("mine").exists());
}

#[test]
fn path_with_a_symlink_is_never_followed() {
    let folder = tempfile::tempdir().unwrap();
    let real = folder.path().canonicalize().unwrap();
    fs::create_dir_all(real.join("a/b")).unwrap();
    symlink(real.join("a"), real.join("link")).unwrap();
    assert!(open_without_links(&real.join("a/b")).is_ok());
    assert!(open_without_links(&real.join("link/b")).is_err());
    assert!(open_without_links(Path::new("a/../b")).is_err());
}

#[test]
fn only_what_changed_during_a_walk_is_a_change_wherever_the_clock_is_set() {
    let seconds = |seconds: i128| seconds * NANOS;
    let moment = |local, since_boot| Moment { local: seconds(local), since_boot: seconds(since_boot) };
    let began = moment(1_000_000, 100);
    let is_change = |changed_at, now| is_between(seconds(changed_at), began, now);
    let later = moment(1_000_003, 103);
    assert!(is_change(1_000_000, later) && is_change(1_000_003, later));
    assert!(!is_change(999_999, later), "before the walk");
    assert!(!is_change(1_000_003 + 86_400, later), "before the walk, by a clock that was a day ahead");
    // The clock was set in the middle of the walk, after its second second.
    for ahead in [-86_400, 86_400] {
        let later = moment(1_000_003 + ahead, 103);
        assert!(is_change(1_000_001, later), "before it was set: {ahead}");
        assert!(is_change(1_000_003 + ahead, later), "after it was set: {ahead}");
        assert!(!is_change(1_000_000 - 2 * 86_400, later), "before the walk: {ahead}");
    }
}

#[test]
fn folder_of_many_files_and_folders_is_removed_with_few_names_in_memory() {
    let folder = tempfile::tempdir().unwrap();
    let (home, files) = (folder.path().join("home"), 5_000);
    fs::create_dir(&home).unwrap();
    for number in 0..files {
        fs::write(home.join(format!("file-{number}")), b"").unwrap();
    }
    // Folders in folders: each level has more of them than may wait.
    for (outer, inner) in (0..40).flat_map(|outer| (0..20).map(move |inner| (outer, inner))) {
        let below = home.join(format!("folder-{outer}/below-{inner}"));
        fs::create_dir_all(&below).unwrap();
        fs::write(below.join("file"), b"").unwrap();
    }
    let opened = openat(AT_FDCWD, &home, FOLDER, Mode::empty()).unwrap();
    assert_eq!(Removal::by(own()).with_few_waiting(7).run(&home, &Mounts::default(), opened), []);
    assert_eq!(fs::read_dir(&home).unwrap().count(), 0);
}

/// Enters every folder, and removes none.
struct FailingRemoval {
    left: usize,
}

impl Visitor for FailingRemoval {
    fn entry(&mut self, entry: &WalkEntry<'_>, _: &FileStat) -> Result<bool, Errno> {
        Ok(entry.is_folder)
    }

    fn leave(&mut self, _: BorrowedFd<'_>, _: &OsStr) -> Result<(), Errno> {
        self.left += 1;
        Err(Errno::EBUSY)
    }

    fn most_waiting(&self) -> usize {
        3
    }
}

#[test]
fn removal_of_folders_that_stay_ends() {
    let folder = tempfile::tempdir().unwrap();
    for number in 0..20 {
        fs::create_dir_all(folder.path().join(format!("{number}/below"))).unwrap();
    }
    let mut visitor = FailingRemoval { left: 0 };
    let errors = run(folder.path(), &mut visitor);
    assert!((1..=40).contains(&visitor.left) && errors.len() == visitor.left, "{}: {errors:?}", visitor.left);
}
