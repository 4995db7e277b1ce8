"""One HTTP request over asyncio's own streams: it can be cancelled, and needs neither thread nor package."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

BODY_BYTES_MAX = 4 << 20
HEADERS_MAX = 200


class NoAnswer(OSError):
    """There was no answer that could be read; the text says why."""


class Answer(NamedTuple):
    """The server's answer."""

    status: int
    body: bytes


async def request(
    method: str,
    where: tuple[str, int],
    path: str,
    *,
    headers: Mapping[str, str],
    body: bytes = b"",
    ca_file: Path,
    timeout_s: float,
) -> Answer:
    """Send one request to (host, port) by TLS and read the answer. The server proves itself by a certificate
    of `ca_file`. NoAnswer, also when it takes longer than `timeout_s` in all.
    """
    try:
        context = ssl.create_default_context(cafile=str(ca_file))
        return await asyncio.wait_for(_exchange(method, where, path, headers, body, context), timeout_s)
    except asyncio.TimeoutError:
        raise NoAnswer(f"no answer from {where[0]}:{where[1]} in {timeout_s:g} s") from None
    except (OSError, ValueError, asyncio.IncompleteReadError) as error:
        raise NoAnswer(f"no answer from {where[0]}:{where[1]}: {error}") from error


async def _exchange(
    method: str,
    where: tuple[str, int],
    path: str,
    headers: Mapping[str, str],
    body: bytes,
    context: ssl.SSLContext,
) -> Answer:
    host, port = where
    reader, writer = await asyncio.open_connection(host, port, ssl=context)
    try:
        named = f"[{host}]" if ":" in host else host
        fields = {
            "Host": f"{named}:{port}",
            "Connection": "close",
            "Content-Length": str(len(body)),
            **headers,
        }
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
        if any("\n" in line or "\r" in line for line in lines):
            raise ValueError("a header or path of ours has a line break in it")
        writer.write("\r\n".join(lines).encode() + body)
        await writer.drain()
        return await _read(reader)
    finally:
        writer.transport.abort()


async def _read(reader: asyncio.StreamReader) -> Answer:
    version, _, rest = (await reader.readline()).decode("latin-1").partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
        raise ValueError("that is no HTTP")
    fields: dict[str, str] = {}
    for _ in range(HEADERS_MAX):
        line = (await reader.readline()).decode("latin-1").strip()
        if not line:
            break
        name, _, value = line.partition(":")
        fields[name.strip().lower()] = value.strip().lower()
    else:
        raise ValueError("it has too many headers")
    return Answer(int(rest[:3]), await _body(reader, fields))


async def _body(reader: asyncio.StreamReader, fields: Mapping[str, str]) -> bytes:
    if fields.get("transfer-encoding") == "chunked":
        return await _chunks(reader)
    if "content-length" in fields:
        return await reader.readexactly(_size(int(fields["content-length"])))
    body = bytearray()
    while chunk := await reader.read(65536):
        body += chunk
        _size(len(body))
    return bytes(body)


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while True:
        size = int((await reader.readline()).partition(b";")[0], 16)
        if size == 0:
            return bytes(body)
        _size(len(body) + size)
        body += await reader.readexactly(size)
        await reader.readline()


def _size(size: int) -> int:
    if not 0 <= size <= BODY_BYTES_MAX:
        raise ValueError(f"its body has {size} bytes; want {BODY_BYTES_MAX} at most")
    return size
