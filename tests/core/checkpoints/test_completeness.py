"""No moment of any framework's save is taken for its end, and its end is seen at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aegis_elastic.core.checkpoints import KINDS, SeenCheckpoints, megatron_trackers
from tests.core.checkpoints import scenes
from tests.core.checkpoints.scenes import Save, Scene, metadata, torch_file

MakeSave = Callable[[Scene, int], Save]


def megatron_legacy(scene: Scene, step: int) -> Save:
    yield from scenes.megatron(scene, step, legacy=True)


def hf_fsdp(scene: Scene, step: int) -> Save:
    yield from scenes.hf(scene, step, inside="fsdp")


def hf_deepspeed(scene: Scene, step: int) -> Save:
    yield from scenes.hf(scene, step, inside="deepspeed")


def hf_jit(scene: Scene, step: int) -> Save:
    yield from scenes.hf(scene, step, inside="jit")


def plain_dcp(scene: Scene, step: int) -> Save:
    yield from scenes.dcp(scene, f"ckpt_{step}")


SAVES: list[tuple[str, MakeSave]] = [
    ("dcp", plain_dcp),
    ("megatron", scenes.megatron),
    ("megatron", megatron_legacy),
    ("deepspeed", scenes.deepspeed),
    ("hf", scenes.hf),
    ("hf", hf_fsdp),
    ("hf", hf_deepspeed),
    ("hf", hf_jit),
    ("lightning", scenes.lightning),
    ("lightning", scenes.lightning_folder),
    ("torchtitan", scenes.titan),
    ("torchtitan", scenes.titan_safetensors),
    ("nemo", scenes.nemo),
    ("orbax", scenes.orbax),
    ("orbax", scenes.orbax_commit),
]
CASES = pytest.mark.parametrize(("kind", "save"), SAVES, ids=[save.__name__ for _, save in SAVES])


@pytest.mark.parametrize("found_by", ["named", "auto"])
@CASES
def test_no_moment_of_a_save_is_its_end(kind: str, save: MakeSave, found_by: str) -> None:
    """Three saves one after the other: while one is written, only those before it are complete."""
    scene, memory = Scene(), SeenCheckpoints()
    rule = kind if found_by == "named" else "auto"
    told: list[int] = []
    for step in (10, 20, 30):
        before = list(told)
        for _ in save(scene, step):
            told += [checkpoint.step for checkpoint in memory.new(scene.complete(rule))]
            assert told == before
        new = memory.new(scene.complete(rule))
        told += [checkpoint.step for checkpoint in new]
        assert told == [*before, step]
        assert {checkpoint.kind for checkpoint in new} == {kind}
        assert memory.new(scene.complete(rule)) == (), "each is told once"


@CASES
def test_saved_again_at_the_same_place_it_is_complete_when_all_of_it_is_new(
    kind: str, save: MakeSave
) -> None:
    scene, memory = Scene(), SeenCheckpoints()
    list(save(scene, 10))
    assert [checkpoint.step for checkpoint in memory.new(scene.complete())] == [10]
    for _ in save(scene, 10):
        assert memory.new(scene.complete()) == ()
    assert [checkpoint.step for checkpoint in memory.new(scene.complete())] == [10]


@CASES
def test_what_was_there_before_is_not_news_and_does_not_complete_what_comes(
    kind: str, save: MakeSave
) -> None:
    """A save of another life was interrupted at any moment; this life saves the same step again."""
    moments = sum(1 for _ in save(Scene(), 10))
    for stopped_at in range(moments):
        scene = Scene()
        for moment, _ in enumerate(save(scene, 10)):
            if moment == stopped_at:
                break
        memory = SeenCheckpoints(floor_ns=scene.now_ns)
        assert memory.new(scene.complete()) == ()
        for _ in save(scene, 10):
            assert memory.new(scene.complete()) == (), f"stopped at {stopped_at}"
        assert [checkpoint.step for checkpoint in memory.new(scene.complete())] == [10]


def test_dcp_over_an_old_checkpoint_keeps_its_metadata_while_shards_change() -> None:
    scene = Scene()
    list(scenes.dcp(scene, "ckpt"))
    assert scene.steps() == [-1], "a name without a number tells no step"
    scene.write("ckpt/__1_0.distcp")
    assert scene.complete() == ()


def test_dcp_metadata_without_a_shard_that_it_names_is_half_a_checkpoint() -> None:
    """torchtitan's purge deletes in any order."""
    scene = Scene()
    list(scenes.titan(scene, 5))
    scene.remove("step-5/__0_0.distcp")
    assert scene.complete() == ()
    scene.remove("step-5/__1_0.distcp")
    assert scene.complete() == ()


def test_dcp_shards_of_a_larger_world_do_not_disturb() -> None:
    scene = Scene()
    list(scenes.dcp(scene, "ckpt-1", ranks=4))
    list(scenes.dcp(scene, "ckpt-1", ranks=2))
    assert scene.steps() == [1]


