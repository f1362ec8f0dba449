"""Turn templates of the original InternVL checkpoints, by the ``template`` that config.json names.

The checkpoint's conversation.py is code and never run; its system message is read from it as a string constant. It
belongs to the files, not to the template's name: the same name has had other sentences in other releases.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tessera.errors import CheckpointError
from tessera.family.chat import ImagePlace, Message

if TYPE_CHECKING:
    from tessera.checkpoint.config import CheckpointConfig


@dataclass(frozen=True)
class Conversation:
    """Separators of one template; ``{role}`` in ``opening``."""

    opening: str
    separator: str

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
    "internlm2-chat": Conversation(CHATML, "<|im_end|>"),
    "Hermes-2": Conversation(CHATML, "<|im_end|>"),
    "internvl2_5": Conversation(CHATML, "<|im_end|>\n"),
}


def conversation_for(name: str) -> Conversation:
    """The template of that name. Raises CheckpointError for one that is not known: a near guess costs accuracy."""
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
    settings = [{keyword.arg: _constant(keyword.value) for keyword in call.keywords} for call in calls]
    found = [of_call for of_call in settings if of_call.get("name") == config.conversation]
    if len(found) != 1 or not isinstance(message := found[0].get("system_message"), str):
        raise CheckpointError(
            f"conversation.py of the checkpoint must define the template {config.conversation!r} once, with its "
            f"system_message as one plain string: fetch the file again from where the checkpoint is from, {advice}"
        )
    return message


def _constant(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else None
