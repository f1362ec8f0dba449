"""Odd pictures among good ones, through the gateway of a running server (`make bench NAME=poison`).

Of 1,000 requests every 20th has a file from the tests of Pillow's source package, which is downloaded: broken files,
formats that are not served, sizes and colours that nobody sends. The good ones are questions about rooms of the
held-out set, all different, asked twice, alone and beside the odd ones, with caches off. Ends with 1 where a good
answer differs, an odd file gets anything but an answer or a refusal, or the server was restarted.
"""

import argparse
import subprocess
import sys
import tarfile
import tempfile
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import figures
import httpx
import openai
from serving import Setup, gateway, serve

sys.path.insert(0, str(figures.ROOT / "build" / "default_model"))

IN_FLIGHT = 16
LARGEST = 16 << 20  # bytes of an odd file
ODD_EVERY = 20
QUESTIONS = (
    "Describe this room.",
    "How many sockets are there?",
    "Is there an exposed wire?",
    "Is there a blocked exit?",
    "Is a burnt socket visible here?",
)
FAIR = ("400 invalid_request",)
"""What an odd file may get beside an answer."""


@dataclass(frozen=True)
class Result:
    differ: int
    odd: Counter[str]
    """What the odd files got, by status and code."""
    restarts: int
    kinds: int
    """How many different answers the good ones have."""

    @property
    def fine(self) -> bool:
        unfair = [what for what in self.odd if not what.startswith("200") and what not in FAIR]
        return not self.differ and not self.restarts and not unfair


def odd_files(count: int) -> list[bytes]:
    """This many of the pictures in Pillow's tests, spread over all of them by name."""
    with tempfile.TemporaryDirectory(prefix="tessera-poison-") as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        source = f"pillow=={version('pillow')}"
        subprocess.run([*command, "--no-binary", "pillow", "--dest", folder, source], check=True)
        (package,) = Path(folder).glob("pillow-*.tar.gz")
        with tarfile.open(package) as archive:
            members = [each for each in archive if each.isfile() and "/Tests/images/" in each.name]
            members = sorted((each for each in members if 0 < each.size <= LARGEST), key=lambda each: each.name)
            chosen = [members[place * len(members) // count] for place in range(count)]
            files = (archive.extractfile(each) for each in chosen)
            return [file.read() for file in files if file is not None]


Asked = tuple[bytes, str]
"""A picture, one tile of it, and a question about it."""


def ask_all(address: str, requests: Sequence[Asked]) -> list[tuple[str, str]]:
    """(status and code, text) for each, this many in flight."""
    client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", timeout=300, max_retries=0)

    def ask(request: Asked) -> tuple[str, str]:
        picture, question = request
        url = f"data:image/jpeg;base64,{b64encode(picture).decode()}"
        content: Any = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
        one_tile = {"tessera": {"tile_policy": {"max_tiles": 1}}}
        try:
            answer = client.chat.completions.create(
                model="vlm", messages=[{"role": "user", "content": content}], max_tokens=16, extra_body=one_tile
            )
        except openai.APIStatusError as refusal:
            return f"{refusal.status_code} {refusal.code}", str(refusal)
        return "200", str(answer.choices[0].message.content)

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        return list(pool.map(ask, requests))


def run(address: str, health: str, good: Sequence[Asked], odd: Sequence[bytes]) -> Result:
    """Asks the good ones alone, then all, the odd ones spread evenly among them."""
    expected = ask_all(address, good)
    if any(status != "200" for status, _ in expected):
        raise RuntimeError(f"a good request was refused: {Counter(expected).most_common(3)}")
    remaining, mixed, strange = list(reversed(good)), [], []
    for number in range(len(good) + len(odd)):
        strange.append(number % ODD_EVERY == ODD_EVERY - 1)
        mixed.append((odd[number // ODD_EVERY], QUESTIONS[0]) if strange[-1] else remaining.pop())
    answers = list(zip(strange, ask_all(address, mixed), strict=True))
    found = [answer for is_odd, answer in answers if not is_odd]
    outcomes = Counter(status for is_odd, (status, _) in answers if is_odd)
    restarts = httpx.get(health, timeout=30).json()["restarts"]
    differ = sum(a != b for a, b in zip(expected, found, strict=True))
    return Result(differ, outcomes, restarts, len(set(expected)))


@contextmanager
def served() -> Iterator[tuple[str, str]]:
    """(gateway, health page) of a server on the CPU that keeps nothing of a request."""
    settings = {"vision_encoder.cache_bytes": "0", "language_model.prefix_cache": "off"}
    with serve(Setup(settings=settings, restart=True)) as server, gateway(server.grpc) as (address, _):
        yield address, server.health


def good_requests(count: int) -> list[Asked]:
    """Each question about rooms, as JPEG."""
    import scene

    rooms = [scene.encode_jpeg(scene.sample(seed, "heldout")) for seed in range(-(-count // len(QUESTIONS)))]
    return [(room, question) for room in rooms for question in QUESTIONS][:count]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    requests = parser.parse_args().requests
    odd = odd_files(requests // ODD_EVERY)
    with served() as (address, health):
        result = run(address, health, good_requests(requests - len(odd)), odd)
    notes = {"requests": requests, "different_answers": result.kinds, "odd": dict(result.odd)}
    figures.emit("poison.good_that_differ", result.differ, "requests", **notes)
    figures.emit("poison.restarts", result.restarts, "restarts", **notes)
    return 0 if result.fine else 1
