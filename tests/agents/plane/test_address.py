"""Where the plane is: a name is looked up anew, and only the plane that is known already is the plane."""

from __future__ import annotations

import socket
from pathlib import Path

import grpc
import pytest

from aegis_elastic.agents.plane.address import PlaneAddress
from aegis_elastic.bus.contact.first_contact import ContactError, Hello, Welcome
from aegis_elastic.bus.tls import make_certificate
from tests.bus.contact.test_first_contact import HELLO, WELCOME, serving


class Names:
    """A resolver whose answers the test chooses."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses

    def __call__(self, host: str) -> tuple[str, ...]:
        if not self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self.addresses


def _hello() -> Hello:
    return HELLO


def test_a_name_that_leads_elsewhere_has_moved_once() -> None:
    names = Names("10.0.0.1")
    plane = PlaneAddress(("plane", 29500), _hello, None, names)
    assert not plane.moved() and plane.host == "10.0.0.1", "the first look is no move"
    names.addresses = ("10.0.0.2",)
    assert plane.moved() and plane.host == "10.0.0.2"
    assert not plane.moved()


def test_a_host_with_several_addresses_has_not_moved_when_they_come_in_another_order() -> None:
    names = Names("10.0.0.1", "10.0.0.2")
    plane = PlaneAddress(("plane", 29500), _hello, None, names)
    plane.moved()
    names.addresses = ("10.0.0.2", "10.0.0.1")
    assert not plane.moved() and plane.host == "10.0.0.1"


def test_a_name_that_leads_nowhere_for_a_while_stays_where_it_led() -> None:
    names = Names("10.0.0.1")
    plane = PlaneAddress(("plane", 29500), _hello, None, names)
    plane.moved()
    names.addresses = ()
    assert not plane.moved() and plane.host == "10.0.0.1"


def test_another_plane_at_the_new_address_is_not_even_greeted(tmp_path: Path) -> None:
    greeted: list[str] = []

    def answer(hello: Hello, _: grpc.ServicerContext) -> Welcome:
        greeted.append(hello.worker)
        return WELCOME

    ours, other = tmp_path / "ours", tmp_path / "other"
    for folder in (ours, other):
        folder.mkdir()
    with serving(make_certificate(ours, ["aegis"]), answer) as port:
        plane = PlaneAddress(("127.0.0.1", port), _hello, None)
        place = plane.make_contact(5.0)
        assert place.welcome == WELCOME
        plane.certificate = place.certificate_pem
    with serving(make_certificate(other, ["aegis"]), answer) as port:
        plane.port = port
        with pytest.raises(ContactError, match="another one answers there") as raised:
            plane.make_contact(5.0)
    assert raised.value.retry, "the right one may still come"
    assert greeted == ["a"]


def test_another_program_at_a_known_planes_place_ends_nothing(tmp_path: Path) -> None:
    with serving(make_certificate(tmp_path, ["aegis"]), lambda *_: WELCOME) as port:
        plane = PlaneAddress(("127.0.0.1", port), _hello, None)
        plane.certificate = plane.make_contact(5.0).certificate_pem
    with socket.create_server(("127.0.0.1", 0)) as mute:
        plane.port = mute.getsockname()[1]
        with pytest.raises(ContactError) as raised:
            plane.make_contact(0.3)
    assert raised.value.retry
