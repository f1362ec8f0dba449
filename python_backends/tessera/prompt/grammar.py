"""What an answer must match, a regular expression or a JSON schema, as a grammar of llguidance; the rest is refused.

llguidance was chosen over xgrammar because it is one wheel for every Python, needs no other package and imports in a
tenth of a second; xgrammar's import wants torch, transformers and tvm. It is imported where it is first needed.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tessera.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

    from tessera.prompt.sampling import SamplingParameters

# What a schema may nest, and count by its keywords, and what an expression's counts may come to: llguidance's memory
# and the time it takes for a single token grow with them.
MOST_DEPTH = 64
MOST_COUNT = 4096
MOST_REPEATED = 20_000
NICE = 10  # of what may take long: where the CPU is busy it gets a tenth of what others do
NOTHING_FOLLOWS = "no token of the vocabulary can come next"
# Without white space that a model could go on writing for ever: as Python's json.dumps writes it.
_WRITING: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_pattern": None,
    "coerce_one_of": False,
    "lenient": False,
}
# An escape, a class of characters (an unclosed one to the end, or the search takes long), a count, the flag that lets
# white space and comments stand between these, or a single character of an expression.
_PART = re.compile(
    r"\\[pPxuU]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?|\{(?P<count>[0-9]{1,18})(?:,(?P<most>[0-9]{0,18}))?\}"
    r"|(?P<spaced>\(\?[a-zA-Z]*x)|.",
    re.DOTALL,
)
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OF_SCHEMA = ("items", "additionalProperties")
_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_OF_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_OTHERS = ("type", "enum", "const", "required", "pattern", "format", "$ref")
# They describe and do not constrain. A oneOf whose branches a discriminator tells apart is known by the branches.
_WORDS = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator")
_NAMES = ("$schema", "$id", "$comment")
_APART = frozenset((*_WORDS, *_NAMES, "type", "$defs", "definitions"))  # they make no second demand
_EXCLUSIVE = {
    "exclusiveMinimum": ("maximum", "exclusiveMaximum"),
    "exclusiveMaximum": ("minimum", "exclusiveMinimum"),
}
_KNOWN = frozenset((*_COUNTS, *_NUMBERS, *_OF_SCHEMA, *_OF_SCHEMAS, *_OF_NAMED_SCHEMAS, *_OTHERS, *_WORDS, *_NAMES))


def check(parameters: SamplingParameters) -> None:
    """Raises InvalidRequest where no answer could be constrained as asked; quick where nothing is asked.

    It knows no checkpoint's vocabulary: every sequence of bytes can be written.
    """
    if parameters.constraint is not None:
        compiled(parameters, _bytes())


def grammar(parameters: SamplingParameters) -> str | None:
    """llguidance's text for what the answer must match; None for any. Raises InvalidRequest, as :func:`check`."""
    if parameters.constraint is None:
        return None
    from llguidance import LLMatcher

    if parameters.regex is not None:
        _check_expression(parameters.regex, "regex")
        return LLMatcher.grammar_from_regex(parameters.regex)
    if parameters.json_schema is None:
        return _json_grammar({"type": "object"})
    schema = json.loads(parameters.json_schema)
    _check_schema(schema, "json_schema", 0)
    return _json_grammar(schema)


def compiled(parameters: SamplingParameters, vocabulary: LLTokenizer) -> LLMatcher:
    """A matcher at the beginning of an answer. Raises InvalidRequest that names what of ``parameters`` is wrong."""
    from llguidance import LLMatcher

    text = grammar(parameters)
    assert text is not None, "nothing is constrained"
    matcher = LLMatcher(vocabulary, text, log_level=0)
    error = _error(matcher)
    if error is None:
        return matcher
    place = parameters.constraint or ""
    if parameters.json_schema is not None:
        place = _place(json.loads(parameters.json_schema), "json_schema", error, vocabulary)
    raise refusal(place, error)


def refusal(place: str, words: str) -> InvalidRequest:
    """``place``: where in the parameters; of a long one the end."""
    return InvalidRequest(f"sampling_parameters: {place if len(place) <= 150 else '...' + place[-147:]}: {words}")


def failure(matcher: LLMatcher) -> str | None:
    """Why a matcher cannot go on, in one line; None if it can. Where the answer may end it can."""
    if not matcher.is_error():
        return NOTHING_FOLLOWS if matcher.is_stopped() and not matcher.is_accepting() else None
    return _line(matcher.get_error())


