//! Homes on a file system that gives the machine's root no rights, as NFS with root_squash.

use std::os::fd::AsRawFd as _;

use nix::mount::{MsFlags, mount};

use super::*;

#[test]
fn home_that_root_cannot_make_is_refused_with_the_file_system_and_the_setting() {
    overlay_machine::alone(
        "homes_elsewhere::home_that_root_cannot_make_is_refused_with_the_file_system_and_the_setting",
        || {
            let homes = Path::new("/srv/homes");
            fs::create_dir_all(homes).unwrap();
            run("mknod", &["/dev/fuse", "c", "10", "229"]);
            let requests = fs::File::options().read(true).write(true).open("/dev/fuse").unwrap();
            // The kernel itself refuses all users but this one, without a word to the program.
            let options = format!("fd={},rootmode=40755,user_id=12345,group_id=12345", requests.as_raw_fd());
            mount(Some("filer:/homes"), homes, Some("fuse"), MsFlags::empty(), Some(options.as_str())).unwrap();
            let node = Node::start_as(Settings { homes: homes.into(), ..Settings::default() });
            let refused = node.system.provision(&node.provision(Uuid::from_u128(1), NAME, &[0])).unwrap_err();
            assert_eq!(refused.code, "node_storage", "{refused}");
            for part in ["/srv/homes is fuse of filer:/homes", "SVC_NODE_AGENT_HOMES", "no_root_squash"] {
                assert!(refused.message.contains(part), "{refused}");
            }
        },
    );
}
