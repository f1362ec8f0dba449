"""The one table of model families. What a family is made of is named by import paths ("module:name"), loaded on use:
importing this loads no torch.

A family may come from another package, whose entry point of group ``tessera.models`` is a ModelSpec::

    [project.entry-points."tessera.models"]
    my_family = "my_package:SPEC"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from tessera.checkpoint.config import CheckpointConfig, architecture_of
from tessera.checkpoint.files import one_of, read_json
from tessera.errors import CheckpointError, ConfigError
from tessera.models.paddleocr_vl.config import BODY as PADDLEOCR_BODY
from tessera.models.qwen3_vl.config import TEXT_BODIES as QWEN3_VL_BODIES
from tessera.models.text.config import BODIES, TextSpec

if TYPE_CHECKING:
    from tessera.models.family import ModelFamily
    from tessera.models.text.decoder import Qwen2


@dataclass(frozen=True)
class ModelSpec:
    """A family of vision-language models.

    ``names``: what config.json calls its architectures and model types. ``read_config``: (folder, config.json) ->
    CheckpointConfig, see ``models.text.config.assemble``. ``processor``: its ModelFamily. ``vision_tower``: its Tower.
    ``vision_tensors``: how names of weights begin that the vision stage loads, a pattern, for the division of a GPU's
    memory. ``mps_priority``: CUDA_MPS_CLIENT_PRIORITY of the vision stage beside the language model; None is CUDA's
    own. ``text_bodies``: language models that it brings along.
    """

    names: tuple[str, ...]
    read_config: str
    processor: str
    vision_tower: str
    vision_tensors: str
    mps_priority: int | None = None
    text_bodies: tuple[TextSpec, ...] = ()


_INTERNVL = ModelSpec(
    ("InternVLForConditionalGeneration", "internvl", "InternVLChatModel", "internvl_chat"),
    read_config="tessera.models.internvl.config:read",
    processor="tessera.models.internvl.processor:InternVL",
    vision_tower="tessera.models.internvl.vision:InternViT",
    vision_tensors=r"(model\.)?(vision_tower|vision_model|multi_modal_projector|mlp1)\.",
)
_QWEN2_VL = ModelSpec(
    ("Qwen2VLForConditionalGeneration", "qwen2_vl"),
    read_config="tessera.models.qwen2_vl.config:read",
    processor="tessera.models.qwen2_vl.processor:Qwen2VL",
    vision_tower="tessera.models.qwen2_vl.vision:Qwen2ViT",
    vision_tensors=r"(model\.)?visual\.",
    # A forward of whole pictures is long, a step of the language model short and waited for: its kernels start
    # first. For tiles this would even out no load, and make some requests wait much longer than others.
    mps_priority=1,
)
#: each relative by what it has otherwise
MODELS = (
    _INTERNVL,
    _QWEN2_VL,
    replace(
        _INTERNVL,
        names=("QianfanOCRForConditionalGeneration", "qianfan_ocr"),
        read_config="tessera.models.internvl.config:read_qianfan",
        processor="tessera.models.internvl.processor:QianfanOCR",
    ),
    replace(
        _QWEN2_VL,
        names=("PaddleOCRVLForConditionalGeneration", "paddleocr_vl"),
        read_config="tessera.models.paddleocr_vl.config:read",
        processor="tessera.models.paddleocr_vl.processor:PaddleOcrVL",
        vision_tower="tessera.models.paddleocr_vl.vision:PaddleOcrViT",
        vision_tensors=r"(model\.)?(visual|projector)\.|mlp_AR\.",
        text_bodies=(PADDLEOCR_BODY,),
    ),
    replace(
        _QWEN2_VL,
        names=("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl"),
        read_config="tessera.models.qwen2_5_vl.config:read",
        vision_tower="tessera.models.qwen2_5_vl.vision:Qwen2_5ViT",
    ),
    replace(
        _QWEN2_VL,
        names=("Qwen3VLForConditionalGeneration", "qwen3_vl", "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe"),
        read_config="tessera.models.qwen3_vl.config:read",
        vision_tower="tessera.models.qwen3_vl.vision:Qwen3ViT",
        text_bodies=QWEN3_VL_BODIES,
    ),
)


@cache
def models() -> Mapping[str, ModelSpec]:
    """By each name; first the families of this package, then those of others.

    Raises ConfigError that names an entry point which cannot be loaded, or claims a name that is taken.
    """
    found = {name: spec for spec in MODELS for name in spec.names}
    for point in entry_points(group="tessera.models"):
        what = f"the model family {point.name} ({point.value})"
        try:
            spec = point.load()
        except Exception as error:  # another package's code
            raise ConfigError(f"{what} cannot be loaded: {error!r}") from error
        if taken := found.keys() & set(spec.names):
            raise ConfigError(f"{what} claims {', '.join(sorted(taken))}, which another one has: uninstall one of them")
        found |= dict.fromkeys(spec.names, spec)
    return found


def spec_of(raw: Mapping[str, object], folder: Path) -> ModelSpec:
    """The family of a checkpoint whose config.json is ``raw``. Raises CheckpointError where there is none."""
    architecture = architecture_of(raw)
    one_of(architecture, models(), f"{folder}/config.json: architecture")
    return models()[architecture]


def read_config(folder: Path | str) -> CheckpointConfig:
    """Read the configuration of a checkpoint folder.

    Raises CheckpointError when config.json is missing, names an architecture that is not supported, or asks
    for something the implementation does not do.
    """
    folder = Path(folder)
    raw = read_json(folder, "config.json")
    if not raw:
        raise CheckpointError(f"{folder} has no config.json; name a folder that holds a complete checkpoint")
    return resolve_name(spec_of(raw, folder).read_config)(folder, raw)


def family_for(config: CheckpointConfig) -> ModelFamily:
    """How a checkpoint's pictures are cut and its prompts are made."""
    return resolve_name(spec_of(config.raw, config.folder).processor)(config)


def model_class(architecture: str) -> type[Qwen2]:
    """The class that runs a text architecture; CheckpointError names those that are supported."""
    bodies = [*BODIES, *(body for spec in models().values() for body in spec.text_bodies)]
    paths = {body.architecture: body.model for body in bodies}
    one_of(architecture, paths, "text architecture")
    return resolve_name(paths[architecture])


def vision_tensors(folder: Path) -> str:
    """The pattern of the folder's family; it matches nothing where none is known, which reading the folder reports."""
    spec = models().get(architecture_of(read_json(folder, "config.json")))
    return spec.vision_tensors if spec else "(?!)"
