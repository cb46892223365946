"""Steps with results whose shapes depend on data: a replay goes on only where it finds the recorded shapes."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import inputs
from oracle import ORACLE_ONLY, Calls, Capture, check_equal, check_equal_with_each, check_right, over
from torch import Tensor, nn
from torch.nn import functional as F

ROWS, CALLS = 16, 40


def mask_of(count: int, draw: random.Random) -> Tensor:
    """A mask of rows with so many of them, at random."""
    return torch.tensor(draw.sample([True] * count + [False] * (ROWS - count), ROWS))


def assigned(y: Tensor, mask: Tensor, _: Tensor) -> Tensor:
    y = y.clone()
    y[mask] = y[mask] * 2
    y[~mask] = 0.0
    return y


def row_by_row(y: Tensor, mask: Tensor, _: Tensor) -> Tensor:
    return sum((y[i] for i in mask.nonzero()), y[:1] * 0)


def sized(y: Tensor, mask: Tensor, _: Tensor) -> Tensor:
    """Only the host uses the result."""
    return y * mask.nonzero().shape[0]


def spread(y: Tensor, mask: Tensor, _: Tensor) -> Tensor:
    rows, columns = torch.where(mask[:, None] & mask[None, :4])
    return y[rows] * columns[:, None]


def counted(y: Tensor, _: Tensor, kinds: Tensor) -> Tensor:
    """As loss functions weigh classes."""
    return y * (torch.bincount(kinds).float() / len(kinds))[kinds][:, None]


def grouped(y: Tensor, _: Tensor, kinds: Tensor) -> Tensor:
    found, which, counts = torch.unique(kinds, return_inverse=True, return_counts=True)
    sums = y.new_zeros(found.numel(), 4).index_add(0, which, y)
    return sums / counts[:, None]


def runs(y: Tensor, _: Tensor, kinds: Tensor) -> Tensor:
    found, counts = torch.unique_consecutive(kinds, return_counts=True)
    return y[: found.numel()] * counts[:, None]


# What a model does with its rows (16 of 4 numbers), by a mask of them or by small integers, one for each.
USES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mask": lambda y, mask, _: y[mask],
    "mask and column": lambda y, mask, _: y[mask, 1],
    "two masks": lambda y, mask, _: y[mask][:, mask[:4]],
    "mask of elements": lambda y, mask, _: y[mask[:, None] & (y.detach() < 9)],
    "mask of bytes": lambda y, mask, _: y[mask.nonzero().squeeze(1)],
    "masked_select": lambda y, mask, _: y.masked_select(mask[:, None]),
    "nonzero": lambda y, mask, _: y[mask.nonzero(as_tuple=True)],
    "argwhere": lambda y, mask, _: y[torch.argwhere(mask)[:, 0]],
    "where": spread,
    "assigned": assigned,
    "row by row": row_by_row,
    "sized": sized,
    "repeat_interleave": lambda y, _, kinds: y.repeat_interleave(kinds, dim=0),
    "bincount": counted,
    "unique": grouped,
    "unique of rows": lambda y, _, kinds: y[: torch.unique(kinds.view(8, 2), dim=0).shape[0]],
    "unique, not sorted": lambda y, _, kinds: y[: torch.unique(kinds, sorted=False).numel()],
    "unique_consecutive": runs,
    "unique_consecutive of rows": lambda y, _, kinds: y[: torch.unique_consecutive(kinds.view(8, 2), dim=0).shape[0]],
}
# Those with other shapes in most calls.
VARYING = {
    "two masks",
    "where",
    "repeat_interleave",
    "unique of rows",
    "unique_consecutive",
    "unique_consecutive of rows",
}
# How many rows the masks have, and how many kinds there are, by calls. A recording needs two calls with one shape.
COUNTS: dict[str, Callable[[int, random.Random], int]] = {
    "one": lambda call, draw: 9,
    "two": lambda call, draw: 5 if call < 4 or (call > 7 and draw.random() < 0.5) else 12,
    "none and all": lambda call, draw: 0 if call < 4 or (call > 7 and draw.random() < 0.5) else ROWS,
    "few others": lambda call, draw: 9 if call < 4 or draw.random() < 0.8 else draw.randrange(ROWS + 1),
}


def arguments(counts: Callable[[int, random.Random], int]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    draw = random.Random(0)
    for call, x in enumerate(inputs(CALLS, ROWS, 4)):
        count = counts(call, draw)
        kinds = [i % max(count // 2, 1) for i in range(ROWS)]
        draw.shuffle(kinds)
        yield x, mask_of(count, draw), torch.tensor(kinds)


def training(use: str, counts: str, model: Callable[[], nn.Module] = lambda: nn.Linear(4, 4)) -> Callable[..., Calls]:
    def script(capture: Capture, **options: object) -> Calls:
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

        def step(x: Tensor, mask: Tensor, kinds: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = USES[use](net(x), mask, kinds).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return over(capture, step, arguments(COUNTS[counts]), state=[net, optimizer], **options)

    return script


@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("use", USES)
def test_rows_of_a_model(use: str, counts: str) -> None:
    script = training(use, counts)
    if use in VARYING:
        check_right(script)
    elif counts == "few others":
        check_right(script, replays=8)
    else:
        check_equal(script)


@pytest.mark.parametrize("use", ["mask", "assigned", "unique", "sized"])
def test_with_each_choice_of_passes(use: str) -> None:
    check_equal_with_each(training(use, "two"))


@pytest.mark.parametrize("use", ["mask", "nonzero", "unique"])
def test_what_was_written_before(use: str) -> None:
    """The averages of a batch norm are put off until the shape is known."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3))

    check_equal(training(use, "two", model))


