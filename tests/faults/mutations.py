"""Random damage: to bytes, to the headers of pictures, to JSON, to prompts. All chance comes from a numpy Generator."""

import copy
import json
import struct
import zlib
from typing import Any

import numpy as np

SIZES = (0, 1, 2, 41, 448, 1500, 2500, 65_535, 2**24, 2**31 - 1)
PNG_MAGIC = 8
RIFF_HEADER = 12
# Where a part's header states its length and its kind: offset and struct format, offset and bytes.
LENGTHS = {"JPEG": (2, ">H"), "PNG": (0, ">I"), "WebP": (4, "<I")}
KINDS = {"JPEG": (1, 1), "PNG": (4, 4), "WebP": (0, 4)}
ALPHABETS = (
    range(0x20, 0x7F), range(0x20), range(0x80, 0x250), range(0x300, 0x370), range(0x590, 0x700),
    range(0x4E00, 0x9FFF), range(0xE000, 0xF8FF), range(0x1F300, 0x1FAFF), range(0x10FF00, 0x10FFFF),
    range(0x2028, 0x202F),
)  # fmt: skip


def some_bytes(dice: np.random.Generator, data: bytes, donor: bytes) -> bytes:
    """Flipped, set, inserted, removed, repeated, cut-off and spliced bytes; half of the places among the first 64."""
    for _ in range(dice.choice([1, 1, 2, 4, 16])):
        if not data:
            break
        at = int(dice.integers(min(len(data), 64) if dice.integers(2) else len(data)))
        span = int(dice.integers(1, 17))
        match dice.integers(8):
            case 0:
                data = data[:at] + bytes([data[at] ^ 1 << int(dice.integers(8))]) + data[at + 1 :]
            case 1:
                data = data[:at] + bytes([dice.choice([0, 1, 0x7F, 0x80, 0xFE, 0xFF])]) + data[at + 1 :]
            case 2:
                data = data[:at] + dice.bytes(span) + data[at:]
            case 3:
                data = data[:at] + data[at + span :]
            case 4:
                data = data[:at] + data[at : at + span] * int(dice.integers(2, 40)) + data[at + span :]
            case 5:
                data = data[:at]
            case 6:
                data = data[:at] + donor[int(dice.integers(len(donor) + 1)) :]
            case _:
                data = data[:at] + dice.bytes(span) + data[at + span :]
    return data


def picture(dice: np.random.Generator, data: bytes, donor: bytes) -> bytes:
    """One damaged picture, from a good one and another good one."""
    match dice.integers(4):
        case 0:
            return some_bytes(dice, data, donor)
        case 1:
            return _with_size(dice, data)
        case 2:
            return _with_exif(dice, data)
    damaged = _with_other_parts(dice, data)
    return some_bytes(dice, damaged, donor) if dice.integers(4) == 0 else damaged


def image_kind(data: bytes) -> str:
    """Of a good picture."""
    return "JPEG" if data[:2] == b"\xff\xd8" else "PNG" if data[:4] == b"\x89PNG" else "WebP"


def parts(data: bytes) -> list[tuple[int, int]]:
    """(start, end) of a good picture's segments up to the scan, or of its chunks."""
    found, kind = [], image_kind(data)
    at = {"JPEG": 2, "PNG": PNG_MAGIC, "WebP": RIFF_HEADER}[kind]
    offset, form = LENGTHS[kind]
    while at < len(data) and not (kind == "JPEG" and data[at + 1] == 0xDA):
        (length,) = struct.unpack_from(form, data, at + offset)
        size = {"JPEG": 2 + length, "PNG": 12 + length, "WebP": 8 + length + (length & 1)}[kind]
        found.append((at, at + size))
        at += size
    return found


