//! What a tenant listens on at a loopback address is reached by that tenant, by root, and by the machine's own users: not by its neighbours.
//!
//! One table of nftables, the same for any tenants: it names the range of their uids, so a release has nothing to remove from it.
//!
//! ```text
//! TCP   the first packet of a tenant's connection gets the tenant's uid as its mark
//!       with tcp_fwmark_accept, the kernel gives the mark to the listener's side of the connection, and so to its SYN-ACK
//!       a packet whose sender is a tenant and whose mark is another uid is refused: the connection is never established
//! UDP   a source address and port belong to their last sender for a minute
//!       a datagram to a port that belongs to a neighbour and not to its own sender is dropped: an answer does not cross
//! other only ICMP: no tenant sends SCTP, DCCP or UDP-Lite to a loopback address
//! ```
//!
//! No rule uses connection tracking, which would begin for all connections of the machine. nftables compares no two values of a packet with
//! each other, so marks and uids are compared bit by bit.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::Settings;
use crate::atomic_file;
use crate::bounded_tool::{self, ToolError};

/// Has a listener's connections inherit the mark of their first packet, IPv6 included.
const ACCEPTS_MARKS: &str = "/proc/sys/net/ipv4/tcp_fwmark_accept";
/// In the agent's state: the agent has switched it on.
const SWITCHED_ON: &str = "tcp_fwmark_accept";
/// How many ports of how many addresses have an owner. Beyond that, tenants' datagrams are dropped.
const OWNERS: u32 = 131_072;
/// The mark of a datagram that is dropped when it arrives: the sender of a refused packet gets an error, by which a neighbour could end a
/// server. No uid has this number.
const DROPPED: u32 = u32::MAX;

/// The kernel takes the rules in a moment.
const NFT_LIMIT: Duration = Duration::from_secs(30);

/// The families: their name in rules, in `nfproto`, the type of their addresses, and what their loopback addresses are.
const FAMILIES: [(&str, &str, &str, &str); 2] =
    [("ip", "ipv4", "ipv4_addr", "127.0.0.0/8"), ("ip6", "ipv6", "ipv6_addr", "::1")];

