"""What is said of the service itself: its models, its health, its counters.

GET /tessera/status: what the page's status tab shows, read from the servers' metrics pages.
"""

import asyncio
import re
import ssl
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from math import inf
from time import monotonic
from typing import Any

import httpx
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from tessera_gateway.errors import ApiError
from tessera_gateway.metrics import Counters
from tessera_gateway.settings import Settings
from tessera_wire import __version__

PROMETHEUS = "text/plain; version=0.0.4"
PAGE_SECONDS = 5.0
MODEL_SECONDS = 1.0
ALARM_SECONDS = 0.5  # for an answer, so that a probe of /health has its own in a second

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> dict[str, object]:
    settings: Settings = request.app.state.settings
    length = await _max_model_len(request)
    return {"object": "list", "data": [_model(request, name, length) for name in settings.model_names]}


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, object]:
    if name not in request.app.state.settings.model_names:
        raise ApiError(404, f"no model {name!r:.80}", "model", "model_not_found")
    return _model(request, name, await _max_model_len(request))


def _model(request: Request, name: str, length: int | None) -> dict[str, object]:
    began = request.app.state.began
    return {"id": name, "object": "model", "created": began, "owned_by": "tessera", "max_model_len": length}


async def _max_model_len(request: Request) -> int | None:
    """Of the servers' contexts the shortest, by their metrics pages; None while one does not tell."""
    pages = await metrics_pages(request.app.state.metrics_urls, MODEL_SECONDS)
    lengths = [_values(page, "tessera_max_model_len") for page in pages.values()]
    return int(min(map(min, lengths))) if lengths and all(lengths) else None


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}


@router.get("/ping")
@router.post("/ping")
@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """200 when every server takes requests, else 503; and what is wrong with the batch folder, which questions of
    people do not need, or with a cascade's plan."""
    state = request.app.state
    ready, alarms = await asyncio.gather(state.client.ready(), state.alarms.told(state.metrics_urls))
    troubles = {
        "batches": state.batches and state.batches.trouble,
        "cascade": alarms and f"the plan does not hold any more: {', '.join(alarms)}",
    }
    found = {name: trouble for name, trouble in troubles.items() if trouble}
    return JSONResponse({"ready": ready, **found}, 200 if ready else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """The gateway's own counters, of all its workers."""
    counters: Counters = request.app.state.counters
    return PlainTextResponse(counters.page(), media_type=PROMETHEUS)


@router.get("/metrics/servers")
async def servers_metrics(request: Request) -> Response:
    """The servers' own pages as one, whose samples say of which server they are; one server's is passed on as it is."""
    pages = await metrics_pages(request.app.state.metrics_urls, PAGE_SECONDS)
    for url, page in pages.items():
        if isinstance(page, httpx.HTTPError):
            words = f"no metrics from {url}: {page or type(page).__name__}"
            raise ApiError(503, words, code="server_unavailable")
    found = {named(url): str(page) for url, page in pages.items()}
    return PlainTextResponse(joined(found) if len(found) > 1 else "".join(found.values()), media_type=PROMETHEUS)


SECONDS = 2.0  # for a server's page; the tab asks again soon
SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>[-+\d][-+.e\d]*)(?: -?\d+)?$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
NAME = re.compile(r"[a-zA-Z_:][\w:]*")
DESCRIPTION = re.compile(r"# (?:HELP|TYPE) (\S+)")
STAGES = ("preprocess", "vision_encoder", "language_model")


@router.get("/tessera/status", include_in_schema=False)
async def status(request: Request) -> dict[str, list[dict[str, Any]]]:
    """Each server's numbers; of one that does not answer only why."""
    pages = await metrics_pages(request.app.state.metrics_urls, SECONDS)
    return {"servers": [{"server": named(url), **_about(page)} for url, page in pages.items()]}


def _about(page: str | httpx.HTTPError) -> dict[str, Any]:
    if isinstance(page, httpx.HTTPError):
        return {"up": False, "problem": str(page) or type(page).__name__}
    return {"up": True, "problem": None, **numbers(page)}


class Alarms:
    """The servers whose cascade is not as planned, by their metrics pages: read once a second at most, however often
    /health is asked, for which nobody needs a key."""

    def __init__(self) -> None:
        self._reading = asyncio.Lock()
        self._read, self._found = -inf, list[str]()

    async def told(self, urls: Iterable[str]) -> list[str]:
        async with self._reading:
            if monotonic() >= self._read + 1:
                pages = await metrics_pages(urls, ALARM_SECONDS)
                self._found = [named(url) for url, page in pages.items() if any(_values(page, "tessera_cascade_alarm"))]
                self._read = monotonic()
            return self._found


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
        "drafts": {
            "drafted_tokens": total("tessera_drafted_tokens_total"),
            "accepted_tokens": total("tessera_accepted_tokens_total"),
        },
        "generated_tokens": total("tessera_generated_tokens_total"),
        "first_token_seconds": mean("tessera_time_to_first_token_seconds"),
        "device_busy": total("tessera_device_busy_fraction"),
    }


def _values(page: str | httpx.HTTPError, name: str) -> list[float]:
    """Of the samples of this name; none where there is no page."""
    return [value for found, _, value in _samples(page) if found == name] if isinstance(page, str) else []


def _samples(page: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """(name, labels, value) of each line that is a sample; one that is no number, which JSON cannot hold, is none."""
    for line in page.splitlines():
        if not line.startswith("#") and (match := SAMPLE.match(line)):
            yield match["name"], dict(LABEL.findall(match["labels"] or "")), float(match["value"])
