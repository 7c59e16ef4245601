//! The reachability probe of a node: one TCP connection to an address that was checked.
//!
//! A probe makes the service connect to a host that a request names, so it could reach the service's own network. It resolves once, checks
//! every address in the result, connects to the checked address and to no other, sends nothing and follows nothing (service specification,
//! "Limits": probe targets).

use std::{
    future::Future,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use ipnet::IpNet;
use thiserror::Error;
use tokio::net::TcpStream;

use crate::http::error::{ApiError, Code};
use crate::outbound::host_address::HostAddress;

/// How many addresses of one name are checked; a name with more is refused as a whole.
const MAX_ADDRESSES: usize = 16;

/// Turns a name into addresses.
pub trait Resolve: Send + Sync {
    fn resolve<'a>(&'a self, name: &'a str) -> Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send + 'a>>;
}

/// The operating system's resolver.
pub struct SystemResolver;

impl Resolve for SystemResolver {
    fn resolve<'a>(&'a self, name: &'a str) -> Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send + 'a>> {
        Box::pin(async move { Ok(tokio::net::lookup_host((name, 0)).await?.map(|address| address.ip()).collect()) })
    }
}

/// The addresses that may be probed.
#[derive(Clone, Debug, Default)]
pub struct ProbeTargets {
    /// `NODE_PROBE_ALLOWED_CIDRS`; empty where none are configured. It narrows the targets, and never admits a denied one.
    pub allowed: Vec<IpNet>,
}

/// Why an address is not connected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum DeniedAddress {
    #[error("loopback")]
    Loopback,
    #[error("unspecified")]
    Unspecified,
    #[error("multicast")]
    Multicast,
    #[error("broadcast or reserved")]
    Broadcast,
    #[error("link-local")]
    LinkLocal,
    #[error("a cloud metadata endpoint")]
    Metadata,
    #[error("an address that hides another one")]
    Embedding,
    #[error("in a private network")]
    Private,
    #[error("outside of the allowed networks")]
    OutsideAllowlist,
    #[error("one of too many addresses")]
    TooMany,
}

impl From<DeniedAddress> for ApiError {
    fn from(denied: DeniedAddress) -> Self {
        // The address would reveal what the service's resolver knows.
        Self::new(Code::ProbeTargetDenied, format!("The probe target is refused: its address is {denied}. Use an address of the node that the control plane may reach."))
            .detail("field", "host")
    }
}

/// The result of a probe; a refused target is never contacted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reachability {
    Reachable,
    /// With the reason, for the operator who registers the node.
    Unreachable(String),
}

/// Probes nodes.
#[derive(Clone)]
pub struct Probe {
    targets: ProbeTargets,
    resolver: Arc<dyn Resolve>,
    timeout: Duration,
}

impl Probe {
    /// `timeout` bounds resolving and connecting together.
    #[must_use]
    pub fn new(targets: ProbeTargets, resolver: Arc<dyn Resolve>, timeout: Duration) -> Self {
        Self { targets, resolver, timeout }
    }

    /// Connects to the host's port and closes the connection at once.
    ///
    /// # Errors
    /// [`DeniedAddress`] where any of the host's addresses may not be connected to; nothing was connected to then.
    pub async fn probe(&self, host: &HostAddress, port: u16) -> Result<Reachability, DeniedAddress> {
        let deadline = tokio::time::Instant::now() + self.timeout;
        let addresses = match host {
            HostAddress::Address(address) => vec![*address],
            HostAddress::Name(name) => match tokio::time::timeout_at(deadline, self.resolver.resolve(name)).await {
                Ok(Ok(addresses)) if addresses.is_empty() => {
                    return Ok(Reachability::Unreachable("the name has no address".into()));
                }
                Ok(Ok(addresses)) => addresses,
                Ok(Err(_)) => return Ok(Reachability::Unreachable("the name does not resolve".into())),
                Err(_) => return Ok(Reachability::Unreachable("resolving the name took too long".into())),
            },
        };
        if addresses.len() > MAX_ADDRESSES {
            return Err(DeniedAddress::TooMany);
        }
        // All are checked before any is connected to: a name with one good and one bad address is a trap.
        for address in &addresses {
            self.targets.check(*address)?;
        }
        let mut reason = String::new();
        for address in addresses {
            match tokio::time::timeout_at(deadline, TcpStream::connect(SocketAddr::new(address, port))).await {
                Ok(Ok(_)) => return Ok(Reachability::Reachable),
                Ok(Err(error)) => reason = connect_error(&error).to_owned(),
                Err(_) => return Ok(Reachability::Unreachable("connecting took too long".into())),
            }
        }
        Ok(Reachability::Unreachable(reason))
    }
}

