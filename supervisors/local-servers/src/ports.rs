//! Ports of 127.0.0.1 for servers that bind them later, or again after a restart.
//!
//! A port that is looked for and bound later may be taken in between. So each is claimed until the process ends: the claim is a Unix socket
//! with a name in the abstract namespace ([unix(7)](https://man7.org/linux/man-pages/man7/unix.7.html)), which exists once in a network
//! namespace, as the port does, for processes of all users and folders. The kernel ends the claim with the process that holds it.

use std::collections::BTreeMap;
use std::io::{Error, ErrorKind};
use std::ops::RangeInclusive;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::{Mutex, PoisonError};

use rand::RngExt as _;

/// Below are the ports of well-known services.
const FIRST_PORT: u16 = 10_000;

/// Fewer ports than these are not enough for the servers of a test run.
const MIN_PORTS: u16 = 2_000;

/// What this process has claimed.
static CLAIMS: Mutex<BTreeMap<u16, UnixDatagram>> = Mutex::new(BTreeMap::new());

/// A TCP port of 127.0.0.1 on which no program listens. This function has given it to no living process, this one included, and the kernel
/// gives it to no outgoing connection: so no server of a test or of `gpuaas dev` takes it before its own one binds it.
///
/// # Errors
/// If no port is left, or the claim of a port fails for another reason than that another process has it.
pub fn free_port() -> std::io::Result<u16> {
    free_port_within(server_ports())
}

/// Claims a port until this process ends, so that [`free_port`] gives it to no other process. False where another one has claimed it.
///
/// # Errors
/// If the kernel refuses the socket for another reason.
pub fn claim_port(port: u16) -> std::io::Result<bool> {
    Ok(is_claimed_here(port) || claim(port)?.map(|claim| hold(port, claim)).is_some())
}

fn free_port_within(ports: RangeInclusive<u16>) -> std::io::Result<u16> {
    let first = rand::rng().random_range(ports.clone());
    for port in (first..=*ports.end()).chain(*ports.start()..first) {
        // Claimed first: a bind of a port that another process has would keep that process from binding it in this moment.
        if let Some(claim) = claim(port)?
            && std::net::TcpListener::bind(("127.0.0.1", port)).is_ok()
        {
            hold(port, claim);
            return Ok(port);
        }
    }
    let (first, last) = ports.into_inner();
    Err(Error::new(ErrorKind::AddrInUse, format!("no port of 127.0.0.1 from {first} to {last} is free")))
}

/// `None` where any process, this one included, has claimed the port.
fn claim(port: u16) -> std::io::Result<Option<UnixDatagram>> {
    match UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(format!("gpuaas-port-{port}"))?) {
        Ok(socket) => Ok(Some(socket)),
        Err(error) if error.kind() == ErrorKind::AddrInUse => Ok(None),
        Err(error) => Err(Error::new(error.kind(), format!("cannot claim port {port}: {error}"))),
    }
}

fn is_claimed_here(port: u16) -> bool {
    CLAIMS.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&port)
}

fn hold(port: u16, claim: UnixDatagram) {
    CLAIMS.lock().unwrap_or_else(PoisonError::into_inner).insert(port, claim);
}

/// The ports outside of the range from which the kernel takes those of outgoing connections; all of them where that range leaves too few.
fn server_ports() -> RangeInclusive<u16> {
    let outgoing = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    outside_of(&outgoing)
}

