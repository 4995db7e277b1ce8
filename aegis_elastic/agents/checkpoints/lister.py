"""Lists a folder of checkpoints again and again, without the cost of finished ones."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator

from aegis_elastic.core.checkpoints.listing import File, Listing, join, step_of, wanted_bytes

FOLDERS_DEEP_MAX = 6
ENTRIES_MAX = 20_000
# Names of folders that hold one checkpoint: not listed again once that is done.
_ONE_CHECKPOINT = re.compile(
    r"(iter|checkpoint|ckpt|global_step|step|epoch)[-_=]?\d+|.*step=\d.*|.*\.ckpt|.*-last"
)


class Lister:
    """One folder, listed again and again from one thread.

    `folders` are those that exist (absolute), to be watched for changes; `too_many`: the last listing stopped
    at ENTRIES_MAX.
    """

    def __init__(self, top: str) -> None:
        self.top = top
        self.folders: tuple[str, ...] = ()
        self.too_many = False
        self._done: dict[str, int] = {}
        self._contents: dict[str, tuple[File, bytes]] = {}

    def start(self) -> int:
        """Training starts: what is there now is old, and not listed again before it changes.

        Returns the newest mtime of all files there, in ns of that file system's clock; -1: there are none.
        """
        return max((file.mtime_ns for _, file in self._walk([], include_done=True)), default=-1)

    def list_folder(self, world_size: int = 0) -> Listing:
        """List what is there now, but for finished checkpoints."""
        self.too_many = False
        folders: list[str] = []
        files = dict(self._walk(folders))
        self.folders = tuple(folders)
        ends = {}
        for path, file in files.items():
            if wanted_bytes(path):
                ends[path] = self._end_of(path, file)
        self._contents = {path: cached for path, cached in self._contents.items() if path in files}
        return Listing(files, ends, world_size)

    def mark_done(self, path: str) -> None:
        """A checkpoint is complete: don't list it again until its folder changes."""
        try:
            self._done[path] = os.stat(os.path.join(self.top, path)).st_mtime_ns
        except OSError:
            self._done.pop(path, None)

    def mark_changed(self, folder: str) -> None:
        """Something has happened in this folder (absolute): list it again."""
        relative = os.path.relpath(folder, self.top)
        for path in [*self._done]:
            if relative == path or relative.startswith(f"{path}/"):
                del self._done[path]

    def _walk(self, folders: list[str], *, include_done: bool = False) -> Iterator[tuple[str, File]]:
        """Files by path; appends to `folders`. `include_done`: finished checkpoints, too, whose set is made
        anew.
        """
        pending: list[tuple[str, int]] = [("", 0)]
        count = 0
        while pending:
            folder, depth = pending.pop()
            place = os.path.join(self.top, folder) if folder else self.top
            try:
                # Those with the highest numbers come last here, and are listed first.
                entries = sorted(os.scandir(place), key=lambda entry: step_of(entry.name))
            except OSError:
                continue  # it is gone, or not readable: no checkpoint that we could report
            folders.append(place)
            for entry in entries:
                count += 1
                if count > ENTRIES_MAX:
                    self.too_many = True
                    return
                path = join(folder, entry.name)
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                if stat.S_ISREG(status.st_mode):
                    yield path, File(status.st_size, status.st_mtime_ns)
                elif stat.S_ISDIR(status.st_mode) and depth < FOLDERS_DEEP_MAX:
                    if include_done and _ONE_CHECKPOINT.fullmatch(entry.name):
                        self._done[path] = status.st_mtime_ns
                    if self._done.get(path) == status.st_mtime_ns and not include_done:
                        folders.append(os.path.join(self.top, path))
                    else:
                        pending.append((path, depth + 1))

    def _end_of(self, path: str, file: File) -> bytes:
        cached = self._contents.get(path)
        if cached is not None and cached[0] == file:
            return cached[1]
        try:
            with open(os.path.join(self.top, path), "rb") as stream:
                stream.seek(max(file.size - wanted_bytes(path), 0))
                end = stream.read(wanted_bytes(path))
        except OSError:
            return b""
        self._contents[path] = file, end
        return end
