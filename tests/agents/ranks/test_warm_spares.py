"""Warm spares on a real guard: when there are some, what they become, when there are none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from aegis_elastic.agents.guard.client import (
    Exited,
    GatePassed,
    GuardClient,
    RankSpec,
    SpareGone,
    SpareReady,
    Stopped,
)
from aegis_elastic.agents.ranks import warm_spares as module
from aegis_elastic.agents.ranks.warm_spares import Spares, early_env, memory_free, memory_needed, unfit_reason
from aegis_elastic.worker.environment import prepare_env
from tests.agents.processes import ended, next_event, parent_of

PLENTY = 64 << 30
SLEEP = "import signal; signal.pause()"


class Node:
    """A guard, its spares, and one script that is the command of every rank."""

    def __init__(self, folder: Path, mode: str = "on", free: int = PLENTY, script: str = SLEEP) -> None:
        self.folder = folder
        self.script = folder / "train.py"
        self.script.write_text(script)
        self.guard = GuardClient.start("spares")
        self.spares = Spares(self.guard, mode, lambda: free)
        self.generation = 0
        self.pids: dict[int, int] = {}

    def spec(
        self, local_rank: int = 0, argv: tuple[str, ...] = (), env: Mapping[str, str] | None = None
    ) -> RankSpec:
        full = {**os.environ, "LOCAL_RANK": str(local_rank), "RANK": str(local_rank), **(env or {})}
        full["TORCHELASTIC_RESTART_COUNT"] = str(self.generation)
        command = argv or (sys.executable, "-u", str(self.script))
        out = str(self.folder / f"out-{self.generation}-{local_rank}")
        return RankSpec(local_rank, command, prepare_env(full), out, "")

    def start(self, *specs: RankSpec) -> frozenset[int]:
        """Start a generation as the seam does; returns the local ranks that were spares."""
        self.generation += 1
        claimed = self.spares.claim(specs or [self.spec()])
        self.pids = self.guard.spawn(self.generation, claimed)
        self.spares.on_ranks_started(self.generation, claimed, self.pids)
        return self.guard.warm

    def until(self, kind: type) -> object:
        """Pass events to the spares, up to and including one of that kind."""
        while True:
            event = next_event(self.guard)
            if isinstance(event, (GatePassed, SpareReady, SpareGone)):
                self.spares.on_event(event)
            if isinstance(event, kind):
                return event

    def fill(self, count: int = 1) -> None:
        """Until so many spares are held."""
        while self.spares.held < count:
            if self.spares.due_s is not None:
                self.spares.act()
            event = next_event(self.guard)
            assert isinstance(event, (GatePassed, SpareReady, SpareGone)), event
            self.spares.on_event(event)

    def stop(self) -> Stopped:
        self.spares.on_ranks_ended()
        self.guard.stop(0.0)
        event = self.until(Stopped)
        assert isinstance(event, Stopped)
        return event

    def children(self) -> set[int]:
        path = Path(f"/proc/{self.guard.pid}/task/{self.guard.pid}/children")
        return {int(word) for word in path.read_text().split()}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.guard.close()


def test_a_spare_is_made_after_the_start_and_becomes_the_next_rank(node: Node) -> None:
    assert node.start() == set()
    node.until(GatePassed)
    assert node.children() == set(node.pids.values()), "the ranks have their start for themselves"
    assert node.spares.due_s is not None
    node.fill()
    (spare,) = node.children() - set(node.pids.values())
    stopped = node.stop()
    assert spare not in stopped.killed
    assert node.children() == {spare}, "stopping ranks leaves spares alone"
    assert node.start() == {0}
    assert node.pids == {0: spare}
    assert parent_of(spare) == node.guard.pid


def test_each_rank_has_its_own_spare_one_made_after_the_other(node: Node) -> None:
    node.start(node.spec(0), node.spec(1))
    for _ in range(2):
        node.until(GatePassed)
    for _ in range(2):
        node.spares.act()
    node.until(SpareReady)
    assert (node.spares.held, len(node.children())) == (1, 3), "one is made at a time"
    node.fill(2)
    node.stop()
    assert node.start(node.spec(0), node.spec(1)) == {0, 1}
    node.fill(2)
    node.stop()
    assert node.start(node.spec(0), node.spec(1)) == {0, 1}, "what was used is made again"


def test_a_restart_without_a_ready_spare_is_a_cold_start(node: Node) -> None:
    node.start()
    node.until(GatePassed)
    node.stop()
    assert node.start() == set()


@pytest.mark.parametrize("changed", [{"OMP_NUM_THREADS": "7"}, {"NEW": "1"}])
def test_a_spare_goes_when_an_early_variable_differs(node: Node, changed: dict[str, str]) -> None:
    node.start()
    node.fill()
    (spare,) = node.children() - set(node.pids.values())
    node.stop()
    assert node.start(node.spec(env=changed)) == set()
    assert ended(spare)
    node.fill()
    node.stop()
    assert node.start(node.spec(env=changed)) == {0}, "and one of the new kind is made"


def test_a_spare_goes_when_the_command_line_differs(node: Node) -> None:
    node.start()
    node.fill()
    node.stop()
    assert node.start(node.spec(argv=(sys.executable, "-u", str(node.script), "--more"))) == set()


def test_late_variables_may_differ_from_start_to_start(node: Node) -> None:
    node.script.write_text("import os; print(os.environ['RANK'], os.environ['MASTER_PORT'])\n" + SLEEP)
    node.start(node.spec(env={"RANK": "0", "MASTER_PORT": "1"}))
    node.fill()
    node.stop()
    script = "import os; print(os.environ['RANK'], os.environ['MASTER_PORT'])"
    node.script.write_text(script)
    assert node.start(node.spec(env={"RANK": "5", "MASTER_PORT": "2"})) == {0}
    node.until(Exited)
    assert (node.folder / "out-1-0").read_text() == "5 2\n"


def test_a_spare_that_was_killed_is_replaced(node: Node) -> None:
    node.start()
    node.fill()
    (spare,) = node.children() - set(node.pids.values())
    os.kill(spare, signal.SIGKILL)
    node.until(SpareGone)
    assert node.spares.held == 0
    node.fill()
    node.stop()
    assert node.start() == {0}


def test_a_spare_that_does_not_answer_costs_a_moment_and_the_rank_starts_cold(node: Node) -> None:
    node.start()
    node.fill()
    (spare,) = node.children() - set(node.pids.values())
    os.kill(spare, signal.SIGSTOP)
    node.stop()
    assert node.start() == set()
    assert ended(spare)
    assert node.pids[0] != spare


def test_after_a_few_failures_no_spare_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FAILURES_MAX", 2)
    node = Node(tmp_path, script=SLEEP)
    node.script.write_text("import helper\n" + SLEEP)
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "helper.py").write_text("import calendar")
    (tmp_path / "calendar.py").write_text("")
    try:
        node.start(node.spec(env={"PYTHONPATH": str(site)}))
        node.until(GatePassed)
        for _ in range(2):
            node.spares.act()
            assert isinstance(node.until(SpareGone), SpareGone)
        node.spares.act()
        assert node.spares.due_s is None
        assert node.guard.wait_event(0.3) is None
        (tmp_path / "calendar.py").unlink()
        node.stop()
        node.start(node.spec(env={"PYTHONPATH": str(site)}))
        node.spares.act()
        assert node.spares.held == 0, "a restart alone forgets no failure"
        monkeypatch.setattr(module, "FAILURES_FORGOTTEN_S", 0.0)  # an hour later
        node.stop()
        node.start(node.spec(env={"PYTHONPATH": str(site)}))
        node.fill()
    finally:
        node.guard.close()


def test_with_little_memory_auto_makes_none(tmp_path: Path) -> None:
    node = Node(tmp_path, mode="auto", free=memory_needed(1) - 1)
    try:
        node.start()
        node.until(GatePassed)
        node.spares.act()
        assert node.children() == set(node.pids.values())
        assert node.spares.due_s is None
    finally:
        node.guard.close()


def test_off_is_off(tmp_path: Path) -> None:
    node = Node(tmp_path, mode="off")
    try:
        node.start()
        assert node.guard.wait_event(0.3) is None, "the ranks don't report the gate"
        assert node.spares.due_s is None
    finally:
        node.guard.close()


@pytest.mark.parametrize("flag", ["-I", "-E", "-S"])
def test_a_python_that_does_not_pass_the_gate_has_no_spare(node: Node, flag: str) -> None:
    node.script.write_text("print('ran', flush=True)\n" + SLEEP)
    node.start(node.spec(argv=(sys.executable, flag, str(node.script))))
    assert node.guard.wait_event(0.5) is None
    node.spares.act()
    assert node.children() == set(node.pids.values())


def test_a_program_that_starts_a_python_has_no_spare(node: Node) -> None:
    """It would run what comes before the gate a second time, without a rank."""
    count = node.folder / "count"
    wrapper = node.folder / "python3"
    wrapper.write_text(f'#!/bin/sh\necho x >> {count}\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    for argv in (("sh", str(wrapper), str(node.script)), (str(wrapper), str(node.script))):
        node.start(node.spec(argv=argv))
        assert node.guard.wait_event(0.5) is None
        node.spares.act()
        assert node.children() == set(node.pids.values())
        node.stop()
    assert count.read_text() == "x\nx\n"


def test_spares_and_what_they_started_end_with_the_launcher(tmp_path: Path) -> None:
    site = tmp_path / "site-packages" / "heavy"
    site.mkdir(parents=True)
    pid_file = tmp_path / "helper.pid"
    (site / "__init__.py").write_text(
        "import subprocess\n"
        f"open({str(pid_file)!r}, 'a').write(str(subprocess.Popen(['setsid', 'sleep', '100']).pid) + '\\n')"
    )
    code = (
        "import os, sys; from pathlib import Path; from tests.agents.ranks.test_warm_spares import Node\n"
        f"node = Node(Path({str(tmp_path)!r}), script='import heavy, signal; signal.pause()')\n"
        f"node.start(node.spec(env={{'PYTHONPATH': {str(site.parent)!r}}}))\n"
        "node.fill(); print(*node.children(), flush=True); sys.stdin.read()"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert launcher.stdout is not None
    pids = [int(word) for word in launcher.stdout.readline().split()]
    helpers = [int(word) for word in pid_file.read_text().split()]
    assert (len(pids), len(helpers)) == (2, 2)
    launcher.kill()
    launcher.communicate()
    assert all(ended(pid) for pid in [*pids, *helpers])


ROOT = Path(__file__).parents[3]


def test_a_child_of_a_spare_waits_with_it(node: Node) -> None:
    site = node.folder / "site-packages"
    site.mkdir()
    (site / "heavy.py").write_text(
        "import os, subprocess\n"
        f"with open(f'{site}/{{os.getpid()}}', 'w') as file:\n"
        "    file.write(str(subprocess.Popen(['sleep', '100']).pid))"
    )
    node.script.write_text("import heavy\n" + SLEEP)
    env = {"PYTHONPATH": str(site)}
    node.start(node.spec(env=env))
    node.fill()
    (spare,) = node.children() - set(node.pids.values())
    helper = int((site / str(spare)).read_text())
    assert helper not in node.stop().killed
    assert node.start(node.spec(env=env)) == {0}
    assert helper in node.stop().killed, "now it belongs to a rank"


@pytest.mark.parametrize("restarts", [15, pytest.param(200, marks=pytest.mark.full)])
def test_restarts_leave_nothing_behind(node: Node, restarts: int) -> None:
    """Descriptors of the guard and of its owner, processes and memory are the same after many restarts."""

    def used() -> tuple[int, int, int, int]:
        node.fill()
        return (
            len(os.listdir(f"/proc/{node.guard.pid}/fd")),
            len(os.listdir("/proc/self/fd")),
            len(node.children()),
            _resident_kib(node.guard.pid) // 1024,
        )

    node.start()
    before = used()
    for _ in range(restarts):
        node.stop()
        assert node.start() == {0}
        after = used()
    assert after[:3] == before[:3]
    assert after[3] <= before[3] + 2


def _resident_kib(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS:"))


# -- what may be held ----------------------------------------------------------------------------------------

PYTHON = sys.executable


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ([PYTHON, "-u", "train.py"], ""),
        ([PYTHON, "-m", "pkg"], ""),
        ([PYTHON, "-c", "pass"], ""),
        ([PYTHON, "-uOB", "-W", "ignore", "-Xutf8", "train.py", "-I"], ""),
        (["numactl", "--physcpubind=0", PYTHON, "train.py"], ""),
        ([PYTHON, "-I", "train.py"], "Python's option -I may go past our gate"),
        ([PYTHON, "-uE", "train.py"], "Python's option -uE may go past our gate"),
        ([PYTHON, "-i", "train.py"], "Python's option -i may go past our gate"),
        ([PYTHON], "there is no script or module to run"),
        ([PYTHON, "-"], "Python's option - may go past our gate"),
        (["./train"], "train is not a Python interpreter"),
        (["bash", "run.sh"], "bash is not a Python interpreter"),
        (["numactl", "--all"], "numactl is not a Python interpreter"),
        (["/no/such/python3", "train.py"], "python3 is not a Python interpreter"),
    ],
)
def test_which_commands_may_be_held(argv: list[str], why: str) -> None:
    assert unfit_reason(argv) == why


def test_what_is_only_known_later_is_left_out_of_a_spares_environment() -> None:
    env = {"RANK": "1", "LOCAL_RANK": "1", "MASTER_PORT": "2", "TORCHELASTIC_RESTART_COUNT": "0", "X": "y"}
    assert early_env(env) == {"LOCAL_RANK": "1", "X": "y"}


def test_free_memory_is_the_nodes_or_what_the_cgroup_leaves(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 8388608 kB\n")
    assert memory_free(tmp_path) == 8 << 30
    group = tmp_path / "sys/fs/cgroup/job"
    group.mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    (group / "memory.max").write_text("max\n")
    assert memory_free(tmp_path) == 8 << 30
    (group / "memory.max").write_text(str(4 << 30))
    (group / "memory.current").write_text(str(3 << 30))
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {1 << 29}\n")
    assert memory_free(tmp_path) == (1 << 30) + (1 << 29)


def test_a_node_needs_two_gibibytes_or_half_of_one_for_each_rank() -> None:
    assert (memory_needed(1), memory_needed(8)) == (2 << 30, 4 << 30)


def test_a_node_without_ranks_has_spares_before_any_of_them_has_run(node: Node) -> None:
    node.script.write_text("raise SystemExit('must not run here')")
    node.spares.expect([node.spec(0), node.spec(1)])
    node.spares.act()
    node.until(SpareReady)  # the probe, which is dropped
    node.fill(2)
    held = node.children()
    node.script.write_text(SLEEP)
    assert node.start(node.spec(0), node.spec(1)) == {0, 1}
    assert set(node.pids.values()) <= held
    assert not node.spares.expecting
    node.fill(2)  # they are ranks like others now, with spares of their own
    node.stop()


def test_a_node_without_ranks_has_no_spares_where_the_gate_would_not_hold_them(
    node: Node, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    node.script.write_text(f"open({str(ran)!r}, 'w')")
    wrapper = tmp_path / "wrap.sh"
    wrapper.write_text(f'exec {sys.executable} "$@"')
    past_the_gate = (sys.executable, "-E", str(node.script))
    for argv in (("sh", str(wrapper), str(node.script)), past_the_gate):
        node.spares.expect([node.spec(argv=argv)])
        assert not node.spares.expecting
    # An environment without our site folder: only the probe finds that out.
    bare = node.spec()
    bare = bare._replace(env={key: value for key, value in bare.env.items() if key != "PYTHONPATH"})
    node.spares.expect([bare])
    node.spares.act()
    node.until(SpareGone)
    assert (node.spares.expecting, node.spares.held, node.spares.due_s) == (False, 0, None)
    assert not ran.exists()


def test_ranks_that_start_before_their_spares_are_ready_start_cold(node: Node) -> None:
    node.spares.expect([node.spec()])
    node.spares.act()
    assert node.start() == set()
    node.stop()
    assert not node.children(), "the probe is gone, too"
