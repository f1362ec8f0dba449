"""Turn templates of the original InternVL checkpoints, by the ``template`` that config.json names.

The checkpoint's conversation.py is code and never run; its system message is read from it as a string constant. It
belongs to the files, not to the template's name: the same name has had other sentences in other releases.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tessera.checkpoint.config import CheckpointConfig
from tessera.checkpoint.files import one_of
from tessera.errors import CheckpointError
from tessera.family.chat import ROLES, ImagePlace, Message


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
