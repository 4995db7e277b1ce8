"""The life of a plane: started once a host, held, lingering, taken up again, private, and gone in the end."""

from __future__ import annotations

import os
import signal
import stat
import threading
from pathlib import Path

import pytest

from aegis_elastic.control.host.plane_process import PlaneFailed, PortTaken
from aegis_elastic.core.accounts import journal
from aegis_elastic.core.accounts.journal import Adopt
from tests.control.conftest import Hold, MakeAgent
from tests.control.planes import Held, children, config, ended, wait_for


def test_nobody_is_there_and_it_ends_with_its_last_holder(hold: Hold) -> None:
    plane = hold(linger_s=60.0)
    pids = {plane.pid, *children(plane.pid).values()}
    plane.host.close()
    assert all(ended(pid) for pid in pids)


def test_with_agents_it_lingers_for_its_time_and_no_longer(hold: Hold, agent: MakeAgent) -> None:
    plane = hold(linger_s=1.0)
    agent(plane, "a").run()
    pids = {plane.pid, *children(plane.pid).values()}
    plane.host.close(wait=False)
    assert not ended(plane.pid)
    wait_for(lambda: all(ended(pid) for pid in pids), "end of the plane")


def test_a_relaunch_takes_it_up_again_with_all_that_it_knows(hold: Hold, agent: MakeAgent) -> None:
    first = hold(linger_s=20.0)
    agent(first, "a").run()
    first.host.close(wait=False)
    second = hold()
    assert "took up the control plane that was running here" in second.said
    assert (second.host.port, second.host.run_dir) == (first.host.port, first.host.run_dir)
    assert not ended(first.pid)
    assert second.ask()["phase"] == "RunCommand"
    # It is held again: the time that it would have lingered is over only when nobody holds it any more.
    assert [line for line in second.journal() if isinstance(line.event, Adopt)] == []


def test_one_that_has_ended_is_continued_from_its_directory(hold: Hold, agent: MakeAgent) -> None:
    first = hold(linger_s=0.0)
    agent(first, "a").run()
    first.host.close(wait=False)
    wait_for(lambda: ended(first.pid), "end of the plane")
    second = hold()
    assert second.host.resumed
    assert second.host.run_dir == first.host.run_dir
    assert second.ask()["incarnation"] == 1
    assert journal.replay(second.journal()).ok


def test_a_directory_that_takes_no_file_is_a_failure_of_the_plane_and_not_of_the_launch(
    tmp_path: Path,
) -> None:
    settings = config(tmp_path)
    settings.path.mkdir(parents=True)
    (settings.path / "plane.json").mkdir()
    with pytest.raises(PlaneFailed, match="cannot start the control plane"):
        Held(settings)


def test_launchers_that_start_together_share_one_plane(tmp_path: Path) -> None:
    held: list[Held] = []
    threads = [threading.Thread(target=lambda: held.append(Held(config(tmp_path)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        assert len({plane.host.port for plane in held}) == 1
        assert sum(plane.host._process is not None for plane in held) == 1
    finally:
        for plane in held:
            plane.host.close(wait=False)
        for plane in held:
            plane.close()


def test_killed_it_is_started_again_by_one_of_its_holders_and_agents_come_back(
    hold: Hold, agent: MakeAgent
) -> None:
    first, second = hold(restarts_max=1), hold(restarts_max=1)
    worker = agent(first, "a")
    worker.run()
    parts = {first.pid, *children(first.pid).values()}
    os.kill(first.pid, signal.SIGKILL)
    wait_for(
        lambda: "took up the control plane that was running here" in (first.said + second.said[1:]), "plane"
    )
    assert all(ended(pid) for pid in parts)
    wait_for(lambda: second.ask()["workers"][0]["name"] == "a" and worker.link.connected, "agent")
    assert second.host.port == first.host.port


def test_a_part_that_dies_too_often_is_not_started_for_ever(hold: Hold) -> None:
    plane = hold()
    killed: set[int] = set()

    def kill_what_lives() -> bool:
        part = 0 if ended(plane.pid) else children(plane.pid).get("master", 0)
        if part and part not in killed:
            killed.add(part)
            os.kill(part, signal.SIGKILL)
        return ended(plane.pid)

    wait_for(kill_what_lives, "end of the plane")
    assert len(killed) <= plane.config.restarts_max + 1
    log = (plane.config.path / "plane.log").read_text()
    assert "gives up" in log
    assert "the master died 6 times in 60 s" in log


def test_a_port_that_is_taken_is_the_users_to_mend(tmp_path: Path, hold: Hold) -> None:
    import msgspec

    taken = hold("one").host.port
    other = msgspec.structs.replace(config(tmp_path, "two"), port=taken)
    with pytest.raises(PortTaken, match=f"127.0.0.1:{taken}"):
        Held(other)


def test_a_directory_that_can_not_be_used_is_said(tmp_path: Path) -> None:
    settings = config(tmp_path)
    settings.path.mkdir(parents=True)
    (settings.path / "keys.json").write_text("{}")
    (settings.path / "keys.json").chmod(0o600)
    with pytest.raises(PlaneFailed):
        Held(settings)


def test_all_of_it_is_private_and_the_secret_is_in_one_file_only(
    tmp_path: Path, hold: Hold, agent: MakeAgent
) -> None:
    secret = b"as secret as can be"
    os.environ["AEGIS_JOIN_SECRET"] = secret.decode()
    try:
        plane = hold(secret=secret.decode())
    finally:
        del os.environ["AEGIS_JOIN_SECRET"]
    agent(plane, "a", secret).run()
    with_secret = []
    for path in [tmp_path / "job", *(tmp_path / "job").rglob("*")]:
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode & 0o077 == 0, f"{path} has mode {mode:04o}"
        if path.is_file() and secret in path.read_bytes():
            with_secret.append(path.name)
    assert with_secret == ["plane.json"]
    for pid in (plane.pid, *children(plane.pid).values()):
        for file in ("cmdline", "environ"):
            assert secret not in Path(f"/proc/{pid}/{file}").read_bytes()
