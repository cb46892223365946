//! Loads a bridge whose kernels do nothing, for what is promised of Rust alone.

use std::path::Path;
use std::process::Command;

use rote_aten::Bridge;

const CRATE: &str = env!("CARGO_MANIFEST_DIR");

/// Compiles the bridge in a temporary directory and loads it.
pub fn load() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let library = directory.path().join("silent_bridge.so");
    let status = Command::new(std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned()))
        .args(["-O2", "-shared", "-fPIC"])
        .arg(Path::new(CRATE).join("tests/silent_bridge/bridge.cpp"))
        .args(["-x", "c"])
        .arg(Path::new(CRATE).join("tests/stub_bridge.c"))
        .arg("-o")
        .arg(&library)
        .status()
        .expect("a C++ compiler runs");
    assert!(status.success(), "the silent bridge does not compile");
    // SAFETY: the bridge was built from this version's sources, and there is no Python.
    unsafe { Bridge::load(&library) }.expect("the silent bridge loads");
}