def by_region(module: nn.Module, *, state: object = None) -> object:
    if ORACLE_ONLY:
        return module
    import rote

    return rote.capture_module(module)


class Selecting(nn.Module):
    def __init__(self, use: str) -> None:
        super().__init__()
        self.use = use
        self.before, self.behind = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, mask: Tensor, kinds: Tensor) -> Tensor:
        y: Tensor = self.behind(USES[self.use](self.before(x).relu(), mask, kinds))
        return y.tanh()


@pytest.mark.parametrize("use", ["mask", "nonzero", "unique", "assigned"])
def test_regions(use: str) -> None:
    def script(capture: Capture) -> Calls:
        net = Selecting(use)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        capture(net)
        for x, mask, kinds in arguments(COUNTS["two"]):
            optimizer.zero_grad()
            loss = net(x, mask, kinds).square().sum()
            loss.backward()
            optimizer.step()
            yield loss.item()
        return net

    check_right(script, by_region, replays=20)


@pytest.mark.parametrize("use", ["mask", "unique"])
def test_plans_on_disk(use: str, tmp_path: Path) -> None:
    check_equal(training(use, "two"), plans=tmp_path)
    check_equal(training(use, "two"), plans=tmp_path, verify=3)


def test_shapes_behind_what_lasts_are_refused() -> None:
    """What a large optimizer has written cannot be undone."""

    def script(capture: Capture) -> Calls:
        large = torch.zeros(20_000_000)

        def step(x: Tensor, mask: Tensor, kinds: Tensor) -> Tensor:
            large.add_(1.0)
            return x[mask & (large[:ROWS] > 0)]

        calls = list(arguments(COUNTS["one"]))[:6]
        return over(capture, step, calls, state=large, seen=lambda: large[0].item(), end=lambda: large[:3])

    with pytest.warns(UserWarning, match=r"aten::(add_|index).* shape depends on tensor data, after aten::add_"):
        steps = check_right(script).steps
        if ORACLE_ONLY:
            pytest.skip("eager PyTorch refuses nothing")
    assert not steps[0].stats.replays


