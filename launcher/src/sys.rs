//! What needs `unsafe`: descriptors that come in raw from the kernel, and the two calls between fork and exec.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::signal::Signal;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};

/// One message with at most one descriptor from a stream socket: the payload and the descriptor.
///
/// Nothing is inherited by accident: descriptors arrive close-on-exec. Further descriptors of the same message are closed.
pub(crate) fn receive_descriptor(socket: RawFd, payload: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut space = nix::cmsg_space!([RawFd; 4]);
    let mut slices = [io::IoSliceMut::new(payload)];
    let message =
        recvmsg::<()>(socket, &mut slices, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC | MsgFlags::MSG_DONTWAIT)?;
    let mut first = None;
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(raw) = control {
            for fd in raw {
                // SAFETY: the kernel has just installed this descriptor for us, and nobody else knows its number.
                let owned = unsafe { OwnedFd::from_raw_fd(fd) };
                first.get_or_insert(owned);
            }
        }
    }
    Ok((message.bytes, first))
}

/// Lets the child keep `fds` under their numbers and die with the thread that spawned it.
///
/// In production the launcher is the first process of its pid namespace and takes everything with it anyway; the
/// parent-death signal covers a launcher that is run outside of one. The runtime has one thread, which lives as
/// long as the process.
pub(crate) fn inherit(command: &mut tokio::process::Command, fds: Vec<RawFd>) {
    // SAFETY: between fork and exec only prctl and fcntl are called, which are async-signal-safe; no memory is allocated.
    unsafe {
        command.pre_exec(move || {
            nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
            for fd in &fds {
                let fd = std::os::fd::BorrowedFd::borrow_raw(*fd);
                fcntl(fd, FcntlArg::F_SETFD(FdFlag::empty()))?;
            }
            Ok(())
        });
    }
}

/// Sends `fd` under `name` over a stream socket: what a node agent does on `fd.sock`.
pub fn send_descriptor(socket: &impl AsRawFd, name: &str, fd: &impl AsRawFd) -> io::Result<()> {
    use nix::sys::socket::{ControlMessage, sendmsg};
    let raw = [fd.as_raw_fd()];
    sendmsg::<()>(
        socket.as_raw_fd(),
        &[io::IoSlice::new(name.as_bytes())],
        &[ControlMessage::ScmRights(&raw)],
        MsgFlags::empty(),
        None,
    )?;
    Ok(())
}
