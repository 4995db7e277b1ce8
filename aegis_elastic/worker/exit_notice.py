"""The last thing that a rank does in Python after an uncaught exception: say that it is as good as gone.

An interpreter that has ended its script takes half a second to take torch down, with NCCL minutes or for
ever, and does nothing for anybody in that time: what was printed is printed, every ``atexit`` has run, files
are closed. So the guard is told (``agents/guard/exiting.py``), by the access time of the error file, and all
ranks can be stopped at once, this one with them.

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
    """Whether the exception that ``sys.excepthook`` was just given ends the interpreter.

    It does on the main thread, when nothing of the script is left on the stack: a library may also ask the
    hook to print something, and go on.
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


def say_goodbye(error_file: str) -> None:
    """Called when every ``atexit`` of the script has run. The guard knows us by our pid in the access
    time.
    """
    # What the end of an interpreter does for whoever forgot to close: files are written out.
    for file in [each for each in gc.get_objects() if type(each) in OPEN_FILES]:
        try:
            if not file.closed:
                file.flush()
        except (OSError, ValueError):
            continue  # a full disk, or a pipe that nobody reads: the interpreter couldn't either
    # From here on the stop reaches us at once. A handler of the script would act for a training that failed.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    written = os.stat(error_file).st_mtime_ns
    os.utime(error_file, ns=(os.getpid() * 1000000000, written))
