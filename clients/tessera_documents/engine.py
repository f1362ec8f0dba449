"""What finds the blocks of a page and what reads them: MinerU2.5 does both. PaddleOCR-VL reads alone: elements that
another server's model finds, or pages as they are."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from mineru_vl_utils.structs import ContentBlock
from mineru_vl_utils.vlm_client import SamplingParams
from PIL import Image

from tessera_client.messages import ServedModel
from tessera_documents.edges import clear_of_letters
from tessera_documents.text_layer import TextLayer
from tessera_documents.vlm_client import PRUNED, TesseraVlmClient, known_page, mineru_client, with_more
from tessera_jobs.asker import described
from tessera_wire.errors import InvalidRequest

#: by a block's type, of PaddleOCR-VL's model card
TASKS = {"table": "Table Recognition:", "equation": "Formula Recognition:", "[default]": "OCR:"}
CHART = "Chart Recognition:"
GREEDY = SamplingParams(temperature=0.0)
Blocks = list[ContentBlock]


def drafted(blocks: Blocks, text: TextLayer | None) -> Blocks:
    """Each with what the page's text has of it as its ``draft``."""
    if text is not None:
        for block in blocks:
            block["draft"] = text.draft(block.type, block.bbox, block.angle)
    return blocks


@dataclass
class Mineru:
    """MinerU's own client: layout, then crops by their type.

    ``asked`` of each method are a request's priority and the slots of all that are under way.
    """

    vlm: TesseraVlmClient
    image_analysis: bool = False
    prune: Sequence[str] = ()
    """As for :func:`mineru_client`."""

    @property
    def servers(self) -> list[TesseraVlmClient]:
        """First the one whose model reads."""
        return [self.vlm]

    def made_from(self, served: Sequence[ServedModel]) -> dict[str, Any]:
        """What results depend on besides the first model and what is pruned; earlier versions stated none of it."""
        return {"image_analysis": True} if self.image_analysis else {}

    def use(self, threads: Executor) -> None:
        """Before anything else."""
        self.client = mineru_client(self.vlm, self.prune, executor=threads, image_analysis=self.image_analysis)

    async def find(self, page: Image.Image, *asked: Any) -> Blocks:
        blocks = await self.client.aio_layout_detect(page, *asked)
        await asyncio.to_thread(clear_of_letters, page, blocks)
        return blocks

    async def read(self, page: Image.Image, text: TextLayer | None, *asked: Any) -> Blocks:
        """The page's blocks with what they say, in reading order."""
        found = drafted(await self.find(page, *asked), text)
        return await self.client.aio_extract_with_layout(page, found, *asked)

    async def check(self, served: Sequence[ServedModel], *asked: Any) -> None:
        """Raises InvalidRequest where the first of the models that are served finds nothing on a page of text."""
        if not await self.client.aio_layout_detect(known_page(), *asked):
            words = f"the model at {self.vlm.client.url} ({described(served[0])}) reads no documents: it found nothing"
            remedy = "serve MinerU2.5, or the small one that comes with Tessera: tessera serve --default documents"
            raise InvalidRequest(f"{words} on a page of text", remedy)


@dataclass
class PaddleOcrVl:
    """Reads what ``layout`` finds, by the task of each block's type, and a chart's data; a page is one text where there
    is none. Crops and what becomes of the answers are MinerU's client's."""

    vlm: TesseraVlmClient
    layout: Mineru | None = None
    prune: Sequence[str] = ()
    """As for :func:`mineru_client`."""

    @property
    def servers(self) -> list[TesseraVlmClient]:
        return [self.vlm, *(self.layout.servers if self.layout else ())]

    def made_from(self, served: Sequence[ServedModel]) -> dict[str, Any]:
        layout = served[1].checkpoint if self.layout else None
        return {"engine": "paddleocr-vl", "layout": layout}

    def use(self, threads: Executor) -> None:
        self.vlm.system_prompt = ""  # its turns begin with the picture
        params = {"[default]": GREEDY}
        self.client = mineru_client(self.vlm, self.prune, executor=threads, prompts=TASKS, sampling_params=params)
        if self.layout is not None:
            self.layout.use(threads)

    async def read(self, page: Image.Image, text: TextLayer | None, *asked: Any) -> Blocks:
        found = await self.layout.find(page, *asked) if self.layout else [ContentBlock("text", [0.0, 0.0, 1.0, 1.0])]
        blocks = await self.client.aio_extract_with_layout(page, drafted(found, text), *asked)
        await asyncio.gather(*(self._read_chart(page, block, *asked) for block in blocks if block.type == "chart"))
        return blocks

    async def _read_chart(
        self, page: Image.Image, block: ContentBlock, priority: int, slots: asyncio.Semaphore
    ) -> None:
        """MinerU's client understands charts by its own model's marks alone."""
        width, height = page.size
        left, top, right, bottom = block.bbox
        crop = page.crop((round(left * width), round(top * height), round(right * width), round(bottom * height)))
        params = with_more(GREEDY, **(PRUNED if "crops" in self.prune else {}))
        async with slots:
            block["content"] = (await self.vlm.aio_predict(crop, CHART, params, priority)).strip()

    async def check(self, served: Sequence[ServedModel], *asked: Any) -> None:
        """Raises InvalidRequest where what is served is another model, or what finds blocks finds none."""
        if served[0].model_type != "paddleocr_vl":
            words = f"the model at {self.vlm.client.url} ({described(served[0])}) is no PaddleOCR-VL"
            raise InvalidRequest(words, "leave --engine out for MinerU2.5 and what speaks its prompts")
        if self.layout is not None:
            await self.layout.check(served[1:], *asked)
