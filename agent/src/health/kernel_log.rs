//! The kernel's log: lines of NVIDIA's driver about faults, from the beginning of the boot.
//!
//! `/dev/kmsg` gives one record for each read: `priority,sequence,microseconds,flags;message`. The priority contains the facility, and
//! the kernel gives a line of user space another facility than its own, so that a forged line is recognised.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::libc;
use tokio_util::sync::CancellationToken;

use super::fault_line::{FaultKind, FaultLine};

/// The kernel's log on every machine.
pub const DEVICE: &str = "/dev/kmsg";
/// The pause between two readings. The log holds some thousand lines, so that none is lost at 10,000 a second.
const PAUSE: Duration = Duration::from_millis(200);
/// The most records of one reading, so that a flood leaves the processor to others.
const MAX_RECORDS: usize = 20_000;
/// A record is never longer.
const MAX_RECORD: usize = 8192;
/// The most kinds of fault, by device and code, between two calls of [`KernelLog::take`].
const MAX_KINDS: usize = 256;

/// The lines of one kind of fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Occurrences {
    pub count: u64,
    /// Microseconds since the boot.
    pub first_micros: u64,
    pub last_micros: u64,
    /// The text of the last line.
    pub text: String,
}

/// What was read since the last call of [`KernelLog::take`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KernelLogReading {
    pub faults: BTreeMap<FaultKind, Occurrences>,
    /// Records that were overwritten before they were read.
    pub lost_records: u64,
    /// The sequence number of the last record that was read.
    pub position: Option<u64>,
    /// Why the log cannot be read.
    pub unreadable: Option<String>,
}

/// The kernel's log, read by a thread.
#[derive(Clone)]
pub struct KernelLog(Arc<Mutex<KernelLogReading>>);

impl KernelLog {
    /// Starts the thread. Records up to `position` were read by an earlier process. `on_new_kind` is called when a fault occurs that
    /// has not occurred since the last call of [`KernelLog::take`].
    #[must_use]
    pub fn follow(
        path: &Path,
        position: Option<u64>,
        stop: CancellationToken,
        on_new_kind: impl Fn() + Send + 'static,
    ) -> Self {
        let shared = Self(Arc::new(Mutex::new(KernelLogReading { position, ..KernelLogReading::default() })));
        // Opened for one reader: each open file has its own position, which begins at the oldest record.
        let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
        match opened {
            Ok(file) => {
                let followed = shared.clone();
                let started = std::thread::Builder::new().name("kernel-log".to_owned());
                let started = started.spawn(move || followed.run(file, &stop, on_new_kind));
                shared.set_unreadable(started.err().as_ref());
            }
            Err(error) => shared.set_unreadable(Some(&error)),
        }
        shared
    }

    /// No log: nothing that it could say is of interest on this machine.
    #[must_use]
    pub fn off() -> Self {
        Self(Arc::default())
    }

    /// What was read since the last call.
    #[must_use]
    pub fn take(&self) -> KernelLogReading {
        let mut reading = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let next = KernelLogReading {
            position: reading.position,
            unreadable: reading.unreadable.clone(),
            ..KernelLogReading::default()
        };
        std::mem::replace(&mut reading, next)
    }

    /// True where the log cannot be read: the driver's own events replace it.
    #[must_use]
    pub fn is_unreadable(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).unreadable.is_some()
    }

    fn set_unreadable(&self, error: Option<&io::Error>) {
        let why = error.map(ToString::to_string);
        self.0.lock().unwrap_or_else(PoisonError::into_inner).unreadable = why;
    }

    fn run(&self, mut file: File, stop: &CancellationToken, on_new_kind: impl Fn()) {
        while !stop.is_cancelled() {
            match read_available(&mut file, &self.0) {
                Ok(is_new_kind) => {
                    if is_new_kind {
                        on_new_kind();
                    }
                }
                Err(error) => return self.set_unreadable(Some(&error)),
            }
            std::thread::sleep(PAUSE);
        }
    }
}

