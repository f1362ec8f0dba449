"""Attacks on a gateway by a stranger at 127.0.0.2, each bounded in time and number, over loopback alone.

    python tests/gateway/attacks.py NAME PORT

says by which HTTP statuses its requests ended (0: the connection ended without one), as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from tessera_gateway.connections import raise_file_limit

SECONDS = 11.0  # that an attack goes on for
MIB = 1 << 20
STRANGER = "127.0.0.2"
GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HELLO = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def line(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(STRANGER, 0))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def status(reader: asyncio.StreamReader) -> int:
    words = (await reader.readline()).split()
    return int(words[1]) if len(words) > 1 else 0


async def poured(port: int, head: bytes, part: bytes, most: int) -> int:
    """Sends the part again and again, ``most`` bytes at most; the answer's status."""
    async with line(port) as (reader, writer):
        with suppress(OSError):
            writer.write(head)
            for _ in range(most // len(part)):
                writer.write(part)
                await writer.drain()
        return await status(reader)


async def asked(port: int, body: bytes) -> int:
    async with line(port) as (reader, writer):
        writer.write(POST + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
        return await status(reader)


async def held(port: int) -> int:
    """A body of 60 MiB, all of it but the last byte."""
    async with line(port) as (reader, writer):
        answer = asyncio.ensure_future(status(reader))
        with suppress(OSError):
            writer.write(POST + b"Content-Length: %d\r\n\r\n" % (60 * MIB))
            for number in range(60):
                writer.write(b" " * (MIB - (number == 59)))
                await writer.drain()
        await asyncio.wait({answer}, timeout=SECONDS)
        if not answer.done():
            answer.cancel()
            return 0
        return answer.result()


def question(**fields: object) -> bytes:
    return json.dumps({"model": "vlm", "messages": HELLO, "max_tokens": 4, **fields}).encode()


async def again(attack: Callable[[], Awaitable[int]], found: Counter[int], lines: int) -> None:
    """The attack on that many connections at a time, each again when it ends."""
    end = asyncio.get_running_loop().time() + SECONDS

    async def one() -> None:
        while asyncio.get_running_loop().time() < end:
            try:
                found[await attack()] += 1
            except OSError:
                found[0] += 1

    await asyncio.gather(*(one() for _ in range(lines)))


async def once(attack: Callable[[], Awaitable[int]], found: Counter[int], lines: int) -> None:
    """The attack on that many connections at once."""
    for ended in await asyncio.gather(*(attack() for _ in range(lines)), return_exceptions=True):
        found[ended if isinstance(ended, int) else 0] += 1


async def run(name: str, port: int) -> Counter[int]:
    found = Counter[int]()
    chunked = POST + b"Transfer-Encoding: chunked\r\n\r\n"
    values = question(messages=HELLO * (8 * MIB // 40))
    grammars = iter(question(tessera={"regex": f"a{{{19900 + number}}}"}) for number in range(1000))
    attacks: dict[str, Awaitable[None]] = {
        "headers": again(lambda: poured(port, GET + b"X: ", b"a" * (1 << 16), 64 * MIB), found, 4),
        "chunks": again(lambda: poured(port, chunked, b"1\r\na\r\n" * 10_000, 64 * MIB), found, 4),
        "held bodies": once(lambda: held(port), found, 16),
        "values": again(lambda: asked(port, values), found, 2),
        "2,000 at once": once(lambda: asked(port, question()), found, 2000),
        "grammars": once(lambda: asked(port, next(grammars)), found, 60),
    }
    for each, attack in attacks.items():
        if each == name:
            await asyncio.wait_for(attack, 120)
        else:
            attack.close()  # type: ignore[attr-defined]
    return found


if __name__ == "__main__":
    raise_file_limit()
    print(json.dumps(asyncio.run(run(sys.argv[1], int(sys.argv[2])))))
