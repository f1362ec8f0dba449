"""One request to everything the later stages need: limits, plans, prompt and digests first, pixels last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tessera.cascade import read_policy
from tessera.errors import ConfigError, InvalidRequest
from tessera.models.family import (
    FRAME,
    KIND_ENCODED,
    KIND_PIXELS,
    KIND_PRUNED,
    LEAST_SIDE,
    EncodedPicture,
    ImagePlan,
    ModelFamily,
    checkpoint_id,
    digest,
)
from tessera.models.registry import family_for, read_config
from tessera.preprocess.cascade import Cascade
from tessera.preprocess.decode import RESIZE_MODES, decode, encoded_bytes, read_checked_header, resize_fast
from tessera.preprocess.headers import Header
from tessera.prompt.messages import Chat, parse_chat
from tessera.prompt.prompt import Prompt, PromptBuilder
from tessera.prompt.sampling import POLICY_KEYS
from tessera.prompt.tokenizer import Tokenizer
from tessera.settings.stages import PreprocessSettings

# Part of every digest: raise it when the same bytes and plan would give other pixels than before.
PIXELS_VERSION = "3"
# Longer pictures are decoded here: the GPU's resize holds a weight for each pixel of a side and each of the result's.
MOST_GPU_SIDE = 16384


@dataclass(frozen=True)
class PreprocessRequest:
    """``text`` (one user turn) or OpenAI-style ``messages``; ``images`` as encoded bytes or base64 text.

    ``tile_policy``, ``min_pixels`` and ``max_pixels``: how finely they are cut; each family knows some of these.
    ``low``: the least detail is enough of all of them.
    """

    text: str | None = None
    messages: list[Any] | None = None
    images: Sequence[bytes] = ()
    tile_policy: dict[str, Any] | str | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    low: bool = False

    @property
    def asked(self) -> dict[str, Any]:
        """What it says of how finely pictures are cut."""
        return {name: getattr(self, name) for name in POLICY_KEYS}

    def cuts(self, cascade: Cascade | None) -> list[PreprocessRequest]:
        """The request with a cascade's first cut and with its full one; without a cascade as it is."""
        if cascade is None:
            return [self]
        full = replace(self, tile_policy=cascade.full)
        return [replace(full, low=True) if cascade.first is None else replace(full, tile_policy=cascade.first), full]


@dataclass(frozen=True)
class Picture:
    """One of a request's pictures before its pixels. ``kind``: whether they or the file itself (``data``) travel.
    ``wire``: what stands in PIXELS, where it is known already, since the plan depends on it."""

    data: bytes
    header: Header
    plan: ImagePlan
    kind: int
    wire: np.ndarray | None = None

    @property
    def size(self) -> int:
        """Bytes that it takes of PIXELS."""
        if self.wire is not None:
            return self.wire.size
        return FRAME.size + len(self.data) if self.kind == KIND_ENCODED else self.plan.pixel_bytes


@dataclass(frozen=True)
class Planned:
    """A request before its pixels. ``question``: the text of its last turn."""

    pictures: list[Picture]
    prompt: Prompt
    question: str

    @property
    def plans(self) -> tuple[ImagePlan, ...]:
        return tuple(picture.plan for picture in self.pictures)


@dataclass(frozen=True)
class Prepared:
    """``pixels`` uint8 [bytes of all images]; ``plan`` int32 [4k]; ``digest`` int64 [2k]; ``input_ids`` int32 [L];
    ``spans`` int32 [k, 2] of (start, length); ``positions`` int32 [axes, L], None for 0 to L - 1. ``plans`` are the
    same k images' plans as objects.

    In ``pixels`` an image of kind 1 has its frame (``models/family.py``)."""

    pixels: np.ndarray
    plan: np.ndarray
    digest: np.ndarray
    input_ids: np.ndarray
    spans: np.ndarray
    positions: np.ndarray | None
    plans: tuple[ImagePlan, ...]


