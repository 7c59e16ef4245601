//! Listening TCP ports of processes that are no tenant's.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::Path;
use std::str::FromStr;

use super::bounded_file;
use super::privileges::Observed;

/// The kernel's tables of sockets, which are large where many connections are open.
const TABLE_BYTES: u64 = 64 * 1024 * 1024;
/// `TCP_LISTEN`.
const LISTEN: &str = "0A";

/// Ports whose listeners are not compared: `22`, or `32768-60999`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortRange(RangeInclusive<u16>);

/// The text is neither a port nor a range of ports.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is neither a port nor a range of ports such as 32768-60999")]
pub struct InvalidPortRange(String);

impl FromStr for PortRange {
    type Err = InvalidPortRange;

    fn from_str(text: &str) -> Result<Self, InvalidPortRange> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        match (first.trim().parse(), last.trim().parse()) {
            (Ok(first), Ok(last)) if first <= last && first > 0 => Ok(Self(first..=last)),
            _ => Err(InvalidPortRange(text.chars().take(32).collect())),
        }
    }
}

/// The listeners of the machine's network, without those of tenants, those of ignored ports, and the agent's own.
#[must_use]
pub fn observe(root: &Path, tenants: &BTreeSet<u32>, ignored: &[PortRange], own: Option<SocketAddr>) -> Observed {
    let mut observed = Observed::default();
    for table in ["proc/net/tcp", "proc/net/tcp6"] {
        match bounded_file::read(&root.join(table), TABLE_BYTES) {
            Ok(Some((text, _))) => {
                let text = String::from_utf8_lossy(&text);
                for (address, uid) in text.lines().skip(1).filter_map(listener) {
                    let is_ignored = ignored.iter().any(|range| range.0.contains(&address.port()));
                    // The agent's own sshd is root's.
                    let is_own = uid == 0 && own == Some(address);
                    if !tenants.contains(&uid) && !is_ignored && !is_own {
                        observed.add(format!("{address} of uid {uid}"), String::new());
                    }
                }
            }
            // A kernel without IPv6.
            Ok(None) => {}
            Err(error) => observed.fail(|| format!("/{table}: {error}")),
        }
    }
    observed
}

/// The address and the user of a line of `/proc/net/tcp`, if it is of a listener.
fn listener(line: &str) -> Option<(SocketAddr, u32)> {
    let mut fields = line.split_whitespace();
    let (local, _remote, state) = (fields.nth(1)?, fields.next()?, fields.next()?);
    let uid = fields.nth(3)?.parse().ok()?;
    let (address, port) = local.split_once(':').filter(|_| state == LISTEN)?;
    let port = u16::from_str_radix(port, 16).ok()?;
    // Words of 32 bits, each in the order of the machine.
    let words: Vec<u8> = address
        .as_bytes()
        .chunks(8)
        .map(|word| u32::from_str_radix(std::str::from_utf8(word).ok()?, 16).ok())
        .collect::<Option<Vec<u32>>>()?
        .into_iter()
        .flat_map(u32::to_ne_bytes)
        .collect();
    let ip = match <[u8; 4]>::try_from(words.as_slice()) {
        Ok(four) => IpAddr::V4(Ipv4Addr::from(four)),
        Err(_) => IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(words.as_slice()).ok()?)),
    };
    Some((SocketAddr::new(ip, port), uid))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const HEADER: &str =
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n";

    fn line(local: &str, state: &str, uid: u32) -> String {
        format!(
            "   0: {local} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 {uid:>5}        0 1 1 0 100 0 0 10 0\n"
        )
    }

    #[test]
    fn only_listeners_of_others_than_tenants_are_observed() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("proc/net")).unwrap();
        let mut text = HEADER.to_owned();
        text += &line("0100007F:0016", "0A", 0);
        text += &line("00000000:1F90", "0A", 70_000);
        text += &line("0100007F:0017", "01", 0);
        text += &line("00000000:C000", "0A", 0);
        text += &line("00000000:08AE", "0A", 0);
        // In the range of tenants and no tenant's, and another process at the address of the agent's sshd.
        text += &line("00000000:1F90", "0A", 70_001);
        text += &line("00000000:08AE", "0A", 33);
        fs::write(root.path().join("proc/net/tcp"), &text).unwrap();
        fs::write(
            root.path().join("proc/net/tcp6"),
            HEADER.to_owned() + &line("00000000000000000000000001000000:0050", "0A", 33) + "   1: garbage\n",
        )
        .unwrap();
        let found = observe(
            root.path(),
            &BTreeSet::from([70_000]),
            &["49152-65535".parse().unwrap()],
            Some("0.0.0.0:2222".parse().unwrap()),
        );
        let names: Vec<_> = found.entries.keys().map(String::as_str).collect();
        let expected =
            vec!["0.0.0.0:2222 of uid 33", "0.0.0.0:8080 of uid 70001", "127.0.0.1:22 of uid 0", "[::1]:80 of uid 33"];
        assert_eq!((names, found.incomplete), (expected, None));
    }

    #[test]
    fn listener_of_this_process_is_observed() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let name = format!("{} of uid {}", listener.local_addr().unwrap(), nix::unistd::Uid::effective());
        let find = || observe(Path::new("/"), &BTreeSet::new(), &[], None).entries.contains_key(&name);
        assert!(find(), "{name}");
        drop(listener);
        assert!(!find(), "{name}");
    }

    #[test]
    fn ports_are_ranges_within_their_bounds() {
        for bad in ["", "0", "x", "2-1", "70000", "1-70000", "-", "1-2-3"] {
            assert!(bad.parse::<PortRange>().is_err(), "{bad}");
        }
        assert_eq!("1024-65535".parse::<PortRange>().unwrap(), PortRange(1024..=65535));
    }

    #[test]
    fn table_that_cannot_be_read_is_incomplete() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("proc/net/tcp6")).unwrap();
        let found = observe(root.path(), &BTreeSet::new(), &[], None);
        assert!(found.incomplete.is_some_and(|why| why.starts_with("/proc/net/tcp6: ")));
    }
}
