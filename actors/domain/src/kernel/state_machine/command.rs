//! The commands of a machine, by who sends them and what they are: requests, instructions, facts, and the service's own maintenance.

use crate::authz::Action;
use serde::de::value::MapAccessDeserializer;
use serde::de::{DeserializeOwned, DeserializeSeed, Error, IntoDeserializer, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use std::fmt;
use std::marker::PhantomData;

/// The encoding between members that every release knows.
pub const FIRST_ENCODING: u16 = 1;
/// The encoding in which a revision of a SKU may name the version that it is based on.
pub const VERSIONED_SKU_REVISIONS: u16 = 2;

/// The field of a command's JSON that names it.
const TAG: &str = "command";

/// A command has a name (for the history) and the action that its sender must be allowed to do.
pub trait Command: Clone + fmt::Debug + Serialize + DeserializeOwned + Send + 'static {
    const TICK: Self;

    fn name(&self) -> &'static str;
    fn action(&self) -> Action;

    /// True of a command that creates the entity: under a new id there is nothing to load first.
    fn creates(&self) -> bool {
        false
    }

    /// The encoding between members that first has all of what the command says. A member of a release that does not know the encoding
    /// refuses the command. A command that has a field which an earlier release would ignore, and must not (a precondition), needs the
    /// encoding that introduced the field.
    fn encoding(&self) -> u16 {
        FIRST_ENCODING
    }
}

/// A command of a machine that has more than requests and the tick. In JSON its sort does not show.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum AnyCommand<R, I = NoCommand, F = NoCommand, M = TickOnly> {
    /// What a caller, an administrator or an agent requests.
    Request(R),
    /// What another part of the service has the entity do: a step of a flow over several entities.
    Instruction(I),
    /// What another part of the service reports: it has happened there.
    Fact(F),
    /// What the service does to the entity by itself.
    Maintenance(M),
}

/// Commands of one sort: an enum whose variants have their names in JSON under `command`.
pub trait CommandSort: Clone + fmt::Debug + Serialize + DeserializeOwned + Send + 'static {
    /// The names of all its commands in JSON.
    const TAGS: &'static [&'static str];

    /// The command's name in JSON.
    fn tag(&self) -> &'static str;
}

/// The requests to a machine: each has the action that its sender must be allowed to do.
pub trait Request: CommandSort {
    fn action(&self) -> Action;

    /// As [`Command::name`].
    fn name(&self) -> &'static str {
        self.tag()
    }

    /// As [`Command::creates`].
    fn creates(&self) -> bool {
        false
    }
}

/// The maintenance of a machine, the tick included.
pub trait Maintenance: CommandSort {
    const TICK: Self;
}

/// The maintenance of a machine that has no other than its tick.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::VariantNames)]
#[serde(tag = "command", rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum TickOnly {
    Tick,
}

/// No command: the instructions of a machine that has none, or the facts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command")]
pub enum NoCommand {}

impl strum::VariantNames for NoCommand {
    const VARIANTS: &'static [&'static str] = &[];
}

impl From<&NoCommand> for &'static str {
    fn from(none: &NoCommand) -> Self {
        match *none {}
    }
}

/// `From` of the sorts of a module's commands for its `Command`, so that a command of one sort can be given where a command is expected.
macro_rules! impl_command_from {
    ($($sort:ident),+) => {$(
        impl From<$sort> for Command {
            fn from(command: $sort) -> Self {
                Self::$sort(command)
            }
        }
    )+};
}
pub(crate) use impl_command_from;

impl<T> CommandSort for T
where
    T: Clone + fmt::Debug + Serialize + DeserializeOwned + Send + strum::VariantNames + 'static,
    for<'a> &'a T: Into<&'static str>,
{
    const TAGS: &'static [&'static str] = T::VARIANTS;

    fn tag(&self) -> &'static str {
        self.into()
    }
}

impl Maintenance for TickOnly {
    const TICK: Self = Self::Tick;
}

impl<R: Request, I: CommandSort, F: CommandSort, M: Maintenance> Command for AnyCommand<R, I, F, M> {
    const TICK: Self = Self::Maintenance(M::TICK);

    fn name(&self) -> &'static str {
        match self {
            Self::Request(request) => request.name(),
            Self::Instruction(instruction) => instruction.tag(),
            Self::Fact(fact) => fact.tag(),
            Self::Maintenance(maintenance) => maintenance.tag(),
        }
    }

    fn action(&self) -> Action {
        match self {
            Self::Request(request) => request.action(),
            Self::Instruction(_) | Self::Fact(_) | Self::Maintenance(_) => Action::Advance,
        }
    }

    fn creates(&self) -> bool {
        match self {
            Self::Request(request) => request.creates(),
            Self::Instruction(_) | Self::Fact(_) | Self::Maintenance(_) => false,
        }
    }
}

/// By the command's name. Trying one sort after the other costs more, and its errors name no field.
impl<'de, R: CommandSort, I: CommandSort, F: CommandSort, M: CommandSort> Deserialize<'de> for AnyCommand<R, I, F, M> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(CommandVisitor(PhantomData))
    }
}

struct CommandVisitor<R, I, F, M>(PhantomData<(R, I, F, M)>);

impl<'de, R: CommandSort, I: CommandSort, F: CommandSort, M: CommandSort> Visitor<'de> for CommandVisitor<R, I, F, M> {
    type Value = AnyCommand<R, I, F, M>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "a command, named by its field `{TAG}`")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        let fields = Fields::read_to_tag(map)?;
        let tag = fields.tag()?;
        let is_request = R::TAGS.contains(&tag);
        let (is_instruction, is_fact) = (I::TAGS.contains(&tag), F::TAGS.contains(&tag));
        if !is_request && !is_instruction && !is_fact && !M::TAGS.contains(&tag) {
            return Err(A::Error::custom(format_args!("no command is named `{tag}`")));
        }
        let fields = MapAccessDeserializer::new(fields);
        if is_request {
            R::deserialize(fields).map(AnyCommand::Request)
        } else if is_instruction {
            I::deserialize(fields).map(AnyCommand::Instruction)
        } else if is_fact {
            F::deserialize(fields).map(AnyCommand::Fact)
        } else {
            M::deserialize(fields).map(AnyCommand::Maintenance)
        }
    }
}

/// A command's fields: those up to its name, which were read already, and the rest.
struct Fields<A> {
    read: std::vec::IntoIter<(String, Value)>,
    value: Option<Value>,
    rest: A,
}

impl<'de, A: MapAccess<'de>> Fields<A> {
    fn read_to_tag(mut rest: A) -> Result<Self, A::Error> {
        let mut read: Vec<(String, Value)> = Vec::new();
        while read.last().is_none_or(|(name, _)| name != TAG) {
            read.push(rest.next_entry()?.ok_or_else(|| A::Error::missing_field(TAG))?);
        }
        Ok(Self { read: read.into_iter(), value: None, rest })
    }

    fn tag(&self) -> Result<&str, A::Error> {
        let tag = self.read.as_slice().last().and_then(|(_, value)| value.as_str());
        tag.ok_or_else(|| A::Error::custom(format_args!("`{TAG}` must be a string")))
    }
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Fields<A> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, A::Error> {
        let Some((name, value)) = self.read.next() else { return self.rest.next_key_seed(seed) };
        self.value = Some(value);
        seed.deserialize(name.into_deserializer()).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, A::Error> {
        match self.value.take() {
            Some(value) => seed.deserialize(value).map_err(A::Error::custom),
            None => self.rest.next_value_seed(seed),
        }
    }
}
