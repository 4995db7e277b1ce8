"""The last thing that a rank does in Python after an uncaught exception: notify the guard that it is exiting.

An interpreter that has ended its script takes half a second to shut torch down, with NCCL minutes or for
ever, and nothing of use happens in that time: output is written, every ``atexit`` has run, files are closed.
So the guard is notified (``agents/guard/exiting.py``) by the access time of the error file, and all ranks,
this one too, can be stopped at once.

Standard library only and old syntax: it is loaded by path into whatever Python the user runs.
"""

import gc
import io
import os
import signal
import sys
import threading

OPEN_FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def ends_the_script() -> bool:
    """Whether the exception that ``sys.excepthook`` just got ends the interpreter.

    It does on the main thread, when nothing of the script is left on the stack: a library may also call the
    hook to print an exception, and go on.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    if sys.flags.interactive or sys.flags.inspect or os.environ.get("PYTHONINSPECT"):
        return False
    frame = sys._getframe(1)  # type: object
    while frame is not None:
        if frame.f_code.co_name == "<module>":  # type: ignore[attr-defined]
            return False
        frame = frame.f_back  # type: ignore[attr-defined]
    return True


def notify_guard(error_file: str) -> None:
    """Write our pid to the access time of ``error_file``. To be called when every ``atexit`` of the script
    has run.
    """
    # As the end of an interpreter does: files that were not closed are flushed.
    for file in [each for each in gc.get_objects() if type(each) in OPEN_FILES]:
        try:
            if not file.closed:
                file.flush()
        except (OSError, ValueError):
            continue  # a full disk, or a pipe that nobody reads: the interpreter would fail, too
    # From here on SIGTERM ends us at once: a handler of the script would act for a training that has failed.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    written = os.stat(error_file).st_mtime_ns
    os.utime(error_file, ns=(os.getpid() * 1000000000, written))
