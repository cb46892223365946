"""Arguments are checked against PyTorch's schemas, which `propagation/src/schemas.txt` holds."""

import pytest

from propagation import engine, schemas


def test_the_schemas_are_those_of_pytorch() -> None:
    if engine.binary() is None:
        pytest.skip("no rote binary: cargo build --release")
    stale = "python -m tests.torch.propagation.schemas writes the file anew"
    assert schemas.FILE.read_text() == schemas.text(), stale
