"""Starting ranks, and finding and signalling their descendants. Part of the guard program, stdlib only.

``guard.py`` has the event loop and the theory.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket

# typing costs a third of the guard's start; the annotations below are never evaluated
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
EXIT_NOT_STARTED = 127
GATE = b"AEGIS_WORKER_GATE"  # read by a rank's sitecustomize
# a variable at the end of a spare's initial environment, which the gate overwrites with the variables that
# come with "go", so that /proc/<pid>/environ shows them as a cold rank's does
ENVIRON_PADDING = b"AEGIS_WORKER_ROOM"
ENVIRON_PADDING_BYTES = 4096

_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, argument: int) -> None:
    """Call prctl(2). Raises OSError."""
    if _libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def descendants(root: int, without: frozenset[int] = frozenset()) -> dict[int, str]:
    """All living and unreaped descendants of ``root``: pid -> state letter (``Z``: a zombie).

    ``without``: pids that are left out together with everything below them.
    """
    children: dict[int, list[int]] = {}
    states: dict[int, str] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb", buffering=0) as file:
                # the name in parentheses may hold anything, even ")": fields start after the last one
                state, parent = file.read(4096).rpartition(b")")[2].split(None, 2)[:2]
        except (OSError, ValueError):
            continue  # it ended while we looked: its children are on the next list
        states[int(name)] = state.decode()
        children.setdefault(int(parent), []).append(int(name))
    found: dict[int, str] = {}
    todo = [root]
    while todo:
        for pid in children.get(todo.pop(), ()):
            if pid not in found and pid not in without:
                found[pid] = states[pid]
                todo.append(pid)
    return found


def send_signal(pid: int, signum: int) -> bool:
    """Signal a process that may have ended or, being setuid, may be out of reach; returns whether it was
    sent.
    """
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def programs_of(leader: int) -> list[int]:
    """The pids that get a signal for a rank: the rank, and the programs that it runs in its process group.

    A wrapper script's program is one. The helper processes of a Python program (forks of it, those of
    ``multiprocessing``) are none: a DataLoader worker that dies of a SIGTERM makes the rank fail before it
    has written its last checkpoint. They are ended by the rank, and at the latest when all are killed.
    """
    found = [leader]
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == leader:
            continue
        try:
            with open(f"/proc/{name}/stat", "rb", buffering=0) as file:
                parent, group = file.read(4096).rpartition(b")")[2].split(None, 4)[1:3]
            if int(group) != leader:
                continue
            command, parent_command = (_command(pid) for pid in (name, parent.decode()))
        except (OSError, ValueError):
            continue  # it, or its parent, ended while we looked
        if command != parent_command and b"multiprocessing" not in command:
            found.append(int(name))
    return found


def _command(pid: str) -> bytes:
    with open(f"/proc/{pid}/cmdline", "rb", buffering=0) as file:
        return file.read(4096)


def ignores(pid: int, signum: int) -> bool:
    """Whether the process ignores that signal."""
    try:
        with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
            masks = [line.split()[1] for line in file.read(65536).splitlines() if line.startswith(b"SigIgn:")]
    except OSError:
        return False  # it ended: nothing will be waited for
    return bool(masks) and bool(int(masks[0], 16) >> (signum - 1) & 1)


class Rank:
    """One training process: direct child, leader of its own session and process group."""

    __slots__ = ("generation", "local_rank", "pid", "pidfd", "silent")

    def __init__(self, generation: int, local_rank: int, pid: int) -> None:
        self.generation = generation
        self.local_rank = local_rank
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        # its exit makes no event: it was reported before, or the start of its group failed
        self.silent = False


def to_bytes(text: str) -> bytes:
    """The byte string that the launcher sent as text."""
    return text.encode("utf-8", "surrogateescape")


def become_rank(
    spec: dict[str, Any], guard_pid: int, fds: tuple[int, int], mask: set[int], status_fd: int, gate: int
) -> NoReturn:
    """In the forked child: become the training process, or write the errno to ``status_fd`` and end."""
    code = 0
    try:
        signal.set_wakeup_fd(
            -1
        )  # the pipe is the guard's: a signal to this process must not be written to it
        for signum in (*FORWARDED, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(signum, signal.SIG_DFL)
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard_pid:
            os._exit(EXIT_NOT_STARTED)  # the guard died before the line above: no death signal will come
        for source, target in zip(fds, (1, 2), strict=True):
            if source >= 0:
                os.dup2(source, target)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        argv = [to_bytes(argument) for argument in spec["argv"]]
        env = {to_bytes(key): to_bytes(value) for key, value in spec["env"].items()}
        if gate >= 0:
            os.set_inheritable(gate, True)
            env[GATE] = b"%d %s" % (gate, to_bytes(spec["gate"]))
            if spec["gate"].startswith("hold"):
                env[ENVIRON_PADDING] = b"." * ENVIRON_PADDING_BYTES
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        code = error.errno or errno.EINVAL
    except BaseException:  # noqa: BLE001 - a NUL in an argument, say; in no case may the child go on as a second guard
        code = errno.EINVAL
    finally:
        os.write(status_fd, str(code).encode())
        os._exit(EXIT_NOT_STARTED)


class SpawnFailed(Exception):
    """A rank can't be started: (local rank, errno, what was tried)."""


def open_log(spec: dict[str, Any], stream: str) -> int:
    """Open the file of ``stream`` for writing, -1 if it is to be inherited. Raises SpawnFailed."""
    path = spec[stream]
    if not path:
        return -1
    try:
        return os.open(to_bytes(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    except OSError as error:
        raise SpawnFailed(spec["local_rank"], error.errno, f"open {stream} {path}") from error


def fork_rank(
    spec: dict[str, Any], open_stream: Callable[[dict[str, Any], str], int] = open_log
) -> tuple[int, int, socket.socket | None]:
    """Fork one rank. Returns its pid, the read end of the pipe that stays empty if exec succeeds, and our end
    of its gate's channel if ``spec["gate"]`` asks for one (see ``worker/site/sitecustomize.py``)."""
    guard_pid = os.getpid()
    fds: list[int] = []
    reader, writer = os.pipe()
    ours = theirs = None
    try:
        if spec.get("gate"):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for stream in ("stdout", "stderr"):
            fds.append(open_stream(spec, stream))
        # blocked until the child has its own dispositions: the guard's handlers must not run there
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*FORWARDED, signal.SIGCHLD))
        try:
            pid = os.fork()
            if pid == 0:
                gate = theirs.fileno() if theirs is not None else -1
                become_rank(spec, guard_pid, (fds[0], fds[1]), mask, writer, gate)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    except BaseException as error:
        os.close(reader)
        if ours is not None:
            ours.close()
        if isinstance(error, OSError):
            raise SpawnFailed(spec["local_rank"], error.errno, "fork") from error
        raise
    finally:
        for fd in (writer, *(fd for fd in fds if fd >= 0)):
            os.close(fd)
        if theirs is not None:
            theirs.close()
    return pid, reader, ours
