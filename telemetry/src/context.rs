//! W3C trace context: the text that travels in annotations, HTTP headers and gRPC fields.

use sha2::{Digest, Sha256};

/// Trace id, the span that is the parent of what follows, and whether the trace is recorded.
///
/// Text form: `00-<32 hex>-<16 hex>-<01|00>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TraceContext {
    /// 16 bytes, not all zero.
    pub trace_id: [u8; 16],
    /// 8 bytes, not all zero.
    pub span_id: [u8; 8],
    /// Recorded.
    pub sampled: bool,
}

impl TraceContext {
    /// A new trace with a random id. The span of its root is derived from it, so that everybody can tell a trace that
    /// began here from one that a caller brought along.
    pub fn random() -> Self {
        let trace_id = *uuid::Uuid::new_v4().as_bytes();
        Self { trace_id, span_id: root(&trace_id), sampled: true }
    }

    /// Whether the trace began here: its span is the root. Otherwise it is the caller's span, which the caller emits.
    pub fn is_root(self) -> bool {
        self.span_id == root(&self.trace_id)
    }

    /// The context of an operation below this span.
    pub fn operation(self, cell: &str, operation: &str) -> Self {
        self.child(span_id(&self.trace_id, cell, operation, ""))
    }

    /// Reads the text form; `None` where it is malformed or all zero.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.trim().split('-');
        let (version, trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        if version.len() != 2 || version == "ff" || (version == "00" && parts.next().is_some()) {
            return None;
        }
        let (mut trace_id, mut span_id, mut flag) = ([0; 16], [0; 8], [0; 1]);
        unhex(trace, &mut trace_id)?;
        unhex(span, &mut span_id)?;
        unhex(flags, &mut flag)?;
        (trace_id != [0; 16] && span_id != [0; 8]).then_some(Self { trace_id, span_id, sampled: flag[0] & 1 == 1 })
    }

    /// The trace's id, in hexadecimal digits.
    pub fn trace(self) -> String {
        hex(&self.trace_id)
    }

    /// The same trace with another parent.
    pub fn child(self, span_id: [u8; 8]) -> Self {
        Self { span_id, ..self }
    }
}

impl std::fmt::Display for TraceContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "00-{}-{}-{:02x}", hex(&self.trace_id), hex(&self.span_id), u8::from(self.sampled))
    }
}

/// The id of a step's span: a hash of (trace, cell, operation, step), so that whoever repeats the step derives it again.
pub fn span_id(trace_id: &[u8; 16], cell: &str, operation: &str, step: &str) -> [u8; 8] {
    let mut h = Sha256::new();
    h.update(trace_id);
    for part in [cell, operation, step] {
        h.update(part.as_bytes());
        h.update([0]);
    }
    let mut id = [0; 8];
    id.copy_from_slice(&h.finalize()[..8]);
    if id == [0; 8] {
        id[7] = 1;
    }
    id
}

fn root(trace_id: &[u8; 16]) -> [u8; 8] {
    span_id(trace_id, "", "", "")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn unhex(text: &str, into: &mut [u8]) -> Option<()> {
    let lower = text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    if text.len() != into.len() * 2 || !lower {
        return None;
    }
    for (i, b) in into.iter_mut().enumerate() {
        *b = u8::from_str_radix(text.get(2 * i..2 * i + 2)?, 16).ok()?;
    }
    Some(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn text_form_round_trips_and_garbage_is_none() {
        let text = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let c = TraceContext::parse(text).unwrap();
        assert_eq!(c.to_string(), text);
        assert!(TraceContext::parse(&TraceContext::random().to_string()).is_some());
        for bad in [
            "",
            "00",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0AF7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-x",
            "00-0af7651916cd43dd8448eb211c80319é-b7ad6b7169203331-01",
        ] {
            assert_eq!(TraceContext::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn span_ids_are_frozen() {
        // Golden: two versions of virtfold that repeat one step must derive one id.
        let id = span_id(&[7; 16], "vmi-uid", "start", "schedule");
        assert_eq!(hex(&id), hex(&span_id(&[7; 16], "vmi-uid", "start", "schedule")));
        assert_ne!(id, span_id(&[7; 16], "vmi-uid", "startsch", "edule"));
        assert_ne!(id, span_id(&[8; 16], "vmi-uid", "start", "schedule"));
        assert_eq!(hex(&id), "46d25e5c0c5783f2");
    }
}
