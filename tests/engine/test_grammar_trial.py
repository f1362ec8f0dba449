"""What answers are to match is tried out in a process that ends where it costs too much."""

from __future__ import annotations

import pytest

from tessera.engine.structured_output.compiling import GrammarTrial
from tessera.errors import InvalidRequest
from tessera.prompt import grammar
from tessera.prompt.sampling import SamplingParameters

# Each alone is quick; all together would take minutes.
LONG = {"allOf": [{"type": "integer", "multipleOf": n} for n in (2, 3, 5, 7, 11, 13, 17, 19, 23)]}


def parameters(**given):
    return SamplingParameters.parse(given)


def test_one_that_takes_too_long_is_refused_and_the_next_is_tried():
    trial = GrammarTrial()
    assert trial._process is None  # nobody has asked for one yet
    assert trial.check(parameters(regex="yes|no")) < trial.check(parameters(regex="a{19900}")) < 64 << 20
    first = trial._process
    with pytest.raises(InvalidRequest, match=r"regex: unclosed group \(character 1\)"):
        trial.check(parameters(regex="a(b"))
    assert trial._process is first
    with pytest.raises(InvalidRequest, match="json_schema is too complex: it takes more than 1 s"):
        trial.check(parameters(json_schema=LONG))
    assert trial._process is first  # only a child of its ended
    trial.check(parameters(json_schema={"type": "integer", "multipleOf": 23}))
    trial._process.kill()  # as the kernel does where memory is short
    trial._process.wait()
    trial.check(parameters(regex="yes|no", max_tokens=3))  # tried before
    assert trial._process.poll() is not None
    trial.check(parameters(json_object=True))
    trial._connection.close()
    assert trial._process.wait() == 0  # it ends with the stage


def test_expressions_are_read_in_time_that_grows_with_their_length():
    """An unclosed bracket is looked at once: at every bracket again, this would take half a minute."""
    with pytest.raises(InvalidRequest, match="unclosed character class"):
        GrammarTrial().check(parameters(json_schema={"pattern": "[" * 60_000}))


@pytest.mark.parametrize("expression", ["(?x)((a{1000}) {1000}) {1000}", "(?ix:(a{1000}) {1000})", "a(?sx)b"])
def test_the_flag_that_hides_counts_is_refused(expression):
    with pytest.raises(InvalidRequest, match="regex: the flag x is not supported"):
        grammar.check(parameters(regex=expression))
    grammar.check(parameters(regex=r"(?P<x>a)(?i-x:b)\(?x[(?x]"))
