"""The guard over the real stores: two processes that come to the same conclusion at the same time."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.store.backends import Backend, Etcd, JetStream, missing, running

NODES = 4
FOR_S = 2.5
ROOT = Path(__file__).resolve().parents[3]


def settings(kind: str, backend: Backend, folder: Path) -> dict[str, Any]:
    if isinstance(backend, Etcd):
        return {"kind": kind, "at": f"127.0.0.1:{backend.port}"}
    if isinstance(backend, JetStream):
        keys = folder / "keys.json"
        backend._keys.save(keys)
        return {"kind": kind, "at": backend.server.url, "keys": str(keys)}
    return {"kind": kind, "at": str(folder / "store")}


async def race(kind: str, folder: Path, dies: bool) -> list[list[str]]:
    """The actions, a line each: node, who, and the lock's token."""
    acts = folder / "acts"
    async with running(kind, folder) as backend:
        both = []
        for name in ("one", "other"):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.control.controllers.racer"),
                cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            assert process.stdin is not None
            assert process.stdout is not None
            line = {
                "name": name,
                "acts": str(acts),
                "nodes": NODES,
                "for_s": FOR_S,
                "dies": dies and name == "one",
            }
            process.stdin.write(json.dumps(line | settings(kind, backend, folder)).encode() + b"\n")
            both.append(process)
        try:
            for process in both:
                assert process.stdout is not None
                assert await asyncio.wait_for(process.stdout.readline(), 30) == b"ready\n"
            for process in both:
                assert process.stdin is not None
                process.stdin.write(b"go\n")
            codes = [await asyncio.wait_for(process.wait(), 30) for process in both]
        finally:
            for process in both:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
    lines = [line.split() for line in acts.read_text().splitlines()]
    died = [line for line in lines if line[1] == "one"] if dies else []
    assert codes == [9 if died else 0, 0]
    return lines


@pytest.mark.parametrize(
    ("kind", "dies"),
    [
        ("files", False),
        ("jetstream", False),
        ("etcd", False),
        ("files", True),
        pytest.param("jetstream", True, marks=pytest.mark.full),
        pytest.param("etcd", True, marks=pytest.mark.full),
    ],
)
def test_of_two_processes_one_acts_on_each_node(
    tmp_path: Path, unmet: Callable[[str], None], kind: str, dies: bool
) -> None:
    why = missing(kind)
    if why is not None:
        unmet(why)
    acts = asyncio.run(asyncio.wait_for(race(kind, tmp_path, dies), 90))
    print(f"{kind}: {acts}")
    done = Counter(node for node, _, _ in acts)
    if dies:
        # What the dead one has counted and not done isn't done by the other either: perhaps it was.
        assert max(done.values()) == 1, "never twice, also where the first has died in the middle of it"
    else:
        assert done == {f"node-{n}": 1 for n in range(NODES)}
