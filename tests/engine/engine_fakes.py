"""A tokenizer of bytes, a runner without a model that notices wrong key/value blocks, and a tiny real model."""

import hashlib

import numpy as np
import torch

from tessera.checkpoint.config import TextConfig
from tessera.engine.drafts.text import with_draft
from tessera.engine.engine import Engine
from tessera.engine.execution.model_runner import ModelRunner
from tessera.engine.rendering import Answers
from tessera.engine.sequence import Report, Request, SamplingParameters
from tessera.engine.structured_output.labels import LabelScorer
from tessera.linear.quantization import scheme_selector
from tessera.models.registry import model_class
from tessera.prompt.tokenizer import TextStream
from tessera.settings.stages import EngineConfig

EOS = 256
VOCABULARY = 300


class ByteTokenizer:
    """Ids 0..255 are bytes, 256 is the special token <eos>; ids beyond it are not the tokenizer's."""

    special_ids = frozenset([EOS])
    numbers = frozenset(b"0123456789")
    eos_id = EOS
    strips_space = False

    def decode(self, ids, skip_special_tokens):
        stream = self.stream(skip_special_tokens)
        return stream.push(ids) + stream.end()

    def stream(self, skip_special_tokens):
        special = {} if skip_special_tokens else {EOS: b"<eos>"}
        return TextStream(lambda token: bytes([token]) if token < 256 else special.get(token, b""))

    def encode(self, text, special):
        return list(text.encode())

    def token_bytes(self, token):
        return bytes([token]) if token < 256 else b"<eos>" if token == EOS else b""


class TextEngine(Engine):
    """An engine whose steps give events: what the stage and the engine's process do together, in one loop."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.answers = Answers(self._tokenizer, self.cancel, hold_s=0)
        self._events = []

    def submit(self, request):
        request = with_draft(request, self._tokenizer)
        sequence = super().submit(request)
        self.answers.add(request, self._events.append)
        return sequence

    def step(self):
        return self.text_of(super().step())

    def text_of(self, progress):
        self.answers.take(progress)
        events, self._events[:] = list(self._events), []
        return events


class Known:
    """A step whose tokens need no waiting."""

    WAITED_NS = 0

    def __init__(self, tokens, device_ns):
        self.tokens = lambda: tokens
        self.device_ns = lambda: device_ns
        self.waited_ns = lambda before: self.WAITED_NS


class BookkeepingRunner:
    """Keeps, slot by slot, what a real cache would hold, and chooses tokens by hashing what a query would see.

    So a block that was shared wrongly, overwritten or never written changes the answer. A picture row's content is
    the first number of its embedding row. ``script`` fixes the answer of a request instead.
    """

    hidden_size = 1
    vocab_size = VOCABULARY
    position_axes = 1
    experts = False
    graph_steps = 0
    step_times = ()
    weights, weight_bytes = "none", 0

    def __init__(self, num_blocks, block_size, salt=lambda length: 0, tokens=range(VOCABULARY), async_launch=False):
        self.async_launch = async_launch
        self.num_blocks, self.block_size = num_blocks, block_size
        self.cache_salt = salt
        self.cache = {}
        self.script = {}
        self.report = None  # every token's
        self.device_ns = lambda number, tokens: 0  # of the step of this number, from 0, and of this many tokens
        self.batches = []
        self._tokens = tokens
        self._sampled = {}

    def launch(self, batch):
        return Known(self.run(batch), self.device_ns(len(self.batches) - 1, batch.tokens))

    def run(self, batch):
        assert batch.spans, "an empty batch ran"
        self.batches.append([(span.sequence, span.start, span.end, span.samples) for span in batch.spans])
        singles = [span.count == 1 for span in batch.spans]
        assert singles == sorted(singles, reverse=True), "single tokens come first"
        assert len({span.sequence for span in batch.spans}) == len(batch.spans)
        for span in batch.spans:
            known = span.sequence.known + len(span.sequence.draft)
            assert span.count == 1 or span.end <= known, "only a lone token may be unknown yet"
            assert not span.sequence.draft or span.samples == span.count == len(span.sequence.draft) + 1
            for position in range(span.start, span.end):
                self.cache[self._slot(span.sequence, position)] = self._content(span.sequence, position)
        return [self._choose(span, row) for span in batch.spans for row in range(span.samples)]

    def _choose(self, span, row):
        end = span.end - span.samples + 1 + row
        seen = [self.cache[self._slot(span.sequence, position)] for position in range(end)]
        children = span.sequence.children
        if children:
            return 0, Report(0.0, tuple((child, child_logprob(seen, child)) for child in children))
        tokens = self._tokens
        mask = span.sequence.mask(row)
        if isinstance(mask, int):
            tokens = [token for token in tokens if token == mask]
        elif mask is not None:
            allowed = np.unpackbits(mask, bitorder="little")
            tokens = [token for token in tokens if allowed[token]]
        token = next_token(seen, tokens)
        answered = end - span.sequence.prompt_length
        script = self.script.get(span.sequence.request.request_id)
        if script is not None:
            token = script[answered % len(script)]
        self._sampled[span.sequence, end] = token
        return token, self.report

    def _slot(self, sequence, position):
        return sequence.block_table[position // self.block_size] * self.block_size + position % self.block_size

    def _content(self, sequence, position):
        if position >= sequence.known + len(sequence.draft):  # sampled by a step that is not applied yet
            return self._sampled[sequence, position]
        where = np.flatnonzero(sequence.image_positions == position)
        if len(where):
            return int(sequence.embeddings[int(where[0]), 0])
        return int(sequence.ids[position])


def next_token(contents, tokens=range(VOCABULARY)):
    """What BookkeepingRunner answers to a context."""
    digest = hashlib.blake2b(np.array(contents, np.int64).tobytes(), digest_size=8).digest()
    return tokens[int.from_bytes(digest, "little") % len(tokens)]


def expected_answer(contents, max_tokens, stop_ids=(EOS,), tokens=range(VOCABULARY)):
    """BookkeepingRunner's greedy answer to a prompt, computed without blocks or batches."""
    contents, answer = list(contents), []
    while len(answer) < max_tokens and not (answer and answer[-1] in stop_ids):
        answer.append(next_token(contents, tokens))
        contents.append(answer[-1])
    return answer


