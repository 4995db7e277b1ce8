"""The io check: can this node write where the training writes, and does it read back what it wrote?

All paths are tried side by side, since one dead mount must not hide faults of the next. Faults are
distinguished by the errno of the call that failed; a path that doesn't answer at all is named shortly before
the budget ends. The scope depends on the path's mount: storage that all nodes share is never one node's
fault. Times are recorded, and called slow only against those of peers.
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
from aegis_elastic.checks.contract.child_process import OnStep, Outcome, Scalar, failed, passed
from aegis_elastic.checks.contract.request import CheckRequest
from aegis_elastic.checks.host.mounts import Mount, mount_of, table

# Large enough for more than one block and stripe, small enough for a /dev/shm of a container.
PROBE_BYTES = 1 << 20
# Datasets are often mounted read-only: they are only read.
READ_ONLY_KINDS = frozenset({"data"})
# Share of the budget in which the paths must answer; the rest is for naming those that didn't.
ANSWER_SHARE = 0.95
# Storage is slow if it takes SLOW_FACTOR times as long as the peers' median, and longer than SLOW_S_MIN:
# twice a few milliseconds is noise.
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


class _PathResult(NamedTuple):
    """The result of one path."""

    kind: str
    finding: str
    scope: str
    text: str
    details: dict[str, Scalar]


def check(request: CheckRequest, on_step: OnStep) -> Outcome:
    """Write, sync, read back and verify in every given path; read only where the kind is "data".

    Details by kind ("checkpoint_..."): `path`, `fs_type`, `device`, `shared`, `open_s`, `write_s`, `read_s`
    (for `PROBE_BYTES`), `write_bytes_per_s`, `free_bytes`.
    """
    if not request.paths:
        return passed("io: no path was given to look at")
    budget = budget_s("io", request.budgets_s)
    deadline = time.monotonic() + budget * ANSWER_SHARE
    results: queue.SimpleQueue[_PathResult] = queue.SimpleQueue()
    # The paths with links resolved, as far as their threads have come.
    real_paths = dict(request.paths)

    def attempt(kind: str, path: str) -> None:
        real_paths[kind] = os.path.realpath(path)  # may hang, too
        results.put(_try(kind, path, request.worker))

    for kind, path in request.paths.items():
        # Threads of this child process, which ends with the last result or at its budget.
        threading.Thread(target=attempt, args=(kind, path), daemon=True).start()
    waiting = dict(request.paths)
    done: list[_PathResult] = []
    while waiting:
        on_step("waiting for " + _named(waiting))
        try:
            result = results.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            done.append(_hung(waiting, _mounts(real_paths), budget))
            break
        del waiting[result.kind]
        done.append(result)
    return _judge(done, _mounts(real_paths), request.peer_medians)


def _mounts(real_paths: Mapping[str, str]) -> dict[str, Mount]:
    mounts = table()
    return {kind: mount_of(path, mounts) for kind, path in real_paths.items()}


def _named(waiting: Mapping[str, str]) -> str:
    return ", ".join(f"{kind} {path}" for kind, path in waiting.items())


def _hung(waiting: Mapping[str, str], mounts: Mapping[str, Mount], budget: float) -> _PathResult:
    text = f"no answer in {budget:g} s (it was waiting for {_named(waiting)})"
    own = [kind for kind in waiting if not mounts[kind].shared]
    kind = (own or list(waiting))[0]
    details: dict[str, Scalar] = {"path": waiting[kind], "hangs": True}
    return _PathResult(kind, "io.timeout", "node" if own else "network", text, details)


def _judge(results: list[_PathResult], mounts: Mapping[str, Mount], medians: Mapping[str, float]) -> Outcome:
    details: dict[str, Scalar] = {}
    for kind, mount in mounts.items():
        details |= {
            f"{kind}_fs_type": mount.fs_type,
            f"{kind}_device": mount.source,
            f"{kind}_shared": mount.shared,
        }
    judged = []
    for result in results:
        details.update({f"{result.kind}_{key}": value for key, value in result.details.items()})
        judged.append(
            _with_scope_of_mount(result, mounts[result.kind])
            if result.finding
            else _compared_with_peers(result, medians)
        )
    bad = [result for result in judged if result.finding]
    if bad:
        bad.sort(key=lambda result: _GRAVEST_FIRST.index(result.scope))
        text = "; ".join(result.text for result in bad)
        return failed(bad[0].finding, bad[0].scope, f"io: {text}", details)
    return passed("io: " + "; ".join(result.text for result in judged), details)


def _with_scope_of_mount(result: _PathResult, mount: Mount) -> _PathResult:
    """The same with the scope that fits its mount."""
    if not mount.shared:
        return result
    text = f"{result.text} [{mount.fs_type} {mount.source}, shared by all nodes]"
    return result._replace(scope="network", text=text)


def _compared_with_peers(result: _PathResult, medians: Mapping[str, float]) -> _PathResult:
    """The same, or the finding "io.slow" if it took much longer than the peers' median."""
    for name in ("write_s", "read_s"):
        own_s, median_s = result.details.get(name), medians.get(f"{result.kind}_{name}")
        if isinstance(own_s, float) and median_s and own_s > max(SLOW_S_MIN, SLOW_FACTOR * median_s):
            text = (
                f"{result.kind} is slow: {name.removesuffix('_s')} took {own_s:.2f} s, peers {median_s:.2f} s"
            )
            return result._replace(finding="io.slow", scope="slow", text=text)
    return result