/// Reads the records that are there. Returns whether a fault of a new kind was among them.
fn read_available(log: &mut impl Read, reading: &Mutex<KernelLogReading>) -> io::Result<bool> {
    let mut buffer = [0; MAX_RECORD];
    let mut is_new_kind = false;
    for _ in 0..MAX_RECORDS {
        match log.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => {
                let mut reading = reading.lock().unwrap_or_else(PoisonError::into_inner);
                is_new_kind |= reading.note(&buffer[..length]);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            // EPIPE: the record was overwritten, and the next read continues at the oldest one. EINVAL: it is longer than any that the
            // kernel documents.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EPIPE | libc::EINVAL | libc::EINTR)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(is_new_kind)
}

impl KernelLogReading {
    /// Notes a record. Returns whether it is a fault of a new kind.
    fn note(&mut self, record: &[u8]) -> bool {
        let Some(record) = Record::parse(record) else { return false };
        match self.position {
            Some(position) if record.sequence <= position => return false,
            Some(position) => self.lost_records += record.sequence - position - 1,
            None => {}
        }
        self.position = Some(record.sequence);
        let Some(line) = record.is_of_kernel().then(|| FaultLine::parse(record.message)).flatten() else {
            return false;
        };
        if let Some(known) = self.faults.get_mut(&line.kind) {
            known.count += 1;
            known.last_micros = record.micros;
            known.text = line.text;
            return false;
        }
        if self.faults.len() >= MAX_KINDS {
            return false;
        }
        let (first_micros, last_micros) = (record.micros, record.micros);
        self.faults.insert(line.kind, Occurrences { count: 1, first_micros, last_micros, text: line.text });
        true
    }
}

struct Record<'a> {
    priority: u64,
    sequence: u64,
    micros: u64,
    message: &'a str,
}

impl<'a> Record<'a> {
    fn parse(record: &'a [u8]) -> Option<Self> {
        let separator = record.iter().position(|byte| *byte == b';')?;
        let prefix = std::str::from_utf8(&record[..separator]).ok()?;
        let mut fields = prefix.split(',');
        let mut number = || fields.next()?.parse().ok();
        let (priority, sequence, micros) = (number()?, number()?, number()?);
        let message = record[separator + 1..].split(|byte| *byte == b'\n').next()?;
        Some(Self { priority, sequence, micros, message: std::str::from_utf8(message).unwrap_or_default() })
    }

    /// The facility is above the three bits of the level. Zero is the kernel's.
    const fn is_of_kernel(&self) -> bool {
        self.priority >> 3 == 0
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::time::Instant;

    use wire::finding::MAX_FINDING_DETAIL;

    use super::super::fault_line::FaultyDevice;
    use super::*;

    /// A log that gives one record for each read, or an error.
    struct Records(VecDeque<Result<String, i32>>);

    impl Read for Records {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            match self.0.pop_front() {
                None => Err(ErrorKind::WouldBlock.into()),
                Some(Err(errno)) => Err(io::Error::from_raw_os_error(errno)),
                Some(Ok(record)) => {
                    buffer[..record.len()].copy_from_slice(record.as_bytes());
                    Ok(record.len())
                }
            }
        }
    }

    const XID_79: &str = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.";

    fn kernel(sequence: u64, message: &str) -> Result<String, i32> {
        Ok(format!("4,{sequence},{},-,caller=T1;{message}\n SUBSYSTEM=pci\n", sequence * 1000))
    }

    fn read(records: impl IntoIterator<Item = Result<String, i32>>) -> KernelLogReading {
        let reading = Mutex::default();
        read_available(&mut Records(records.into_iter().collect()), &reading).unwrap();
        reading.into_inner().unwrap()
    }

    fn numbers(reading: &KernelLogReading) -> Vec<(&str, u32, u64)> {
        let number = |kind: &FaultKind| kind.code.parse().unwrap();
        reading.faults.iter().map(|(kind, seen)| (kind.pci_address.as_str(), number(kind), seen.count)).collect()
    }

    fn xid(address: &str, xid: u32) -> FaultKind {
        FaultKind { device: FaultyDevice::Gpu, pci_address: address.to_owned(), code: xid.to_string() }
    }

    /// What driver 580 writes when a program has written where it has no memory.
    #[test]
    fn record_of_a_real_fault_is_parsed() {
        let record = b"4,360,105238075,c;NVRM: Xid (PCI:0000:00:06): 31, pid=760, name=python3, channel 0x0000000a, \
            intr 00000000. MMU Fault: ENGINE GRAPHICS GPC1 GPCCLIENT_T1_8 faulted @ 0x834d_57e00000. Fault is of type \
            FAULT_PDE ACCESS_TYPE_VIRT_WRITE\n";
        let mut reading = KernelLogReading::default();
        let others = [
            "4,358,105238066,c;NVRM: GPU at PCI:0000:00:06: GPU-00000000-0000-4000-8000-000000000000\n",
            "4,359,105238074,c;NVRM: GPU Board Serial Number: 0\n",
        ];
        assert_eq!(others.map(|other| reading.note(other.as_bytes())), [false, false]);
        assert!(reading.note(record));
        assert_eq!(numbers(&reading), [("0000:00:06", 31, 1)]);
        let seen = &reading.faults[&xid("0000:00:06", 31)];
        assert!(seen.text.starts_with("pid=760, name=python3, channel 0x0000000a"), "{seen:?}");
        assert_eq!(seen.first_micros, 105_238_075);
    }

    #[test]
    fn xids_are_counted_by_gpu_and_number() {
        let found = read([
            kernel(1, "Linux version 6.1"),
            kernel(5, XID_79),
            kernel(6, "NVRM: Xid (PCI:0000:5E:00): 31, pid=1, name=python, Ch 00000010"),
            kernel(7, "NVRM: Xid (PCI:0000:5e:00): 31, pid=2, name=python, Ch 00000011"),
            kernel(8, "NVRM: Xid (PCI:00000000:5E:00.0 GPU-I:01): 13, Graphics Exception"),
            kernel(9, "NVRM: Xid (0000:01:00): 45, Ch 00000000"),
        ]);
        let wanted = [("0000:01:00", 45, 1), ("0000:3b:00", 79, 1), ("0000:5e:00", 13, 1), ("0000:5e:00", 31, 2)];
        assert_eq!(numbers(&found), wanted);
        let seen = &found.faults[&xid("0000:5e:00", 31)];
        assert_eq!(
            (seen.first_micros, seen.last_micros, seen.text.as_str()),
            (6000, 7000, "pid=2, name=python, Ch 00000011")
        );
        assert_eq!(found.position, Some(9));
    }

    #[test]
    fn faults_of_one_number_are_counted_by_what_their_text_says() {
        let found = read([
            kernel(1, "NVRM: Xid (PCI:0018:01:00): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2)"),
            kernel(2, "NVRM: Xid (PCI:0018:01:00): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 14 (0x0409a0c2)"),
            kernel(3, "NVRM: Xid (PCI:0018:01:00): 145, RLW_RXPIPE Fatal XC0 i0 Link 13 (0x0409a0c2)"),
            kernel(4, "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up"),
            kernel(
                5,
                "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Severity 1 Engine instance 30 Sub-engine instance 00",
            ),
            Ok("12,6,6000,-;nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, written by a tenant\n".to_owned()),
        ]);
        let counts: Vec<_> = found.faults.iter().map(|(kind, seen)| (kind.code.as_str(), seen.count)).collect();
        assert_eq!(counts, [("145.fatal.rlw_rxpipe", 1), ("145.nonfatal.rlw_rxpipe", 2), ("fatal.20034", 1)]);
        assert!(found.faults.values().all(|seen| seen.text.contains("Link")), "{found:?}");
    }

    #[test]
    fn forged_lines_count_for_nothing() {
        // Written to /dev/kmsg by a program: the kernel gives it the facility of user space (1, and any other that it asks for).
        let forged = [
            Ok(format!("12,1,1000,-;{XID_79}\n")),
            Ok(format!("28,2,1000,-;{XID_79}\n")),
            // Lines of the kernel that begin with a process's name, or have it within.
            kernel(3, "NVRM: Xid (PCI:[1234]: segfault at 0 ip 00007f sp 00007f error 4 in x[1000+1000]"),
            kernel(4, &format!("audit: comm=\"{XID_79}\"")),
            kernel(5, "traps: NVRM: Xid (PCI[77] trap int3"),
            // A line break in a name is escaped by the kernel; the second line of a record is no message.
            Ok(format!("4,6,6000,-;x\\x0a{XID_79}\n {XID_79}\n")),
            kernel(7, "NVRM: Xid (PCI:0000:3b:00): 79"),
            kernel(8, "NVRM: Xid (PCI:0000:3b:00): , x"),
            kernel(9, "NVRM: Xid (PCI:0000:3b:00): 99999999999999999999, x"),
            kernel(10, "NVRM: Xid (PCI:0000:3b:zz): 79, x"),
            kernel(11, "NVRM: Xid (PCI:0000:3b:00:01): 79, x"),
            Ok("garbage".to_owned()),
            Ok("4,x,1,-;NVRM".to_owned()),
        ];
        assert_eq!(numbers(&read(forged)), []);
        assert_eq!(numbers(&read([kernel(1, XID_79)])).len(), 1, "the same line of the kernel itself");
    }

    #[test]
    fn overwritten_records_are_counted_and_reading_continues() {
        let found =
            read([kernel(1, "x"), Err(libc::EPIPE), kernel(1001, XID_79), Err(libc::EPIPE), kernel(1502, XID_79)]);
        assert_eq!((found.lost_records, numbers(&found)), (999 + 500, vec![("0000:3b:00", 79, 2)]));
    }

    #[test]
    fn records_that_an_earlier_process_has_read_are_skipped() {
        let reading = Mutex::new(KernelLogReading { position: Some(5), ..KernelLogReading::default() });
        let records = [kernel(4, XID_79), kernel(5, XID_79), kernel(6, XID_79)];
        read_available(&mut Records(records.into()), &reading).unwrap();
        let reading = reading.into_inner().unwrap();
        assert_eq!((numbers(&reading), reading.lost_records), (vec![("0000:3b:00", 79, 1)], 0));
    }

    #[test]
    fn kinds_are_bounded_and_text_is_short() {
        let kinds =
            (0..2000_u64).map(|n| kernel(n + 1, &format!("NVRM: Xid (PCI:0000:3b:00): {n}, {}", "x".repeat(4000))));
        let found = read(kinds);
        assert_eq!(found.faults.len(), MAX_KINDS);
        assert!(found.faults.values().all(|seen| seen.text.len() == MAX_FINDING_DETAIL));
    }

    #[test]
    fn ten_thousand_lines_of_others_are_read_to_the_end_and_leave_nothing() {
        let lines =
            (0..10_000_u64).map(|n| kernel(n + 1, "usb 1-1: new high-speed USB device number 2 using xhci_hcd"));
        let mut records = Records(lines.collect());
        let reading = Mutex::default();
        read_available(&mut records, &reading).unwrap();
        let reading = reading.into_inner().unwrap();
        assert_eq!((reading.position, reading.lost_records), (Some(10_000), 0));
        assert!(reading.faults.is_empty());
    }

    #[test]
    fn every_xid_among_ten_thousand_lines_is_counted_though_more_kinds_come_than_are_stored() {
        const LINES: usize = 10_000;
        let gpus: Vec<String> = (0..8).map(|gpu| format!("0000:{gpu}b:00")).collect();
        let mut wanted: BTreeMap<(String, u32), u64> = BTreeMap::new();
        let mut lines = Vec::new();
        for n in 0..LINES {
            let message = match n % 4 {
                1 => {
                    let (gpu, xid) = (&gpus[n / 4 % gpus.len()], [13, 31, 43, 45, 79, 94][n / 32 % 6]);
                    *wanted.entry((gpu.clone(), xid)).or_default() += 1;
                    format!("NVRM: Xid (PCI:{gpu}): {xid}, pid={n}, name=python, Ch 00000010")
                }
                // A kind of its own each.
                3 if n > LINES / 2 => format!("NVRM: Xid (PCI:0000:af:00): {n}, x"),
                _ => "usb 1-1: new high-speed USB device number 2 using xhci_hcd".to_owned(),
            };
            lines.push(kernel(n as u64 + 1, &message));
        }
        let found = read(lines);
        let counted = |key: &(String, u32)| found.faults.get(&xid(&key.0, key.1)).map(|seen| seen.count);
        for (key, count) in &wanted {
            assert_eq!(counted(key), Some(*count), "{key:?}");
        }
        assert_eq!((found.position, found.lost_records), (Some(LINES as u64), 0));
        assert_eq!((wanted.len(), found.faults.len()), (48, MAX_KINDS));
    }

    #[test]
    fn log_of_this_machine_is_read_or_the_reason_is_known() {
        let log = KernelLog::follow(Path::new("/nonexistent/kmsg"), None, CancellationToken::new(), || {});
        assert!(log.is_unreadable() && log.take().unreadable.unwrap().contains("No such file"));
        let stop = CancellationToken::new();
        let log = KernelLog::follow(Path::new(DEVICE), None, stop.clone(), || {});
        let begun = Instant::now();
        while log.0.lock().unwrap().position.is_none() && !log.is_unreadable() && begun.elapsed().as_secs() < 60 {
            std::thread::sleep(Duration::from_millis(5));
        }
        let reading = log.take();
        assert!(reading.position.is_some() || reading.unreadable.is_some(), "{reading:?}");
        stop.cancel();
    }
}
