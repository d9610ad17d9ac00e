//! A kernel that refuses some of its calls, as containers have them do.

/// The system calls that this thread, and those that it starts, are refused from now on, with EPERM.
pub fn refuses(calls: &[libc::c_long]) {
    let step = |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter { code: code as u16, jt, jf, k };
    // The system call's number is the first word of what the filter sees.
    let mut filter = vec![step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0)];
    for call in calls {
        filter.push(step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, *call as u32, 0, 1));
        let refused = libc::SECCOMP_RET_ERRNO | libc::EPERM.cast_unsigned();
        filter.push(step(libc::BPF_RET | libc::BPF_K, refused, 0, 0));
    }
    filter.push(step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0));
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: both calls read what they are given, which is there; the second takes rights away from this
    // thread, and those that it starts, only.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program), 0);
    }
}
