"""What the stages would say of a checkpoint, before a server is started: ``tessera check``, ``tessera serve --check``.

Their own readers read it, of its weights only what the headers of the files say.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tessera.errors import CheckpointError, TesseraError
from tessera.launcher.settings import ServerSetup
from tessera.models.registry import read_config, vision_tensors
from tessera.settings.gpu import GIB, weights_of
from tessera.settings.stages import LANGUAGE, PREPROCESS, VISION
from tessera.settings.user_cache import cache_folder, is_kept, remove_unused, write_whole

if TYPE_CHECKING:
    from tessera.checkpoint.config import CheckpointConfig
    from tessera.settings.stages import EngineConfig, PreprocessSettings, VisionSettings

Part = TypeVar("Part")
READERS = ("jinja2", "numpy", "safetensors", "tokenizers", "torch")
"""Distributions that a verdict hangs on."""


class Found(NamedTuple):
    """What a stage has of a checkpoint: in words, and the bytes of its weights on the CPU."""

    words: str
    bytes: int = 0


def judge(setup: ServerSetup) -> str:
    """One paragraph for the user about the checkpoint that a server of this setup would serve.

    Raises CheckpointError, in one paragraph with all that is wrong with it, or that does not go with the settings.
    """

    folder = _folder(setup)
    faults: list[str] = []

    def attempt(read: Callable[[], Part]) -> Part | None:
        try:
            return read()
        except TesseraError as error:
            told = str(error)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            told = f"its files hold what was not expected there ({type(error).__name__}: {error})"
        if told not in faults:
            faults.append(told)
        return None

    found: list[Found] = []
    if config := attempt(lambda: read_config(folder)):
        looks: dict[str, Callable[[CheckpointConfig, Any], Found]] = {
            PREPROCESS: _prompts,
            VISION: _tower,
            LANGUAGE: _body,
        }
        for stage, look in looks.items():
            if stage in setup.stages and (part := attempt(partial(look, config, setup.stages[stage]))):
                found.append(part)
    if faults:
        raise CheckpointError(" ".join(f"{folder} cannot be served: {'; also: '.join(faults)}".split()))
    assert config is not None
    said = "; ".join(part.words for part in found)
    return f"{folder} can be served on {setup.device}: layout {config.layout}; {said}; {_memory(folder, setup, found)}."


def fault(setup: ServerSetup) -> str | None:
    """Why a server of this setup would serve nothing, in one paragraph; None if nothing speaks against it.

    Judged in a process of its own: what the readers import is not for the launcher to hold while a server runs. That
    takes seconds, so a verdict of None is remembered as long as the settings, the checkpoint's files, this package's
    and the versions of the libraries that read a checkpoint are the same.
    """
    package = Path(__file__).parents[1]
    files = [path for path in sorted((*package.rglob("*.py"), *_folder(setup).glob("*"))) if path.is_file()]
    stats = [(str(path), path.stat()) for path in files]
    versions = [each.version for name in READERS for each in metadata.distributions(name=name)]
    seen = repr((setup, versions, [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]))
    kept = cache_folder() / "checks" / hashlib.blake2b(seen.encode(), digest_size=16).hexdigest()
    if is_kept(kept):
        return None
    command = [sys.executable, "-m", "tessera.launcher.checking"]
    run = subprocess.run(command, input=pickle.dumps(setup), capture_output=True)
    if run.returncode == 0:
        if (found := json.loads(run.stdout.splitlines()[-1])) is None:
            with suppress(OSError):
                write_whole(kept, Path.touch)
                remove_unused(kept.parent.iterdir())
        return found
    # No verdict: the stages will give theirs.
    told = run.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {run.returncode}"]
    print(f"tessera: the checkpoint was not checked before the start: {told[-1]}", file=sys.stderr, flush=True)
    return None


def main() -> None:
    """That process: a pickled setup on standard input, what is wrong as JSON on standard output."""
    setup: ServerSetup = pickle.load(sys.stdin.buffer)
    found = None
    try:
        judge(setup)
    except TesseraError as error:
        found = str(error)
    print(json.dumps(found))


def _folder(setup: ServerSetup) -> Path:
    return Path(next(each.value for each in setup.effective if each.name == "checkpoint"))


def _memory(folder: Path, setup: ServerSetup, found: Sequence[Found]) -> str:
    if setup.division is not None:
        return f"it fits: {setup.division.describe()}"
    if setup.device == "cuda":
        dtype = next((str(each.value) for each in setup.effective if each.name == "dtype"), "")
        size = sum(weights_of(folder, dtype, vision_tensors(folder)))
        return (
            f"the weights take {_size(size)}; whether they fit is not known, for the GPU's driver does not say its size"
        )
    return f"the weights take {_size(sum(part.bytes for part in found))} of memory"


def _prompts(config: CheckpointConfig, settings: PreprocessSettings) -> Found:
    from tessera.preprocess.preprocessor import Preprocessor

    prompts = Preprocessor.from_checkpoint(config.folder, settings).prompts
    template = f"template {config.conversation}" if config.conversation else "its chat template"
    return Found(f"tokenizer and {template} read, a context of {prompts.context_length:,} tokens")


def _tower(config: CheckpointConfig, settings: VisionSettings) -> Found:
    import torch

    from tessera.models.tower import check_tower, onnx_writer, unfilled_tower

    if settings.vision_url:
        return Found(f"the vision stage is asked at {settings.vision_url}")
    if not settings.random_weights:
        _check_there_are_weights(config)
    tower = (unfilled_tower if settings.random_weights else check_tower)(config)
    if settings.quantization == "fp8":
        tower.fp8_linears()
    if settings.quantization == "int8":
        onnx_writer(config)
    dtype = getattr(torch, settings.in_dtype(tower.splits).dtype)
    size = sum(parameter.numel() for parameter in tower.parameters()) * dtype.itemsize
    return Found(f"vision tower {type(tower).__name__}{_weights(settings.random_weights)}", size)


def _body(config: CheckpointConfig, settings: EngineConfig) -> Found:
    from tessera.checkpoint.config import context_length
    from tessera.engine.execution.model_runner import load_model
    from tessera.linear.scheme import Linear

    text, random = config.text, settings.weights == "random"
    context_length(text, settings.max_model_len)
    if not random:
        _check_there_are_weights(config)
    model = load_model(config, settings, headers=True)
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    embedding = model.embedding.get_buffer("weight")  # of the dtype that quantized weights get on the CPU too
    size = (sum(each.out_features * each.in_features for each in linears) + embedding.numel()) * embedding.itemsize
    quantized = (config.quantization or {}).get("quant_method", "not quantized")
    on_load = ", made FP8 while it loads" if settings.quantization == "fp8" else ""
    layers = f"{text.architecture}, {text.num_hidden_layers} layers"
    return Found(f"language model {layers}, {quantized}{on_load}{_weights(random)}", size)


def _check_there_are_weights(config: CheckpointConfig) -> None:
    """Before each of them is called missing."""
    from tessera.checkpoint.weights import SafetensorsFolder

    if not SafetensorsFolder(config.folder).names():
        raise CheckpointError("the folder holds no weights: put the checkpoint's *.safetensors files there")


def _weights(random: bool) -> str:
    return ", its weights drawn at random" if random else ", whose tensors have the right names and shapes"


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count >> 20} MiB"


if __name__ == "__main__":
    main()
