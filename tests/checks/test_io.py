"""The io check against real file systems: healthy, full, read-only, gone, silent."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from aegis_elastic.checks import io
from aegis_elastic.checks.frame import Outcome
from aegis_elastic.checks.request import CheckRequest
from tests.checks.support import ask


def check(**paths: Path) -> Outcome:
    return io.check(
        CheckRequest(("io",), "node-1", paths={k: str(v) for k, v in paths.items()}), lambda _: None
    )


def test_healthy_directories_pass_with_their_latencies_and_stay_clean(tmp_path: Path) -> None:
    outcome = check(log=tmp_path, shm=Path("/dev/shm"))
    assert outcome.passed, outcome.result
    assert "log ok" in outcome.result
    for key in ("log_write_s", "log_read_s", "log_free_bytes", "shm_write_s"):
        assert isinstance(outcome.details[key], int | float)
    assert list(tmp_path.iterdir()) == []


def test_without_a_path_it_says_so_and_passes() -> None:
    assert check().result == "io: no path was given to look at"


def test_a_checkpoint_directory_of_the_future_is_tried_where_it_will_be_made(tmp_path: Path) -> None:
    outcome = check(checkpoint=tmp_path / "run-7" / "checkpoints")
    assert outcome.passed
    assert "is not there yet" in outcome.result
    assert list(tmp_path.iterdir()) == []


def test_a_full_file_system_is_no_space_and_names_the_path(mount: Callable[..., Path]) -> None:
    tiny = mount("tiny", "-t", "tmpfs", "-o", "size=64k", "none")
    outcome = check(checkpoint=tiny)
    assert (outcome.finding, outcome.scope) == ("io.no_space", "node")
    assert outcome.result == f"io: cannot use checkpoint directory {tiny}: no space left"
    assert list(tiny.iterdir()) == []


def test_a_read_only_file_system_fails_for_checkpoints_and_is_fine_for_data(
    mount: Callable[..., Path],
) -> None:
    frozen = mount("frozen", "-t", "tmpfs", "-o", "ro,size=1m", "none")
    assert check(checkpoint=frozen).finding == "io.read_only"
    assert check(data=frozen).passed


def test_a_file_in_place_of_a_directory_is_missing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    assert check(log=tmp_path / "file").finding == "io.missing"
    assert check(log=tmp_path / "file" / "below").finding == "io.missing"
    assert check(data=tmp_path / "nothing").finding == "io.missing"


def test_one_broken_path_does_not_hide_the_others(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    outcome = check(log=tmp_path, checkpoint=tmp_path / "file", data=tmp_path)
    assert outcome.finding == "io.missing"
    assert "log" not in outcome.result
    assert outcome.details["log_path"] == str(tmp_path)
    assert outcome.details["data_read_bytes"] == len("not a directory")


def test_other_bytes_back_are_corruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A storage that lies can't be had for a test; the place where its answer arrives can.
    honest = os.read
    monkeypatch.setattr(os, "read", lambda fd, count: honest(fd, count)[:-1] + b"\0")
    outcome = check(checkpoint=tmp_path)
    assert (outcome.finding, outcome.scope) == ("io.corrupt", "hardware")


def test_a_data_path_that_never_answers_ends_at_the_budget_and_is_named(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    request = {
        "checks": ["io", "rdma"],
        "paths": {"log": str(tmp_path), "data": str(fifo)},
        "budgetsS": {"io": 0.7},
    }
    found = ask(request)
    assert found["rdma"].passed
    assert found["io"].finding == "io.timeout"
    assert found["io"].result == f"io: no answer in 0.7 s (it was waiting for data {fifo})"
