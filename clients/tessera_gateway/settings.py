"""What a gateway is started with; its workers get it as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from tessera_wire.address import addresses, parse_url

MOST_IN_FLIGHT = 256
"""As many as a server on a GPU works at (language_model.max_sequences)."""
UNEVEN = 1.25


@dataclass(frozen=True)
class Settings:
    url: str = "localhost:8001"
    """The servers, as the SDK takes them."""
    metrics: tuple[str, ...] = ()
    """The servers' metrics pages; empty: at the port above each gRPC port, where `tessera serve` has them."""
    model_names: tuple[str, ...] = ("vlm",)
    """What clients may call the model."""
    max_tokens: int | None = None
    """The longest answer to a request that does not say; None: as long as the context has room for."""
    drain_s: float = 5.0
    """For answers under way when the gateway is to stop."""
    timeout_s: float = 300.0
    """Of a request, with all its attempts."""
    max_in_flight: int | None = None
    """Requests at the servers at a time, of all workers; the others wait their turn. None: MOST_IN_FLIGHT a server."""
    max_body_mib: int = 64
    max_bodies_mib: int = 512
    """Of the bodies of all requests under way, over all workers."""
    max_connections_per_peer: int = 512
    """In each worker; as many requests as a server takes."""
    fetch_from: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    """The sites whose pages may ask from a browser, beside the gateway's own; ``*`` is any."""
    allowed_hosts: tuple[str, ...] | None = None
    """The names that the gateway goes by, beside addresses and localhost; None: any."""
    priority_floor: int | None = None
    """The best priority (the lowest number) that a request may ask for."""
    keys: str | None = None
    """The file with the bearer keys; None: anybody may ask."""
    batch_folder: str | None = None
    """Where batches and their files are kept; None: there are none."""
    batch_concurrency: int = 64
    """Requests of batches under way at a time."""
    max_file_mib: int = 1024
    counters: str | None = None
    """The file that the workers count in."""
    workers: int = 1

    @property
    def places(self) -> int:
        """Requests that one worker may have at the servers. Connections do not spread evenly over several, which have
        some more together."""
        total = self.max_in_flight or MOST_IN_FLIGHT * len(addresses(self.url))
        return total if self.workers == 1 else math.ceil(UNEVEN * total / self.workers)

    @property
    def metrics_urls(self) -> list[str]:
        return list(self.metrics) or [metrics_beside(each) for each in addresses(self.url)]

    @property
    def bodies_bytes(self) -> int:
        """What a worker may hold of bodies: its share, and one body in any case."""
        return max(self.max_bodies_mib // self.workers, self.max_body_mib) << 20

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        given = json.loads(text).items()
        fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given}
        return cls(**fields)


def metrics_beside(url: str) -> str:
    """The metrics page of the server at ``url``: 8002 for gRPC at 8001 and HTTP at 8000, and so on."""
    scheme, address = parse_url(url)
    host, _, port = address.rpartition(":")
    return f"http://{host}:{int(port) + (2 if scheme.startswith('http') else 1)}/metrics"
