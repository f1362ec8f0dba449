"""The stages' settings: of the engine; of how pictures and prompts are prepared, and what one request may ask for; of
how the vision stage runs. And what is none of theirs."""

import os
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from tessera.errors import ConfigError
from tessera.settings.gpu import ServerSettings
from tessera.settings.schema import QUANTIZATIONS, SWITCH, Sources, check, setting, settings_of, variable
from tessera_wire.command_line import nearest

VISION_QUANTIZATIONS, LANGUAGE_QUANTIZATIONS = (
    {name: each[stage] for name, each in QUANTIZATIONS.items()} for stage in range(2)
)
DTYPES = ("auto", "float32", "bfloat16", "float16")
_OF_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}  # flags of x86, features of ARM
_DRAFTED_FOR = 256  # sequences at most: for the rows of more no memory is kept back
_NOT_DETERMINISTIC = "deterministic is on, and it does not hold {}: turn it off, or {}"


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine; all sizes are per engine.

    ``device``: a torch device name. ``dtype``: "auto" (float32 on cpu, bfloat16 elsewhere), "float32", "bfloat16" or
    "float16". ``block_size``: tokens a key/value block. ``max_batched_tokens``: tokens one step may run.
    ``max_sequences``: sequences that may run at once; it stays below ``max_batched_tokens``, so that a step full of
    decodes still moves a prompt on. ``max_in_flight``: requests accepted at once, waiting ones included.
    ``max_model_len``: prompt + answer; None takes the checkpoint's context length. ``kv_cache_bytes``: 0 takes what
    ``max_sequences`` full contexts need, at most 1 GiB on the CPU, on a GPU what the engine's share leaves.
    ``kv_cache_dtype``: "auto" is the model's, "fp8" e4m3 with a scale a position and head (half the bytes of bfloat16).
    ``memory_bytes``: that share, weights included (settings/gpu.py divides a card); 0 is nine tenths of the card but
    ``embedding_pool_bytes``, for the rows of pictures whose requests wait or run. ``graph_batch_size``: decode steps of
    up to this many sequences run as CUDA graphs, and other small steps too; 0 records none. ``prefix_cache``: "content"
    reuses equal prefixes including pictures, "exclude" stops before the first picture, "off" reuses nothing.
    ``weights``: "random" draws them from ``seed`` instead of reading the checkpoint's. ``quantization``: "checkpoint"
    runs the weights as they are stored, "fp8" quantizes unquantized ones, all but the head's, while they are read (a
    user says it for both stages at once). ``attention``: a backend's name, or "auto". ``threads``: torch's own for its
    operations; 0 is one. ``drafts``: the most tokens that are proposed for a sequence and verified in one step; 0 none.
    ``deterministic``: answers and log probabilities keep their bits whatever else runs (docs/determinism.md).
    """

    device: str = "cpu"
    dtype: str = setting("auto", cuda="bfloat16", common=True, choices=DTYPES)
    block_size: int = setting(16, settable=False, least=1)
    max_batched_tokens: int = setting(8192, cpu=2048, least=1)
    max_sequences: int = setting(256, cpu=64, least=1)
    max_in_flight: int = setting(512, settable=False, least=1)
    max_model_len: int | None = setting(None, common=True, kind=int, least=2)
    kv_cache_dtype: str = setting("auto", choices=("auto", "fp8"))
    kv_cache_bytes: int = setting(0, cpu=512 << 20, least=0)
    memory_bytes: int = setting(0, settable=False, least=0, share="language")
    embedding_pool_bytes: int = setting(4 << 30, cuda=0, settable=False, least=0, share="embedding_pool")
    graph_batch_size: int = setting(256, settable=False, least=0)
    prefix_cache: str = setting("content", choices=("content", "exclude", "off"))
    weights: str = setting("checkpoint", common=True, choices=("checkpoint", "random"))
    quantization: str = setting("checkpoint", common=True, choices=LANGUAGE_QUANTIZATIONS)
    attention: str = setting("auto", settable=False)
    threads: int = setting(0, common=True, least=0)
    drafts: int = setting(15, least=0, most=15)
    deterministic: bool = setting(False, common=True, choices=SWITCH)
    seed: int = 0

    def __post_init__(self) -> None:
        check(self, "engine")
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(
                f"engine: device is {self.device!r}; it must be cpu or cuda (CUDA_VISIBLE_DEVICES says which GPU)"
            )
        if self.max_sequences >= self.max_batched_tokens:
            raise ConfigError(
                f"engine: max_sequences {self.max_sequences} must stay below max_batched_tokens "
                f"{self.max_batched_tokens}, or decodes could keep every prompt out"
            )
        if self.deterministic and self.device == "cpu" and self.threads > 1:  # one works from any value to any other
            raise ConfigError("engine: " + _NOT_DETERMINISTIC.format("with several threads", "leave threads out"))

    @property
    def max_rows(self) -> int:
        """Tokens that a step may choose, those behind drafts too."""
        return self.max_sequences + (3 * min(self.max_sequences, _DRAFTED_FOR) if self.drafts else 0)


@dataclass(frozen=True)
class Limits:
    """What one request may ask for.

    ``max_images``: pictures. ``max_cost``: the work of all of them together, in the family's units (InternVL: tiles);
    0: the family's limit. ``max_file_pixels``: of each picture. ``max_request_bytes``: of all pictures' files together.
    """

    max_images: int = setting(8, least=0)
    max_cost: int = setting(0, least=0)
    max_file_pixels: int = setting(50_000_000, least=1)
    max_request_bytes: int = setting(64 << 20, least=1)

    def __post_init__(self) -> None:
        check(self, "preprocess")


@dataclass(frozen=True)
class PreprocessSettings(Limits):
    """A deployment's settings. None means the checkpoint's own: how pictures are cut, context in tokens, system text.

    ``tile_policy``: how finely pictures are cut where a request does not say (docs/tile_policies.md; for models of
    native resolution docs/preprocessing.md), or a policy file's name (docs/cascade.md). ``resize``: reference, as the
    checkpoint was trained, or fast (docs/preprocessing.md). ``gpu_pixels``: JPEGs of at least this many pixels are left
    to the vision stage, to decode them on its GPU; 0 leaves it none.
    """

    resize: str = setting("reference", choices=("reference", "fast"))
    tile_policy: Any = setting(None, kind=str)
    context_length: int | None = setting(None, name="max_model_len", common=True, kind=int, least=2)
    system: str | None = None
    gpu_pixels: int = setting(0, common=True, least=0)


@dataclass(frozen=True)
class VisionSettings:
    """The deployment's choices.

    ``runner``: onnx on the CPU, graph (CUDA graphs) on a GPU, torch as the readable twin of both and for towers and
    dtypes that these do not take. ``infer_batch_size``: what the pictures of one forward may cost (InternVL: tiles;
    Qwen2-VL: pictures of 616 x 616 pixels, however these are spread); on the CPU tiles come twice that a thread, but
    for a large tower in onnx. ``threads`` of a forward; 0 is one on a GPU, and on the CPU, where forwards are most of
    the work, one for each core, up to eight. ``dtype``: auto is bfloat16, through the torch runner, for tiles on a CPU
    that multiplies it, where no quantization is asked for, else float32, which the onnx runner computes in.
    ``quantization``: fp8 has the tower's linear layers quantized when they are loaded (vision/fp8_tower.py), and is
    refused where that changes the rows too much; checkpoint runs them in FP8 if they are stored so. On the CPU a tower
    in FP8 gives the rows that a GPU would, through the torch runner: no onnx graph holds it, and it is slower. int8 is
    the onnx runner's (models/internvl/onnx_graph.py), and refused alike. ``cache_bytes``: for the rows of pictures seen
    before. ``memory_bytes``: all that the stage holds (vision/memory.py: what that is); 0 bounds nothing.
    ``vision_url``: another server's address, whose vision stage is asked in place of an own one
    (docs/remote_vision.md). ``tile_policy``: preprocess's, which says how large a picture may be that the tower takes
    whole; None: the checkpoint's. ``deterministic``: the engine's; a forward then has one picture or tile.
    """

    runner: str = setting("onnx", cuda="graph", settable=False, choices=("onnx", "torch", "graph"))
    infer_batch_size: int = setting(4, cuda=16, name="visual_infer_batch_size", least=1)
    threads: int = setting(0, common=True, least=0)
    dtype: str = setting("float32", cpu="auto", cuda="bfloat16", common=True, choices=DTYPES)
    quantization: str = setting("checkpoint", common=True, choices=VISION_QUANTIZATIONS)
    device: str = "cpu"
    random_weights: bool = setting(False, name="weights", common=True, choices={"checkpoint": False, "random": True})
    cache_bytes: int = setting(256 << 20, cuda=512 << 20, least=0)
    gpu_pixels: int = setting(0, common=True, least=0)
    memory_bytes: int = setting(0, settable=False, least=0, share="vision")
    vision_url: str = setting("", divides=True)
    tile_policy: Any = None
    deterministic: bool = setting(False, common=True, choices=SWITCH)

    def __post_init__(self) -> None:
        check(self, "vision_encoder")
        if self.deterministic and self.vision_url:
            told = _NOT_DETERMINISTIC.format("for another server's vision stage", "leave vision_url out")
            raise ConfigError(f"vision_encoder: {told}")
        if self.deterministic and self.gpu_pixels:
            told = _NOT_DETERMINISTIC.format("where pictures are decoded on the GPU", "leave gpu_pixels out")
            raise ConfigError(f"vision_encoder: {told}")
        if self.runner == "onnx" and self.device != "cpu":
            raise ConfigError("the onnx runner computes on the CPU; for anything else use graph or torch")
        if self.quantization == "int8" and (self.runner != "onnx" or self.dtype not in ("auto", "float32")):
            raise ConfigError("quantization int8-vision is the CPU's, and the onnx runner's; on a GPU take fp8-vision")
        if self.runner == "graph" and not self.device.startswith("cuda"):
            raise ConfigError(f"the graph runner records CUDA graphs; it needs device cuda, not {self.device!r}")
        if self.gpu_pixels and not self.vision_url and not self.device.startswith("cuda"):
            raise ConfigError(f"gpu_pixels has pictures decoded on the GPU; it needs device cuda, not {self.device!r}")

    @property
    def forward_threads(self) -> int:
        return self.threads or (min(8, len(os.sched_getaffinity(0))) if self.device == "cpu" else 1)

    def in_dtype(self, tiles: bool) -> "VisionSettings":
        """With another dtype in place of auto; ``tiles``: whether it is tiles that the tower takes."""
        if self.dtype != "auto":
            return self
        native = self.device != "cpu" or (tiles and self.quantization == "checkpoint" and multiplies_bfloat16())
        return replace(self, dtype="bfloat16" if native else "float32")


@cache
def multiplies_bfloat16() -> bool:
    """Whether this machine's CPU says that it has instructions for it (Zen 4, Xeons since the fourth generation)."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return False
    return not _OF_BFLOAT16.isdisjoint(text.split())


