from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed.run as torchrun

from aegis_elastic.control.host.errors import UsageError
from aegis_elastic.launch.flags.options import Endpoint, Options, parse
from aegis_elastic.launch.flags.parser import make_parser

CPU_JOB = ("--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A training script in the current directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text("print('training')\n")
    return path


def refused(*argv: str) -> str:
    """The one line that says why this command line is no use."""
    with pytest.raises(UsageError) as caught:
        parse(argv)
    assert caught.value.exit_code == 2
    message = str(caught.value)
    assert message.startswith("cannot ") and "\n" not in message
    return message


# --- as torchrun reads them -----------------------------------------------------------------------------


def test_every_flag_of_torchrun_is_taken_in_every_spelling() -> None:
    ours = make_parser()._option_string_actions
    for name in torchrun.get_args_parser()._option_string_actions:
        assert name in ours


def test_every_flag_of_ours_begins_with_aegis_and_has_both_spellings() -> None:
    theirs = torchrun.get_args_parser()._option_string_actions
    own = set(make_parser()._option_string_actions) - set(theirs)
    assert own and all(name.startswith(("--aegis-", "--aegis_")) for name in own)
    assert {name.replace("-", "_") for name in own} == {name.replace("-", "_") for name in own if "_" in name}


@pytest.mark.parametrize(
    "argv",
    [
        ["--nproc_per_node", "8", "--nnodes", "2", "--rdzv_endpoint", "host1:6000", "--rdzv_backend", "c10d",
         "--max_restarts", "0", "--tee", "3", "train.py", "--lr", "1"],
        ["--nproc_per_node", "4", "--nnodes", "2", "--node_rank", "1", "--master_addr", "host1",
         "--master_port", "6000", "train.py"],
        ["--nproc-per-node", "2", "--log-dir", "logs", "--tee", "0:3,1:3", "--redirects", "3", "train.py"],
        ["--nproc_per_node=2", "--rdzv_backend", "c10d", "--rdzv_endpoint=localhost:0",
         "--local-ranks-filter", "0", "--role", "rank", "--tee", "3", "-m", "pytest"],
        ["--nnodes", "2", "--rdzv_id", "101", "--rdzv_backend", "c10d", "--rdzv_endpoint", "10.0.0.1:29500",
         "-m", "pytest", "--", "x"],
        ["--role", ":", "--tee", "3", "--no-python", "sh", "-c", "true"],
        ["--nnodes", "1:4", "--rdzv-conf", "join_timeout=1200,last_call_timeout=5", "--rdzv-backend", "c10d",
         "--rdzv-endpoint", "host1", "train.py"],
        ["--virtual-local-rank", "--standalone", "train.py"],
    ],
)  # fmt: skip
def test_launch_lines_in_the_wild_give_what_torch_makes_of_them(argv: list[str], script: Path) -> None:
    options = parse(argv)
    theirs = _as_torchrun(argv)
    assert (options.cmd, options.cmd_args) == theirs[1:]
    for field in ("min_nodes", "max_nodes", "nproc_per_node", "role", "rdzv_backend", "rdzv_endpoint",
                  "rdzv_configs", "start_method", "monitor_interval", "local_addr", "signals_to_handle",
                  "virtual_local_rank", "shutdown_timeout", "duplicate_stdout_filters"):  # fmt: skip
        assert getattr(options.config, field) == getattr(theirs[0], field), field
    if "-0000-" not in theirs[0].run_id:
        assert options.config.run_id == theirs[0].run_id


def _as_torchrun(argv: Sequence[str]) -> tuple[torchrun.LaunchConfig, object, list[str]]:
    """What torchrun itself would launch; a run id of its own making has zeros in the middle."""
    seen: list[object] = []

    def launch(config: torchrun.LaunchConfig, entrypoint: object) -> object:
        return lambda *cmd_args: seen.append((config, entrypoint, list(cmd_args)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchrun, "elastic_launch", launch)
        patch.setattr(torchrun.uuid, "uuid4", lambda: "0-0000-0")
        torchrun.run(torchrun.parse_args(list(argv)))
    (warning,) = seen
    return warning  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("argv", "endpoint"),
    [
        ([], Endpoint("localhost", 0, "local")),
        (["--standalone"], Endpoint("localhost", 0, "standalone")),
        (["--standalone", "--rdzv-endpoint", "far:1"], Endpoint("localhost", 0, "standalone")),
        (["--nnodes", "2"], Endpoint("127.0.0.1", 29500, "master")),
        (["--master-port", "6000"], Endpoint("127.0.0.1", 6000, "master")),
        (["--nnodes", "2", "--master-addr", "::1"], Endpoint("::1", 29500, "master")),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint=host1"], Endpoint("host1", 29400, "rdzv")),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint=host1:7"], Endpoint("host1", 7, "rdzv")),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint=[fe80::1]:7"], Endpoint("fe80::1", 7, "rdzv")),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint=localhost:0"], Endpoint("localhost", 0, "rdzv")),
        (["--rdzv-backend", "c10d"], Endpoint("localhost", 29400, "rdzv")),
        (["--rdzv-backend", "aegis", "--rdzv-endpoint=host1"], Endpoint("host1", 29400, "rdzv")),
    ],
)
def test_every_way_to_name_the_meeting_point(argv: list[str], endpoint: Endpoint, script: Path) -> None:
    assert parse([*argv, "train.py"]).endpoint == endpoint


