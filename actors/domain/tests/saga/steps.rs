//! The steps of the simulation. Choices are small numbers that wrap around the existing items, so that any list of steps is valid and a
//! shorter list is a simpler case.

use proptest::prelude::*;

/// One step of the simulation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SimulationStep {
    /// A message of the bus arrives: any of those on their way. `again`: it stays there, to arrive once more.
    Deliver {
        which: u8,
        again: bool,
    },
    /// Delivers all messages in flight, in order.
    DeliverAll,
    /// The provisioning worker crashes during a placement, and restarts it.
    WorkerDies {
        which: u8,
    },
    /// A message is held back, for however long.
    Strand {
        which: u8,
    },
    /// Releases a delayed message.
    Find {
        which: u8,
    },
    Pass {
        seconds: u16,
    },
    /// Advances the clock to the next timer.
    PassToTimer {
        slack: u8,
    },
    /// Sends an entity a tick before its time.
    TickAllocation {
        which: u8,
    },
    TickNode {
        which: u8,
    },

    Request {
        user: u8,
        gpus: u8,
        queue: u8,
        wish: u8,
    },
    ChangeKeys {
        user: u8,
        how: u8,
    },
    ChooseLogins {
        which: u8,
        how: u8,
    },
    Label {
        which: u8,
        how: u8,
    },
    Release {
        which: u8,
    },
    RetryRelease {
        which: u8,
    },
    ForceRelease {
        which: u8,
    },

    Invite {
        node: u8,
    },
    Enroll {
        node: u8,
        stale: bool,
    },
    Retire {
        node: u8,
        drain: bool,
    },
    Reactivate {
        node: u8,
    },
    Remove {
        node: u8,
    },
    Quarantine {
        node: u8,
    },
    ReleaseQuarantine {
        node: u8,
    },
    /// An administrator orders a validation with load.
    Validate {
        node: u8,
        deep: bool,
    },
    /// The SKU wants at least so much of a validation from now on; 0: nothing.
    WantAtLeast {
        minimum: u8,
    },

    Poll {
        node: u8,
    },
    Heartbeat {
        node: u8,
        mood: u8,
    },
    /// The agent executes one of its tasks.
    Work {
        node: u8,
        which: u8,
        luck: u8,
    },
    /// It reports one of its results; `again`: and keeps it for another report.
    Report {
        node: u8,
        which: u8,
        again: bool,
    },
    /// It polls, executes all tasks and reports them.
    Diligent {
        node: u8,
        luck: u8,
    },
}

impl Arbitrary for SimulationStep {
    type Parameters = ();
    type Strategy = BoxedStrategy<Self>;

    fn arbitrary_with((): ()) -> Self::Strategy {
        // The choices of the long run and of proptest share one constructor.
        any::<[u8; 5]>().prop_map(|dice| Self::thrown(&dice)).boxed()
    }
}

impl SimulationStep {
    /// The step that five random numbers select.
    pub(crate) fn thrown(&[kind, a, b, c, d]: &[u8; 5]) -> Self {
        one_of(
            kind,
            &[
                (23, &|| Self::Deliver { which: a, again: b < 64 }),
                (2, &|| Self::Label { which: a, how: b }),
                (15, &|| Self::DeliverAll),
                (8, &|| Self::Strand { which: a }),
                (6, &|| Self::Find { which: a }),
                (4, &|| Self::WorkerDies { which: a }),
                (10, &|| Self::Pass { seconds: u16::from(a) * (1 + u16::from(b % 4)) }),
                (14, &|| Self::PassToTimer { slack: a % 4 }),
                (6, &|| Self::TickAllocation { which: a }),
                (2, &|| Self::TickNode { which: a }),
                (20, &|| Self::Request { user: a, gpus: b, queue: c, wish: d }),
                (5, &|| Self::ChangeKeys { user: a, how: b }),
                (4, &|| Self::ChooseLogins { which: a, how: b }),
                (14, &|| Self::Release { which: a }),
                (5, &|| Self::RetryRelease { which: a }),
                (4, &|| Self::ForceRelease { which: a }),
                (5, &|| Self::Invite { node: a }),
                (6, &|| Self::Enroll { node: a, stale: b < 64 }),
                (3, &|| Self::Retire { node: a, drain: b < 128 }),
                (4, &|| Self::Reactivate { node: a }),
                (2, &|| Self::Remove { node: a }),
                (2, &|| Self::Quarantine { node: a }),
                (5, &|| Self::ReleaseQuarantine { node: a }),
                (2, &|| Self::Validate { node: a, deep: b < 64 }),
                (1, &|| Self::WantAtLeast { minimum: a % 4 }),
                (14, &|| Self::Poll { node: a }),
                (12, &|| Self::Heartbeat { node: a, mood: b }),
                (20, &|| Self::Work { node: a, which: b, luck: c }),
                (20, &|| Self::Report { node: a, which: b, again: c < 64 }),
                (18, &|| Self::Diligent { node: a, luck: b }),
            ],
        )
    }
}

/// Endless random steps from one seed (SplitMix64).
pub(crate) struct RandomSteps(u64);

impl RandomSteps {
    pub(crate) const fn from_seed(seed: u64) -> Self {
        Self(seed)
    }
}

impl Iterator for RandomSteps {
    type Item = SimulationStep;

    fn next(&mut self) -> Option<SimulationStep> {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^= mixed >> 31;
        let dice = mixed.to_be_bytes();
        Some(SimulationStep::thrown(&[dice[0], dice[1], dice[2], dice[3], dice[4]]))
    }
}

/// One of the weighted steps; the weights sum to 256.
fn one_of(kind: u8, weighted: &[(u16, &dyn Fn() -> SimulationStep)]) -> SimulationStep {
    let total: u16 = weighted.iter().map(|(weight, _)| weight).sum();
    assert_eq!(total, 256, "the weights of the moves");
    let mut left = u16::from(kind);
    for (weight, make) in weighted {
        if left < *weight {
            return make();
        }
        left -= weight;
    }
    unreachable!("the weights cover every throw")
}
