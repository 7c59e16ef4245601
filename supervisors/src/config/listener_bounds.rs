//! The bounds of the listeners, and how long browsers reach them by HTTPS alone.

use super::variables::Variables;
use edge::tls::serve::ListenerLimits;
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

pub(crate) const CONNECTIONS: &str = "SVC_LISTENER_CONNECTIONS";
const HSTS: &str = "SVC_HSTS_SECONDS";

/// Fewer bound a replica that serves anybody; more are no process's.
const CONNECTIONS_IN: RangeInclusive<usize> = 64..=1_000_000;
/// Two years, which browsers' lists of such hosts ask for at most.
const HSTS_IN: RangeInclusive<u32> = 0..=63_072_000;

/// The bounds of the listeners for users and for nodes.
pub(super) fn limits(variables: &mut Variables<'_>) -> ListenerLimits {
    let connections = number(variables, CONNECTIONS, CONNECTIONS_IN, "connections that a listener admits at once");
    connections.map_or_else(ListenerLimits::default, ListenerLimits::of_connections)
}

/// For how many seconds browsers reach the host of the public URL by HTTPS alone; `None` where the header is not sent. It is off unless it is set:
/// it holds for all ports of the host, and no later release takes it back.
pub(super) fn hsts_seconds(variables: &mut Variables<'_>) -> Option<u32> {
    number(variables, HSTS, HSTS_IN, "seconds, and with 0 browsers forget it")
}

fn number<T>(variables: &mut Variables<'_>, name: &str, within: RangeInclusive<T>, what: &str) -> Option<T>
where
    T: FromStr + PartialOrd + Display,
{
    let text = variables.optional(name)?;
    let read = text.trim().parse().ok().filter(|number| within.contains(number));
    if read.is_none() {
        let (least, most) = (within.start(), within.end());
        variables.wrong(format!("{name} is {text:?}; it must be a number from {least} to {most}: {what}"));
    }
    read
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::variables::read_from;

    #[test]
    fn connections_of_a_listener_are_bounded_and_its_other_bounds_follow() {
        let of = |text: &str| read_from(&[(CONNECTIONS, text)], limits);
        assert_eq!(read_from(&[], limits).unwrap().connections, 16_384);
        let few = of("1600").unwrap();
        assert_eq!(
            (few.connections, few.pending, few.pending_per_address, few.open_per_address),
            (1_600, 800, 100, 800)
        );
        let (least, most) = (of("64").unwrap(), of("1000000").unwrap());
        assert_eq!((least.pending_per_address, most.open_per_address), (4, 500_000));
        for wrong in ["0", "63", "1000001", "-1", "many", "1e4", "16,384"] {
            let error = of(wrong).unwrap_err().to_string();
            assert!(error.contains(CONNECTIONS) && error.contains("from 64 to 1000000"), "{wrong}: {error}");
        }
    }

    #[test]
    fn https_alone_is_asked_of_browsers_where_it_is_set() {
        let of = |text: &str| read_from(&[(HSTS, text)], hsts_seconds);
        assert_eq!(read_from(&[], hsts_seconds), Ok(None));
        assert_eq!(of("0"), Ok(Some(0)));
        assert_eq!(of("31536000"), Ok(Some(31_536_000)));
        for wrong in ["63072001", "-1", "a year", "true"] {
            let error = of(wrong).unwrap_err().to_string();
            assert!(error.contains(HSTS) && error.contains("from 0 to 63072000"), "{wrong}: {error}");
        }
    }
}
