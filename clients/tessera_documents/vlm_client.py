"""The seam to mineru-vl-utils: its ``VlmClient`` over our SDK, and its ``MinerUClient`` with that inside.

Whether the model that is served reads documents: it is shown a page that anyone could read.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable, Collection, Sequence
from copy import copy
from functools import partial
from itertools import zip_longest
from typing import Any

from loguru import logger
from mineru_vl_utils import MinerUClient
from mineru_vl_utils.structs import ContentBlock
from mineru_vl_utils.vlm_client import RequestError, SamplingParams, UnsupportedError, VlmClient
from mineru_vl_utils.vlm_client.base_client import ImageType
from mineru_vl_utils.vlm_client.utils import (
    aio_image_to_bytes_list_and_format,
    gather_tasks,
    image_to_bytes_list_and_format,
)
from PIL import Image, ImageDraw, ImageFont

from tessera_client import Answer, AsyncClient, Client, Models, Retry
from tessera_client.transports import Transport
from tessera_client.transports.pool import open_transport
from tessera_jobs.asker import Asker

SDK_NAMES = {"max_new_tokens": "max_tokens"} | {
    name: name
    for name in (
        *("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        "no_repeat_ngram_size",
        "draft",
        "tile_policy",
    )
}
"""Of SamplingParams' fields, and of what :func:`mineru_client` adds to them."""

OPTIONS = frozenset(
    (
        *("prompts", "sampling_params", "layout_image_size", "min_image_edge", "max_image_edge_ratio", "executor"),
        *("simple_post_process", "handle_equation_block", "abandon_list", "abandon_paratext", "image_analysis"),
        *("incremental_priority", "max_concurrency", "use_tqdm", "debug"),
        *("enable_table_formula_eq_wrap", "enable_cross_page_table_merge"),
    )
)
"""Of MinerUClient's options those that it follows itself; the others are about the ways to other servers."""

PRUNED = {"tile_policy": {"prune": "equal"}}
"""Of a request whose picture goes without its equal groups of patches (docs/preprocessing.md)."""

Several = Sequence[Any] | Any
Prepared = tuple[list[Any], list[str], list[SamplingParams | None], list[int]]
"""Pictures, prompts and parameters of what is asked about blocks, and whose they are."""


