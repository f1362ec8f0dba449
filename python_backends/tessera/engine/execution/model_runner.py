"""Runs a scheduled batch: tensors, forward, sampling."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from tessera.engine.attention.backend import AttentionBackend, AttentionStep, create_backend
from tessera.engine.cache.kv_storage import KvStorage
from tessera.engine.config import EngineConfig
from tessera.engine.execution.batch_inputs import BatchInputs, build_inputs
from tessera.engine.execution.memory_budget import count_blocks
from tessera.engine.execution.sampler import SamplingRow, sample
from tessera.engine.models.qwen2 import Qwen2
from tessera.engine.models.registry import model_class
from tessera.engine.models.weights import load_weights, randomize
from tessera.engine.quantization.scheme import scheme_selector
from tessera.engine.scheduling.batch import SampledToken, ScheduledBatch

if TYPE_CHECKING:
    from tessera.checkpoint.config import CheckpointConfig

_LOG = logging.getLogger(__name__)


class ModelRunner:
    """One model, one attention backend on one cache, one device."""

    def __init__(self, model: Qwen2, attention: AttentionBackend, dtype: torch.dtype, device: torch.device) -> None:
        self.vocab_size = model.config.vocab_size
        self.hidden_size = model.config.hidden_size
        self.num_blocks = attention.storage.keys[0].shape[0]
        self._model = model
        self._attention = attention
        self._dtype = dtype
        self._device = device

    @classmethod
    def from_checkpoint(cls, checkpoint: CheckpointConfig, config: EngineConfig, max_model_len: int) -> ModelRunner:
        """Builds and fills the text model of a checkpoint and allocates its cache.

        Raises CheckpointError for weights that do not fit, ConfigError for settings that do not.
        """
        device = torch.device(config.device)
        dtype = model_dtype(config.dtype, device)
        if device.type == "cpu":
            torch.set_num_threads(config.threads)
        schemes = scheme_selector(_quantization(checkpoint))
        model = model_class(checkpoint.text.architecture)(checkpoint.text, schemes, dtype, device)
        if config.weights == "random":
            randomize(model, config.seed)
        else:
            from tessera.checkpoint.weights import SafetensorsFolder, split_names

            source = SafetensorsFolder(checkpoint.folder)
            names = split_names(source.names(), checkpoint)["text"]
            load_weights(model, ((ours, source.get(stored)) for stored, ours in names.items()))
        return cls.of_model(model, config, max_model_len)

    @classmethod
    def of_model(cls, model: Qwen2, config: EngineConfig, max_model_len: int) -> ModelRunner:
        """A runner of a filled model, with a cache as ``config`` asks."""
        weight = model.embedding.get_buffer("weight")
        heads, layers = model.heads, len(model.layers)
        sizes = (config.block_size, heads.kv_heads, heads.head_dim, weight.dtype)
        num_blocks = count_blocks(
            config.kv_cache_bytes,
            KvStorage.bytes_per_block(layers, *sizes),
            config.block_size,
            max_model_len,
            config.max_sequences,
        )
        _LOG.info("cache: %d blocks of %d tokens", num_blocks, config.block_size)
        storage = KvStorage(layers, num_blocks, *sizes, weight.device)
        return cls(model, create_backend(config.attention, heads, storage), weight.dtype, weight.device)

    def cache_salt(self, prompt_length: int) -> int:
        """What keeps apart the keys and values of prompts that begin with the same tokens; usually 0."""
        return self._model.rotary.salt(prompt_length)

    def run(self, batch: ScheduledBatch) -> list[SampledToken]:
        """Runs the step; returns a token for each of ``batch.sampling``."""
        with torch.inference_mode():
            logits = self.logits(batch)
            rows = [SamplingRow.of(sequence, len(sequence.outputs)) for sequence in batch.sampling]
            return sample(logits, rows) if rows else []

    def logits(self, batch: ScheduledBatch) -> torch.Tensor:
        """Writes the batch's keys and values; float32 [m, vocabulary] for the sequences that sample."""
        inputs = build_inputs(batch, self._attention.storage.block_size, self._device, self._dtype)
        step, last_step = self._attention_steps(inputs)
        hidden = self._model(inputs.ids, inputs.image_index, inputs.image_rows, self._attention, step, last_step)
        return self._model.logits(hidden)

    def _attention_steps(self, inputs: BatchInputs) -> tuple[AttentionStep, AttentionStep]:
        cos, sin = self._model.rotary.angles(inputs.positions, inputs.rope_lengths)
        step = AttentionStep(cos, sin, inputs.slots, None, self._attention.plan(inputs.table))
        if len(inputs.sample_rows) == len(inputs.ids):
            return step, step
        plan = self._attention.plan(inputs.table.last_rows(inputs.sampling))
        return step, AttentionStep(cos, sin, inputs.slots, inputs.sample_rows, plan)


def model_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype called ``name``; "auto" is float32 on the CPU, bfloat16 elsewhere."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16"
    return getattr(torch, name)


def _quantization(checkpoint: CheckpointConfig) -> dict | None:
    """quantization_config may stand in the file's root or in the text model's section."""
    for section in (checkpoint.raw, checkpoint.raw.get("text_config"), checkpoint.raw.get("llm_config")):
        if section and section.get("quantization_config"):
            return section["quantization_config"]
    return None
