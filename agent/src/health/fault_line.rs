//! Lines of NVIDIA's driver in the kernel's log: Xids of GPUs and SXids of NVSwitches. The text of a line may say more than its number: how
//! severe it is, in which part of the chip, and which other fault has caused it.
//!
//! A code has segments, from the general to the special (`145.nonfatal.rlw_rxpipe`), so that the control plane judges a segment that it does
//! not know by those before it. Wording that is not known stays in the text, and the code is the number.

use wire::finding::{MAX_FINDING_DETAIL, MAX_FINDING_NAME};

/// The Xids of NVLink 5: `145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2 …)`. Other Xids have no severity, and the name of a tenant's process
/// in their text.
const NVLINK_XIDS: std::ops::RangeInclusive<u32> = 144..=150;
/// `45, pid=1818992, name=python3, Ch 0000000c caused by previous Xid 145`: the clean-up of a program that another fault has ended.
const CLEANUP_XID: u32 = 45;
const CAUSE: &str = " caused by previous Xid ";

/// What a line is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum FaultyDevice {
    Gpu,
    NvSwitch,
}

impl FaultyDevice {
    /// The probe of its findings.
    #[must_use]
    pub const fn probe(self) -> &'static str {
        match self {
            Self::Gpu => "xid",
            Self::NvSwitch => "sxid",
        }
    }
}

/// One kind of fault of one device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct FaultKind {
    pub device: FaultyDevice,
    /// `domain:bus:device`, in lower case.
    pub pci_address: String,
    /// Segments of `a-z`, `0-9` and `_`, with dots between them; at most [`MAX_FINDING_NAME`] bytes.
    pub code: String,
}

/// A line of the driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FaultLine {
    pub kind: FaultKind,
    /// The rest of the line, bounded.
    pub text: String,
}

impl FaultLine {
    /// Parses `NVRM: Xid (PCI:0000:3b:00): 79, …` and `nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Non-fatal, …`. Kernel lines may begin with
    /// the name of a tenant's process, of up to fifteen characters; no such line has the address and the number after it.
    #[must_use]
    pub fn parse(message: &str) -> Option<Self> {
        let (device, rest) = match message.strip_prefix("NVRM: Xid (") {
            Some(rest) => (FaultyDevice::Gpu, rest),
            None => (FaultyDevice::NvSwitch, after_switch(message)?),
        };
        let (place, rest) = rest.split_once("): ")?;
        let pci_address = pci_address(place.strip_prefix("PCI:").unwrap_or(place))?;
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let number: u32 = rest.get(..digits)?.parse().ok()?;
        let text = rest[digits..].strip_prefix(',')?.trim();
        let code = match device {
            FaultyDevice::Gpu => xid_code(number, text),
            FaultyDevice::NvSwitch => sxid_code(number, text)?,
        };
        let text = text.chars().map(|character| if character.is_control() { ' ' } else { character });
        let kind = FaultKind { device, pci_address, code };
        Some(Self { kind, text: text.take(MAX_FINDING_DETAIL).collect() })
    }
}

fn after_switch(message: &str) -> Option<&str> {
    let numbered = message.strip_prefix("nvidia-nvswitch")?;
    numbered.trim_start_matches(|digit: char| digit.is_ascii_digit()).strip_prefix(": SXid (")
}

fn xid_code(number: u32, text: &str) -> String {
    if number == CLEANUP_XID && cause(text).is_some() {
        return format!("{number}.caused_by");
    }
    // Where the line names a process, the event is behind it: a process's name is no event.
    let event = text.rsplit(", ").find_map(nvlink_event).filter(|_| NVLINK_XIDS.contains(&number));
    let Some((unit, severity)) = event else { return number.to_string() };
    let code = format!("{number}.{severity}.{}", unit.to_ascii_lowercase());
    if code.len() <= MAX_FINDING_NAME { code } else { format!("{number}.{severity}") }
}

