//! CPU time, which does not depend on waiting.

use anyhow::Context;
use std::time::Duration;

/// A tick of `/proc/PID/stat` (USER_HZ, which Linux fixes at 100 for all programs).
const TICK: Duration = Duration::from_millis(10);

/// The CPU time that these processes have used so far.
///
/// # Errors
/// If one of them has ended.
pub fn spent(pids: &[u32]) -> anyhow::Result<Duration> {
    let mut ticks = 0;
    for pid in pids {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
        // After the program's name, which may contain anything: state, and then utime and stime are the 12th and 13th.
        let (_, fields) = stat.rsplit_once(')').context("no stat")?;
        let fields: Vec<&str> = fields.split_whitespace().collect();
        for at in [11, 12] {
            ticks += fields.get(at).and_then(|ticks| ticks.parse::<u32>().ok()).context("no times")?;
        }
    }
    Ok(TICK * ticks)
}
