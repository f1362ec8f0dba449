"""One request to everything the later stages need: limits, plans, prompt and digests first, pixels last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tessera.checkpoint.config import read_config
from tessera.errors import ConfigError, InvalidRequest
from tessera.family.chat import Chat, parse_chat
from tessera.family.conversation import conversation_for
from tessera.family.digest import checkpoint_id, digest
from tessera.family.encoded_picture import FRAME, KIND_ENCODED, LEAST_SIDE, EncodedPicture
from tessera.family.family import ImagePlan, ModelFamily
from tessera.family.prompt import PromptBuilder
from tessera.family.registry import family_for
from tessera.family.tile_policy import TilePolicy
from tessera.family.tokenizer import Tokenizer
from tessera.preprocess.decode import decode, encoded_bytes, read_checked_header
from tessera.preprocess.headers import Header
from tessera.preprocess.resize_cpu import resize_mode
from tessera.preprocess.settings import PreprocessSettings

# Part of every digest: raise it when the same bytes and plan would give other pixels than before.
PIXELS_VERSION = "1"
# Longer pictures are decoded here: the GPU's resize holds a weight for each pixel of a side and each of the grid's.
MOST_GPU_SIDE = 16384


@dataclass(frozen=True)
class PreprocessRequest:
    """``text`` (one user turn) or OpenAI-style ``messages``; ``images`` as encoded bytes or base64 text."""

    text: str | None = None
    messages: list[Any] | None = None
    images: Sequence[bytes] = ()
    tile_policy: dict[str, Any] | str | None = None


@dataclass(frozen=True)
class Prepared:
    """``pixels`` uint8 [bytes of all images]; ``plan`` int32 [4k]; ``digest`` int64 [2k]; ``input_ids`` int32 [L];
    ``spans`` int32 [k, 2] of (start, length). ``plans`` are the same k images' plans as objects.

    In ``pixels`` an image of kind 1 has its frame (``family/encoded_picture.py``)."""

    pixels: np.ndarray
    plan: np.ndarray
    digest: np.ndarray
    input_ids: np.ndarray
    spans: np.ndarray
    plans: tuple[ImagePlan, ...]


class Preprocessor:
    """Stateless between requests; several threads may share one."""

    def __init__(
        self, family: ModelFamily, prompts: PromptBuilder, checkpoint: bytes, settings: PreprocessSettings
    ) -> None:
        self.family = family
        self.prompts = prompts
        self.limits = settings.limits
        self.gpu_pixels = settings.gpu_pixels
        try:
            self.policy = TilePolicy.parse(settings.tile_policy, default=family.default_policy())
            family.plan(1, 1, self.policy)  # a token budget too small for any picture is refused here
        except InvalidRequest as error:
            raise ConfigError(f"preprocess: {error}") from None
        self._mode = resize_mode(settings.resize)
        self._checkpoint = checkpoint
        self._digest_settings = f"pixels {PIXELS_VERSION}, resize {settings.resize}"

    @staticmethod
    def from_checkpoint(folder: Path | str, settings: PreprocessSettings | None = None) -> Preprocessor:
        """Read tokenizer, templates and configuration of a checkpoint folder; its weights are only sampled."""
        settings = settings or PreprocessSettings()
        config = read_config(folder)
        family = family_for(config)
        bos = conversation_for(config.raw).bos if config.layout == "internvl_chat" else None
        tokenizer = Tokenizer.from_folder(config.folder, bos)
        prompts = PromptBuilder(config, family, tokenizer, settings.context_length, settings.system)
        return Preprocessor(family, prompts, checkpoint_id(config.folder), settings)

    def __call__(self, request: PreprocessRequest) -> Prepared:
        """Raises InvalidRequest that names the image by its place in the prompt (from 0)."""
        chat = parse_chat(request.text, request.messages, len(request.images))
        images = self._encoded(chat, request.images)
        policy = TilePolicy.parse(request.tile_policy, default=self.policy)
        plans = self._plans(images, policy)
        prompt = self.prompts.build(chat.messages, plans)
        digests = [
            digest(image, plan, self._digest_settings, self._checkpoint)
            for image, plan in zip(images, plans, strict=True)
        ]
        return Prepared(
            pixels=self.pixels(images, plans),
            plan=np.array([plan.wire() for plan in plans], dtype=np.int32).reshape(-1),
            digest=np.concatenate(digests) if digests else np.empty(0, dtype=np.int64),
            input_ids=prompt.input_ids,
            spans=prompt.spans,
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

    def _plans(self, images: Sequence[bytes], policy: TilePolicy) -> tuple[ImagePlan, ...]:
        most = self.limits.max_tiles
        if policy.max_tiles > most:
            raise InvalidRequest(
                f"tile policy: max_tiles {policy.max_tiles} is above this server's limit of {most} tiles a request"
            )
        plans = tuple(self._plan(image, policy, f"image {index}") for index, image in enumerate(images))
        tiles = sum(plan.t for plan in plans)
        if tiles > most:
            raise InvalidRequest(
                f"{len(plans)} images make {tiles} tiles; the limit is {most}. Send fewer images, "
                "or a tile_policy with a lower max_tiles or token_budget"
            )
        return plans

    def _plan(self, image: bytes, policy: TilePolicy, name: str) -> ImagePlan:
        header = read_checked_header(image, self.limits, name)
        plan = self.family.plan(*header.upright_size, policy)
        return replace(plan, kind=KIND_ENCODED) if self._is_for_gpu(header) else plan

    def _is_for_gpu(self, header: Header) -> bool:
        return (
            0 < self.gpu_pixels <= header.width * header.height
            and min(header.width, header.height) >= LEAST_SIDE
            and max(header.width, header.height) <= MOST_GPU_SIDE
            and header.chroma_step is not None
        )

    def pixels(self, images: Sequence[bytes], plans: Sequence[ImagePlan]) -> np.ndarray:
        """Decode and cut encoded ``images`` as their ``plans`` say: uint8, flat. Raises InvalidRequest.

        Of an image of kind 1 its frame.
        """
        sizes = [
            FRAME.size + len(image) if plan.kind == KIND_ENCODED else int(np.prod(plan.pixel_shape))
            for image, plan in zip(images, plans, strict=True)
        ]
        pixels = np.empty(sum(sizes), dtype=np.uint8)
        ends = np.cumsum(sizes)
        for index, (image, plan, size, end) in enumerate(zip(images, plans, sizes, ends, strict=True)):
            if plan.kind == KIND_ENCODED:
                header = read_checked_header(image, self.limits, f"image {index}")
                data = np.frombuffer(image, dtype=np.uint8)
                picture = EncodedPicture(data, header.width, header.height, header.orientation)
                pixels[end - size : end] = picture.framed()
                continue
            enough = (plan.columns * plan.w, plan.rows * plan.h) if self._mode.reduced else None
            decoded = decode(image, self.limits, f"image {index}", enough)
            self._write_tiles(decoded, plan, pixels[end - size : end].reshape(plan.pixel_shape))
        return pixels

    def _write_tiles(self, image: np.ndarray, plan: ImagePlan, out: np.ndarray) -> None:
        """Fill ``out`` [t, h, w, 3]: the whole image resized to the grid and cut row by row, the thumbnail last."""
        grid = self._mode.resize(image, plan.columns * plan.w, plan.rows * plan.h)
        cut = grid.reshape(plan.rows, plan.h, plan.columns, plan.w, 3).transpose(0, 2, 1, 3, 4)
        count = plan.rows * plan.columns
        out[:count].reshape(plan.rows, plan.columns, plan.h, plan.w, 3)[:] = cut
        if plan.thumbnail:
            out[count] = self._mode.resize(image, plan.w, plan.h)
