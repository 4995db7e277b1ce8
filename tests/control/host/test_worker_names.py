"""Each living launcher of a host has a worker's name of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from aegis_elastic.control.host import worker_names
from aegis_elastic.control.host.errors import UsageError


def test_launchers_that_nobody_named_are_numbered_and_the_lowest_free_number_is_taken(tmp_path: Path) -> None:
    with worker_names.held(tmp_path, "node", chosen=False) as first:
        with worker_names.held(tmp_path, "node", chosen=False) as second:
            assert (first.text, second.text) == ("node", "node.2")
        with worker_names.held(tmp_path, "node", chosen=False) as relaunched:
            assert relaunched.text == "node.2"
        with worker_names.held(tmp_path, "other", chosen=True) as other:
            assert other.text == "other"


def test_a_chosen_name_that_lives_here_is_refused(tmp_path: Path) -> None:
    with worker_names.held(tmp_path, "w/0", chosen=True):
        with pytest.raises(UsageError, match="'w/0': a launcher of this job is running here"):
            with worker_names.held(tmp_path, "w/0", chosen=True):
                raise AssertionError("two agents under one name")
    with worker_names.held(tmp_path, "w/0", chosen=True) as again:
        assert again.text == "w/0"


def test_a_killed_launcher_gives_its_name_back(tmp_path: Path) -> None:
    hold = (
        "import sys\nfrom pathlib import Path\nfrom aegis_elastic.control.host import worker_names\n"
        "with worker_names.held(Path(sys.argv[1]), 'node', chosen=True):\n"
        "    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdin is not None and other.stdout is not None
    with other.stdin, other.stdout:
        assert other.stdout.readline() == b"held\n"
        with worker_names.held(tmp_path, "node", chosen=False) as name:
            assert name.text == "node.2"
        other.kill()
        other.wait()
    with worker_names.held(tmp_path, "node", chosen=False) as name:
        assert name.text == "node"


def test_where_nothing_can_be_locked_the_name_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / worker_names.FOLDER).write_text("a file in the way")
    with worker_names.held(tmp_path, "node", chosen=True) as name:
        assert name.text == "node"


def test_a_name_that_cannot_be_locked_is_no_reason_not_to_train(tmp_path: Path) -> None:
    (tmp_path / worker_names.FOLDER / "node1").mkdir(parents=True, mode=0o700)
    (tmp_path / worker_names.FOLDER).chmod(0o700)
    with worker_names.held(tmp_path, "node1", chosen=True) as name:
        assert name.text == "node1"
