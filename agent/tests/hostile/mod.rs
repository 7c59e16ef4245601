//! Tenants who want to outlive their release, to keep others from theirs, or to have the agent remove what is not theirs.

use super::*;

const NEIGHBOUR: &str = "neighbour";

/// Folders within folders, three thousand deep: longer than any path and more than a process may have open.
const NEST: &str = "exec perl -e 'for (1..3000) { mkdir \"d\" and chdir \"d\" or die } open(F, \">x\")'";

#[test]
fn folders_nested_without_end_neither_stay_nor_keep_a_neighbour() {
    machine::alone("hostile::folders_nested_without_end_neither_stay_nor_keep_a_neighbour", || {
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
fn what_another_tenant_took_in_is_found_and_what_is_theirs_stays() {
    machine::alone("hostile::what_another_tenant_took_in_is_found_and_what_is_theirs_stays", || {
        let node = Node::start();
        let (id, next) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let (uid, neighbour) = (node.make(id, NAME, &[0]), node.make(next, NEIGHBOUR, &[1]));
        // Kept in the neighbour's home; put into a folder of the tenant's; and on a disk that all share.
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
fn mounts_of_a_tenant_s_own_folders_anywhere_are_gone_and_what_lies_behind_them_is_not() {
    machine::alone(
        "hostile::mounts_of_a_tenant_s_own_folders_anywhere_are_gone_and_what_lies_behind_them_is_not",
        || {
            let node = Node::start();
            let state = [Path::new(STATE)];
            fs::create_dir("/srv/precious").unwrap();
            fs::write("/srv/precious/file", "x").unwrap();
            fs::create_dir_all("/run/user").unwrap();
            let before = look(&state);
            let id = Uuid::from_u128(1);
            let uid = node.make(id, NAME, &[0]);
            // As FUSE and a login make them.
            assert!(can(uid, "mkdir -p /tmp/mine/mnt /var/tmp/mine/precious '/dev/shm/a b'"));
            let runtime = format!("/run/user/{uid}");
            fs::create_dir(&runtime).unwrap();
            for point in ["/tmp/mine/mnt", "/dev/shm/a b", &runtime] {
                run("mount", &["-t", "tmpfs", "-o", &format!("uid={uid},mode=700"), "tmpfs", point]);
                assert!(can(uid, &format!("echo x > '{point}/x'")), "{point}");
            }
            run("mount", &["--bind", "/srv/precious", "/var/tmp/mine/precious"]);
            assert_clean(&node.release(id, NAME, &[0]));
            let differences = View::of("/").differences(&before, &look(&state));
            assert!(differences.is_empty(), "{differences:#?}");
            assert!(!fs::read_to_string("/proc/self/mountinfo").unwrap().contains(&format!("uid={uid}")));
        },
    );
}

#[test]
fn programs_in_namespaces_of_their_own_jobs_and_dumps_do_not_outlive_the_release() {
    machine::alone("hostile::programs_in_namespaces_of_their_own_jobs_and_dumps_do_not_outlive_the_release", || {
        let node = Node::start();
        for folder in [
            "/var/spool/cron/atjobs",
            "/var/spool/cron/crontabs",
            "/var/lib/systemd/coredump",
            "/var/lib/systemd/linger",
        ] {
            fs::create_dir_all(folder).unwrap();
        }
        let state = [Path::new(STATE)];
        let before = look(&state);
        let id = Uuid::from_u128(1);
        let uid = node.make(id, NAME, &[0]);
        for script in [
            // Root of a user namespace, in a PID, mount and network namespace of its own.
            "unshare --user --map-root-user --mount --pid --net --fork sh -c 'mount -t tmpfs tmpfs /tmp; sleep 1000' &",
            // Twice away from its parent, each time in another session, with a socket of no file's.
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
        let differences = View::of("/").differences(&before, &look(&state));
        assert!(differences.is_empty(), "{differences:#?}");
    });
}
