//! What needs `unsafe`, and sockets by descriptor.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

nix::ioctl_write_int!(tun_set_iff, b'T', 202);

/// Longest name of an interface, with its final zero.
const NAME: usize = 16;
/// IFF_TAP | IFF_NO_PI | IFF_VNET_HDR: whole frames, no packet header, offloads by virtio header.
const FLAGS: u16 = 0x0002 | 0x1000 | 0x4000;

/// Makes a tap device in the calling thread's network namespace. It lives as long as the descriptor and its copies.
pub(crate) fn tap(name: &str) -> io::Result<OwnedFd> {
    if name.is_empty() || name.len() >= NAME {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    let file = std::fs::OpenOptions::new().read(true).write(true).open("/dev/net/tun")?;
    // struct ifreq: name, then flags.
    let mut request = [0u8; 40];
    for (to, from) in request.iter_mut().zip(name.bytes()) {
        *to = from;
    }
    for (to, from) in request.iter_mut().skip(NAME).zip(FLAGS.to_ne_bytes()) {
        *to = from;
    }
    let argument = request.as_mut_ptr() as nix::sys::ioctl::ioctl_param_type;
    // SAFETY: the request outlives the call, which reads and writes no more than struct ifreq (40 bytes).
    unsafe { tun_set_iff(file.as_raw_fd(), argument) }?;
    Ok(file.into())
}

/// Sends `fd` under `name` over a stream socket.
pub(crate) fn send_descriptor(socket: &impl AsRawFd, name: &str, fd: &impl AsRawFd) -> io::Result<()> {
    use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
    let raw = [fd.as_raw_fd()];
    let slices = [io::IoSlice::new(name.as_bytes())];
    sendmsg::<()>(socket.as_raw_fd(), &slices, &[ControlMessage::ScmRights(&raw)], MsgFlags::MSG_NOSIGNAL, None)?;
    Ok(())
}
