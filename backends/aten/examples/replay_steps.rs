//! Replays a fixed plan of 1,000 ops so many times, on a bridge that does
//! nothing: the program whose instructions `tests/instructions.rs` counts.
//!
//!     cargo run --release --package rote-aten --example replay_steps -- 100

#[path = "../tests/fixed_plan/mod.rs"]
mod fixed_plan;
#[path = "../tests/silent_bridge/mod.rs"]
mod silent_bridge;

fn main() {
    let steps = std::env::args().nth(1).and_then(|text| text.parse().ok());
    let Some(steps) = steps else {
        eprintln!("usage: replay_steps STEPS");
        std::process::exit(2);
    };
    silent_bridge::load();
    let mut replay = fixed_plan::FixedPlan::bind();
    for _ in 0..steps {
        replay.step();
    }
}