class Preprocessor:
    """Stateless between requests; several threads may share one."""

    def __init__(
        self, family: ModelFamily, prompts: PromptBuilder, checkpoint: bytes, settings: PreprocessSettings
    ) -> None:
        self.family = family
        self.prompts = prompts
        self.limits = settings
        self.max_cost = settings.max_cost or family.max_cost
        self.gpu_pixels = settings.gpu_pixels
        self.deployed = read_policy(settings.tile_policy)
        try:
            self.policy = family.policy({"tile_policy": self.deployed.full})
            said = self.deployed.cascade
            self.cascade = None if said is None else Cascade.read(said, planned=True)
            for cut in PreprocessRequest().cuts(self.cascade):
                family.policy(cut.asked, self.policy, self.max_cost)
        except InvalidRequest as error:
            raise ConfigError(f"preprocess: {error}") from None
        self._resize = RESIZE_MODES[settings.resize]
        self.checkpoint = checkpoint
        self._digest_settings = f"pixels {PIXELS_VERSION}, resize {settings.resize}"

    @staticmethod
    def from_checkpoint(folder: Path | str, settings: PreprocessSettings | None = None) -> Preprocessor:
        """Read tokenizer, templates and configuration of a checkpoint folder; its weights are only sampled."""
        settings = settings or PreprocessSettings()
        config = read_config(folder)
        family = family_for(config)
        tokenizer = Tokenizer.from_folder(config.folder)
        prompts = PromptBuilder(config, family, tokenizer, settings.context_length, settings.system)
        return Preprocessor(family, prompts, checkpoint_id(config.folder), settings)

    def __call__(self, request: PreprocessRequest) -> Prepared:
        """Raises InvalidRequest that names the image by its place in the prompt (from 0)."""
        return self.prepare(self.plan(request))

    def plan(self, request: PreprocessRequest) -> Planned:
        """Everything but the pixels, by the pictures' headers, and of those that may be pruned the pixels too; raises
        as a call."""
        chat = parse_chat(request.text, request.messages, len(request.images))
        images = self._encoded(chat, request.images)
        policy = self.family.policy(request.asked, self.policy, self.max_cost)
        low = (each or request.low for each in chat.low)
        pictures = self._pictures(images, [self.family.low_detail(policy) if each else policy for each in low])
        prompt = self.prompts.build(chat.messages, tuple(picture.plan for picture in pictures))
        return Planned(pictures, prompt, "".join(chat.messages[-1].texts))

    def prepare(self, planned: Planned) -> Prepared:
        """Raises InvalidRequest for a picture that cannot be decoded."""
        pictures, prompt, plans = planned.pictures, planned.prompt, planned.plans
        digests = [
            digest(picture.data, picture.kind, picture.plan, self._settings_of(picture.plan), self.checkpoint)
            for picture in pictures
        ]
        return Prepared(
            pixels=self.pixels(pictures),
            plan=np.array([(picture.kind, *picture.plan.wire) for picture in pictures], dtype=np.int32).reshape(-1),
            digest=np.concatenate(digests) if digests else np.empty(0, dtype=np.int64),
            input_ids=prompt.input_ids,
            spans=prompt.spans,
            positions=self.family.positions(len(prompt.input_ids), prompt.spans, plans),
            plans=plans,
        )

    def _encoded(self, chat: Chat, images: Sequence[bytes]) -> list[bytes]:
        sources = [images[source] if isinstance(source, int) else source for source in chat.sources]
        if len(sources) > self.limits.max_images:
            raise InvalidRequest(f"the request has {len(sources)} images; the limit is {self.limits.max_images}")
        size = sum(len(source) for source in sources) + sum(
            len(text) for message in chat.messages for text in message.texts
        )
        if size > self.limits.max_request_bytes:
            raise InvalidRequest(f"the request has {size} bytes; the limit is {self.limits.max_request_bytes}")
        return [encoded_bytes(source, f"image {index}") for index, source in enumerate(sources)]

    def _pictures(self, images: Sequence[bytes], policies: Sequence[Any]) -> list[Picture]:
        asked = zip(images, policies, strict=True)
        pictures = [self.picture(image, policy, f"image {index}") for index, (image, policy) in enumerate(asked)]
        cost = sum(picture.plan.cost for picture in pictures)
        if cost > self.max_cost:
            raise InvalidRequest(
                f"{len(pictures)} images make {cost} {self.family.cost_unit}; the limit is {self.max_cost}. Send fewer "
                f"images or {self.family.reduce_hint}"
            )
        return [
            self._pruned(picture, f"image {index}") if self.family.prunes(policy) else picture
            for index, (picture, policy) in enumerate(zip(pictures, policies))
        ]

    def _pruned(self, picture: Picture, name: str) -> Picture:
        """Without the units that its family leaves out; with all of them it travels as it would have. Raises
        InvalidRequest for a picture that cannot be decoded."""
        pixels = np.empty(picture.plan.pixel_bytes, np.uint8)
        self._cut(picture, name, pixels)
        units = pixels.reshape(picture.plan.cost, -1)
        kept = self.family.distinct(units)
        if kept.all():
            return picture if picture.kind == KIND_ENCODED else replace(picture, wire=pixels)
        bits = np.packbits(kept)
        plan = self.family.without(picture.plan, bits.tobytes())
        return replace(picture, plan=plan, kind=KIND_PRUNED, wire=np.concatenate((bits, units[kept].ravel())))

    def picture(self, image: bytes, policy: Any, name: str = "image") -> Picture:
        """An encoded picture planned by its header alone. Raises InvalidRequest that calls it ``name``."""
        header = read_checked_header(image, self.limits, name)
        try:
            plan = self.family.plan(*header.upright_size, policy)
        except InvalidRequest as error:
            raise InvalidRequest(f"{name}: {error}") from None
        return Picture(image, header, plan, KIND_ENCODED if self._is_for_gpu(header) else KIND_PIXELS)

    def _is_for_gpu(self, header: Header) -> bool:
        return (
            0 < self.gpu_pixels <= header.width * header.height
            and min(header.width, header.height) >= LEAST_SIDE
            and max(header.width, header.height) <= MOST_GPU_SIDE
            and header.chroma_step is not None
        )

    def pixels(self, pictures: Sequence[Picture]) -> np.ndarray:
        """Decode and cut ``pictures`` as their plans say, or frame the file: uint8, flat. Raises InvalidRequest."""
        pixels = np.empty(sum(picture.size for picture in pictures), dtype=np.uint8)
        start = 0
        for index, picture in enumerate(pictures):
            out = pixels[start : start + picture.size]
            start += picture.size
            if picture.wire is not None:
                out[:] = picture.wire
            elif picture.kind == KIND_ENCODED:
                data, header = np.frombuffer(picture.data, dtype=np.uint8), picture.header
                out[:] = EncodedPicture(data, header.width, header.height, header.orientation).framed()
            else:
                self._cut(picture, f"image {index}", out)
        return pixels

    def _cut(self, picture: Picture, name: str, out: np.ndarray) -> None:
        decoded = decode(picture.data, self.limits, name, self._enough(picture.plan))
        self.family.cut(decoded, picture.plan, self._resize, out)

    def _enough(self, plan: ImagePlan) -> tuple[int, int] | None:
        """Width and height of which a decoded picture need have no more; None for all of them."""
        if self._resize is not resize_fast:
            return None
        return max(view.width for view in plan.views), max(view.height for view in plan.views)

    def _settings_of(self, plan: ImagePlan) -> str:
        """Of a digest: all that changes pixels beside the file and its cut, by which a part's own would follow."""
        return f"{self._digest_settings}, decoded for {self._enough(plan)}"
