"""Used in place of a training script: records all that its launcher gave it. Without torch.

It goes under many names (pretrain_gpt.py, a module, a program, a test of pytest) and does the same.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path

# Before anything else: up to here only the launcher has imported modules and started threads.
MODULES = sorted(sys.modules)


def status(field: str) -> str:
    """One field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith(field + ":"))


def command(pid: int) -> list[str]:
    """The command line of a process."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")


def parents() -> list[list[str]]:
    """The commands of those above us, up to the script that the test has started."""
    found = []
    pid = os.getppid()
    while pid > 1:
        argv = command(pid)
        found.append(argv)
        if argv[-1].endswith("/launch.sh"):
            break
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return found


def descriptors() -> dict[str, object]:
    """What is open: pipe, socket, or the file's path. The first three by number."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}").partition(":[")[0]
        except OSError:
            continue  # that of the listing itself
    first = {str(fd): found[fd] for fd in range(3)}
    return {**first, "others": sorted(found[fd] for fd in found if fd > 2)}


def record() -> None:
    """Write the record to $CORPUS_OUT, print a line on each stream, exit as $CORPUS_EXIT=RANK:CODE asks."""
    rank = os.environ["RANK"]
    recorded = {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "executable": sys.executable,
        "cwd": os.getcwd(),
        "path": sys.path,
        "modules": dict.fromkeys(MODULES, True),
        "environ": dict(os.environ),
        "parents": parents(),
        "descriptors": descriptors(),
        "signals": {field: status(field) for field in ("SigBlk", "SigIgn", "SigCgt")},
        "threads": status("Threads"),
        "umask": status("Umask"),
        "nice": os.nice(0),
        "affinity": sorted(os.sched_getaffinity(0)),
        "limits": {
            name: resource.getrlimit(getattr(resource, name))
            for name in dir(resource)
            if name.startswith("RLIMIT_")
        },
        "leads": [os.getpid() == os.getsid(0), os.getpid() == os.getpgid(0)],
        "unbuffered": sys.stdout.write_through if hasattr(sys.stdout, "write_through") else None,
    }
    # In one write each, unlike print: torch's tee splits a line whose end comes late.
    sys.stdout.write(f"corpus: rank {rank} on stdout\n")
    sys.stderr.write(f"corpus: rank {rank} on stderr\n")
    sys.stdout.flush()
    folder = Path(os.environ["CORPUS_OUT"])
    (folder / f"{rank}.part").write_text(json.dumps(recorded))
    (folder / f"{rank}.part").rename(folder / f"{rank}.json")
    failing, _, code = os.environ.get("CORPUS_EXIT", "").partition(":")
    if failing == rank:
        # The others are stopped then, so they must have written their records before.
        while len(list(folder.glob("*.json"))) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.01)
        sys.exit(int(code))


def test_record() -> None:
    """What pytest finds when it is the launcher's module."""
    record()


if __name__ == "__main__":
    record()
