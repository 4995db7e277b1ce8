"""Storage: can this node write where the training writes, and does it read back what it wrote?

Every path is tried side by side, since one dead mount must not hide what is wrong with the next. What tells
the faults apart is the errno of the call that failed; a path that doesn't answer at all is named shortly
before the budget ends. Whose fault it is depends on where the path lies: storage that all nodes share is
never one node's fault. Figures are told, and called slow only against those of peers.
"""

from __future__ import annotations

import errno
import os
import queue
import stat
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

from aegis_elastic.checks.contract.budgets import budget_s
from aegis_elastic.checks.contract.child_process import Note, Outcome, Scalar, failed, passed
from aegis_elastic.checks.contract.request import CheckRequest
from aegis_elastic.checks.host.mounts import Mount, mount_of, table

# Large enough for more than one block and stripe, small enough for a /dev/shm of a container.
PROBE_BYTES = 1 << 20
# Datasets are often mounted read-only: they are only read.
READ_ONLY_KINDS = frozenset({"data"})
# Of the budget, for the paths to answer; the rest is for saying which didn't.
ANSWER_SHARE = 0.95
# Storage is called slow when it takes so many times as long as the peers' median takes, and longer than that
# many seconds: twice a few milliseconds is noise, and no training feels it.
SLOW_FACTOR, SLOW_S_MIN = 4.0, 0.5

# errno -> (finding, scope on this node's own storage, what it means)
_FAULTS = {
    errno.ENOSPC: ("io.no_space", "node", "no space left"),
    errno.EDQUOT: ("io.quota", "node", "the disk quota is used up"),
    errno.EROFS: ("io.read_only", "node", "the file system is read-only"),
    errno.ESTALE: ("io.stale", "network", "stale file handle: the mount has lost its server"),
    errno.EACCES: ("io.denied", "node", "permission denied"),
    errno.EPERM: ("io.denied", "node", "operation not permitted"),
    errno.ENOENT: ("io.missing", "node", "it is not there"),
    errno.ENOTDIR: ("io.missing", "node", "it is not a directory"),
    errno.ENOTCONN: ("io.stale", "network", "the mount has lost its server"),
    errno.EIO: ("io.error", "hardware", "input/output error"),
    errno.EMFILE: ("io.no_files", "node", "too many open files"),
    errno.ENFILE: ("io.no_files", "node", "the node has too many open files"),
    errno.ETIMEDOUT: ("io.stale", "network", "its server doesn't answer"),
    errno.EHOSTDOWN: ("io.stale", "network", "its server is down"),
}
_GRAVEST_FIRST = ("hardware", "node", "network", "unknown", "slow")


class _Answer(NamedTuple):
    """What one path said."""

    kind: str
    finding: str
    scope: str
    text: str
    details: dict[str, Scalar]


def check(request: CheckRequest, note: Note) -> Outcome:
    """Write, sync, read back and verify in every given path; read only where the kind is "data".

    Details by kind ("checkpoint_..."): `path`, `fs_type`, `device`, `shared`, `open_s`, `write_s`, `read_s`
    (for `PROBE_BYTES`), `write_bytes_per_s`, `free_bytes`.
    """
    if not request.paths:
        return passed("io: no path was given to look at")
    budget = budget_s("io", request.budgets_s)
    deadline = time.monotonic() + budget * ANSWER_SHARE
    answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
    # Where the paths really lie, as far as their threads have come.
    places = dict(request.paths)

    def attempt(kind: str, path: str) -> None:
        places[kind] = os.path.realpath(path)  # may hang like anything else
        answers.put(_try(kind, path, request.worker))

    for kind, path in request.paths.items():
        # Owned by this child process, which ends with the last answer or at its budget.
        threading.Thread(target=attempt, args=(kind, path), daemon=True).start()
    waiting = dict(request.paths)
    done: list[_Answer] = []
    while waiting:
        note("waiting for " + _named(waiting))
        try:
            answer = answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            done.append(_hung(waiting, _mounts(places), budget))
            break
        del waiting[answer.kind]
        done.append(answer)
    return _judge(done, _mounts(places), request.peer_medians)


def _mounts(places: Mapping[str, str]) -> dict[str, Mount]:
    mounts = table()
    return {kind: mount_of(place, mounts) for kind, place in places.items()}


def _named(waiting: Mapping[str, str]) -> str:
    return ", ".join(f"{kind} {path}" for kind, path in waiting.items())


def _hung(waiting: Mapping[str, str], where: Mapping[str, Mount], budget: float) -> _Answer:
    text = f"no answer in {budget:g} s (it was waiting for {_named(waiting)})"
    own = [kind for kind in waiting if not where[kind].shared]
    kind = (own or list(waiting))[0]
    details: dict[str, Scalar] = {"path": waiting[kind], "hangs": True}
    return _Answer(kind, "io.timeout", "node" if own else "network", text, details)


