"""The gate: holds a process inside ``site``, past its imports and before its script, until "go".

``site/sitecustomize.py`` loads this file by its path in a process that the guard started as a warm spare: the
command of a rank, with the rank's environment but for the variables that are only known later. All this
happens before CPython opens the script, so that after "go" CPython runs it as in any other start.

Wire: a SEQPACKET socket pair, one JSON object per packet. The spare sends ``{"held": pid, "modules": n,
"seconds": s}``, or ``{"unfit": why, "without": package}`` and ends. The guard sends "go", ``{"env": {...},
"streams": [1, 2]}``, with the descriptors for these streams. The spare answers ``{"started": pid}``. End of
file means that the guard has ended, or wants no spare: the process ends, and never runs the script.

While it waits a spare has a low priority (where that can be undone), and is the kernel's first choice when
memory runs out. Standard library only and old syntax: the user chooses the Python.
"""

import os
import sys
import time

# typing costs time and leaves modules behind; the quoted annotations are never evaluated
TYPE_CHECKING = False
if TYPE_CHECKING:
    from socket import socket
    from types import ModuleType
    from typing import Any

CHANNEL_BYTES = 1 << 18
NICE = 10
CAP_SYS_NICE = 23
# the last variable of the initial environment, see ``agents/guard/processes.py``
ENVIRON_PADDING = "AEGIS_WORKER_ROOM"
EXIT_NOT_NEEDED = 0
EXIT_UNFIT = 3
# Only known at "go": a package that reads one of these while it is imported can't be imported ahead.
LATE = frozenset(
    (
        *("RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE"),
        "TORCHELASTIC_TIMER_FILE",  # of torch's watchdog, made anew at every start
    )
)

# Packages that iterate over the environment for variables of their own prefix, and keep nothing else of it.
PREFIX_READERS = frozenset(("tqdm",))


class Unfit(Exception):
    """This process can't be held as a spare; ``without``: the package that causes it, if one does."""

    def __init__(self, why: str, without: str = "") -> None:
        Exception.__init__(self, why)
        self.without = without


def hold(descriptor: int, preload: "ModuleType", uses_torch: bool, without: "frozenset[str]") -> None:
    """Import ahead, wait for "go", apply it. Returns as the rank, or ends the process.

    ``preload`` is the module ``worker/preload.py``; ``without`` are packages that were found unfit before.
    """
    import socket as sockets

    channel = sockets.socket(fileno=descriptor)
    channel.set_inheritable(False)
    os.environ.pop(ENVIRON_PADDING, None)
    started = time.monotonic()
    try:
        priority = _lower_priority()
        streams = _Streams()
        try:
            count = _import_ahead(preload, uses_torch, without)
        finally:
            streams.restore()
    except BaseException as error:  # noqa: BLE001 - whatever it is, the script must not run here
        _refuse(channel, error)
    seconds = round(time.monotonic() - started, 3)
    _send(channel, {"held": os.getpid(), "modules": count, "seconds": seconds})
    go, descriptors = _receive(channel)
    try:
        _restore_priority(priority)
        for stream, opened in zip(go["streams"], descriptors):  # noqa: B905 - a parameter of later Pythons
            os.dup2(opened, stream)
            os.close(opened)
        late = [(_bytes(key), _bytes(value)) for key, value in go["env"].items()]
        for key, value in late:
            os.environb[key] = value
        _publish_environment(late)
        streams.replay()
    except BaseException as error:  # noqa: BLE001 - as above
        _refuse(channel, error)
    _send(channel, {"started": os.getpid()})
    channel.close()


def _refuse(channel: "socket", error: BaseException) -> None:
    why = str(error) if isinstance(error, Unfit) else f"{type(error).__name__}: {error}"
    _send(channel, {"unfit": why, "without": getattr(error, "without", "")})
    os._exit(EXIT_UNFIT)


def _send(channel: "socket", message: "dict[str, object]") -> None:
    import json

    try:
        channel.send(json.dumps(message).encode())
    except OSError:
        os._exit(EXIT_NOT_NEEDED)  # the guard has ended: nobody needs this process


def _receive(channel: "socket") -> "tuple[dict[str, Any], list[int]]":
    import array
    import json
    import socket as sockets

    size = array.array("i").itemsize
    data, ancillary, _, _ = channel.recvmsg(CHANNEL_BYTES, sockets.CMSG_SPACE(2 * size))
    if not data:
        os._exit(EXIT_NOT_NEEDED)
    descriptors = array.array("i")
    for level, kind, payload in ancillary:
        if level == sockets.SOL_SOCKET and kind == sockets.SCM_RIGHTS:
            descriptors.frombytes(payload[: len(payload) - len(payload) % size])
    return json.loads(data.decode()), list(descriptors)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _publish_environment(late: "list[tuple[bytes, bytes]]") -> None:
    """Write the late variables into the environment that /proc/<pid>/environ shows, if they fit."""
    with open("/proc/self/environ", "rb") as file:
        initial = file.read()
    position = initial.rfind(ENVIRON_PADDING.encode() + b"=")
    entries = b"".join(b"%s=%s\0" % entry for entry in late)
    if position < 0 or len(entries) > len(initial) - position:
        return
    with open("/proc/self/stat", "rb") as file:
        start = int(file.read().rpartition(b")")[2].split()[47])  # env_start, field 50 of proc(5)
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        # nothing in the process points there: the variable was removed from the environment before
        memory.seek(start + position)
        memory.write(entries.ljust(len(initial) - position, b"\0"))


# -- imports -------------------------------------------------------------------------------------------------


