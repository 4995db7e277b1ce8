"""The journal of a small job with one crash, and a master's Admin service."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import msgspec
import pytest

from aegis_elastic.bus.credentials import write_private
from aegis_elastic.bus.tls import make_certificate
from aegis_elastic.core.accounts.journal import Create, Line, StepEvent, begin, encode_line, line_of
from aegis_elastic.core.events import Error, Finish, Join, Reconcile
from aegis_elastic.core.machine import step
from aegis_elastic.core.model import CheckResult, Failure, JobSpec, Phase, Status
from aegis_elastic.launch.ctl.admin_client import METHOD

T0 = 1_700_000_000.0
_TICK_S = 0.01
_TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "train.py", line 7, in main',
    '    raise ValueError("boom")',
    "ValueError: boom",
)


class RecordedJob(NamedTuple):
    """A job's journal and its last status."""

    lines: list[Line]
    final: Status

    def write(self, path: Path, lines: int | None = None) -> None:
        path.write_bytes(b"".join(map(encode_line, self.lines[:lines])))


class _Recorder:
    """Feeds events to the machine and keeps the journal; every event advances the clock by 10 ms."""

    def __init__(self, spec: JobSpec) -> None:
        made = begin(spec, T0)
        self.status = made.status
        self.now = T0
        self.lines = [line_of(T0, 1, Create(spec), made)]

    def record(self, event: StepEvent) -> None:
        self.now += _TICK_S
        made = step(self.status, event, self.now)
        self.lines.append(line_of(self.now, len(self.lines) + 1, event, made))
        self.status = made.status

    def finish_all(self, *, checks: bool = False) -> None:
        for worker in self.status.workers:
            done = (CheckResult("io", True, "1 MiB came back right", self.now, 0.01),) if checks else ()
            current = (worker.name, worker.uid, self.status.incarnation, self.status.seq_num)
            self.record(
                Finish(*current, (), f"{worker.name}:4000", done, {"stop_s": 0.02, "diagnose_s": 0.3})
            )
        self.decide()

    def decide(self) -> None:
        """Reconcile until nothing is left to decide."""
        before = None
        while before is not self.status:
            before = self.status
            self.record(Reconcile())

    def until(self, phase: Phase) -> None:
        for _ in range(10):
            if self.status.phase is phase:
                return
            self.finish_all(checks=self.status.phase in (Phase.BOOT_CHECKING, Phase.TROUBLESHOOTING))
        raise AssertionError(f"still {self.status.phase} on the way to {phase}")

    def crash(self, name: str) -> None:
        worker = self.status.worker(name)
        assert worker is not None
        failure = Failure(1, 1, self.now, 1, None, "ValueError: boom", _TRACEBACK)
        other = Failure(0, 0, self.now, None, "SIGTERM", None, (), after_stop=True)
        reason = "rank 1: exit code 1, ValueError: boom"
        current = (self.status.incarnation, self.status.seq_num)
        self.record(Error(name, worker.uid, *current, reason, (failure, other), timings_s={"detect_s": 0.06}))
        self.decide()


def record_job(job: str = "digits", *, workers: int = 2, max_retry: int = 3, crashes: int = 1) -> RecordedJob:
    """A job in which ranks crash one after another, each on the next worker, and which then succeeds (or has
    used up its retries)."""
    recorder = _Recorder(JobSpec(job, "default", workers, workers, max_retry))
    for number in range(workers):
        recorder.record(Join(f"w{number}", f"uid{number}", f"node{number}", f"10.0.0.{number + 1}", 2))
    recorder.decide()
    for crash in range(crashes):
        recorder.until(Phase.RUN_COMMAND)
        recorder.crash(f"w{crash % workers}")
        if crash == max_retry:
            break
    recorder.until(Phase.FAILED if crashes > max_retry else Phase.SUCCEED)
    return RecordedJob(recorder.lines, recorder.status)


@pytest.fixture
def recorded_job() -> Callable[..., RecordedJob]:
    return record_job


class Master:
    """A real gRPC server with the Admin service; `answer(op, args)` returns data or raises ValueError."""

    token = "s3cret"

    def __init__(self, directory: Path, answer: Callable[[str, dict[str, Any]], Any]) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self._answer = answer
        self.certificate = make_certificate(directory, ["aegis", "127.0.0.1"])
        self._pool = ThreadPoolExecutor(2)
        self._server = grpc.server(self._pool)
        name, method = METHOD.strip("/").split("/")
        handler = grpc.unary_unary_rpc_method_handler(self._call)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(name, {method: handler}),)
        )
        key, cert = self.certificate.key_path.read_bytes(), self.certificate.pem.encode()
        port = self._server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, cert)]))
        self.endpoint = f"127.0.0.1:{port}"
        self._server.start()

    def _call(self, raw: bytes, context: object) -> bytes:
        request = msgspec.json.decode(raw)
        if request["token"] != self.token:
            return msgspec.json.encode({"ok": False, "error": "wrong token"})
        self.requests.append((request["op"], request["args"]))
        try:
            return msgspec.json.encode({"ok": True, "data": self._answer(request["op"], request["args"])})
        except ValueError as error:
            return msgspec.json.encode({"ok": False, "error": str(error)})

    def write_admin_file(self, run_dir: Path, **changes: str) -> None:
        """Write admin.json for this master into a run directory."""
        admin = {"endpoint": self.endpoint, "certPem": self.certificate.pem, "token": self.token, **changes}
        write_private(run_dir / "admin.json", msgspec.json.encode(admin))

    def stop(self) -> None:
        self._server.stop(0).wait()
        self._pool.shutdown()


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Callable[..., Master]]:
    """`master(view)`: a master whose status is `view`; others by `answer=`."""
    started: list[Master] = []

    def start(view: object = None, answer: Callable[[str, dict[str, Any]], Any] | None = None) -> Master:
        directory = tmp_path / f"master{len(started)}"
        directory.mkdir()
        started.append(Master(directory, answer or (lambda op, args: view)))
        return started[-1]

    yield start
    for one in started:
        one.stop()


@pytest.fixture(autouse=True)
def _own_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state directory of the test's own, and none of the variables that choose for the user."""
    for name in list(os.environ):
        if name.startswith(("PET_", "SLURM_")) or (
            name.startswith("AEGIS_") and name != "AEGIS_TEST_SESSION"
        ):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # torch would set it for good
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
