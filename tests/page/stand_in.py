"""A small app around the page's own routes: a chat endpoint that plays canned chunks in the gateway's shape.

The quick tests' gateway. Its stream waits where a question says so, so that a test can look at a half-written answer.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

from tessera_client import PicturePlan, PictureView, TesseraClientError
from tessera_gateway import page, service
from tessera_gateway.metrics import Counters
from tessera_gateway.settings import Settings

WORDS = (
    "A living room in afternoon light. ",
    "Beside the sofa a wire hangs out of an open socket: ",
    "that should be covered first.",
)
TIMINGS = {"preprocess": 6.2, "vision_queue": 0.4, "vision": 41.8, "queue": 0.7, "first_token": 12.9, "decode": 58.3}
SHARES = (0.86, 0.11, 0.03)
METRICS = """\
# HELP tessera_requests_running Requests in the running batch
tessera_requests_running{model="language_model"} 3
tessera_requests_waiting{model="language_model"} 2
tessera_requests_in_flight{model="language_model"} 5
tessera_requests_total{model="language_model",reason="stop"} 1200
tessera_requests_total{model="language_model",reason="length"} 34
nv_inference_pending_request_count{model="preprocess",version="1"} 1
nv_inference_pending_request_count{model="vision_encoder",version="1"} 4
nv_inference_pending_request_count{model="vlm",version="1"} 9
tessera_kv_blocks_used{model="language_model"} 512
tessera_kv_blocks_total{model="language_model"} 2048
tessera_prompt_tokens_total{model="language_model"} 400000
tessera_cached_tokens_total{model="language_model"} 100000
tessera_generated_tokens_total{model="language_model"} 65536
tessera_drafted_tokens_total{model="language_model"} 5000
tessera_accepted_tokens_total{model="language_model"} 4000
tessera_time_to_first_token_seconds_sum 30.5
tessera_time_to_first_token_seconds_count 1000
tessera_device_busy_fraction{model="language_model"} 0.42
"""


POLICIES = ("reference", "two-tile")
TILES = PicturePlan(13 * 256, "tiles", POLICIES, (PictureView(1792, 1344, 3, 4), PictureView(448, 448, 1, 1)))
TWO_TILES = PicturePlan(512, "tiles", POLICIES, (PictureView(896, 448, 1, 2),))


class Client:
    """What the page's routes ask of the SDK: how the server cuts a picture, by its own policy and in two."""

    own = TILES

    async def plan(self, image: bytes, *, tile_policy: Any = None) -> tuple[PicturePlan, ...]:
        return ({None: self.own, "two-tile": TWO_TILES}[tile_policy],)


class StandIn:
    """``requests``: the bodies that came; ``refusal``: what they all get, where there is one; ``go_on``: what a stream
    whose question holds "slowly" waits for."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.reset()
        self.app = FastAPI()
        self.app.include_router(page.router)
        self.app.state.client, self.app.state.settings, self.app.state.counters = Client(), Settings(), Counters()
        self.app.add_exception_handler(TesseraClientError, lambda request, error: refusal(400, str(error)))
        self.app.get("/metrics/servers/0")(lambda: PlainTextResponse(METRICS))
        self.app.get("/v1/models")(lambda: {"object": "list", "data": [{"id": "tessera-small", "object": "model"}]})
        self.app.post("/v1/chat/completions")(self.chat)
        self.app.include_router(service.router)  # after its own: the first that fits answers

    def reset(self) -> None:
        self.go_on.set()
        self.go_on = threading.Event()
        self.requests: list[dict[str, Any]] = []
        self.left: list[str] = []
        self.key = ""
        self.refusal: JSONResponse | None = None

    async def chat(self, request: Request) -> Any:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return refusal(401, "this gateway needs a key")
        body = await request.json()
        self.requests.append(body)
        question = body["messages"][-1]["content"][-1]["text"]
        if self.refusal is not None:
            return self.refusal
        if "refuse" in question:
            return refusal(400, "max_tokens 256 exceeds the context")
        if not body.get("stream"):
            message = {"role": "assistant", "content": "".join(WORDS)}
            return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        return StreamingResponse(self.chunks(body, question), media_type="text/event-stream")

    async def chunks(self, body: dict[str, Any], question: str) -> AsyncIterator[str]:
        labels, go_on = body.get("tessera", {}).get("choices"), self.go_on
        try:
            for place, word in enumerate((labels[0],) if labels else WORDS):
                if place == 2 and "slowly" in question:
                    while not go_on.is_set():
                        await asyncio.sleep(0.01)
                yield chunk(choices=[{"index": 0, "delta": {"content": word}, "finish_reason": None}])
                if "break" in question:
                    yield f"data: {json.dumps({'error': {'message': 'a stage died', 'code': 500}})}\n\n"
                    return
            yield chunk(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
            scores = [
                {"label": label, "logprob": -1.0, "probability": share * 0.9, "normalized": share}
                for label, share in zip(labels or (), SHARES)
            ]
            usage = {"prompt_tokens": 1812, "completion_tokens": 27, "total_tokens": 1839}
            drafts = {"accepted_prediction_tokens": 12, "rejected_prediction_tokens": 3}
            usage |= {"completion_tokens_details": drafts}
            own = {"timings": TIMINGS, "choices": scores or None, "image_tokens": 1792}
            yield chunk(choices=[], usage=usage, tessera=own)
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.left.append(question)
            raise


def chunk(**fields: Any) -> str:
    return f"data: {json.dumps({'id': 'chatcmpl-1', 'object': 'chat.completion.chunk', **fields})}\n\n"


def refusal(status: int, message: str, code: str | None = None) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "", "param": None, "code": code}}, status)
