//! Hostile tenants: they try to outlive their release, to block the release of others, or to make the agent remove what is not theirs.

use std::io::{Read as _, Write as _};

use super::*;

/// Folders within folders, three thousand deep: longer than any path and more than a process may have open.
const NEST: &str = "exec perl -e 'for (1..3000) { mkdir \"d\" and chdir \"d\" or die } open(F, \">x\")'";

#[test]
fn deeply_nested_folders_are_removed_and_do_not_block_a_neighbour() {
    overlay_machine::alone("hostile_tenants::deeply_nested_folders_are_removed_and_do_not_block_a_neighbour", || {
        let node = Node::start();
        let (id, next) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let (uid, neighbour) = (node.make(id, NAME, &[0]), node.make(next, NEIGHBOUR, &[1]));
        for place in ["/home/tena", "/tmp/tena", "/dev/shm/tena"] {
            assert!(can(uid, &format!("mkdir -p {place} && cd {place} && {NEST}")), "{place}");
        }
        assert!(can(neighbour, &format!("mkdir /tmp/neighbour && cd /tmp/neighbour && {NEST}")));
        assert_clean(&node.release(id, NAME, &[0]));
        assert!(Path::new("/tmp/neighbour/d/d/d").exists(), "what is the neighbour's is left alone");
        assert_clean(&node.release(next, NEIGHBOUR, &[1]));
        assert!(!Path::new("/tmp/neighbour").exists());
    });
}

#[test]
fn files_that_another_tenant_took_in_are_removed_and_its_own_stay() {
    overlay_machine::alone("hostile_tenants::files_that_another_tenant_took_in_are_removed_and_its_own_stay", || {
        let node = Node::start();
        let (id, next) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let (uid, neighbour) = (node.make(id, NAME, &[0]), node.make(next, NEIGHBOUR, &[1]));
        // In the neighbour's home; in a folder of the tenant's; and on a shared disk.
        assert!(can(
            neighbour,
            "mkdir /home/neighbour/kept && echo x > /home/neighbour/own && chmod 777 /home/neighbour"
        ));
        assert!(can(uid, "mkdir -m 777 /tmp/open && echo x > /tmp/open/mine && echo x > /home/neighbour/mine"));
        assert!(can(
            neighbour,
            "mv /home/neighbour/mine /home/neighbour/kept/; chmod 700 /home/neighbour; echo x > /tmp/open/x"
        ));
        fs::create_dir("/scratch").unwrap();
        fs::set_permissions("/scratch", fs::Permissions::from_mode(0o1777)).unwrap();
        assert!(can(uid, "mkdir /scratch/d && echo x > /scratch/d/x"));
        assert_eq!(mode("/home/neighbour/kept/mine").1, uid);

        assert_clean(&node.release(id, NAME, &[0]));
        for gone in ["/home/neighbour/kept/mine", "/tmp/open", "/scratch/d"] {
            assert!(!Path::new(gone).exists(), "{gone}");
        }
        for kept in ["/home/neighbour/kept", "/home/neighbour/own", "/scratch"] {
            assert!(Path::new(kept).exists(), "{kept}");
        }
    });
}

#[test]
fn tenant_mounts_are_removed_and_the_folders_behind_them_are_not() {
    overlay_machine::alone("hostile_tenants::tenant_mounts_are_removed_and_the_folders_behind_them_are_not", || {
        let node = Node::start();
        let state = [Path::new(STATE), Path::new(UIDS)];
        fs::create_dir("/srv/precious").unwrap();
        fs::write("/srv/precious/file", "x").unwrap();
        fs::create_dir_all("/run/user").unwrap();
        let before = snapshot(&state);
        let id = Uuid::from_u128(1);
        let uid = node.make(id, NAME, &[0]);
        // As FUSE and a login mount them.
        assert!(can(uid, "mkdir -p /tmp/mine/mnt /var/tmp/mine/precious '/dev/shm/a b'"));
        let runtime = format!("/run/user/{uid}");
        fs::create_dir(&runtime).unwrap();
        for point in ["/tmp/mine/mnt", "/dev/shm/a b", &runtime] {
            run("mount", &["-t", "tmpfs", "-o", &format!("uid={uid},mode=700"), "tmpfs", point]);
            assert!(can(uid, &format!("echo x > '{point}/x'")), "{point}");
        }
        run("mount", &["--bind", "/srv/precious", "/var/tmp/mine/precious"]);
        assert_clean(&node.release(id, NAME, &[0]));
        let differences = View::of("/").differences(&before, &snapshot(&state));
        assert!(differences.is_empty(), "{differences:#?}");
        assert!(!fs::read_to_string("/proc/self/mountinfo").unwrap().contains(&format!("uid={uid}")));
    });
}

