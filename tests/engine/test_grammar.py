"""What answers may be asked to match: parameters, expressions and schemas that are accepted, and the refusals."""

import json

import pytest
from engine_fakes import make_engine, make_request

from tessera.errors import InvalidRequest
from tessera.prompt import grammar
from tessera.prompt.sampling import SamplingParameters

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "kind": {"enum": ["door", "wire"]}},
    "required": ["x", "kind"],
    "additionalProperties": False,
}


def test_parameters():
    assert SamplingParameters.parse({"regex": "a|b"}).constraint == "regex"
    text = SamplingParameters.parse({"json_schema": json.dumps(POINT)})
    assert text == SamplingParameters.parse({"json_schema": POINT}) and text.constraint == "json_schema"
    assert list(json.loads(text.json_schema)["properties"]) == ["x", "kind"]  # an answer's keys keep this order
    assert SamplingParameters.parse({"json_object": "true"}).constraint == "json_object"
    free = SamplingParameters.parse({"regex": None, "json_schema": None, "json_object": False})
    assert free == SamplingParameters() and free.constraint is None
    assert grammar.check(free) is None


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"regex": 3}, "regex must be a string"),
        ({"draft_pool": ""}, "draft_pool must not be empty"),
        ({"regex": "a" * 8193}, "regex has 8193 characters; 8192 fit"),
        ({"regex": "\ud800"}, "regex has a lone surrogate"),
        ({"json_schema": '{"type":'}, "json_schema is not valid JSON"),
        ({"json_schema": [POINT]}, "json_schema must be a JSON object"),
        ({"json_schema": {"const": float("nan")}}, "json_schema is not valid JSON"),
        ({"json_schema": '{"items":' * 5000 + "1" + "}" * 5000}, "json_schema is nested too deeply"),
        ({"json_schema": {"title": "a" * 65536}}, "json_schema has 65549 characters; 65536 fit"),
        ({"json_object": "maybe"}, "json_object must be true or false"),
        ({"regex": "a", "json_object": True}, "regex and json_object exclude each other"),
        ({"regex": "a", "json_schema": {}}, "regex and json_schema exclude each other"),
        ({"choices": ["a", "b"], "regex": "a"}, "choices and regex exclude each other"),
        ({"regex": "a", "ignore_eos": True}, "regex and ignore_eos exclude each other"),
    ],
)
def test_parameters_that_are_refused(sampling, words):
    with pytest.raises(InvalidRequest, match=words):
        SamplingParameters.parse(sampling)


def inside(schema):
    """The schema deep in another one."""
    return {"properties": {"list": {"type": "array", "items": {"anyOf": [{"type": "null"}, schema]}}}}