def test_variables_of_kubeflow_are_taken(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = (
        "NNODES=2:3 NPROC_PER_NODE=2 RDZV_BACKEND=c10d NODE_RANK=1 RDZV_ENDPOINT=job-0:2379 MAX_RESTARTS=0"
    )
    for pair in f"{given} RDZV_ID=j".split():
        monkeypatch.setenv("PET_" + pair.partition("=")[0], pair.partition("=")[2])
    options = parse(["train.py"])
    assert (options.config.min_nodes, options.config.max_nodes) == (2, 3)
    assert (options.max_restarts, options.max_restarts_given) == (0, True)
    assert (options.node_rank, options.job_name) == (1, "j")
    assert options.endpoint == Endpoint("job-0", 2379, "rdzv")


@pytest.mark.parametrize(
    ("argv", "variable", "most", "given"),
    [
        ([], None, 3, False),
        (["--max-restarts", "0"], None, 0, True),
        (["--max_restarts=7"], "1", 7, True),
        ([], "0", 0, True),
    ],
)
def test_restarts_left_unsaid_are_three_and_zero_stays_zero(
    argv: list[str],
    variable: str | None,
    most: int,
    given: bool,
    script: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable is not None:
        monkeypatch.setenv("PET_MAX_RESTARTS", variable)
    options = parse([*argv, "train.py"])
    assert (options.max_restarts, options.max_restarts_given) == (most, given)
    assert options.config.max_restarts == most


@pytest.mark.parametrize(
    ("argv", "rank", "worker"),
    [
        ([*CPU_JOB], None, ""),
        ([*CPU_JOB, "--node-rank", "0"], 0, "-0"),
        ([*CPU_JOB, "--node-rank", "5"], 5, "-5"),  # with spares there are more ranks than seats
        (["--nnodes", "2"], 0, ""),
        (["--nnodes", "2", "--node_rank=1"], 1, "-1"),
        (["--node-rank", "3"], 3, "-3"),  # torchrun ignores it on a single node
    ],
)
def test_a_node_rank_names_the_worker_only_if_somebody_chose_it(
    argv: list[str], rank: int | None, worker: str, script: Path
) -> None:
    options = parse([*argv, "train.py"])
    assert options.node_rank == rank
    assert options.aegis.worker_name == socket.gethostname() + worker


def test_what_a_job_is_called(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def named(*argv: str) -> tuple[str, bool]:
        options = parse([*argv, "train.py"])
        return options.job_name, options.anonymous

    assert named(*CPU_JOB, "--rdzv-endpoint", "h:70") == ("job-70", True)
    assert named("--rdzv-id", "a b/../c") == ("a b/../c", False)
    assert named("--standalone")[1] and named("--standalone") != named("--standalone")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    assert named("--standalone") == ("4711", False)
    assert named(*CPU_JOB, "--rdzv-id", "mine") == ("mine", False)
    assert parse([*CPU_JOB, "train.py"]).config.run_id == "none"  # what torchrun tells the ranks


# --- our own flags --------------------------------------------------------------------------------------


def test_our_defaults(script: Path) -> None:
    options = parse(["train.py", "--aegis-bootcheck", "off"])
    assert options.cmd_args[-2:] == ["--aegis-bootcheck", "off"], (
        "after the script everything is the script's"
    )
    own = options.aegis
    assert (own.bootcheck, own.troubleshoot, own.fault_grace_s, own.recovery_budget) == (
        "full",
        "adaptive",
        1,
        10,
    )
    assert (own.plane_linger_s, own.plane_restarts, own.lost_timeout_s) == (60, 5, 30)
    assert (own.report, own.run_dir, own.state_dir, own.fallback_port, own.check_paths) == (None,) * 4 + ({},)
    assert not own.require_secret and not own.propagate_exit_code
    assert (options.join_timeout_s, options.last_call_s, own.rejoin_timeout_s) == (600, 30, 600)
    assert options.namespace == "default"


def test_our_flags_in_both_spellings(script: Path, tmp_path: Path) -> None:
    own = parse(["--aegis-bootcheck", "env", "--aegis_fault_grace_s=0", "--aegis-report", "r.json",
                 "--aegis-check-path", "checkpoint=ckpt", "--aegis_check_path", "data=/data",
                 "--rdzv-conf", "join_timeout=9", "--aegis-require-secret", "train.py"]).aegis  # fmt: skip
    assert (own.bootcheck, own.fault_grace_s, own.report) == ("env", 0, tmp_path / "r.json")
    assert own.check_paths == {"checkpoint": tmp_path / "ckpt", "data": Path("/data")}
    assert own.rejoin_timeout_s == 9 and own.require_secret


def test_variables_give_our_defaults_and_flags_win(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AEGIS_BOOTCHECK", "off")
    monkeypatch.setenv("AEGIS_REQUIRE_SECRET", "1")
    monkeypatch.setenv("AEGIS_CHECK_PATH", "data=/a,shm=/dev/shm")
    monkeypatch.setenv("AEGIS_CHECK_BUDGET", "io=3,gpu=4.5")
    monkeypatch.setenv("AEGIS_PLANE_RESTARTS", "nonsense")
    own = parse(["--aegis-plane-restarts", "2", "train.py"]).aegis
    assert (own.bootcheck, own.require_secret, own.plane_restarts) == ("off", True, 2)
    assert set(own.check_paths) == {"data", "shm"}
    assert own.check_budgets == {"io": 3.0, "gpu": 4.5}
    again = parse(["--aegis-plane-restarts=2", "--aegis-check-path=log=/l", "train.py"]).aegis
    assert again.check_paths == {"log": Path("/l")}


@pytest.mark.parametrize(
    ("variable", "value"),
    [("PLANE_RESTARTS", "-1"), ("BOOTCHECK", "maybe"), ("REQUIRE_SECRET", "si"), ("FAULT_GRACE_S", "nan")],
)
def test_a_bad_variable_is_named(
    variable: str, value: str, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"AEGIS_{variable}", value)
    assert f"AEGIS_{variable}={value!r}" in refused("train.py")


@pytest.mark.parametrize(("variable", "value"), [("PET_STANDALONE", "yes"), ("PET_START_METHOD", "spoon")])
def test_a_bad_variable_of_torch_is_named(
    variable: str, value: str, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert f"{variable}={value!r}" in refused("train.py")


# --- bad input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--nnodes", "0"], "--nnodes '0': want at least 1 node"),
        (["--nnodes", "3:2"], "--nnodes '3:2': MIN is above MAX; did you mean 2:3?"),
        (["--nnodes", "5000"], "--nnodes '5000': a job has at most 4096 nodes"),
        (["--nnodes", "abc"], "--nnodes 'abc': want a number of nodes, or MIN:MAX"),
        (["--nnodes", "1:2:3"], "--nnodes '1:2:3'"),
        (["--nproc-per-node", "0"], "--nproc-per-node '0': want at least 1"),
        (["--nproc-per-node", "many"], "--nproc-per-node 'many': want a number, or one of auto"),
        (["--max-restarts", "-1"], "--max-restarts -1: want 0 or more"),
        (["--max-restarts", "some"], "--max-restarts/--max_restarts: invalid int value: 'some'"),
        (["--node-rank", "2", "--nnodes", "2"], "--node-rank 2: want 0 to 1"),
        (["--node-rank=-1"], "--node-rank -1"),
        (["--nporc-per-node", "2"], "--nporc-per-node; did you mean --nproc-per-node?"),
        (["--aegis-bootchek=off"], "did you mean --aegis-bootcheck?"),
        (["--aegis-bootcheck", "maybe"], "invalid choice: 'maybe'"),
        (["--aegis-fault-grace-s", "-1"], "'-1' is not a number of seconds, 0 or more"),
        (["--aegis-lost-timeout-s", "0"], "'0' is not a number of seconds above 0"),
        (["--aegis-recovery-budget", "0"], "'0' is not a whole number, 1 or more"),
        (["--aegis-fallback-port", "70000"], "'70000' is not a whole number, 1 to 65535"),
        (["--aegis-check-path", "cache=/x"], "'cache=/x' is not KIND=DIR"),
        (["--aegis-check-budget", "io=3,warp=1"], "'warp=1' is not CHECK=SECONDS"),
        (["--aegis-check-budget", "io=0"], "'0' is not a number of seconds above 0"),
        (["--aegis-gpus-per-node", "-1"], "'-1' is not a whole number, 0 or more"),
        (["--aegis-check-path", "data=/x", "--aegis-check-path", "data=/y"], "the same kind was given twice"),
        (["--aegis-namespace", ""], "empty --aegis-namespace"),
        (["--rdzv-conf", "join_timeout"], "--rdzv-conf 'join_timeout'"),
        (["--rdzv-conf", "join_timeout=soon"], "join_timeout=soon: want seconds above 0"),
        (["--rdzv-conf", "last_call_timeout=-1"], "last_call_timeout=-1: want seconds, 0 or more"),
        (["--rdzv-backend", "etcd-v2", "--rdzv-endpoint", "e:1"], "--rdzv-backend 'etcd-v2'"),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "h:99999"], "--rdzv-endpoint 'h:99999'"),
        (["--nnodes", "2", "--master-addr", ""], "empty --master-addr"),
        (["--nnodes", "2", "--standalone"], "--standalone with --nnodes 2"),
        ([*CPU_JOB, "--rdzv-endpoint", "localhost:0"], "port 0 means any free port"),
        ([*CPU_JOB, "--rdzv-endpoint", "h:65535"], "another --aegis-fallback-port"),
        ([*CPU_JOB, "--rdzv-endpoint", "h:7", "--aegis-fallback-port", "7"], "7 as fallback port"),
        (["--nnodes", "2", "--rdzv-id", "a/b"], "--rdzv-id 'a/b'"),
        (["--nnodes", "2", "--rdzv-id", "é" * 124], "want at most 246 bytes"),
        (["--tee", "9"], "--tee '9': want 0 (nothing)"),
        (["--redirects", "0:x"], "--redirects '0:x'"),
        (["--local-ranks-filter", "0,x"], "--local-ranks-filter '0,x'"),
        (["--signals-to-handle", "SIGTERM,SIGFOO"], "no signal is called 'SIGFOO'"),
        (["--signals-to-handle", "SIGKILL"], "no process can handle SIGKILL"),
        (["--shutdown-timeout", "-3"], "shutdown_timeout must be non-negative"),
        (["--aegis-report", "no/such/dir/r.json"], "there is no directory"),
        (["--aegis-report", "."], "it is a directory"),
        (["--aegis-run-dir", "train.py"], "it is a file; want a directory"),
        (["--aegis-state-dir", "train.py/x"], "train.py is a file"),
        (["--log-dir", "train.py"], "--log-dir"),
        (["--no-python", "-m"], "--no-python together with -m"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_line(argv: list[str], why: str, script: Path) -> None:
    assert why in refused(*argv, "train.py")


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ([], "no training script was given"),
        (["missing.py"], "'missing.py': no such file (looked in"),
        (["pytest"], "to run a module, put -m before it"),
        (["."], "a directory without a __main__.py"),
        (["-m", "no_such_package.train"], "no module 'no_such_package'"),
        (["-m", "not/a/module.py"], "want the name of a module"),
        (["--no-python", "no-such-program"], "'no-such-program': it is not on the PATH"),
        (["--no-python", "./train.py"], "not executable; try chmod +x"),
        (["--no-python", "./missing"], "'./missing': no such file"),
    ],
)
def test_a_program_that_is_not_there(argv: list[str], why: str, script: Path) -> None:
    assert why in refused(*argv)


def test_programs_that_only_running_can_judge_are_left_alone(script: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_bytes(b"")
    (tmp_path / "binary").write_bytes(b"\x7fELF\0")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__main__.py").write_text("")
    for argv in (["empty.py"], ["binary"], ["pack"], ["-m", "train"], ["-m", "train.deeper"], ["-m", "pack"],
                 ["./${local_rank}.py"]):  # fmt: skip
        parse(argv)


def test_a_python_that_is_not_there(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON_EXEC", "/no/python")
    assert "PYTHON_EXEC='/no/python'" in refused("train.py")


@pytest.mark.parametrize(
    ("content", "mode", "why"), [("", 0o600, "it is empty"), ("s3cret", 0o644, "chmod 600")]
)
def test_secret_files_that_keep_no_secret(
    content: str, mode: int, why: str, script: Path, tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    file.write_text(content)
    file.chmod(mode)
    assert why in refused("--aegis-join-secret-file", str(file), "train.py")
    assert "No such file" in refused("--aegis-join-secret-file", "missing", "train.py")
    file.write_text("s3cret")
    file.chmod(0o640)  # as a Kubernetes Secret can be mounted for a group
    assert parse(["--aegis-join-secret-file", "secret", "train.py"]).aegis.join_secret_file == file


def test_bad_input_leaves_nothing_behind(script: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    refused("--log-dir", "logs", "--aegis-run-dir", "run", "--nnodes", "3:2", "train.py")
    refused("--log-dir", "logs", "--aegis-report", "no/dir/x", "train.py")
    assert sorted(tmp_path.rglob("*")) == before


def test_help_explains_both_torchs_flags_and_ours_and_says_nothing_else(script: Path) -> None:
    run = "import sys; from aegis_elastic.launch.flags.options import parse; parse(sys.argv[1:])"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", run, "-h"], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--rdzv-backend" in done.stdout and "--aegis-bootcheck" in done.stdout
    ours = [a for a in make_parser()._actions if a.dest.startswith("aegis_")]
    for action in ours:
        assert action.help is not argparse.SUPPRESS and (action.help or "").endswith((".", ".)"))


def test_options_are_a_value(script: Path) -> None:
    options: Options = parse(["train.py"])
    with pytest.raises(AttributeError):
        options.job_name = "other"  # type: ignore[misc]
