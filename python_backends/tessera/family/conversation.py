"""Turn templates of the original InternVL checkpoints, by the ``template`` that config.json names.

The checkpoint's conversation.py is code and never run; its system message is read from it as a string constant.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.errors import CheckpointError
from tessera.family.chat import ImagePlace, Message


@dataclass(frozen=True)
class Conversation:
    """Separators of one template; ``{role}`` in ``opening``. ``bos``: whether its tokenizers put <s> in front."""

    opening: str
    separator: str
    bos: bool

    @property
    def stop_token(self) -> str:
        """The token that ends an answer."""
        return self.separator.strip()

    def render(self, turns: Iterable[tuple[str, str]]) -> str:
        """(role, text) turns as one prompt that ends where the assistant begins to speak."""
        text = "".join(self.opening.format(role=role) + content + self.separator for role, content in turns)
        return text + self.opening.format(role="assistant")


CHATML = "<|im_start|>{role}\n"
CONVERSATIONS = {
    "internlm2-chat": Conversation(CHATML, "<|im_end|>", bos=True),
    "Hermes-2": Conversation(CHATML, "<|im_end|>", bos=False),
    "internvl2_5": Conversation(CHATML, "<|im_end|>\n", bos=False),
}


def conversation_for(raw: dict[str, Any]) -> Conversation:
    """The template config.json names. Raises CheckpointError for one that is not known: a near guess costs accuracy."""
    name = raw.get("template")
    if name not in CONVERSATIONS:
        raise CheckpointError(f"config.json names the template {name!r}; supported are {sorted(CONVERSATIONS)}")
    return CONVERSATIONS[name]


def conversation_renderer(conversation: Conversation, image_token: str) -> Callable[[Sequence[Message]], str]:
    """Chat -> prompt; an image part becomes the image token and a newline, as the reference's ``<image>\\n``."""

    def text(message: Message) -> str:
        if isinstance(message.content, str):
            return message.content
        return "".join(f"{image_token}\n" if isinstance(part, ImagePlace) else part for part in message.content)

    return lambda messages: conversation.render((message.role, text(message)) for message in messages)


def system_message(folder: Path, raw: dict[str, Any]) -> str | None:
    """The checkpoint's default system message: config.json's ``system_message``, else conversation.py's constant.

    None if neither states one: then no system turn is written.
    """
    stated = raw.get("system_message")
    if isinstance(stated, str):
        return stated or None
    try:
        tree = ast.parse((folder / "conversation.py").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (SyntaxError, ValueError) as error:
        raise CheckpointError(f"conversation.py of the checkpoint cannot be parsed: {error}") from None
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        constants = {
            keyword.arg: keyword.value.value for keyword in call.keywords if isinstance(keyword.value, ast.Constant)
        }
        message = constants.get("system_message")
        if constants.get("name") == raw.get("template") and isinstance(message, str):
            return message or None
    return None
