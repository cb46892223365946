"""C++ that times calls from C++, compiled against the installed torch."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

from .report import note


def build(name: str, directory: Path) -> Any:
    """The module of `benches/NAME.cpp`, built in `directory` unless it is there already."""
    source = Path(__file__).parents[1] / f"{name}.cpp"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    library = directory / f"{name}-{torch.__version__}-{digest}.so"
    if not library.exists():
        note(f"compiling {source.name}")
        directory.mkdir(parents=True, exist_ok=True)
        includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
        command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O2", "-shared", "-fPIC"]
        command += [f"-DTORCH_EXTENSION_NAME={name}", *(f"-I{path}" for path in includes)]
        command += [str(source), "-o", str(library)]
        command += [f"-L{path}" for path in cpp_extension.library_paths()]
        command += ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
        subprocess.run(command, check=True)
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