INSIDE = r"json_schema\.properties\.list\.items\.anyOf\[1\]"


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"regex": "a(b"}, r"regex: unclosed group \(character 1\)"),
        ({"regex": "a(?=b)b"}, r"regex: look-around.* is not supported \(character 1\)"),
        ({"regex": r"(a)\1"}, r"regex: backreferences are not supported \(character 3\)"),
        ({"regex": "a\\"}, "regex: it ends in a backslash"),
        # The flag hides counts.
        ({"regex": "(?x)((a{1000}) {1000}) {1000}"}, "regex: the flag x is not supported"),
        ({"regex": "(?ix:(a{1000}) {1000})"}, "regex: the flag x is not supported"),
        ({"regex": "((a{20}|b){100}c){20}"}, "regex: it repeats something more than 20000 times"),
        ({"json_schema": inside({"pattern": "(a{999}){999}"})}, INSIDE + ".pattern: it repeats something"),
        ({"json_schema": inside({"patternProperties": {"a{20001}": {}}})}, INSIDE + ".patternProperties: it repeats"),
        ({"json_schema": inside({"required": ["a"], "minProperties": 3})}, INSIDE + ": minProperties may exceed"),
        ({"json_schema": inside({"properties": {}, "patternProperties": {}})}, INSIDE + ": properties and pattern"),
        ({"json_schema": inside({"exclusiveMinimum": 0, "maximum": 0.5})}, INSIDE + ": exclusiveMinimum 0 must be"),
        ({"json_schema": inside({"minimum": -0.5, "exclusiveMaximum": 0})}, INSIDE + ": exclusiveMaximum 0 must be"),
        ({"json_schema": inside({"const": {"x": 1}, "required": ["y"]})}, INSIDE + ": an object in const or enum"),
        ({"json_schema": inside({"allOf": [{"enum": [[{}]]}]})}, INSIDE + r".allOf\[0\]: an object in const or enum"),
        ({"json_schema": {"required": ["y"], "anyOf": [{"const": {}}]}}, r"anyOf\[0\]: an object in const or enum"),
        (
            {"json_schema": inside({"allOf": [{"patternProperties": {}}]})},
            r"allOf\[0\]: patternProperties must not meet",
        ),
        ({"regex": "a^b"}, "not supported inside an expression"),
        ({"regex": r"[^\x00-\x{10ffff}]"}, "regex: no token of the vocabulary can come next"),
        ({"json_schema": {"$ref": "#"}}, "json_schema: no token of the vocabulary can come next"),
        ({"json_schema": {"$ref": "#/$defs/x"}}, "json_schema: Pointer '/.defs/x' does not exist"),
        ({"json_schema": {"title": "\ud800"}}, "json_schema: .* not JSON"),
        ({"json_schema": inside({"if": {}})}, INSIDE + ": the keyword 'if' is not supported"),
        ({"json_schema": inside({"minLenght": 3})}, INSIDE + ": the keyword 'minLenght' is not supported"),
        ({"json_schema": inside({"x-guidance": {"lenient": True}})}, "the keyword 'x-guidance' is not supported"),
        ({"json_schema": inside({"type": "text"})}, INSIDE + ": Invalid type: text"),
        ({"json_schema": inside({"type": "string", "format": "colour"})}, INSIDE + ": Unknown format: colour"),
        ({"json_schema": inside({"type": "string", "pattern": "(?=b)"})}, INSIDE + ": look-around"),
        ({"json_schema": inside({"minItems": 10**9})}, INSIDE + ": minItems must be a whole number between 0 and 4096"),
        ({"json_schema": inside({"minimum": True})}, INSIDE + ": minimum must be a number"),
        ({"json_schema": inside({"anyOf": {}})}, INSIDE + ": anyOf must be a list"),
        ({"json_schema": inside({"properties": []})}, INSIDE + ": properties must be an object"),
        ({"json_schema": inside(3)}, INSIDE + ": it must be a JSON schema"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_its_place(sampling, words):
    parameters = SamplingParameters.parse(sampling)
    with pytest.raises(InvalidRequest, match=words):
        grammar.check(parameters)
    engine, _ = make_engine()
    with pytest.raises(InvalidRequest, match=words):
        engine.submit(make_request([1], **sampling))
    assert not engine.has_work()


def test_schemas_as_pydantic_writes_them_are_accepted():
    """A union told apart by a field, an optional field, a dictionary, a pair and a date, with titles and defaults."""
    branch = {"properties": {"kind": {"const": "a", "title": "Kind", "type": "string"}}, "required": ["kind"]}
    other = {"properties": {"kind": {"const": "b", "type": "string"}}, "required": ["kind"], "type": "object"}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$defs": {"A": {"type": "object", "title": "A", **branch}, "B": other},
        "properties": {
            "x": {"discriminator": {"propertyName": "kind"}, "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]},
            "n": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None, "description": "how many"},
            "d": {"additionalProperties": {"type": "integer"}, "default": {}, "type": "object"},
            "t": {"maxItems": 2, "minItems": 2, "prefixItems": [{"type": "integer"}, {"type": "string"}]},
            "when": {"format": "date-time", "type": "string"},
            "origin": {"const": {"x": 0}, "title": "Origin"},
            "share": {"exclusiveMinimum": 0, "exclusiveMaximum": 1, "type": "number"},
            "near": {"exclusiveMinimum": -0.5, "maximum": 0.2, "type": "integer"},
        },
        "required": ["x", "when"],
        "type": "object",
    }
    grammar.check(SamplingParameters.parse({"json_schema": schema}))


def test_counts_are_those_of_what_is_repeated():
    for expression in (
        r"(a{150}){100}b{20000}(c{3}){100}",
        r"\x{30000}[{30000}]\{30000}\p{L}",
        "a\\\\",
        "(a{20}){0,1000}|(b)",
        r"(?P<x>a)(?i-x:b)\(?x[(?x]",
    ):
        grammar.check(SamplingParameters.parse({"regex": expression}))


def test_deep_schemas_are_refused():
    schema = {"type": "null"}
    for _ in range(grammar.MOST_DEPTH + 1):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest, match="json_schema: it is nested more than 64 deep"):
        grammar.check(SamplingParameters.parse({"json_schema": schema}))


@pytest.mark.parametrize("wrong", [{"if": {}}, {"type": "text"}, {"enum": ["a" * 9000, 10**30]}])
def test_refusals_are_short_and_show_nothing_of_the_server(wrong):
    for name in range(15):
        wrong = {"properties": {f"{'long ' * 20}{name}": wrong}}
    with pytest.raises(InvalidRequest) as refused:
        grammar.check(SamplingParameters.parse({"json_schema": wrong}))
    assert len(str(refused.value)) <= 400 and "Traceback" not in str(refused.value)
