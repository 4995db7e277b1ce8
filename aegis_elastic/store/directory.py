"""Entries in a directory that several hosts may share, without a server: the blocking part of `files`.

There is one file for each entry, and one lock for all. A change is made under the lock: a new file is written
and synced beside the old one, then renamed over it, so that a reader without the lock, and a host that loses
its power, see the old entry or the new one and never a part. `revision` holds the newest revision and is
replaced in the same way *before* the entry: a writer that dies in between has only used up a number.

On a network file system (NFS):

* flock is the server's there (Linux makes a byte-range lock of it), unless mounted with
  `local_lock`/`nolock`.
* A client caches which names a directory has, and which not, for up to a minute. Opening the directory makes
  it ask the server, and so does a change of our own: one of them precedes every read of an entry. And
  creating uses link(), of which the server lets one succeed.
* Clocks of hosts differ. Leases are timed by the file server's clock (the time of a file touched now), or, on
  the same kernel, by the time since its boot, which nobody can set. Not covered: a server whose clock is set
  forward ends leases early. Their holders notice at the next refresh, and an action that must not be done
  twice is fenced by a compare-and-swap anyway.
* There is no notification of another host's change. So a watch polls `revision`, a file of some bytes, twice
  a
  second: inotify reports nothing on network file systems, where this store is needed.

The lock is flock itself and not the package filelock: releases of that package differ in whether they delete
the lock file and whether they fall back to another kind of lock, and the nodes of a cluster must agree on
both.
"""

import fcntl
import hashlib
import logging
import math
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from aegis_elastic.store.values import (
    Entry,
    KeyExists,
    LeaseLost,
    RevisionConflict,
    StoreError,
    below,
)

logger = logging.getLogger(__name__)

# Longer keys are files named by their digest: names have 255 characters at most.
NAME_CHARS_MAX = 200
# Files that a dying writer has left are removed when older than this.
LEFTOVER_S = 3600.0
LOCK_FILE, REVISION_FILE, ENTRIES = "lock", "revision", "entries"
# No key begins with a dot.
TEMPORARY = ".new-"


class Head(msgspec.Struct, frozen=True, omit_defaults=True):
    """First line of an entry's file. `holder` "" is no lease; `until_s` by the file server's clock,
    `until_boot_s` by that of the kernel whose start is `boot`.
    """

    key: str
    revision: int
    holder: str = ""
    until_s: float = 0.0
    boot: str = ""
    until_boot_s: float = 0.0


class StoredEntry(NamedTuple):
    """The content of an entry's file."""

    head: Head
    value: bytes

    @property
    def entry(self) -> Entry:
        """The entry, as the contract defines it."""
        return Entry(self.head.key, self.value, self.head.revision)


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Head).decode


