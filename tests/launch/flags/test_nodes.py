"""The flags about nodes: what is taken, and what is found out before anything is started."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from aegis_elastic.control.host.errors import UsageError
from aegis_elastic.launch.flags.nodes import duration
from aegis_elastic.launch.flags.options import parse


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.touch()
    return str(path)


def test_the_defaults_isolate_nobody_and_end_a_taint_after_a_day(script: str) -> None:
    aegis = parse([script]).aegis
    assert (aegis.isolation, aegis.isolation_max, aegis.isolation_dry_run) == ("none", 4, False)
    assert (aegis.taint_s, aegis.probation_burn_s, aegis.isolate_exit_code) == (86400.0, 60.0, 1)
    assert aegis.store is None


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--aegis-store", "http://x:1"], "is not etcd://HOST:PORT"),
        (["--aegis-store", "etcd://x"], "is not etcd://HOST:PORT"),
        (["--aegis-store", "etcd://x:1,"], "is not etcd://HOST:PORT"),
        (["--aegis-store", "etcd://user:secret@x:1"], "is not etcd://HOST:PORT"),
        (["--aegis-isolation", "drain"], "no isolation driver"),
        (["--aegis-isolation", "command:true"], "want {node} among its arguments"),
        (["--aegis-isolation", "kubernetes:deployments/x"], "as a workload"),
        (["--aegis-isolation-max", "0"], "1 to 100000"),
        (["--aegis-isolate-exit-code", "0"], "1 to 255"),
        (["--aegis-taint-s", "-1"], "a number of seconds"),
        (["--aegis-probation-burn-s", "0"], "a number of seconds above 0"),
    ],
)
def test_what_cannot_be_used_is_exit_2(script: str, flags: list[str], why: str) -> None:
    with pytest.raises(UsageError, match="cannot") as caught:
        parse([*flags, script])
    assert why in str(caught.value) and caught.value.exit_code == 2


@pytest.mark.full
def test_a_driver_that_this_host_lacks_is_found_before_anything_starts(script: str, tmp_path: Path) -> None:
    argv = [str(Path(sys.executable).parent / "aegis-run"), "--standalone"]
    argv += ["--aegis-isolation", "command:no-such-program {node}", "--aegis-run-dir", str(tmp_path / "run")]
    env = {"XDG_STATE_HOME": str(tmp_path / "state"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([*argv, script], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "aegis-run: cannot use --aegis-isolation: cannot use the command 'no-such-program'" in done.stderr
    assert not (tmp_path / "run" / "journal.jsonl").exists()


def test_a_length_of_time_is_what_people_write() -> None:
    assert [duration(text) for text in ("90", "90s", "30m", "2h", "1.5d", "2W")] == [
        90, 90, 1800, 7200, 129600, 1209600,
    ]  # fmt: skip
    for text in ("", "0", "h", "-1h", "1y", "1e3", "1h30m", "9999999999"):
        with pytest.raises(argparse.ArgumentTypeError, match="not a length of time"):
            duration(text)
