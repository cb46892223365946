"""Builds the bridge against the installed torch, once, and loads it."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from ._native import check, lib


def _sources() -> dict[str, str]:
    count = lib.rote_bridge_source_count()
    return {lib.rote_bridge_source_name(i).decode(): lib.rote_bridge_source_text(i).decode() for i in range(count)}


def cache_directory() -> Path:
    """Where built bridges are kept: ``ROTE_CACHE``, or the user's cache."""
    base = os.environ.get("ROTE_CACHE")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))) / "rote"


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(name.split()[0]):
            return name
    raise RuntimeError(
        "rote: no C++ compiler found (looked for $CXX, c++, g++, clang++). Rote compiles a small bridge against the "
        "installed torch at its first use. Install a compiler, for example the package g++ or clang, or set CXX."
    )


def _command(compiler: str, source: Path, output: Path) -> list[str]:
    root = Path(torch.__file__).parent
    include = [
        root / "include",
        root / "include/torch/csrc/api/include",
        Path(sysconfig.get_paths()["include"]),
    ]
    standard = "c++20" if tuple(int(x) for x in torch.__version__.split(".")[:2]) >= (2, 12) else "c++17"
    return [
        *compiler.split(),
        f"-std={standard}",
        "-O2",
        "-fPIC",
        "-shared",
        "-DNDEBUG",  # as torch is built: some of its classes are larger without
        "-fvisibility=hidden",
        "-w",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{path}" for path in include),
        str(source),
        "-o",
        str(output),
        f"-L{root / 'lib'}",
        "-ltorch_python",
        "-ltorch",
        "-ltorch_cpu",
        "-lc10",
        f"-Wl,-rpath,{root / 'lib'}",
    ]


def build() -> Path:
    """The built bridge for this torch, compiled if it is not cached."""
    sources = _sources()
    digest = hashlib.sha256()
    for part in (
        torch.__version__,
        sys.version,
        torch.__file__,
        *sources.keys(),
        *sources.values(),
        *_command("", Path(), Path()),
    ):
        digest.update(part.encode() + b"\0")
    version = torch.__version__.replace("+", "-")
    directory = cache_directory() / f"bridge-torch-{version}-{digest.hexdigest()[:16]}"
    library = directory / "bridge.so"
    if library.exists():
        return library
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one rank compiles, the others wait
        if library.exists():
            return library
        for name, text in sources.items():
            (directory / name).write_text(text)
        print(
            f"rote: compiling the bridge for torch {torch.__version__} (about a minute, once per torch version)",
            file=sys.stderr,
            flush=True,
        )
        partial = directory / f"bridge.{os.getpid()}.so"
        command = _command(_compiler(), directory / "bridge.cpp", partial)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(
                f"rote: the bridge does not compile against torch {torch.__version__}:\n{' '.join(command)}\n"
                f"{done.stderr[-4000:]}"
            )
        partial.rename(library)
    return library


@functools.cache
def bridge() -> Any:
    """The bridge as a Python module (module.h), built if need be, and loaded by the library too."""
    path = str(build())
    loader = ExtensionFileLoader("rote.bridge", path)
    module = module_from_spec(ModuleSpec("rote.bridge", loader, origin=path))
    loader.exec_module(module)
    module.init(DTensor, AsyncCollectiveTensor)
    check(lib.rote_load_bridge(path.encode()))
    return module