class Directory:
    """The files and the lock. All methods block; they raise OSError of the file system, and the contract's
    `StoreError`s.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries = path / ENTRIES
        self._mode = 0o600
        self._boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()

    def prepare(self) -> None:
        """Create directory and lock; StoreError if everybody may write there: anybody could forge entries."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = self.path.stat().st_mode
        if mode & stat.S_IWOTH:
            raise StoreError(f"cannot use {self.path} as a store: everybody may write to it (chmod o-w)")
        shared = bool(mode & stat.S_IWGRP)
        self._mode = 0o660 if shared else 0o600
        if not self._entries.is_dir():
            self._entries.mkdir(exist_ok=True)
            self._entries.chmod(0o2770 if shared else 0o700)
        with self._locked():
            for left in self._entries.glob(f"{TEMPORARY}*"):
                if self._now_s() - left.stat().st_mtime > LEFTOVER_S:
                    left.unlink()

    def revision(self) -> int:
        """The newest revision, 0 before the first write."""
        _revalidate(self.path)
        try:
            return int((self.path / REVISION_FILE).read_bytes())
        except FileNotFoundError:
            return 0
        except ValueError:
            raise StoreError(
                f"cannot read {self.path / REVISION_FILE}: it holds no number; write one into it "
                "that is higher than any entry's"
            ) from None

    def read(self, key: str) -> StoredEntry | None:
        """The entry, None if there is none or its lease has expired."""
        _revalidate(self._entries)
        stored = self._load(self._file(key))
        return stored if stored is not None and self.left_s(stored.head) > 0 else None

    def list(self, prefix: str) -> tuple[Sequence[StoredEntry], float]:
        """All entries below the prefix, in order, and the seconds until the first lease among them ends."""
        wanted = below(prefix)
        found, ends_s = [], math.inf
        for file in self._entries.iterdir():
            if file.name.startswith(TEMPORARY):
                continue
            try:
                stored = self._load(file)
            except StoreError as error:
                # One damaged entry must not hide all others.
                logger.error("left out: %s", error)
                continue
            if stored is not None and wanted(stored.head.key) and (left_s := self.left_s(stored.head)) > 0:
                found.append(stored)
                ends_s = min(ends_s, left_s)
        return sorted(found, key=lambda stored: stored.head.key), ends_s

    def create(self, key: str, value: bytes, holder: str, ttl_s: float) -> int:
        """Create the entry, leased for `ttl_s` if there is a `holder`; returns its revision."""
        with self._locked(), self._new_file() as new:
            file = self._file(key)
            old = self._load(file)
            if old is not None:
                if self.left_s(old.head) > 0:
                    raise KeyExists(f"cannot create {key}: it is there")
                file.unlink()
            head = Head(key, self._next_revision())
            self._write(new, self._extended(head, holder, ttl_s) if holder else head, value)
            try:
                os.link(new, file)
            except FileExistsError:
                raise KeyExists(f"cannot create {key}: another host has just done it") from None
            self._sync_entries()
            return head.revision

    def update(self, key: str, value: bytes, revision: int) -> int:
        """Replace the entry at `revision`; returns the new one. A lease on it stays as it is."""
        with self._locked(), self._new_file() as new:
            old = self.read(key)
            if old is None or old.head.revision != revision:
                found = f"it is at {old.head.revision}" if old else "it is gone"
                raise RevisionConflict(f"cannot update {key} at revision {revision}: {found}")
            head = msgspec.structs.replace(old.head, revision=self._next_revision())
            self._replace(new, head, value)
            return head.revision

    def delete(self, key: str, revision: int | None, holder: str = "") -> None:
        """Remove the entry; only if it has `revision`, and only if it is `holder`'s, when given."""
        with self._locked(), self._new_file():
            file = self._file(key)
            if not file.exists():
                return
            if revision is not None or holder:
                old = self.read(key)
                if old is None or (holder and old.head.holder != holder):
                    return
                if revision not in (None, old.head.revision):
                    found = old.head.revision
                    raise RevisionConflict(f"cannot delete {key} at revision {revision}: it is at {found}")
            self._next_revision()  # so that watches notice it
            file.unlink()
            self._sync_entries()

    def refresh(self, key: str, holder: str, ttl_s: float) -> None:
        """Extend the lease to `ttl_s` from now; LeaseLost if it isn't the holder's any more."""
        with self._locked(), self._new_file() as new:
            old = self.read(key)
            if old is None or old.head.holder != holder:
                raise LeaseLost(f"cannot refresh the lease on {key}: it is gone or another's")
            self._replace(new, self._extended(old.head, holder, ttl_s), old.value)

    def left_s(self, head: Head) -> float:
        """Seconds until the entry's lease ends; infinite without a lease."""
        if not head.holder:
            return math.inf
        if head.boot == self._boot:
            return head.until_boot_s - _boot_s()
        return head.until_s - self._now_s()

    def _extended(self, head: Head, holder: str, ttl_s: float) -> Head:
        return msgspec.structs.replace(
            head,
            holder=holder,
            until_s=self._now_s() + ttl_s,
            boot=self._boot,
            until_boot_s=_boot_s() + ttl_s,
        )

    def _now_s(self) -> float:
        """The file server's clock: the time that it gives to a file touched now."""
        os.utime(self.path / LOCK_FILE)
        return (self.path / LOCK_FILE).stat().st_mtime

    def _file(self, key: str) -> Path:
        if len(key) > NAME_CHARS_MAX:
            return self._entries / f"~{hashlib.sha256(key.encode()).hexdigest()}"
        return self._entries / key

    def _load(self, file: Path) -> StoredEntry | None:
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            return None
        head, newline, value = content.partition(b"\n")
        try:
            if not newline:
                raise ValueError("it is cut off")
            return StoredEntry(_decode(head), value)
        except ValueError as error:
            raise StoreError(f"cannot read the entry {file}: {error}; delete the file to go on") from error

    def _next_revision(self) -> int:
        revision = self.revision() + 1
        new = self.path / f"{TEMPORARY}{REVISION_FILE}"  # one name, since we hold the lock
        self._write_synced(new, b"%d" % revision)
        os.replace(new, self.path / REVISION_FILE)
        _sync(self.path)
        return revision

    def _replace(self, new: Path, head: Head, value: bytes) -> None:
        self._write(new, head, value)
        os.replace(new, self._file(head.key))
        self._sync_entries()

    def _write(self, file: Path, head: Head, value: bytes) -> None:
        self._write_synced(file, _encode(head) + b"\n" + value)

    def _write_synced(self, file: Path, content: bytes) -> None:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, self._mode)
        with os.fdopen(descriptor, "wb") as out:
            os.fchmod(descriptor, self._mode)  # whatever the umask
            out.write(content)
            out.flush()
            os.fsync(descriptor)

    def _sync_entries(self) -> None:
        _sync(self._entries)

    @contextmanager
    def _new_file(self) -> Iterator[Path]:
        """An empty file beside the entries, removed afterwards. Creating it also invalidates a network file
        system client's cache of the directory, so it precedes the read of an entry.
        """
        new = self._entries / f"{TEMPORARY}{secrets.token_hex(8)}"
        os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._mode))
        try:
            yield new
        finally:
            new.unlink(missing_ok=True)  # gone if it was renamed to an entry

    @contextmanager
    def _locked(self) -> Iterator[None]:
        path = self.path / LOCK_FILE
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, self._mode)
            try:
                if os.fstat(descriptor).st_uid == os.geteuid():
                    os.fchmod(descriptor, self._mode)  # whatever the umask
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                # Somebody may have deleted the lock file while we waited: then it excludes nobody.
                if not _is_at(descriptor, path):
                    continue
                yield
                return
            finally:
                os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _revalidate(directory: Path) -> None:
    """Make a network file system's client validate its cache of the directory."""
    os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY))


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
