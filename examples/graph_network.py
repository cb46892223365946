"""A graph network of PyTorch Geometric that classifies nodes, with one line for Rote: the whole step is captured. The
loss is of the nodes that a mask picks.

python examples/graph_network.py --convolution GATConv --epochs 100
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor, nn
from torch_geometric import seed_everything
from torch_geometric.datasets import FakeDataset

SETTINGS: dict[str, dict[str, Any]] = {
    "GCNConv": {},
    "GATConv": {"heads": 2, "concat": False},
    "SAGEConv": {},
    "TransformerConv": {},
    "ChebConv": {"K": 2},
}


class Network(nn.Module):
    def __init__(self, convolution: str, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        make = getattr(torch_geometric.nn, convolution)
        self.first = make(features, hidden, **SETTINGS[convolution])
        self.second = make(hidden, classes, **SETTINGS[convolution])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.dropout(x, p=0.5, training=self.training)
        x = self.first(x, edge_index).relu()
        x = F.dropout(x, p=0.5, training=self.training)
        result: Tensor = self.second(x, edge_index)
        return result


def train(convolution: str, epochs: int, capture: Callable[[Any], Any]) -> tuple[Any, nn.Module, list[float]]:
    """Trains; `capture` is `rote.capture`. Comes back: the captured step, the model, its losses and accuracies."""
    seed_everything(0)
    data = FakeDataset(num_graphs=1, avg_num_nodes=600, avg_degree=4, num_channels=64, num_classes=7)[0]
    data.train_mask = torch.rand(data.num_nodes) < 0.3
    model = Network(convolution, data.num_features, 16, 7)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    def train_step() -> float:
        model.train()
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        return float(loss)

    @torch.no_grad()
    def accuracy() -> float:
        model.eval()
        found = model(data.x, data.edge_index).argmax(dim=-1)
        return float((found == data.y)[~data.train_mask].float().mean())

    step = capture(train_step)
    told = [(step(), accuracy()) for _ in range(epochs)]
    return step, model, [number for pair in told for number in pair]


def main() -> None:
    import rote

    parser = argparse.ArgumentParser()
    parser.add_argument("--convolution", choices=sorted(SETTINGS), default="GCNConv")
    parser.add_argument("--epochs", type=int, default=100)
    given = parser.parse_args()
    torch.set_num_threads(1)
    step, _, told = train(given.convolution, given.epochs, rote.capture)
    print(f"loss {told[-2]:.4f}, accuracy {told[-1]:.3f}")
    print(f"{step.stats.replays} of {step.stats.calls} steps replayed")


if __name__ == "__main__":
    main()
