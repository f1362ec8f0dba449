"""Tensors as the protocol carries them: raw little-endian contents.

A BYTES tensor is each element behind its length as a little-endian uint32; BOOL is one byte, INT32 and FP32 four.

Where servers listen, as people write it.
"""

import re
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from tessera_wire.errors import InvalidRequest


class Tensor(NamedTuple):
    """One input: ``data`` holds the raw contents."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes


def bytes_tensor(name: str, *elements: bytes) -> Tensor:
    """A BYTES tensor of one dimension."""
    data = b"".join(piece for element in elements for piece in (len(element).to_bytes(4, "little"), element))
    return Tensor(name, "BYTES", (len(elements),), data)


def elements(data: bytes) -> Iterator[bytes]:
    """The elements of a BYTES tensor's raw contents. Raises struct.error where a length is cut off."""
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        yield data[at + 4 : at + 4 + length]
        at += 4 + length


def addresses(url: str | Sequence[str]) -> list[str]:
    """The servers' addresses in a list or in a text with commas; the scheme of the first goes for those without."""
    given = url.split(",") if isinstance(url, str) else url if isinstance(url, (list, tuple)) else [url]
    found = [each.strip() if isinstance(each, str) else "" for each in given]
    if not found or "" in found:
        raise InvalidRequest(f"not server addresses: {url!r:.200}", "use host:port, or several with commas between")
    scheme = found[0].partition("://")[0] if "://" in found[0] else "grpc"
    return [each if "://" in each else f"{scheme}://{each}" for each in found]


def local_address(host: str, port: int) -> str:
    """Where a client on this machine finds what listens on ``host``."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_url(url: str) -> tuple[str, str]:
    """``(scheme, "host:port")``; the ports default to tritonserver's, 8001 for gRPC and 8000 for HTTP."""
    remedy = "use host:port, grpc://host:port or http://host:port"
    try:
        parts = urlsplit(url if "://" in url else f"grpc://{url}")
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise InvalidRequest(f"not a server address: {url!r:.200}: {error}", remedy) from None
    beside = parts.path.strip("/") or parts.query or parts.fragment or parts.username
    if parts.scheme not in ("grpc", "grpcs", "http", "https") or beside or not re.fullmatch(r"[\w.:%-]+", host, re.A):
        raise InvalidRequest(f"not a server address: {url!r:.200}", remedy)
    host = f"[{host}]" if ":" in host else host
    return parts.scheme, f"{host}:{port or (8000 if parts.scheme.startswith('http') else 8001)}"
