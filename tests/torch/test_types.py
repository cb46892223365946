"""What a type checker sees of a captured step: the arguments and the result of the function."""

import textwrap
from pathlib import Path

import pytest
from mypy import api

PACKAGE = Path(__file__).parents[2] / "ffi/python"
TEXT = """
    import rote
    from torch import Tensor

    def step(x: Tensor, scale: float = 1.0) -> tuple[Tensor, int]:
        return x * scale, 1

    class Trainer:
        @rote.capture(max_variants=2)
        def step(self, x: Tensor) -> Tensor:
            return x

    captured = rote.capture(step, state=[])
    trainer = Trainer()
    """
REVEALED = {
    "captured": "rote._captured.Captured[[x: torch._tensor.Tensor, scale: float =], tuple[torch._tensor.Tensor, int]]",
    "captured(x=Tensor())": "tuple[torch._tensor.Tensor, int]",
    "trainer.step": "def (x: torch._tensor.Tensor) -> torch._tensor.Tensor",
    "captured.stats.replays": "int",
}
WRONG = {
    "captured(1)": 'Argument 1 to "__call__" of "Captured" has incompatible type "int"; expected "Tensor"',
    "captured()": 'Missing positional argument "x" in call to "__call__" of "Captured"',
    "trainer.step(Tensor(), Tensor())": "Too many arguments",
    "rote.capture(step, sate=[])": 'Unexpected keyword argument "sate"',
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """What mypy says of each line below the text: of what is revealed, then of what is wrong."""
    file = tmp_path_factory.mktemp("types") / "user.py"
    lines = [f"reveal_type({expression})" for expression in REVEALED]
    file.write_text("\n".join([textwrap.dedent(TEXT).strip(), *lines, *WRONG]) + "\n")
    first = len(textwrap.dedent(TEXT).strip().splitlines()) + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MYPYPATH", str(PACKAGE))
        found, errors, _ = api.run(["--strict", "--no-error-summary", "--config-file=", str(file)])
    assert not errors, errors
    told: dict[int, str] = {}
    for line in found.splitlines():
        _, number, text = line.split(":", 2)
        told[int(number) - first] = told.get(int(number) - first, "") + text
    return told


@pytest.mark.parametrize("expression", REVEALED)
def test_type_is_the_functions(expression: str, said: dict[int, str]) -> None:
    assert f'Revealed type is "{REVEALED[expression]}"' in said[list(REVEALED).index(expression)]


@pytest.mark.parametrize("expression", WRONG)
def test_wrong_use_is_seen(expression: str, said: dict[int, str]) -> None:
    assert WRONG[expression] in said[len(REVEALED) + list(WRONG).index(expression)]


def test_nothing_else_is_wrong(said: dict[int, str]) -> None:
    assert set(said) == set(range(len(REVEALED) + len(WRONG))), said