fn connect_error(error: &io::Error) -> &'static str {
    let kind = error.kind();
    if kind == io::ErrorKind::ConnectionRefused {
        "nothing listens on the port"
    } else if matches!(kind, io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable) {
        "there is no route to the host"
    } else if kind == io::ErrorKind::TimedOut {
        "connecting took too long"
    } else {
        "the connection failed"
    }
}

impl ProbeTargets {
    /// Whether the service may connect to this address.
    ///
    /// # Errors
    /// The class of addresses that forbids it.
    pub fn check(&self, address: IpAddr) -> Result<(), DeniedAddress> {
        let meant = embedded_or_same(address)?;
        if self.allowed.is_empty() || self.allowed.iter().any(|network| network.contains(&meant)) {
            return Ok(());
        }
        Err(DeniedAddress::OutsideAllowlist)
    }
}

/// The IPv4 address that is embedded in an IPv6 address, or the address itself.
///
/// # Errors
/// [`DeniedAddress`] where it is of a class that nothing may be connected to.
pub(crate) fn embedded_or_same(address: IpAddr) -> Result<IpAddr, DeniedAddress> {
    match address {
        IpAddr::V4(v4) => check_v4(v4).map(|()| address),
        IpAddr::V6(v6) => Ok(check_v6(v6)?.map_or(address, IpAddr::from)),
    }
}

/// Metadata and host-agent addresses of the large clouds beside 169.254.169.254, which is link-local already.
const METADATA_V4: [Ipv4Addr; 3] =
    [Ipv4Addr::new(100, 100, 100, 200), Ipv4Addr::new(168, 63, 129, 16), Ipv4Addr::new(192, 0, 0, 192)];
const METADATA_V6: [Ipv6Addr; 2] =
    [Ipv6Addr::new(0xfd00, 0x0ec2, 0, 0, 0, 0, 0, 0x254), Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254)];

fn check_v4(address: Ipv4Addr) -> Result<(), DeniedAddress> {
    let [first, ..] = address.octets();
    if address.is_loopback() {
        Err(DeniedAddress::Loopback)
    } else if first == 0 {
        // 0.0.0.0 connects to this machine, and the rest of 0.0.0.0/8 is "this network".
        Err(DeniedAddress::Unspecified)
    } else if address.octets() == [169, 254, 169, 254] || METADATA_V4.contains(&address) {
        Err(DeniedAddress::Metadata)
    } else if address.is_link_local() {
        Err(DeniedAddress::LinkLocal)
    } else if address.is_multicast() {
        Err(DeniedAddress::Multicast)
    } else if first >= 240 {
        Err(DeniedAddress::Broadcast)
    } else {
        Ok(())
    }
}