PREPROCESS, VISION, LANGUAGE = "preprocess", "vision_encoder", "language_model"
STAGES: dict[str, type] = {PREPROCESS: PreprocessSettings, VISION: VisionSettings, LANGUAGE: EngineConfig}
_ELSEWHERE = ("CACHE", "COMMIT", "CPUS", "DEFAULT", "GRPC_ADDRESS", "HEALTH_URL", "MEMORY", "REQUIRE_TENSORRT", "URL")
NO_SETTINGS = frozenset(f"TESSERA_{name}" for name in _ELSEWHERE)
"""Variables of ours that the launcher, the clients, the tests and docker-compose.yml read."""
# Where a service is called tessera, its pods are told its addresses.
_OF_KUBERNETES = re.compile(r"^TESSERA_(SERVICE_(HOST|PORT)|PORT)(_|$)")


def refuse_unknown(sources: Sources, *kinds: type) -> None:
    """Raises ConfigError for a parameter that none of these dataclasses has, and for a variable that is neither theirs
    nor known elsewhere; those of other stages are for these to judge."""
    known = {each.name: each for kind in kinds for each in settings_of(kind)}
    common = [each for kind in (ServerSettings, *STAGES.values()) for each in settings_of(kind) if each.common]
    variables = {variable(sources.stage, each) for each in (*known.values(), *common)} | NO_SETTINGS
    others = tuple(f"TESSERA_{stage}_".upper() for stage in STAGES if stage != sources.stage)
    for name in sources.parameters:
        # The Python backend's own parameters are in capitals.
        if name not in known and not name.isupper():
            raise ConfigError(f"{sources.stage}/config.pbtxt: unknown parameter {name!r}" + nearest(name, known))
    for name in sources.environment:
        if not name.startswith("TESSERA_") or name.startswith(others) or _OF_KUBERNETES.search(name):
            continue
        if name not in variables:
            raise ConfigError(f"unknown environment variable {name}" + nearest(name, variables))