fn outside_of(outgoing: &str) -> RangeInclusive<u16> {
    let mut bounds = outgoing.split_whitespace().filter_map(|bound| bound.parse::<u16>().ok());
    let (first, last) = (bounds.next().unwrap_or(32_768), bounds.next().unwrap_or(60_999));
    if first >= FIRST_PORT + MIN_PORTS {
        FIRST_PORT..=first - 1
    } else if last < u16::MAX - MIN_PORTS {
        last.max(FIRST_PORT) + 1..=u16::MAX
    } else {
        FIRST_PORT..=u16::MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::net::TcpListener;
    use std::process::{Command, Stdio};

    /// The first port of the range from which the test below takes ports where it runs as another process.
    const RANGE: &str = "FREE_PORTS_FROM";
    const THIS_TEST: &str =
        "ports::tests::one_port_is_given_once_within_a_process_and_among_processes_and_one_in_use_is_not_given";
    const RANGE_LENGTH: u16 = 64;
    const EACH: usize = 12;

    fn take_from(first: u16) -> Vec<u16> {
        (0..EACH).map(|_| free_port_within(first..=first + (RANGE_LENGTH - 1)).unwrap()).collect()
    }

    #[test]
    fn one_port_is_given_once_within_a_process_and_among_processes_and_one_in_use_is_not_given() {
        if let Ok(first) = std::env::var(RANGE) {
            writeln!(std::io::stdout(), "ports: {:?}", take_from(first.parse().unwrap())).unwrap();
            // They are this process's until the test has read them all.
            let _ = std::io::stdin().read_line(&mut String::new());
            return;
        }
        // Programs that have no claim: on all addresses, and on this one.
        let stranger = |address: &str, port: u16| {
            let _until_it_is_bound = claim(port).unwrap()?;
            TcpListener::bind((address, port)).ok()
        };
        let (first, strangers) = loop {
            let first = rand::rng().random_range(FIRST_PORT..30_000);
            if let (Some(all), Some(one)) = (stranger("0.0.0.0", first + 7), stranger("127.0.0.1", first + 40)) {
                break (first, [all, one]);
            }
        };
        let mut others: Vec<_> = (0..3)
            .map(|_| {
                let mut command = Command::new(std::env::current_exe().unwrap());
                command.args(["--exact", "--nocapture", THIS_TEST]);
                command.env(RANGE, first.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
            })
            .collect();
        let mut taken = take_from(first);
        let mut outputs = Vec::new();
        for other in &mut others {
            let mut lines = BufReader::new(other.stdout.take().unwrap()).lines().map(Result::unwrap);
            let ports = lines.find_map(|line| Some(line.split_once("ports: ")?.1.to_owned())).unwrap();
            taken.extend(ports.trim_matches(['[', ']']).split(", ").map(|port| port.parse::<u16>().unwrap()));
            // It is read to its end below: a process that cannot write the result of its test fails.
            outputs.push(lines);
        }
        assert_eq!(taken.len(), 4 * EACH);
        assert_eq!(taken.iter().collect::<BTreeSet<_>>().len(), taken.len(), "one port is given twice: {taken:?}");
        for stranger in strangers {
            let port = stranger.local_addr().unwrap().port();
            assert!(!taken.contains(&port), "{port} is in use");
            assert!(claim_port(port).unwrap(), "the claim that came before the attempt to bind {port} has not ended");
        }
        assert!(claim_port(taken[0]).unwrap() && !claim_port(taken[EACH]).unwrap());
        for (mut other, output) in others.into_iter().zip(outputs) {
            drop(other.stdin.take());
            let rest: Vec<String> = output.collect();
            assert!(other.wait().unwrap().success(), "{rest:?}");
        }
        assert!(claim_port(taken[EACH]).unwrap(), "the claim of a process has outlived it");
    }

    #[test]
    fn ports_for_servers_are_outside_of_those_for_outgoing_connections() {
        for (outgoing, ports) in [
            ("32768\t60999\n", 10_000..=32_767),
            ("", 10_000..=32_767),
            ("12000 65535", 10_000..=11_999),
            ("1024 20000", 20_001..=u16::MAX),
            ("1024 5000", 10_001..=u16::MAX),
            ("1024 65535", 10_000..=u16::MAX),
            ("11999 63535", 10_000..=u16::MAX),
        ] {
            assert_eq!(outside_of(outgoing), ports, "{outgoing:?}");
        }
    }
}
