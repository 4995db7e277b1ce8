"""The seam to torch: a contract with its private names, and ranks that look as under torchrun."""

from __future__ import annotations

import importlib
import inspect
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup, WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.run import config_from_args, parse_args

from aegis_elastic.agents.guard.client import Exited, GuardClient, SpawnError, Stopped
from aegis_elastic.agents.ranks.error_file import raised_at
from aegis_elastic.agents.ranks.torch_seam import (
    GuardedContext,
    JobIdentity,
    SeamAgent,
    SeamError,
    command_of,
    failure_of,
    run_log_dir,
)
from aegis_elastic.agents.ranks.warm_spares import early_env
from aegis_elastic.worker.environment import MARKER
from tests.agents.processes import next_event, wait_stopped

SERVER = "torch.distributed.elastic.agent.server"
AGENT = f"{SERVER}.local_elastic_agent:LocalElasticAgent"
PROCESSES = "torch.distributed.elastic.multiprocessing"
# what we use of torch that torch doesn't promise: callables with the arguments that we give or override
PRIVATE_CALLABLES = {
    f"{SERVER}.local_elastic_agent:start_processes": ["name", "entrypoint", "args", "envs", "logs_specs"],
    f"{AGENT}.__init__": [
        "spec",
        "logs_specs",
        "log_line_prefix_template",
    ],
    f"{AGENT}._start_workers": ["worker_group"],
    f"{AGENT}._shutdown": ["death_sig"],
    f"{PROCESSES}.api:SubprocessContext.__init__": ["name", "entrypoint", "args", "envs", "logs_specs"],
    f"{PROCESSES}.api:SubprocessContext._start": [],
    f"{PROCESSES}.api:SubprocessContext._poll": [],
    f"{PROCESSES}.api:SubprocessContext._close": ["death_sig", "timeout"],
    f"{PROCESSES}.api:SubprocessContext.start": [],
    f"{PROCESSES}.api:SubprocessContext.pids": [],
    f"{PROCESSES}.tail_log:TailLog.start": [],
    f"{PROCESSES}.tail_log:TailLog.stop": [],
    "torch.distributed.run:run_script_path": ["training_script"],
}
GROUP_FIELDS = {"spec", "workers", "store", "group_rank", "group_world_size", "master_addr", "master_port"}
WORKER_FIELDS = {"id", "local_rank", "global_rank", "role_rank", "world_size", "role_world_size"}

SHOW = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv]))"


@pytest.fixture
def guard() -> Iterator[GuardClient]:
    client = GuardClient.start("seam-test")
    yield client
    client.close()


def agent_for(
    tmp_path: Path,
    *arguments: str,
    entrypoint: str = sys.executable,
    logs: dict[str, Any] | None = None,
    **fields: Any,
) -> SeamAgent:
    spec = WorkerSpec(
        role=fields.pop("role", "trainer"),
        local_world_size=fields.pop("local_world_size", 2),
        rdzv_handler=cast(Any, JobIdentity("job-7")),
        entrypoint=entrypoint,
        args=arguments,
        max_restarts=3,
        **fields,
    )
    logs_specs = DefaultLogsSpecs(log_dir=str(tmp_path / "logs"), **(logs or {"redirects": Std.ALL}))
    return SeamAgent(spec, logs_specs, log_line_prefix_template="[${role_name} ${local_rank}]:")


def start(agent: SeamAgent, guard: GuardClient, generation: int = 0) -> GuardedContext:
    return agent.start_ranks(
        group_rank=1,
        group_world_size=3,
        rank_offset=4,
        world_size=10,
        role_rank_offset=2,
        role_world_size=6,
        master_addr="127.0.0.1",
        master_port=29511,
        restart_count=generation,
        guard=guard,
        generation=generation,
    )


def wait_exits(guard: GuardClient, count: int) -> list[Exited]:
    return [cast(Exited, next_event(guard)) for _ in range(count)]


def resolve(path: str) -> Any:
    module, _, names = path.partition(":")
    found = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("path", PRIVATE_CALLABLES)
def test_contract_torch_still_has_the_callables_that_the_seam_needs(path: str) -> None:
    parameters = inspect.signature(resolve(path)).parameters
    missing = [name for name in PRIVATE_CALLABLES[path] if name not in parameters]
    assert not missing, f"{path}{tuple(parameters)} no longer takes {missing}"


def test_contract_torch_still_has_the_fields_that_the_seam_sets(tmp_path: Path) -> None:
    agent = agent_for(tmp_path, "-c", "")
    assert set(WorkerGroup.__slots__) >= GROUP_FIELDS
    assert set(Worker.__slots__) >= WORKER_FIELDS
    assert agent._remaining_restarts == 3
    assert agent._pcontext is None


