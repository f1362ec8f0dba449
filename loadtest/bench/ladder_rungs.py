"""The rungs of the ladder: what each adds to the one below it, and the server that has it and all below.

What is a setting of ours is set. What never had an off switch is brought here: a model repository of the rung's own,
with `ladder_stage.py` in place of a stage of ours, or with another line in a config.pbtxt.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from figures import ROOT
from serving import DEFAULT_CHECKPOINT, Setup
from workloads import WORKLOADS, Workload

from tessera_evaluation.plan import parse_policy
from tessera_quantize.checkpoint import quantization_config

SHAPE = ROOT / "loadtest" / "shapes" / "internvl3-8b-shape"
TRANSFORMERS = "transformers"
"""The foot of the ladder, which is no rung: the plain loop (ladder_transformers.py)."""
OLD_STAGE = ROOT / "loadtest" / "bench" / "ladder_stage.py"
LABELS = ("yes", "no")


@dataclass(frozen=True)
class OldWay:
    """How something was done below a rung, where no setting says it. ``stage``: whose model.py is OLD_STAGE, or, if
    there is a ``line``, in whose config.pbtxt the second of these stands for the first."""

    stage: str = ""
    line: tuple[str, str] = ("", "")


PILLOW = OldWay("preprocess")
EAGER_VIT = OldWay("vision_encoder")
EAGER_DECODER = OldWay("language_model")
_CPU_ONLY = '"FORCE_CPU_ONLY_INPUT_TENSORS" value {{ string_value: "{}"'
ROWS_ON_CPU = OldWay("language_model", (_CPU_ONLY.format("no"), _CPU_ONLY.format("yes")))
ONE_REQUEST = OldWay("vision_encoder", ("max_batch_size: 64", "max_batch_size: 1"))
NO_MPS = OldWay()


@dataclass(frozen=True)
class Job(Workload):
    """W2's pictures and prompt, asked for otherwise."""

    tile_policy: Mapping[str, Any] = field(default_factory=dict)
    labels: tuple[str, ...] = ()

    @property
    def sampling(self) -> dict[str, Any]:
        if self.labels:
            return {"choices": list(self.labels), "tile_policy": dict(self.tile_policy)}
        return super().sampling | {"tile_policy": dict(self.tile_policy)}


@dataclass(frozen=True)
class Rung:
    """One optimisation. ``settings`` hold from here on, ``ends`` no longer.

    ``server`` names the rung whose server it is asked of, where it is only asked otherwise. ``int4``: of a checkpoint
    in 4 bits. ``seed``: what the report that this project repeats says of it. ``nothing``: the likely reason
    where it gives nothing.
    """

    name: str
    title: str
    settings: Mapping[str, str] = field(default_factory=dict)
    ends: tuple[OldWay, ...] = ()
    server: str = ""
    int4: bool = False
    seed: str = ""
    nothing: str = ""


