"""Runs a scheduled batch: tensors, forward, sampling."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate, count

import torch

from tessera.attention.backend import AttentionBackend, AttentionStep, KvStorage, create_backend
from tessera.checkpoint.config import CheckpointConfig
from tessera.checkpoint.weights import SafetensorsFolder, SafetensorsHeaders, fill, name_in_file, split_names
from tessera.engine.execution.batch_inputs import PackedBatch, fill_in, pack, pictures_of
from tessera.engine.execution.memory_budget import count_blocks, prompts_of
from tessera.engine.execution.penalties import Histories, Penalties
from tessera.engine.execution.sampler import Choices, SampledRows, SamplingRow, greedy, sample
from tessera.engine.execution.step_graphs import DecodeGraphs, PromptGraphs, graph_sizes, prompt_sizes
from tessera.engine.scheduling.scheduler import ScheduledBatch
from tessera.kernels.fixed_rows import FixedRows
from tessera.kernels.transfer import Moment, to_device
from tessera.linear.quantization import scheme_selector, stored_modules
from tessera.linear.tuning import tune
from tessera.models.registry import model_class
from tessera.models.text.decoder import Qwen2
from tessera.settings.stages import EngineConfig

_LOG = logging.getLogger(__name__)
_TIMED_STEPS, _TIMED_TIMES = (1, 64, 256, 1024), 4  # tokens; of each size the fastest counts


class ModelRunner:
    """One model, one attention backend on one cache, one device: what runs the engine's batches.

    ``async_launch``: whether a step goes on by itself once it was launched, so that the next should be planned
    meanwhile. ``graph_steps`` counts the steps that ran as CUDA graphs. ``step_times``: tokens and nanoseconds of
    steps that were measured before any request came.
    """

    def __init__(
        self,
        model: Qwen2,
        attention: AttentionBackend,
        max_sequences: int,
        max_rows: int,
        deterministic: bool = False,
    ) -> None:
        """``max_rows``: tokens that a step may choose; ``deterministic``: the setting."""
        weight = model.embedding.get_buffer("weight")
        self.vocab_size = model.config.vocab_size
        self.hidden_size = model.config.row_size
        self.experts = model.config.experts is not None
        self.position_axes = model.rotary.axes
        self.weights = model.describe_weights() + ", key/value cache in fp8" * attention.storage.fp8
        self.weight_bytes = sum(buffer.nbytes for buffer in model.buffers())
        self.num_blocks = attention.storage.num_blocks
        self.async_launch = weight.is_cuda
        self.graph_steps = 0
        self.step_times: list[tuple[int, int]] = []
        self._model = model
        self._attention = attention
        fixed = FixedRows()
        self._products = fixed if deterministic else nullcontext()
        self._learning = fixed.learning if deterministic else nullcontext
        self._dtype = weight.dtype
        self._graphs: DecodeGraphs | None = None
        self._prompt_graphs: PromptGraphs | None = None
        # The tokens of the step before, and whose they are, by request number: the next step is launched before the
        # host knows them.
        self._last_sampled = torch.zeros(max_rows, dtype=torch.int64, device=weight.device)
        self._previous: dict[int, int] = {}
        self._before: PackedBatch | None = None  # that step; None where it verified drafts
        self._max_sequences = max_sequences
        self._histories = Histories(max_sequences, weight.device)

    @classmethod
    def of_model(cls, model: Qwen2, config: EngineConfig, max_model_len: int) -> ModelRunner:
        """A runner of a filled model, with a cache and graphs as ``config`` asks. ConfigError for what does not fit."""
        weight = model.embedding.get_buffer("weight")
        heads = model.heads
        block = (config.block_size, heads.kv_heads, heads.head_dim)
        layers, fp8 = len(model.layers), config.kv_cache_dtype == "fp8"
        backend = config.attention
        if config.deterministic:
            backend = "fixed" if weight.device.type == "cpu" else "fixed_triton"

        def runner(num_blocks: int) -> ModelRunner:
            storage = KvStorage(layers, (num_blocks, *block), weight.dtype, weight.device, fp8)
            attention = create_backend(backend, heads, storage)
            return cls(model, attention, config.max_sequences, config.max_rows, config.deterministic)

        block_bytes = KvStorage(layers, (1, *block), weight.dtype, torch.device("meta"), fp8).nbytes
        num_blocks = count_blocks(
            config, block_bytes, weight.device, max_model_len, lambda blocks, batch: runner(blocks).logits(batch)
        )
        _LOG.info("cache: %d blocks of %d tokens", num_blocks, config.block_size)
        whole = runner(num_blocks)
        if config.deterministic:  # each of its products once: what this machine cannot hold is found out now
            whole.logits(prompts_of(1, max_model_len, config)[0])
        if whole.async_launch:
            with torch.inference_mode(), whole._learning():  # answers found before are read from disk
                tune(model.places(), weight.device, config.max_batched_tokens)
        largest = min(config.graph_batch_size, config.max_sequences)
        if largest and whole.async_launch:
            most_blocks = min(num_blocks, -(-max_model_len // config.block_size))
            token_counts = prompt_sizes(config.max_batched_tokens, model.products_a_token)
            whole.capture_graphs(graph_sizes(largest), token_counts, most_blocks)
        if whole.async_launch:
            whole.time_steps(max_model_len, config)
        return whole

    def time_steps(self, max_model_len: int, config: EngineConfig) -> None:
        """Measures what steps of prompts take, as far as the cache holds them; the first of each warms up.

        One behind the other, as they run under load: alone, each would wait for the host, and a small model's large
        steps would seem long ever after, for those that seem long are not run. No large ones here: what they take is
        in proportion.
        """
        for tokens in _TIMED_STEPS:
            batch, blocks = prompts_of(min(tokens, config.max_batched_tokens), max_model_len, config)
            if blocks > self.num_blocks:
                break
            for result in [self.launch(batch) for _ in range(_TIMED_TIMES)]:
                result.tokens()
                self.step_times.append((batch.tokens, result.device_ns()))
        self.graph_steps = 0
        self._previous.clear()

    def capture_graphs(self, batch_sizes: list[int], token_counts: list[int], most_blocks: int) -> None:
        """Records decode steps of these batch sizes and other steps of these numbers of tokens, where there are any.

        Their sequences hold at most ``most_blocks``.
        """
        with torch.inference_mode(), self._learning():
            if batch_sizes:
                self._histories.reserve(max(batch_sizes), most_blocks * self._attention.storage.block_size)
                given = most_blocks, self._last_sampled, self._histories
                self._graphs = DecodeGraphs(self._model, self._attention, batch_sizes, *given)
            if token_counts:
                most_rows = len(self._last_sampled)
                row_counts = sorted({self._max_sequences, min(2 * self._max_sequences, most_rows), most_rows})
                limits = self._max_sequences, row_counts, most_blocks, self._last_sampled
                self._prompt_graphs = PromptGraphs(self._model, self._attention, token_counts, *limits)

    def cache_salt(self, prompt_length: int) -> int:
        """What keeps apart the keys and values of prompts that begin with the same tokens; usually 0."""
        return self._model.rotary.salt(prompt_length)

    def launch(self, batch: ScheduledBatch) -> SampledRows:
        """Starts the step; the result waits for its ``batch.rows`` tokens."""
        with torch.inference_mode(), self._products:
            numbers = [sequence.request.number for sequence in batch.sampling]
            before = self._before if numbers == [*self._previous] and not batch.drafted else None
            packed = self._pack(batch, before)
            graphs = self._graphs if self._graphs is not None and self._graphs.fits(packed) else None
            self.graph_steps += graphs is not None
            whole = False
            if graphs is None:
                run = self._layers(packed, batch)
            else:
                whole = all(each.greedy and not each.request.sampling.penalized for each in batch.sampling)
                run = partial(graphs.greedy if whole else graphs.hidden, graphs.put(packed), len(packed.ids))
            started = Moment(self._last_sampled.device)
            ran = run()
            # While the device runs the layers.
            penalties = self._histories.select(batch.sampling, go_on=before is not None)
            sampled = SampledRows(ran, started) if whole else self._sample(ran, batch, penalties, started)
        places = (
            count() if not batch.drafted else accumulate((1 + len(each.draft) for each in batch.sampling), initial=0)
        )
        self._previous = dict(zip(numbers, places))
        self._before = None if batch.drafted else packed
        return sampled

    def _sample(
        self, hidden: torch.Tensor, batch: ScheduledBatch, penalties: Penalties | None, started: Moment
    ) -> SampledRows:
        likeliest = all(sequence.greedy for sequence in batch.sampling)
        if likeliest and penalties is not None and self._graphs is not None and self._graphs.chooses(len(hidden)):
            return SampledRows(self._graphs.penalized(hidden), started)
        head = self._model.logits
        if likeliest:
            logits = head(hidden)
            sampled = SampledRows(greedy(logits if penalties is None else penalties.applied(logits)), started)
        elif penalties is None and (choices := Choices.of(batch.sampling)) is not None:
            sampled = SampledRows(choices.made(hidden, head), started)
        else:
            rows = [SamplingRow.of(each, drafted) for each in batch.sampling for drafted in range(1 + len(each.draft))]
            sampled = sample(head(hidden), rows, started, penalties)
        if penalties is not None:
            penalties.append(sampled.ids)
        self._last_sampled[: len(hidden)].copy_(sampled.ids)
        return sampled

    def logits(self, batch: ScheduledBatch) -> torch.Tensor:
        """Writes the batch's keys and values; float32 [m, vocabulary] for the tokens to choose."""
        with torch.inference_mode(), self._products:
            return self._model.logits(self._layers(self._pack(batch), batch)()).float()

    def _pack(self, batch: ScheduledBatch, before: PackedBatch | None = None) -> PackedBatch:
        return pack(batch, self._attention.storage.block_size, self._previous, before)

    def _layers(self, packed: PackedBatch, batch: ScheduledBatch) -> Callable[[], torch.Tensor]:
        """Puts a step's inputs on the device. What then runs the layers, once: it returns what the head makes the
        logits of the m tokens to choose of, [m, hidden]."""
        device = self._last_sampled.device
        pictures = pictures_of(batch, packed.table.row, device, self._dtype)
        if self._prompt_graphs is not None and self._prompt_graphs.fits(packed):
            self.graph_steps += 1
            return partial(self._prompt_graphs.run, self._prompt_graphs.put(packed, pictures), len(packed.last.row))
        ids = to_device(packed.ids, device)
        if (packed.source >= 0).any():
            ids = fill_in(ids, to_device(packed.source, device), self._last_sampled)
        places, rows = (None, None) if pictures is None else (to_device(pictures.places, device), pictures.rows)
        x = self._model.embedding(ids, places, rows)
        last_step = step = self._last_step(packed)
        if step.rows is not None:
            step = replace(step, rows=None, plan=self._attention.plan(packed.table))
        return partial(self._model.forward_layers, x, self._attention, step, last_step)

    def _last_step(self, packed: PackedBatch) -> AttentionStep:
        """For the last layer, which drops the rows that nobody samples from."""
        device = self._last_sampled.device
        positions, lengths = to_device(packed.positions, device), to_device(packed.rope_lengths, device)
        cos, sin = self._model.rotary.angles(positions, lengths)
        rows, table = None, packed.table
        if len(packed.last.row) != len(packed.ids):
            rows, table = to_device(packed.last.row, device), table.singles(packed.last)
        return AttentionStep(cos, sin, to_device(packed.slots, device), rows, self._attention.plan(table))


