from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from aegis_elastic.bus.subjects import unescape
from aegis_elastic.control.host import run_directories
from aegis_elastic.control.host.errors import NoSuchJob, UsageError


@pytest.fixture(autouse=True)
def _state_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


def registered(
    job: str, run_dir: Path, namespace: str = "default", generation: int = 1
) -> run_directories.Registration:
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_directories.register(namespace, job, generation, run_dir)


def test_a_registered_job_is_found_by_name(tmp_path: Path) -> None:
    told = registered("digits", tmp_path / "run")
    assert run_directories.find("digits") == told
    assert told.path == tmp_path / "run"


@pytest.mark.parametrize("name", ["a/b", "..", "x y\n", "a*b", "Ünï", "current", "a=b", "-"])
def test_names_of_any_characters_become_file_names_and_back(name: str, tmp_path: Path) -> None:
    file_name = run_directories.file_name(name)
    assert "/" not in file_name and file_name not in (".", "..")
    assert unescape(file_name) == name
    registered(name, tmp_path / "run")
    assert run_directories.find(name).job == name


def test_very_long_names_stay_apart_and_findable(tmp_path: Path) -> None:
    one, other = "x" * 400 + "1", "x" * 400 + "2"
    registered(one, tmp_path / "one")
    registered(other, tmp_path / "other")
    assert len(run_directories.file_name(one)) < 255
    assert run_directories.find(one).path == tmp_path / "one"
    assert run_directories.find(other).path == tmp_path / "other"


def test_the_next_generation_takes_the_name_over(tmp_path: Path) -> None:
    registered("digits", tmp_path / "first")
    registered("digits", tmp_path / "second", generation=2)
    assert run_directories.find("digits").generation == 2


def test_the_same_name_in_two_namespaces_must_be_told_apart(tmp_path: Path) -> None:
    registered("digits", tmp_path / "a", "red")
    registered("digits", tmp_path / "b", "blue")
    with pytest.raises(UsageError, match="'blue', 'red'"):
        run_directories.find("digits")
    assert run_directories.find("digits", "red").path == tmp_path / "a"


def test_an_unknown_name_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    registered("digits", tmp_path / "run")
    with pytest.raises(NoSuchJob, match=r"'digts'.*digits"):
        run_directories.find("digts")


def test_registrations_that_lead_nowhere_are_passed_over(tmp_path: Path) -> None:
    registered("gone", tmp_path / "gone").path.rmdir()
    registered("torn", tmp_path / "torn")
    (run_directories.job_dir("default", "torn") / run_directories.CURRENT).write_text('{"runDir"')
    registered("fine", tmp_path / "fine")
    assert [r.job for r in run_directories.registrations()] == ["fine"]


def test_everything_made_is_for_the_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        registered("digits", tmp_path / "run")
        made = run_directories.make_private(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    current = run_directories.job_dir("default", "digits") / run_directories.CURRENT
    assert stat.S_IMODE(current.stat().st_mode) == 0o600
    root = run_directories.user_state_dir()
    for path in (made, made.parent, root, root / "aegis", *current.parents[:2]):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    try:
        os.chown(tmp_path / "theirs", 12345, -1)
    except PermissionError:
        pytest.skip("only root can give a directory away")
    with pytest.raises(UsageError, match="belongs to user id 12345"):
        run_directories.make_private(tmp_path / "theirs")


def test_a_directory_that_others_may_write_to_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(UsageError, match="chmod go-w"):
        run_directories.make_private(shared)
    assert stat.S_IMODE(shared.stat().st_mode) == 0o777


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file/run"):
        run_directories.make_private(tmp_path / "file" / "run")


def test_without_a_usable_home_state_goes_to_the_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "relative/is/invalid")
    monkeypatch.setenv("HOME", "/dev/null/home")
    assert run_directories.user_state_dir() == Path(tempfile.gettempdir()) / f"aegis-{os.getuid()}"
