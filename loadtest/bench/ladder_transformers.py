"""The foot of the ladder: W2's job in the plain loop that transformers' own pages show, at several batch sizes.

Pictures are opened and cut by transformers' processor on Pillow, then `generate` gives four greedy tokens (bf16, SDPA);
while pictures are prepared the GPU waits, as in any such loop. Alone: `ladder --parts speed --rungs transformers`.
"""

from __future__ import annotations

import io
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, stdev
from typing import Any

import torch
from gpu_power import GpuPower
from PIL import Image
from workloads import PROMPT, WORKLOADS, Pictures

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "build"))

ANSWER_TOKENS = 16  # more than yes or no has
#: Student's t for 95 %, by the number of rounds
STUDENT = {3: 4.303, 5: 2.776, 10: 2.262}


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


def rounds(batch: int) -> int:
    """Timed batches of a size: as many as its figure needs and no more, for a large one takes seconds."""
    return 10 if batch == 1 else 5 if batch == 2 else 3


def measure(loop: Loop, batch: int, gpus: Sequence[str]) -> dict[str, Any]:
    """One line of the results: W2's job at a batch size, after one batch that is not counted."""
    tokens, spent, prompt_tokens = WORKLOADS["W2"].tokens, [], 0
    dealt = Pictures(WORKLOADS["W2"], random.randrange(1 << 30), batch * (1 + rounds(batch)))
    with GpuPower(gpus) as power:
        for number in range(1 + rounds(batch)):
            pictures = [dealt.deal() for _ in range(batch)]
            began = time.perf_counter()
            inputs = loop.inputs(pictures, [PROMPT] * batch)
            answers = loop.tokens(inputs, tokens, tokens)
            if answers.shape != (batch, tokens):
                raise RuntimeError(f"asked for {batch} answers of {tokens} tokens, got {list(answers.shape)}")
            prompt_tokens = inputs["input_ids"].shape[1]
            if number:
                spent.append(time.perf_counter() - began)
        ended = time.perf_counter()
    draw = power.between(ended - sum(spent), ended)
    rates = [batch / seconds for seconds in spent]
    return {
        "rung": "transformers",
        "job": "equal",
        "batch": batch,
        "req_s": batch * len(spent) / sum(spent),
        "ci95": STUDENT[len(spent)] * stdev(rates) / len(spent) ** 0.5,
        "p50_ms": 1e3 * median(spent),
        "p99_ms": 1e3 * max(spent),
        "tokens": tokens,
        "prompt_tokens": prompt_tokens,
        "requests": batch * len(spent),
        "concurrency": batch,
        **({} if draw is None else draw._asdict()),
    }
