"""The io check against real file systems: healthy, full, read-only, gone, silent."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from aegis_elastic.checks.contract.child_process import Outcome
from aegis_elastic.checks.contract.request import CheckRequest
from aegis_elastic.checks.host import io, mounts
from tests.checks.support import run_checks


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

    def lying(fd: int, count: int) -> bytes:
        data = honest(fd, count)
        return data[:-1] + bytes(byte ^ 1 for byte in data[-1:])

    monkeypatch.setattr(os, "read", lying)
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
    found = run_checks(request)
    assert found["rdma"].passed
    assert found["io"].finding == "io.timeout"
    assert found["io"].result == f"io: no answer in 0.7 s (it was waiting for data {fifo})"


def test_other_paths_answers_arrive_beside_one_that_hangs(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "file").write_text("not a directory")
    paths = {"data": str(fifo), "log": str(tmp_path), "checkpoint": str(tmp_path / "file")}
    found = run_checks({"checks": ["io"], "paths": paths, "budgetsS": {"io": 1.5}})["io"]
    assert (found.finding, found.scope) in (("io.missing", "node"), ("io.timeout", "node"))
    assert "cannot use checkpoint directory" in found.result
    assert "no answer in 1.5 s (it was waiting for data" in found.result
    assert found.details["data_hangs"] is True
    assert isinstance(found.details["log_write_s"], float)


def test_where_a_path_lies_is_told(mount: Callable[..., Path], tmp_path: Path) -> None:
    other = mount("with space", "-t", "tmpfs", "-o", "size=4m", "scratch-disk")
    link = tmp_path / "link"
    link.symlink_to(other)
    details = check(checkpoint=link, shm=Path("/dev/shm")).details
    assert (details["checkpoint_fs_type"], details["checkpoint_device"]) == ("tmpfs", "scratch-disk")
    assert details["checkpoint_shared"] is False
    rate = details["shm_write_bytes_per_s"]
    assert isinstance(rate, int) and rate > 0


@pytest.fixture
def on_shared_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the mount table calls a part of an NFS export: no server needed to be told so."""
    table = tmp_path / "mountinfo"
    mine = f"36 35 0:40 / {tmp_path} rw,relatime shared:1 - nfs4 filer:/scratch rw,vers=4.2\n"
    table.write_text("22 1 8:1 / / rw shared:2 - ext4 /dev/vda1 rw\n" + mine)
    monkeypatch.setattr(mounts, "MOUNT_TABLE", str(table))
    return tmp_path


def test_what_is_broken_for_all_is_no_nodes_fault(
    on_shared_storage: Path, mount: Callable[..., Path]
) -> None:
    tiny = mount("tiny", "-t", "tmpfs", "-o", "size=64k", "none")
    outcome = check(checkpoint=tiny)
    assert (outcome.finding, outcome.scope) == ("io.no_space", "network")
    assert outcome.result.endswith("[nfs4 filer:/scratch, shared by all nodes]")
    assert outcome.details["checkpoint_shared"] is True


def test_this_nodes_own_fault_decides_over_one_that_all_share(on_shared_storage: Path) -> None:
    (on_shared_storage / "file").write_text("not a directory")
    outcome = check(checkpoint=on_shared_storage / "file", log=Path("/proc/none/at/all"))
    assert outcome.scope == "node"
    assert "checkpoint directory" in outcome.result


def test_an_answer_of_the_system_is_told_by_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Quotas, dead servers and dying disks can't be had for a test; their numbers can.
    for number, finding, scope in [
        (errno.EDQUOT, "io.quota", "node"),
        (errno.ESTALE, "io.stale", "network"),
        (errno.ENOTCONN, "io.stale", "network"),
        (errno.EIO, "io.error", "hardware"),
        (errno.EACCES, "io.denied", "node"),
        (errno.EMFILE, "io.no_files", "node"),
        (errno.EXDEV, "io.error", "unknown"),
    ]:

        def refuse(fd: int, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", refuse)
        outcome = check(log=tmp_path)
        assert (outcome.finding, outcome.scope) == (finding, scope)


def test_slow_is_only_who_is_slower_than_its_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def dawdle(fd: int) -> None:
        fsync(fd)
        select.select([], [], [], 0.6)

    monkeypatch.setattr(os, "fsync", dawdle)
    request = CheckRequest(("io",), paths={"log": str(tmp_path)})
    assert io.check(request, lambda _: None).passed  # nothing to compare with
    for usual, finding in [(0.01, "io.slow"), (0.5, "")]:
        judged = msgspec.structs.replace(request, peer_medians={"log_write_s": usual})
        outcome = io.check(judged, lambda _: None)
        assert (outcome.finding, outcome.scope) == (finding, "slow" if finding else "")


def test_mount_tables_are_read_as_the_kernel_writes_them() -> None:
    parsed = mounts.parse(
        [
            "22 1 8:1 / / rw shared:1 - ext4 /dev/vda1 rw",
            "30 22 0:5 / /data rw - lustre 10.0.0.1@o2ib:/scratch rw",
            "31 22 0:6 / /data/mine rw - fuse.s3fs s3fs rw",
            "32 22 0:7 / /ct rw - fuse.fuse-overlayfs fuse-overlayfs rw",
            r"33 22 0:8 / /with\040space rw - tmpfs none rw",
            "34 22 0:9 / /covered rw - nfs4 a:/b rw",
            "35 34 0:9 / /covered rw - xfs /dev/sdb rw",
            "nonsense",
        ]
    )
    shared = {path: mounts.mount_of(path, parsed).shared for path in ("/x", "/data/x", "/data/mine/x", "/ct")}
    assert shared == {"/x": False, "/data/x": True, "/data/mine/x": True, "/ct": False}
    assert mounts.mount_of("/with space/x", parsed).fs_type == "tmpfs"
    assert mounts.mount_of("/covered", parsed).fs_type == "xfs"
    assert mounts.mount_of("/database", parsed).fs_type == "ext4"
    assert mounts.mount_of("/x", []) == mounts.UNKNOWN