def load_model(checkpoint: CheckpointConfig, config: EngineConfig, headers: bool = False) -> Qwen2:
    """The text model of a checkpoint, filled. Raises CheckpointError for weights that do not fit.

    ``headers``: all is checked that the files' headers tell, and nothing else is read: the model has no memory.
    """
    # On a GPU too: copies into pinned memory are shared among torch's threads, which spin where they find no core.
    torch.set_num_threads(config.threads or 1)
    device = torch.device("meta" if headers else config.device)
    source = (SafetensorsHeaders if headers else SafetensorsFolder)(checkpoint.folder)
    random = config.weights == "random"
    names = {} if random else split_names(source.names(), checkpoint)["text"]
    of_ours = {ours: stored for stored, ours in names.items()}
    stored, told = stored_modules(names, source.dtype), partial(name_in_file, stored=of_ours)
    schemes = scheme_selector(checkpoint.quantization, stored, config.quantization, told)
    model_type = model_class(checkpoint.text.architecture)
    dtype = model_dtype(config.dtype, torch.device(config.device))
    model = model_type(checkpoint.text, schemes, dtype, device)
    if random and not headers:
        model.randomize(config.seed)
    elif not random:
        tensors = ((ours, source.get(stored)) for ours, stored in of_ours.items())
        fill("the text model", model.targets(set(of_ours)), tensors, of_ours)
    return model


def model_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype called ``name``; "auto" is float32 on the CPU, bfloat16 elsewhere."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16"
    return getattr(torch, name)
