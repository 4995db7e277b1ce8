"""What is the file store's own: crashes in the middle of a write, a lock not let go, clocks, rights."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from aegis_elastic.store.contract import KeyExists, StoreError, StoreUnavailable
from aegis_elastic.store.directory import ENTRIES, LOCK_FILE, REVISION_FILE, TEMPORARY, Directory, Head
from aegis_elastic.store.files import FileStore

# Writes as fast as it can until it is killed, and prints each write only after it was acknowledged.
WRITER = """
import asyncio, sys
from pathlib import Path
from aegis_elastic.store.contract import KeyExists, RevisionConflict
from aegis_elastic.store.files import FileStore

async def main():
    store = await FileStore.open(Path(sys.argv[1]))
    while True:
        entry = await store.get("count")
        try:
            if entry is None:
                revision = await store.create("count", b"1")
            else:
                revision = await store.update("count", b"%d" % (int(entry.value) + 1), entry.revision)
        except (KeyExists, RevisionConflict):
            continue
        print(revision, flush=True)

asyncio.run(main())
"""


@contextmanager
def writer(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(directory)], stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def printed_numbers(process: subprocess.Popen[bytes], lines: int) -> list[int]:
    assert process.stdout is not None
    return [int(process.stdout.readline()) for _ in range(lines)]


def test_writers_killed_at_any_moment_leave_whole_entries(tmp_path: Path) -> None:
    acknowledged: list[int] = []
    for life in range(4):
        with writer(tmp_path / "s") as one, writer(tmp_path / "s") as other:
            mine, others = printed_numbers(one, 20 + life), printed_numbers(other, 20)
            one.kill()
            assert one.stdout is not None
            mine += [int(line) for line in one.stdout.read().split()]
            others += printed_numbers(other, 5)  # its lock was released with it
            other.kill()
            assert other.stdout is not None
            others += [int(line) for line in other.stdout.read().split()]
            assert not set(mine) & set(others), "a revision was given twice"
            assert min(mine + others) > max(acknowledged, default=0), "revisions went back"
            acknowledged += mine + others

    async def check() -> None:
        store = await FileStore.open(tmp_path / "s")
        entry = await store.get("count")
        assert entry is not None
        # At most one write of each life was done without being printed.
        assert len(acknowledged) <= int(entry.value) <= len(acknowledged) + 8
        assert entry.revision >= max(acknowledged)
        await store.close()

    asyncio.run(check())


def test_a_stopped_holder_of_the_lock_costs_others_their_time_and_nothing_else(tmp_path: Path) -> None:
    holder = (
        "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, 2); print(flush=True); sys.stdin.read()"
    )

    async def scenario() -> None:
        store = await FileStore.open(tmp_path / "s", timeout_s=0.3)
        await store.create("a", b"1")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", holder, str(tmp_path / "s" / LOCK_FILE)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        await process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        for attempt in (store.create("b", b""), store.create("c", b"")):
            with pytest.raises(StoreUnavailable, match=r"no answer in 0\.3 s"):
                await attempt
        process.kill()
        await process.wait()
        # The first was under way and may have been done; the second had not begun, and must not be done now.
        assert (await store.get("a")) is not None
        assert (await store.get("c")) is None
        await store.close()

    asyncio.run(scenario())


def test_a_lease_from_another_kernel_is_timed_by_the_file_servers_clock(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = await FileStore.open(tmp_path / "s")
        await store.lease("leader", b"me", 30)
        file = tmp_path / "s" / ENTRIES / "leader"
        head, _, value = file.read_bytes().partition(b"\n")
        lease = msgspec.json.decode(head, type=Head)
        # As a host wrote it that shares only the directory: whose clock, since its start, says nothing here.
        for until_s, lives in ((lease.until_s, True), (lease.until_s - 31, False)):
            foreign = msgspec.structs.replace(lease, boot="another", until_boot_s=0.0, until_s=until_s)
            file.write_bytes(msgspec.json.encode(foreign) + b"\n" + value)
            assert ((await store.get("leader")) is not None) is lives
            assert (await store.list("") != ()) is lives
            if lives:
                with pytest.raises(KeyExists):
                    await store.create("leader", b"other")
        # On our own kernel a wall clock that is set doesn't matter at all.
        file.write_bytes(msgspec.json.encode(msgspec.structs.replace(lease, until_s=0.0)) + b"\n" + value)
        assert await store.get("leader") is not None
        await store.close()

    asyncio.run(scenario())


def test_damage_is_said_and_hides_nothing_else(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = await FileStore.open(tmp_path / "s")
        await store.create("good", b"1")
        for content in (b"", b"{}\n", b"no json", b"\xff\n", b'{"key": "bad", "revision": "x"}\nvalue'):
            (tmp_path / "s" / ENTRIES / "bad").write_bytes(content)
            with pytest.raises(StoreError, match=r"cannot read the entry .*delete the file"):
                await store.get("bad")
            with pytest.raises(StoreError, match="cannot read the entry"):
                await store.create("bad", b"")
            assert [entry.key for entry in await store.list("")] == ["good"]
        await store.delete("bad")
        await store.create("bad", b"better")
        (tmp_path / "s" / REVISION_FILE).write_bytes(b"")
        with pytest.raises(StoreError, match="holds no number; write one"):
            await store.create("next", b"")
        await store.close()

    asyncio.run(scenario())


def test_who_may_read_and_write(tmp_path: Path) -> None:
    async def scenario() -> None:
        old = os.umask(0o027)
        try:
            private = await FileStore.open(tmp_path / "deep" / "private")
            await private.create("a", b"")
            (tmp_path / "group").mkdir()
            (tmp_path / "group").chmod(0o770)
            group = await FileStore.open(tmp_path / "group")
            await group.create("a", b"")
        finally:
            os.umask(old)
        for name, expected in (("deep/private", 0o600), ("group", 0o660)):
            root = tmp_path / name
            files = [path for path in root.rglob("*") if path.is_file()]
            assert {path.name for path in files} == {LOCK_FILE, REVISION_FILE, "a"}
            assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {expected}
        assert stat.S_IMODE((tmp_path / "deep" / "private").stat().st_mode) == 0o700
        await private.close()
        await group.close()
        (tmp_path / "group").chmod(0o777)
        with pytest.raises(StoreError, match="everybody may write to it"):
            await FileStore.open(tmp_path / "group")
        (tmp_path / "file").touch()
        with pytest.raises(StoreUnavailable, match="cannot use the store in"):
            await FileStore.open(tmp_path / "file")

    asyncio.run(scenario())


def test_leftovers_of_the_dead_are_cleared_away_and_never_an_entry(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    directory.prepare()
    old, young = tmp_path / ENTRIES / f"{TEMPORARY}old", tmp_path / ENTRIES / f"{TEMPORARY}young"
    old.touch()
    young.touch()
    os.utime(old, (1, 1))
    directory.prepare()
    assert not old.exists()
    assert young.exists()
    assert directory.list("")[0] == []


def test_a_lock_file_that_somebody_deletes_locks_all_the_same(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = await FileStore.open(tmp_path / "s")
        for n in range(3):
            await store.create(f"k{n}", b"")
            (tmp_path / "s" / LOCK_FILE).unlink()
        assert [entry.revision for entry in await store.list("")] == [1, 2, 3]
        await store.close()
        with pytest.raises(StoreUnavailable, match="closed"):
            await store.get("k1")

    asyncio.run(scenario())


def test_long_keys_are_entries_like_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = await FileStore.open(tmp_path / "s")
        keys = ["n." + "a" * 500, "n." + "b" * 500, "n." + "a" * 198]
        for key in keys:
            await store.create(key, key.encode())
        assert [entry.key for entry in await store.list("n")] == sorted(keys)
        for key in keys:
            entry = await store.get(key)
            assert entry is not None
            assert entry.value == key.encode()
        await store.close()

    asyncio.run(scenario())
