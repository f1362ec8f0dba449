"""Sampling parameters: preprocess refuses bad ones before any work goes into a request, the engine goes by them.

Priority with aging, used by every queue: the lower number first, and with time what has waited longest.

A rank never changes, so no request is passed for ever: one that comes late enough stands behind, in spite of its better
priority.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cached_property
from typing import Any

from tessera.errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_TOKENS = 64
MAX_BIASED_TOKENS = 1024
MOST_BIAS = 100.0
MAX_CHOICES = 64
MAX_CHOICE_CHARACTERS = 256
MAX_REGEX_CHARACTERS = 8192
MAX_SCHEMA_CHARACTERS = 65536
MAX_DRAFT_CHARACTERS = 65536
MAX_POOL_CHARACTERS = 128
LARGEST = 2**63 - 1  # an int64, as which whole numbers come to the device
# Keys of a request's sampling_parameters that say how finely its pictures are cut; a model family knows some of them.
POLICY_KEYS = ("tile_policy", "min_pixels", "max_pixels")
# All that are for preprocess alone.
PREPROCESS_KEYS = (*POLICY_KEYS, "timeout_us")
# What changes the logits by the tokens so far.
PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty", "no_repeat_ngram_size")
# What has no meaning where the answer is one of the choices.
EXCLUDED_BY_CHOICES = (
    *("temperature", "min_p", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "logprobs", "logit_bias"),
    "draft",
    *PENALTIES,
)
# What an answer must be; one request has one of them. The last three constrain it (see tessera.prompt.grammar).
SHAPES = ("choices", "regex", "json_schema", "json_object")


def _listed(names: list[str]) -> str:
    """The first three, shortened: a message stays short whatever was sent."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"{name!r:.40}" for name in names[:3]) + more


def _integer(low: int, high: int = LARGEST) -> Callable[[str, Any], int]:
    def read(name: str, value: Any) -> int:
        number = _number(name, value)
        if number != int(number):
            raise InvalidRequest(f"sampling_parameters: {name} must be a whole number, not {value!r:.50}")
        return int(_within(name, number, low, high))

    return read


def _real(low: float, high: float, above: bool = False) -> Callable[[str, Any], float]:
    def read(name: str, value: Any) -> float:
        number = float(_within(name, _number(name, value), low, high))
        if above and number == low:
            raise InvalidRequest(f"sampling_parameters: {name} must be above {low}")
        return number

    return read


def _number(name: str, value: Any) -> int | float:
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            try:
                value = float(value)
            except ValueError:
                value = None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST + 1:
        raise InvalidRequest(f"sampling_parameters: {name} must be a number between -2**63 and 2**63")
    return value


def _within(name: str, number: float, low: float, high: float) -> float:
    if not low <= number <= high:
        bounds = f"at least {low}" if high == math.inf else f"between {low} and {high}"
        raise InvalidRequest(f"sampling_parameters: {name} is {number}; it must be {bounds}")
    return number


def _flag(name: str, value: Any) -> bool:
    named = {"true": True, "1": True, "false": False, "0": False}
    flag = named.get(str(value).strip().lower())
    if flag is None or not isinstance(value, (bool, int, str)):
        raise InvalidRequest(f"sampling_parameters: {name} must be true or false, not {value!r:.50}")
    return flag


def _logprobs(name: str, value: Any) -> int | None:
    if isinstance(value, bool):
        return 0 if value else None
    return _integer(0, MAX_LOGPROBS)(name, value)


def _stop(name: str, value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, (list, tuple)) or not all(isinstance(s, str) and s for s in strings):
        raise InvalidRequest(f"sampling_parameters: {name} must be a non-empty string or a list of them")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"sampling_parameters: {name} holds {len(strings)} strings; {MAX_STOP_STRINGS} fit")
    return tuple(strings)


def _stop_token_ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or not all(type(token) is int and 0 <= token <= LARGEST for token in value):
        raise InvalidRequest(f"sampling_parameters: {name} must be a list of token ids")
    if len(value) > MAX_STOP_TOKENS:
        raise InvalidRequest(f"sampling_parameters: {name} holds {len(value)} tokens; {MAX_STOP_TOKENS} fit")
    return tuple(value)


def _logit_bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(
            f"sampling_parameters: {name} must be an object of token ids and biases, not {value!r:.50}"
        )
    if len(value) > MAX_BIASED_TOKENS:
        raise InvalidRequest(f"sampling_parameters: {name} holds {len(value)} tokens; {MAX_BIASED_TOKENS} fit")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        token = str(key)
        if not (token.isascii() and token.isdecimal() and len(token) < 19):
            raise InvalidRequest(f"sampling_parameters: {name}: {token!r:.50} is no token id")
        if int(token) in biases:
            raise InvalidRequest(f"sampling_parameters: {name} holds the token {int(token)} twice")
        biases[int(token)] = _real(-MOST_BIAS, MOST_BIAS)(f"{name}[{token}]", bias)
    return tuple(biases.items())


