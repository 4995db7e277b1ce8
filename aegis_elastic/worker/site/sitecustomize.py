"""Runs at the start of every Python that is a rank: removes itself, then records the exception that ends it.

This folder stands first on a rank's PYTHONPATH (``aegis_elastic.worker.environment``). CPython's ``site``
imports this file before main. It takes the folder out of PYTHONPATH and ``sys.path`` again, so that no other
Python of the user sees it, and imports the ``sitecustomize`` that would have run without us; if there is
none, the import fails exactly as it would have (``site`` ignores that) and no module is left behind.

Then, if the launcher's marker is there, uncaught exceptions are written to TORCHELASTIC_ERROR_FILE in
torchelastic's own format, as ``@record`` would: after the script has ended in an exception, on the way to the
traceback on stderr, which is unchanged. Silent, stdlib only, and old syntax only: the rank's Python is the
user's choice.

Where the launcher watches progress, torch's optimizers are watched from inside (``worker/step_hooks.py``).

A process that is started as a warm spare waits here first, past its imports (``worker/gate.py``).
"""

import os
import stat
import sys

_MARKER = "AEGIS_WORKER_SITE"
# set by the guard: "<descriptor> pass" (report that we ran, so that this command may have spares) or
# "<descriptor> hold <torch|plain> <packages to leave out, with commas>"
_GATE = "AEGIS_WORKER_GATE"
# the folder with the slots of this node's ranks (``worker/slot.py``): set if progress is watched
_PROGRESS = "AEGIS_PROGRESS"
_SITE_DIR = os.path.dirname(os.path.abspath(__file__))


def _restore_environment() -> bool:
    """Undo what prepare_env did to this process. Returns whether the launcher marked it as a rank."""
    marker = os.environ.pop(_MARKER, None)
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if _SITE_DIR in entries:
        entries = [entry for entry in entries if entry != _SITE_DIR]
        if entries or marker == "set":
            os.environ["PYTHONPATH"] = os.pathsep.join(entries)
        else:
            del os.environ["PYTHONPATH"]
    sys.path[:] = [entry for entry in sys.path if entry != _SITE_DIR]
    sys.path_importer_cache.pop(_SITE_DIR, None)
    sys.modules.pop("sitecustomize", None)
    return marker is not None


def _enter_gate(value: str) -> None:
    descriptor, _, rest = value.partition(" ")
    what, _, rest = rest.partition(" ")
    if what == "pass":
        try:
            # a wrapper may have closed it, or have opened a file of its own there (exec 9>log): then this
            # command has no spares
            if stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode):
                os.write(int(descriptor), b"%d" % os.getpid())
                os.close(int(descriptor))
        except OSError:
            return
        return
    try:
        mode, _, without = rest.partition(" ")
        worker = os.path.dirname(_SITE_DIR)
        gate, preload = (_load(os.path.join(worker, name)) for name in ("gate.py", "preload.py"))
        left_out = frozenset(without.split(","))
        gate.hold(int(descriptor), preload, mode == "torch", left_out)  # type: ignore[attr-defined]
    except BaseException:  # noqa: BLE001
        os._exit(3)  # site would print it and go on to the script, which must not run here


def _load(path: str) -> object:
    """Load a module of ours without an entry in ``sys.modules``."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("_aegis_" + os.path.basename(path)[:-3], path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _watch_progress() -> None:
    worker = os.path.dirname(_SITE_DIR)
    try:
        hooks, slot = (_load(os.path.join(worker, name)) for name in ("step_hooks.py", "slot.py"))
        hooks.install(slot)  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001 - a Python that lacks a module: progress is not watched
        return


def _fingerprint(path: str) -> object:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_ino, status.st_size, status.st_mtime_ns)


def _write_error(path: str, value: BaseException) -> None:
    import json
    import time
    import traceback

    message = {
        "message": f"{type(value).__name__}: {value}",
        "extraInfo": {
            "py_callstack": "".join(traceback.format_exception(type(value), value, value.__traceback__)),
            "timestamp": str(int(time.time())),
        },
    }
    with open(path, "w") as file:
        json.dump({"message": message}, file)


def _record_uncaught(path: str) -> None:
    """Record an uncaught exception of this process to the error file ``path``."""
    import atexit

    rank_pid = os.getpid()
    before = _fingerprint(path)
    previous_hook = sys.excepthook
    recorded: list[bool] = []
    notices: list[object] = []

    def record(value: object) -> None:
        # as @record: exceptions, not KeyboardInterrupt. A forked child's end is not the rank's. A file that
        # changed since our start was written by @record, which has more details
        if (
            recorded
            or not isinstance(value, Exception)
            or os.getpid() != rank_pid
            or _fingerprint(path) != before
        ):
            return
        recorded.append(True)
        try:
            _write_error(path, value)
        except Exception:  # noqa: BLE001 - disk full, str() of it fails: the traceback on stderr comes in any case
            return

    def excepthook(kind: type, value: BaseException, trace: object) -> None:
        record(value)
        try:
            if isinstance(value, Exception) and os.getpid() == rank_pid:
                notice = _load(os.path.join(os.path.dirname(_SITE_DIR), "exit_notice.py"))
                notices[:] = [notice] if notice.ends_the_script() else []  # type: ignore[attr-defined]
        except Exception:  # noqa: BLE001 - then our exit is seen when the process has ended
            notices[:] = []
        previous_hook(kind, value, trace)  # type: ignore[arg-type]

    def at_exit() -> None:
        # for scripts that set a hook of their own and don't call ours: the interpreter keeps what it reported
        record(getattr(sys, "last_value", None))
        try:
            if notices and os.getpid() == rank_pid:
                notices[0].notify_guard(path)  # type: ignore[attr-defined]
        except Exception:  # noqa: BLE001 - as above
            return

    sys.excepthook = excepthook
    atexit.register(at_exit)


def _start() -> None:
    marked = _restore_environment()
    gate = os.environ.pop(_GATE, None)
    if gate:
        _enter_gate(gate)
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    try:
        # the user's own, further down the path; not found is the usual case and goes on to site, which
        # expects it
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    finally:
        # after theirs, so that a hook which it sets is called by ours
        if marked and error_file:
            _record_uncaught(error_file)
        if marked and os.environ.get(_PROGRESS):
            _watch_progress()


_start()