_RUNGS = (
    Rung("start",
        "our stages, all of it off: Pillow, eager ViT one tile at a time, rows over the CPU, no CUDA graph, no MPS, "
        "no prefix cache, bf16", {"preprocess.instances": "1", "vision_encoder.visual_infer_batch_size": "1",
            "language_model.prefix_cache": "off", "quantization": "checkpoint"}),
    Rung("graph_vit", "ViT as CUDA graphs, with our kernels", ends=(EAGER_VIT,), seed="30 ms less a batch"),
    Rung("graph_decoder", "language model as CUDA graphs", ends=(EAGER_DECODER,),
        nothing="with many in flight, steps are full of prompts, whose kernels are longer than their launches"),
    Rung("fast_preprocessing", "OpenCV in place of Pillow", {"preprocess.resize": "fast"}, (PILLOW,),
        seed="23.67 to 12.03 ms a picture",
        nothing="with several in flight the GPU sets the pace, and pictures are prepared meanwhile"),
    Rung("tile_policy", "the cheapest tile policy", server="fast_preprocessing",
        seed="3,328 to 512 tokens: twice the throughput"),
    Rung("rows_on_gpu", "rows stay on the GPU", ends=(ROWS_ON_CPU,), seed="with TensorRT's ViT 70 ms less",
        nothing="the 1,792 rows of a picture are 12.8 MB, a few milliseconds' way"),
    Rung("batching", "batches of 16 tiles of many requests, eight processes for preprocessing",
        {"vision_encoder.visual_infer_batch_size": "16", "preprocess.instances": "8"}, (ONE_REQUEST,),
        nothing="a request alone shares its forwards with nobody"),
    Rung("mps", "MPS: ViT and language model on the GPU at once", ends=(NO_MPS,),
        nothing="a request alone is in one stage at a time; with many, either stage fills the GPU by itself"),
    Rung("prefix_cache", "prefix cache", {"language_model.prefix_cache": "content"}, seed="no figure",
        nothing="distinct pictures have only the words before them in common; it is counted on W6"),
    Rung("labels", "scores of the labels in place of an answer", server="prefix_cache",
        nothing="the steps of four tokens run beside other requests' prompts"),
    Rung("fp8_body", "language model in FP8", {"quantization": "fp8-language"}),
    Rung("fp8_vit", "ViT in FP8", {"quantization": "fp8"},
        nothing="the forward of one tile is a small part of a lone answer's time"),
    Rung("int4", "language model in 4 bits (AWQ, GPTQ) in place of FP8", {"quantization": "fp8-vision"}, int4=True,
        seed="mixed", nothing="a prompt's time is arithmetic, which weights of 4 bits do not lessen"),
)  # fmt: skip
RUNGS = {rung.name: rung for rung in _RUNGS}
NAMES = tuple(RUNGS)
OLD_WAYS = (PILLOW, EAGER_VIT, EAGER_DECODER, ROWS_ON_CPU, ONE_REQUEST, NO_MPS)
TILE_POLICY, BATCHING, WITH_LABELS = map(NAMES.index, ("tile_policy", "batching", "labels"))
#: rungs that change what a GPU does, and no number of an answer
GPU_ONLY = frozenset({"rows_on_gpu", "graph_vit", "batching", "mps", "graph_decoder", "prefix_cache"})
#: requests in flight, by the job: before batching, and with it. Enough that nothing a rung has waits for work; more
#: would only make answers wait, and the run longer.
IN_FLIGHT = ({"equal": 4, "policy": 8}, {"equal": 16, "policy": 48})
KINDS = {
    "equal": "At equal tokens",
    "policy": "By the tile policy",
    "W6": "Four questions about each picture, one after the other (W6)",
}
"""What is asked, and the title of its table."""
FLIGHTS = ("many", "one")
"""Requests in flight: as many as a rung can use, where its requests a second count, and one, where its time does."""


def server_of(name: str) -> str:
    """The rung whose server a rung is asked of; the foot of the ladder is its own."""
    return RUNGS[name].server or name if name in RUNGS else name


def accepted_policy() -> str:
    """What `tessera plan` recommends by its figures of the held-out set."""
    return str(json.loads((ROOT / "docs" / "tile_policies.json").read_text())["recommended"])


def jobs(name: str) -> dict[str, Job]:
    """What is asked at a rung: "equal", tokens as W2 has them, and from the tile policy on "policy"; in the order of
    the ladder, where the labels' scores take the place of the tokens only of the latter."""
    place, workload = NAMES.index(name), WORKLOADS["W2"]
    about = {"width": workload.width, "height": workload.height}
    flight = IN_FLIGHT[place >= BATCHING]
    own = Job("W2", tokens=workload.tokens, concurrency=flight["equal"], **about, tile_policy={"max_tiles": 12})
    if place < TILE_POLICY:
        return {"equal": own}
    policy = replace(own, concurrency=flight["policy"], tile_policy=parse_policy(accepted_policy()))
    if place >= WITH_LABELS:
        policy = replace(policy, tokens=1, labels=LABELS)
    return {"policy": policy} if RUNGS[name].server else {"equal": own, "policy": policy}