def _choices(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(label, str) and label for label in value):
        raise InvalidRequest(f"sampling_parameters: {name} must be a list of non-empty strings")
    if not 2 <= len(value) <= MAX_CHOICES:
        raise InvalidRequest(f"sampling_parameters: {name} holds {len(value)} labels; it takes 2 to {MAX_CHOICES}")
    for place, label in enumerate(value):
        _text(f"{name}[{place}]", label, MAX_CHOICE_CHARACTERS)
        if label in value[:place]:
            raise InvalidRequest(f"sampling_parameters: {name} holds {label!r:.50} twice")
    return tuple(value)


def _string(most: int, least: int = 0) -> Callable[[str, Any], str]:
    def read(name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise InvalidRequest(f"sampling_parameters: {name} must be a string, not {value!r:.50}")
        if len(value) < least:
            raise InvalidRequest(f"sampling_parameters: {name} must not be empty; leave it out")
        return _text(name, value, most)

    return read


def _json_schema(name: str, value: Any) -> str:
    """An object as JSON text; the order of its keys is that of the answer."""
    try:
        schema = json.loads(_text(name, value, MAX_SCHEMA_CHARACTERS)) if isinstance(value, str) else value
        if not isinstance(schema, Mapping):
            raise InvalidRequest(f"sampling_parameters: {name} must be a JSON object, not {value!r:.50}")
        text = json.dumps(schema, allow_nan=False)
    except RecursionError:
        raise InvalidRequest(f"sampling_parameters: {name} is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequest(f"sampling_parameters: {name} is not valid JSON: {error}") from None
    return _text(name, text, MAX_SCHEMA_CHARACTERS)


def _text(name: str, text: str, most: int) -> str:
    if len(text) > most:
        raise InvalidRequest(f"sampling_parameters: {name} has {len(text)} characters; {most} fit")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise InvalidRequest(f"sampling_parameters: {name} has a lone surrogate")
    return text


def _key(default: Any, read: Callable[[str, Any], Any]) -> Any:
    """A field, and what makes its value of a request's."""
    return field(default=default, metadata={"read": read})


@dataclass(frozen=True)
class SamplingParameters:
    """How to choose and end the answer; names, ranges and defaults are vLLM's, but that ``temperature`` is 0.

    ``max_tokens`` None: as many as the context has room for beside the prompt (and the cache, where it is smaller).
    ``temperature`` 0 is greedy. ``top_k`` 0 and -1 mean all tokens. ``seed`` None draws one. ``logprobs`` n returns,
    for every token, its own log probability and those of the n likeliest (True: 0; None: nothing). They are taken
    before temperature, top_k and top_p, and before penalties and whatever else rules tokens out.

    ``min_p`` rules out, after temperature and before top_k and top_p, what is less likely than that part of the
    likeliest token. ``stop_token_ids`` end the answer as the model's own end does, also under ``ignore_eos``.
    ``logit_bias`` (pairs of token and bias; sent as a mapping) is added to the logits before anything else changes
    them.

    ``repetition_penalty`` divides what is above 0 among the logits of all tokens of prompt and answer, and multiplies
    what is below. ``frequency_penalty`` is subtracted as often as the answer holds the token, ``presence_penalty`` once
    where it holds it at all. ``no_repeat_ngram_size`` n rules out what would repeat n tokens in a row of prompt and
    answer; 0 allows all. They apply in this order, before ``min_tokens`` and temperature; a picture's rows are no
    tokens to them. ``priority``: of the requests that wait, the lower ones run first.

    ``choices``: the answer is the likeliest of these labels, and every label's scores come with it (see
    tessera.engine.structured_output.labels). How much is computed follows from them, so ``max_tokens`` does not limit
    it; it still counts where prompt and answer must fit the context.

    ``regex``, ``json_schema`` (JSON text) or ``json_object`` (any JSON object): what the whole answer must match,
    unless max_tokens or a stop string ends it early. ``logprobs`` are then the model's own too: of tokens that are not
    allowed as well.

    ``draft``: text that the answer is likely to have. ``draft_pool``: a name; what answers of requests with the same
    name had in common with this one is likely too. Both change how soon an answer is there, never the answer.
    """

    max_tokens: int | None = _key(None, _integer(1))
    min_tokens: int = _key(0, _integer(0))
    temperature: float = _key(0.0, _real(0, math.inf))
    top_p: float = _key(1.0, _real(0, 1, above=True))
    top_k: int = _key(0, _integer(-1))
    seed: int | None = _key(None, _integer(-(2**63)))
    stop: tuple[str, ...] = _key((), _stop)
    ignore_eos: bool = _key(False, _flag)
    logprobs: int | None = _key(None, _logprobs)
    skip_special_tokens: bool = _key(True, _flag)
    include_stop_str_in_output: bool = _key(False, _flag)
    presence_penalty: float = _key(0.0, _real(-2, 2))
    frequency_penalty: float = _key(0.0, _real(-2, 2))
    repetition_penalty: float = _key(1.0, _real(0, 10, above=True))
    no_repeat_ngram_size: int = _key(0, _integer(0))
    priority: int = _key(0, _integer(-(2**63)))
    choices: tuple[str, ...] | None = _key(None, _choices)
    regex: str | None = _key(None, _string(MAX_REGEX_CHARACTERS))
    json_schema: str | None = _key(None, _json_schema)
    json_object: bool = _key(False, _flag)
    min_p: float = _key(0.0, _real(0, 1))
    stop_token_ids: tuple[int, ...] = _key((), _stop_token_ids)
    logit_bias: tuple[tuple[int, float], ...] = _key((), _logit_bias)
    draft: str | None = _key(None, _string(MAX_DRAFT_CHARACTERS))
    draft_pool: str | None = _key(None, _string(MAX_POOL_CHARACTERS, least=1))

    @property
    def least_room(self) -> int:
        """Tokens of an answer for which there must be room beside the prompt."""
        return self.max_tokens or max(self.min_tokens, 1)

    @property
    def constraint(self) -> str | None:
        """The name of the parameter that the answer must match."""
        return next((name for name in SHAPES[1:] if getattr(self, name) not in (None, False)), None)

    @cached_property  # asked at every step
    def penalized(self) -> bool:
        """Whether the tokens so far change the choice of the next."""
        return any(getattr(self, name) != getattr(SamplingParameters, name) for name in PENALTIES)

    @property
    def likeliest(self) -> bool:
        """Whether the likeliest token that a constraint allows, but for penalties, is all that is asked for, once there
        are ``min_tokens``."""
        wants = self.temperature > 0 or self.logprobs is not None or self.choices is not None
        return not (wants or self.logit_bias)

    @property
    def named_tokens(self) -> dict[str, list[int]]:
        """The tokens that parameters name, which a vocabulary must have."""
        return {"stop_token_ids": [*self.stop_token_ids], "logit_bias": [token for token, _ in self.logit_bias]}

    @classmethod
    def parse(cls, given: str | bytes | Mapping[str, Any] | None) -> SamplingParameters:
        """From JSON text or a mapping; strings that hold numbers count as numbers.

        PREPROCESS_KEYS are passed over. Raises InvalidRequest naming the key that is unknown, of a wrong type or
        out of range, or both keys where one excludes the other.
        """
        if isinstance(given, (str, bytes)):
            try:
                given = json.loads(given) if given.strip() else {}
            except ValueError as error:
                raise InvalidRequest(f"sampling_parameters is not valid JSON: {error}") from error
        if given is None:
            given = {}
        if not isinstance(given, Mapping):
            raise InvalidRequest(f"sampling_parameters must be a JSON object, not {type(given).__name__}")
        known = {key.name: key.metadata["read"] for key in fields(cls)}
        given = {name: value for name, value in given.items() if name not in PREPROCESS_KEYS}
        unknown = sorted(str(name) for name in given if name not in known)
        if unknown:
            near = get_close_matches(unknown[0][:40], [*known, *PREPROCESS_KEYS], 1, 0.75)
            meant = f"; did you mean {near[0]!r}?" if near else "; the clients' documentation lists the known ones"
            raise InvalidRequest(f"sampling_parameters: unknown key {_listed(unknown)}{meant}")
        values = {name: known[name](name, value) for name, value in given.items() if value is not None}
        parameters = cls(**values)
        if parameters.max_tokens is not None and parameters.min_tokens > parameters.max_tokens:
            raise InvalidRequest(
                f"sampling_parameters: min_tokens {parameters.min_tokens} exceeds max_tokens {parameters.max_tokens}"
            )
        shapes = [name for name in SHAPES if getattr(parameters, name) not in (None, False)]
        if parameters.constraint is not None and parameters.ignore_eos:
            shapes = [parameters.constraint, "ignore_eos"]
        if len(shapes) > 1:
            raise InvalidRequest(
                f"sampling_parameters: {shapes[0]} and {shapes[1]} exclude each other; send one of them"
            )
        if parameters.choices is not None:
            for name in EXCLUDED_BY_CHOICES:
                if getattr(parameters, name) != getattr(cls, name):
                    raise InvalidRequest(
                        f"sampling_parameters: choices and {name} exclude each other; send one of them"
                    )
        return parameters


# A minute of waiting is worth one step of priority: longer than a job whose requests fill the server waits (512 of them
# 5 to 60 s), so that its oldest do not stand in the way of a person's question; short enough that a job at priority 10
# gets on after ten minutes of nothing but questions.
STEP_NS = 60_000_000_000
# A client that asked a question may ask the next: this long it is expected, and no step is launched behind a long one.
RECENT_PRIORITY_NS = 30_000_000_000


def rank(priority: int, arrived_ns: int) -> int:
    """Lower goes first; equal priorities go in the order in which they arrived."""
    return arrived_ns + priority * STEP_NS


class RecentPriority:
    """The best recent priority, with which a request may come at any time."""

    def __init__(self) -> None:
        self._best = self._seen_ns = 0
        self._any = False

    def saw(self, priority: int, now_ns: int) -> None:
        """A request of this priority came."""
        if not self._any or priority <= self._best or now_ns - self._seen_ns > RECENT_PRIORITY_NS:
            self._best, self._seen_ns, self._any = priority, now_ns, True

    def above(self, priority: int) -> bool:
        """Whether a request that goes before those of this priority is expected."""
        return self._any and self._best < priority
