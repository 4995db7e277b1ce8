"""The runtime check: are CUDA driver, shared memory, /tmp and Python usable for a new training process?

With GPUs the CUDA driver library is loaded and initialised in this child process: `cuInit` makes no context,
so a training that still holds the GPUs is not disturbed. Takes milliseconds; its result names what was tried.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import mmap
import os
import sys
import tempfile

from aegis_elastic.checks.contract.child_process import OnStep, Outcome, Scalar, failed, passed
from aegis_elastic.checks.contract.request import CheckRequest

CUDA_LIBRARY = "libcuda.so.1"
SHM_BYTES = 1 << 16

# Meanings of CUresult values (cuda.h).
_CUDA_MEANING = {
    100: "no CUDA device is visible",
    101: "a CUDA_VISIBLE_DEVICES entry names no device",
    802: "the system is not ready: is the fabric manager running?",
    803: "the driver library and the kernel driver are of different versions",
    804: "forward compatibility is not supported on these GPUs",
    999: "unknown error: the kernel driver doesn't answer properly",
}


def check(request: CheckRequest, on_step: OnStep) -> Outcome:
    """Try driver, shared memory, /tmp and the interpreter; the first that is unusable is the finding."""
    details: dict[str, Scalar] = {"python": sys.version.split()[0]}
    usable = []
    has_gpus = bool(glob.glob("/dev/nvidia[0-9]*")) or bool(request.expected_gpus)
    if has_gpus:
        on_step("initialising the CUDA driver")
        problem = _cuda_problem(details)
        if problem:
            return failed("runtime.cuda", "software", f"runtime: {problem}", details)
        usable.append("CUDA driver")
    for name, directory in (
        ("shared memory", request.paths.get("shm", "/dev/shm")),
        ("/tmp", tempfile.gettempdir()),
    ):
        on_step(f"trying {name}")
        problem = _map_problem(directory)
        if problem:
            finding = "runtime.shared_memory" if name == "shared memory" else "runtime.tmp"
            return failed(
                finding, "software", f"runtime: cannot use {name} ({directory}): {problem}", details
            )
        usable.append(name)
    if not os.access(sys.executable, os.X_OK):
        return failed(
            "runtime.python", "software", f"runtime: cannot execute Python at {sys.executable}", details
        )
    usable.append(f"Python {details['python']}")
    tail = "" if has_gpus else " (no GPU here, so no CUDA driver was tried)"
    return passed(f"runtime: {', '.join(usable)} usable{tail}", details)


def _cuda_problem(details: dict[str, Scalar]) -> str:
    try:
        cuda = ctypes.CDLL(CUDA_LIBRARY)
    except OSError as error:
        return f"cannot load the CUDA driver library: {error}"
    code = int(cuda.cuInit(0))
    details["cu_init"] = code
    if code:
        return f"cuInit failed with {code}: {_CUDA_MEANING.get(code, 'see CUresult in cuda.h')}"
    version = ctypes.c_int(0)
    if cuda.cuDriverGetVersion(ctypes.byref(version)) == 0:
        details["cuda_driver"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
    return ""


def _map_problem(directory: str) -> str:
    """Allocate, map and write a little, as DataLoader workers and NCCL do: "" or why it failed."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            # A sparse file on a full tmpfs would kill the writer by SIGBUS; this asks for the pages first.
            os.posix_fallocate(file.fileno(), 0, SHM_BYTES)
            with mmap.mmap(file.fileno(), SHM_BYTES) as view:
                view[:] = b"\xa5" * SHM_BYTES
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, "") + f" {error.strerror or error}"
    return ""
