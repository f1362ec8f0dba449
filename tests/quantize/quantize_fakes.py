"""A labelled folder of small pictures, tiny checkpoints with bodies of every name, and jobs on them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import tiny_checkpoints
import torch

from tessera.engine.engine import Engine
from tessera.engine.sequence import Request, SamplingParameters
from tessera.models.registry import read_config
from tessera.preprocess.preprocessor import Prepared
from tessera.settings.stages import EngineConfig
from tessera_evaluation.datasets import folder_items
from tessera_quantize import checkpoint as written
from tessera_quantize import report
from tessera_quantize.body import Body
from tessera_quantize.methods import Fp8Weight, Int4Weight, Recipe, fit_grid, round_to
from tessera_quantize.run import Job, finish, run
from tessera_quantize.samples import Sample

QUESTIONS = ("What is this?", "Is it red?", "How many are there?", "Is there a lamp?", "Where?", "What colour?")


def labelled_folder(folder: Path) -> Path:
    """Six pictures of coloured noise, a question each."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["file,question,answer"]
    for number, question in enumerate(QUESTIONS):
        noise = np.random.default_rng(number).integers(0, 255, (5, 4, 3), np.uint8)
        cv2.imwrite(str(folder / f"{number}.png"), cv2.resize(noise, (200, 260), interpolation=cv2.INTER_CUBIC))
        lines.append(f"{number}.png,{question},{'yes' if number % 2 else 'no'}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    return folder


def checkpoint(folder: Path, body: str, dtype: torch.dtype = torch.bfloat16, **shape: Any) -> Path:
    """A layout ("native", "chat" or "qianfan") and a body, with random weights."""
    layout, text = body.split()
    shape.setdefault("text", "llama" if text == "internlm2" else text)
    native = tiny_checkpoints.hf_native(folder / "native", tiny_checkpoints.Shape(**shape), dtype=dtype)
    if layout == "qianfan":
        return tiny_checkpoints.as_qianfan(native, folder / "qianfan")
    return native if layout == "native" else tiny_checkpoints.as_internvl_chat(native, folder / "chat", text=text)


def job(source: Path, out: Path, pictures: Path, method: str = "awq", **changes: Any) -> Job:
    """Without recall, which needs the engine; four questions to calibrate on, two held out."""
    items = folder_items(pictures)
    recipe = Recipe(method, group_size=32, symmetric=changes.pop("symmetric", False))
    return Job(source, out, recipe, items[:4], items[4:], **{"policies": (), "compare": False} | changes)


def made(job: Job) -> Path:
    """The folder that a run wrote, its report in it."""
    torch.set_num_threads(1)
    rows = run(job, quiet)
    report.write(job.work / job.recipe.method / "checkpoint" / "quantization", job, rows)
    finish(job)
    return job.out


def greedy(folder: Path, prompts: Sequence[tuple[Any, ...]], tokens: int, positions: Any = None) -> list[list[int]]:
    """The engine's tokens for each prompt, given as the arguments of a Request."""
    engine = Engine.from_checkpoint(folder, EngineConfig(max_model_len=128))
    sampling = SamplingParameters(max_tokens=tokens, ignore_eos=True)
    requests = [Request("r", *prompt, sampling, positions=positions) for prompt in prompts]
    answers: dict[int, list[int]] = {request.number: [] for request in requests}
    for request in requests:
        engine.submit(request)
    while engine.has_work():
        for number, token, _ in engine.step().tokens:
            answers[number].append(token)
    return list(answers.values())


def layer_by_layer(folder: Path, prepared: Prepared, rows: torch.Tensor, fp8: bool = False) -> torch.Tensor:
    """The prompt's logits [n, vocabulary] as calibration and the report see them, in float32; ``fp8``: of inputs that
    are rounded as a product in FP8 sees them."""
    body = Body(read_config(folder), torch.float32, torch.device("cpu"))
    ids, found = torch.from_numpy(prepared.input_ids.astype(np.int64)), prepared.positions
    positions = torch.arange(len(ids))[None] if found is None else torch.from_numpy(found).long()
    places = np.concatenate([np.arange(start, start + length) for start, length in prepared.spans])
    hidden = body.embed(ids, torch.from_numpy(places), rows)
    for index in range(body.layers):
        body.load(body.tensors(index))
        hidden = body.run(hidden, positions, fp8)
    return body.logits(hidden)


@contextmanager
def quiet(what: str, steps: int) -> Iterator[Any]:
    yield lambda: None


def sample(hidden: torch.Tensor) -> Sample:
    """Rows [n, hidden] as one sample of words."""
    count = len(hidden)
    return Sample(hidden, torch.arange(count)[None], torch.full((count,), 1 / count), 1, count)


def rtn(weight: torch.Tensor, group_size: int, symmetric: bool, dtype: torch.dtype) -> Int4Weight:
    return round_to(fit_grid(weight, group_size, symmetric, dtype), weight, dtype)


def dequantized(made: Int4Weight | Fp8Weight) -> torch.Tensor:
    """What is read of what is stored."""
    return written.dequantized(written.stored_tensors(made, symmetric=False))
