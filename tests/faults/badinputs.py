"""Bad requests, made from a seed: mutated pictures, messages, sampling parameters and prompts; and named faults.

The tests of this folder and ``loadtest/fuzz.py`` share it. Any one input is made again from its seed and index.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from faults import mutations, pictures

QUESTION = b"Is there an exposed wire?"
SHORT = b'{"max_tokens": 4}'
MARKERS = ("<image>", "<img>", "</img>", "<IMG_CONTEXT>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "<box>")
SAMPLING_KEYS = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "seed", "stop", "ignore_eos", "logprobs",
    "skip_special_tokens", "include_stop_str_in_output", "tile_policy", "timeout_us", "beams",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "no_repeat_ngram_size", "priority",
)  # fmt: skip
# Long answers would only test patience.
MAX_TOKENS = 4


@dataclass(frozen=True)
class Inputs:
    """One request: the elements of each BYTES input that it sends. ``name`` says how it was made."""

    name: str
    tensors: dict[str, tuple[bytes, ...]]

    def to_json(self) -> str:
        """For keeping an offender in a file."""
        encoded = {name: [base64.b64encode(item).decode() for item in items] for name, items in self.tensors.items()}
        return json.dumps({"name": self.name, "base64": encoded})

    @staticmethod
    def from_json(text: str) -> Inputs:
        kept = json.loads(text)
        tensors = {name: tuple(base64.b64decode(i) for i in items) for name, items in kept["base64"].items()}
        return Inputs(kept["name"], tensors)


def mutants(seed: int, count: int, start: int = 0) -> Iterator[Inputs]:
    """``count`` inputs; 6 of 10 are pictures."""
    return (mutant(seed, index) for index in range(start, start + count))


def mutant(seed: int, index: int) -> Inputs:
    """Input number ``index``; the same for the same numbers."""
    dice = np.random.default_rng([seed, index])
    kind, make = KINDS[index % len(KINDS)]
    return Inputs(f"{kind} {seed}.{index}", make(dice))


def _picture(dice: np.random.Generator) -> dict[str, tuple[bytes, ...]]:
    seeds = _seeds()
    damaged = mutations.picture(dice, _choice(dice, seeds), _choice(dice, seeds))
    form = dice.integers(10)
    if form == 0:
        damaged = mutations.some_bytes(dice, base64.b64encode(damaged), b"")
    if form == 1:
        url = "data:image/jpeg;base64," + base64.b64encode(damaged).decode()
        return {"messages": (_json(_messages(url)),), "sampling_parameters": (SHORT,)}
    images = (damaged, seeds[0]) if form == 2 else (damaged,)
    return {"text_input": (QUESTION,), "image": images, "sampling_parameters": (SHORT,)}


def _chat(dice: np.random.Generator) -> dict[str, tuple[bytes, ...]]:
    url = "data:image/png;base64," + base64.b64encode(_seeds()[5]).decode()
    text = mutations.json_text(dice, _messages(url))
    images = (_seeds()[0],) * int(dice.integers(3))
    return {"messages": (text,), "image": images, "sampling_parameters": (SHORT,)}


def _sampling(dice: np.random.Generator) -> dict[str, tuple[bytes, ...]]:
    chosen = dice.choice(SAMPLING_KEYS, size=int(dice.integers(1, 4)), replace=False)
    good: dict[str, Any] = {"max_tokens": MAX_TOKENS, "tile_policy": {"name": "reference", "max_tiles": 2}}
    good.update((str(key), mutations.odd_value(dice)) for key in chosen)
    if good["max_tokens"] is None:  # as long as the context, where another key takes the stop tokens out
        good["max_tokens"] = MAX_TOKENS
    text = mutations.json_text(dice, good) if dice.integers(2) else _json(good)
    return {"text_input": (QUESTION,), "sampling_parameters": (text,)}


def _prompt(dice: np.random.Generator) -> dict[str, tuple[bytes, ...]]:
    text = mutations.prompt(dice, MARKERS)
    tensors = {"text_input": (text,), "sampling_parameters": (SHORT,)}
    if dice.integers(2):
        tensors["image"] = (_seeds()[0],) * int(dice.integers(1, 3))
    return tensors


KINDS: tuple[tuple[str, Callable[[np.random.Generator], dict[str, tuple[bytes, ...]]]], ...] = (
    *[("picture", _picture)] * 6,
    *[("messages", _chat)] * 2,
    ("sampling", _sampling),
    ("prompt", _prompt),
)


@cache
def _seeds() -> tuple[bytes, ...]:
    return tuple(pictures.seeds().values())


def _messages(url: str) -> list[Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    return [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "wire"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "And now?"}]},
    ]


def _choice(dice: np.random.Generator, items: tuple[bytes, ...]) -> bytes:
    return items[dice.integers(len(items))]


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


@cache
def named_faults() -> dict[str, tuple[dict[str, tuple[bytes, ...]], str]]:
    """The faults of issue 3, and words that the answer to each must have."""
    jpeg, png, webp = (pictures.seeds()[name] for name in ("jpeg", "png", "webp"))

    def image(*data: bytes, text: bytes = QUESTION, **sampling: Any) -> dict[str, tuple[bytes, ...]]:
        tensors = {"text_input": (text,), "image": data}
        return {**tensors, "sampling_parameters": (_json(sampling),)} if sampling else tensors

    def url(text: str) -> dict[str, tuple[bytes, ...]]:
        part = {"type": "image_url", "image_url": {"url": text}}
        return {"messages": (_json([{"role": "user", "content": [part]}]),)}

    def sampling(text: bytes) -> dict[str, tuple[bytes, ...]]:
        return {"text_input": (QUESTION,), "sampling_parameters": (text,)}

    def messages(text: bytes) -> dict[str, tuple[bytes, ...]]:
        return {"messages": (text,)}

    deep = b"[" * 100_000
    private_use = "".join(map(chr, range(0xE000, 0xF900))).encode()
    return {
        "not an image": (image(b"hello, I am not a picture"), "image 0 is not a JPEG, PNG or WebP"),
        "another format": (image(jpeg, b"GIF89a" + bytes(40)), "image 1 has the format GIF"),
        "truncated JPEG": (image(jpeg[:-30]), "truncated JPEG"),
        "PNG without IHDR": (image(png.replace(b"IHDR", b"IHDr")), "checksum in b'IHDr'"),
        "damaged PNG pixels": (image(png[:-24] + b"damage" + png[-18:]), "damaged or truncated PNG"),
        "damaged PNG chunk": (image(pictures.many_chunks_png(1).replace(b"aaAa", b"aaBa")), "checksum in b'aaBa'"),
        "JPEG scan given up": (image(jpeg[:-200] + b"\xff\x12" + jpeg[-200:]), "damaged or truncated JPEG"),
        "16-bit grey of 12 bits": (image(pictures.grey_of_12_bits()), "16-bit grey whose largest sample is 4095"),
        "truncated PNG": (image(png[: len(png) // 2]), "truncated PNG"),
        "truncated WebP": (image(webp[: len(webp) // 2]), "truncated WebP"),
        "zero bytes": (image(b""), "0 bytes"),
        "0xN PNG": (image(pictures.png_of_size(0, 10)), "PNG whose header cannot be read"),
        "Nx0 JPEG": (image(pictures.with_jpeg_size(jpeg, 10, 0)), "JPEG whose header cannot be read"),
        "PNG bomb": (image(pictures.png_of_size(60_000, 60_000)), "megapixels"),
        "JPEG bomb": (image(pictures.with_jpeg_size(jpeg, 65_000, 65_000)), "megapixels"),
        "WebP bomb": (image(pictures.largest_webp()), "pixels) exceeds limit"),
        "PNG of very many chunks": (image(pictures.many_chunks_png(2_000_000)), "chunks"),
        "JPEG of very many segments": (image(b"\xff\xd8" + b"\xff" * 20_000_000), "segments"),
        "damaged base64": (image(b"/9j/4AAQA"), "base64"),
        "http URL": (url("http://127.0.0.1/x.jpg"), "http: URL"),
        "https URL": (url("https://example.com/x.jpg"), "https: URL"),
        "file URL": (url("file:///etc/passwd"), "file: URL"),
        "data URL without base64": (url("data:image/jpeg,abc"), ";base64,"),
        "more images than markers": (image(jpeg, png, text=b"<image> what?"), "1 place for images"),
        "fewer images than markers": (image(jpeg, text=b"<image> or <image>?"), "2 places for images"),
        "too many images": (image(*[jpeg] * 9), "the limit is 8"),
        "nothing at all": ({}, "no text, no messages and no image"),
        "text and messages": ({"text_input": (b"a",), "messages": (b'[{"role":"user","content":"b"}]',)}, "both"),
        "invalid UTF-8 text": ({"text_input": (b"caf\xe9",)}, "'text_input' is not valid UTF-8 (byte 3)"),
        "invalid UTF-8 messages": (messages(b'["\xff"]'), "'messages' is not valid UTF-8"),
        "invalid UTF-8 sampling": (sampling(b"\xc0"), "'sampling_parameters' is not valid UTF-8"),
        "prompt longer than the context": ({"text_input": (b"room " * 9000,)}, "context"),
        "prompt far longer than the context": ({"text_input": (b"room " * 2_000_000,)}, "context"),
        "every private-use character": ({"text_input": (private_use,)}, "context"),
        "messages are no JSON": (messages(b"hello"), "'messages' is not valid JSON"),
        "messages are no array": (messages(b'{"role": "user"}'), "'messages' must be an array"),
        "messages nested deep": (messages(deep), "'messages' is nested"),
        "messages nested deep and closed": (messages(b"[" * 900 + b"]" * 900), "'messages' is nested"),
        "messages of very many items": (messages(b"[" + b"[]," * 5_000_000 + b"[]]"), "'messages'"),
        "messages with a lone surrogate": (messages(b'[{"role":"user","content":"\\ud800"}]'), "lone surrogate"),
        "unknown role": (messages(b'[{"role":"god","content":"x"}]'), "'god'"),
        "sampling is no JSON": (sampling(b"{"), "'sampling_parameters' is not valid JSON"),
        "sampling is no object": (sampling(b"[1]"), "'sampling_parameters' must be an object"),
        "sampling nested deep": (sampling(deep), "'sampling_parameters' is nested"),
        "tile policy nested deep": (sampling(_json({"tile_policy": "{" + "[" * 100_000})), "tile policy"),
        "unknown sampling key": (sampling(b'{"beams": 4}'), "'beams'"),
        "a long unknown sampling key": (sampling(_json({"k" * 100_000: 1})), "unknown key"),
        "very many unknown sampling keys": (sampling(_json({f"k{i}": i for i in range(10_000)})), "unknown key"),
        "negative temperature": (sampling(b'{"temperature": -1}'), "temperature"),
        "temperature is not a number": (sampling(b'{"temperature": NaN}'), "temperature"),
        "max_tokens 0": (sampling(b'{"max_tokens": 0}'), "max_tokens"),
        "max_tokens beyond floating point": (sampling(b'{"max_tokens": 1' + b"0" * 400 + b"}"), "max_tokens"),
        "a long text for a flag": (sampling(_json({"ignore_eos": "x" * 100_000})), "ignore_eos"),
        "top_p 2": (sampling(b'{"top_p": 2}'), "top_p"),
        "logprobs 21": (sampling(b'{"logprobs": 21}'), "logprobs"),
        "timeout of a million years": (sampling(b'{"timeout_us": 31536000000000000000000}'), "timeout_us"),
        "timeout as a long text": (sampling(_json({"timeout_us": "9" * 100_000})), "timeout_us"),
        "unknown tile policy": (sampling(b'{"tile_policy": "mosaic"}'), "mosaic"),
        "a long tile policy key": (sampling(_json({"tile_policy": {"k" * 100_000: 1}})), "unknown key"),
        "a long thumbnail rule": (sampling(_json({"tile_policy": {"thumbnail": "x" * 100_000}})), "thumbnail"),
        "a cascade of nothing": (sampling(b'{"tile_policy": {"cascade": []}}'), "object with a margin"),
        "a long cascade key": (sampling(_json({"tile_policy": {"cascade": {"margin": 1, "k" * 100_000: 1}}})), "key"),
        "a margin of many digits": (
            sampling(b'{"max_tokens": 1, "tile_policy": {"cascade": {"margin": -1' + b"0" * 4000 + b"}}}"), "margin"
        ),
        "max_tiles above the limit": (sampling(b'{"tile_policy": {"max_tiles": 105}}'), "104"),
        "min_tiles of many digits": (sampling(b'{"tile_policy": {"min_tiles": 1' + b"0" * 4000 + b"}}"), "min_tiles"),
    }  # fmt: skip


@cache
def odd_but_good() -> dict[str, dict[str, tuple[bytes, ...]]]:
    """Unusual requests that must be answered."""
    encoded = pictures.seeds()
    asked = {"text_input": (QUESTION,), "sampling_parameters": (SHORT,)}
    found = {name: {**asked, "image": (data,)} for name, data in encoded.items()}
    found["base64 text"] = {**asked, "image": (base64.b64encode(encoded["png"]),)}
    found["WebP of very many chunks"] = {**asked, "image": (pictures.many_chunks_webp(2_000_000),)}
    found["no image"] = asked
    found["an empty image tensor"] = {**asked, "image": ()}
    found["special tokens as text"] = {**asked, "text_input": (" ".join(MARKERS[1:]).encode(),)}
    found["control characters"] = {**asked, "text_input": (bytes(range(1, 32)) + b"\0?",)}
    found["numbers as text"] = {**asked, "sampling_parameters": (b'{"max_tokens": "4", "temperature": "0.5"}',)}
    return found
