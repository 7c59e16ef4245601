//! How a proxy in front of the node API writes down the client certificate that the node has proved to it.
//!
//! The proxy is trusted for one thing alone: that the client holds the certificate's private key. The certificate's name and validity are
//! checked here and by the node's state machine, as for a direct connection.

use std::fmt;

use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use rustls::pki_types::{CertificateDer, pem::PemObject as _};
use thiserror::Error;

/// The longest header that is read, in bytes: ten times the size of a node's certificate.
const MAX_LEN: usize = 16 * 1024;

/// The one format in which this installation's proxies forward a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum Forwarding {
    /// `Client-Cert` with the certificate's DER as a byte sequence of structured fields (RFC 9440, section 2.2).
    Rfc9440,
    /// `X-Forwarded-Client-Cert` as Envoy writes it, its element with the key `Cert`: percent-encoded PEM.
    Xfcc,
    /// `ssl-client-cert` with nginx's `$ssl_client_escaped_cert`: percent-encoded PEM.
    Nginx,
}

impl Forwarding {
    pub const ALL: [Self; 3] = [Self::Rfc9440, Self::Xfcc, Self::Nginx];

    /// As the configuration names it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.into_str()
    }

    #[must_use]
    pub const fn header(self) -> HeaderName {
        match self {
            Self::Rfc9440 => HeaderName::from_static("client-cert"),
            Self::Xfcc => HeaderName::from_static("x-forwarded-client-cert"),
            Self::Nginx => HeaderName::from_static("ssl-client-cert"),
        }
    }

    /// The forwarded certificate, not verified; `None` where the client presented none to the proxy.
    ///
    /// # Errors
    /// Where the headers do not contain exactly one certificate in this format.
    pub(super) fn read(
        self,
        headers: &HeaderMap,
    ) -> Result<Option<CertificateDer<'static>>, ForwardedCertificateError> {
        let name = self.header();
        let mut values = headers.get_all(&name).iter();
        let Some(value) = values.next() else { return Ok(None) };
        if values.next().is_some() {
            return Err(ForwardedCertificateError::Twice);
        }
        if is_hop_by_hop(headers, &name) {
            return Err(ForwardedCertificateError::HopByHop);
        }
        let text = text_of(value)?;
        if text.is_empty() {
            return Ok(None);
        }
        match self {
            Self::Rfc9440 => from_byte_sequence(text),
            Self::Xfcc => from_pem(&percent_decoded(&only_certificate(text)?)?),
            Self::Nginx => from_pem(&percent_decoded(text)?),
        }
        .map(Some)
    }
}

impl fmt::Display for Forwarding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Removes every header of any of the formats from a request, also under the names that CGI-like programs mistake for them (`Client_Cert`).
pub(super) fn strip(headers: &mut HeaderMap) {
    let is_one_of_them = |name: &HeaderName| {
        let dashed = name.as_str().replace('_', "-");
        Forwarding::ALL.iter().any(|way| way.header().as_str() == dashed) || dashed == "client-cert-chain"
    };
    let found: Vec<_> = headers.keys().filter(|name| is_one_of_them(name)).cloned().collect();
    for name in found {
        headers.remove(name);
    }
}

/// Why a trusted proxy's header does not contain a client's certificate.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ForwardedCertificateError {
    #[error("the proxy's header came more than once: the proxy lets the client's own copies pass")]
    Twice,
    #[error("the request's Connection header names the proxy's header, which a client must not remove")]
    HopByHop,
    #[error("the proxy's header is longer than {MAX_LEN} bytes")]
    TooLong,
    #[error("the proxy's header is not printable ASCII")]
    NotText,
    #[error("the proxy's header is not one byte sequence between colons (RFC 9440)")]
    NotAByteSequence,
    #[error(
        "the proxy's header has not exactly one element: only the proxy in front of the control plane may write it"
    )]
    NotOneElement,
    #[error("the proxy's header has not exactly one `Cert`: the proxy is to forward the certificate itself")]
    NoCertificate,
    #[error("the proxy's header is not percent-encoded")]
    NotEncoded,
    #[error("the proxy's header holds something else than one certificate in PEM")]
    NotOneCertificate,
    #[error("the forwarded certificate has expired")]
    Expired,
    #[error("the forwarded certificate does not verify: {0}")]
    Unverified(String),
}

