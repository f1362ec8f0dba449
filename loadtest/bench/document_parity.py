"""Our greedy tokens against `transformers`' on held-out pages, through the server (`make bench NAME=document_parity`).

MinerU's own client reads the default document model's held-out pages over a real tritonserver on the CPU, in float32.
Every request that it sends (layouts, and the crops of what they said) is kept with the token ids of its answer. Then
`transformers` generates the answer to the same prompt, prepared by its own processor, and the same uint8 pixels (those
of resized pictures differ by a grey level or two between the two sides). The penalties that it does not know are a
LogitsProcessor here. Prints a row for each answer that differs: where, and how near the two tokens are.
Exit code 1 where one differs.
"""

import argparse
import asyncio
import io
import math
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import figures
import torch
from PIL import Image
from rich.console import Console
from rich.progress import Progress, track
from serving import Setup, serve
from transformers import LogitsProcessor, LogitsProcessorList, Qwen2VLForConditionalGeneration

from tessera.preprocess.preprocessor import Preprocessor, PreprocessRequest
from tessera_documents import TesseraVlmClient, mineru_client
from tessera_documents.job import quiet

sys.path += [str(figures.ROOT / "build"), str(figures.ROOT / "build" / "document_model")]
CHECKPOINT = figures.ROOT / "build" / "document_model" / "checkpoint"
PAGES_AT_A_TIME = 4
PATCH = 14
ROWS, PIXELS = 16, 5_000_000
"""How many answers `transformers` generates at a time, and of pictures with how many pixels in all."""
PAGE: ContextVar[int] = ContextVar("page")


class Asked(NamedTuple):
    """A request as MinerU's client sent it, with one picture, and the token ids of the server's answer with what ended
    it."""

    page: int
    messages: list[dict[str, Any]]
    options: dict[str, Any]
    tokens: list[int]

    def part(self, kind: str) -> Any:
        """The prompt, by "text", or the picture's bytes, by "image"."""
        return next(part[kind] for part in self.messages[-1]["content"] if part["type"] == kind)

    @property
    def picture(self) -> Image.Image:
        return Image.open(io.BytesIO(self.part("image")))


class Difference(NamedTuple):
    """At ``place``, the first that differs, the server has token ``ours`` and `transformers` ``theirs``; None where the
    answer has ended. ``gap``: between their logits, under penalties; NaN where the answer has ended."""

    place: int
    ours: int
    theirs: int | None
    gap: float


class Penalties(LogitsProcessor):
    """Those of MinerU's client, for each row its own; counted over the answer alone, as the server does."""

    def __init__(self, prompt: int, options: Sequence[dict[str, Any]]) -> None:
        def column(name: str) -> torch.Tensor:
            return torch.tensor([[float(each.get(name) or 0)] for each in options])

        self._prompt, self._once, self._each = prompt, column("presence_penalty"), column("frequency_penalty")
        self._sizes = [int(each.get("no_repeat_ngram_size") or 0) for each in options]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        answers = input_ids[:, self._prompt :]
        counts = torch.zeros_like(scores).scatter_add_(1, answers, torch.ones_like(answers, dtype=scores.dtype))
        scores = scores - self._once * (counts > 0) - self._each * counts
        for row, (answer, size) in enumerate(zip(answers.tolist(), self._sizes)):
            if 1 < size <= len(answer):
                text = "".join(map(chr, answer))
                tail, at = text[1 - size :], -1
                while (at := text.find(tail, at + 1, -1)) >= 0:
                    scores[row, answer[at + size - 1]] = -torch.inf
        return scores


class Theirs:
    """`transformers` on the same checkpoint, and our preprocessing for the pixels."""

    def __init__(self, checkpoint: Path) -> None:
        from checkpoints import load_processor

        self.model = Qwen2VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.processor = load_processor(checkpoint)
        self._preprocessor = Preprocessor.from_checkpoint(checkpoint)
        levels = self.processor.image_processor.image_mean, self.processor.image_processor.image_std
        self._mean, self._std = (torch.tensor(values).view(1, 3, 1, 1) for values in levels)

    def _pixels(self, asked: Asked) -> torch.Tensor:
        """float32 [patches, 3 * frames * side * side] as the processor orders them, both frames the same."""
        messages = [{"role": "user", "content": [{"type": "image"}]}]
        pixels = self._preprocessor(PreprocessRequest(messages=messages, images=[asked.part("image")])).pixels
        patches = torch.from_numpy(pixels).view(-1, PATCH, PATCH, 3).permute(0, 3, 1, 2)
        return ((patches / 255 - self._mean) / self._std)[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1)

    @torch.inference_mode()
    def differences(self, requests: Sequence[Asked]) -> list[Difference | None]:
        """For each request where the answers part; None where they are equal."""
        texts = [self.processor.apply_chat_template(each.messages, add_generation_prompt=True) for each in requests]
        pictures = [each.picture.convert("RGB") for each in requests]
        inputs = self.processor(images=pictures, text=texts, padding=True, return_tensors="pt")
        length = inputs["input_ids"].shape[1]
        found = self.model.generate(
            **inputs | {"pixel_values": torch.cat([self._pixels(each) for each in requests])},
            do_sample=False,
            max_new_tokens=max(each.options["max_tokens"] for each in requests),
            logits_processor=LogitsProcessorList([Penalties(length, [each.options for each in requests])]),
            return_dict_in_generate=True,
            output_scores=True,
        )
        rows = found.sequences[:, length:].tolist()
        return [
            difference(each.tokens, row, [step[i] for step in found.scores])
            for i, (each, row) in enumerate(zip(requests, rows))
        ]


