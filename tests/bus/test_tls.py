"""Exactly one certificate is trusted, whatever name it bears."""

from pathlib import Path

import pytest

from aegis_elastic.bus import tls
from aegis_elastic.bus.errors import BusRefused, BusUnavailable
from tests.bus.plane import Plane, PlaneTest


def test_the_pinned_server_is_trusted_and_the_bus_works_over_tls(with_plane: PlaneTest) -> None:
    async def scenario(plane: Plane) -> None:
        assert plane.server.url.startswith("tls://")
        bus = await plane.connect(plane.master())
        assert await bus.call(lambda nc: nc.jetstream().account_info(), 5)

    with_plane(scenario, tls=True)


def test_another_certificate_is_refused_even_for_the_same_host(with_plane: PlaneTest, tmp_path: Path) -> None:
    async def scenario(plane: Plane) -> None:
        (tmp_path / "other").mkdir()
        other = tls.make_certificate(tmp_path / "other", ["127.0.0.1"])
        with pytest.raises(BusRefused, match="not the one that we were given"):
            await plane.connect(plane.master(), ca_pem=other.pem)

    with_plane(scenario, tls=True)


def test_a_plain_server_does_not_pass_for_the_pinned_one(with_plane: PlaneTest, tmp_path: Path) -> None:
    async def scenario(plane: Plane) -> None:
        (tmp_path / "other").mkdir()
        expected = tls.make_certificate(tmp_path / "other", ["127.0.0.1"])
        with pytest.raises((BusRefused, BusUnavailable)):
            await plane.connect(plane.master(), ca_pem=expected.pem, timeout_s=0.3)

    with_plane(scenario)


def test_files_are_private_and_come_back(tmp_path: Path) -> None:
    made = tls.make_certificate(tmp_path, ["127.0.0.1", "::1", "host.example"])
    assert tls.load_certificate(tmp_path) == made
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    assert len(bytes.fromhex(made.fingerprint)) == 32
    assert "PRIVATE" not in made.pem


def test_bad_input_raises() -> None:
    with pytest.raises(ValueError, match="at least one host"):
        tls.make_certificate(Path("unused"), [])
    with pytest.raises(ValueError, match="not a PEM"):
        tls.client_context("junk")
