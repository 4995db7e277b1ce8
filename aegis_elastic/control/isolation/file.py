"""Isolation by a list in a file: one line a node, its name first, for whatever makes host lists of it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import stat
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from aegis_elastic.control.isolation.contract import MARK, Outcome

LINES_MAX = 100_000
_LOCK_RETRY_S = 0.05


class NodeFile:
    """`file:PATH`. Lines are `NODE # aegis: TIME REASON`; lines that somebody else wrote are kept as they
    are.

    Changed under a lock on `PATH.lock`, and replaced as a whole: a reader sees the old list or the new one.
    """

    name = "file"

    def __init__(self, path: str, timeout_s: float) -> None:
        """ValueError if there is no folder to write it in."""
        # What a link points to is what others read; the link stays.
        self._path = Path(path).expanduser().resolve()
        self._timeout_s = timeout_s
        if not self._path.parent.is_dir() or self._path.is_dir():
            raise ValueError(
                f"cannot keep a list of nodes in {self._path}: want a file in a folder that is there"
            )

    async def isolate(self, node: str, reason: str) -> Outcome:
        """See `Driver.isolate`."""
        when = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        text = reason.removeprefix(MARK).strip()

        def edit(lines: list[str]) -> list[str]:
            if any(_node(line) == node for line in lines):
                return lines
            return [*lines, f"{node} # {MARK} {when} {text}"]

        return await self._change(edit, f"{node} is listed in {self._path}")

    async def release(self, node: str) -> Outcome:
        """See `Driver.release`."""

        def edit(lines: list[str]) -> list[str]:
            kept = [line for line in lines if _node(line) != node or MARK not in line]
            if any(_node(line) == node for line in kept):
                raise ValueError(f"{node} stays in {self._path}: somebody else has listed it")
            return kept

        return await self._change(edit, f"{node} is not listed in {self._path}")

    async def _change(self, edit: Callable[[list[str]], list[str]], done: str) -> Outcome:
        until_s = time.monotonic() + self._timeout_s
        try:
            while not await asyncio.wait_for(
                # In a thread: the folder may be on a file server that takes its time.
                asyncio.to_thread(self._edit, edit),
                max(until_s - time.monotonic(), _LOCK_RETRY_S),
            ):
                if time.monotonic() >= until_s:
                    return Outcome(False, f"cannot change {self._path}: somebody holds its lock")
                await asyncio.sleep(_LOCK_RETRY_S)
        except asyncio.TimeoutError:
            return Outcome(False, f"cannot change {self._path}: no answer in {self._timeout_s:g} s")
        except OSError as error:
            return Outcome(False, f"cannot change {self._path}: {error.strerror or error}")
        except ValueError as error:
            return Outcome(False, str(error))
        return Outcome(True, done)

    def _edit(self, edit: Callable[[list[str]], list[str]]) -> bool:
        """Change the list; returns False if the lock is somebody's: flock has no timeout, so it isn't waited
        for here.
        """
        lock = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
            after = edit(lines)
            if len(after) > LINES_MAX:
                raise ValueError(f"cannot list more nodes in {self._path}: it has {len(lines)} lines")
            if after != lines:
                self._replace("".join(f"{line}\n" for line in after))
        except BlockingIOError:
            return False
        finally:
            os.close(lock)
        return True

    def _replace(self, text: str) -> None:
        """Whoever may read the list may do so afterwards, too."""
        mode = stat.S_IMODE(self._path.stat().st_mode) if self._path.exists() else 0o644
        new = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with open(new, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(new, mode)
        os.replace(new, self._path)


def _node(line: str) -> str:
    return line.partition("#")[0].strip()
