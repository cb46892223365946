"""Tensors that are neither strided nor dense, as arguments and in the state: no plan holds them, and no step stops."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import ORACLE_ONLY, Calls, Capture, check_right, rote_capture
from torch import Tensor, nn

CALLS = 8


def whole() -> Tensor:
    return torch.eye(6) + torch.arange(36.0).view(6, 6) % 2


def pieces() -> list[Tensor]:
    return [torch.ones(2, 6), torch.arange(18.0).view(3, 6)]


# Tensors, and what a layer makes of them.
KINDS: dict[str, tuple[Callable[[], Tensor], Callable[[nn.Linear, Tensor], Tensor]]] = {
    "coo": (lambda: whole().to_sparse(), lambda layer, x: x @ layer.weight.t()),
    "csr": (lambda: whole().to_sparse_csr(), lambda layer, x: x @ layer.weight.t()),
    "csc": (lambda: whole().to_sparse_csc(), lambda layer, x: layer(x.to_dense())),
    "bsr": (lambda: whole().to_sparse_bsr((2, 2)), lambda layer, x: layer(x.to_dense())),
    "nested": (lambda: torch.nested.nested_tensor(pieces()), lambda layer, x: layer(x).to_padded_tensor(0.0)),
    "jagged": (
        lambda: torch.nested.nested_tensor(pieces(), layout=torch.jagged),
        lambda layer, x: layer(x).values(),
    ),
    "quantized": (
        lambda: torch.quantize_per_tensor(whole(), 0.1, 0, torch.qint8),
        lambda layer, x: layer(x.dequantize()),
    ),
    "mkldnn": (lambda: whole().to_mkldnn(), lambda layer, x: layer(x.to_dense())),
    "not made yet": (nn.parameter.UninitializedBuffer, lambda layer, x: layer(torch.ones(6, 6))),
    "meta": (lambda: whole().to("meta"), lambda layer, x: layer(torch.ones(x.shape))),
}


class Net(nn.Module):
    def __init__(self, kind: str, held: Tensor | None = None) -> None:
        super().__init__()
        self.layer, self.use = nn.Linear(6, 6), KINDS[kind][1]
        self.register_buffer("held", held)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.layer, x if self.held is None else self.held).square()


def region(function: Any, **_: Any) -> Any:
    import rote

    if isinstance(function, nn.Module):
        rote.capture_module(function)
        return function
    return rote.capture(function, region=True)


HOW: dict[str, tuple[Capture, bool]] = {
    "step": (rote_capture, False),
    "step with it in the state": (rote_capture, True),
    "region": (rote_capture if ORACLE_ONLY else region, False),
    "region with it in the state": (rote_capture if ORACLE_ONLY else region, True),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", KINDS)
def test_right(kind: str, how: str) -> None:
    by, is_held = HOW[how]

    def script(capture: Capture) -> Calls:
        odd = KINDS[kind][0]()
        net = Net(kind, odd if is_held else None)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

        def train_step(x: Tensor) -> float:
            optimizer.zero_grad()
            loss = net(x).sum()
            loss.backward()
            optimizer.step()
            return loss.item()

        step = capture(train_step) if by is rote_capture else train_step
        if by is not rote_capture:
            capture(net)
        for _ in range(CALLS):
            yield step(torch.ones(6, 6) if is_held else odd)
        return list(net.parameters())

    check_right(script, by)
