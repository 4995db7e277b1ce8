"""The policy: from a file, from flags, from both; and whom pages go to, without a secret on the screen."""

from __future__ import annotations

from pathlib import Path

import pytest

from aegis_elastic.control.host.errors import UsageError
from aegis_elastic.core.policy import settings
from aegis_elastic.core.policy.settings import Guard, Policy
from aegis_elastic.launch.flags.options import parse


@pytest.fixture(autouse=True)
def _in_a_clean_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AEGIS_NOTIFY", raising=False)
    (tmp_path / "train.py").touch()


def made(*flags: str) -> Policy:
    return parse([*flags, "train.py"]).aegis.policy


def test_the_documents_figures_are_the_defaults() -> None:
    assert made() == Policy()
    guard = Guard()
    assert [guard.observations, guard.persistence_s, guard.actions_per_day, guard.cooldown_s] == [
        2, 180, 3, 600,
    ]  # fmt: skip
    assert [guard.heartbeat_stale_s, guard.error_state_s, guard.escalation_s] == [120, 1800, 600]


def test_every_setting_has_a_flag_and_a_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert settings.ABOUT.keys() == settings.SETTINGS.keys()
    with pytest.raises(SystemExit):
        parse(["-h"])
    shown = capsys.readouterr().out
    for setting in settings.SETTINGS:
        assert f"--aegis-{settings.flag_of(setting)}" in shown
        changed = made(f"--aegis-{settings.flag_of(setting)}", "1").guard
        assert getattr(changed, setting) == 1


def test_flags_go_before_variables_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "aegis.toml").write_text(
        'mode = "observe"\n[guard]\npersistence_s = 1\ncooldown_s = 2\nlook_s = 3'
    )
    assert made() == Policy("observe", Guard(persistence_s=1, cooldown_s=2, look_s=3))
    monkeypatch.setenv("AEGIS_GUARD_COOLDOWN_S", "20")
    monkeypatch.setenv("AEGIS_GUARD_LOOK_S", "30")
    found = made("--aegis-guard-look-s", "300", "--aegis-policy-mode", "act")
    assert found == Policy("act", Guard(persistence_s=1, cooldown_s=20, look_s=300))
    (tmp_path / "other.toml").write_text("[guard]\nactions_per_day = 1")
    assert made("--aegis-policy", "other.toml").guard.actions_per_day == 1


@pytest.mark.parametrize(
    ("flags", "file", "why"),
    [
        (["--aegis-guard-persistence-s", "-1"], "", "Expected `float` >= 0.0 for `persistence_s`"),
        (["--aegis-guard-actions-per-day", "x"], "", "'x' is not a whole number"),
        (["--aegis-guard-brake-share", "1.5"], "", "<= 1.0 for `brake_share`"),
        (["--aegis-policy", "none.toml"], "", "cannot read the policy"),
        (["--aegis-policy", "."], "", "cannot read the policy"),
        (
            [],
            "[guard]\ncooldown = 3",
            "unknown field `cooldown` .* there are mode, and in .guard.: observations",
        ),
        ([], 'mode = "maybe"', "Invalid enum value 'maybe' for `mode`"),
        ([], "[guard", "cannot use the policy aegis.toml"),
        ([], "[guard]\ncooldown_s = inf", "for `cooldown_s`"),
        (["--aegis-policy-mode", "maybe"], "", "maybe"),
        (["--aegis-notify", "slack://a/b/c"], "", "everybody sees a command line"),
        (["--aegis-notify", "https://me:secret@host/"], "", "give a password by @FILE"),
        (["--aegis-notify", "@none"], "", "cannot read the file"),
        (["--aegis-notify", "host/path"], "", "want https://"),
        (["--aegis-notify", "https:///path"], "", "names no host"),
        (["--aegis-notify", "https://host:port/"], "", "cannot use an address"),
    ],
)
def test_a_bad_value_is_reported_before_anything_starts(
    tmp_path: Path, flags: list[str], file: str, why: str
) -> None:
    if file:
        (tmp_path / "aegis.toml").write_text(file)
    with pytest.raises(UsageError, match=why) as error:
        made(*flags)
    assert error.value.exit_code == 2
    assert "secret" not in str(error.value)


def test_addresses_come_from_a_file_that_is_private_or_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def targets(*flags: str) -> tuple[str, ...]:
        return parse([*flags, "train.py"]).aegis.notify

    assert targets() == ()
    assert targets("--aegis-notify", "https://host/hook") == ("https://host/hook",)
    file = tmp_path / "notify"
    file.write_text("# ours\nhttps://me:secret@host/hook\n\njson://localhost/x\n")
    file.chmod(0o600)
    both = ("https://me:secret@host/hook", "json://localhost/x")
    assert targets("--aegis-notify", "@notify") == both
    monkeypatch.setenv("AEGIS_NOTIFY", "@notify")
    assert targets() == both
    monkeypatch.setenv("AEGIS_NOTIFY", "json://user:secret@localhost/x")
    assert targets() == ("json://user:secret@localhost/x",)
    assert targets("--aegis-notify", "https://host/hook") == ("https://host/hook",)
    file.write_text("nonsense://secret")
    with pytest.raises(UsageError, match="apprise takes no such nonsense://") as error:
        targets("--aegis-notify", "@notify")
    assert "secret" not in str(error.value)
    file.chmod(0o644)
    with pytest.raises(UsageError, match="everybody can read it"):
        targets("--aegis-notify", "@notify")