class TesseraVlmClient(VlmClient):
    """What MinerUClient asks a model through, here a Tessera server; for threads, for asyncio, for both at once.

    Args:
        url, timeout, retry, models, transport: as for :class:`tessera_client.Client`. Without a ``retry``,
            unavailability is waited out for two minutes.
        max_tokens: the longest answer where SamplingParams has no ``max_new_tokens``; None: as long as fits, as with
            MinerU's own client before a gateway.
        max_concurrency: requests at a time of a batch that comes without a semaphore.
        prompting: ``prompt``, ``system_prompt``, ``sampling_params``, ``text_before_image`` and
            ``allow_truncated_content`` (here true, as MinerUClient has it), as for every VlmClient.

    All sampling parameters go to the server. One that it has no name for is an UnsupportedError, and so are scores.
    Else the errors are those of :mod:`tessera_wire.errors`, and RequestError for an answer that was not finished.
    """

    def __init__(
        self,
        url: str | Sequence[str] = "localhost:8001",
        *,
        timeout: float | None = 600.0,
        retry: Retry | None = None,
        models: Models | None = None,
        transport: Transport | None = None,
        max_tokens: int | None = None,
        max_concurrency: int = 100,
        **prompting: Any,
    ) -> None:
        super().__init__(**{"allow_truncated_content": True, **prompting})
        transport = transport or open_transport(url, models or Models())
        retry = retry or Retry.patient()
        self.client = Client(url, timeout=timeout, retry=retry, models=models, transport=transport)
        self.aio_client = AsyncClient(url, timeout=timeout, retry=retry, models=models, transport=transport)
        self.impatient = AsyncClient(url, timeout=timeout, retry=Retry(attempts=1), models=models, transport=transport)
        """For an :class:`Asker`, which asks again itself."""
        self.asker: Asker | None = None
        """By which all is asked that is awaited; None: by the client."""
        self.pool: str | None = None
        """The SDK's ``draft_pool`` of all that is asked."""
        self.max_tokens = max_tokens
        self.max_concurrency = max_concurrency

    def predict(
        self,
        image: ImageType,
        prompt: str = "",
        sampling_params: SamplingParams | None = None,
        priority: int | None = None,
    ) -> str:
        """The answer to a prompt about a picture, several or none."""
        pictures, _ = image_to_bytes_list_and_format(image)
        options = self.options(sampling_params, priority)
        return self._text(self.client.chat(self._messages(prompt, pictures), **options))

    async def aio_predict(
        self,
        image: ImageType,
        prompt: str = "",
        sampling_params: SamplingParams | None = None,
        priority: int | None = None,
    ) -> str:
        """As :meth:`predict`."""
        pictures, _ = await aio_image_to_bytes_list_and_format(image)
        messages, options = self._messages(prompt, pictures), self.options(sampling_params, priority)

        def call(client: AsyncClient) -> Awaitable[Answer]:
            return client.chat(messages, **options)

        return self._text(await (self.asker.ask(call) if self.asker else call(self.aio_client)))

    def batch_predict(
        self,
        images: Sequence[ImageType],
        prompts: Sequence[str] | str = "",
        sampling_params: Several = None,
        priority: Several = None,
    ) -> list[str]:
        """As :meth:`aio_batch_predict`, from a thread without an event loop."""
        return asyncio.run(self.aio_batch_predict(images, prompts, sampling_params, priority))

    async def aio_batch_predict(
        self,
        images: Sequence[ImageType],
        prompts: Sequence[str] | str = "",
        sampling_params: Several = None,
        priority: Several = None,
        semaphore: asyncio.Semaphore | None = None,
        use_tqdm: bool = False,
        tqdm_desc: str | None = None,
    ) -> list[str]:
        """The answers in the order of ``images``; what is not a sequence counts for each. The first error ends all."""
        slots = semaphore or asyncio.Semaphore(self.max_concurrency)

        async def predict(*question: Any) -> str:
            async with slots:
                return await self.aio_predict(*question)

        columns = [images] + [
            [given] * len(images) if isinstance(given, str) or not isinstance(given, Sequence) else given
            for given in (prompts, sampling_params, priority)
        ]
        questions = list(zip(*columns, strict=True))
        return await gather_tasks([predict(*question) for question in questions], use_tqdm, tqdm_desc)

    def options(self, params: SamplingParams | None, priority: int | None = None) -> dict[str, Any]:
        """The SDK's options for SamplingParams, which go before the client's own. Raises UnsupportedError."""
        given = {
            name: value
            for each in (self.sampling_params, params)
            for name, value in (vars(each) if each else {}).items()
            if value is not None
        }
        unknown = sorted(given.keys() - SDK_NAMES.keys())
        if unknown:
            raise UnsupportedError(f"a Tessera server has no sampling parameter {', '.join(unknown)}")
        options = {SDK_NAMES[name]: value for name, value in given.items()}
        # The answer to the layout prompt is made of special tokens.
        own = {"max_tokens": self.max_tokens, "skip_special_tokens": False, "draft_pool": self.pool}
        return own | {"priority": priority} | options

    def _messages(self, prompt: str, pictures: Sequence[bytes]) -> list[dict[str, Any]]:
        """``<image>`` in the prompt marks a picture's place; without a mark they all come before it (or after it)."""
        prompt = prompt or self.prompt
        if "<image>" in prompt:
            texts = prompt.split("<image>", len(pictures))
        else:
            texts = [prompt] if self.text_before_image else [""] * len(pictures) + [prompt]
        content: list[dict[str, Any]] = []
        for text, picture in zip_longest(texts, pictures):
            content += [{"type": "text", "text": text}] if text else []
            content += [{"type": "image", "image": picture}] if picture is not None else []
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": content}]

    def _text(self, answer: Answer) -> str:
        if answer.finish_reason == "length":
            words = f"an answer was cut after {answer.usage.completion_tokens if answer.usage else 'its most'} tokens"
            if not self.allow_truncated_content:
                raise RequestError(words)
            logger.warning(words)
        elif answer.finish_reason != "stop":
            raise RequestError(f"the answer was not finished: {answer.finish_reason}")
        return answer.text

    def close(self) -> None:
        """Closes the connection, of both clients."""
        self.client.close()

    async def aclose(self) -> None:
        """As :meth:`close`."""
        await self.aio_client.close()

    async def aclose_current_loop(self) -> None:
        """MinerUClient calls this where a loop of its own ends; nothing here belongs to a loop."""

    def __enter__(self) -> TesseraVlmClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def mineru_client(vlm: VlmClient, prune: Collection[str] = (), **options: Any) -> MinerUClient:
    """MinerU's own client, unmodified, that asks through ``vlm``. ``options``: MinerUClient's, but those of its ways to
    other servers and models: such a one would have no effect and is a TypeError. What stands under a block's key
    ``draft`` is taken out and goes with the question about it. ``prune``: the steps, of "layout" and "crops", whose
    pictures are asked about without their equal groups of patches."""
    without_effect = sorted(options.keys() - OPTIONS)
    if without_effect:
        allowed = ", ".join(sorted(OPTIONS))
        raise TypeError(f"{', '.join(without_effect)}: not among the options that count here: {allowed}")
    # Its http-client is the backend that prepares many pictures at once. This one is replaced before it has connected
    # to anything, and its files are made here, in less than half the time.
    reader = MinerUClient(
        backend="http-client",
        model_name="vlm",
        server_url="http://replaced",
        skip_model_name_checking=True,
        **{"use_tqdm": False, **options},
    )
    reader.client = vlm
    reader.helper.backend = "pictures"
    reader.helper.prepare_for_layout = partial(_layout_file, reader.helper.prepare_for_layout)
    policy = PRUNED if "crops" in prune else {}
    reader.helper.prepare_for_extract = partial(_with_more, reader.helper.prepare_for_extract, policy)
    if "layout" in prune:
        known = reader.sampling_params
        layout = with_more(known.get("[layout]") or known.get("[default]"), **PRUNED)
        reader.sampling_params = known | {"[layout]": layout}
    return reader


