"""The saver: kept running, apart from the ranks, and never left behind."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aegis_elastic.agents.checkpoints.saver import PAUSE_S, PAUSE_S_MAX, Saver, pause_s
from aegis_elastic.agents.watch.contract import WatchedRanks
from aegis_elastic.core.rank_assignment import RankAssignment
from tests.integration.harness import wait_for

RANKS = WatchedRanks(
    1, RankAssignment(worker="a", uid="u", group_rank=0, rank_offset=0, nproc=1), {0: os.getpid()}
)
# Prints its run id; then ends when the file is there, or on SIGTERM.
SAVER = """
import os, signal, subprocess, sys, time
folder = sys.argv[1]
print("id", os.environ["TORCHELASTIC_RUN_ID"], os.getpid(), flush=True)
def end(*_):
    print("flushed", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
open(f"{folder}/up", "w").close()
while not os.path.exists(f"{folder}/die"):
    time.sleep(0.02)
os.unlink(f"{folder}/die")
os.unlink(f"{folder}/up")
sys.exit(7)
"""


@pytest.fixture
def saver_of(tmp_path: Path) -> Iterator[Callable[..., Saver]]:
    script = tmp_path / "saver.py"
    script.write_text(SAVER)
    made: list[Saver] = []

    def make(command: str = "", **how: Any) -> Saver:
        command = command or f"python3 -S {script} {tmp_path}"
        how = {"log": str(tmp_path / "saver.log"), "pause": lambda ends: 0.05, **how}
        made.append(Saver(lambda: None, command, "run7", **how))
        made[-1].on_started(RANKS)
        return made[-1]

    yield make
    for saver in made:
        saver.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "aegis-saver"]
    assert not helpers(tmp_path), "what a saver starts ends with it"


def helpers(folder: Path) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in command:
                found.append(entry.name)
    return found


def ids(folder: Path) -> list[tuple[str, int]]:
    log = folder / "saver.log"
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    return [(line[1], int(line[2])) for line in lines if line[0] == "id"]


def test_it_is_started_again_and_its_log_goes_on(tmp_path: Path, saver_of: Callable[..., Saver]) -> None:
    saver = saver_of()
    wait_for((tmp_path / "up").exists, "a saver")
    (tmp_path / "die").touch()
    wait_for(lambda: len(ids(tmp_path)) == 2, "its second start")
    assert {run_id for run_id, _ in ids(tmp_path)} == {"fault-run7"}
    facts = saver.facts()
    assert facts is not None
    assert (facts["starts"], facts["pid"]) == (2, ids(tmp_path)[1][1])
    assert facts["last_end"] == "exit code 7"
    # Killed from outside, it is started again, too.
    os.kill(facts["pid"], signal.SIGKILL)
    wait_for(lambda: len(ids(tmp_path)) == 3, "its third start")


def test_it_outlives_the_ranks_and_may_flush_at_the_end(
    tmp_path: Path, saver_of: Callable[..., Saver]
) -> None:
    saver = saver_of()
    wait_for((tmp_path / "up").exists, "a saver")
    saver.on_ended()
    saver.on_started(RANKS)
    assert len(ids(tmp_path)) == 1
    saver.close()
    assert (tmp_path / "saver.log").read_text().splitlines()[-1] == "flushed"


def test_a_command_that_cannot_be_run_is_tried_again_and_reported(
    tmp_path: Path, saver_of: Callable[..., Saver]
) -> None:
    saver = saver_of("/nowhere/saver --fast", log="")
    wait_for(lambda: "/nowhere/saver" in str((saver.facts() or {}).get("last_end", "")), "a reason")


def test_the_pause_is_3_seconds_and_grows_for_one_that_never_lasts() -> None:
    assert [pause_s(ends) for ends in (1, 2, 3, 4, 5, 6, 100)] == [3, 6, 12, 24, 48, 60, 60]
    assert (PAUSE_S, PAUSE_S_MAX) == (3.0, 60.0)