/// Whether the request asks intermediaries to drop the header (RFC 9110, section 7.6.1).
fn is_hop_by_hop(headers: &HeaderMap, name: &HeaderName) -> bool {
    let options = headers.get_all(header::CONNECTION).iter().filter_map(|value| value.to_str().ok());
    options.flat_map(|value| value.split(',')).any(|option| option.trim().eq_ignore_ascii_case(name.as_str()))
}

fn text_of(value: &HeaderValue) -> Result<&str, ForwardedCertificateError> {
    if value.len() > MAX_LEN {
        return Err(ForwardedCertificateError::TooLong);
    }
    // Printable ASCII and tabs; none of the formats contains a tab.
    value.to_str().map(|text| text.trim_matches(' ')).map_err(|_| ForwardedCertificateError::NotText)
}

/// A byte sequence without parameters (RFC 8941, section 3.3.5), with its padding.
fn from_byte_sequence(text: &str) -> Result<CertificateDer<'static>, ForwardedCertificateError> {
    let base64 = text
        .strip_prefix(':')
        .and_then(|text| text.strip_suffix(':'))
        .ok_or(ForwardedCertificateError::NotAByteSequence)?;
    let der = BASE64.decode(base64).map_err(|_| ForwardedCertificateError::NotAByteSequence)?;
    if der.is_empty() { Err(ForwardedCertificateError::NotAByteSequence) } else { Ok(der.into()) }
}

/// The value of `Cert` in a header of exactly one element.
fn only_certificate(text: &str) -> Result<String, ForwardedCertificateError> {
    let elements = split(text, ',')?;
    let [element] = elements.as_slice() else { return Err(ForwardedCertificateError::NotOneElement) };
    let mut certificates = Vec::new();
    for pair in split(element, ';')? {
        let (key, value) = pair.split_once('=').ok_or(ForwardedCertificateError::NotOneElement)?;
        if key.trim().eq_ignore_ascii_case("cert") {
            certificates.push(unquoted(value.trim())?);
        }
    }
    match certificates.as_slice() {
        [certificate] => Ok(certificate.clone()),
        _ => Err(ForwardedCertificateError::NoCertificate),
    }
}

/// The parts between separators outside of quotes.
fn split(text: &str, separator: char) -> Result<Vec<&str>, ForwardedCertificateError> {
    let (mut parts, mut begin, mut quoted, mut escaped) = (Vec::new(), 0, false, false);
    for (at, character) in text.char_indices() {
        match character {
            _ if escaped => escaped = false,
            '\\' if quoted => escaped = true,
            '"' => quoted = !quoted,
            _ if character == separator && !quoted => {
                parts.push(&text[begin..at]);
                begin = at + 1;
            }
            _ => {}
        }
    }
    if quoted {
        return Err(ForwardedCertificateError::NotOneElement);
    }
    parts.push(&text[begin..]);
    Ok(parts)
}

/// Percent-encoded PEM holds neither quotes nor backslashes: one that does is something else.
fn unquoted(value: &str) -> Result<String, ForwardedCertificateError> {
    let inner = match value.strip_prefix('"') {
        Some(rest) => rest.strip_suffix('"').ok_or(ForwardedCertificateError::NotOneElement)?,
        None => value,
    };
    if inner.contains(['"', '\\']) { Err(ForwardedCertificateError::NotOneElement) } else { Ok(inner.to_owned()) }
}

fn percent_decoded(text: &str) -> Result<String, ForwardedCertificateError> {
    let (mut bytes, mut decoded) = (text.bytes(), Vec::with_capacity(text.len()));
    while let Some(byte) = bytes.next() {
        decoded.push(match byte {
            b'%' => {
                let mut digit = || bytes.next().and_then(|byte| char::from(byte).to_digit(16));
                let (high, low) = (
                    digit().ok_or(ForwardedCertificateError::NotEncoded)?,
                    digit().ok_or(ForwardedCertificateError::NotEncoded)?,
                );
                u8::try_from(high * 16 + low).map_err(|_| ForwardedCertificateError::NotEncoded)?
            }
            b' ' => return Err(ForwardedCertificateError::NotEncoded),
            _ => byte,
        });
    }
    String::from_utf8(decoded).map_err(|_| ForwardedCertificateError::NotEncoded)
}

