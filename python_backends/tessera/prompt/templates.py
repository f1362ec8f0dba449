"""A checkpoint's jinja chat template, sandboxed, with what transformers offers one (its chat_template_utils.py).

Turn templates of the original InternVL checkpoints, by the ``template`` that config.json names.

The checkpoint's conversation.py is code and never run; its system message is read from it as a string constant. It
belongs to the files, not to the template's name: the same name has had other sentences in other releases.
"""

import ast
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tessera.checkpoint.config import CheckpointConfig
from tessera.checkpoint.files import one_of, read_json
from tessera.errors import CheckpointError, InvalidRequest
from tessera.prompt.messages import ROLES, ImagePlace, Message
from tessera.prompt.tokenizer import Tokenizer
from tessera.prompt.user_text import Disguise, UserText, shown


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
    environment.filters["tojson"] = lambda value, ensure_ascii=False, **options: disguise.hide(
        json.dumps(shown(value), ensure_ascii=ensure_ascii, **options)
    )
    environment.globals["raise_exception"] = _raise_exception
    # What macros and set blocks give may be looked at too.
    environment.concat = lambda pieces: UserText("".join(pieces), disguise)  # type: ignore[method-assign]
    try:
        template = environment.from_string(source)
    except TemplateError as error:
        raise CheckpointError(f"the checkpoint's chat template is not valid: {error}") from None
    names = {**tokenizer.special_names, "tools": None, "documents": None, "add_generation_prompt": True}
    in_parts = _passes_over_plain_text(partial(template.render, strftime_now=datetime.now().strftime, **names))

    def render(messages: Sequence[Message]) -> str:
        turns = [{"role": message.role, "content": _content(message, in_parts)} for message in messages]
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


def _passes_over_plain_text(render: Callable[..., str]) -> bool:
    """Whether a template says the same whatever text a content is, unless the text is a part, as PaddleOCR-VL's does:
    transformers then renders a turn without its words, and nobody is told."""

    def differs(content_of: Callable[[str], Any]) -> bool:
        try:
            said = {str(render(messages=[{"role": "user", "content": content_of(text)}])) for text in ("4f1d", "Zebra")}
        except Exception:  # what a template refuses is said when it is asked for
            return False
        return len(said) > 1

    return not differs(str) and differs(lambda text: [{"type": "text", "text": text}])


def _content(message: Message, in_parts: bool) -> Any:
    if isinstance(message.content, str) and not in_parts:
        return message.content
    return [
        {"type": "image"} if isinstance(part, ImagePlace) else {"type": "text", "text": part} for part in message.parts
    ]


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


@dataclass(frozen=True)
class Turns:
    """What opens a turn, with its role as ``{role}``, and what closes it: without its newline, what ends an answer."""

    opening: str
    closing: str

    @property
    def words(self) -> str:
        """Everything that a prompt's turns can be made of."""
        return "".join(self.opening.format(role=role) for role in ROLES) + self.closing

    @property
    def end_token(self) -> str:
        return self.closing.strip()


_CHATML = "<|im_start|>{role}\n"
#: by the template's name
TURNS = {
    "internlm2-chat": Turns(_CHATML, "<|im_end|>"),
    "Hermes-2": Turns(_CHATML, "<|im_end|>"),
    "internvl2_5": Turns(_CHATML, "<|im_end|>\n"),
    "phi3-chat": Turns("<|{role}|>\n", "<|end|>"),
}


def turns_of(name: str) -> Turns:
    """The turns of this template. Raises CheckpointError for an unknown one: a near guess costs accuracy."""
    one_of(name, TURNS, "config.json: template")
    return TURNS[name]


def conversation_renderer(turns: Turns, image_token: str) -> Callable[[Sequence[Message]], str]:
    """Chat -> prompt; an image part becomes the image token and a newline, as the reference's ``<image>\\n``."""

    def turn(message: Message) -> str:
        parts = [f"{image_token}\n" if isinstance(part, ImagePlace) else part for part in message.parts]
        return turns.opening.format(role=message.role) + "".join(parts) + turns.closing

    return lambda messages: "".join(map(turn, messages)) + turns.opening.format(role="assistant")


def system_message(config: CheckpointConfig) -> str:
    """The default system message of an original checkpoint: config.json's, else conversation.py's constant.

    An empty one is a system turn without words, as in the reference. Raises CheckpointError where none is stated in
    plain text.
    """
    if isinstance(config.system_message, str):
        return config.system_message
    advice = 'or state "system_message" in config.json'
    if config.system_message is not None:
        raise CheckpointError(f"config.json's system_message must be text, not {config.system_message!r:.50}")
    try:
        tree = ast.parse((config.folder / "conversation.py").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            "the checkpoint has no conversation.py, which holds its system message: fetch that file from where the "
            f"checkpoint is from and put it beside config.json, {advice}"
        ) from None
    except (SyntaxError, ValueError) as error:
        raise CheckpointError(f"conversation.py of the checkpoint cannot be parsed: {error}") from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and "Conversation" in ast.dump(node.func)]
    settings = [{keyword.arg: getattr(keyword.value, "value", None) for keyword in call.keywords} for call in calls]
    found = [of_call for of_call in settings if of_call.get("name") == config.conversation]
    if len(found) != 1 or not isinstance(message := found[0].get("system_message"), str):
        raise CheckpointError(
            f"conversation.py of the checkpoint must define the template {config.conversation!r} once, with its "
            f"system_message as one plain string: fetch the file again from where the checkpoint is from, {advice}"
        )
    return message
