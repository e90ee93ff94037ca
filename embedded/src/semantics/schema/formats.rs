//! The `format`s that are checked.

use base64::Engine;

/// Whether a text has the format; formats that nobody checks hold always.
pub(super) fn holds(format: &str, text: &str) -> bool {
    match format {
        "date-time" => text.parse::<jiff::Timestamp>().is_ok(),
        "date" => text.parse::<jiff::civil::Date>().is_ok(),
        "byte" => base64::engine::general_purpose::STANDARD.decode(text).is_ok(),
        "ipv4" => text.parse::<std::net::Ipv4Addr>().is_ok(),
        "ipv6" => text.parse::<std::net::Ipv6Addr>().is_ok(),
        "ip" => text.parse::<std::net::IpAddr>().is_ok(),
        "cidr" => text.split_once('/').is_some_and(|(ip, bits)| {
            ip.parse::<std::net::IpAddr>()
                .is_ok_and(|ip| bits.parse::<u8>().is_ok_and(|b| b <= if ip.is_ipv4() { 32 } else { 128 }))
        }),
        "uuid" | "uuid4" => uuid::Uuid::parse_str(text).is_ok(),
        "mac" => {
            let parts: Vec<&str> = text.split([':', '-']).collect();
            parts.len() == 6 && parts.iter().all(|p| p.len() == 2 && u8::from_str_radix(p, 16).is_ok())
        }
        "quantity" => crate::semantics::quantity::Quantity::parse(text).is_some(),
        _ => true,
    }
}