#[test]
fn programs_in_namespaces_of_their_own_jobs_and_dumps_do_not_outlive_the_release() {
    overlay_machine::alone(
        "hostile_tenants::programs_in_namespaces_of_their_own_jobs_and_dumps_do_not_outlive_the_release",
        || {
            let node = Node::start();
            for folder in [
                "/var/spool/cron/atjobs",
                "/var/spool/cron/crontabs",
                "/var/lib/systemd/coredump",
                "/var/lib/systemd/linger",
            ] {
                fs::create_dir_all(folder).unwrap();
            }
            let state = [Path::new(STATE), Path::new(UIDS)];
            let before = snapshot(&state);
            let id = Uuid::from_u128(1);
            let uid = node.make(id, NAME, &[0]);
            for script in [
                // Root of a user namespace, in a PID, mount and network namespace of its own.
                "unshare --user --map-root-user --mount --pid --net --fork sh -c 'mount -t tmpfs tmpfs /tmp; sleep 1000' &",
                // Daemonized twice, each time in another session, with an abstract socket.
                "exec perl -e 'use POSIX; use Socket; for (1..2) { exit if fork; setsid } $0 = \"nobody\"; \
             socket(S, AF_UNIX, SOCK_STREAM, 0); bind(S, sockaddr_un(\"\\0hidden\")); listen(S, 1); sleep 1000'",
            ] {
                spawn(uid, script).wait().unwrap();
            }
            eventually(|| fs::read_to_string("/proc/net/unix").unwrap().contains("@hidden"));
            for (path, owner) in [
                (format!("/var/spool/cron/crontabs/{NAME}"), uid),
                ("/var/spool/cron/atjobs/a00001".to_owned(), uid),
                (format!("/var/lib/systemd/linger/{NAME}"), 0),
                (format!("/var/lib/systemd/coredump/core.python3.{uid}.5f0c.77.1700000000000000.zst"), 0),
            ] {
                fs::write(&path, "x").unwrap();
                run("chown", &[&owner.to_string(), &path]);
            }
            fs::write("/var/lib/systemd/coredump/core.sh.1.5f0c.77.17.zst", "another's").unwrap();
            assert_clean(&node.release(id, NAME, &[0]));
            assert!(!fs::read_to_string("/proc/net/unix").unwrap().contains("@hidden"));
            assert!(Path::new("/var/lib/systemd/coredump/core.sh.1.5f0c.77.17.zst").exists());
            fs::remove_file("/var/lib/systemd/coredump/core.sh.1.5f0c.77.17.zst").unwrap();
            let differences = View::of("/").differences(&before, &snapshot(&state));
            assert!(differences.is_empty(), "{differences:#?}");
        },
    );
}

/// Renames folders at random, some deep below others, until it is ended.
const RENAMES: &str = "exec perl -e 'my @tops = map { my $t = \"$ARGV[0]/t$_\"; mkdir $t; $t } 1..3; \
    for my $t (@tops) { my $p = $t; for (1..120) { $p .= \"/d\"; mkdir $p } } \
    while (1) { for my $t (@tops) { \
      for my $depth (1, 3, 40, 60) { my $p = $t . (\"/d\" x $depth); rename \"$p/d\", \"$p/e\"; rename \"$p/e\", \"$p/d\" } \
      rename \"$t/d/d/d\", \"$ARGV[0]/x\"; rename \"$ARGV[0]/x\", \"$t/d/d/d\"; \
      mkdir \"$t/n$$\"; rmdir \"$t/n$$\"; rename $t, \"$t-\"; rename \"$t-\", $t } }'";

