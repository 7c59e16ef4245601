//! The JetStream streams that store events for their consumers.

/// A JetStream stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stream {
    Provisioning,
    Nodes,
    Policy,
    Terminals,
    Billing,
    Notifications,
}

impl Stream {
    pub const ALL: [Self; 6] =
        [Self::Provisioning, Self::Nodes, Self::Policy, Self::Terminals, Self::Billing, Self::Notifications];

    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Provisioning => "PROVISIONING",
            Self::Nodes => "NODES",
            Self::Policy => "POLICY",
            Self::Terminals => "TERMINALS",
            Self::Billing => "BILLING",
            Self::Notifications => "NOTIFICATIONS",
        }
    }

    /// The subjects that the stream stores.
    #[must_use]
    pub const fn subjects(self) -> &'static [&'static str] {
        match self {
            Self::Provisioning => &["provisioning.>"],
            Self::Nodes => &["node.>", "sku.>"],
            Self::Policy => &["policy.>"],
            Self::Terminals => &["terminal.>"],
            Self::Billing => &["billing.>"],
            Self::Notifications => &["notification.>"],
        }
    }
}
