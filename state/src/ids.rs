//! Newtypes for ids and for numbers with a meaning.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fmt;

macro_rules! text_id {
    ($($(#[$m:meta])* $name:ident),* $(,)?) => { $(
        $(#[$m])*
        #[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub String);

        impl $name {
            /// The text.
            pub fn as_str(&self) -> &str {
                &self.0
            }

            /// Whether there is no text, which means "unknown".
            pub fn is_empty(&self) -> bool {
                self.0.is_empty()
            }
        }

        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl From<&str> for $name {
            fn from(s: &str) -> Self {
                Self(s.to_owned())
            }
        }

        impl From<String> for $name {
            fn from(s: String) -> Self {
                Self(s)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    )* };
}

text_id!(
    /// UID of any object.
    Uid,
    /// UID of a VirtualMachine.
    VmUid,
    /// UID of a VirtualMachineInstance.
    VmiUid,
    /// UID of a launcher pod: the identity of a launcher.
    PodUid,
    /// Name of a Node.
    NodeName,
    /// Random id of one launcher process.
    LauncherInstance,
    /// Random id of one controller process: the Lease's holder.
    LeaderInstance,
    /// Id of an instruction: derived from what it asks for, so that asking twice is asking once.
    InstructionId,
);

/// Namespace and name of a VM or bare VMI: the key of a Vm cell.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Key {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
}

impl Key {
    /// A key.
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// resourceVersion of the Lease write that acquired leadership. Two leaders never share one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Epoch(pub u64);

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A resourceVersion. Comparable within one resource only. Zero means "unknown".
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ResourceVersion(pub u64);

impl ResourceVersion {
    /// Reads the decimal text; anything else is unknown.
    pub fn parse(text: &str) -> Self {
        Self(text.parse().unwrap_or(0))
    }
}

impl fmt::Display for ResourceVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Lower-case hex of the first `bytes` bytes of SHA-256 over the parts, each followed by a zero byte. Frozen: names and ids
/// that outlive a version of virtfold are made with it.
pub fn hash_hex(parts: &[&str], bytes: usize) -> String {
    let mut h = Sha256::new();
    for p in parts {
        h.update(p.as_bytes());
        h.update([0]);
    }
    let digit = |n: u8| char::from_digit(u32::from(n), 16).unwrap_or('0');
    h.finalize().iter().take(bytes).flat_map(|b| [digit(b >> 4), digit(b & 15)]).collect()
}

/// A number below `bound` that looks random and is derived from the parts: jitter without dice.
pub fn hash_below(parts: &[&str], bound: u64) -> u64 {
    let hex = hash_hex(parts, 8);
    u64::from_str_radix(&hex, 16).unwrap_or(0).checked_rem(bound).unwrap_or(0)
}

/// Longest name of a launcher pod, so that it also fits into a label.
const POD_NAME_MAX: usize = 63;

/// Name of the one launcher pod that a VMI ever has: readable, and unique by the hash of the VMI's UID.
pub fn launcher_pod_name(vmi_name: &str, vmi: &VmiUid) -> String {
    let hash = hash_hex(&["launcher-pod", vmi.as_str()], 5);
    let room = POD_NAME_MAX - "virt-launcher--".len() - hash.len();
    let mut short: String = vmi_name.chars().take(room).collect();
    while short.ends_with(['-', '.']) {
        short.pop();
    }
    format!("virt-launcher-{short}-{hash}")
}

/// Id of an instruction: H(VMI UID, pod UID, kind, target level).
pub fn instruction_id(vmi: &VmiUid, pod: &PodUid, kind: &str, level: &str) -> InstructionId {
    InstructionId(hash_hex(&["instruct", vmi.as_str(), pod.as_str(), kind, level], 16))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn derived_names_are_frozen() {
        let vmi = VmiUid::from("0d2ba0a1-6f3a-4d6c-8f63-0b8fd0b4f001");
        let long = "a-name-that-is-far-too-long-to-be-put-into-the-name-of-a-pod.example";
        assert_eq!(launcher_pod_name("web", &vmi), "virt-launcher-web-09413f2860");
        assert!(launcher_pod_name(long, &vmi).len() <= 63);
        assert_eq!(
            instruction_id(&vmi, &PodUid::from("p"), "start", "running").as_str(),
            "827aecd8ae6be5110a2f9f4f28171382"
        );
        assert!(hash_below(&["a"], 10) < 10);
        assert_eq!(hash_below(&["a"], 0), 0);
    }
}
