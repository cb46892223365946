//! The rules of the result structure, a JSON text of nodes
//! (docs/plan-format.md). It is read as a stream: nothing is built, and
//! `serde_json` bounds how deep it nests.

use std::fmt;

use rkyv::string::ArchivedString;
use serde::de::{
    Deserialize, DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor,
};

use super::fault::Fault;

/// Checks that a result structure consists of known nodes and refers to
/// outputs that exist. The empty text stands for a plan without a result.
pub(super) fn check(result: &ArchivedString, outputs: usize) -> Result<(), Fault> {
    if result.is_empty() {
        return Ok(());
    }
    let mut json = serde_json::Deserializer::from_str(result);
    let read = Node { outputs }
        .deserialize(&mut json)
        .and_then(|()| json.end());
    read.map_err(|e| Fault::Result {
        detail: e.to_string(),
    })
}

/// `{"t":0}` and the other forms of a node.
#[derive(Clone, Copy)]
struct Node {
    outputs: usize,
}

impl<'de> DeserializeSeed<'de> for Node {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Node {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "a node with one of the keys t, c, f, b, local, item, tuple, list, dict, object, rate, after, views",
        )
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Some(form) = map.next_key::<Form>()? else {
            return Err(A::Error::custom("a node without a key"));
        };
        match form {
            Form::Tensor => {
                let output: u64 = map.next_value()?;
                if output >= self.outputs as u64 {
                    return Err(A::Error::custom(format_args!(
                        "it refers to outputs[{output}], but outputs has {} entries",
                        self.outputs
                    )));
                }
            }
            Form::Constant => {
                map.next_value::<Constant>()?;
            }
            Form::NonFinite => {
                map.next_value::<NonFinite>()?;
            }
            Form::Bound => {
                map.next_value::<Text>()?;
            }
            Form::Inner => map.next_value_seed(self)?,
            Form::Sequence => map.next_value_seed(Nodes(self))?,
            Form::Dict => map.next_value_seed(Items(self))?,
        }
        match map.next_key::<IgnoredAny>()? {
            None => Ok(()),
            Some(_) => Err(A::Error::custom("a node with a second key")),
        }
    }
}

enum Form {
    Tensor,
    Constant,
    NonFinite,
    Bound,
    /// The local tensor, or the number, of what another node stands for.
    Inner,
    Sequence,
    Dict,
}

impl<'de> Deserialize<'de> for Form {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        struct Key;
        impl Visitor<'_> for Key {
            type Value = Form;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(
                    "one of the keys t, c, f, b, local, item, tuple, list, dict, object, rate, after, views",
                )
            }

            fn visit_str<E: Error>(self, key: &str) -> Result<Form, E> {
                match key {
                    "t" => Ok(Form::Tensor),
                    "c" => Ok(Form::Constant),
                    "f" => Ok(Form::NonFinite),
                    "b" => Ok(Form::Bound),
                    "local" | "item" => Ok(Form::Inner),
                    "tuple" | "list" | "object" | "rate" | "after" | "views" => Ok(Form::Sequence),
                    "dict" => Ok(Form::Dict),
                    _ => Err(E::invalid_value(
                        serde::de::Unexpected::Other("another key"),
                        &self,
                    )),
                }
            }
        }
        json.deserialize_identifier(Key)
    }
}

/// A leaf whose value is of no interest once its type is known to be right.
macro_rules! leaf {
    ($name:ident, $expecting:literal, { $($visit:tt)* }) => {
        struct $name;

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
                json.deserialize_any($name)
            }
        }

        impl Visitor<'_> for $name {
            type Value = $name;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str($expecting)
            }

            $($visit)*
        }
    };
}

leaf!(Constant, "null, a boolean, a number or a text", {
    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_str<E>(self, _: &str) -> Result<Self, E> {
        Ok(self)
    }
});

leaf!(NonFinite, "\"nan\", \"inf\" or \"-inf\"", {
    fn visit_str<E: Error>(self, text: &str) -> Result<Self, E> {
        match text {
            "nan" | "inf" | "-inf" => Ok(self),
            _ => Err(E::invalid_value(serde::de::Unexpected::Str(text), &self)),
        }
    }
});

leaf!(Text, "the path of a binding", {
    fn visit_str<E>(self, _: &str) -> Result<Self, E> {
        Ok(self)
    }
});

/// The nodes of a tuple or list.
struct Nodes(Node);

impl<'de> DeserializeSeed<'de> for Nodes {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Nodes {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of nodes")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut nodes: A) -> Result<(), A::Error> {
        while nodes.next_element_seed(self.0)?.is_some() {}
        Ok(())
    }
}

/// The items of a dict.
#[derive(Clone, Copy)]
struct Items(Node);

impl<'de> DeserializeSeed<'de> for Items {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Items {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of items, each a key and a node")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        while items.next_element_seed(Item(self.0))?.is_some() {}
        Ok(())
    }
}

/// One item of a dict: key and node.
struct Item(Node);

impl<'de> DeserializeSeed<'de> for Item {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Item {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key and a node")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut item: A) -> Result<(), A::Error> {
        let mut entries = 0;
        while item.next_element_seed(self.0)?.is_some() {
            entries += 1;
        }
        match entries {
            2 => Ok(()),
            _ => Err(A::Error::invalid_length(entries, &self)),
        }
    }
}
