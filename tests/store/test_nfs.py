"""The file store where it is meant to be: two mounts of one NFS export, as two hosts have them.

Needs `AEGIS_NFS_DIRS=/mnt/a:/mnt/b`, two mounts of the same export. On one machine they are two clients with
`-o nosharecache`, if the server gives no delegations (`/proc/sys/fs/leases-enable` 0): to the server they are
one client, whose own changes recall none.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from aegis_elastic.store.files import FileStore

DIRS = os.environ.get("AEGIS_NFS_DIRS", "").split(":")
# Clients remember for 3 to 60 s what a directory holds.
FRESH_S = 2.0

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(len(DIRS) != 2, reason="AEGIS_NFS_DIRS names no two mounts of one NFS export"),
]


def test_what_one_host_writes_every_other_sees_at_its_next_look() -> None:
    """Not half a minute later: a node that another job has tainted would be let in meanwhile."""

    async def story() -> None:
        name = f"store-{time.time_ns()}"
        here, there = [await FileStore.open(Path(folder) / name, timeout_s=30) for folder in DIRS]
        for _ in range(10):  # so that it is remembered that there is nothing
            assert await here.get("node.1") is None
            await asyncio.sleep(0.05)
        revision = await there.create("node.1", b"tainted")
        await seen(here, lambda value: value == b"tainted")
        revision = await there.update("node.1", b"free", revision)
        await seen(here, lambda value: value == b"free")
        await there.delete("node.1", revision)
        await seen(here, lambda value: value is None)
        async with here.watch("node") as watch:
            await there.create("node.1", b"again")
            change = await asyncio.wait_for(watch.__anext__(), FRESH_S)
            assert change.entry is not None and change.entry.value == b"again"
        await here.close()
        await there.close()

    asyncio.run(story())


async def seen(store: FileStore, right: Callable[[bytes | None], bool]) -> None:
    until = time.monotonic() + FRESH_S
    while True:
        entry = await store.get("node.1")
        found = entry.value if entry else None
        if right(found):
            return
        assert time.monotonic() < until, f"still {found!r} after {FRESH_S:g} s"
        await asyncio.sleep(0.05)
