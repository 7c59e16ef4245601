//! The deserializer, and what serde passes between it and the types: each wraps the one that it received.

use serde::Deserializer;
use serde::de::{DeserializeSeed, EnumAccess, Error, MapAccess, SeqAccess, VariantAccess, Visitor};
use std::fmt;

/// The text of the error where a list is in the place of an object.
pub const LIST_FOR_OBJECT: &str = "a list in place of an object";

/// A deserializer that reads structs from maps alone. Everything else is as the deserializer within it does it.
#[derive(Clone, Copy, Debug)]
pub struct StrictObjects<D> {
    inner: D,
    buffers: BufferedLists,
}

/// Whether a type that reads anything, as a JSON value or the buffer of a tagged type does, may get a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BufferedLists {
    Accepted,
    Refused,
}

impl<D> StrictObjects<D> {
    /// Reads from `inner`.
    pub const fn new(inner: D) -> Self {
        Self { inner, buffers: BufferedLists::Accepted }
    }

    /// Reads from `inner`, and refuses lists where a type reads anything.
    pub const fn without_buffered_lists(inner: D) -> Self {
        Self { inner, buffers: BufferedLists::Refused }
    }
}

/// A visitor, a seed or an access of serde's, whose further values are read strictly too.
struct Strict<T> {
    inner: T,
    buffers: BufferedLists,
}

/// A visitor.
struct StrictVisitor<V> {
    inner: V,
    refuses_list: bool,
    buffers: BufferedLists,
}

