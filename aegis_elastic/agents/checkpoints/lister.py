"""Looking through a folder of checkpoints without paying for what is finished."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator

from aegis_elastic.core.checkpoints.listing import File, Listing, join, step_of, wanted_bytes

FOLDERS_DEEP_MAX = 6
ENTRIES_MAX = 20_000
# A folder that holds one checkpoint, by its name: not looked into again once it is done with.
_ONE_CHECKPOINT = re.compile(
    r"(iter|checkpoint|ckpt|global_step|step|epoch)[-_=]?\d+|.*step=\d.*|.*\.ckpt|.*-last"
)


class Lister:
    """One folder, looked at again and again from one thread.

    `folders` are those that exist (absolute), where news are to be waited for; `too_many` says that the last
    look had to stop before the end.
    """

    def __init__(self, top: str) -> None:
        self.top = top
        self.folders: tuple[str, ...] = ()
        self.too_many = False
        self._done: dict[str, int] = {}
        self._contents: dict[str, tuple[File, bytes]] = {}

    def begin(self) -> int:
        """Training starts: what is there now is old, and not looked into again before it changes.

        Returns the newest time of anything there, in nanoseconds of that file system's clock; -1: nothing.
        """
        return max((file.mtime_ns for _, file in self._walk([], all_of_it=True)), default=-1)

    def look(self, world_size: int = 0) -> Listing:
        """What is there now, but for what is done with."""
        self.too_many = False
        folders: list[str] = []
        files = dict(self._walk(folders))
        self.folders = tuple(folders)
        ends = {}
        for path, file in files.items():
            if wanted_bytes(path):
                ends[path] = self._end_of(path, file)
        self._contents = {path: kept for path, kept in self._contents.items() if path in files}
        return Listing(files, ends, world_size)

    def done_with(self, path: str) -> None:
        """A checkpoint is complete: nothing more is expected there until its folder changes."""
        try:
            self._done[path] = os.stat(os.path.join(self.top, path)).st_mtime_ns
        except OSError:
            self._done.pop(path, None)

    def changed(self, folder: str) -> None:
        """Something has happened in this folder (absolute): look into it again."""
        relative = os.path.relpath(folder, self.top)
        for path in [*self._done]:
            if relative == path or relative.startswith(f"{path}/"):
                del self._done[path]

    def _walk(self, folders: list[str], *, all_of_it: bool = False) -> Iterator[tuple[str, File]]:
        """Files by path; adds the folders. `all_of_it`: what is done with, too, and that is found anew."""
        todo: list[tuple[str, int]] = [("", 0)]
        count = 0
        while todo:
            folder, depth = todo.pop()
            place = os.path.join(self.top, folder) if folder else self.top
            try:
                # Those with the highest numbers come last here, and first off the stack.
                entries = sorted(os.scandir(place), key=lambda entry: step_of(entry.name))
            except OSError:
                continue  # gone meanwhile, or not ours to read: no checkpoint that we could vouch for
            folders.append(place)
            for entry in entries:
                count += 1
                if count > ENTRIES_MAX:
                    self.too_many = True
                    return
                path = join(folder, entry.name)
                try:
                    seen = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                if stat.S_ISREG(seen.st_mode):
                    yield path, File(seen.st_size, seen.st_mtime_ns)
                elif stat.S_ISDIR(seen.st_mode) and depth < FOLDERS_DEEP_MAX:
                    if all_of_it and _ONE_CHECKPOINT.fullmatch(entry.name):
                        self._done[path] = seen.st_mtime_ns
                    if self._done.get(path) == seen.st_mtime_ns and not all_of_it:
                        folders.append(os.path.join(self.top, path))
                    else:
                        todo.append((path, depth + 1))

    def _end_of(self, path: str, file: File) -> bytes:
        kept = self._contents.get(path)
        if kept is not None and kept[0] == file:
            return kept[1]
        try:
            with open(os.path.join(self.top, path), "rb") as stream:
                stream.seek(max(file.size - wanted_bytes(path), 0))
                end = stream.read(wanted_bytes(path))
        except OSError:
            return b""
        self._contents[path] = file, end
        return end
