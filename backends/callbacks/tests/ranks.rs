//! Ranks as threads of one process: each has process groups of its own, though all pass one context.

use std::ffi::{c_char, c_void};
use std::thread;

use rote_callbacks::{Callbacks, Framework};
use rote_replay::Frontend;
use rote_replay::agreement::Ranks;

unsafe extern "C" fn ranks(_: *mut c_void, _: *const c_char) -> u32 {
    2
}

fn frontend() -> Callbacks {
    static CONTEXT: u8 = 0;
    let context = std::ptr::from_ref(&CONTEXT).cast_mut().cast();
    Callbacks::new(Framework {
        ranks: Some(ranks),
        ..Framework::empty(context)
    })
}

fn number(frontend: &Callbacks, group: &std::ffi::CStr) -> u64 {
    let group = frontend.group(group).expect("is asked");
    group.expect("this process is in it").number()
}

#[test]
fn ranks_that_share_a_context_have_groups_of_their_own() {
    let (first, second) = (frontend(), frontend());
    let ours = number(&first, c"tp");
    assert_eq!(
        ours,
        number(&second, c"tp"),
        "two sessions of a rank have one group"
    );
    assert_ne!(ours, number(&first, c"dp"));
    let theirs = thread::spawn(|| number(&frontend(), c"tp"));
    assert_ne!(ours, theirs.join().expect("the other rank"));
    assert_eq!(ours, number(&first, c"tp"), "another rank has ended");
}

#[test]
fn a_group_ends_with_the_last_session_of_its_rank() {
    let before = number(&frontend(), c"pp");
    assert_ne!(before, number(&frontend(), c"pp"));
}
