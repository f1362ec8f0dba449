"""Chat templates that look at the text see the plain one, and still no user's text makes a special token."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from models import checkpoint_folders as folders
from test_prompt import FRAGMENTS, ORDINARY, Case

from tessera.errors import CheckpointError
from tessera.prompt.user_text import Disguise, UserText, shown

DISGUISE = Disguise(folders.SPECIAL)
# What a template does with text `t`; each is a whole prompt.
LOOKS = {
    "startswith": "{% if t.startswith('<') %}A{% else %}B{% endif %}{{ t }}",
    "endswith": "{% if t.endswith(('g>', 'x')) %}A{% else %}B{% endif %}{{ t }}",
    "length": "{{ t | length }}:{{ t }}",
    "in": "{% if 'img' in t or t in ['m', 'a <'] %}A{% endif %}{{ t }}",
    "equality": "{% if t == 'm' or t != 'i' %}A{% endif %}{{ t }}",
    "slices": "{{ t[1:] }}<|im_end|>{{ t[:2] }}{{ t[-1:] }}",
    "trim": "{{ t | trim }}|{{ t.lstrip('<m') }}|{{ t.rstrip('>') }}|{{ t.strip() }}",
    "split": "{{ t.split('m')[-1].lstrip('\\n') }}|{{ t.split() | join(',') }}|{{ t.rsplit('>', 1)[0] }}",
    "split by name": "{{ t.split(sep='m', maxsplit=1)[0] }}|{{ t.split(maxsplit=1) | last }}",
    "replace": "{{ t | replace('im', '<|im_end|>') }}{{ t.replace('<', '&lt;') }}",
    "partition": "{{ t.partition('>')[2] }}{{ t.rpartition('<')[0] }}",
    "case": "{{ t | upper }}{{ t.lower() }}{{ t | capitalize }}",
    "count": "{{ t.count('<') }}{{ t.find('m') }}{{ t }}",
    "letters": "{% for c in t %}{% if c == '<' %}!{% endif %}{{ c }}{% endfor %}{{ t | first }}{{ t | last }}",
    "json": "{{ messages | tojson }}",
    "macro": "{% macro f(x) %}{{ x }}!{% endmacro %}{% set y = f(t) | trim %}{{ y }}{{ y.startswith('m') }}",
    "block": "{% set y %}{{ t }}{% endset %}{{ y | length }}{{ 'mg' in y }}{{ y }}",
    "plus": "{% set y = '<' + t + 'm' %}{{ y.startswith('<<') }}{{ y }}",
    "lines": "{{ t.splitlines() | join('+') }}",
    "format": "{{ '%s!' % t }}{{ '{}?'.format(t) }}",
}


@pytest.fixture(scope="module", params=list(LOOKS))
def looking(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    template = "{% set t = messages[0]['content'] %}<|im_start|>" + LOOKS[request.param]
    return Case(folders.write_hf_folder(tmp_path_factory.mktemp("looking"), folders.byte_level(), template))


TEXTS = ORDINARY | st.text(st.sampled_from("<>|im g_xa\n"), min_size=1)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS)
@example(text="<mimg>")
@example(text=" img \n")
def test_templates_see_the_plain_text(looking: Case, text: str) -> None:
    """Before, a private-use character stood round it: another length, another beginning."""
    if not any(token in text for token in folders.SPECIAL):
        assert looking.ours(text).input_ids.tolist() == looking.theirs([{"role": "user", "content": text}])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(st.sampled_from([*FRAGMENTS, "m", " ", "\n"]), min_size=1, max_size=6))
def test_hostile_texts_make_no_special_token(looking: Case, pieces: list[str]) -> None:
    """Cut, joined, replaced: the only special tokens are those that the template itself writes."""
    text = "".join(pieces)
    special = {looking.tokenizer.token_id(token) for token in folders.SPECIAL}
    special -= {looking.tokenizer.token_id(token) for token in looking.family.user_tokens}
    written = 1
    if "replace('im'" in looking.source:
        written += text.count("im")
    written += looking.source.count("<|im_end|>{{")
    ids = looking.ours(text).input_ids.tolist()
    assert sum(index in special for index in ids) == written


@pytest.mark.parametrize("template", ["<|{{ messages[0]['content'] }}|>", "{{ messages[0]['content'] }}_end|>"])
def test_a_template_cannot_be_completed(tmp_path: Path, template: str) -> None:
    case = Case(folders.write_hf_folder(tmp_path, folders.byte_level(), template))
    for text in ("im_end", "<|im"):
        assert case.tokenizer.token_id("<|im_end|>") not in case.ours(text).input_ids.tolist()


def test_a_user_cannot_pose_as_the_template_that_wrote_the_bos_token(tmp_path: Path) -> None:
    template = "{{ messages[0]['content'] }}<|im_end|>"
    case = Case(folders.write_hf_folder(tmp_path, folders.llama_like(), template, {"bos_token": "<s>"}))
    ids = case.ours("<s>hi").input_ids.tolist()
    bos = case.tokenizer.token_id("<s>")
    assert ids[0] == bos and ids.count(bos) == 1
    assert case.tokenizer.decode(ids, skip_special_tokens=False) == "<s> <s>hi<|im_end|>"


def test_what_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    template = "{{ messages[0]['content'] | escape }}"
    case = Case(folders.write_hf_folder(tmp_path, folders.byte_level(), template))
    assert case.ours("plain").input_ids.tolist() == case.theirs([{"role": "user", "content": "plain"}])
    with pytest.raises(CheckpointError, match="unsupported way"):
        case.ours("a < b")


METHODS: list[tuple[str, tuple[Any, ...]]] = [
    *((name, ()) for name in ("strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "lower", "isdigit")),
    *((name, ("m",)) for name in ("split", "rsplit", "partition", "rpartition", "strip", "startswith", "count")),
    *(("replace", ("im", "x")), ("replace", ("<", "", 1)), ("split", ("<|", 1)), ("rsplit", (None, 1))),
    *(("__getitem__", (slice(1, None, 2),)), ("__add__", ("<",)), ("__radd__", ("<",)), ("__contains__", ("<|",))),
]


@given(st.text(st.sampled_from("<|im>end \n_xé")), st.text(st.sampled_from("<|im")), st.booleans())
def test_every_method_answers_as_plain_text(text: str, own: str, before: bool) -> None:
    """Also where part of the text is the template's ``own``."""
    hidden = DISGUISE.hide(text)
    ours = UserText(own + hidden if before else hidden + own, DISGUISE)
    plain = own + text if before else text + own
    assert shown(ours) == plain and ours == plain and hash(ours) == hash(plain)
    for name, arguments in METHODS:
        expected = ("<" + plain) if name == "__radd__" else getattr(plain, name)(*arguments)
        assert shown(getattr(ours, name)(*arguments)) == expected
        assert shown(getattr(ours, name)(*(UserText(DISGUISE.hide(a), DISGUISE) if isinstance(a, str) else a
                                            for a in arguments))) == expected  # fmt: skip


@given(st.text(), st.text())
def test_disguised_text_shares_no_character_with_a_special_token(text: str, other: str) -> None:
    hidden = DISGUISE.hide(text)
    assert DISGUISE.show(hidden) == text
    assert not {*hidden} & {*"".join(folders.SPECIAL)}


def test_a_marker_survives_what_a_template_does_to_the_text(tmp_path: Path) -> None:
    template = "{% set t = messages[0].content | trim %}{{ t.startswith('Look') }}{{ t.split(':')[1].strip() }}"
    case = Case(folders.write_hf_folder(tmp_path, folders.byte_level(), template))
    prompt = case.ours(" Look: <image> and <IMG_CONTEXT> ", images=1)
    assert prompt.spans.tolist() == [[prompt.spans[0, 0], 256]]
    text = case.tokenizer.decode(prompt.input_ids, skip_special_tokens=False)
    assert text == "True<img>" + "<IMG_CONTEXT>" * 256 + "</img> and <IMG_CONTEXT>"