def test_shapes_that_change_at_each_call_are_refused() -> None:
    if ORACLE_ONLY:
        pytest.skip("eager PyTorch refuses nothing")

    def script(capture: Capture) -> Calls:
        calls = ((x, torch.arange(ROWS) <= call) for call, x in enumerate(inputs(12, ROWS, 4)))
        return over(capture, lambda x, mask: x[mask].sum(), calls)

    with pytest.warns(
        UserWarning, match=r"aten::index.* in each of the last recordings \(\[\d+, 4\], then \[\d+, 4\]\)"
    ):
        check_right(script)


def test_what_pads_and_packs_stays_eager() -> None:
    """Lengths that lie in a tensor say what a packed sequence is, beside its shape."""

    def script(capture: Capture) -> Calls:
        lstm = nn.LSTM(4, 4, batch_first=True)

        def step(x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return lstm(packed)[0].data.sum()

        calls = ((x.view(4, 4, 4), torch.tensor([1 + (call + i) % 4 for i in range(4)])) for call, x in rows())
        return over(capture, step, calls, state=lstm)

    def rows() -> Iterator[tuple[int, Tensor]]:
        yield from enumerate(inputs(12, ROWS, 4))

    check_right(script)


def test_losses_of_sequences_stay_right() -> None:
    """The lengths of CTC's targets are read below the dispatcher."""

    def rows() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        draw = torch.Generator().manual_seed(0)
        for call, x in enumerate(inputs(14, ROWS, 4)):
            targets = torch.randint(1, 5, (2, 3), generator=draw)
            yield x, targets, torch.tensor([1 + call % 3, 3 - call % 3]) if call > 5 else torch.tensor([2, 2])

    def script(capture: Capture) -> Calls:
        net = nn.Linear(4, 5)

        def step(x: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
            scores = net(x).view(8, 2, 5).log_softmax(2)
            return F.ctc_loss(scores, targets, torch.tensor([8, 8]), lengths)

        return over(capture, step, rows(), state=net)

    check_right(script)


@pytest.mark.parametrize("options", [{"verify": 3}, {"verify_every": 3}])
def test_one_row_is_compared(options: dict[str, int]) -> None:
    """A column of one row: one element, with the stride of a row."""

    def script(capture: Capture, **_: object) -> Calls:
        calls = ((x, torch.arange(ROWS) == call) for call, x in enumerate(inputs(14, ROWS, 4)))
        return over(capture, lambda x, mask: x[mask][:, 1], calls, **options)

    check_right(script, replays=1 if "verify" in options else 0)


def test_results_in_given_tensors_are_refused() -> None:
    def script(capture: Capture) -> Calls:
        found = torch.zeros(9, 1, dtype=torch.int64)

        def step(x: Tensor, mask: Tensor) -> Tensor:
            torch.nonzero(mask, out=found)
            return x[found[:, 0]]

        calls = ((x, mask) for x, mask, _ in arguments(COUNTS["one"]))
        return over(capture, step, calls, state=found, seen=lambda: found)

    if ORACLE_ONLY:
        pytest.skip("eager PyTorch refuses nothing")
    with pytest.warns(UserWarning, match=r"aten::nonzero.* depends on tensor data"):
        check_right(script)


@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.ranks(2)
def test_ranks_with_shapes_of_their_own_agree() -> None:
    """Each rank has one of two shapes, at random: a rank whose shape was right tries it again with the others."""

    def script(capture: Capture) -> Calls:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(x: Tensor, mask: Tensor) -> Tensor:
            optimizer.zero_grad()
            y = model(x)
            count = mask.sum()
            dist.all_reduce(count)
            loss = y[mask & (count > 0)].square().sum()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            return loss.detach()

        draw = random.Random(dist.get_rank())
        calls = ((x, mask_of(draw.choice((5, 9)), draw)) for x in inputs(80, ROWS, 4))
        return over(capture, step, calls, state=[model, optimizer], agree=True)

    check_right(script, replays=40)
