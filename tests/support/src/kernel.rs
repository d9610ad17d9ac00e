//! A kernel that refuses some of its calls, as containers have them do.

#![expect(unsafe_code, reason = "a seccomp filter is set")]

use libc::sock_filter;

/// Makes the kernel refuse these system calls to this thread, and to those that it starts, from now
/// on, with EPERM.
pub fn refuses(calls: &[libc::c_long]) {
    let mut filter = vec![load(0)];
    for call in calls {
        filter.push(jump_unless(*call as u32, 1));
        filter.push(answer(libc::SECCOMP_RET_ERRNO | libc::EPERM.cast_unsigned()));
    }
    install(filter);
}

/// Ends this process when this thread, or one that it starts, makes a call with this first
/// argument.
pub fn ends_at(call: libc::c_long, argument: u32) {
    // The arguments come behind the number, the architecture and the caller's address, the low half
    // first.
    let second = [load(16), jump_unless(argument, 1), answer(libc::SECCOMP_RET_KILL_PROCESS)];
    install([&[load(0), jump_unless(call as u32, 3)][..], &second].concat());
}

/// Looks at a word of what the filter sees. The first is the system call's number.
fn load(at: u32) -> sock_filter {
    step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, at, 0)
}

/// Leaves steps out unless the word is this one.
fn jump_unless(word: u32, steps: u8) -> sock_filter {
    step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, word, steps)
}

fn answer(answer: u32) -> sock_filter {
    step(libc::BPF_RET | libc::BPF_K, answer, 0)
}

fn step(code: u32, k: u32, jf: u8) -> sock_filter {
    sock_filter { code: code as u16, jt: 0, jf, k }
}

fn install(mut filter: Vec<sock_filter>) {
    filter.push(answer(libc::SECCOMP_RET_ALLOW));
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: both calls read what they are given, which is there; the second takes rights away
    // from this thread, and those that it starts, only.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(
            libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program),
            0
        );
    }
}