/// Why tenants reach what others listen on.
#[derive(Debug, thiserror::Error)]
pub enum UnguardedLoopback {
    #[error("SVC_NODE_AGENT_LOOPBACK_GUARD is off")]
    Off,
    #[error("the program nft cannot be run; install nftables")]
    NoProgram,
    #[error("nft does not install the rules")]
    Refused(#[source] ToolError),
    #[error("{ACCEPTS_MARKS} cannot be set")]
    Marks(#[source] io::Error),
}

/// See the module's documentation.
pub struct LoopbackGuard {
    uids: RangeInclusive<u32>,
    switched_on: PathBuf,
    is_on: bool,
}

impl LoopbackGuard {
    /// The guard of an agent with this state folder.
    #[must_use]
    pub fn new(state_dir: &Path, settings: &Settings) -> Self {
        let Settings { uids, loopback_guard, .. } = settings;
        Self { uids: uids.clone(), switched_on: state_dir.join(SWITCHED_ON), is_on: *loopback_guard }
    }

    /// Replaces the rules in one step.
    ///
    /// # Errors
    /// [`UnguardedLoopback`].
    pub fn install(&self) -> Result<(), UnguardedLoopback> {
        if !self.is_on {
            return Err(UnguardedLoopback::Off);
        }
        self.accept_marks().map_err(UnguardedLoopback::Marks)?;
        nft(&self.rules())
    }

    /// Installs the rules where another program has removed them, as a reload of the machine's own firewall does.
    ///
    /// # Errors
    /// [`UnguardedLoopback`].
    pub fn restore(&self) -> Result<(), UnguardedLoopback> {
        if self.is_on && self.is_installed() { Ok(()) } else { self.install() }
    }

    /// Whether the rules hold.
    #[must_use]
    pub fn is_installed(&self) -> bool {
        let accepts = fs::read_to_string(ACCEPTS_MARKS).is_ok_and(|value| value.trim() != "0");
        accepts && nft(&format!("list table inet {}\n", self.table())).is_ok()
    }

    /// Removes the rules from a machine that leaves the service.
    pub fn remove(&self) {
        let table = self.table();
        let _ = nft(&format!("add table inet {table}\ndelete table inet {table}\n"));
        if self.switched_on.exists() && fs::write(ACCEPTS_MARKS, "0").is_ok() {
            let _ = atomic_file::remove(&self.switched_on);
        }
    }

    /// Agents with the same range of uids have the same rules.
    fn table(&self) -> String {
        format!("gpuaas_loopback_{}_{}", self.uids.start(), self.uids.end())
    }

    fn accept_marks(&self) -> io::Result<()> {
        if fs::read_to_string(ACCEPTS_MARKS)?.trim() != "0" {
            return Ok(());
        }
        // Noted first: after a crash in between, the clean-up sets what is 0 to 0.
        fs::write(&self.switched_on, "")?;
        fs::write(ACCEPTS_MARKS, "1")
    }

    fn rules(&self) -> String {
        let (table, first, last) = (self.table(), self.uids.start(), self.uids.end());
        let bits: Vec<u32> = (0..u32::BITS - last.leading_zeros()).map(|bit| 1 << bit).collect();
        let stamp = bits.iter().map(|bit| format!("meta skuid & {bit:#x} != 0 meta mark set meta mark | {bit:#x}"));
        let compare = bits.iter().flat_map(|bit| {
            [("==", "!="), ("!=", "==")].map(|(mark, uid)| {
                format!("meta mark & {bit:#x} {mark} 0 meta skuid & {bit:#x} {uid} 0 reject with tcp reset")
            })
        });
        let mut text = format!("add table inet {table}\ndelete table inet {table}\ntable inet {table} {{\n");
        for (name, _, address, _) in FAMILIES {
            let bound = format!("size {OWNERS}; flags dynamic,timeout; timeout 1m;");
            let _ = writeln!(text, "set {name}_ports {{ type {address} . inet_service; {bound} }}");
            let _ = writeln!(text, "set {name}_owners {{ type {address} . inet_service . uid; {bound} }}");
        }
        // In the order in which they are referred to.
        chain(&mut text, "stamp", stamp);
        chain(&mut text, "connection", ["meta mark 0 goto stamp".to_owned()].into_iter().chain(compare));
        for (name, ..) in FAMILIES {
            let rules = [
                format!("{name} daddr . udp dport . meta skuid @{name}_owners accept"),
                format!("{name} daddr . udp dport @{name}_ports meta mark set {DROPPED}"),
            ];
            chain(&mut text, &format!("{name}_answer"), rules);
        }
        let note = FAMILIES.map(|(name, family, ..)| {
            format!(
                "meta nfproto {family} update @{name}_ports {{ {name} saddr . udp sport }} \
                 update @{name}_owners {{ {name} saddr . udp sport . meta skuid }} goto {name}_answer"
            )
        });
        // What could not be noted is not sent.
        chain(&mut text, "datagram", note.into_iter().chain(["drop".to_owned()]));
        let protocols =
            "meta l4proto vmap { tcp : goto connection, udp : goto datagram, icmp : accept, icmpv6 : accept }";
        chain(&mut text, "tenant", [protocols.to_owned(), "drop".to_owned()]);
        let guard = [
            format!("meta skuid {first}-{last} goto tenant"),
            // All other users: matches where there is a sender.
            "meta skuid 0-4294967295 accept".to_owned(),
            // A SYN-ACK of a listener under a flood, which the kernel sends in no socket's name.
            format!("meta mark {first}-{last} tcp flags & (syn|ack) == (syn|ack) drop"),
        ];
        chain(&mut text, "loopback", guard);
        let ends = FAMILIES.iter().flat_map(|(name, _, _, address)| {
            ["saddr", "daddr"].map(|end| format!("{name} {end} {address} goto loopback"))
        });
        let sent = ["type filter hook output priority filter; policy accept;", "oif != \"lo\" accept"];
        chain(&mut text, "sent", sent.map(str::to_owned).into_iter().chain(ends));
        let arrived = [
            "type filter hook input priority filter; policy accept;".to_owned(),
            format!("iif \"lo\" meta l4proto udp meta mark {DROPPED} drop"),
        ];
        chain(&mut text, "arrived", arrived);
        text.push_str("}\n");
        text
    }
}

fn chain(text: &mut String, name: &str, rules: impl IntoIterator<Item = String>) {
    let rules: String = rules.into_iter().map(|rule| format!("\t{rule}\n")).collect();
    let _ = writeln!(text, "chain {name} {{\n{rules}}}");
}

/// Runs commands of nft in one transaction.
fn nft(commands: &str) -> Result<(), UnguardedLoopback> {
    // Without the elements of sets, of which there may be a hundred thousand.
    match bounded_tool::run_of_path("nft", &["--terse", "--file", "-"], commands.as_bytes(), NFT_LIMIT) {
        Ok(_) => Ok(()),
        Err(ToolError::NotTested(_)) => Err(UnguardedLoopback::NoProgram),
        Err(error) => Err(UnguardedLoopback::Refused(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guard(uids: RangeInclusive<u32>) -> LoopbackGuard {
        LoopbackGuard::new(Path::new("/state"), &Settings { uids, ..Settings::default() })
    }

    #[test]
    fn rules_compare_every_bit_that_a_uid_of_the_range_can_have() {
        let rules = guard(70_000..=99_999).rules();
        // 99,999 has 17 bits.
        assert_eq!(rules.matches("reject with tcp reset").count(), 2 * 17);
        assert_eq!(rules.matches("meta mark set meta mark |").count(), 17);
        assert!(rules.contains("meta skuid 70000-99999 goto tenant"), "{rules}");
        assert_eq!(guard(1000..=1000).rules().matches("meta mark set meta mark |").count(), 10);
        assert_eq!(guard(1000..=u32::MAX - 2).rules().matches("meta mark set meta mark |").count(), 32);
    }

    #[test]
    fn rules_begin_with_the_removal_of_the_former_ones_in_the_same_transaction() {
        let rules = guard(70_000..=99_999).rules();
        let begin: Vec<_> = rules.lines().take(3).collect();
        assert_eq!(
            begin,
            [
                "add table inet gpuaas_loopback_70000_99999",
                "delete table inet gpuaas_loopback_70000_99999",
                "table inet gpuaas_loopback_70000_99999 {",
            ]
        );
    }

    #[test]
    fn guard_that_is_off_says_so_and_installs_nothing() {
        let settings = Settings { loopback_guard: false, ..Settings::default() };
        let off = LoopbackGuard::new(Path::new("/state"), &settings);
        assert!(matches!(off.install(), Err(UnguardedLoopback::Off)));
        assert!(matches!(off.restore(), Err(UnguardedLoopback::Off)));
    }
}