def child_logprob(contents, child):
    """What BookkeepingRunner reports of a token after a context."""
    return -1 - next_token([*contents, child], range(1000)) / 100


def expected_label(contents, choices):
    """The tokens of the label that BookkeepingRunner finds best, computed without blocks or batches."""
    scorer = LabelScorer(choices, lambda text: list(text.encode()), (EOS,))
    while not scorer.done:
        path, children = scorer.branch.path, scorer.branch.children
        scorer.observe([child_logprob([*contents, *path], child) for child in children])
    return list(scorer.answer().tokens)


def make_request(ids, name="r", pictures=(), **sampling):
    """``pictures``: (start, rows, content) each; equal contents have equal digests."""
    spans = np.array([[start, rows] for start, rows, _ in pictures], np.int32).reshape(-1, 2)
    digest = np.array([[content, ~content] for *_, content in pictures], np.int64).reshape(-1)
    rows = [torch.full((rows, 1), float(content)) for _, rows, content in pictures]
    return Request(
        name,
        np.array(ids, np.int32),
        spans,
        torch.cat(rows) if rows else None,
        digest,
        SamplingParameters.parse(sampling),
    )


def contents_of(request):
    """What stands at each prompt position: token ids, and the pictures' contents."""
    contents = [int(token) for token in request.input_ids]
    row = 0
    for start, length in request.spans:
        for position in range(start, start + length):
            contents[position] = int(request.embeddings[row, 0])
            row += 1
    return contents


def make_engine(
    num_blocks=64,
    block_size=4,
    max_model_len=200,
    tokens=range(VOCABULARY),
    salt=lambda length: 0,
    async_launch=False,
    **settings,
):
    """An engine on a BookkeepingRunner."""
    defaults = dict(max_batched_tokens=64, max_sequences=8, drafts=0)
    config = EngineConfig(block_size=block_size, **(defaults | settings))
    runner = BookkeepingRunner(num_blocks, block_size, salt, tokens, async_launch)
    return TextEngine(runner, ByteTokenizer(), config, max_model_len, (EOS,)), runner


class Guess:
    """A drafter that knows the answer, and is wrong at every ``wrong``-th place of it; 0: never."""

    prior = 0.5
    holds = 4

    def __init__(self, answer, wrong=0):
        self._answer, self._wrong = answer, wrong

    def propose(self, outputs, most):
        said = len(outputs)
        places = range(said, min(said + most, len(self._answer)))
        return [self._answer[at] ^ bool(self._wrong and (at + 1) % self._wrong == 0) for at in places]


def draft(engine, drafters):
    """Has ``drafters(request)`` propose the tokens of each answer, in steps that cost the same whatever they hold."""
    engine._drafters = drafters
    load = engine.scheduler.load
    load.costs.record = load.record_host_time = lambda *measured: None
    load.costs.step_ns = lambda tokens: 1e6


def run(engine, limit=2000):
    """Steps until nothing is left; returns all events."""
    events = []
    for _ in range(limit):
        if not engine.has_work():
            return events
        events += engine.step()
        engine.scheduler.check()
    raise AssertionError("the engine does not come to an end")


def ends(events):
    return {e.request.request_id: e.finish_reason for e in events if e.finish_reason}


def tokens_of(events, name="r"):
    return [token for e in events if e.request.request_id == name for token in e.token_ids]


def text_of(events, name="r"):
    return "".join(e.text for e in events if e.request.request_id == name)


def tiny_config(**changes):
    values = dict(
        architecture="Qwen2ForCausalLM",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        rope_scaling=None,
        attention_bias=True,
        output_bias=False,
        mlp_bias=False,
        tie_word_embeddings=True,
        hidden_act="silu",
    )
    return TextConfig(**(values | changes))


def tiny_model(seed=3, device="cpu", dtype=torch.float32, **changes):
    """A random model, the same on every device, whose answers depend strongly on the whole prompt."""
    torch.set_num_threads(1)
    config = tiny_config(**changes)
    model, drawn = (
        model_class(config.architecture)(config, scheme_selector(None), dtype, torch.device(each))
        for each in (device, "cpu")
    )
    for each in (model, drawn):
        each.randomize(seed)
    for (name, buffer), values in zip(model.named_buffers(), drawn.buffers(), strict=True):
        buffer.copy_(values * 15 if buffer.ndim > 1 and "embedding" not in name else values)
    return model


def tiny_engine(model, max_model_len=256, eos=(), **settings):
    """An engine on a real tiny model."""
    defaults = dict(block_size=4, max_batched_tokens=512, max_sequences=16, drafts=0)
    config = EngineConfig(**(defaults | settings))
    runner = ModelRunner.of_model(model, config, max_model_len)
    return TextEngine(runner, ByteTokenizer(), config, max_model_len, eos)