/// Deserializer methods that differ in nothing but their name.
macro_rules! forwarded {
    ($($method:ident)+) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
            self.inner.$method(StrictVisitor { inner: visitor, refuses_list: false, buffers: self.buffers })
        }
    )+};
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for StrictObjects<D> {
    type Error = D::Error;

    forwarded! {
        deserialize_bool deserialize_i8 deserialize_i16 deserialize_i32 deserialize_i64 deserialize_i128
        deserialize_u8 deserialize_u16 deserialize_u32 deserialize_u64 deserialize_u128 deserialize_f32 deserialize_f64
        deserialize_char deserialize_str deserialize_string deserialize_bytes deserialize_byte_buf deserialize_option
        deserialize_unit deserialize_seq deserialize_map deserialize_identifier deserialize_ignored_any
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        let refuses_list = self.buffers == BufferedLists::Refused;
        self.inner.deserialize_any(StrictVisitor { inner: visitor, refuses_list, buffers: self.buffers })
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        let visitor = StrictVisitor { inner: visitor, refuses_list: true, buffers: self.buffers };
        self.inner.deserialize_struct(name, fields, visitor)
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(self, name: &'static str, visitor: V) -> Result<V::Value, D::Error> {
        let visitor = StrictVisitor { inner: visitor, refuses_list: false, buffers: self.buffers };
        self.inner.deserialize_unit_struct(name, visitor)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, name: &'static str, visitor: V) -> Result<V::Value, D::Error> {
        let visitor = StrictVisitor { inner: visitor, refuses_list: false, buffers: self.buffers };
        self.inner.deserialize_newtype_struct(name, visitor)
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, length: usize, visitor: V) -> Result<V::Value, D::Error> {
        let visitor = StrictVisitor { inner: visitor, refuses_list: false, buffers: self.buffers };
        self.inner.deserialize_tuple(length, visitor)
    }

    // What is written as a list is read from one: the fields of such a struct have no names.
    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        length: usize,
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        let visitor = StrictVisitor { inner: visitor, refuses_list: false, buffers: self.buffers };
        self.inner.deserialize_tuple_struct(name, length, visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        let visitor = StrictVisitor { inner: visitor, refuses_list: false, buffers: self.buffers };
        self.inner.deserialize_enum(name, variants, visitor)
    }

    fn is_human_readable(&self) -> bool {
        self.inner.is_human_readable()
    }
}

/// Visitor methods that take a value without parts.
macro_rules! visited {
    ($($method:ident: $value:ty),+ $(,)?) => {$(
        fn $method<E: Error>(self, value: $value) -> Result<V::Value, E> {
            self.inner.$method(value)
        }
    )+};
}

impl<'de, V: Visitor<'de>> Visitor<'de> for StrictVisitor<V> {
    type Value = V::Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.expecting(formatter)
    }

    visited! {
        visit_bool: bool, visit_i8: i8, visit_i16: i16, visit_i32: i32, visit_i64: i64, visit_i128: i128,
        visit_u8: u8, visit_u16: u16, visit_u32: u32, visit_u64: u64, visit_u128: u128, visit_f32: f32, visit_f64: f64,
        visit_char: char, visit_str: &str, visit_borrowed_str: &'de str, visit_string: String,
        visit_bytes: &[u8], visit_borrowed_bytes: &'de [u8], visit_byte_buf: Vec<u8>,
    }

    fn visit_none<E: Error>(self) -> Result<V::Value, E> {
        self.inner.visit_none()
    }

    fn visit_unit<E: Error>(self) -> Result<V::Value, E> {
        self.inner.visit_unit()
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<V::Value, D::Error> {
        self.inner.visit_some(StrictObjects { inner: deserializer, buffers: self.buffers })
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, deserializer: D) -> Result<V::Value, D::Error> {
        self.inner.visit_newtype_struct(StrictObjects { inner: deserializer, buffers: self.buffers })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<V::Value, A::Error> {
        if self.refuses_list {
            return Err(A::Error::custom(LIST_FOR_OBJECT));
        }
        self.inner.visit_seq(Strict { inner: list, buffers: self.buffers })
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<V::Value, A::Error> {
        self.inner.visit_map(Strict { inner: map, buffers: self.buffers })
    }

    fn visit_enum<A: EnumAccess<'de>>(self, data: A) -> Result<V::Value, A::Error> {
        self.inner.visit_enum(Strict { inner: data, buffers: self.buffers })
    }
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for Strict<S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<S::Value, D::Error> {
        self.inner.deserialize(StrictObjects { inner: deserializer, buffers: self.buffers })
    }
}

impl<'de, A: SeqAccess<'de>> SeqAccess<'de> for Strict<A> {
    type Error = A::Error;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        self.inner.next_element_seed(Strict { inner: seed, buffers: self.buffers })
    }

    fn size_hint(&self) -> Option<usize> {
        self.inner.size_hint()
    }
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Strict<A> {
    type Error = A::Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        self.inner.next_key_seed(Strict { inner: seed, buffers: self.buffers })
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, A::Error> {
        self.inner.next_value_seed(Strict { inner: seed, buffers: self.buffers })
    }

    fn size_hint(&self) -> Option<usize> {
        self.inner.size_hint()
    }
}

impl<'de, A: EnumAccess<'de>> EnumAccess<'de> for Strict<A> {
    type Error = A::Error;
    type Variant = Strict<A::Variant>;

    fn variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<(S::Value, Self::Variant), A::Error> {
        let Self { inner, buffers } = self;
        let (variant, content) = inner.variant_seed(Strict { inner: seed, buffers })?;
        Ok((variant, Strict { inner: content, buffers }))
    }
}

impl<'de, A: VariantAccess<'de>> VariantAccess<'de> for Strict<A> {
    type Error = A::Error;

    fn unit_variant(self) -> Result<(), A::Error> {
        self.inner.unit_variant()
    }

    fn newtype_variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<S::Value, A::Error> {
        self.inner.newtype_variant_seed(Strict { inner: seed, buffers: self.buffers })
    }

    fn tuple_variant<V: Visitor<'de>>(self, length: usize, visitor: V) -> Result<V::Value, A::Error> {
        let visitor = StrictVisitor { inner: visitor, refuses_list: false, buffers: self.buffers };
        self.inner.tuple_variant(length, visitor)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, A::Error> {
        let visitor = StrictVisitor { inner: visitor, refuses_list: true, buffers: self.buffers };
        self.inner.struct_variant(fields, visitor)
    }
}
