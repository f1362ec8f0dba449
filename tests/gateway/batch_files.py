"""Input files of batches, and what became of them, by OpenAI's own client."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
from openai.types import Batch


def client_of(address: str) -> openai.OpenAI:
    """OpenAI's client of a gateway, which tries once."""
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def line(custom_id: str, text: str = "", **body: Any) -> str:
    """A line that asks one question."""
    asked = {"model": "vlm", "messages": [{"role": "user", "content": [{"type": "text", "text": text or custom_id}]}]}
    return json.dumps(
        {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": {**asked, **body}}
    )


def upload(client: openai.OpenAI, *lines: str) -> str:
    """The id of a file of these lines."""
    return client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch").id


def create(client: openai.OpenAI, *lines: str, **options: Any) -> Batch:
    """A batch of these lines."""
    fields: dict[str, Any] = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **options}
    return client.batches.create(input_file_id=upload(client, *lines), **fields)


def over(client: openai.OpenAI, batch: Batch, seconds: float = 30.0) -> Batch:
    """The batch when nothing more becomes of it."""
    deadline = time.monotonic() + seconds
    while batch.status not in ("completed", "failed", "cancelled", "expired"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
    return batch


def rows(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of a file of results; of none where there is no file."""
    return [json.loads(row) for row in client.files.content(file_id).text.splitlines()] if file_id else []


def answers(client: openai.OpenAI, batch: Batch) -> dict[str, str]:
    """The answers' texts by custom_id, of which none stands twice."""
    found = rows(client, batch.output_file_id)
    texts = {row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"] for row in found}
    assert len(texts) == len(found)
    return texts
