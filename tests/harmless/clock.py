"""A wall clock that jumps: a library that processes preload, and a file with the offset in seconds."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

_SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static int (*real_gettime)(clockid_t, struct timespec *);
static long offset_s(void) {
    const char *path = getenv("AEGIS_TEST_CLOCK");
    long by = 0;
    FILE *file = path ? fopen(path, "re") : NULL;
    if (file) { if (fscanf(file, "%ld", &by) != 1) by = 0; fclose(file); }
    return by;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    if (!real_gettime) real_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real_gettime(clock, now);
    if (code == 0 && clock == CLOCK_REALTIME) now->tv_sec += offset_s();
    return code;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    (void) zone;
    int code = clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec; now->tv_usec = precise.tv_nsec / 1000;
    return code;
}
time_t time(time_t *into) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (into) *into = now.tv_sec;
    return now.tv_sec;
}
"""


class JumpingClock:
    """Wall clock of all processes that get `environment`; monotonic time is unchanged."""

    def __init__(self, folder: Path) -> None:
        """Build the library; FileNotFoundError without a C compiler."""
        compiler = shutil.which("cc")
        if compiler is None:
            raise FileNotFoundError("no C compiler (cc) is installed")
        source, library, self._file = folder / "clock.c", folder / "clock.so", folder / "clock-offset"
        source.write_text(_SOURCE)
        argv = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
        subprocess.run(argv, check=True, capture_output=True)
        self.environment = {"LD_PRELOAD": str(library), "AEGIS_TEST_CLOCK": str(self._file)}

    def jump(self, seconds: int) -> None:
        """From now on wall time is off by that much."""
        beside = self._file.with_suffix(".new")
        beside.write_text(str(seconds))
        beside.replace(self._file)