def _judge(answers: list[_Answer], where: Mapping[str, Mount], medians: Mapping[str, float]) -> Outcome:
    details: dict[str, Scalar] = {}
    for kind, mount in where.items():
        details |= {
            f"{kind}_fs_type": mount.fs_type,
            f"{kind}_device": mount.source,
            f"{kind}_shared": mount.shared,
        }
    judged = []
    for answer in answers:
        details.update({f"{answer.kind}_{key}": value for key, value in answer.details.items()})
        judged.append(_placed(answer, where[answer.kind]) if answer.finding else _compared(answer, medians))
    bad = [answer for answer in judged if answer.finding]
    if bad:
        bad.sort(key=lambda answer: _GRAVEST_FIRST.index(answer.scope))
        text = "; ".join(answer.text for answer in bad)
        return failed(bad[0].finding, bad[0].scope, f"io: {text}", details)
    return passed("io: " + "; ".join(answer.text for answer in judged), details)


def _placed(answer: _Answer, mount: Mount) -> _Answer:
    """The same with the scope that fits its place."""
    if not mount.shared:
        return answer
    text = f"{answer.text} [{mount.fs_type} {mount.source}, shared by all nodes]"
    return answer._replace(scope="network", text=text)


def _compared(answer: _Answer, medians: Mapping[str, float]) -> _Answer:
    """Slow, if it takes much longer than the peers' median does."""
    for name in ("write_s", "read_s"):
        mine, usual = answer.details.get(name), medians.get(f"{answer.kind}_{name}")
        if isinstance(mine, float) and usual and mine > max(SLOW_S_MIN, SLOW_FACTOR * usual):
            text = f"{answer.kind} is slow: {name.removesuffix('_s')} took {mine:.2f} s, peers {usual:.2f} s"
            return answer._replace(finding="io.slow", scope="slow", text=text)
    return answer


def _try(kind: str, path: str, worker: str) -> _Answer:
    try:
        return _read_some(kind, path) if kind in READ_ONLY_KINDS else _write_and_verify(kind, path, worker)
    except (OSError, ValueError) as error:  # ValueError: a path that no system call would take
        # A full disk can also show as EDQUOT of the project, a lost server as ENOTCONN (FUSE): see the table.
        finding, scope, meaning = _FAULTS.get(
            getattr(error, "errno", None) or 0, ("io.error", "unknown", str(error))
        )
        return _Answer(kind, finding, scope, f"cannot use {kind} directory {path}: {meaning}", {"path": path})


def _write_and_verify(kind: str, path: str, worker: str) -> _Answer:
    where = _nearest(path)
    name = os.path.join(where, f".aegis-io-{worker.replace('/', '_')}-{os.getpid()}-{os.urandom(4).hex()}")
    data = os.urandom(PROBE_BYTES)
    started = time.monotonic()
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    open_s = time.monotonic() - started
    try:
        started = time.monotonic()
        _write_all(fd, data)
        os.fsync(fd)
        write_s = time.monotonic() - started
        # Without this the kernel answers from its own memory, and a storage that loses bytes looks healthy.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.monotonic()
        back = _read_all(fd, PROBE_BYTES)
        read_s = time.monotonic() - started
    finally:
        try:
            os.unlink(name)
        finally:
            os.close(fd)
    details = _details(
        path,
        open_s=round(open_s, 6),
        write_s=round(write_s, 6),
        read_s=round(read_s, 6),
        write_bytes_per_s=round(PROBE_BYTES / max(write_s, 1e-6)),
        free_bytes=_free_bytes(where),
    )
    if back != data:
        at = next((i for i, (a, b) in enumerate(zip(back, data, strict=False)) if a != b), len(back))
        text = f"{kind} directory {path} gave other bytes back than were written, from byte {at} on"
        return _Answer(kind, "io.corrupt", "hardware", text, details)
    text = f"{kind} ok in {(write_s + read_s) * 1000:.0f} ms"
    if where != path:
        text += f" ({path} is not there yet, {where} was tried)"
    return _Answer(kind, "", "", text, details)


def _read_some(kind: str, path: str) -> _Answer:
    source = path
    if stat.S_ISDIR(os.stat(path).st_mode):
        with os.scandir(path) as entries:
            source = next((entry.path for entry in entries if entry.is_file()), "")
    if not source:
        return _Answer(kind, "", "", f"{kind} ok (no file in it to read)", _details(path))
    started = time.monotonic()
    fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        count = len(_read_all(fd, PROBE_BYTES))
    finally:
        os.close(fd)
    read_s = time.monotonic() - started
    return _Answer(
        kind,
        "",
        "",
        f"{kind} ok in {read_s * 1000:.0f} ms",
        _details(path, read_s=round(read_s, 6), read_bytes=count),
    )


def _nearest(path: str) -> str:
    """`path`, or the closest directory above it: trainings make their directories at the first save."""
    here = os.path.abspath(path)
    while True:
        try:
            os.lstat(here)
        except FileNotFoundError:  # and nothing else: a stale mount is there, and broken
            here = os.path.dirname(here)
        else:
            return path if here == os.path.abspath(path) else here


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read_all(fd: int, limit: int) -> bytes:
    """Up to `limit` bytes from the start (or from here, where a thing has no start: a pipe)."""
    try:
        os.lseek(fd, 0, os.SEEK_SET)
    except OSError as error:
        if error.errno != errno.ESPIPE:
            raise
    parts: list[bytes] = []
    while limit > 0 and (part := os.read(fd, limit)):
        parts.append(part)
        limit -= len(part)
    return b"".join(parts)


def _free_bytes(path: str) -> int:
    volume = os.statvfs(path)
    return volume.f_bavail * volume.f_frsize


def _details(path: str, **values: Scalar) -> dict[str, Scalar]:
    return {"path": path, **values}
