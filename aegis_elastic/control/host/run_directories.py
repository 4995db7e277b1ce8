"""Where a job's files are, and how another process of the same user finds them.

    <user state dir>/aegis/<namespace>/<job>/current            the newest run directory of that job
    <user state dir>/aegis/<namespace>/<job>/<generation>/      its default run directory

`current` is a small JSON file rather than a link: a run directory given by `--aegis-run-dir` may lie
anywhere. Everything is 0700 or 0600, because a run directory holds the credentials that can end a job.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from aegis_elastic.bus.credentials import write_private
from aegis_elastic.bus.subjects import escape
from aegis_elastic.control.host.errors import BadRecord, NoSuchJob, UsageError

CURRENT = "current"
# A file name has at most 255 bytes everywhere that matters, and an escaped name may be three times as long.
_NAME_BYTES_MAX = 200


class Registration(msgspec.Struct, frozen=True, rename="camel"):
    """What `current` says: the newest run of a job. `run_dir` is absolute."""

    run_dir: str
    namespace: str
    job: str
    generation: int

    @property
    def path(self) -> Path:
        """The run directory."""
        return Path(self.run_dir)


def user_state_dir() -> Path:
    """The directory for this user's state, without making it.

    `$XDG_STATE_HOME` or `~/.local/state`. Where neither can be written (containers with a home of `/`), a
    directory of the user's own in the temporary directory, so that such a place is no reason not to train.
    """
    wanted = os.environ.get("XDG_STATE_HOME", "")
    # The XDG specification: a relative path there is invalid and is to be ignored.
    home = Path(wanted) if os.path.isabs(wanted) else _home() / ".local" / "state"
    if _usable(home):
        return home
    return Path(tempfile.gettempdir()) / f"aegis-{os.getuid()}"


def job_dir(namespace: str, job: str) -> Path:
    """The directory of a job's own under the user's state directory, without making it."""
    return user_state_dir() / "aegis" / file_name(namespace) / file_name(job)


def default_run_dir(namespace: str, job: str, generation: int) -> Path:
    """The run directory of one generation where the user names none, without making it."""
    return job_dir(namespace, job) / str(generation)


def file_name(name: str) -> str:
    """A file name for `name`, whatever characters it has; different names, different file names.

    `bus.subjects.unescape` turns it back, except for very long ones: those are cut and told apart by a digest
    (the `current` file says the whole name). ValueError for an empty name.
    """
    escaped = escape(name)
    if len(escaped) <= _NAME_BYTES_MAX:
        return escaped
    # `+` never comes out of `escape`, so no short name can be mistaken for a cut one.
    return f"{escaped[:100]}+{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def make_private(directory: Path) -> Path:
    """Make `directory` (and what is missing above it) with mode 0700; returns it.

    One that is there already keeps its mode, but must be the user's own and writable by nobody else, since
    its writer could put credentials of their own there. UsageError otherwise, or if it can't be made.
    """
    try:
        for path in reversed([p for p in (directory, *directory.parents) if not p.exists()]):
            path.mkdir(mode=0o700, exist_ok=True)
        link_owner, found = directory.lstat().st_uid, directory.stat()
    except OSError as error:
        raise UsageError(f"cannot make the directory {directory}: {error.strerror or error}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise UsageError(f"cannot use {directory}: it is no directory")
    if found.st_uid != os.getuid() or link_owner not in (os.getuid(), 0):
        owners = ", ".join(str(uid) for uid in sorted({found.st_uid, link_owner}))
        raise UsageError(
            f"cannot use {directory}: it belongs to user id {owners}, not to you ({os.getuid()})"
        )
    if found.st_mode & 0o022:
        raise UsageError(
            f"cannot use {directory}: others may write there (mode {stat.S_IMODE(found.st_mode):o}); "
            f"want 0700, so: chmod go-w {directory}"
        )
    return directory


def register(namespace: str, job: str, generation: int, run_dir: Path) -> Registration:
    """Make `run_dir` the one that `aegisctl` finds for this job. UsageError if that can't be written."""
    registration = Registration(str(run_dir.absolute()), namespace, job, generation)
    directory = make_private(job_dir(namespace, job))
    try:
        write_private(directory / CURRENT, msgspec.json.encode(registration))
    except OSError as error:
        raise UsageError(f"cannot register the job in {directory}: {error.strerror or error}") from error
    return registration


def registrations(namespace: str | None = None) -> Iterator[Registration]:
    """Every job of this user that was ever registered here, newest first; of one namespace if given.

    A registration that can't be read, or whose run directory is gone, is passed over: it leads nowhere.
    """
    root = user_state_dir() / "aegis"
    found = []
    for current in root.glob(f"{'*' if namespace is None else file_name(namespace)}/*/{CURRENT}"):
        try:
            changed, registration = current.stat().st_mtime, _read(current)
        except (OSError, BadRecord):
            continue
        if registration.path.is_dir():
            found.append((changed, registration))
    found.sort(key=lambda pair: pair[0], reverse=True)
    return (registration for _, registration in found)


def find(job: str, namespace: str | None = None) -> Registration:
    """The newest run of `job`, in `namespace` or, without one, in whichever has it.

    NoSuchJob if there is none; UsageError if several namespaces have it.
    """
    if not job:
        raise UsageError("cannot find a job without a name: give --job NAME")
    matching = [r for r in registrations(namespace) if r.job == job]
    if not matching:
        where = "" if namespace is None else f" in namespace {namespace!r}"
        raise NoSuchJob(f"cannot find job {job!r}{where}: no run of that name is registered here{_known()}")
    if len(matching) > 1:
        spaces = ", ".join(sorted(repr(r.namespace) for r in matching))
        raise UsageError(f"cannot tell which {job!r} is meant: namespaces {spaces} have one; add --namespace")
    return matching[0]


def _known() -> str:
    names = [r.job for r in registrations()][:5]
    return f" (newest: {', '.join(names)})" if names else ""


def _read(current: Path) -> Registration:
    try:
        return msgspec.json.decode(current.read_bytes(), type=Registration)
    except msgspec.DecodeError as error:
        raise BadRecord(f"cannot read {current}: {error}") from error


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # a user id without an entry in the password file, and no HOME
        return Path("/nonexistent")


def _usable(directory: Path) -> bool:
    nearest = next(path for path in (directory, *directory.parents) if path.exists())
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