/// Exactly one block, with nothing before and nothing but a line's end after it.
fn from_pem(pem: &str) -> Result<CertificateDer<'static>, ForwardedCertificateError> {
    const BEGIN: &str = "-----BEGIN CERTIFICATE-----\n";
    const END: &str = "-----END CERTIFICATE-----";
    let block = pem.strip_suffix('\n').unwrap_or(pem);
    let inner = block.strip_prefix(BEGIN).and_then(|rest| rest.strip_suffix(END));
    let is_body = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'=' | b'\n');
    if !inner.is_some_and(|inner| inner.bytes().all(is_body)) {
        return Err(ForwardedCertificateError::NotOneCertificate);
    }
    let der =
        CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|_| ForwardedCertificateError::NotOneCertificate)?;
    if der.is_empty() { Err(ForwardedCertificateError::NotOneCertificate) } else { Ok(der) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PEM: &str = "-----BEGIN CERTIFICATE-----\nAQID/+8=\n-----END CERTIFICATE-----\n";
    const DER: [u8; 5] = [1, 2, 3, 0xff, 0xef];

    fn escaped(text: &str) -> String {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~');
        text.bytes()
            .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
            .collect()
    }

    fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.parse::<HeaderName>().unwrap(), value.parse().unwrap())).collect()
    }

    fn read(way: Forwarding, value: &str) -> Result<Option<Vec<u8>>, ForwardedCertificateError> {
        let read = way.read(&headers(&[(way.header().as_str(), value)]))?;
        Ok(read.map(|der| der.to_vec()))
    }

    /// The header's value as a well-configured proxy writes it.
    fn written(way: Forwarding) -> String {
        match way {
            Forwarding::Rfc9440 => format!(":{}:", BASE64.encode(DER)),
            Forwarding::Xfcc => {
                format!(r#"Hash=00ff;Cert="{}";Subject="CN=a, \"b\"; c=d";URI=spiffe://x/node/1"#, escaped(PEM))
            }
            Forwarding::Nginx => escaped(PEM),
        }
    }

    #[test]
    fn each_forwarding_format_is_parsed_as_its_proxy_writes_it() {
        for way in Forwarding::ALL {
            assert_eq!(read(way, &written(way)).unwrap().as_deref(), Some(&DER[..]), "{way}");
            assert_eq!(way.read(&HeaderMap::new()).unwrap(), None);
            assert_eq!(read(way, "").unwrap(), None);
        }
        assert_eq!(read(Forwarding::Xfcc, &format!("cert={}", escaped(PEM))).unwrap().as_deref(), Some(&DER[..]));
    }

    #[test]
    fn repeated_certificate_header_is_refused() {
        for way in Forwarding::ALL {
            let (name, value) = (way.header(), written(way));
            for other in [value.as_str(), "", "x"] {
                let twice = headers(&[(name.as_str(), value.as_str()), (name.as_str(), other)]);
                assert_eq!(way.read(&twice), Err(ForwardedCertificateError::Twice));
            }
            // As a proxy joins them.
            assert!(read(way, &format!("{value}, {value}")).is_err(), "{way}");
        }
    }

    #[test]
    fn certificate_header_named_by_the_connection_header_is_refused() {
        for way in Forwarding::ALL {
            let (name, value) = (way.header(), written(way));
            let upper = format!("close , {}", name.as_str().to_uppercase());
            for option in [name.as_str(), upper.as_str()] {
                let nominated = headers(&[("connection", option), (name.as_str(), value.as_str())]);
                assert_eq!(way.read(&nominated), Err(ForwardedCertificateError::HopByHop));
            }
            let other = headers(&[("connection", "close"), (name.as_str(), value.as_str())]);
            assert!(way.read(&other).unwrap().is_some());
        }
    }

    #[test]
    fn header_names_with_underscores_are_ignored_and_stripped() {
        for way in Forwarding::ALL {
            let (name, value) = (way.header(), written(way));
            let alias = name.as_str().replace('-', "_");
            let mut sent = headers(&[(&alias, &value), ("x-client", "kept")]);
            assert_eq!(way.read(&sent), Ok(None));
            sent.insert(name, value.parse().unwrap());
            strip(&mut sent);
            assert_eq!(sent.len(), 1);
            assert!(sent.contains_key("x-client"));
        }
    }

    #[test]
    fn header_without_exactly_one_certificate_element_is_refused() {
        let one = written(Forwarding::Xfcc);
        let read = |value: &str| read(Forwarding::Xfcc, value).unwrap_err();
        assert_eq!(read(&format!("{one},{one}")), ForwardedCertificateError::NotOneElement);
        assert_eq!(read(&format!("By=spiffe://evil,{one}")), ForwardedCertificateError::NotOneElement);
        assert_eq!(read(&format!("{one};{one}")), ForwardedCertificateError::NoCertificate);
        assert_eq!(read("Hash=00ff;URI=spiffe://x/node/1"), ForwardedCertificateError::NoCertificate);
        assert_eq!(read(&format!("Subject=\"a\\\",Cert={}", escaped(PEM))), ForwardedCertificateError::NotOneElement);
        assert_eq!(read("Cert"), ForwardedCertificateError::NotOneElement);
    }

    #[test]
    fn encoded_newline_after_the_certificate_is_refused() {
        for way in [Forwarding::Xfcc, Forwarding::Nginx] {
            let wrap = |pem: &str| if way == Forwarding::Xfcc { format!("Cert=\"{pem}\"") } else { pem.to_owned() };
            for hostile in [
                format!("{}%0D%0AClient-Cert%3A%20x", escaped(PEM)),
                format!("{}{}", escaped(PEM), escaped(PEM)),
                format!("{}%0A", escaped(PEM)),
                format!("%0A{}", escaped(PEM)),
                escaped(&PEM.replace('\n', "\r\n")),
                escaped(&PEM.replace("AQID", "AQ ID")),
                escaped(&PEM.replace("CERTIFICATE", "PRIVATE KEY")),
                escaped(&PEM.replace("AQID/+8=", "")),
            ] {
                assert_eq!(
                    read(way, &wrap(&hostile)),
                    Err(ForwardedCertificateError::NotOneCertificate),
                    "{way}: {hostile}"
                );
            }
        }
        assert_eq!(read(Forwarding::Rfc9440, ":AQID%0A/+8=:"), Err(ForwardedCertificateError::NotAByteSequence));
    }

    #[test]
    fn malformed_or_oversized_certificate_header_is_refused() {
        for bad in ["AQID/+8=", ":AQID/+8", ":AQID/+8:", ":!:", "::", ":AQID/+8=:;x=1", ":-_8=:", ": AQID/+8=:"] {
            assert_eq!(read(Forwarding::Rfc9440, bad), Err(ForwardedCertificateError::NotAByteSequence), "{bad}");
        }
        for bad in ["%", "%4", "%zz", "%FF%FE", &PEM.replace('\n', " ")] {
            assert_eq!(read(Forwarding::Nginx, bad), Err(ForwardedCertificateError::NotEncoded), "{bad}");
        }
        for way in Forwarding::ALL {
            assert_eq!(read(way, &"A".repeat(MAX_LEN + 1)), Err(ForwardedCertificateError::TooLong));
            let mut binary = HeaderMap::new();
            binary.insert(way.header(), HeaderValue::from_bytes(b":\xff:").unwrap());
            assert_eq!(way.read(&binary), Err(ForwardedCertificateError::NotText));
        }
    }

    proptest! {
        #[test]
        fn parser_does_not_panic_on_any_certificate_header(value in "[ -~]{0,200}") {
            for way in Forwarding::ALL {
                let _ = read(way, &value);
                let _ = read(way, &format!("Cert=\"{value}\""));
            }
        }
    }
}