def _try(kind: str, path: str, worker: str) -> _PathResult:
    try:
        return _read_some(kind, path) if kind in READ_ONLY_KINDS else _write_and_verify(kind, path, worker)
    except (OSError, ValueError) as error:  # ValueError: a path that no system call accepts
        # A full disk can also show as EDQUOT of the project, a lost server as ENOTCONN (FUSE): see the table.
        finding, scope, meaning = _FAULTS.get(
            getattr(error, "errno", None) or 0, ("io.error", "unknown", str(error))
        )
        return _PathResult(
            kind, finding, scope, f"cannot use {kind} directory {path}: {meaning}", {"path": path}
        )


def _write_and_verify(kind: str, path: str, worker: str) -> _PathResult:
    directory = _nearest(path)
    name = os.path.join(
        directory, f".aegis-io-{worker.replace('/', '_')}-{os.getpid()}-{os.urandom(4).hex()}"
    )
    data = os.urandom(PROBE_BYTES)
    started = time.monotonic()
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    open_s = time.monotonic() - started
    try:
        started = time.monotonic()
        _write_all(fd, data)
        os.fsync(fd)
        write_s = time.monotonic() - started
        # Without this the kernel reads from its page cache, and storage that loses bytes looks healthy.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.monotonic()
        read_back = _read_all(fd, PROBE_BYTES)
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
        free_bytes=_free_bytes(directory),
    )
    if read_back != data:
        position = next(
            (i for i, (a, b) in enumerate(zip(read_back, data, strict=False)) if a != b), len(read_back)
        )
        text = f"{kind} directory {path} gave other bytes back than were written, from byte {position} on"
        return _PathResult(kind, "io.corrupt", "hardware", text, details)
    text = f"{kind} ok in {(write_s + read_s) * 1000:.0f} ms"
    if directory != path:
        text += f" ({path} is not there yet, {directory} was tried)"
    return _PathResult(kind, "", "", text, details)


def _read_some(kind: str, path: str) -> _PathResult:
    source = path
    if stat.S_ISDIR(os.stat(path).st_mode):
        with os.scandir(path) as entries:
            source = next((entry.path for entry in entries if entry.is_file()), "")
    if not source:
        return _PathResult(kind, "", "", f"{kind} ok (no file in it to read)", _details(path))
    started = time.monotonic()
    fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        count = len(_read_all(fd, PROBE_BYTES))
    finally:
        os.close(fd)
    read_s = time.monotonic() - started
    return _PathResult(
        kind,
        "",
        "",
        f"{kind} ok in {read_s * 1000:.0f} ms",
        _details(path, read_s=round(read_s, 6), read_bytes=count),
    )


def _nearest(path: str) -> str:
    """`path`, or the closest existing directory above it: trainings create theirs at the first save."""
    here = os.path.abspath(path)
    while True:
        try:
            os.lstat(here)
        except FileNotFoundError:  # nothing else: a stale mount exists, and is broken
            here = os.path.dirname(here)
        else:
            return path if here == os.path.abspath(path) else here


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read_all(fd: int, limit: int) -> bytes:
    """Up to `limit` bytes from the start, or from the current position of a pipe."""
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