#[test]
fn neighbour_that_renames_deep_folders_keeps_no_release_from_its_proof() {
    overlay_machine::alone(
        "hostile_tenants::neighbour_that_renames_deep_folders_keeps_no_release_from_its_proof",
        || {
            let node = Node::start();
            let neighbour = node.make(Uuid::from_u128(100), NEIGHBOUR, &[1]);
            let renaming: Vec<Child> = ["/tmp/n", "/var/tmp/n", "/dev/shm/n", "/home/neighbour/n"]
                .map(|place| {
                    let script = RENAMES.replace("$ARGV[0]", place);
                    spawn(neighbour, &format!("mkdir {place}; {script}"))
                })
                .into();
            eventually(|| Path::new("/home/neighbour/n").exists() && Path::new("/tmp/n").exists());
            std::thread::sleep(Duration::from_millis(300));
            for n in 0..8 {
                let (id, name) = (Uuid::from_u128(n), format!("tenant{n}"));
                let uid = node.make(id, &name, &[0]);
                assert!(can(uid, "mkdir /tmp/mine && echo x > /tmp/mine/x && echo x > /dev/shm/x"));
                let began = Instant::now();
                assert_clean(&node.release(id, &name, &[0]));
                // The renames go on for ever, and a search that begins again at each has no end.
                assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
                assert!(!Path::new("/tmp/mine").exists());
            }
            renaming.into_iter().for_each(stop);
        },
    );
}

#[test]
fn file_of_the_released_tenant_in_a_neighbours_busy_folder_is_found_and_removed() {
    overlay_machine::alone(
        "hostile_tenants::file_of_the_released_tenant_in_a_neighbours_busy_folder_is_found_and_removed",
        || {
            let node = Node::start();
            let (id, next) = (Uuid::from_u128(1), Uuid::from_u128(2));
            let (uid, neighbour) = (node.make(id, NAME, &[0]), node.make(next, NEIGHBOUR, &[1]));
            assert!(can(neighbour, "mkdir -p /tmp/n/a/b/c /tmp/n/elsewhere"));
            // A hard link of a file that the neighbour may write to, and a file that it holds open after its removal.
            assert!(can(
                uid,
                "echo x > /tmp/given && chmod 666 /tmp/given && echo x > /tmp/held && chmod 666 /tmp/held"
            ));
            assert!(can(neighbour, "ln /tmp/given /tmp/n/a/b/c/kept"));
            let held = spawn(neighbour, "exec 3</tmp/held; touch /tmp/n/holds; sleep 1000");
            let busy = spawn(
                neighbour,
                "cd /tmp/n; while :; do : > log.$$; mv log.$$ log; mkdir t; rmdir t; echo x >> /tmp/n/a/log; done",
            );
            eventually(|| Path::new("/tmp/n/log").exists() && Path::new("/tmp/n/holds").exists());
            assert_eq!(mode("/tmp/n/a/b/c/kept").1, uid);
            assert_clean(&node.release(id, NAME, &[0]));
            assert!(!Path::new("/tmp/n/a/b/c/kept").exists() && Path::new("/tmp/n/a/b/c").exists());
            [held, busy].into_iter().for_each(stop);
        },
    );
}

#[test]
fn file_that_cannot_be_removed_from_a_neighbours_folder_fails_the_proof() {
    overlay_machine::alone(
        "hostile_tenants::file_that_cannot_be_removed_from_a_neighbours_folder_fails_the_proof",
        || {
            let node = Node::start();
            let (id, next) = (Uuid::from_u128(1), Uuid::from_u128(2));
            let (uid, neighbour) = (node.make(id, NAME, &[0]), node.make(next, NEIGHBOUR, &[1]));
            assert!(can(neighbour, "mkdir -m 777 /tmp/n && mkdir -m 777 /tmp/n/below"));
            run("mount", &["-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/tmp/n/below"]);
            assert!(can(uid, "echo x > /tmp/n/below/mine"));
            run("mount", &["-o", "remount,ro", "/tmp/n/below"]);
            let busy = spawn(neighbour, &format!("mkdir /tmp/n/r; {}", RENAMES.replace("$ARGV[0]", "/tmp/n/r")));
            eventually(|| Path::new("/tmp/n/r").exists());
            let findings = node.release(id, NAME, &[0]);
            assert_eq!(outcome(&findings, CleanupCheck::Tmp), FindingOutcome::Present);
            let detail: Vec<_> = findings.iter().filter_map(|finding| finding.detail.as_deref()).collect();
            assert!(detail.iter().any(|detail| detail.contains("/tmp/n/below/mine")), "{detail:?}");
            run("mount", &["-o", "remount,rw", "/tmp/n/below"]);
            assert_clean(&node.release(id, NAME, &[0]));
            stop(busy);
        },
    );
}

