"""A folder of checkpoints as a value, written file by file: every prefix of a save is a moment to judge."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator

from aegis_elastic.core.checkpoints import Checkpoint, File, Listing, complete, wanted_bytes


def torch_file(payload: bytes = b"x" * 300) -> bytes:
    """Bytes that end as a file of torch.save does."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", payload)
    return stream.getvalue()


def metadata(*shards: str) -> bytes:
    """A `.metadata` that names these shards, as far as anybody looks at it."""
    return b"\x80\x04" + b"".join(b"\x8c" + bytes([len(name)]) + name.encode() for name in shards) + b"."


class Scene:
    """Writes in order; each write is a tick of the file system's clock."""

    def __init__(self, world_size: int = 2) -> None:
        self.world_size = world_size
        self.now_ns = 1_000
        self._files: dict[str, tuple[int, bytes]] = {}

    def write(self, path: str, content: bytes = b"payload") -> Scene:
        self.now_ns += 10
        self._files[path] = (self.now_ns, content)
        return self

    def remove(self, path: str) -> Scene:
        self._files = {
            name: file for name, file in self._files.items() if not f"{name}/".startswith(f"{path}/")
        }
        return self

    def rename(self, old: str, new: str) -> Scene:
        moved = {}
        for name, file in self._files.items():
            inside = name == old or name.startswith(f"{old}/")
            moved[new + name.removeprefix(old) if inside else name] = file
        self._files = moved
        return self

    def listing(self) -> Listing:
        files = {path: File(len(content), time) for path, (time, content) in self._files.items()}
        ends = {
            path: content[-wanted_bytes(path) :]
            for path, (_, content) in self._files.items()
            if wanted_bytes(path)
        }
        return Listing(files, ends, self.world_size)

    def complete(self, kind: str = "auto") -> tuple[Checkpoint, ...]:
        return complete(kind, self.listing())

    def steps(self, kind: str = "auto") -> list[int]:
        return [checkpoint.step for checkpoint in self.complete(kind)]


Save = Iterator[None]


def dcp(scene: Scene, folder: str, ranks: int = 2) -> Save:
    """A save of torch.distributed.checkpoint, yielding before each write: nothing is complete there."""
    shards = [f"__{rank}_0.distcp" for rank in range(ranks)]
    for shard in shards:
        yield
        scene.write(f"{folder}/{shard}")
    yield
    scene.write(f"{folder}/.metadata.tmp", metadata(*shards))
    yield
    scene.rename(f"{folder}/.metadata.tmp", f"{folder}/.metadata")


def megatron(scene: Scene, step: int, *, legacy: bool = False) -> Save:
    folder = f"iter_{step:07d}"
    if legacy:
        for part in ("mp_rank_00", "mp_rank_01"):
            yield
            scene.write(f"{folder}/{part}/model_optim_rng.pt", torch_file())
    else:
        yield
        scene.write(f"{folder}/common.pt", torch_file())
        yield from dcp(scene, folder)
        yield
        scene.write(f"{folder}/metadata.json", b"")
        yield
        scene.write(f"{folder}/metadata.json", b'{"sharded_backend": "torch_dist"}')
    yield
    scene.write("latest_checkpointed_iteration.txt", b"")
    yield
    scene.write("latest_checkpointed_iteration.txt", str(step).encode())


def deepspeed(scene: Scene, step: int, folder: str = "") -> Save:
    """Rank 0 is through, and says so, before rank 1 has written its part."""
    top = f"{folder}/" if folder else ""
    tag = f"global_step{step}"
    yield
    scene.write(f"{top}{tag}/mp_rank_00_model_states.pt", torch_file())
    yield
    scene.write(f"{top}{tag}/zero_pp_rank_0_mp_rank_00_optim_states.pt", torch_file())
    yield
    scene.write(f"{top}latest", tag.encode())
    yield
    scene.write(f"{top}{tag}/zero_pp_rank_1_mp_rank_00_optim_states.pt", torch_file()[:-30])
    yield
    scene.write(f"{top}{tag}/zero_pp_rank_1_mp_rank_00_optim_states.pt", torch_file())


def hf(scene: Scene, step: int, *, inside: str = "") -> Save:
    """Rank 0's trainer state is there before rank 1's random state is."""
    folder = f"checkpoint-{step}"
    if inside == "jit":
        scene.write(f"{folder}/checkpoint-is-incomplete.txt")
    for part in (1, 2):
        yield
        scene.write(f"{folder}/model-0000{part}-of-00002.safetensors")
    if inside == "fsdp":
        yield from dcp(scene, f"{folder}/optimizer_0")
    elif inside == "deepspeed":
        yield from deepspeed(scene, step, folder)
    else:
        yield
        scene.write(f"{folder}/optimizer.pt", torch_file())
    yield
    scene.write(f"{folder}/rng_state_0.pth", torch_file())
    yield
    scene.write(f"{folder}/trainer_state.json", b'{"global_step": 1')
    yield
    scene.write(f"{folder}/trainer_state.json", b'{"global_step": 1}\n')
    yield
    scene.write(f"{folder}/rng_state_1.pth", torch_file()[:-1])
    yield
    scene.write(f"{folder}/rng_state_1.pth", torch_file())
    if inside == "jit":
        yield
        scene.remove(f"{folder}/checkpoint-is-incomplete.txt")


def lightning(scene: Scene, step: int) -> Save:
    """The move between file systems is a copy: seen half, and empty before."""
    path = f"lightning_logs/version_0/checkpoints/epoch=0-step={step}.ckpt"
    whole = torch_file()
    for part in (0, 1, len(whole) // 2, len(whole) - 1):
        yield
        scene.write(path, whole[:part])
    yield
    scene.write(path, whole)


def lightning_folder(scene: Scene, step: int) -> Save:
    folder = f"checkpoints/epoch=0-step={step}.ckpt"
    yield from dcp(scene, folder)
    yield
    scene.write(f"{folder}/meta.pt", torch_file())


def titan(scene: Scene, step: int) -> Save:
    yield from dcp(scene, f"step-{step}")


def titan_safetensors(scene: Scene, step: int) -> Save:
    index = (
        '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    )
    for part in (1, 2):
        yield
        scene.write(f"step-{step}/model-0000{part}-of-00002.safetensors")
    yield
    scene.write(f"step-{step}/model.safetensors.index.json", index[:40].encode())
    yield
    scene.write(f"step-{step}/model.safetensors.index.json", index.encode())


def nemo(scene: Scene, step: int) -> Save:
    name = f"checkpoints/gpt--val_loss=1.25-step={step}-consumed_samples=64.0-last"
    yield
    scene.write(f"{name}-unfinished", b"")
    yield
    scene.write(f"{name}/context/model.yaml")
    yield from dcp(scene, f"{name}/weights")
    yield
    scene.write(f"{name}/weights/metadata.json", b"{}")
    yield
    scene.remove(f"{name}-unfinished")


def orbax(scene: Scene, step: int) -> Save:
    temporary = f"{step}.orbax-checkpoint-tmp-17"
    yield
    scene.write(f"{temporary}/default.orbax-checkpoint-tmp-18/manifest.ocdbt")
    yield
    scene.rename(f"{temporary}/default.orbax-checkpoint-tmp-18", f"{temporary}/default")
    yield
    scene.write(f"{temporary}/_CHECKPOINT_METADATA", b"{}")
    yield
    scene.rename(temporary, str(step))


def orbax_commit(scene: Scene, step: int) -> Save:
    yield
    scene.write(f"{step}/default/manifest.ocdbt")
    yield
    scene.write(f"{step}/commit_success.txt", b"ok")