def _import_ahead(preload: "ModuleType", uses_torch: bool, without: "frozenset[str]") -> int:
    """Import what the script will import; returns the number of loaded modules. Raises Unfit."""
    argv = list(getattr(sys, "orig_argv", None) or _argv())
    found = preload.wanted(argv, list(sys.path), os.getcwd(), uses_torch)
    kind, target = preload.command(argv)
    folder = os.path.dirname(os.path.realpath(target)) if kind == "script" else os.getcwd()
    hidden = preload.own_names(folder)
    before = frozenset(sys.modules)
    for name, names in found.modules:
        package = name.partition(".")[0]
        if not without.isdisjoint((package, name)) or package in hidden:
            continue
        # a part of torch that can't be imported ahead is no reason to leave out the rest
        culprit = name if package == "torch" else package
        with _EnvironmentWatch() as watch:
            try:
                module = __import__(name, fromlist=list(names) or ["__name__"])
                for each in names:
                    getattr(module, each, None)
            except BaseException as error:  # noqa: BLE001 - an import may also raise SystemExit
                why = f"importing {name} failed: {type(error).__name__}: {error}"
                raise Unfit(why, culprit) from None
        if watch.read:
            raise Unfit(f"{name} reads {watch.read} while it is imported", culprit)
        if _holds_a_gpu():
            raise Unfit(f"{name} opens a GPU while it is imported", culprit)
    tops = {name.partition(".")[0] for name in set(sys.modules) - before}
    shadowed = sorted(tops & hidden)
    if shadowed:
        raise Unfit(f"{shadowed[0]} lies beside the script and hides the module that was imported")
    return len(sys.modules)


def _argv() -> "list[str]":
    with open("/proc/self/cmdline", "rb") as file:
        return [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]


class _EnvironmentWatch:
    """While active, detects code that reads a late variable from ``os.environ``, or copies all of it."""

    def __init__(self) -> None:
        self.read = ""

    def __enter__(self) -> "_EnvironmentWatch":
        environ = os.environ  # type: Any
        self._encode = environ.encodekey
        self._decode = environ.decodekey
        environ.encodekey, environ.decodekey = self._on_encode, self._on_decode
        return self

    def __exit__(self, *_: object) -> None:
        environ = os.environ  # type: Any
        environ.encodekey, environ.decodekey = self._encode, self._decode

    def _on_encode(self, key: str) -> bytes:
        if key in LATE:
            self.read = self.read or key
        return self._encode(key)  # type: ignore[no-any-return]

    def _on_decode(self, key: bytes) -> str:
        if not self.read and _caller() not in PREFIX_READERS:
            self.read = "the whole environment"
        return self._decode(key)  # type: ignore[no-any-return]


def _caller() -> str:
    """The package of the code that reads ``os.environ``."""
    frame = sys._getframe(2)  # type: Any
    while frame is not None and frame.f_globals.get("__name__") in (
        "os",
        "collections.abc",
        "_collections_abc",
    ):
        frame = frame.f_back
    name = frame.f_globals.get("__name__", "") if frame is not None else ""
    return str(name).partition(".")[0]


def _holds_a_gpu() -> bool:
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink("/proc/self/fd/" + name)
        except OSError:
            continue  # the listing's own descriptor is closed by now
        if target.startswith(("/dev/nvidia", "/dev/kfd")):
            return True
    return False


# -- streams and priority ------------------------------------------------------------------------------------


class _Streams:
    """Output during imports belongs to the rank: it is kept, and written at "go".

    A terminal is left as it is, since libraries may inspect it while they are imported.
    """

    def __init__(self) -> None:
        self._saved = []  # type: list[tuple[int, int, int]]
        for stream in (1, 2):
            try:
                if os.isatty(stream):
                    continue
                saved, kept = os.dup(stream), os.memfd_create("aegis-spare")
            except (OSError, AttributeError):
                continue  # closed, or an old system: output is then written at once
            os.dup2(kept, stream)
            self._saved.append((stream, saved, kept))

    def restore(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        for stream, saved, _ in self._saved:
            os.dup2(saved, stream)
            os.close(saved)

    def replay(self) -> None:
        for stream, _, kept in self._saved:
            os.lseek(kept, 0, os.SEEK_SET)
            while True:
                data = os.read(kept, 65536)
                if not data:
                    break
                while data:
                    data = data[os.write(stream, data) :]
            os.close(kept)


def _lower_priority() -> "tuple[int | None, str]":
    """Raise niceness and OOM score. Only what can be undone without privileges is done; returns the old
    values.
    """
    niceness = None
    if _may_raise_priority():
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, 0, min(niceness + NICE, 19))
    score = ""
    try:
        with open("/proc/self/oom_score_adj", "r+") as file:
            score = file.read().strip()
            file.seek(0)
            file.write("1000")
    except OSError:
        score = ""
    return niceness, score


def _restore_priority(priority: "tuple[int | None, str]") -> None:
    niceness, score = priority
    if niceness is not None:
        for thread in os.listdir("/proc/self/task"):  # threads made meanwhile have inherited the niceness
            try:
                os.setpriority(os.PRIO_PROCESS, int(thread), niceness)
            except ProcessLookupError:
                continue  # it has ended meanwhile
    if score:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(score)


def _may_raise_priority() -> bool:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NICE)
    if 20 - os.getpriority(os.PRIO_PROCESS, 0) <= soft:
        return True
    with open("/proc/self/status") as file:
        effective = [line.split()[1] for line in file if line.startswith("CapEff:")]
    return bool(effective) and bool(int(effective[0], 16) >> CAP_SYS_NICE & 1)
