"""Machines to check: a C compiler for stand-ins, small file systems, a store for collectives to meet at."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.checks.support import compile_c

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def compiler() -> str:
    """The C compiler."""
    found = shutil.which("cc") or shutil.which("gcc")
    if found is None:
        why = "there is no C compiler for the stand-ins of driver libraries"
        if os.environ.get("AEGIS_REQUIRE_ALL") == "1":
            pytest.fail(why)
        pytest.skip(why)
    return found


@pytest.fixture(scope="session")
def libraries(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for LD_LIBRARY_PATH with stand-ins for NVIDIA's management and driver libraries."""
    folder = tmp_path_factory.mktemp("nvidia")
    for source, target in (("fake_nvml.c", "libnvidia-ml.so.1"), ("fake_cuda.c", "libcuda.so.1")):
        compile_c(compiler, HERE / source, folder / target, "-shared", "-fPIC")
    return folder


@pytest.fixture
def mount(tmp_path: Path, unmet: Callable[[str], None]) -> Iterator[Callable[..., Path]]:
    """`mount(name, *options)`: a mounted folder; unmounted after the test. Needs root."""
    with ExitStack() as undo:

        def mounted(name: str, *options: str) -> Path:
            folder = tmp_path / name
            folder.mkdir()
            done = subprocess.run(["mount", *options, folder], capture_output=True, text=True)
            if done.returncode != 0:
                unmet(f"this machine can't mount {' '.join(options)}: {done.stderr.strip()}")
            undo.callback(lambda: subprocess.run(["umount", folder], check=True))
            return folder

        yield mounted