def _error(matcher: LLMatcher) -> str | None:
    """Why no answer can begin. The first mask belongs to it: much is found to be too complex only there."""
    if not matcher.is_error():
        matcher.compute_bitmask()
    return failure(matcher)


def _line(message: str) -> str:
    """The line of llguidance's message that says it, and where in the expression, of which it shows several."""
    lines = message.splitlines()
    for before, line in pairwise(lines):
        if line.startswith("error: "):
            at = before.find("^")
            return line.removeprefix("error: ") + (f" (character {at - 4})" if at >= 4 else "")
    if message.startswith("panic"):
        return "it is too complex"
    first = lines[0].rpartition("(in regex): ")[2] if lines else "it could not be followed"
    if "lookarounds" in first:
        return "^, $ and \\b are not supported inside an expression; it always matches the whole answer"
    return NOTHING_FOLLOWS if first.startswith("NoExtension") else f"{first:.200}"


def _json_grammar(schema: Any) -> str:
    from llguidance import LLMatcher

    try:
        return LLMatcher.grammar_from_json_schema(schema, overrides=_WRITING)
    except ValueError as error:
        raise refusal("json_schema", f"{error!s:.200}") from None


def _check_expression(expression: str, place: str) -> None:
    """Refuses what llguidance would pass over in silence or take too long for."""
    if (len(expression) - len(expression.rstrip("\\"))) % 2:
        raise refusal(place, "it ends in a backslash that escapes nothing")
    groups, last = [1], 1  # the highest product of nested counts in each open group, and of what stands last
    for part in _PART.finditer(expression):
        if part["spaced"] is not None:
            raise refusal(place, "the flag x is not supported")
        if part["count"] is not None:
            last *= max(1, int(part["most"] or part["count"]))
        elif part[0] == ")" and len(groups) > 1:
            last = groups.pop()
        else:
            last = 1
        if part[0] == "(":
            groups.append(1)
        groups[-1] = max(groups[-1], last)
        if groups[-1] > MOST_REPEATED:
            raise refusal(place, f"it repeats something more than {MOST_REPEATED} times")


def _check_schema(schema: Any, place: str, depth: int, met: bool = False) -> None:
    """As above, of a schema and those inside it. ``met``: whether another schema holds for the same value."""
    if isinstance(schema, bool) and depth:
        return
    if not isinstance(schema, dict):
        raise refusal(place, "it must be a JSON schema, an object")
    if depth > MOST_DEPTH:
        raise refusal("json_schema", f"it is nested more than {MOST_DEPTH} deep")
    for name, value in schema.items():
        if name not in _KNOWN:
            raise refusal(place, f"the keyword {name!r:.50} is not supported")
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if name in _COUNTS and not (number and 0 <= value <= MOST_COUNT and value == int(value)):
            raise refusal(place, f"{name} must be a whole number between 0 and {MOST_COUNT}")
        if name in _NUMBERS and not number:
            raise refusal(place, f"{name} must be a number")
        if name == "pattern" and isinstance(value, str):
            _check_expression(value, f"{place}.pattern")
        for expression in value if name == "patternProperties" and isinstance(value, dict) else ():
            _check_expression(expression, f"{place}.patternProperties")
        if name in _OF_SCHEMAS and not isinstance(value, list):
            raise refusal(place, f"{name} must be a list of schemas")
        if name in _OF_NAMED_SCHEMAS and not isinstance(value, dict):
            raise refusal(place, f"{name} must be an object of schemas")
    # Of what the library would get wrong: a name may come twice, a property is not held against the patterns too, an
    # exclusive limit is let in where no whole number lies between, and so are others' properties beside an object.
    required = schema.get("required")
    if schema.get("minProperties", 0) > 1 + (len(required) if isinstance(required, list) else 0):
        raise refusal(place, "minProperties may exceed the required ones by one only")
    if "properties" in schema and "patternProperties" in schema:
        raise refusal(place, "properties and patternProperties exclude each other")
    for name, others in _EXCLUSIVE.items():
        whole = name in schema and schema[name] == int(schema[name])
        if whole and any(abs(schema[other] - schema[name]) < 1 for other in others if other in schema):
            raise refusal(place, f"{name} {schema[name]} must be at least 1 from the other limit")
    together = met or sum(name not in _APART for name in schema) > 1
    if together and _holds_object([schema.get("const"), schema.get("enum")]):
        raise refusal(place, "an object in const or enum must be the only demand")
    if met and "patternProperties" in schema:
        raise refusal(place, "patternProperties must not meet other schemas")
    for name, inner in _inner(schema):
        branch = name.startswith(("allOf", "anyOf", "oneOf"))
        _check_schema(inner, f"{place}.{name}", depth + 1, met or name.startswith("allOf") or (branch and together))


