"""Pages over real HTTP: what arrives, what is tried again, and what no log shows."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Awaitable, Callable

import pytest

from aegis_elastic.observe import paging
from aegis_elastic.observe.paging import Pager
from tests.observe.receiver import Receiver, receiver


def send(targets: list[str], doing: Callable[[Pager], Awaitable[None]]) -> None:
    async def whole() -> None:
        pager = Pager(targets, "default/job/1", mention="@oncall")
        try:
            await doing(pager)
        finally:
            await pager.close()

    asyncio.run(asyncio.wait_for(whole(), 30))


def test_a_webhook_gets_a_page_as_json_and_only_urgent_ones_mention_somebody() -> None:
    async def doing(pager: Pager) -> None:
        await pager.send("n1.done.1", "restarted", urgent=False)
        await pager.send("n1.no_help.1", "the restart did not help", urgent=True)

    with receiver() as received:
        send([received.url], doing)
    quiet, urgent = received.pages
    assert quiet == {
        "job": "default/job/1",
        "key": "n1.done.1",
        "urgent": False,
        "message": "restarted",
        "text": "[aegis] default/job/1: restarted",
    }
    assert urgent["text"] == "[aegis] default/job/1: @oncall the restart did not help"
    assert received.headers[0]["Content-Type"] == "application/json"


def test_a_name_and_password_in_the_address_become_a_header() -> None:
    async def doing(pager: Pager) -> None:
        await pager.send("k", "t", urgent=False)

    with receiver() as received:
        send([received.url.replace("://", "://me:s%40cret@")], doing)
    scheme, _, pair = received.headers[0]["Authorization"].partition(" ")
    assert (scheme, base64.b64decode(pair)) == ("Basic", b"me:s@cret")


def test_what_fails_is_tried_again_and_the_address_is_nobodys_business(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(paging, "RETRY_S", 0.05)

    async def doing(pager: Pager) -> None:
        await pager.send("k", "t", urgent=True)

    with receiver() as received, caplog.at_level(logging.INFO):
        received.codes = [500, 429]
        send([received.url.replace("/hook", "/hook?token=secret")], doing)
        assert len(received.pages) == 1
    assert "it answered 500" in caplog.text
    assert "secret" not in caplog.text
    assert "hook" not in caplog.text


def test_a_receiver_that_is_down_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(paging, "PATIENCE_S", 0.2)
    monkeypatch.setattr(paging, "GIVE_UP_S", 0.3)
    monkeypatch.setattr(paging, "RETRY_S", 0.1)

    async def doing(pager: Pager) -> None:
        began = asyncio.get_running_loop().time()
        for number in range(5):
            await pager.send(f"k{number}", "t", urgent=False)
        assert asyncio.get_running_loop().time() - began < 4
        pager.send_soon("soon", "t", True)
        await asyncio.sleep(0.6)

    with receiver() as received:
        gone = received.url
    send([gone], doing)
    assert "given up" in caplog.text


def test_pages_dont_pile_up_without_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(paging, "PENDING_MAX", 3)
    monkeypatch.setattr(paging, "RETRY_S", 60)

    async def doing(pager: Pager) -> None:
        for number in range(10):
            pager.send_soon(f"k{number}", "t", False)

    with receiver() as received:
        received.codes = [500] * 10
        send([received.url], doing)
    assert "page k9 is in the log only: 3 others wait" in caplog.text


def test_without_an_address_a_page_is_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def doing(pager: Pager) -> None:
        await pager.send("k", "somebody is needed", urgent=True)

    send([], doing)
    assert "page k: somebody is needed" in caplog.text


def test_apprise_delivers_to_what_it_knows() -> None:
    pytest.importorskip("apprise")

    async def doing(pager: Pager) -> None:
        await pager.send("k", "the restart did not help", urgent=True)

    with receiver() as received:
        send([received.url.replace("http://", "json://")], doing)
        [page] = received.pages
    assert page["title"] == "aegis default/job/1"
    assert page["message"] == "[aegis] default/job/1: @oncall the restart did not help"
    assert page["type"] == "failure"


def test_what_apprise_cant_deliver_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("apprise")
    monkeypatch.setattr(paging, "RETRY_S", 0.05)

    async def doing(pager: Pager) -> None:
        await pager.send("k", "t", urgent=False)

    def url(received: Receiver) -> str:
        return received.url.replace("http://", "json://")

    with receiver() as received:
        received.codes = [500]
        send([url(received)], doing)
        assert len(received.pages) == 1
