"""The watcher of checkpoints over real folders: each is reported once, at once, and no old ones."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.distributed import checkpoint as dcp

from aegis_elastic.agents.checkpoints.boundary import CheckpointWatcher
from aegis_elastic.agents.watch.contract import WatchedRanks
from aegis_elastic.control.controllers.checkpoints import BoundaryFacts
from aegis_elastic.core.checkpoints.arguments import WatchedFolder
from aegis_elastic.core.protocol.messages import WATCHED_BYTES_MAX
from aegis_elastic.core.rank_assignment import RankAssignment
from tests.core.checkpoints import scenes
from tests.core.checkpoints.scenes import Save, Scene
from tests.integration.harness import stays

PATIENCE_S = 10.0


class DiskScene(Scene):
    """The same saves, on a disk."""

    def __init__(self, top: Path, world_size: int = 2) -> None:
        super().__init__(world_size)
        self._top = top

    def write(self, path: str, content: bytes = b"payload") -> Scene:
        target = self._top / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        return self

    def remove(self, path: str) -> Scene:
        (self._top / path).unlink()
        return self

    def rename(self, old: str, new: str) -> Scene:
        (self._top / old).rename(self._top / new)
        return self


class Watch:
    """A watcher as an agent drives it, and its facts."""

    def __init__(self, *folders: WatchedFolder, relist_s: float = 30.0) -> None:
        self._woken = threading.Condition()
        self.watcher = CheckpointWatcher(self._wake, folders, relist_s=relist_s)

    def _wake(self) -> None:
        with self._woken:
            self._woken.notify_all()

    def start(self, incarnation: int = 1, group_rank: int = 0, world_size: int = 2) -> None:
        """Returns when the thread has seen what is there, so that a test may write next."""
        assignment = RankAssignment(worker="a", uid="u", group_rank=group_rank, rank_offset=0, nproc=2)
        self.watcher.on_started(
            WatchedRanks(incarnation, assignment, {0: os.getpid()}, world_size=world_size)
        )
        until_s = time.monotonic() + PATIENCE_S
        while self.watcher.incarnation != incarnation and group_rank == 0:
            assert time.monotonic() < until_s
            time.sleep(0.005)

    @property
    def saved(self) -> list[dict[str, Any]]:
        return list((self.watcher.facts() or {}).get("saved", ()))

    @property
    def steps(self) -> list[int]:
        return [saved["step"] for saved in self.saved]

    def wait_steps(self, *steps: int) -> None:
        with self._woken:
            held = self._woken.wait_for(lambda: self.steps == list(steps), PATIENCE_S)
        assert held, f"reported {self.steps}, not {steps}"


@pytest.fixture
def watch_of() -> Iterator[Any]:
    made: list[Watch] = []

    def make(*folders: WatchedFolder, **how: Any) -> Watch:
        made.append(Watch(*folders, **how))
        return made[-1]

    yield make
    for watch in made:
        watch.watcher.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "aegis-boundary"]


KINDS = [
    ("dcp", lambda scene, step: scenes.dcp(scene, f"ckpt_{step}")),
    ("megatron", scenes.megatron),
    ("deepspeed", scenes.deepspeed),
    ("hf", scenes.hf),
    ("lightning", scenes.lightning),
    ("torchtitan", scenes.titan),
    ("nemo", scenes.nemo),
    ("orbax", scenes.orbax),
]


def save(made: Save, moment_s: float = 0.0) -> None:
    for _ in made:
        time.sleep(moment_s)


@pytest.mark.parametrize(("kind", "make"), KINDS, ids=[kind for kind, _ in KINDS])
def test_each_framework_is_found_by_its_files_and_reported_once(
    tmp_path: Path, watch_of: Any, kind: str, make: Any
) -> None:
    scene = DiskScene(tmp_path)
    save(make(scene, 10))
    watch = watch_of(WatchedFolder("auto", str(tmp_path)))
    watch.start()
    # Slow enough for checks in between, which must find nothing yet.
    for step, before in ((20, ()), (30, (20,))):
        for _ in make(scene, step):
            time.sleep(0.01)
            assert watch.steps == list(before)
        watch.wait_steps(*before, step)
    assert [saved["kind"] for saved in watch.saved] == [kind, kind]
    assert [saved["number"] for saved in watch.saved] == [1, 2]
    assert all(os.path.exists(saved["path"]) for saved in watch.saved)


def test_torchs_own_checkpoint_saved_again_into_the_same_folder_is_new_each_time(
    tmp_path: Path, watch_of: Any
) -> None:
    """The real torch.distributed.checkpoint, and the real torch.save."""
    watch = watch_of(WatchedFolder("auto", str(tmp_path / "ckpt")))
    watch.start(world_size=1)
    for count in range(1, 4):
        dcp.save(
            {"weight": torch.full((64, 64), float(count))}, checkpoint_id=tmp_path / "ckpt", no_dist=True
        )
        watch.wait_steps(*[-1] * count)


def test_a_checkpoint_is_reported_within_a_moment_of_its_marker(tmp_path: Path, watch_of: Any) -> None:
    """At a step a second, it has to be known before the next one is far."""
    scene, watch = DiskScene(tmp_path), watch_of(WatchedFolder("auto", str(tmp_path)))
    watch.start()
    late_s = []
    for step in (1, 2, 3):
        save(scenes.megatron(scene, step), 0.03)
        began_s = time.monotonic()
        watch.wait_steps(*range(1, step + 1))
        late_s.append(time.monotonic() - began_s)
    assert min(late_s) < 0.25, late_s


def test_a_folder_may_come_later_than_the_watcher(tmp_path: Path, watch_of: Any) -> None:
    top = tmp_path / "out" / "run" / "checkpoints"
    watch = watch_of(WatchedFolder("auto", str(top)))
    watch.start()
    scene = DiskScene(top)
    save(scenes.hf(scene, 5))
    watch.wait_steps(5)


def test_without_events_of_the_kernel_the_folder_is_listed_again(
    tmp_path: Path, watch_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network file system on which somebody else writes."""
    monkeypatch.setattr(
        "aegis_elastic.agents.checkpoints.inotify.Inotify.read",
        lambda self: os.read(self.fileno(), 65536) and set(),
    )
    watch = watch_of(WatchedFolder("auto", str(tmp_path)), relist_s=0.2)
    watch.start()
    scene = DiskScene(tmp_path)
    save(scenes.titan(scene, 5))
    watch.wait_steps(5)