def difference(ours: Sequence[int], theirs: Sequence[int], scores: Sequence[torch.Tensor]) -> Difference | None:
    """``theirs`` may go on behind the answer's end, as rows of a batch do; ``scores``: logits of each, [vocabulary]."""
    for place, (own, other) in enumerate(zip_longest(ours, theirs[: len(ours)])):
        if other is None:
            return Difference(place, own, None, math.nan)
        if own != other:
            return Difference(place, own, other, float(scores[place][other] - scores[place][own]))
    return None


def read_pages(checkpoint: Path, count: int, max_tokens: int) -> list[Asked]:
    """Every request about the first held-out pages, answered by the server."""
    with serve(Setup(checkpoint=checkpoint, settings={"dtype": "float32"})) as server, Progress() as progress:
        return asyncio.run(_read_pages(server.grpc[0], count, max_tokens, progress))


async def _read_pages(url: str, count: int, max_tokens: int, progress: Progress) -> list[Asked]:
    import pages

    found: list[Asked] = []
    slots, task = asyncio.Semaphore(PAGES_AT_A_TIME), progress.add_task("the server", total=count)
    with TesseraVlmClient(url, max_tokens=max_tokens) as vlm:
        chat = vlm.aio_client.chat

        async def kept(messages: list[dict[str, Any]], **options: Any) -> Any:
            answer = await chat(messages, **options, logprobs=1)  # which come with the tokens' ids
            found.append(Asked(PAGE.get(), messages, options, [entry["token_id"] for entry in answer.logprobs]))
            return answer

        vlm.aio_client.chat = kept  # type: ignore[method-assign]
        reader = mineru_client(vlm)

        async def read(number: int) -> None:
            async with slots:
                PAGE.set(number)
                picture = await asyncio.to_thread(lambda: pages.sample(number, "heldout").picture)
                await reader.aio_two_step_extract(Image.fromarray(picture).convert("RGB"))
                progress.advance(task)

        await asyncio.gather(*map(read, range(count)))
    return found


def batches(requests: Sequence[Asked]) -> Iterator[list[Asked]]:
    """Answers of about one length together: a batch is as slow as its longest."""
    batch: list[Asked] = []
    pixels = 0
    for each in sorted(requests, key=lambda each: (len(each.tokens), each.page)):
        size = math.prod(each.picture.size)
        if batch and (len(batch) == ROWS or pixels + size > PIXELS):
            yield batch
            batch, pixels = [], 0
        batch.append(each)
        pixels += size
    if batch:
        yield batch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--pages", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=2048, help="of an answer (%(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    quiet()
    requests = read_pages(arguments.checkpoint, arguments.pages, arguments.max_tokens)
    theirs, console, differ = Theirs(arguments.checkpoint), Console(stderr=True), []
    for batch in track([*batches(requests)], "transformers", console=console):
        for asked, found in zip(batch, theirs.differences(batch)):
            if found:
                differ.append(asked)
                console.print(
                    f"page {asked.page}, {asked.part('text').strip()} {len(asked.tokens)} tokens: {found}",
                    highlight=False,
                )
    whole = set(range(arguments.pages)) - {asked.page for asked in differ}
    notes = {"answers": len(requests), "answers_equal": len(requests) - len(differ), "pages": arguments.pages}
    notes["tokens"] = sum(len(asked.tokens) for asked in requests)
    console.print(f"{notes['answers_equal']} of {len(requests)} answers are equal, {len(differ)} differ")
    figures.emit("parity.documents", len(whole) / arguments.pages, "share of pages equal", ceiling=1, **notes)
    return 1 if differ else 0
