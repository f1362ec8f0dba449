"""Attacks on a gateway by a stranger at 127.0.0.2, each bounded in time and number, over loopback alone.

    python tests/gateway/attacks.py NAME PORT

says by which HTTP statuses its requests ended (0: the connection ended without one), as JSON.
"""

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from tessera_gateway.connections import raise_file_limit

SECONDS = 11.0  # that an attack goes on for
MIB = 1 << 20
STRANGER = "127.0.0.2"
GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HELLO = [{"role": "user", "content": "hello"}]


def question(**fields: object) -> bytes:
    return json.dumps({"model": "vlm", "messages": HELLO, "max_tokens": 4, **fields}).encode()


def post(**fields: object) -> bytes:
    body = question(**fields)
    return POST + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body


class Attack(NamedTuple):
    """Each of ``lines`` connections sends ``head``, then ``part`` ``times`` times; ``again`` when it ends."""

    lines: int
    again: bool
    head: Callable[[int], bytes]
    part: bytes = b""
    times: int = 0

    async def once(self, port: int, number: int) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(STRANGER, 0))
        answer = asyncio.ensure_future(reader.readline())
        try:
            with suppress(OSError):
                writer.write(self.head(number))
                for _ in range(self.times):
                    writer.write(self.part)
                    await writer.drain()
            words = (await asyncio.wait_for(answer, SECONDS if self.part else 120)).split()
            return int(words[1]) if words else 0
        finally:
            writer.transport.abort()

    async def run(self, port: int) -> Counter[int]:
        found, end = Counter[int](), time.monotonic() + SECONDS

        async def one(number: int) -> None:
            going_on = True
            while going_on:
                status = 0
                with suppress(OSError, asyncio.TimeoutError):
                    status = await self.once(port, number)
                found[status] += 1
                going_on = self.again and time.monotonic() < end

        await asyncio.gather(*map(one, range(self.lines)))
        return found


CHUNKS = POST + b"Transfer-Encoding: chunked\r\n\r\n"
HELD = POST + b"Content-Length: %d\r\n\r\n" % (60 * MIB)  # all of it comes but the last part
VALUES = post(messages=HELLO * (8 * MIB // 40))
ATTACKS = {
    "headers": Attack(4, True, lambda _: GET + b"X: ", b"a" * (1 << 16), 1024),
    "chunks": Attack(4, True, lambda _: CHUNKS, b"1\r\na\r\n" * 10_000, 1100),
    "held bodies": Attack(16, False, lambda _: HELD, b" " * MIB, 59),
    "values": Attack(2, True, lambda _: VALUES),
    "2,000 at once": Attack(2000, False, lambda _: post()),
    "grammars": Attack(60, False, lambda number: post(tessera={"regex": f"a{{{19900 + number}}}"})),
}

if __name__ == "__main__":
    raise_file_limit()
    print(json.dumps(asyncio.run(ATTACKS[sys.argv[1]].run(int(sys.argv[2])))))
