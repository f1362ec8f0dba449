"""The foot of the ladder: W2's job in the plain loop that transformers' own pages show, one picture at a time or in
batches.

Pictures are opened and cut by transformers' processor on Pillow, then `generate` gives four greedy tokens (bf16, SDPA);
while pictures are prepared the GPU waits, as in any such loop.
"""

import io
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from gpu_power import GpuPower
from PIL import Image
from workloads import PROMPT, WORKLOADS, Pictures

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "build"))

ANSWER_TOKENS = 16  # more than yes or no has
ROUNDS = 4  # of one picture, in a turn


class Turn(NamedTuple):
    """What one of a pair gave in its turn. ``p50`` in seconds; ``in_flight``: requests, or pictures of a batch."""

    req_s: float
    p50: float
    prompt_tokens: int
    in_flight: int
    watts: float | None


class Loop:
    """Model and processor of a checkpoint folder."""

    def __init__(self, checkpoint: Path, device: str, random_weights: bool) -> None:
        from checkpoints import load_processor
        from transformers import AutoConfig, AutoModelForImageTextToText

        self.dtype = torch.float32 if device == "cpu" else torch.bfloat16
        about = {"dtype": self.dtype, "attn_implementation": "sdpa"}
        if random_weights:
            torch.manual_seed(0)
            with torch.device(device):  # a GPU draws 8 billion numbers in no time
                model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(checkpoint), **about)
        else:
            model = AutoModelForImageTextToText.from_pretrained(checkpoint, **about).to(device)
        self.model = model.eval()
        self.processor = load_processor(checkpoint)

    def inputs(self, pictures: Sequence[bytes], questions: Sequence[str]) -> dict[str, torch.Tensor]:
        """What the model takes, on its device."""
        opened = [Image.open(io.BytesIO(picture)).convert("RGB") for picture in pictures]
        texts = []
        for question in questions:
            content = [{"type": "image"}, {"type": "text", "text": question}]
            turn = [{"role": "user", "content": content}]
            texts.append(self.processor.apply_chat_template(turn, add_generation_prompt=True))
        made = self.processor(images=opened, text=texts, return_tensors="pt", padding=True)
        made["pixel_values"] = made["pixel_values"].to(self.dtype)
        return {name: tensor.to(self.model.device) for name, tensor in made.items()}

    @torch.inference_mode()
    def tokens(self, inputs: dict[str, torch.Tensor], least: int, most: int) -> torch.Tensor:
        """The greedy answers' tokens [batch, least .. most], on the CPU."""
        answers = self.model.generate(**inputs, do_sample=False, min_new_tokens=least, max_new_tokens=most)
        return answers[:, inputs["input_ids"].shape[1] :].cpu()

    def answer(self, picture: bytes, question: str) -> str:
        """The answer in words."""
        (tokens,) = self.tokens(self.inputs([picture], [question]), 1, ANSWER_TOKENS)
        return str(self.processor.tokenizer.decode(tokens, skip_special_tokens=True))


def turn(loop: Loop, batch: int, seed: int, gpus: Sequence[str]) -> Turn:
    """W2's job in batches of this size: a whole one, or four of one picture."""
    tokens, spent, prompt_tokens = WORKLOADS["W2"].tokens, [], 0
    rounds = ROUNDS if batch == 1 else 1
    dealt = Pictures(WORKLOADS["W2"], seed, batch * rounds)
    with GpuPower(gpus) as power:
        began = time.perf_counter()
        for _ in range(rounds):
            begins = time.perf_counter()
            inputs = loop.inputs([dealt.deal() for _ in range(batch)], [PROMPT] * batch)
            answers = loop.tokens(inputs, tokens, tokens)
            if answers.shape != (batch, tokens):
                raise RuntimeError(f"asked for {batch} answers of {tokens} tokens, got {list(answers.shape)}")
            prompt_tokens = inputs["input_ids"].shape[1]
            spent.append(time.perf_counter() - begins)
        draw = power.between(began, time.perf_counter())
    return Turn(batch * rounds / sum(spent), median(spent), prompt_tokens, batch, draw and draw.watts)


@contextmanager
def apart(*loop: Any) -> Iterator[Callable[..., Turn]]:
    """``turn`` without its loop, which is made of these arguments in a process of its own: all that it holds of a GPU
    goes with it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _make, loop) as pool:
        yield lambda *asked: pool.submit(_turn, *asked).result()


_loop: list[Loop] = []


def _make(*loop: Any) -> None:
    _loop.append(Loop(*loop))
    _turn(1, 0, ())  # the first picture takes longer


def _turn(*asked: Any) -> Turn:
    return turn(_loop[0], *asked)
