//! Addresses of e-mail: which of them mails are sent to.

use lettre::Address;
use std::net::IpAddr;

/// Bytes of an address (RFC 5321, section 4.5.3.1.3).
const MAX_ADDRESS: usize = 254;

/// One address at a domain. Quoted local parts and addresses of machines (`user@[192.0.2.1]`) are refused: no identity provider has verified
/// one, and the mail server would connect to whatever machine they name.
pub(crate) fn recipient(text: &str) -> Option<Address> {
    let address = text.parse::<Address>().ok()?;
    (text.len() <= MAX_ADDRESS && is_plain(&address)).then_some(address)
}

/// True of an address that mails can be sent to.
pub(crate) fn is_address(text: &str) -> bool {
    recipient(text).is_some()
}

/// True of an address at a domain, without quotes and without characters that end a header's address.
pub(crate) fn is_plain(address: &Address) -> bool {
    let is_machine = address.domain().starts_with('[') || address.domain().parse::<IpAddr>().is_ok();
    !is_machine
        && !written(address).contains(|c: char| c.is_control() || c.is_whitespace() || "\"<>,;:\\()".contains(c))
}

pub(crate) fn written(address: &Address) -> &str {
    address.as_ref()
}
