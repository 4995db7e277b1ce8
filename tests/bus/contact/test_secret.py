"""Where the join secret comes from, and what is refused with a reason."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from aegis_elastic.bus.contact import secret
from aegis_elastic.bus.contact.secret import SECRET_ENV, SecretError, find_secret, read_secret

IN_FILE, IN_ENV, SHARED = "secret of the file", "secret of the environment", "secret of the directory"


def private(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_the_first_source_that_has_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = private(tmp_path / "named", IN_FILE + "\n")
    state = tmp_path / "state"
    state.mkdir()
    private(state / secret.SHARED_FILE, SHARED)
    mounted = private(tmp_path / "mounted", "secret of the mount", 0o644)
    monkeypatch.setattr(secret, "KUBERNETES_FILE", mounted)
    env = {SECRET_ENV: IN_ENV}
    assert find_secret(named, env, state) == (IN_FILE.encode(), f"the file {named}")
    assert find_secret(None, env, state) == (IN_ENV.encode(), f"${SECRET_ENV}")
    assert find_secret(None, {}, state)[0] == SHARED.encode()
    assert find_secret(None, {}, None) == (b"secret of the mount", f"the mounted secret {mounted}")


def test_with_no_source_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret, "KUBERNETES_FILE", tmp_path / "nowhere")
    assert find_secret(None, {}, None) == (None, "")


def test_the_first_node_makes_the_shared_one_and_the_others_read_it(tmp_path: Path) -> None:
    found: list[bytes | None] = []
    threads = [
        threading.Thread(target=lambda: found.append(find_secret(None, {}, tmp_path)[0])) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert found[0] is not None
    assert len(found[0]) == 64
    assert stat.S_IMODE((tmp_path / secret.SHARED_FILE).stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_a_file_that_others_can_read_holds_no_secret(tmp_path: Path, mode: int) -> None:
    path = private(tmp_path / "open", IN_FILE, mode)
    with pytest.raises(SecretError, match=f"others can read it; run chmod 600 {path}"):
        read_secret(path)


def test_what_can_not_be_used_is_named_and_never_shown(tmp_path: Path) -> None:
    with pytest.raises(SecretError, match="nowhere"):
        read_secret(tmp_path / "nowhere")
    short = private(tmp_path / "short", "sec\n")
    for where, call in (
        (str(short), lambda: read_secret(short)),
        (SECRET_ENV, lambda: find_secret(None, {SECRET_ENV: "sec"}, None)),
    ):
        with pytest.raises(SecretError, match="shorter than 8 bytes") as caught:
            call()
        assert where in str(caught.value)
    with pytest.raises(SecretError, match="cannot keep a join secret"):
        find_secret(None, {}, tmp_path / "no" / "directory")
