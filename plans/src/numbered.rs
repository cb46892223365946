//! Enums whose numbers C, C++ and Python know too.

/// Defines an enum of which other languages know the numbers, one row each. `ffi/tests/header.rs` writes what they
/// need. `"kind of guard"` says what the enum is, for messages. Rows may have texts: then `TEXTS` has them by number.
#[macro_export]
macro_rules! numbered {
    (
        $what:literal;
        $(#[$meta:meta])*
        $vis:vis enum $name:ident { $($(#[$doc:meta])* $row:ident = $text:literal,)* }
    ) => {
        $crate::numbered! {
            $what;
            $(#[$meta])*
            $vis enum $name { $($(#[$doc])* $row,)* }
        }

        impl $name {
            /// The text of each, by its number.
            $vis const TEXTS: &'static [&'static str] = &[$($text,)*];
        }
    };
    (
        $what:literal;
        $(#[$meta:meta])*
        $vis:vis enum $name:ident { $($(#[$doc:meta])* $row:ident,)* }
    ) => {
        $(#[$meta])*
        $vis enum $name { $($(#[$doc])* $row,)* }

        impl $name {
            /// All, by their numbers.
            $vis const ALL: &'static [$name] = &[$($name::$row,)*];
        }

        impl TryFrom<u32> for $name {
            type Error = String;

            fn try_from(number: u32) -> Result<Self, String> {
                Self::ALL.get(number as usize).copied().ok_or_else(|| {
                    format!(
                        "{number} is not a {}: expected 0 to {}",
                        $what,
                        Self::ALL.len() - 1
                    )
                })
            }
        }
    };
}
