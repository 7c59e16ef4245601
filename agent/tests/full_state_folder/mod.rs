//! A disk without room for anything that the agent stores.

use super::*;

#[path = "../hanging_mount/mod.rs"]
#[allow(dead_code, reason = "these tests only fill a folder")]
mod hanging_mount;

#[test]
fn tenant_is_released_by_an_agent_that_starts_where_the_state_folder_has_no_room() {
    overlay_machine::alone(
        "full_state_folder::tenant_is_released_by_an_agent_that_starts_where_the_state_folder_has_no_room",
        || {
            let (id, state) = (Uuid::from_u128(1), Path::new(STATE));
            fs::create_dir_all(state).unwrap();
            run("mount", &["-t", "tmpfs", "-o", "size=512k,mode=700", "tmpfs", STATE]);
            let node = Node::start();
            let uid = node.make(id, NAME, &[0]);
            let running = spawn(uid, "sleep 777");
            drop(node);
            // An agent that has released no tenant yet does not have it.
            fs::remove_dir(state.join("mqueue")).unwrap();
            hanging_mount::fill(state);
            let node = Node::start();
            assert_clean(&node.release(id, NAME, &[0]));
            stop(running);
            assert!(!Path::new("/home").join(NAME).exists());
            fs::remove_file(state.join("ballast")).unwrap();
            node.make(Uuid::from_u128(2), NAME, &[0]);
        },
    );
}
