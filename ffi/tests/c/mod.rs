//! C programs, compiled against the library.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;

pub const CRATE: &str = env!("CARGO_MANIFEST_DIR");
pub const SCRATCH: &str = env!("CARGO_TARGET_TMPDIR");

/// Makes a program of the workspace's that is linked with the library, and finds it when it runs.
pub fn program(source: &str, flags: &[&str], made: &Path) {
    let folder = library().parent().expect("a folder");
    compile("CC", "cc", "c11")
        .args(["-g", "-O1"])
        .args(flags)
        .arg(Path::new(CRATE).join("..").join(source))
        .arg("-o")
        .arg(made)
        .arg(library())
        .arg("-lpthread")
        .arg(format!("-Wl,-rpath,{}", folder.display()))
        .succeeds();
}

/// The library that `ROTE_LIBRARY` names (`make test` has just built one), or else one built as this test was.
pub fn library() -> &'static Path {
    static LIBRARY: LazyLock<PathBuf> = LazyLock::new(|| {
        if let Some(named) = std::env::var_os("ROTE_LIBRARY") {
            return PathBuf::from(named);
        }
        let mut cargo = Command::new(env!("CARGO"));
        cargo
            .args(["build", "--package", "rote-ffi", "--lib"])
            .args(["--message-format", "json-render-diagnostics"])
            .arg("--target-dir")
            .arg(Path::new(SCRATCH).parent().expect("the target folder"))
            .current_dir(CRATE);
        if !cfg!(debug_assertions) {
            cargo.arg("--release");
        }
        let messages = cargo.succeeds();
        let made = messages
            .lines()
            .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
            .filter(|message| message["target"]["name"] == "rote")
            .filter(|message| message["target"]["crate_types"][0] == "cdylib")
            .find_map(|message| Some(message["filenames"][0].as_str()?.to_owned()));
        PathBuf::from(made.expect("cargo names the library it built"))
    });
    &LIBRARY
}

pub fn compile(variable: &str, usual: &str, standard: &str) -> Command {
    let mut command = Command::new(std::env::var_os(variable).unwrap_or_else(|| usual.into()));
    command
        .arg(format!("-std={standard}"))
        .args(["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I"])
        .arg(Path::new(CRATE).join("include"));
    command
}

pub trait Succeeds {
    /// Runs the command; its output, or a panic with all that it said.
    fn succeeds(&mut self) -> String;
}

impl Succeeds for Command {
    fn succeeds(&mut self) -> String {
        let program = self.get_program().to_owned();
        let Output {
            status,
            stdout,
            stderr,
        } = self
            .output()
            .unwrap_or_else(|error| panic!("{} does not run: {error}", name(&program)));
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let out = text(&stdout);
        let said = || text(&stderr) + &out;
        assert!(status.success(), "{}: {status}\n{}", name(&program), said());
        out
    }
}

fn name(program: &OsStr) -> String {
    program.to_string_lossy().into_owned()
}
