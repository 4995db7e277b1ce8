"""The peers that we are compared with, each in its own venv under `build/peers`.

A venv is made by pip when it is first needed. It sees the packages of the Python that runs this (torch above
all: no gigabytes are downloaded, and all use the same torch). If a peer can't be installed, its row in the
table shows the reason: a peer is never silently missing.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent.parent / "build" / "peers"
INSTALL_TIMEOUT_S = 900.0
OUTPUT_CHARS = 600


class PeerMissing(RuntimeError):
    """A peer can't be measured here; the message says why."""


class Peer(NamedTuple):
    """The content of a venv. `wheel`: unpacked as it is, since there is none for this Python."""

    packages: tuple[str, ...]
    probe: str
    wheel: str = ""


PEERS = {
    # Its wheels are for Python 3.12; its launcher is plain Python and runs on others.
    "nvrx": Peer(
        (
            *("defusedxml", "fastapi", "httpx", "pydantic", "pydantic-settings", "pyyaml", "slowapi"),
            *("uvicorn", "grpcio-tools", "setproctitle"),
        ),
        "nvidia_resiliency_ext.fault_tolerance.launcher",
        "nvidia-resiliency-ext==0.7.0",
    ),
    "dlrover": Peer(("dlrover==0.6.1", "kubernetes"), "dlrover.python.elastic_agent.torch.training"),
    # no peer, but libraries that trainings import
    "libraries": Peer(
        ("transformers", "accelerate", "pandas", "scikit-learn"), "transformers, pandas, sklearn"
    ),
}


def python_of(name: str) -> str:
    """The interpreter that has this peer. PeerMissing if it can't be installed."""
    home = FOLDER / name
    python = home / "bin" / "python"
    done, failed = home / "ready", home / "failed"
    if failed.exists():
        raise PeerMissing(failed.read_text())
    if not done.exists():
        print(f"installing {name} into {home.relative_to(FOLDER.parent.parent)}", file=sys.stderr, flush=True)
        try:
            _install(PEERS[name], home, python)
        except (OSError, subprocess.SubprocessError, PeerMissing) as error:
            why = f"cannot install {name} (remove {home} to try again): {error}"
            home.mkdir(parents=True, exist_ok=True)
            failed.write_text(why)
            raise PeerMissing(why) from error
        done.touch()
    _add_base_packages(home)
    return str(python)


def version_of(name: str) -> str:
    """The version that is measured."""
    peer = PEERS[name]
    return (peer.wheel or peer.packages[0]).partition("==")[2]


def _install(peer: Peer, home: Path, python: Path) -> None:
    venv.create(home, with_pip=True, clear=True)
    site = _add_base_packages(home)
    pinned = home / "constraints.txt"
    pinned.write_text(f"torch=={version('torch').partition('+')[0]}\n")
    _call(python, "-m", "pip", "install", "--quiet", "-c", str(pinned), *peer.packages)
    if peer.wheel:
        _unpack(peer.wheel, python, site)
    _call(python, "-c", f"import {peer.probe}")


def _add_base_packages(home: Path) -> Path:
    """Add the packages of the present Python and this project to the venv. Returns its site-packages."""
    places = sysconfig.get_paths("venv", {"base": str(home), "platbase": str(home)})
    site = Path(places["purelib"])
    (site / "zz_base.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n{FOLDER.parent.parent}\n")
    return site


def _unpack(wheel: str, python: Path, site: Path) -> None:
    machine = platform.machine()
    newest = [f"--platform=manylinux_2_{minor}_{machine}" for minor in (39, 34, 31, 28)]
    with tempfile.TemporaryDirectory(prefix="aegis-peer-") as folder:
        fetch = (
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--python-version=3.12",
        )
        _call(python, *fetch, *newest, "--dest", folder, wheel)
        (file,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(file) as archive:
            archive.extractall(site)


def _call(python: Path, *arguments: str) -> None:
    done = subprocess.run(
        [str(python), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=INSTALL_TIMEOUT_S,
        cwd="/",
    )
    if done.returncode:
        output = (done.stderr or done.stdout).strip()
        raise PeerMissing(f"{' '.join(arguments[:3])} ended with {done.returncode}: {output[-OUTPUT_CHARS:]}")