def _layout_file(prepare: Callable[[Image.Image], Image.Image], page: Image.Image) -> bytes:
    return _png(prepare(page))


def _png(picture: Image.Image) -> bytes:
    """At level 1, that of a page's layout takes 35 ms instead of 85, and has no more bytes."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def _with_more(
    prepare: Callable[..., Prepared], policy: dict[str, Any], page: Image.Image, blocks: list[ContentBlock], *more: Any
) -> Prepared:
    """What MinerU's client would ask about blocks, some of which it takes off the list; pictures as files. With each
    goes its block's draft, and the ``policy`` of all."""
    drafts = {id(block): {"draft": block.pop("draft", None)} for block in blocks}
    pictures, prompts, params, places = prepare(page, blocks, *more)
    given = [with_more(each, **policy, **drafts[id(blocks[place])]) for each, place in zip(params, places)]
    return [_png(picture) for picture in pictures], prompts, given, places


def with_more(params: SamplingParams | None, **more: Any) -> SamplingParams:
    """The same with what only our server knows, of SDK_NAMES; None is not stated."""
    params = copy(params) if params else SamplingParams()
    vars(params).update(more)
    return params


SIZE = (850, 1100)
HEADING = "Report of the year"
LINES = (
    "The house was built in the spring, and the garden was laid out",
    "in the summer of the same year. Its walls are of stone, and the",
    "roof was made anew after the storm. Nothing else was changed, so",
    "that visitors still find the rooms as they have always been.",
)


def known_page() -> Image.Image:
    """A heading and two paragraphs, black on white (RGB)."""
    page = Image.new("RGB", SIZE, "white")
    draw = ImageDraw.Draw(page)
    draw.text((100, 100), HEADING, "black", ImageFont.load_default(36))
    for number, line in enumerate((*LINES, "", *LINES)):
        draw.text((100, 200 + 32 * number), line, "black", ImageFont.load_default(22))
    return page