#[test]
fn neighbour_that_fills_a_folder_of_the_released_tenant_does_not_keep_it() {
    overlay_machine::alone(
        "hostile_tenants::neighbour_that_fills_a_folder_of_the_released_tenant_does_not_keep_it",
        || {
            let node = Node::start();
            let (id, next) = (Uuid::from_u128(1), Uuid::from_u128(2));
            let (uid, neighbour) = (node.make(id, NAME, &[0]), node.make(next, NEIGHBOUR, &[1]));
            assert!(can(uid, "mkdir -m 777 /tmp/open"));
            let fills = spawn(
                neighbour,
                "mkdir /tmp/open/mine; cd /tmp/open/mine; exec perl -e 'while (1) { $n++; open(F, \">\", \"f$n\"); open(F, \">\", \"../f$n\"); mkdir \"../d$n\" }'",
            );
            eventually(|| fs::read_dir("/tmp/open/mine").is_ok_and(|entries| entries.count() > 100));
            assert_clean(&node.release(id, NAME, &[0]));
            assert!(!Path::new("/tmp/open").exists());
            stop(fills);
        },
    );
}

#[test]
fn kernel_file_systems_below_tmp_are_no_files_of_a_tenant() {
    overlay_machine::alone("hostile_tenants::kernel_file_systems_below_tmp_are_no_files_of_a_tenant", || {
        let node = Node::start();
        let id = Uuid::from_u128(1);
        let uid = node.make(id, NAME, &[0]);
        for point in ["/tmp/proc", "/tmp/sys"] {
            fs::create_dir(point).unwrap();
        }
        run("mount", &["-t", "proc", "proc", "/tmp/proc"]);
        run("mount", &["-t", "sysfs", "sysfs", "/tmp/sys"]);
        // A zombie: parts of its folder in /proc answer with EINVAL.
        let mut zombie = spawn(uid, "exit 0");
        eventually(|| {
            let status = fs::read_to_string(format!("/proc/{}/status", zombie.id())).unwrap();
            status.contains("State:\tZ")
        });
        // And one that the tenant mounts as root of a user namespace.
        spawn(uid, "unshare --user --map-root-user --mount --pid --fork sh -c 'mkdir /tmp/p; mount -t proc proc /tmp/p; sleep 1000' &")
            .wait()
            .unwrap();
        assert_clean(&node.release(id, NAME, &[0]));
        zombie.wait().unwrap();
        for point in ["/tmp/proc", "/tmp/sys"] {
            run("umount", &[point]);
        }
    });
}

#[test]
fn concurrent_releases_check_message_queues_independently() {
    overlay_machine::alone("hostile_tenants::concurrent_releases_check_message_queues_independently", || {
        let node = Node::start();
        for round in 0..4 {
            let tenants: Vec<(Uuid, String, usize)> =
                (0..4).map(|n| (Uuid::from_u128(10 * round + n as u128 + 1), format!("r{round}n{n}"), n)).collect();
            for (id, name, device) in &tenants {
                node.make(*id, name, &[*device]);
            }
            let start = std::sync::Barrier::new(tenants.len());
            std::thread::scope(|scope| {
                for (id, name, device) in &tenants {
                    let (node, start) = (&node, &start);
                    scope.spawn(move || {
                        start.wait();
                        assert_clean(&node.release(*id, name, &[*device]));
                    });
                }
            });
        }
        assert!(!fs::read_to_string("/proc/self/mountinfo").unwrap().contains(" mqueue "));
    });
}