/// The Xid that has caused this one.
fn cause(text: &str) -> Option<u32> {
    text.rsplit_once(CAUSE)?.1.trim().parse().ok()
}

/// `RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2 0x00000008)`.
fn nvlink_event(text: &str) -> Option<(&str, &'static str)> {
    let mut words = text.split_whitespace();
    let (unit, severity) = (words.next()?, severity(words.next()?)?);
    let is_unit = unit.bytes().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_');
    is_unit.then_some((unit, severity))
}

fn severity(word: &str) -> Option<&'static str> {
    match word.to_ascii_lowercase().as_str() {
        "fatal" => Some("fatal"),
        "nonfatal" | "non-fatal" => Some("nonfatal"),
        _ => None,
    }
}

/// `None` for the second and third line of a fault, which describe the first one.
fn sxid_code(number: u32, text: &str) -> Option<String> {
    if text.starts_with("Severity ") || text.starts_with("Data ") {
        return None;
    }
    let severity = text.split(',').next().and_then(severity);
    Some(severity.map_or_else(|| number.to_string(), |severity| format!("{severity}.{number}")))
}

/// `domain:bus:device` in lower case, of an address that may also name the function, or a GPU instance after a space.
fn pci_address(text: &str) -> Option<String> {
    let text = text.split([' ', '.']).next()?;
    let mut parts = text.split(':');
    let mut part = |lengths: std::ops::RangeInclusive<usize>| {
        let part = parts.next()?;
        (lengths.contains(&part.len()) && part.bytes().all(|byte| byte.is_ascii_hexdigit())).then_some(part)
    };
    let (domain, bus, device) = (part(4..=8)?, part(2..=2)?, part(2..=2)?);
    if parts.next().is_some() {
        return None;
    }
    let domain = u32::from_str_radix(domain, 16).ok()?;
    Some(format!("{domain:04x}:{}:{}", bus.to_ascii_lowercase(), device.to_ascii_lowercase()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn finding(message: &str) -> Option<String> {
        let line = FaultLine::parse(message)?;
        Some(format!("{}/{} at {}", line.kind.device.probe(), line.kind.code, line.kind.pci_address))
    }

    /// As drivers 535 to 595 write them.
    const LINES: &[(&str, &str)] = &[
        (
            "NVRM: Xid (PCI:0018:01:00): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2 0x00000008 0x00000001 0x00000000 0x00100000 0x00000004)",
            "xid/145.nonfatal.rlw_rxpipe at 0018:01:00",
        ),
        (
            "NVRM: Xid (PCI:0009:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6 0x00000000 0x00000000 0x00000000 0x00000000 0x00000000)",
            "xid/149.fatal.netir_link_evt at 0009:01:00",
        ),
        (
            "NVRM: Xid (PCI:0019:01:00): 149, NETIR Fatal XC0 i0 Link -1 (0x000fe406 0x00000000 0x00000000 0x00000000 0x00000000 0x00000000)",
            "xid/149.fatal.netir at 0019:01:00",
        ),
        // Before driver 575.
        (
            "NVRM: Xid (PCI:0000:00:1e): 149, NETIR_LINK_EVT Fatal XC 1 i 2 Link 01 [0x0000000a]",
            "xid/149.fatal.netir_link_evt at 0000:00:1e",
        ),
        (
            "NVRM: Xid (PCI:0000:01:00): 144, SAW_MVB Nonfatal XC0 i0 Link 0 (0x00000001 0x00000008 0x00000000 0x00000000 0x00000000 0x00000000)",
            "xid/144.nonfatal.saw_mvb at 0000:01:00",
        ),
        (
            "NVRM: Xid (PCI:0000:01:00): 144, pid=7, name=python3, SAW_MVB Fatal XC0 i0 Link 0 (0x00000001)",
            "xid/144.fatal.saw_mvb at 0000:01:00",
        ),
        ("NVRM: Xid (PCI:0000:01:00): 145, an error of an NVLink", "xid/145 at 0000:01:00"),
        (
            "NVRM: Xid (PCI:0000:ed:00): 45, pid=1818992, name=python3, Ch 0000000c caused by previous Xid 145",
            "xid/45.caused_by at 0000:ed:00",
        ),
        ("NVRM: Xid (PCI:0000:01:00): 45, pid=12542, name=VLLM::Worker, channel 0x00000002", "xid/45 at 0000:01:00"),
        // What the driver asks for is read from the driver itself.
        (
            "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
            "xid/154 at 0000:01:00",
        ),
        (
            "NVRM: Xid (PCI:0000:91:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            "xid/79 at 0000:91:00",
        ),
        (
            "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Non-fatal, Link 46 MC TS crumbstore MCTO (First)",
            "sxid/nonfatal.28006 at 0000:c1:00",
        ),
        (
            "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 63 LTSSM Fault Up",
            "sxid/fatal.20034 at 0000:05:00",
        ),
        (
            "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20009, Nonfatal, Link 28 RX Short Error Rate",
            "sxid/nonfatal.20009 at 0000:05:00",
        ),
        ("nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 10003, Host_priv_error", "sxid/10003 at 0000:05:00"),
    ];

    #[test]
    fn code_says_what_the_text_says_and_unknown_wording_is_judged_by_the_number() {
        for (message, wanted) in LINES {
            assert_eq!(finding(message).as_deref(), Some(*wanted), "{message}");
        }
    }

    #[test]
    fn later_lines_of_a_switchs_fault_are_not_faults_of_their_own() {
        for rest in ["Severity 0 Engine instance 60 Sub-engine instance 00", "Data {0x00000001, 0x00000000}"] {
            assert_eq!(finding(&format!("nvidia-nvswitch3: SXid (PCI:0000:08:00.0): 22013, {rest}")), None, "{rest}");
        }
    }

    #[test]
    fn name_of_a_process_gives_a_line_no_severity() {
        for (text, wanted) in [
            ("31, pid=1, name=A Fatal XC0, Ch 00000010", "xid/31 at 0000:3b:00"),
            ("79, pid=1, name=x, A Nonfatal X, GPU has fallen off the bus.", "xid/79 at 0000:3b:00"),
            ("149, pid=1, name=x, A Nonfatal X, NETIR Fatal XC0 i0 Link 00 (0x0)", "xid/149.fatal.netir at 0000:3b:00"),
        ] {
            assert_eq!(finding(&format!("NVRM: Xid (PCI:0000:3b:00): {text}")).as_deref(), Some(wanted), "{text}");
        }
    }

    #[test]
    fn other_lines_of_switches_and_forged_ones_are_no_faults() {
        for message in [
            "nvidia-nvswitch3: open (major=238)",
            "nvidia-nvswitch: Probing device 0000:c1:00.0",
            "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034",
            "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): , Fatal",
            "x nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 63",
            "nvidia-nvswitchx: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 63",
            "nvidia-nvswit[12]: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 63",
        ] {
            assert_eq!(finding(message), None, "{message}");
        }
    }

    proptest! {
        #[test]
        fn code_of_any_text_is_bounded_and_begins_with_the_number(number in any::<u32>(), text in ".{0,120}", fatal in any::<bool>()) {
            let text = if fatal { format!("{} Fatal XC0", text.to_uppercase()) } else { text };
            for (prefix, is_gpu) in [("NVRM: Xid (PCI:0000:3b:00)", true), ("nvidia-nvswitch0: SXid (PCI:0000:3b:00.0)", false)] {
                let Some(line) = FaultLine::parse(&format!("{prefix}: {number}, {text}")) else { continue };
                let code = &line.kind.code;
                prop_assert!(code.len() <= MAX_FINDING_NAME && line.text.chars().count() <= MAX_FINDING_DETAIL);
                prop_assert!(code.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"._".contains(&byte)), "{code}");
                let segment = if is_gpu { code.split('.').next() } else { code.split('.').next_back() };
                prop_assert_eq!(segment.map(str::to_owned), Some(number.to_string()));
            }
        }
    }
}