def _holds_object(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_holds_object, value)))


def _inner(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas right inside a schema, and where they stand."""
    for name in _OF_SCHEMA:
        if name in schema:
            yield name, schema[name]
    for name in _OF_SCHEMAS:
        yield from ((f"{name}[{place}]", inner) for place, inner in enumerate(schema.get(name, ())))
    for name in _OF_NAMED_SCHEMAS:
        yield from ((f"{name}.{key:.50}", inner) for key, inner in schema.get(name, {}).items())


def _place(schema: dict[str, Any], place: str, error: str, vocabulary: LLTokenizer) -> str:
    """The innermost schema that alone has this error too."""
    from llguidance import LLMatcher

    for name, inner in _inner(schema):
        if isinstance(inner, dict):
            alone = LLMatcher(vocabulary, _json_grammar(inner), log_level=0)
            if _error(alone) == error:
                return _place(inner, f"{place}.{name}", error, vocabulary)
    return place


_MOST_SPELLED = 256  # bytes
_MOST_WRITTEN = 1024  # texts whose tokens are kept: those that must come are few, and asked for at each mask


class Spelling:
    """A vocabulary as llguidance wants it. ``tokens``: the bytes of each; none, for those that must not be written."""

    bos_token_id = None

    def __init__(
        self, tokens: Sequence[bytes], eos_token_id: int, encode: Callable[[str], Sequence[int]] | None = None
    ) -> None:
        """``encode`` settles how text is written that is the only way on; the longest tokens first without it."""
        self.tokens = tokens
        self.eos_token_id = eos_token_id
        self.special_token_ids = [eos_token_id]
        self._encode = encode
        self._written = lru_cache(_MOST_WRITTEN)(self._write)
        self.goes_on = lru_cache(_MOST_WRITTEN)(self._goes_on)

    def __call__(self, text: bytes | str) -> list[int]:
        """The tokens of ``text``, or of its beginning: llguidance asks for all that must come, 20,000 characters of
        ``a{20000}`` at each mask, and goes by the first of them."""
        data = text.encode() if isinstance(text, str) else text
        if len(data) > _MOST_SPELLED:
            cut = next((cut for cut in range(_MOST_SPELLED, 0, -1) if data[cut] & 0xC0 != 0x80), _MOST_SPELLED)
            data = data[:cut]  # between two characters
        return self._written(data)

    def _goes_on(self, text: bytes, tokens: tuple[int, ...]) -> bool:
        """Whether llguidance is known to go on with the others, asked again behind each of these ``tokens``, which it
        gave for the beginning of a ``text`` that must come: it then asks for the last token and all that is left, but
        for what is left alone behind half a character."""
        if len(text) > _MOST_SPELLED:
            return False
        for place, token in enumerate(tokens):
            try:
                text.decode()
            except UnicodeDecodeError:
                return False
            if self._written(text)[: len(tokens) - place] != list(tokens[place:]):
                return False
            text = text[len(self.tokens[token]) :]
        return True

    def _write(self, data: bytes) -> list[int]:
        if self._encode is not None:
            with contextlib.suppress(UnicodeDecodeError, IndexError):  # some write tokens that the model lacks
                ids = list(self._encode(data.decode()))
                if b"".join(self.tokens[index] for index in ids) == data:  # not where a text is normalized first
                    return ids
        return self._longest_first(data)

    def _longest_first(self, data: bytes) -> list[int]:
        """A way to write ``data``, as far as there is one."""
        ids, start = [], 0
        while start < len(data):
            ends = range(min(len(data), start + self._longest), start, -1)
            end = next((end for end in ends if data[start:end] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[data[start:end]])
            start = end
        return ids

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {token: index for index, token in enumerate(self.tokens) if token}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids), default=0)


def tokenizer(spelling: Spelling) -> LLTokenizer:
    """Takes one to three seconds for 150,000 tokens."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(spelling))


@cache
def _bytes() -> LLTokenizer:
    return tokenizer(Spelling([*(bytes([byte]) for byte in range(256)), b""], 256))
