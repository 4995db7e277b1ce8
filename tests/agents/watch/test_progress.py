"""The watcher of progress beside real processes that step, stop, hang and end."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from aegis_elastic.agents.watch import progress, shared_folder
from aegis_elastic.agents.watch.contract import WatchedRanks
from aegis_elastic.agents.watch.progress import ProgressWatcher
from aegis_elastic.agents.watch.shared_folder import SharedFolder
from aegis_elastic.core.detection.progress import Facts, RankFacts, decode
from aegis_elastic.core.rank_assignment import RankAssignment
from aegis_elastic.worker.slot import VARIABLE

ROOT = Path(__file__).resolve().parent.parent.parent.parent
STEPS = """
import sys, time
import aegis_elastic
def wait_for_a_line():
    sys.stdin.readline()
for step in range(20):
    aegis_elastic.progress(step)
    time.sleep(0.02)
wait_for_a_line()
aegis_elastic.checkpoint_saved(19, "/ckpt/19")
aegis_elastic.progress(20)
wait_for_a_line()
"""


class Stage:
    """A watcher and the processes that it watches."""

    def __init__(self, floor_s: float) -> None:
        self.woken = threading.Event()
        self.watcher = ProgressWatcher(self.woken.set, floor_s, "here")
        self.ranks: list[subprocess.Popen[str]] = []

    @property
    def folder(self) -> Path:
        return Path(self.watcher.environment()[VARIABLE])

    def start(self, script: str, count: int = 1) -> None:
        for rank in range(count):
            env = {**os.environ, **self.watcher.environment(), "RANK": str(rank), "PYTHONPATH": str(ROOT)}
            self.ranks.append(
                subprocess.Popen([sys.executable, "-c", script], env=env, stdin=subprocess.PIPE, text=True)
            )
        pids = {rank: process.pid for rank, process in enumerate(self.ranks)}
        self.watcher.on_started(WatchedRanks(1, RankAssignment("w", "u", 0, 0, count), pids))

    def send_line(self, rank: int) -> None:
        stdin = self.ranks[rank].stdin
        assert stdin is not None
        stdin.write("\n")
        stdin.flush()

    def facts(self, holds: Callable[[Facts], bool], timeout_s: float = 60.0) -> Facts:
        """The facts for which it holds, as the master would read them."""
        until_s = time.monotonic() + timeout_s
        while True:
            built = self.watcher.facts()
            if built is not None and holds(facts := decode(msgspec.Raw(msgspec.json.encode(built)))):
                return facts
            assert time.monotonic() < until_s, f"never came: the last is {built}"
            self.woken.wait(1.0)
            self.woken.clear()

    def close(self) -> None:
        self.watcher.close()
        for process in self.ranks:
            process.kill()
            process.communicate()


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "UPDATE_S", 0.1)
    monkeypatch.setattr(progress, "STACKS_S", 0.3)
    monkeypatch.setattr(progress, "REPORT_S", 0.1)


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage(floor_s=1.0)
    yield made
    made.close()


def first(facts: Facts) -> RankFacts:
    return facts.ranks[0]


def test_steps_are_seen_and_the_stack_of_a_rank_once_it_makes_none(stage: Stage) -> None:
    stage.start(STEPS)
    facts = stage.facts(lambda facts: bool(facts.ranks) and first(facts).beats == 20)
    assert (first(facts).step, first(facts).stack) == (19, ""), "there is no reason to read its stack"
    facts = stage.facts(lambda facts: first(facts).steady >= 2)
    assert first(facts).stack.startswith("wait_for_a_line@")
    assert first(facts).idle_s >= 1.0
    stage.send_line(0)
    facts = stage.facts(lambda facts: first(facts).beats == 21)
    assert (first(facts).step, first(facts).stack, first(facts).steady) == (20, "", 0)
    assert facts.saved is not None
    assert (facts.saved.step, facts.saved.path, facts.saved.calls) == (19, "/ckpt/19", 1)
    assert first(facts).longest_s >= 1.0, "so long a pause means nothing from now on"


def readers() -> list[str]:
    """Our children that read stacks, or are prepared to."""
    argv = ["pgrep", "-P", str(os.getpid()), "-f", "aegis_elastic.checks"]
    return subprocess.run(argv, capture_output=True, text=True).stdout.split()


def wait_readers(count: int) -> None:
    until_s = time.monotonic() + 2.0
    while len(readers()) != count:
        assert time.monotonic() < until_s, f"{len(readers())} processes read stacks, not {count}"
        time.sleep(0.02)


def test_the_process_that_reads_stacks_is_prepared_and_ends_when_training_moves_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PREPARE_AHEAD_S", 0.2)
    stage.start(STEPS)
    stage.facts(lambda facts: bool(facts.ranks) and first(facts).beats == 20)
    assert not readers()
    stage.facts(lambda facts: first(facts).steady >= 1)
    wait_readers(1)
    stage.send_line(0)
    stage.facts(lambda facts: first(facts).beats == 21)
    wait_readers(0)


def test_a_stopped_process_and_one_that_has_ended(stage: Stage) -> None:
    stage.start(STEPS)
    stage.facts(lambda facts: bool(facts.ranks) and first(facts).beats == 20)
    os.kill(stage.ranks[0].pid, signal.SIGSTOP)
    stage.facts(lambda facts: first(facts).state == "T" and first(facts).state_s > 0.5)
    os.kill(stage.ranks[0].pid, signal.SIGCONT)
    stage.facts(lambda facts: first(facts).state == "S")
    stage.ranks[0].kill()
    stage.ranks[0].wait()
    stage.facts(lambda facts: first(facts).ended)


def test_a_rank_without_a_slot_is_known_by_its_process_only(stage: Stage) -> None:
    stage.start("input()")
    facts = stage.facts(lambda facts: bool(facts.ranks) and first(facts).state == "S")
    assert (first(facts).step, first(facts).beats) == (-1, 0)


def test_slots_of_an_earlier_start_are_gone_before_the_next(stage: Stage) -> None:
    stage.start(STEPS)
    stage.facts(lambda facts: bool(facts.ranks) and first(facts).beats == 20)
    assert (stage.folder / "0").exists(), "called while they run, it removes nothing"
    stage.watcher.on_ended()
    facts = stage.watcher.facts()
    assert facts is None or "ranks" not in facts
    assert not (stage.folder / "0").exists()


def test_nothing_is_left_when_it_is_closed_even_while_stacks_are_read() -> None:
    stage = Stage(floor_s=0.1)
    folder = stage.folder
    try:
        stage.start(STEPS)
        stage.facts(
            lambda facts: bool(facts.ranks) and first(facts).idle_s > 0.5 and first(facts).beats == 20
        )
        began_s = time.monotonic()
    finally:
        stage.close()
    assert time.monotonic() - began_s < 10.0
    assert not folder.exists()
    assert not any(thread.name == "aegis-progress" for thread in threading.enumerate())


def test_folders_of_ended_processes_are_removed_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_folder, "_SHM", tmp_path)
    living = SharedFolder()
    script = (
        "import os, sys\nfrom pathlib import Path\n"
        "from aegis_elastic.agents.watch import shared_folder as f\n"
        f"f._SHM = Path({str(tmp_path)!r}); f.SharedFolder(); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
    assert len(list(tmp_path.iterdir())) == 2
    other = SharedFolder()
    assert {living.path, other.path} == set(tmp_path.iterdir())
    assert living.path.stat().st_mode & 0o777 == 0o700
    living.close()
    other.close()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_another_launcher_removed_while_it_was_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_folder, "_SHM", tmp_path)
    lock, removed = fcntl.flock, list[int]()

    def flock(handle: int, how: int) -> None:
        if how == fcntl.LOCK_EX and not removed:
            removed.append(handle)
            shared_folder._remove_abandoned(
                tmp_path
            )  # another launcher finds a folder that is not locked yet
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    made = SharedFolder()
    assert removed and [made.path] == [*tmp_path.iterdir()]
    made.close()
