"""Rules that several frameworks share: torch's distributed checkpoints, and sets of shards."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from aegis_elastic.core.checkpoints.listing import Checkpoint, File, Found, Listing, base, join, step_of

METADATA = ".metadata"
SHARD = re.compile(r"__\d+_\d+\.distcp")
_SHARD_NAMED = re.compile(rb"__\d+_\d+\.distcp")
_ONE_OF = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\..+)")


class Whole(NamedTuple):
    """Times of a set that is whole: of its newest part and of its oldest."""

    stamp_ns: int
    oldest_ns: int


def whole_dcp(listing: Listing, folder: str) -> Whole | None:
    """Whether a folder holds a whole torch.distributed.checkpoint.

    `.metadata` is moved into place when every rank has written its shards. Saving again into the same folder
    keeps the old one while shards are overwritten, so no shard may be newer; and a half-purged folder lacks
    shards that `.metadata` names.
    """
    files = listing.in_folder(folder)
    metadata = files.get(METADATA)
    shards = {name: file for name, file in files.items() if SHARD.fullmatch(name)}
    if metadata is None or not metadata.size or not shards:
        return None
    named = {name.decode() for name in _SHARD_NAMED.findall(listing.ends.get(join(folder, METADATA), b""))}
    if not named <= shards.keys():
        return None
    parts = [shards[name] for name in named or shards]
    if any(part.mtime_ns > metadata.mtime_ns for part in parts):
        return None
    return Whole(metadata.mtime_ns, min(part.mtime_ns for part in parts))


def whole_safetensors(listing: Listing, folder: str) -> Whole | None:
    """Whether a folder holds every file that its model.safetensors.index.json, written last, names."""
    index = "model.safetensors.index.json"
    files = listing.in_folder(folder)
    text = listing.text(join(folder, index))
    if index not in files or not text.endswith("}"):
        return None
    named = set(re.findall(r'"([^"/]+\.safetensors)"', text))
    parts = [files.get(name) for name in named]
    if not named or any(part is None or not part.size for part in parts):
        return None
    there = [part for part in parts if part is not None]
    if any(part.mtime_ns > files[index].mtime_ns for part in there):
        return None
    return Whole(files[index].mtime_ns, min(part.mtime_ns for part in there))


def lacks_one_of_a_set(names: Iterable[str]) -> bool:
    """Whether of files named NAME-00001-of-00003.EXT some are there and others not."""
    sets: dict[tuple[str, int, str], set[int]] = {}
    for name in names:
        match = _ONE_OF.fullmatch(name)
        if match:
            stem, number, count, ending = match.groups()
            sets.setdefault((stem, int(count), ending), set()).add(int(number))
    return any(numbers != set(range(1, count + 1)) for (_, count, _), numbers in sets.items())


def find_dcp(listing: Listing) -> Found:
    """Folders with shards of torch.distributed.checkpoint."""
    claims = [
        folder
        for folder, files in listing.folders.items()
        if METADATA in files or any(SHARD.fullmatch(name) for name in files)
    ]
    return Found(tuple(claims), tuple(_checkpoints(listing, "dcp", claims)))


def find_titan(listing: Listing) -> Found:
    """torchtitan: `step-N/`, by torch.distributed.checkpoint or, the last one, as safetensors."""
    claims = [folder for folder in listing.folders if re.fullmatch(r"step-\d+", base(folder))]
    return Found(tuple(claims), tuple(_checkpoints(listing, "torchtitan", claims)))


def _checkpoints(listing: Listing, kind: str, folders: Iterable[str]) -> Iterable[Checkpoint]:
    for folder in folders:
        whole = whole_dcp(listing, folder)
        if whole is None and kind == "torchtitan":
            whole = whole_safetensors(listing, folder)
        if whole is not None:
            yield Checkpoint(kind, folder, step_of(base(folder)), *whole)


def all_not_empty(files: Iterable[File]) -> bool:
    """Whether there are files, and none of them is empty."""
    sizes = [file.size for file in files]
    return bool(sizes) and all(sizes)
