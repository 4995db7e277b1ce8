"""One job of real `aegis-run` processes, here or on hosts of a `Net`, and its observation from outside.

    with Job(tmp_path, nnodes="2", nproc=1, flags=["--aegis-bootcheck", "off"]) as job:
        first, second = job.start(script, worker="a"), job.start(script, worker="b")
        job.wait_phase("RunCommand")
        os.kill(job.ranks(second)[1].pid, signal.SIGKILL)
        job.wait(lambda view: view["incarnation"] == 2 and view["phase"] == "RunCommand")
        assert first.wait() == 0

What a test waits for is read from the journal, which the master writes before it sends orders; what it
asserts, by `status()`, is what `aegisctl status --json` prints. Leaving the block normally asserts that the
journal replays and that nothing of the job is left running; with an error, it prints all output.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import msgspec

from aegis_elastic.core.accounts import journal
from aegis_elastic.core.accounts.status_view import status_view
from aegis_elastic.testing.faults import Gates
from aegis_elastic.testing.netns import Host, Net, NetnsUnavailable

# On two loaded cores an import of torch may take ten seconds. These bounds are for hangs, not for speed.
PATIENCE_S = 90.0
LEAVE_S = 15.0
TAIL_CHARS = 6000
_MARK = "AEGIS_TEST_JOB"
_LAUNCH = "AEGIS_TEST_LAUNCH"
_BIN = Path(sys.executable).parent

View = dict[str, Any]


class Rank(NamedTuple):
    """A training process that lives now; `environ` is what it was started with."""

    rank: int
    pid: int
    environ: dict[str, str]


class Launch:
    """One `aegis-run` process. Its pid is the launcher's own, whichever host it is on."""

    def __init__(self, number: int, worker: str, process: subprocess.Popen[str], output: Path) -> None:
        self.number = number
        self.worker = worker
        self.process = process
        self._output = output

    @property
    def pid(self) -> int:
        """The launcher's process id."""
        return self.process.pid

    @property
    def output(self) -> str:
        """All that it and its ranks have written so far, both streams."""
        return self._output.read_text(errors="replace")

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Its exit code (-N for death by signal N). AssertionError with its output if it doesn't end."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"launcher {self.worker or self.number} did not end in {timeout_s:.0f} s:\n{self.output}"
            ) from None

    def wait_output(self, text: str, timeout_s: float = PATIENCE_S) -> str:
        """Wait until `text` is in its output; returns all of it. AssertionError if it ends without."""

        def is_there() -> bool:
            ended = self.process.poll() is not None
            found = text in self.output
            assert found or not ended, f"no {text!r} from {self.worker or self.number}, which has ended"
            return found

        wait_for(is_there, f"{text!r} in the output of {self.worker or self.number}", timeout_s)
        return self.output

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Send it a signal; after SIGKILL, wait for its end."""
        self.process.send_signal(signum)
        if signum == signal.SIGKILL:
            self.process.wait(LEAVE_S)


class Job:
    """A job and everything that was started for it. `folder` gets the logs and one state directory a host."""

    def __init__(
        self,
        folder: Path,
        name: str = "job",
        *,
        nnodes: str = "1",
        nproc: int = 1,
        max_restarts: int | None = None,
        endpoint: str = "",
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        torchrun_conf: str = "",
    ) -> None:
        """`endpoint` HOST:PORT; without one a free port of the loopback. `torchrun_conf`: the launchers are
        stock torchrun with our rendezvous handler, and this is for their --rdzv-conf.
        """
        self.folder = folder
        self.name = name
        self.endpoint = endpoint or f"127.0.0.1:{free_port()}"
        self.launches: list[Launch] = []
        self._mark = f"{name}-{uuid.uuid4().hex}"
        self._env = dict(env or {})
        self._plane_host: Host | None = None
        self._plane_state = folder / "state"
        self._torchrun_conf = torchrun_conf
        backend = "aegis" if torchrun_conf else "c10d"
        self._flags = ["--rdzv-backend", backend, "--rdzv-endpoint", self.endpoint, "--rdzv-id", name]
        self._flags += ["--nnodes", nnodes, "--nproc-per-node", str(nproc)]
        if max_restarts is not None:
            self._flags += ["--max-restarts", str(max_restarts)]
        self._flags += flags
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(self.transcript())
        for launch in self.launches:
            if launch.process.poll() is None:
                launch.kill()
        left = self._wait_gone()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        if error is None:
            assert not left, f"left running after all launchers had ended: {left}"
            if self.journal_file is not None:
                result = journal.replay(journal.read(self.journal_file))
                assert result.ok, result.first_difference

    # ------------------------------------------------------------ starting

    def start(
        self,
        script: Path | str,
        *args: str,
        worker: str = "",
        host: Host | None = None,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        gates: Gates | None = None,
    ) -> Launch:
        """Start one launcher: on `host`, or here. `worker` becomes its --aegis-worker-name if given; with
        `gates` its agent waits there before it finishes what an order asks (see `testing.faults`).

        The first one is expected to own the endpoint, so `status` and the journal are looked for with it.
        """
        number = len(self.launches)
        state = self.folder / f"state-{host.name}" if host else self.folder / "state"
        if number == 0:
            self._plane_host, self._plane_state = host, state
        environ = self._environ(state) | {_LAUNCH: str(number)}
        environ["GLOO_SOCKET_IFNAME"] = "eth0" if host else "lo"
        environ |= dict(env or {})
        argv = [str(_BIN / "aegis-run")]
        if gates is not None:
            argv = [sys.executable, "-m", "aegis_elastic.testing.faults", str(gates.folder)]
        elif self._torchrun_conf:
            argv = [str(_BIN / "torchrun")]
        argv += [*self._flags, *flags]
        if self._torchrun_conf:
            named = f",aegis_worker_name={worker}" if worker else ""
            argv += ["--rdzv-conf", self._torchrun_conf + named]
        elif worker:
            argv += ["--aegis-worker-name", worker]
        argv += [str(script), *args]
        output = self.folder / f"launch-{number}.log"
        with open(output, "w", encoding="utf-8") as stream:
            options: dict[str, Any] = {"env": environ, "cwd": self.folder, "stdout": stream, "stderr": stream}
            if host is None:
                process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, text=True, **options)
            else:
                process = host.popen(argv, **options)
        launch = Launch(number, worker or (host.name if host else ""), process, output)
        self.launches.append(launch)
        return launch

    def _environ(self, state: Path) -> dict[str, str]:
        own = {"XDG_STATE_HOME": str(state), "OMP_NUM_THREADS": "1", _MARK: self._mark}
        # their imports would only slow down tests of other things
        own["AEGIS_WARM_SPARES"] = "off"
        return {**os.environ, **own, **self._env}

    # ------------------------------------------------------------ observing

    def status(self) -> View:
        """What `aegisctl status --json` prints on the plane's host, of the running job or the ended one."""
        done = self.ctl("status", "--json")
        assert done.stdout, f"aegisctl status: {done.stderr}"
        view: View = json.loads(done.stdout)
        return view

    def ctl(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run `aegisctl --job NAME ARGS` on the plane's host."""
        argv = [str(_BIN / "aegisctl"), "--job", self.name, *args]
        env = self._environ(self._plane_state)
        if self._plane_host is not None:
            return self._plane_host.run(argv, env=env, cwd=self.folder)
        return subprocess.run(argv, env=env, cwd=self.folder, capture_output=True, text=True, timeout=60)

    @property
    def run_dir(self) -> Path | None:
        """The newest run directory of this job, None while there is none."""
        current = self._plane_state / "aegis" / "default" / self.name / "current"
        return Path(json.loads(current.read_bytes())["runDir"]) if current.exists() else None

    @property
    def journal_file(self) -> Path | None:
        """The newest run's journal, None while there is none."""
        file = self.run_dir / "journal.jsonl" if self.run_dir else None
        return file if file is not None and file.exists() else None

    def journal(self) -> list[journal.Line]:
        """The lines of the newest run's journal so far."""
        return journal.read(self.journal_file) if self.journal_file else []

    def view(self) -> View:
        """The status by the journal, in the form of `status()`; {} while there is none."""
        walked = list(journal.walk(self.journal()))
        return status_view(walked[-1].made.status, {}) if walked else {}

    def report(self) -> View:
        """The run directory's report.json."""
        assert self.run_dir is not None, "the job never began"
        report: View = json.loads((self.run_dir / "report.json").read_bytes())
        return report

    def wait(self, holds: Callable[[View], bool], what: str = "", timeout_s: float = PATIENCE_S) -> View:
        """Wait until `holds` for the job's status; returns that status."""
        seen: View = {}

        def check() -> bool:
            nonlocal seen
            seen = self.view()
            if not seen or holds(seen):
                return bool(seen)
            assert seen["phase"] not in ("Succeed", "Failed"), f"the job ended before {what or 'that'}"
            assert any(launch.process.poll() is None for launch in self.launches), "every launcher has ended"
            return False

        try:
            wait_for(check, what or "a status", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; last seen: {json.dumps(seen)}") from None
        return seen

    def wait_phase(self, phase: str, incarnation: int | None = None) -> View:
        """Wait for a phase, of that incarnation if given."""

        def holds(view: View) -> bool:
            return view["phase"] == phase and incarnation in (None, view["incarnation"])

        return self.wait(holds, f"phase {phase} (incarnation {incarnation or 'any'})")

    def wait_ranks(self, count: int, restart_count: int | None = None) -> dict[int, Rank]:
        """Wait until that many ranks live, all of that TORCHELASTIC_RESTART_COUNT if given."""
        found: dict[int, Rank] = {}

        def check() -> bool:
            nonlocal found
            found = self.ranks()
            counts = {rank.environ["TORCHELASTIC_RESTART_COUNT"] for rank in found.values()}
            return len(found) == count and (restart_count is None or counts == {str(restart_count)})

        wait_for(check, f"{count} ranks (restart count {restart_count})")
        return found

    def ranks(self, launch: Launch | None = None) -> dict[int, Rank]:
        """Global rank -> training process that lives now, of one launcher or of all."""
        processes = {pid: environ for pid, environ in self.processes().items() if "RANK" in environ}
        found = {}
        for pid, environ in processes.items():
            mine = launch is None or environ.get(_LAUNCH) == str(launch.number)
            if mine and parent_of(pid) not in processes:
                found[int(environ["RANK"])] = Rank(int(environ["RANK"]), pid, environ)
        return found

    def processes(self) -> dict[int, dict[str, str]]:
        """Pid -> environment of everything that lives and was started for this job, however indirectly."""
        mark, found = f"{_MARK}={self._mark}".encode(), {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue  # ended meanwhile, or not ours to read
            if mark in variables:
                pairs = (variable.decode(errors="replace").partition("=") for variable in variables)
                found[int(entry.name)] = {key: value for key, _, value in pairs}
        return found

    def transcript(self) -> str:
        """All output and the journal, to find out why a test failed."""
        parts = [
            f"=== {launch.worker or launch.number}\n{launch.output[-TAIL_CHARS:]}" for launch in self.launches
        ]
        for line in self.journal():
            event = msgspec.json.encode(line.event).decode()[:240]
            parts.append(f"{line.t:.3f} {line.seq:3d} {line.transition}: {line.reason}  {event}")
        if self.run_dir is not None:
            log = self.run_dir.parent / "plane" / "plane.log"
            parts += [f"=== {log}", log.read_text(errors="replace")[-TAIL_CHARS:] if log.exists() else "none"]
        return "\n".join(parts)

    def _wait_gone(self) -> dict[int, str]:
        left: dict[int, str] = {}

        def gone() -> bool:
            nonlocal left
            left = {pid: _command(pid) for pid in self.processes()}
            return not left

        try:
            wait_for(gone, "the end of all processes", LEAVE_S)
        except AssertionError:
            return left
        return {}


@contextlib.contextmanager
def hosts(names: int | Sequence[str], share: Path, unmet: Callable[[str], None]) -> Iterator[Net]:
    """A `Net` that shares that folder, or the test is skipped (failed in CI) for want of namespaces."""
    net = Net(names, share=[share])
    try:
        net.__enter__()
    except NetnsUnavailable as error:
        unmet(str(error))
        raise AssertionError("unmet() must not return") from error
    try:
        yield net
    finally:
        net.__exit__(*sys.exc_info())


def free_port() -> int:
    """A port of the loopback whose successor is free, too (standalone agents meet there)."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = int(first.getsockname()[1])
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except (OSError, OverflowError):
                continue
            return port


def wait_for(holds: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Poll until it `holds`; AssertionError after the timeout."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, f"no {what} within {timeout_s:.0f} s"
        time.sleep(0.05)


def stays(holds: Callable[[], bool], seconds: float) -> None:
    """Poll for that long; it must hold every time. For what must not happen."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        assert holds(), f"did not stay so for {seconds:g} s"
        time.sleep(0.1)


def parent_of(pid: int) -> int:
    """The parent of a process, 0 if that is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
