//! Numbers, structs and functions that C, C++ and Python know too, read from the Rust sources that define them.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::{
    Attribute, Expr, Fields, Ident, ImplItem, Item, ItemEnum, ItemStruct, Lit, LitStr, ReturnType,
    Token, Type, TypeBareFn,
};

/// A number with a name.
pub struct Row {
    /// As Rust has it: `DictItem` or `DICT_ITEM`.
    name: String,
    number: i64,
    doc: String,
}

/// Numbers of one subject, which a source file defines.
pub struct Numbers {
    path: &'static str,
    /// What one of them is, `kind of guard`, if the source says so.
    what: String,
    doc: String,
    rows: Vec<Row>,
}

/// `numbered! { "kind of guard"; enum GuardKind { Structure = "structure" } }`
struct Numbered {
    what: String,
    item: ItemEnum,
}

impl Parse for Numbered {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let what: LitStr = input.parse()?;
        input.parse::<Token![;]>()?;
        Ok(Numbered {
            what: what.value(),
            item: input.parse()?,
        })
    }
}

fn items(path: &str) -> Vec<Item> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
    let source = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    syn::parse_file(&source).expect("Rust").items
}

/// The text of a doc comment, in one line and without links.
fn doc(attributes: &[Attribute]) -> String {
    let lines = attributes.iter().filter_map(|attribute| {
        let value = &attribute.meta.require_name_value().ok()?.value;
        match (attribute.path().is_ident("doc"), value) {
            (true, Expr::Lit(text)) => match &text.lit {
                Lit::Str(text) => Some(text.value().trim().to_owned()),
                _ => None,
            },
            _ => None,
        }
    });
    let text = lines.collect::<Vec<_>>().join(" ");
    text.replace("[`", "`").replace("`]", "`")
}

/// A sentence as it goes on after a colon.
fn going_on(sentence: &str) -> String {
    let sentence = sentence.trim_end_matches('.');
    let (first, rest) = sentence.split_at(sentence.len().min(1));
    let word = rest.split(' ').next().unwrap_or_default();
    match word.contains(char::is_uppercase) {
        true => sentence.to_owned(),
        false => first.to_lowercase() + rest,
    }
}

fn number(value: &Expr) -> i64 {
    match value {
        Expr::Lit(literal) => match &literal.lit {
            Lit::Int(number) => number.base10_parse().expect("a number"),
            _ => panic!("no number"),
        },
        Expr::Unary(minus) => -number(&minus.expr),
        Expr::Call(newtype) => number(&newtype.args[0]),
        Expr::Path(path)
            if path
                .path
                .segments
                .last()
                .is_some_and(|last| last.ident == "MAX") =>
        {
            u32::MAX.into()
        }
        _ => panic!("no number"),
    }
}

impl Numbers {
    /// The rows of an enum.
    pub fn of_enum(path: &'static str, name: &str) -> Self {
        let found = items(path).into_iter().find_map(|item| match item {
            Item::Enum(item) if item.ident == name => Some((String::new(), item)),
            Item::Macro(item) if item.mac.path.segments.last()?.ident == "numbered" => {
                let Numbered { what, item } = item.mac.parse_body().expect("an enum");
                (item.ident == name).then_some((what, item))
            }
            _ => None,
        });
        let (what, item) = found.unwrap_or_else(|| panic!("{path} has no enum {name}"));
        let rows = (0..).zip(&item.variants).map(|(at, row)| Row {
            name: row.ident.to_string(),
            number: at,
            doc: doc(&row.attrs),
        });
        Numbers {
            path,
            what,
            doc: doc(&item.attrs),
            rows: rows.collect(),
        }
    }