#[test]
fn shared_memory_that_a_neighbour_holds_keeps_no_release_from_its_proof() {
    overlay_machine::alone(
        "hostile_tenants::shared_memory_that_a_neighbour_holds_keeps_no_release_from_its_proof",
        || {
            let node = Node::start();
            let (id, next) = (Uuid::from_u128(1), Uuid::from_u128(2));
            let (uid, neighbour) = (node.make(id, NAME, &[0]), node.make(next, NEIGHBOUR, &[1]));
            assert!(can(uid, "ipcmk -M 4096 -p 666"));
            let segment = || {
                let text = fs::read_to_string("/proc/sysvipc/shm").unwrap();
                let rows = text.lines().map(|row| row.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
                rows.into_iter().find(|row| row[7] == uid.to_string())
            };
            let number = segment().unwrap()[1].clone();
            // By the number of shmat(2).
            let call = if cfg!(target_arch = "x86_64") { 30 } else { 196 };
            let holds =
                spawn(neighbour, &format!("exec perl -e 'syscall({call}, {number}, 0, 0) == -1 and die; sleep 1000'"));
            eventually(|| segment().is_some_and(|row| row[6] == "1"));
            assert_clean(&node.release(id, NAME, &[0]));
            stop(holds);
            assert_eq!(segment(), None, "it is gone with its last process");
            assert_clean(&node.release(next, NEIGHBOUR, &[1]));
        },
    );
}

/// A file system whose program reads each request and answers none but the first: a caller waits in the kernel, and no signal ends it.
fn mount_that_takes_requests(point: &Path) -> fs::File {
    use std::os::fd::AsRawFd as _;
    run("mknod", &["-m", "666", "/dev/fuse", "c", "10", "229"]);
    let mut requests = fs::File::options().read(true).write(true).open("/dev/fuse").unwrap();
    let options = format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other", requests.as_raw_fd());
    let none = nix::mount::MsFlags::empty();
    nix::mount::mount(Some("takes"), point, Some("fuse"), none, Some(options.as_str())).unwrap();
    // FUSE_INIT (fuse.h): its header of 40 bytes has the request's number from the ninth on.
    let mut request = [0; 65_536];
    let length = requests.read(&mut request).unwrap();
    assert!(length >= 40 && request[4] == 26, "{length}");
    let mut answer = [0_u8; 16 + 64];
    answer[0] = 80;
    answer[8..16].copy_from_slice(&request[8..16]);
    // Version 7.31, and 4096 bytes to write at once.
    (answer[16], answer[20], answer[37]) = (7, 31, 16);
    requests.write_all(&answer).unwrap();
    requests
}

#[test]
fn killed_program_that_waits_in_the_kernel_keeps_no_tenant_from_its_end() {
    if !Path::new("/dev/fuse").exists() {
        return skipped_tests::report_skipped("it needs /dev/fuse, for a file system that does not answer");
    }
    overlay_machine::alone(
        "hostile_tenants::killed_program_that_waits_in_the_kernel_keeps_no_tenant_from_its_end",
        || {
            let node = Node::start();
            let id = Uuid::from_u128(1);
            let uid = node.make(id, NAME, &[0]);
            fs::create_dir("/srv/models").unwrap();
            let mut requests = mount_that_takes_requests(Path::new("/srv/models"));
            let mut program = spawn(uid, "cat /srv/models/weights & exec sleep 1000");
            let mut request = [0; 65_536];
            assert!(requests.read(&mut request).unwrap() > 40, "its request is taken");
            let findings = node.release(id, NAME, &[0]);
            assert_clean(&findings);
            let detail = findings.iter().find(|it| it.what == CleanupCheck::Processes).unwrap().detail.clone();
            assert!(detail.as_deref().is_some_and(|it| it.contains("wait in the kernel")), "{detail:?}");
            program.wait().unwrap();
            assert!(!Path::new("/home/tena").exists() && !fs::read_to_string("/etc/passwd").unwrap().contains(NAME));
            let waits = || View::of("/").processes().values().any(|it| it.starts_with(b"cat\0/srv/models"));
            assert!(waits(), "it cannot end yet");
            drop(requests);
            eventually(|| !waits());
            assert_clean(&node.release(id, NAME, &[0]));
            run("umount", &["/srv/models"]);
        },
    );
}