def test_an_empty_metadata_is_none() -> None:
    scene = Scene().write("ckpt-1/__0_0.distcp").write("ckpt-1/.metadata", b"")
    assert scene.complete() == ()
    scene.write("ckpt-1/.metadata", metadata("__0_0.distcp"))
    assert scene.steps() == [1]


def test_megatrons_data_is_not_complete_before_the_tracker_names_it() -> None:
    """Asynchronous saving: everything is on disk, and the train loop hasn't finalised it."""
    scene = Scene()
    list(scenes.megatron(scene, 10))
    *_, _last = scenes.megatron(scene, 20)  # stopped before the tracker's content
    scene.write("latest_checkpointed_iteration.txt", b"10")
    assert "iter_0000020/metadata.json" in scene.listing().files
    assert scene.steps() == [10]


@pytest.mark.parametrize("content", [b"", b"\n", b"12x", b"-3", b"releas", b"1 0", b"\xff\xfe", b"9" * 40])
def test_a_tracker_that_means_nothing_completes_nothing(content: bytes) -> None:
    scene = Scene()
    list(scenes.megatron(scene, 10))
    scene.write("latest_checkpointed_iteration.txt", content)
    assert scene.complete() == ()
    assert [tracker.folder for tracker in megatron_trackers(scene.listing())] == [""]


def test_a_tracker_may_name_a_release_or_what_is_not_there() -> None:
    scene = Scene().write("release/mp_rank_00/model_optim_rng.pt", torch_file())
    scene.write("latest_checkpointed_iteration.txt", b"release\n")
    assert [(found.step, found.path) for found in scene.complete()] == [(0, "release")]
    scene.write("latest_checkpointed_iteration.txt", b"40")
    assert scene.complete() == ()


def test_megatron_legacy_with_an_empty_part_is_none() -> None:
    scene = Scene()
    list(scenes.megatron(scene, 10, legacy=True))
    scene.write("iter_0000010/mp_rank_01/model_optim_rng.pt", b"")
    assert scene.complete() == ()


def test_deepspeeds_latest_may_lead_in_a_world_whose_size_nobody_knows() -> None:
    scene = Scene(world_size=0)
    scene.write("global_step7/mp_rank_00_model_states.pt", torch_file())
    scene.write("global_step7/zero_pp_rank_1_mp_rank_00_optim_states.pt", torch_file())
    scene.write("latest", b"global_step7")
    assert scene.complete() == ()
    scene.write("global_step7/zero_pp_rank_0_mp_rank_00_optim_states.pt", torch_file())
    assert scene.steps() == [7]


@pytest.mark.parametrize("content", [b"", b"../other", b"global_step8"])
def test_deepspeeds_latest_may_name_what_is_no_tag_here(content: bytes) -> None:
    scene = Scene()
    list(scenes.deepspeed(scene, 7))
    scene.write("latest", content)
    assert scene.complete() == ()


def test_hf_without_an_optimizer_is_nothing_to_resume_from() -> None:
    """save_only_model: no random state, no optimizer."""
    scene = Scene().write("checkpoint-5/model.safetensors").write("checkpoint-5/trainer_state.json", b"{}")
    assert scene.complete() == ()


def test_hf_with_one_rank_has_one_random_state() -> None:
    scene = Scene(world_size=1)
    scene.write("checkpoint-5/rng_state_0.pth", torch_file()).write("checkpoint-5/trainer_state.json", b"{}")
    assert scene.complete() == (), "of a larger world"
    scene.write("checkpoint-5/rng_state.pth", torch_file())
    assert scene.steps() == [5]


def test_hf_under_a_temporary_name_is_none() -> None:
    scene = Scene()
    list(scenes.hf(scene, 5))
    scene.rename("checkpoint-5", "tmp-checkpoint-5")
    assert scene.complete() == ()


def test_lightnings_last_repeats_the_one_with_the_step() -> None:
    scene = Scene()
    list(scenes.lightning(scene, 5))
    scene.write("lightning_logs/version_0/checkpoints/last.ckpt", torch_file())
    assert scene.steps() == [5]
    alone = Scene().write("hpc_ckpt_3.ckpt", torch_file())
    assert alone.steps() == [-1], "the number counts requeues, not steps"


def test_nemos_marker_that_was_left_behind_stays_a_marker() -> None:
    scene = Scene()
    list(scenes.nemo(scene, 5))
    (name,) = [found.path for found in scene.complete()]
    scene.write(f"{name}-unfinished", b"")
    assert scene.complete() == ()


def test_a_folder_full_of_other_things_holds_no_checkpoint() -> None:
    scene = Scene()
    for path in (
        "latest",
        "run.log",
        "runs/events.out.tfevents.1",
        "best.pt",
        "checkpoint-final/config.json",
    ):
        scene.write(path, b"latest")
    for kind in KINDS:
        assert scene.complete(kind) == ()