/// Resolves to the IPv4 address that is embedded in an IPv6 address, where there is one.
fn check_v6(address: Ipv6Addr) -> Result<Option<Ipv4Addr>, DeniedAddress> {
    let [a, b, c, d, e, f, g, h] = address.segments();
    let v4 = |high: u16, low: u16| Ipv4Addr::from((u32::from(high) << 16) | u32::from(low));
    if address.is_unspecified() {
        return Err(DeniedAddress::Unspecified);
    }
    if address.is_loopback() {
        return Err(DeniedAddress::Loopback);
    }
    if address.is_multicast() {
        return Err(DeniedAddress::Multicast);
    }
    if address.is_unicast_link_local() {
        return Err(DeniedAddress::LinkLocal);
    }
    if METADATA_V6.contains(&address) {
        return Err(DeniedAddress::Metadata);
    }
    let embedded = match (a, b, c, d, e, f) {
        // IPv4-compatible, IPv4-mapped (RFC 4291), IPv4-translated (RFC 2765), NAT64 (RFC 6052).
        (0, 0, 0, 0, 0, 0 | 0xffff) | (0, 0, 0, 0, 0xffff, 0) | (0x64, 0xff9b, 0, 0, 0, 0) => Some(v4(g, h)),
        // 6to4 (RFC 3056).
        (0x2002, ..) => Some(v4(b, c)),
        // ISATAP (RFC 5214) carries it in the interface id.
        (_, _, _, _, 0 | 0x200, 0x5efe) => Some(v4(g, h)),
        // Local-use NAT64 (RFC 8215) may put it anywhere; Teredo (RFC 4380) obfuscates it.
        (0x64, 0xff9b, 1, ..) | (0x2001, 0, ..) => return Err(DeniedAddress::Embedding),
        _ => None,
    };
    if let Some(embedded) = embedded {
        check_v4(embedded)?;
    }
    Ok(embedded)
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeMap,
        sync::atomic::{AtomicUsize, Ordering},
    };

    use proptest::prelude::*;
    use tokio::net::TcpListener;

    use super::*;
    use crate::outbound::host_address::HostError;

    fn anywhere() -> ProbeTargets {
        ProbeTargets::default()
    }

    fn check(address: &str) -> Result<(), DeniedAddress> {
        anywhere().check(address.parse().unwrap())
    }

    #[test]
    fn forbidden_addresses_are_denied_by_their_class() {
        for (address, denied) in [
            ("127.0.0.1", DeniedAddress::Loopback),
            ("127.255.255.254", DeniedAddress::Loopback),
            ("0.0.0.0", DeniedAddress::Unspecified),
            ("0.1.2.3", DeniedAddress::Unspecified),
            ("169.254.169.254", DeniedAddress::Metadata),
            ("100.100.100.200", DeniedAddress::Metadata),
            ("169.254.0.1", DeniedAddress::LinkLocal),
            ("224.0.0.1", DeniedAddress::Multicast),
            ("239.255.255.255", DeniedAddress::Multicast),
            ("240.0.0.1", DeniedAddress::Broadcast),
            ("255.255.255.255", DeniedAddress::Broadcast),
            ("::", DeniedAddress::Unspecified),
            ("::1", DeniedAddress::Loopback),
            ("ff02::1", DeniedAddress::Multicast),
            ("fe80::1", DeniedAddress::LinkLocal),
            ("febf::1", DeniedAddress::LinkLocal),
            ("fd00:ec2::254", DeniedAddress::Metadata),
            ("::ffff:127.0.0.1", DeniedAddress::Loopback),
            ("::ffff:169.254.169.254", DeniedAddress::Metadata),
            ("::ffff:0.0.0.0", DeniedAddress::Unspecified),
            ("::127.0.0.1", DeniedAddress::Loopback),
            ("::ffff:0:127.0.0.1", DeniedAddress::Loopback),
            ("64:ff9b::127.0.0.1", DeniedAddress::Loopback),
            ("64:ff9b::a9fe:a9fe", DeniedAddress::Metadata),
            ("64:ff9b:1::1", DeniedAddress::Embedding),
            ("2002:7f00:1::", DeniedAddress::Loopback),
            ("2002:a9fe:a9fe::1", DeniedAddress::Metadata),
            ("2001:db8::5efe:127.0.0.1", DeniedAddress::Loopback),
            ("2001:0:1::1", DeniedAddress::Embedding),
        ] {
            assert_eq!(check(address), Err(denied), "{address}");
        }
    }

    #[test]
    fn private_and_public_addresses_are_allowed_until_a_list_narrows_them() {
        for address in [
            "10.0.0.1",
            "192.168.1.1",
            "172.16.0.1",
            "203.0.113.7",
            "fd12:3456::1",
            "2001:db8::1",
            "::ffff:10.0.0.1",
            "2001:db8::200:5efe:10.0.0.1",
        ] {
            assert_eq!(check(address), Ok(()), "{address}");
        }
        let narrow = ProbeTargets {
            allowed: vec!["10.0.0.0/24".parse().unwrap(), "127.0.0.0/8".parse().unwrap(), "fd12::/16".parse().unwrap()],
        };
        let check = |address: &str| narrow.check(address.parse().unwrap());
        assert_eq!(check("10.0.0.9"), Ok(()));
        assert_eq!(check("::ffff:10.0.0.9"), Ok(()));
        assert_eq!(check("fd12::1"), Ok(()));
        assert_eq!(check("10.0.1.9"), Err(DeniedAddress::OutsideAllowlist));
        assert_eq!(check("::ffff:10.0.1.9"), Err(DeniedAddress::OutsideAllowlist));
        assert_eq!(check("127.0.0.1"), Err(DeniedAddress::Loopback), "the list never admits what is denied anyway");
    }

    /// A resolver with fixed answers, as a hostile DNS server would give them.
    #[derive(Default)]
    struct Names {
        table: BTreeMap<&'static str, Vec<IpAddr>>,
        asked: AtomicUsize,
    }

    impl Resolve for Names {
        fn resolve<'a>(&'a self, name: &'a str) -> Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send + 'a>> {
            self.asked.fetch_add(1, Ordering::SeqCst);
            Box::pin(async move { self.table.get(name).cloned().ok_or_else(|| io::Error::other("no such name")) })
        }
    }

    fn probe(names: Names) -> (Probe, Arc<Names>) {
        let names = Arc::new(names);
        (Probe::new(anywhere(), Arc::<Names>::clone(&names), Duration::from_secs(2)), names)
    }

    #[tokio::test]
    async fn every_spelling_of_loopback_is_refused_and_no_connection_is_made() {
        let v4 = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = v4.local_addr().unwrap().port();
        let system = Probe::new(anywhere(), Arc::new(SystemResolver), Duration::from_secs(2));
        for spelling in [
            "127.0.0.1",
            "127.1",
            "0x7f.1",
            "0x7f000001",
            "2130706433",
            "0177.0.0.1",
            "127.0.0.1.",
            "[::1]",
            "::1",
            "[::ffff:127.0.0.1]",
            "::ffff:7f00:1",
            "::127.0.0.1",
            "64:ff9b::7f00:1",
            "2002:7f00:1::",
            "localhost",
            "localhost.",
            "LOCALHOST",
            "x.localhost",
            "0.0.0.0",
            "0",
            "[::]",
            "１２７.０.０.１",
            "①②⑦.0.0.1",
            "127。0。0。1",
        ] {
            match HostAddress::parse(spelling) {
                Err(_) => {}
                Ok(host) => assert!(system.probe(&host, port).await.is_err(), "{spelling} was probed"),
            }
        }
        let nobody_came = tokio::time::timeout(Duration::from_millis(100), v4.accept()).await;
        assert!(nobody_came.is_err());
        assert_eq!(HostAddress::parse("localhost."), Err(HostError::Localhost));
    }

    #[tokio::test]
    async fn name_with_any_forbidden_address_is_refused() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut names = Names::default();
        names.table.insert("rebind.example", vec!["203.0.113.7".parse().unwrap(), "127.0.0.1".parse().unwrap()]);
        names.table.insert("metadata.example", vec!["::ffff:169.254.169.254".parse().unwrap()]);
        names.table.insert("many.example", vec!["203.0.113.7".parse().unwrap(); 17]);
        let (probe, names) = probe(names);
        assert_eq!(probe.probe(&HostAddress::Name("rebind.example".into()), port).await, Err(DeniedAddress::Loopback));
        assert_eq!(probe.probe(&HostAddress::Name("metadata.example".into()), 80).await, Err(DeniedAddress::Metadata));
        assert_eq!(probe.probe(&HostAddress::Name("many.example".into()), 80).await, Err(DeniedAddress::TooMany));
        assert_eq!(names.asked.load(Ordering::SeqCst), 3, "each name is resolved once");
        assert!(tokio::time::timeout(Duration::from_millis(50), listener.accept()).await.is_err());
    }

    #[tokio::test]
    async fn a_name_without_address_is_unreachable_not_refused() {
        let mut names = Names::default();
        names.table.insert("empty.example", vec![]);
        let (probe, _) = probe(names);
        for name in ["nowhere.example", "empty.example"] {
            assert!(matches!(probe.probe(&HostAddress::Name(name.into()), 22).await, Ok(Reachability::Unreachable(_))));
        }
    }

    #[test]
    fn refusal_does_not_reveal_the_address() {
        let error = ApiError::from(DeniedAddress::Metadata);
        assert_eq!(error.code(), Code::ProbeTargetDenied);
        assert!(!error.message().contains("169.254"));
    }

    proptest! {
        #[test]
        fn embedded_loopback_addresses_are_denied(low in any::<[u8; 3]>(), interface: u64) {
            let v4 = u32::from_be_bytes([127, low[0], low[1], low[2]]);
            let hidden = |prefix: u128| Ipv6Addr::from(prefix | u128::from(v4));
            let mut spellings = vec![hidden(0), hidden(0xffff << 32), hidden(0xffff_0000_u128 << 32), hidden(0x0064_ff9b_u128 << 96)];
            spellings.push(Ipv6Addr::from((0x2002_u128 << 112) | (u128::from(v4) << 80) | u128::from(interface)));
            for address in spellings {
                prop_assert!(anywhere().check(address.into()).is_err(), "{}", address);
            }
        }
    }
}
