"""An external bus: the flags of `aegis-run` for it, and `aegisctl bus-config` for whoever runs it."""

from __future__ import annotations

import argparse
import json
import re
import ssl
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from aegis_elastic.bus import tls
from aegis_elastic.bus.credentials import CredentialsUnreadable, PlaneKeys
from aegis_elastic.bus.server import required_config
from aegis_elastic.control.host.config import BusConfig
from aegis_elastic.control.host.errors import UsageError

_URL = re.compile(r"(nats|tls)://[^\s/@?#]+:[0-9]{1,5}")


def add_bus_flags(add: Callable[..., None], path: Callable[[str], Path]) -> None:
    """Declare them. `add` and `path` as in `launch.flags.group`."""
    add(
        "bus",
        "A nats-server with JetStream that somebody else runs, as tls://HOST:PORT or nats://HOST:PORT, "
        "instead of one that the control plane starts. The node that hosts the control plane also needs "
        "--aegis-bus-keys.",
        type=_url,
        metavar="URL",
    )
    add(
        "bus-keys",
        "The file with the keys that the nats-server of --aegis-bus trusts; `aegisctl bus-config` makes it, "
        "and prints what the server's configuration must have. Keep it from others: it opens every job.",
        type=path,
        metavar="FILE",
    )
    add(
        "bus-ca",
        "The certificates, in PEM, one of which the server of a --aegis-bus tls://... shows, or was signed "
        "with.",
        type=path,
        metavar="FILE",
    )


def read(url: str | None, keys_file: Path | None, ca_file: Path | None) -> BusConfig:
    """The plane's configuration of it. UsageError for what doesn't go together, or can't be read."""
    if url is None:
        if keys_file or ca_file:
            raise UsageError("cannot use --aegis-bus-keys and --aegis-bus-ca without --aegis-bus")
        return BusConfig()
    if keys_file is None:
        raise UsageError(f"cannot use --aegis-bus {url}: give --aegis-bus-keys, too")
    if url.startswith("tls://") != (ca_file is not None):
        raise UsageError(f"cannot use --aegis-bus {url}: --aegis-bus-ca goes with tls://, and only with that")
    try:
        PlaneKeys.load(keys_file)
        ca_pem = ca_file.read_text() if ca_file is not None else ""
        if ca_pem:
            tls.client_context(ca_pem)
    except CredentialsUnreadable as error:
        raise UsageError(str(error)) from None
    except (OSError, ValueError, ssl.SSLError) as error:
        raise UsageError(f"cannot use --aegis-bus-ca {ca_file}: {error}") from None
    return BusConfig(url, str(keys_file.absolute()), ca_pem)


def add_command(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `bus-config` to `aegisctl`."""
    about = "Print what a nats-server must have in its configuration to serve jobs by --aegis-bus."
    sub = add("bus-config", _print, about)
    sub.add_argument(
        "--keys", type=Path, required=True, metavar="FILE", help="the keys; made if there are none"
    )


def _print(args: argparse.Namespace, console: Console) -> int:
    try:
        keys = PlaneKeys.load_or_generate(args.keys)
    except CredentialsUnreadable as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(f"cannot write the keys to {args.keys}: {error.strerror}") from None
    # The server's configuration language takes JSON, and so do a chart's values.
    print(json.dumps(required_config(keys), indent=2))
    return 0


def _url(text: str) -> str:
    if _URL.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no bus: want tls://HOST:PORT or nats://HOST:PORT")
    return text