def test_the_run_log_dir_is_the_one_that_torch_then_uses(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(log_dir=str(tmp_path / "logs"))
    ahead = run_log_dir(specs, "job")
    assert ahead is not None
    assert ahead.parent == tmp_path / "logs"
    envs = {0: {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "0"}}
    assert Path(specs.reify(envs).error_files[0]).is_relative_to(ahead)
    assert run_log_dir(DefaultLogsSpecs(log_dir=os.devnull), "job") is None


def test_contract_start_workers_hands_over_only_what_a_process_context_takes(tmp_path: Path) -> None:
    """Whatever a torch version passes to start_processes must fit SubprocessContext, but for start_method."""
    taken = inspect.signature(resolve(f"{PROCESSES}.api:SubprocessContext.__init__")).parameters
    given_names = inspect.signature(resolve(f"{SERVER}.local_elastic_agent:start_processes")).parameters
    assert set(given_names) - {"start_method"} <= set(taken)


def test_ranks_get_the_environment_the_logs_and_the_arguments_that_torchrun_would_give(
    guard: GuardClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AEGIS_JOIN_SECRET", "hush")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    agent = agent_for(tmp_path, "-u", "-c", SHOW, "--local-rank=${local_rank}")
    context = start(agent, guard, generation=2)
    assert {e.exit_code for e in wait_exits(guard, 2)} == {0}
    agent.finish_ranks()
    (attempt,) = (tmp_path / "logs").glob("job-7_*/attempt_2")
    for local_rank in (0, 1):
        env, argv = json.loads((attempt / str(local_rank) / "stdout.log").read_text())
        assert argv == ["-c", f"--local-rank={local_rank}"]
        assert env["TORCHELASTIC_ERROR_FILE"] == str(attempt / str(local_rank) / "error.json")
        expected = {
            "RANK": 4 + local_rank,
            "LOCAL_RANK": local_rank,
            "GROUP_RANK": 1,
            "ROLE_RANK": 2 + local_rank,
            "ROLE_NAME": "trainer",
            "WORLD_SIZE": 10,
            "LOCAL_WORLD_SIZE": 2,
            "GROUP_WORLD_SIZE": 3,
            "ROLE_WORLD_SIZE": 6,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": 29511,
            "TORCHELASTIC_RESTART_COUNT": 2,
            "TORCHELASTIC_MAX_RESTARTS": 3,
            "TORCHELASTIC_RUN_ID": "job-7",
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "OMP_NUM_THREADS": 1,
        }
        assert {key: env.get(key) for key in expected} == {key: str(value) for key, value in expected.items()}
        assert "AEGIS_JOIN_SECRET" not in env
        assert "PYTHONPATH" not in env or "aegis" not in env["PYTHONPATH"]
    assert context.pids().keys() == {0, 1}
    assert [worker.id for worker in agent.get_worker_group().workers] == list(context.pids().values())


def test_virtual_local_rank_is_torchs_own(
    guard: GuardClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "virtual_local_rank" not in WorkerSpec.__dataclass_fields__:
        pytest.skip("this torch has no virtual local rank")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    agent = agent_for(tmp_path, "-c", SHOW, virtual_local_rank=True)
    context = start(agent, guard)
    wait_exits(guard, 2)
    agent.finish_ranks()
    envs = [json.loads(Path(context.stdouts[i]).read_text())[0] for i in (0, 1)]
    assert [(env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"]) for env in envs] == [("0", "5"), ("0", "7")]


def test_tee_prints_every_line_with_its_prefix_and_finish_leaves_none_behind(
    guard: GuardClient, tmp_path: Path
) -> None:
    out, err = io.StringIO(), io.StringIO()
    code = "import os, sys; print('out', os.environ['RANK']); sys.stderr.write('end without newline')"
    with redirect_stdout(out), redirect_stderr(err):
        agent = agent_for(tmp_path, "-c", code, logs={"tee": Std.ALL}, duplicate_stdout_filters=["out 5"])
        context = start(agent, guard)
        wait_exits(guard, 2)
        agent.finish_ranks()
    assert sorted(out.getvalue().splitlines()) == ["[trainer 0]:out 4", "[trainer 1]:out 5"]
    assert sorted(err.getvalue().split("[")[1:]) == [f"trainer {i}]:end without newline" for i in (0, 1)]
    filtered = Path(context.stdouts[0]).parents[1] / "filtered_stdout.log"
    assert filtered.read_text() == "[trainer 1]:out 5\n"
    context.stop_tails()


def test_starting_ranks_leaves_the_launchers_signal_handlers_and_torchs_module_alone(
    guard: GuardClient, tmp_path: Path
) -> None:
    original = resolve(f"{SERVER}.local_elastic_agent:start_processes")
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    agent = agent_for(tmp_path, "100", entrypoint="sleep")
    context = start(agent, guard)
    assert {signum: signal.getsignal(signum) for signum in before} == before
    assert resolve(f"{SERVER}.local_elastic_agent:start_processes") is original
    with pytest.raises(SeamError, match="cannot poll"):
        context.wait(0)
    guard.stop(grace_s=10)
    assert isinstance(wait_stopped(guard)[1], Stopped)
    agent.finish_ranks()


def test_a_program_that_does_not_exist_is_the_error_of_the_start(guard: GuardClient, tmp_path: Path) -> None:
    agent = agent_for(tmp_path, entrypoint="no-such-trainer")
    with pytest.raises(SpawnError, match="no-such-trainer: No such file"):
        start(agent, guard)
    assert guard.events() == []


def test_incarnations_follow_each_other_on_one_agent(guard: GuardClient, tmp_path: Path) -> None:
    agent = agent_for(tmp_path, "-c", "import os; print(os.environ['TORCHELASTIC_RESTART_COUNT'])")
    for generation in range(3):
        context = start(agent, guard, generation)
        assert {e.generation for e in wait_exits(guard, 2)} == {generation}
        agent.finish_ranks()
        assert Path(context.stdouts[0]).read_text() == f"{generation}\n"


def test_a_dry_run_gives_all_of_a_start_but_what_only_a_rank_assignment_brings(
    guard: GuardClient, tmp_path: Path
) -> None:
    agent = agent_for(tmp_path, "-c", SHOW, logs={"redirects": Std.ALL, "tee": Std.ALL})
    specs = agent.dry_run()
    before = set(threading.enumerate())
    again = agent.dry_run()
    assert again == specs
    assert set(threading.enumerate()) == before, "no tail of a log that nobody writes"
    context = start(agent, guard, 1)
    wait_exits(guard, 2)
    agent.finish_ranks()
    for spec in specs:
        environ, argv = json.loads(Path(context.stdouts[spec.local_rank]).read_text())
        held = early_env({**environ, "TORCHELASTIC_ERROR_FILE": ""})
        expected = early_env(spec.env)
        for names in (held, expected):
            for name in ("PYTHONPATH", MARKER):  # the site folder takes itself out of them
                names.pop(name, None)
        assert held == expected
        assert argv == ["-c"]


def test_run_path_becomes_a_command_that_runs_the_script_as_torch_does(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; print(__name__, __file__, sys.argv, sys.path[0])")
    args = parse_args(["--run-path", str(script), "--lr", "0.1"])
    _, entrypoint, given = config_from_args(args)
    program, arguments = command_of(entrypoint, given)
    out = subprocess.run(
        [program, *arguments], capture_output=True, text=True, check=True, cwd=tmp_path
    ).stdout
    assert out == f"__main__ {script} {[str(script), '--lr', '0.1']} \n"


def test_commands_pass_through_and_other_functions_are_refused() -> None:
    assert command_of("numactl", ["--all", 3]) == ("numactl", ("--all", "3"))
    with pytest.raises(SeamError, match="cannot run the function"):
        command_of(print, [])


EXIT = Exited(0, 1, 4242, 1, None, 10.0, 1_700_000_000.5, True)


def test_a_failure_carries_what_record_wrote(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    code = (
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\n"
        "def main(): raise ValueError('bad batch')\n"
        "main()"
    )
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(path)}
    subprocess.run([sys.executable, "-c", code], env=env, capture_output=True)
    failure = failure_of(EXIT, str(path))
    assert failure.exception == "ValueError: bad batch"
    assert "raise ValueError" in failure.traceback or "in main" in failure.traceback
    assert failure.time_s > EXIT.wall_s
    assert (failure.local_rank, failure.pid, failure.exit_code, failure.first) == (1, 4242, 1, True)


@pytest.mark.parametrize(
    "content", [None, "", "{", "[]", '"x"', '{"message": 3}', '{"message": {"extraInfo": []}}']
)
def test_a_broken_error_file_is_no_error(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "error.json"
    if content is not None:
        path.write_text(content)
    failure = failure_of(EXIT, str(path))
    assert (failure.exception, failure.traceback, failure.time_s) == ("", "", EXIT.wall_s)
    assert failure.time == "2023-11-14T22:13:20+00:00"


def test_the_text_of_an_exception_is_limited_and_can_be_sent(tmp_path: Path) -> None:
    path, name = tmp_path / "error.json", os.fsdecode(b"caf\xe9")
    exception = f"FileNotFoundError: {name} of {[*range(50_000)]}"
    stack = f'  File "train.py", line 7, in load\n    open(name)\n{exception}\n'
    path.write_text(json.dumps({"message": {"message": exception, "extraInfo": {"py_callstack": stack}}}))
    failure = failure_of(EXIT, str(path))
    assert failure.exception.startswith("FileNotFoundError: caf? of [0, 1") and len(failure.exception) == 4000
    assert raised_at(failure.traceback) == "train.py:7 load"
    assert len(failure.traceback.encode()) < 2000


ERROR_KEYS = st.sampled_from(["message", "extraInfo", "timestamp"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from(["message", "extraInfo", "timestamp"]), inner)
    ),
)


@given(JSON.map(lambda value: json.dumps(value).encode()) | st.binary())
def test_no_error_file_breaks_the_reader(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed-error.json"
    path.write_bytes(content)
    failure = failure_of(EXIT, str(path))
    assert isinstance(failure.exception, str)
    assert failure.time