    /// The constants of a type in a file, in a module or in an `impl` of it.
    pub fn of_constants(path: &'static str, within: Option<&str>, kind: &str) -> Self {
        let is_kind =
            |found: &Type| matches!(found, Type::Path(found) if found.path.is_ident(kind));
        let mut rows = Vec::new();
        let mut all = items(path);
        if let Some(within) = within {
            all = (all.into_iter())
                .flat_map(|item| match item {
                    Item::Mod(item) if item.ident == within => item.content.expect("items").1,
                    Item::Impl(item) if item.trait_.is_none() && is_kind(&item.self_ty) => {
                        let items = item.items.into_iter().filter_map(|item| match item {
                            ImplItem::Const(item) => Some(syn::parse_quote!(#item)),
                            _ => None,
                        });
                        items.collect()
                    }
                    _ => Vec::new(),
                })
                .collect();
        }
        for item in all {
            if let Item::Const(item) = item {
                if is_kind(&item.ty) {
                    rows.push(Row {
                        name: item.ident.to_string(),
                        number: number(&item.expr),
                        doc: doc(&item.attrs),
                    });
                }
            }
        }
        assert!(!rows.is_empty(), "{path} has no constants {kind}");
        Numbers {
            path,
            what: String::new(),
            doc: String::new(),
            rows,
        }
    }

    /// The same with another doc, and without what all of the rows' docs begin with.
    pub fn about(mut self, doc: &str) -> Self {
        self.doc = doc.to_owned();
        for row in &mut self.rows {
            if let Some((_, rest)) = row.doc.split_once(": ") {
                row.doc = rest.to_owned();
            }
        }
        self
    }

    /// As an enum of C++.
    pub fn cpp(&self, name: &str, kind: &str, prefix: &str) -> String {
        let mut text = format!("// {}\nenum {name} : {kind} {{\n", self.doc);
        for Row { name, number, doc } in &self.rows {
            let name: String = match name.to_uppercase() == *name {
                true => name.split('_').map(capitalized).collect(),
                false => name.clone(),
            };
            writeln!(text, "  {prefix}{name} = {number},  // {}", going_on(doc)).expect("text");
        }
        text + "};\n"
    }

    /// As constants of C++.
    pub fn cpp_constants(&self, kind: &str) -> String {
        let constant = |row: &Row| {
            let name: String = row.name.split('_').map(capitalized).collect();
            format!(
                "// {}\nconstexpr {kind} k{name} = {};\n",
                row.doc, row.number
            )
        };
        self.rows.iter().map(constant).collect()
    }

    /// How many there are, as a constant of C++.
    pub fn cpp_count(&self, name: &str) -> String {
        format!("constexpr uint32_t {name} = {};\n", self.rows.len())
    }

    /// As constants of Rust for C.
    pub fn c(&self, kind: &str, prefix: &str) -> String {
        let mut text = String::new();
        for row in &self.rows {
            let doc = format!("{}: {}.", capitalized(&self.what), going_on(&row.doc));
            let (name, number) = (constant(&row.name), row.number);
            writeln!(
                text,
                "/// {doc}\npub const {prefix}{name}: {kind} = {number};"
            )
            .expect("text");
        }
        text
    }

    /// As constants of Python, without the prefix that C has.
    pub fn python(&self, prefix: &str) -> String {
        let mut text = format!("\n# {} ({}).", self.doc.trim_end_matches('.'), self.path);
        for row in &self.rows {
            let name = constant(&row.name);
            let name = name.trim_start_matches("ROTE_");
            write!(text, "\n{prefix}{name} = {}", row.number).expect("text");
        }
        text + "\n"
    }
}

fn capitalized(word: &str) -> String {
    let mut chars = word.chars();
    let first = chars.next().into_iter().flat_map(char::to_uppercase);
    let rest = match word.to_uppercase() == *word {
        true => chars.as_str().to_lowercase(),
        false => chars.as_str().to_owned(),
    };
    first.collect::<String>() + &rest
}

/// `DictItem` as `DICT_ITEM`; a constant as it is.
fn constant(name: &str) -> String {
    if name.to_uppercase() == *name {
        return name.to_owned();
    }
    let mut text = String::new();
    for (at, letter) in name.char_indices() {
        if at > 0 && letter.is_uppercase() {
            text.push('_');
        }
        text.extend(letter.to_uppercase());
    }
    text
}

/// A type of C++.
fn cpp_type(kind: &Type, name: &str) -> String {
    match kind {
        Type::Path(path) => {
            let kind = path.path.segments.last().expect("a name").ident.to_string();
            let kind = match kind.as_str() {
                "i8" | "i16" | "i32" | "i64" => format!("int{}_t", &kind[1..]),
                "u8" | "u16" | "u32" | "u64" => format!("uint{}_t", &kind[1..]),
                "f64" => "double".to_owned(),
                "c_char" | "c_int" | "c_void" => kind[2..].to_owned(),
                "Object" => return format!("PyObject *{name}"),
                _ => kind,
            };
            format!("{kind} {name}").trim_end().to_owned()
        }
        Type::Ptr(pointer) => {
            let is_object =
                matches!(&*pointer.elem, Type::Path(path) if path.path.is_ident("Object"));
            let (before, after) = match (pointer.const_token, is_object) {
                (None, _) => ("", ""),
                (Some(_), true) => ("", "const "),
                (Some(_), false) => ("const ", ""),
            };
            format!(
                "{before}{}",
                cpp_type(&pointer.elem, &format!("{after}*{name}"))
            )
        }
        Type::Array(array) => {
            format!("{}[{}]", cpp_type(&array.elem, name), number(&array.len))
        }
        Type::BareFn(function) => cpp_function(function, &format!("(*{name})")),
        _ => panic!("{name} has a type that C++ is not told of"),
    }
}

/// A function of C++, or a pointer to one.
fn cpp_function(function: &TypeBareFn, name: &str) -> String {
    let inputs = function.inputs.iter().map(|input| cpp_type(&input.ty, ""));
    let inputs = inputs.collect::<Vec<_>>().join(", ");
    let name = format!("{name}({inputs})");
    match &function.output {
        ReturnType::Default => format!("void {name}"),
        ReturnType::Type(_, output) => cpp_type(output, &name),
    }
}

/// A struct of C++. A field that is a union has its members.
pub fn cpp_struct(path: &str, name: &str) -> String {
    let all = items(path);
    let found = all.iter().find_map(|item| match item {
        Item::Struct(item) if item.ident == name => Some(item),
        _ => None,
    });
    let ItemStruct { attrs, fields, .. } =
        found.unwrap_or_else(|| panic!("{path} has no struct {name}"));
    let is_c = |attribute: &Attribute| {
        attribute.path().is_ident("repr")
            && (attribute.parse_args::<syn::Ident>()).is_ok_and(|repr| repr == "C")
    };
    assert!(attrs.iter().any(is_c), "{name} is not laid out as in C");
    let Fields::Named(fields) = fields else {
        panic!("{name} has fields without names")
    };
    let mut text = format!("// {}\nstruct {name} {{\n", doc(attrs));
    for field in &fields.named {
        let union = all.iter().find_map(|item| match (item, &field.ty) {
            (Item::Union(item), Type::Path(path)) if path.path.is_ident(&item.ident) => Some(item),
            _ => None,
        });
        let (indent, members) = match union {
            Some(union) => ("  ", &union.fields.named),
            None => ("", &fields.named),
        };
        if union.is_some() {
            text += "  union {\n";
        }
        for member in members
            .iter()
            .filter(|member| union.is_some() || *member == field)
        {
            let name = member.ident.as_ref().expect("a name").to_string();
            let said = going_on(&doc(&member.attrs));
            writeln!(
                text,
                "{indent}  {};  // {said}",
                cpp_type(&member.ty, &name)
            )
            .expect("text");
        }
        if union.is_some() {
            text += "  };\n";
        }
    }
    text + "};\n"
}

/// `describer_new: fn() -> *mut Describer`
struct Function {
    name: Ident,
    kind: Type,
}

impl Parse for Function {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let name = input.parse()?;
        input.parse::<Token![:]>()?;
        let kind = input.parse()?;
        Ok(Function { name, kind })
    }
}

/// The entries of the macro `name!` of a file, each of which ends with a semicolon.
fn entries<T: Parse>(path: &str, name: &str) -> Vec<T> {
    let found = items(path).into_iter().find_map(|item| match item {
        Item::Macro(item) if item.mac.path.is_ident(name) => Some(item.mac),
        _ => None,
    });
    let found = found.unwrap_or_else(|| panic!("{path} has no {name}!"));
    let entries = found.parse_body_with(Punctuated::<T, Token![;]>::parse_terminated);
    entries.expect("entries").into_iter().collect()
}

/// Declarations of the classes in `classes!`.
pub fn cpp_classes(path: &str) -> String {
    let classes = entries::<Ident>(path, "classes");
    let declared = classes.iter().map(|name| format!("class {name};\n"));
    format!(
        "// Classes of the bridge, to which Rust has pointers.\n{}",
        declared.collect::<String>()
    )
}

/// Declarations of the functions in `functions!`.
pub fn cpp_functions(path: &str, prefix: &str) -> String {
    let mut text = "// The functions that Rust calls.\nextern \"C\" {\n".to_owned();
    for Function { name, kind } in entries(path, "functions") {
        let Type::BareFn(function) = kind else {
            panic!("{name} is no function")
        };
        let declared = cpp_function(&function, &format!("{prefix}{name}"));
        writeln!(text, "{declared};").expect("text");
    }
    text + "}\n"
}
