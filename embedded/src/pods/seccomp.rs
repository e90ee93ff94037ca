//! Which system calls a launcher may make: a list of what is allowed, everything else fails with EPERM.
//!
//! The list is data (`seccomp.json`, by topic). Not in it, on purpose: everything that mounts, makes or enters namespaces, traces
//! or reads other processes, loads code into the kernel (bpf, modules, kexec), changes the clock, keyrings, io_uring and
//! userfaultfd (kernel surface that QEMU does without). Two calls depend on their arguments and are written here: `clone` without
//! namespace flags, and `socket` of the families that a launcher needs.

use serde_json::{Map, Value, json};

const LIST: &str = include_str!("seccomp.json");
/// CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
const NAMESPACE_FLAGS: u64 = 0x7e02_0000;
/// AF_UNIX, AF_INET, AF_INET6, AF_NETLINK.
const FAMILIES: [u64; 4] = [1, 2, 10, 16];
const EPERM: u32 = 1;
const ENOSYS: u32 = 38;

/// The profile in the form of the OCI runtime specification.
#[must_use]
pub(super) fn profile() -> Value {
    let topics: Map<String, Value> = serde_json::from_str(LIST).unwrap_or_default();
    let names: Vec<&Value> = topics.values().filter_map(Value::as_array).flatten().collect();
    let mut rules = vec![
        json!({"names": names, "action": "SCMP_ACT_ALLOW"}),
        json!({"names": ["clone"], "action": "SCMP_ACT_ALLOW",
            "args": [{"index": 0, "value": NAMESPACE_FLAGS, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}]}),
        // Its flags lie in memory, where a filter cannot look: libc falls back to clone.
        json!({"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS}),
    ];
    rules.extend(FAMILIES.iter().map(|family| {
        json!({"names": ["socket"], "action": "SCMP_ACT_ALLOW",
            "args": [{"index": 0, "value": family, "op": "SCMP_CMP_EQ"}]})
    }));
    let architecture = if cfg!(target_arch = "aarch64") { "SCMP_ARCH_AARCH64" } else { "SCMP_ARCH_X86_64" };
    json!({
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": EPERM,
        "architectures": [architecture],
        "syscalls": rules,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_read_and_leaves_out_what_is_dangerous() {
        let profile = profile().to_string();
        for allowed in ["\"openat\"", "\"ioctl\"", "\"rseq\"", "\"clone\""] {
            assert!(profile.contains(allowed), "{allowed}");
        }
        for refused in [
            "mount",
            "unshare",
            "setns",
            "ptrace",
            "bpf",
            "keyctl",
            "init_module",
            "io_uring_setup",
            "pivot_root",
            "process_vm_readv",
            "kexec_load",
            "open_by_handle_at",
            "userfaultfd",
            "perf_event_open",
            "reboot",
        ] {
            assert!(!profile.contains(&format!("\"{refused}\"")), "{refused}");
        }
    }
}
