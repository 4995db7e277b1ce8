"""First contact proved by a real munged, as between the nodes of a Slurm cluster."""

from __future__ import annotations

import os
import selectors
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from aegis_elastic.bus.contact import first_contact, munge
from aegis_elastic.bus.contact.first_contact import Hello
from aegis_elastic.bus.contact.secret import SecretError, find_secret

HELLO = Hello("ns", "job", "w0", "uid", "n0", "10.0.0.1", 1, 0, "UKEY", "nonce")
PATH = f"{os.environ['PATH']}:/usr/sbin"
# The clients' default is the machine's own munged; ours answers elsewhere.
_CLIENT = '#!/bin/sh\nexec {real} --socket={socket} "$@"\n'


@pytest.fixture
def munged(
    tmp_path: Path, unmet: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> Iterator[subprocess.Popen[bytes]]:
    """A munged of ours while the test runs."""
    found = shutil.which("munged", path=PATH)
    if found is None:
        unmet("no munged (apt-get install munge)")
    assert found is not None
    tmp_path.chmod(0o755)
    socket = tmp_path / "socket"
    for tool in ("munge", "unmunge"):
        client = tmp_path / tool
        client.write_text(_CLIENT.format(real=shutil.which(tool, path=PATH), socket=socket))
        client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{PATH}")
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    files = [f"--{name}-file={tmp_path}/{name}" for name in ("key", "pid", "seed")]
    process = subprocess.Popen(
        [found, "--foreground", "--force", *files, f"--socket={socket}"], stderr=subprocess.PIPE
    )
    with process:
        assert process.stderr is not None
        output = b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stderr, selectors.EVENT_READ)
            while b"Created" not in output or b"work thread" not in output:
                assert selector.select(10), output
                output += os.read(process.stderr.fileno(), 4096)
        yield process
        process.terminate()


def test_a_credential_is_good_once_and_for_what_it_was_made_over(munged: object) -> None:
    proof = munge.prove("what both have seen")
    assert not munge.is_proof(proof, "something else")
    fresh = munge.prove("what both have seen")
    assert munge.is_proof(fresh, "what both have seen")
    assert not munge.is_proof(fresh, "what both have seen"), "it was opened before"
    assert not munge.is_proof("", "what both have seen")
    assert not munge.is_proof("MUNGE:garbage:", "what both have seen")


def test_hello_and_welcome_are_proved_over_the_certificate_that_was_shown(munged: object) -> None:
    hello = msgspec.structs.replace(HELLO, proof=first_contact.hello_proof(munge.MUNGE, "fingerprint", HELLO))
    assert not first_contact.is_hello_proof(munge.MUNGE, "a middleman's", hello)
    hello = msgspec.structs.replace(HELLO, proof=first_contact.hello_proof(munge.MUNGE, "fingerprint", HELLO))
    assert first_contact.is_hello_proof(munge.MUNGE, "fingerprint", hello)
    welcome = first_contact.Welcome("jwt", 4222, 1, 0, 1, 3, 0)
    proof = first_contact.welcome_proof(munge.MUNGE, "fingerprint", hello, welcome)
    proved = msgspec.structs.replace(welcome, proof=proof)
    assert first_contact.is_welcome_proof(munge.MUNGE, "fingerprint", hello, proved)


def test_it_is_taken_in_a_slurm_job_that_has_no_secret_of_its_own(munged: object) -> None:
    assert find_secret(None, {"SLURM_JOB_ID": "7"}, None)[0] == munge.MUNGE
    assert find_secret(None, {}, None)[0] is None
    own = {"SLURM_JOB_ID": "7", "AEGIS_JOIN_SECRET": "a secret of our own"}
    assert find_secret(None, own, None)[0] == b"a secret of our own"


def test_where_no_munged_answers_it_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not munge.works()
    assert munge.prove("x") == ""
    assert not munge.is_proof("MUNGE:x:", "x")
    assert find_secret(None, {"SLURM_JOB_ID": "7"}, None)[0] is None


def test_nobody_can_choose_its_mark_as_a_secret() -> None:
    with pytest.raises(SecretError, match="is not secret"):
        find_secret(None, {"AEGIS_JOIN_SECRET": munge.MUNGE.decode()}, None)