def test_only_the_node_of_rank_0_watches(tmp_path: Path, watch_of: Any) -> None:
    watch = watch_of(WatchedFolder("auto", str(tmp_path)), relist_s=0.05)
    watch.start(group_rank=1)
    save(scenes.titan(DiskScene(tmp_path), 5))
    assert not [thread for thread in threading.enumerate() if thread.name == "aegis-boundary"]
    assert watch.watcher.facts() is None
    # The node gets rank 0 at the next start: what others have saved before is not reported.
    watch.start(2)
    save(scenes.titan(DiskScene(tmp_path), 6))
    watch.wait_steps(6)


def test_an_interrupted_save_does_not_complete_that_of_the_next_start(tmp_path: Path, watch_of: Any) -> None:
    scene, watch = DiskScene(tmp_path), watch_of(WatchedFolder("auto", str(tmp_path)))
    watch.start(1)
    save(scenes.hf(scene, 10))
    watch.wait_steps(10)
    for moment, _ in enumerate(scenes.hf(scene, 20)):
        if moment == 7:
            break
    watch.watcher.on_ended()
    watch.start(2)
    for _ in scenes.hf(scene, 20):
        time.sleep(0.01)
        assert watch.steps == [10]
    watch.wait_steps(10, 20)


def test_what_completes_as_the_ranks_end_is_still_reported(tmp_path: Path, watch_of: Any) -> None:
    scene, watch = DiskScene(tmp_path), watch_of(WatchedFolder("auto", str(tmp_path)))
    watch.start(1)
    save(scenes.megatron(scene, 10))
    watch.watcher.on_ended()
    watch.start(2)
    watch.wait_steps(10)


def test_a_tracker_that_is_empty_when_training_starts_is_reported(tmp_path: Path, watch_of: Any) -> None:
    scene, watch = DiskScene(tmp_path), watch_of(WatchedFolder("auto", str(tmp_path)))
    save(scenes.megatron(scene, 10))
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_bytes(b"")
    watch.start()
    with watch._woken:
        assert watch._woken.wait_for(lambda: (watch.watcher.facts() or {}).get("unread"), PATIENCE_S)
    assert watch.watcher.facts() == {"saved": [], "unread": str(tracker)}
    watch.watcher.on_ended()
    stays(lambda: watch.watcher.facts() == {"saved": [], "unread": str(tracker)}, 0.3)
    watch.start(2)
    save(scenes.megatron(scene, 20))
    watch.wait_steps(20)
    assert watch.watcher.facts()["unread"] == ""


def test_finished_checkpoints_cost_nothing_any_more(tmp_path: Path, watch_of: Any) -> None:
    """Hundreds of old checkpoints: after a new one only that and the top are listed."""
    scene = DiskScene(tmp_path)
    for step in range(10, 400, 10):
        save(scenes.megatron(scene, step))
    watch = watch_of(WatchedFolder("auto", str(tmp_path)))
    watch.start()
    save(scenes.megatron(scene, 400))
    watch.wait_steps(400)
    lister = watch.watcher._folders[0].lister
    assert len(lister.list_folder().files) <= 6


def test_names_that_are_no_text_and_long_ones_are_reported_too(tmp_path: Path, watch_of: Any) -> None:
    top = os.fsdecode(bytes(tmp_path) + b"/\xff\x01" + "\u00e9".encode() * 100)
    watch = watch_of(WatchedFolder("auto", top))
    watch.start()
    for step in range(1, 11):
        save(scenes.dcp(DiskScene(Path(top)), "\u4e00" * 80 + f"-{step}"))
        watch.wait_steps(*range(max(step - 7, 1), step + 1))
    raw = msgspec.json.encode(watch.watcher.facts())
    assert len(raw) <= WATCHED_BYTES_MAX
    assert msgspec.json.decode(raw, type=BoundaryFacts)


def test_a_folder_that_cannot_be_read_or_is_a_file_is_skipped(tmp_path: Path, watch_of: Any) -> None:
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    deep = tmp_path / "deep" / "/".join("d" * 20)
    deep.mkdir(parents=True)
    folders = [
        WatchedFolder("auto", str(tmp_path / name)) for name in ("file", "loop", "deep", "missing/below")
    ]
    watch = watch_of(*folders, relist_s=0.05)
    watch.start()
    save(scenes.titan(DiskScene(tmp_path / "deep"), 5))
    watch.wait_steps(5)
