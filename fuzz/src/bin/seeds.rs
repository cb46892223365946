//! Writes plan files to begin from into a folder: `seeds FOLDER`.

use std::path::Path;

#[path = "../../../plans/tests/sample/mod.rs"]
mod sample;

fn main() {
    let folder = std::env::args().nth(1).expect("usage: seeds FOLDER");
    std::fs::create_dir_all(&folder).expect("the folder can be made");
    let path = Path::new(&folder).join("small.rote");
    sample::small().write(path).expect("the sample is a valid plan");
}
