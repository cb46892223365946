"""An agent of Stable-Baselines3, with one line for Rote: the loop of its `train` is captured. Acting in the environment
and sampling of batches stay eager.

python examples/stable_baselines.py --algorithm PPO --steps 4000
"""

import argparse
from collections.abc import Callable
from typing import Any

import stable_baselines3
import torch

DISCRETE = {"PPO", "A2C", "DQN"}
SETTINGS: dict[str, dict[str, Any]] = {
    "PPO": {"n_steps": 256},
    "A2C": {},
    "DQN": {"learning_starts": 100, "train_freq": 1},
    "SAC": {"learning_starts": 100, "batch_size": 64, "policy_kwargs": {"net_arch": [64, 64]}},
    "TD3": {"learning_starts": 100, "batch_size": 64, "policy_kwargs": {"net_arch": [64, 64]}},
}


def train(name: str, steps: int, capture_loops: Callable[[Any], Any]) -> tuple[Any, Any, list[float]]:
    """Trains; `capture_loops` is `rote.capture_loops`. Comes back: the captured method, the agent, the means that its
    last update has logged."""
    algorithm = getattr(stable_baselines3, name)

    class Agent(algorithm):  # type: ignore[misc]
        train = capture_loops(algorithm.train)

    environment = "CartPole-v1" if name in DISCRETE else "Pendulum-v1"
    agent = Agent("MlpPolicy", environment, seed=1, device="cpu", **SETTINGS[name])
    agent.learn(total_timesteps=steps)
    logged = agent.logger.name_to_value
    return Agent.train, agent, [float(logged[key]) for key in sorted(logged) if key.startswith("train/")]


def main() -> None:
    import rote

    parser = argparse.ArgumentParser()
    parser.add_argument("--algorithm", choices=sorted(SETTINGS), default="PPO")
    parser.add_argument("--steps", type=int, default=4000, help="steps in the environment")
    given = parser.parse_args()
    torch.set_num_threads(1)
    step, _, _ = train(given.algorithm, given.steps, rote.capture_loops)
    for name, stats in step.stats.items():
        print(f"{name}: {stats.replays} of {stats.calls} updates replayed")


if __name__ == "__main__":
    main()
