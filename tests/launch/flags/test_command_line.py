"""What becomes of flags: as they are shown, and as they are dropped for the stock launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.run as torchrun

from aegis_elastic.control.host.errors import UsageError
from aegis_elastic.launch import stock
from aegis_elastic.launch.flags.explain import TORCH_FLAGS, explain
from aegis_elastic.launch.flags.options import parse


@pytest.fixture(autouse=True)
def _script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import os, sys; print(sys.argv[1:], os.environ['RANK'])\n")


def explained(*argv: str, passes_local_rank: bool = False) -> list[str]:
    options = parse(argv, passes_local_rank=passes_local_rank)
    return explain(argv, options, passes_local_rank=passes_local_rank).splitlines()


# --- shown ----------------------------------------------------------------------------------------------


def test_every_flag_of_torchrun_has_its_explanation() -> None:
    actions = torchrun.get_args_parser()._actions
    names = {action.dest for action in actions if action.option_strings} - {"help"}
    assert names == TORCH_FLAGS.keys() - {"use_env"}


def test_each_given_flag_is_told_as_it_was_written_and_as_what_it_became() -> None:
    lines = explained(
        "--nnodes", "2:4", "--nproc_per_node=2", "--rdzv-b", "c10d", "--rdzv_endpoint", "localhost",
        "--rdzv-id", "j", "-r3", "--node_rank", "1", "--aegis-bootcheck=env", "train.py", "--lr", "1",
        "--aegis-not-ours",
    )  # fmt: skip
    assert [line.split()[0] for line in lines] == [
        "--nnodes", "--nproc_per_node", "--rdzv-b", "--rdzv_endpoint", "--rdzv-id", "-r3", "--node_rank",
        "--aegis-bootcheck", "--max-restarts", "each",
    ]  # fmt: skip
    assert lines[0].endswith("goes on with as few as 2; more than 4 wait as spares")
    assert "localhost:29400: the node that owns this address" in lines[3]
    assert "(not given)" in lines[8] and lines[8].endswith("torchrun has 0")
    assert lines[-1].endswith("-u train.py --lr 1 --aegis-not-ours")


def test_variables_are_told_unless_the_command_line_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PET_NNODES": "1", "PET_MAX_RESTARTS": "9", "AEGIS_TAINT_S": "60"}.items():
        monkeypatch.setenv(name, value)
    lines = explained("--max-restarts", "2", "train.py")
    assert [line.split()[0] for line in lines[:3]] == ["--max-restarts", "PET_NNODES", "AEGIS_TAINT_S"]
    assert "at most 2 restarts" in lines[0] and lines[2].endswith("60.0")


def test_addresses_of_humans_are_not_shown() -> None:
    text = "\n".join(explained("--aegis-notify", "https://hooks.example/very-secret", "train.py"))
    assert "very-secret" not in text and "1 address to page" in text


def test_explaining_makes_no_directory_and_starts_nothing(tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    explained("--aegis-explain-flags", "--log-dir", "logs", "train.py")
    assert sorted(tmp_path.rglob("*")) == before


def test_flags_are_explained_where_the_script_is_not() -> None:
    """The guide's second step, before there is a script."""
    assert explained("--aegis-explain-flags", "not_here.py")[-1].endswith("not_here.py")
    with pytest.raises(UsageError, match="no such file"):
        parse(["not_here.py"])


def test_the_old_launcher_says_that_the_script_gets_its_local_rank() -> None:
    assert explained("train.py", passes_local_rank=True)[-1].endswith("'--local-rank=${local_rank}'")
    assert explained("--use_env", "train.py", passes_local_rank=True)[-1].endswith("train.py")
    with pytest.raises(UsageError, match="--no-python without --use-env"):
        parse(["--no-python", "true"], passes_local_rank=True)


# --- dropped --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kept", "notice"),
    [
        (["train.py"], ["train.py"], "none of our flags was given; at most 0 restarts"),
        (["--aegis-bootcheck", "no such value", "--aegis_fail_fast", "--max_restarts=1", "train.py"],
         ["--max_restarts=1", "train.py"], "without --aegis-bootcheck --aegis_fail_fast"),
        (["--aegis-taint-s=x", "-t3", "--standalone", "--", "train.py", "--aegis-bootcheck", "off"],
         ["-t3", "--standalone", "--", "train.py", "--aegis-bootcheck", "off"], "without --aegis-taint-s"),
        (["--aegis-boot", "off", "--aegis-of-the-future=1", "train.py"], ["train.py"],
         "without --aegis-boot --aegis-of-the-future"),
        (["--rdzv-backend", "aegis", "--rdzv-endpoint=h", "train.py"],
         ["--rdzv-backend", "c10d", "--rdzv-endpoint=h", "train.py"], "none of our flags"),
        (["--rdzv_backend=static", "--no-flag-of-anybodys", "x", "train.py"],
         ["--rdzv_backend=static", "--no-flag-of-anybodys", "x", "train.py"], "none of our flags"),
    ],
)  # fmt: skip
def test_the_stock_launcher_gets_the_command_line_without_ours(
    given: list[str], kept: list[str], notice: str
) -> None:
    argv, line = stock.torchrun_command_line(given)
    assert argv == kept
    assert notice in line and "\n" not in line


def test_the_switch_is_0_or_1() -> None:
    assert [stock.is_wanted({"AEGIS_OFF": text}) for text in ("", "0", "off", "1", "true")] == [0, 0, 0, 1, 1]
    assert not stock.is_wanted({})
    with pytest.raises(UsageError, match="AEGIS_OFF='maybe': want 1 or 0"):
        stock.is_wanted({"AEGIS_OFF": "maybe"})


def test_put_off_it_is_torchrun_with_its_titles_and_codes_and_without_our_secret(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, sys\n"
        "parent = open(f'/proc/{os.getppid()}/cmdline').read().split('\\0')\n"
        "print(sys.argv[1:], 'AEGIS_JOIN_SECRET' in os.environ, *parent[1:4])\n"
        "sys.exit(7)\n"
    )
    done = subprocess.run(
        [sys.executable, "-u", "-m", "aegis_elastic.launch.launch", "--aegis-bootcheck", "off",
         "--standalone", "train.py", "--lr", "1"],
        env={**os.environ, "AEGIS_OFF": "1", "AEGIS_JOIN_SECRET": "very secret"},
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert done.stdout == "['--local-rank=0', '--lr', '1'] False -u -m torch.distributed.launch\n"
    assert done.stderr.startswith("[aegis] AEGIS_OFF is set: this is the stock torchrun, without --aegis-")
