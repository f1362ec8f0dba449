"""Where servers listen, as people write it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from tessera_wire.errors import InvalidRequest


def addresses(url: str | Sequence[str]) -> list[str]:
    """The servers' addresses in a list or in a text with commas; the scheme of the first goes for those without."""
    given = url.split(",") if isinstance(url, str) else url if isinstance(url, (list, tuple)) else [url]
    found = [each.strip() if isinstance(each, str) else "" for each in given]
    if not found or "" in found:
        raise InvalidRequest(f"not server addresses: {url!r:.200}", "use host:port, or several with commas between")
    scheme = found[0].partition("://")[0] if "://" in found[0] else "grpc"
    return [each if "://" in each else f"{scheme}://{each}" for each in found]


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
