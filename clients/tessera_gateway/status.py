"""GET /tessera/status: what the page's status tab shows, read from the servers' metrics pages."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import httpx
from fastapi import APIRouter, Request

SECONDS = 2.0  # for a server's page; the tab asks again soon
SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>[-+\d][-+.e\d]*)(?: -?\d+)?$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
NAME = re.compile(r"[a-zA-Z_:][\w:]*")
DESCRIPTION = re.compile(r"# (?:HELP|TYPE) (\S+)")
STAGES = ("preprocess", "vision_encoder", "language_model")

router = APIRouter()


@router.get("/tessera/status", include_in_schema=False)
async def status(request: Request) -> dict[str, list[dict[str, Any]]]:
    """Each server's numbers; of one that does not answer only why."""
    pages = await metrics_pages(request.app.state.metrics_urls, SECONDS)
    return {"servers": [{"server": named(url), **_about(page)} for url, page in pages.items()]}


def _about(page: str | httpx.HTTPError) -> dict[str, Any]:
    if isinstance(page, httpx.HTTPError):
        return {"up": False, "problem": str(page) or type(page).__name__}
    return {"up": True, "problem": None, **numbers(page)}


async def metrics_pages(urls: Iterable[str], seconds: float) -> dict[str, str | httpx.HTTPError]:
    """The servers' metrics pages by their URLs; of one that does not answer in time, why."""

    async def page(url: str) -> tuple[str, str | httpx.HTTPError]:
        try:
            return url, (await client.get(url)).raise_for_status().text
        except httpx.HTTPError as error:
            return url, error

    async with httpx.AsyncClient(timeout=seconds, trust_env=False, verify=_tls()) as client:
        return dict(await asyncio.gather(*map(page, urls)))


def named(url: str) -> str:
    """What a server is called by its metrics page: host and port, and a page of another path than usual in full."""
    page = httpx.URL(url)
    return page.netloc.decode() + page.raw_path.decode().removesuffix("/metrics")


@cache
def _tls() -> ssl.SSLContext:
    """Made once: it takes 20 ms, in which a worker's streams would stand still."""
    return ssl.create_default_context()


def joined(pages: Mapping[str, str]) -> str:
    """The metrics pages of several servers as one: each metric described once, samples labelled ``server``."""
    metrics: dict[str, dict[str, str]] = {}  # the lines of each, in their order; a description by what it describes
    for server, page in pages.items():
        lines = metrics.setdefault("", {})
        for line in page.splitlines():
            key = line
            if described := DESCRIPTION.match(line):
                key, lines = described[0], metrics.setdefault(described[1], {})
            elif name := NAME.match(line):
                rest = line[name.end() :]
                key = line = f'{name[0]}{{server="{server}"' + (f",{rest[1:]}" if rest.startswith("{") else f"}}{rest}")
            lines.setdefault(key, line)
    return "".join(f"{line}\n" for lines in metrics.values() for line in lines.values())


def numbers(page: str) -> dict[str, Any]:
    """The tab's numbers from a metrics page in Prometheus' text format. What a page lacks is None (or {}), not 0."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
    for name, labels, value in _samples(page):
        samples[name].append((labels, value))

    def total(name: str) -> float | None:
        return sum(value for _, value in samples[name]) if samples[name] else None

    def mean(name: str) -> float | None:
        seconds, count = total(f"{name}_sum"), total(f"{name}_count")
        return seconds / count if seconds is not None and count else None

    def by(name: str, label: str) -> dict[str, float]:
        found: dict[str, float] = defaultdict(float)
        for labels, value in samples[name]:
            found[labels.get(label, "")] += value
        return dict(found)

    pending = by("nv_inference_pending_request_count", "model")
    if "vision_encoder" in pending:  # most of its requests wait in the stage itself
        pending["vision_encoder"] += total("tessera_vision_requests_waiting") or 0.0
    return {
        "requests": {
            "in_flight": total("tessera_requests_in_flight"),
            "running": total("tessera_requests_running"),
            "waiting": total("tessera_requests_waiting"),
            "ended": by("tessera_requests_total", "reason"),
        },
        "queue": {stage: pending[stage] for stage in STAGES if stage in pending},
        "kv_blocks": {"used": total("tessera_kv_blocks_used"), "total": total("tessera_kv_blocks_total")},
        "prefix_cache": {
            "prompt_tokens": total("tessera_prompt_tokens_total"),
            "cached_tokens": total("tessera_cached_tokens_total"),
        },
        "generated_tokens": total("tessera_generated_tokens_total"),
        "first_token_seconds": mean("tessera_time_to_first_token_seconds"),
        "device_busy": total("tessera_device_busy_fraction"),
    }


def _samples(page: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """(name, labels, value) of each line that is a sample; one that is no number, which JSON cannot hold, is none."""
    for line in page.splitlines():
        if not line.startswith("#") and (match := SAMPLE.match(line)):
            yield match["name"], dict(LABEL.findall(match["labels"] or "")), float(match["value"])
