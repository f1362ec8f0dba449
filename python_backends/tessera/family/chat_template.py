"""A checkpoint's jinja chat template, sandboxed, with what transformers offers one (its chat_template_utils.py)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tessera.checkpoint.config import CheckpointConfig
from tessera.checkpoint.files import read_json
from tessera.errors import CheckpointError, InvalidRequest
from tessera.family.chat import ImagePlace, Message
from tessera.family.tokenizer import Tokenizer
from tessera.family.user_text import Disguise, UserText, shown


def find_chat_template(config: CheckpointConfig, tokenizer: Tokenizer) -> str:
    """chat_template.jinja, else chat_template.json, the processor's or the tokenizer's ("default" of a named list)."""
    path = config.folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    for source in (read_json(config.folder, "chat_template.json"), config.processor, tokenizer.settings):
        template = source.get("chat_template")
        if isinstance(template, list):
            template = {item.get("name"): item.get("template") for item in template}.get("default")
        if isinstance(template, str):
            return template
    raise CheckpointError("the checkpoint has no chat template: put chat_template.jinja beside config.json")


def template_renderer(source: str, tokenizer: Tokenizer, disguise: Disguise) -> Callable[[Sequence[Message]], str]:
    """Chat of UserText -> prompt, in which that text is disguised still.

    The renderer raises InvalidRequest with the template's own words when it refuses a chat; CheckpointError where the
    template does to the text what UserText cannot follow.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **options: disguise.hide(_to_json(shown(value), **options))
    environment.globals["raise_exception"] = _raise_exception
    # What macros and set blocks give may be looked at too.
    environment.concat = lambda pieces: UserText("".join(pieces), disguise)  # type: ignore[method-assign]
    try:
        template = environment.from_string(source)
    except TemplateError as error:
        raise CheckpointError(f"the checkpoint's chat template is not valid: {error}") from None
    names = {**tokenizer.special_names, "tools": None, "documents": None, "add_generation_prompt": True}

    def render(messages: Sequence[Message]) -> str:
        turns = [{"role": message.role, "content": _content(message)} for message in messages]
        now = datetime.now().strftime
        try:
            rendered = template.render(messages=turns, strftime_now=now, **names)
            plainly = template.render(messages=shown(turns), strftime_now=now, **names)
        except TemplateError as error:
            raise InvalidRequest(f"the checkpoint's chat template refuses the messages: {error}") from None
        except Exception as error:
            raise CheckpointError(f"the checkpoint's chat template failed: {type(error).__name__}: {error}") from None
        if disguise.show(rendered) != plainly:
            raise CheckpointError("the checkpoint's chat template changes the messages' text in an unsupported way")
        return str.__str__(rendered)  # disguised, and an ordinary string

    return render


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's words for training; here it only passes them on."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _content(message: Message) -> Any:
    if isinstance(message.content, str):
        return message.content
    return [
        {"type": "image"} if isinstance(part, ImagePlace) else {"type": "text", "text": part}
        for part in message.content
    ]


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)