def _with_other_parts(dice: np.random.Generator, data: bytes) -> bytes:
    """A segment or chunk with another length or kind, dropped, doubled, moved, or with other contents."""
    kind, found = image_kind(data), parts(data)
    start, end = found[dice.integers(len(found))]
    part = bytearray(data[start:end])
    match dice.integers(6):
        case 0:
            offset, form = LENGTHS[kind]
            most = 2 ** (8 * struct.calcsize(form)) - 1
            value = int(dice.choice([0, 1, 2, 3, 7, 255, most // 2, most - 8, most, int(dice.integers(most))]))
            struct.pack_into(form, part, offset, value)
        case 1:
            offset, size = KINDS[kind]
            part[offset : offset + size] = dice.bytes(size)
        case 2:
            part = bytearray()
        case 3:
            part = part * int(dice.integers(2, 50))
        case 4:
            other, last = found[dice.integers(len(found))]
            part = bytearray(data[other:last]) + part
        case _:
            body = {"JPEG": 4, "PNG": 8, "WebP": 8}[kind]
            for _ in range(int(dice.integers(1, 6))):
                if len(part) > body:
                    part[int(dice.integers(body, len(part)))] = int(dice.integers(256))
            if kind == "PNG":
                part[-4:] = struct.pack(">I", zlib.crc32(part[4:-4]))
    return data[:start] + bytes(part) + data[end:]


def _with_size(dice: np.random.Generator, data: bytes) -> bytes:
    """The header states another width and height; a PNG's checksum agrees."""
    width, height = (int(dice.choice(SIZES)) for _ in range(2))
    changed, kind = bytearray(data), image_kind(data)
    for start, end in parts(data):
        if kind == "JPEG" and data[start + 1] in (0xC0, 0xC2):
            struct.pack_into(">HH", changed, start + 5, height & 0xFFFF, width & 0xFFFF)
        elif kind == "PNG" and data[start + 4 : start + 8] == b"IHDR":
            struct.pack_into(">II", changed, start + 8, width, height)
            struct.pack_into(">I", changed, end - 4, zlib.crc32(changed[start + 4 : end - 4]))
        elif data[start : start + 4] == b"VP8X":
            changed[start + 12 : start + 15] = (max(width, 1) - 1 & 0xFFFFFF).to_bytes(3, "little")
            changed[start + 15 : start + 18] = (max(height, 1) - 1 & 0xFFFFFF).to_bytes(3, "little")
        elif data[start : start + 4] == b"VP8 ":
            struct.pack_into("<HH", changed, start + 14, width & 0x3FFF, height & 0x3FFF)
        elif data[start : start + 4] == b"VP8L":
            (bits,) = struct.unpack_from("<I", data, start + 9)
            sizes = (max(width, 1) - 1 & 0x3FFF) | (max(height, 1) - 1 & 0x3FFF) << 14
            struct.pack_into("<I", changed, start + 9, bits & 0xF0000000 | sizes)
    return bytes(changed)


def _with_exif(dice: np.random.Generator, data: bytes) -> bytes:
    """EXIF data with a garbled directory; some of it right enough to turn the picture."""
    order = str(dice.choice(["<", ">"]))
    start = int(dice.choice([0, 8, 8, 8, 9, 200, 2**32 - 1]))
    entries = int(dice.choice([0, 1, 2, 40, 65_535]))
    entry = struct.pack(order + "HHIHH", 0x0112, int(dice.choice([1, 3, 3, 4])), 1, int(dice.integers(0, 12)), 0)
    body = struct.pack(order + "2sHIH", b"II" if order == "<" else b"MM", 42, start, entries)
    exif = body + (entry if dice.integers(2) else b"") + dice.bytes(int(dice.integers(0, 120)))
    kind = image_kind(data)
    if kind == "JPEG":
        exif = b"Exif\0\0" + exif
        return data[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + data[2:]
    if kind == "PNG":
        first = parts(data)[0][1]
        checked = b"eXIf" + exif
        return (
            data[:first]
            + struct.pack(">I", len(exif))
            + checked
            + struct.pack(">I", zlib.crc32(checked))
            + data[first:]
        )
    chunks = data[12:] + b"EXIF" + struct.pack("<I", len(exif)) + exif + b"\0" * (len(exif) & 1)
    return b"RIFF" + struct.pack("<I", len(chunks) + 4) + b"WEBP" + chunks


def odd_value(dice: np.random.Generator) -> Any:
    """A value that JSON can hold and hardly any key takes."""
    values = (
        None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "8",
        "nan", "1e999", "9" * 5000, "\ud800", "\0", "x" * 10_000, [], [[]], [None], ["a", "b"], [""], {}, {"a": 1},
        {"": {"": []}}, {"name": "reference", "max_tiles": 1}, {"name": [], "thumbnail": {}}, "two-tile",
        {"min_tiles": 10**400}, nested(200),
    )  # fmt: skip
    return copy.deepcopy(values[dice.integers(len(values))])


def nested(depth: int) -> Any:
    """Lists and objects in each other."""
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def json_text(dice: np.random.Generator, value: Any) -> bytes:
    """The value with one to three odd places, as JSON; sometimes the text itself is damaged."""
    for _ in range(int(dice.integers(0, 4))):
        value = _with_odd_place(dice, value)
    text = json.dumps(value, ensure_ascii=bool(dice.integers(2))).encode("utf-8", "surrogatepass")
    return some_bytes(dice, text, text) if dice.integers(3) == 0 else text


def _with_odd_place(dice: np.random.Generator, value: Any) -> Any:
    """Somewhere inside, an item is replaced, removed, doubled or given another key."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    if not keys or dice.integers(8) == 0:
        return odd_value(dice)
    key = keys[int(dice.integers(len(keys)))]
    match dice.integers(8):
        case 0:
            del value[key]
        case 1 if isinstance(value, list):
            value.insert(key, copy.deepcopy(value[key]))
        case 2 if isinstance(value, dict):
            value[str(odd_value(dice))[:300]] = value.pop(key)
        case 3:
            value[key] = odd_value(dice)
        case _:
            value[key] = _with_odd_place(dice, value[key])
    return value


def prompt(dice: np.random.Generator, markers: tuple[str, ...]) -> bytes:
    """Text of many scripts, control characters, special tokens; now and then very long, or not UTF-8 at all."""
    pieces: list[bytes] = []
    for _ in range(int(dice.integers(0, 12))):
        match dice.integers(6):
            case 0:
                pieces.append(str(dice.choice(markers)).encode())
            case 1:
                marker = str(dice.choice(markers))
                pieces.append(marker[: int(dice.integers(len(marker)))].encode())
            case 2:
                lone = chr(int(dice.integers(0xD800, 0xE000))) if dice.integers(6) == 0 else "\ufffd"
                pieces.append(lone.encode("utf-8", "surrogatepass"))
            case 3:
                length = int(dice.choice([0, 3, 50, 3000, 100_000]))
                pieces.append(str(dice.choice(["a", " ", "\n", "no ", "é", "\u0301", "."])).encode() * length)
            case _:
                letters = ALPHABETS[dice.integers(len(ALPHABETS))]
                codes = dice.integers(letters.start, letters.stop, int(dice.integers(1, 60)))
                pieces.append("".join(map(chr, codes)).encode())
    text = b"".join(pieces)
    return some_bytes(dice, text, text) if dice.integers(6) == 0 else text
