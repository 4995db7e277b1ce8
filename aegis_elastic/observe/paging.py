"""Pages to humans: by a webhook, or by anything that the package apprise (extra `notify`) knows by its URL.

A page is de-duplicated before it comes here. It is tried until it is delivered, for a while: a dead chat
server must neither hold up a recovery nor make an incident silent.

An address is a secret as a rule (whoever has it can post), so it comes from a file or a variable, and no log
and no message of ours shows more of it than its scheme and host.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import logging
import stat
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

logger = logging.getLogger(__name__)

NOTIFY_ENV = "AEGIS_NOTIFY"
WEBHOOKS = ("http", "https")
# One try; then pauses that double, until it is given up, loudly.
POST_S = 5.0
RETRY_S, RETRY_S_MAX, GIVE_UP_S = 2.0, 60.0, 1800.0
# How long whoever pages waits for the delivery before it goes on in the background.
PATIENCE_S = 6.0
PENDING_MAX = 100
TEXT_CHARS_MAX = 4000


class BadTarget(ValueError):
    """An address that pages can't go to; the text doesn't show it."""


class Page(msgspec.Struct, frozen=True, rename="camel"):
    """What a webhook gets as JSON. `text` once more with the mention, as chat servers want it."""

    job: str
    key: str
    urgent: bool
    message: str
    text: str


def targets_of(given: str | None, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The addresses, one a line: from `@FILE`, an address itself, or, with neither, AEGIS_NOTIFY (that or an
    `@FILE`). BadTarget if a file can't be read or everybody can, or if what it says is no address.
    """
    named, source = (given, "--aegis-notify") if given else (environment.get(NOTIFY_ENV, ""), NOTIFY_ENV)
    if not named:
        return ()
    text = _read(Path(named[1:]).expanduser(), source) if named.startswith("@") else named
    found = tuple(line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#"))
    for each in found:
        _check(each, source, shown=bool(given) and not named.startswith("@"))
    return found


def _read(path: Path, source: str) -> str:
    try:
        if path.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
            raise BadTarget(f"cannot use the file {path} of {source}: everybody can read it (chmod 600)")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise BadTarget(f"cannot read the file {path} of {source}: {why}") from error


def _check(address: str, source: str, *, shown: bool) -> None:
    try:
        parts = urllib.parse.urlsplit(address)
        parts.port  # noqa: B018 - which is only parsed now
    except ValueError as error:
        raise BadTarget(f"cannot use an address of {source}: {error}") from None
    if not parts.scheme or not address.startswith(f"{parts.scheme}://"):
        raise BadTarget(f"cannot use an address of {source}: want https://..., or a URL of apprise")
    if parts.scheme in WEBHOOKS:
        if not parts.hostname:
            raise BadTarget(f"cannot use an address of {source}: it names no host")
        if shown and (parts.username or parts.password):
            raise BadTarget(f"cannot use {source}: everybody sees a command line; give a password by @FILE")
        return
    if shown:
        raise BadTarget(
            f"cannot use {source} {parts.scheme}://...: everybody sees a command line; give it by @FILE or "
            f"{NOTIFY_ENV}"
        )
    if not _apprise().add(address):
        raise BadTarget(f"cannot use an address of {source}: apprise takes no such {parts.scheme}://")


def _apprise() -> Any:
    try:
        import apprise  # only here, since it belongs to an extra
    except ImportError:
        raise BadTarget(
            "cannot page by anything but http:// and https:// without apprise: pip install "
            "'aegis-elastic[notify]'"
        ) from None
    return apprise.Apprise()


class Pager:
    """Sends the pages of one job to all addresses."""

    def __init__(self, targets: Sequence[str], job: str, *, mention: str = "@here") -> None:
        """`mention`: how urgent pages call somebody in a chat."""
        self._targets = tuple(targets)
        self._job = job
        self._mention = mention
        self._tasks: set[asyncio.Task[None]] = set()

    async def send(self, key: str, text: str, *, urgent: bool) -> None:
        """Page; returns when it is delivered, or after a moment, while it is tried on."""
        tasks = self._begin(key, text, urgent)
        if tasks:
            await asyncio.wait(tasks, timeout=PATIENCE_S)

    def send_soon(self, key: str, text: str, urgent: bool) -> None:
        """Page without waiting."""
        self._begin(key, text, urgent)

    async def close(self, patience_s: float = 2.0) -> None:
        """End, after a moment for what is under way."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=patience_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, key: str, text: str, urgent: bool) -> list[asyncio.Task[None]]:
        level = logging.ERROR if urgent else logging.WARNING
        logger.log(level, "page %s: %s", key, text)
        text = text[:TEXT_CHARS_MAX]
        full_text = f"{self._mention} {text}" if urgent else text
        page = Page(self._job, key, urgent, text, f"[aegis] {self._job}: {full_text}")
        if len(self._tasks) + len(self._targets) > PENDING_MAX:
            logger.error("page %s is in the log only: %d others wait for their delivery", key, PENDING_MAX)
            return []
        begun = []
        for target in self._targets:
            begun.append(self._run(self._deliver(target, page)))
        return begun

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _deliver(self, target: str, page: Page) -> None:
        loop = asyncio.get_running_loop()
        until_s, pause_s = loop.time() + GIVE_UP_S, RETRY_S
        while True:
            # A thread of asyncio's own, which a timeout of its socket ends.
            why = await asyncio.to_thread(_post if _is_webhook(target) else _notify, target, page)
            if not why:
                return
            if loop.time() + pause_s > until_s:
                logger.error(
                    "page %s was not delivered to %s: %s; given up", page.key, _without_secrets(target), why
                )
                return
            logger.warning("page %s was not delivered to %s: %s", page.key, _without_secrets(target), why)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_S_MAX)


def _is_webhook(target: str) -> bool:
    return urllib.parse.urlsplit(target).scheme in WEBHOOKS


def _without_secrets(target: str) -> str:
    parts = urllib.parse.urlsplit(target)
    return f"{parts.scheme}://{parts.hostname if parts.scheme in WEBHOOKS else '...'}"


def _post(target: str, page: Page) -> str:
    """Why the webhook didn't take it, "" if it did."""
    parts = urllib.parse.urlsplit(target)
    headers = {"Content-Type": "application/json", "User-Agent": "aegis-elastic"}
    request = urllib.request.Request(target, msgspec.json.encode(page), headers)
    try:
        if parts.username is not None:
            host = parts.netloc.rpartition("@")[2]
            pair = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
            request.full_url = parts._replace(netloc=host).geturl()
            request.add_header("Authorization", f"Basic {base64.b64encode(pair.encode()).decode()}")
        with urllib.request.urlopen(request, timeout=POST_S) as answer:
            answer.read(1024)
    except urllib.error.HTTPError as error:
        return f"it answered {error.code}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        return str(getattr(error, "reason", "") or error or type(error).__name__)
    return ""


def _notify(target: str, page: Page) -> str:
    """Why apprise didn't deliver it, "" if it did."""
    try:
        service = _apprise()
        service.add(target)
        kind = "failure" if page.urgent else "info"
        sent = service.notify(body=page.text, title=f"aegis {page.job}", notify_type=kind)
    except Exception as error:  # noqa: BLE001 - a hundred services behind one package, none of them ours
        return f"apprise: {type(error).__name__}"
    return "" if sent else "apprise could not"