@dataclass(frozen=True)
class Pair:
    """A rung and what it is measured against, asked the same kind of job."""

    rung: str
    below: str
    kind: str

    @property
    def servers(self) -> tuple[str, str]:
        """Whose servers both are asked of: the one above, the one below."""
        return server_of(self.rung), server_of(self.below)

    @property
    def ends(self) -> bool:
        """Whether it is no step but the whole ladder."""
        return self.below == TRANSFORMERS and self.rung != NAMES[0]

    def job(self, name: str) -> Workload:
        """What one of them is asked. Below the rung of the tile policy there is none: it is asked at equal tokens."""
        if self.kind == "W6":
            return replace(WORKLOADS["W6"], concurrency=IN_FLIGHT[True]["policy"])
        known = jobs(NAMES[0] if name == TRANSFORMERS else name)
        return known.get(self.kind) or known["equal"]


def pairs() -> list[Pair]:
    """Each rung against the one below, from the foot up; what the prefix cache is for; and the ends of the ladder."""
    found = []
    for place, name in enumerate(NAMES):
        for kind in [*jobs(name), *(["W6"] if name == "prefix_cache" else [])]:
            same = [lower for lower in NAMES[:place] if kind in jobs(lower)]
            found.append(Pair(name, (same or NAMES[:place] or (TRANSFORMERS,))[-1], kind))
    return found + [Pair(NAMES[-1], TRANSFORMERS, kind) for kind in ("equal", "policy")]


def steps(kind: str) -> list[Pair]:
    """The pairs whose ratios chain from the foot to the top; the policy's begin at equal tokens."""
    own = [pair for pair in pairs() if not pair.ends]
    first = [pair for pair in own if pair.kind == "equal" and NAMES.index(pair.rung) < TILE_POLICY]
    return [*(first if kind == "policy" else ()), *(pair for pair in own if pair.kind == kind)]


def kept_ways(name: str) -> list[OldWay]:
    """The old ways that still hold at a rung."""
    ended = [way for rung in _RUNGS[: NAMES.index(name) + 1] for way in rung.ends]
    return [way for way in OLD_WAYS if way not in ended]


def settings(name: str) -> dict[str, str]:
    """All settings of a rung's server that are not the defaults of a GPU."""
    rungs = _RUNGS[: NAMES.index(name) + 1]
    return {key: value for rung in rungs for key, value in rung.settings.items()}


def setup(
    name: str,
    folder: Path,
    gpus: tuple[str, ...],
    checkpoint: Path | None = None,
    share: float = 0.9,
    more: Mapping[str, str] = MappingProxyType({}),
) -> Setup:
    """The server of a rung; what it needs is written to ``folder``. ``checkpoint``: None is InternVL3-8B's shape with
    random weights. ``share``: of the GPU's memory. ``more``: settings of every rung."""
    rung, ways = RUNGS[name], kept_ways(name)
    shape = int4_shape(folder / "int4_shape") if rung.int4 and checkpoint is None else SHAPE
    return Setup(
        checkpoint=checkpoint or shape,
        gpus=gpus,
        settings=settings(name) | {"gpu_memory": str(share), **more},
        random_weights=checkpoint is None,
        mps=NO_MPS not in ways,
        repository=repository(ways, folder / "model_repository"),
    )


def repository(ways: list[OldWay], folder: Path) -> Path:
    """A copy of the model repository with these old ways in it."""
    shutil.copytree(ROOT / "model_repository", folder, ignore=shutil.ignore_patterns("__pycache__"))
    for way in ways:
        config = folder / way.stage / "config.pbtxt"
        if any(way.line):
            text = config.read_text()
            if text.count(way.line[0]) != 1:
                raise RuntimeError(f"{config}: expected once {way.line[0]!r}")
            config.write_text(text.replace(*way.line))
        elif way.stage:
            shutil.copyfile(OLD_STAGE, folder / way.stage / "1" / "model.py")
    return folder


def int4_shape(folder: Path, shape: Path = SHAPE) -> Path:
    """A shape as `tessera quantize` writes it with AWQ or GPTQ, without weights."""
    shutil.copytree(shape, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    file = folder / "config.json"
    vision = ("re:.*vision_tower.*", "re:.*multi_modal_projector.*")
    settings = quantization_config("awq", 128, True, ("lm_head", *vision))
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": settings}))
    return folder


def recall_checkpoint(name: str, int4: Path | None) -> Path | None:
    """What a rung's recall is measured on; None where there is no such checkpoint."""
    return int4 if RUNGS[name].int4 else DEFAULT_CHECKPOINT
