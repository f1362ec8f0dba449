"""Chat messages to token ids, with the places of the image rows.

A user's text can spell no special token: the chat template gets it disguised (``user_text.py``), so that all special
tokens of the rendered prompt are the template's own. What lies between them is shown again and encoded by a tokenizer
that knows no special token. Ordinary text gets the ids that transformers gives the rendered prompt.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tessera.checkpoint.config import CheckpointConfig
from tessera.checkpoint.config import context_length as allowed_length
from tessera.errors import CheckpointError, InvalidRequest
from tessera.models.family import ImagePlan, ModelFamily
from tessera.prompt.messages import MARKER, ImagePlace, Message
from tessera.prompt.templates import (
    conversation_renderer,
    find_chat_template,
    system_message,
    template_renderer,
    turns_of,
)
from tessera.prompt.tokenizer import Tokenizer
from tessera.prompt.user_text import Disguise, UserText

# Text of more characters a context token than this is counted in parts before it is encoded as a whole. Cutting it
# adds a few tokens at most to each part.
LIKELY_CHARACTERS = 4
PART = 16384
PART_SLACK = 64


@dataclass(frozen=True)
class Prompt:
    """``input_ids`` int32 [L]; ``spans`` int32 [k, 2]: (start, length) of each image's rows, in order."""

    input_ids: np.ndarray
    spans: np.ndarray


class PromptBuilder:
    """Builds prompts for one checkpoint; safe to share between threads.

    ``context_length`` in tokens and the ``system`` message of chats without one default to the checkpoint's own; an
    empty ``system`` is a system turn without words.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        family: ModelFamily,
        tokenizer: Tokenizer,
        context_length: int | None = None,
        system: str | None = None,
    ) -> None:
        self.family = family
        self.tokenizer = tokenizer
        self.context_length = allowed_length(config.text, context_length)
        self._system = system
        if config.conversation is None:
            source = find_chat_template(config, tokenizer)
            if family.template_image is not None:  # in the template alone: in a user's text it is that text
                source = source.replace(family.template_image, family.image_token)
        else:
            turns = turns_of(config.conversation)
            source = turns.words
            self._system = system_message(config) if system is None else system
        self._control_ids = {token: self._id_of(token) for token in family.control_tokens}
        if family.image_token_id not in (None, self._control_ids[family.image_token]):
            raise CheckpointError(
                f"the image token {family.image_token} has id {self._control_ids[family.image_token]} in the "
                f"tokenizer, {family.image_token_id} in config.json"
            )
        # What turns and image rows are made of is guarded even if the tokenizer's files do not call it special.
        for content, token in tokenizer.added_tokens.items():
            if token.special or content in source:
                self._control_ids[content] = self._id_of(content)
        self._controls = frozenset(self._control_ids)
        self._control_pattern = _any_of(self._controls)
        self._user_tokens = self._controls & set(family.user_tokens)
        self._user_pattern = _any_of(self._user_tokens)
        self._disguise = Disguise(self._controls)
        if config.conversation is None:
            self._render = template_renderer(source, tokenizer, self._disguise)
        else:
            self._render = conversation_renderer(turns, family.image_token)

    def build(self, messages: Sequence[Message], plans: Sequence[ImagePlan]) -> Prompt:
        """Token ids of a chat whose images, in order of appearance, have these ``plans``.

        Raises InvalidRequest when the prompt leaves no room in the context or the chat template refuses the chat;
        CheckpointError when the template loses or doubles an image.
        """
        if self._system is not None and all(message.role != "system" for message in messages):
            messages = [Message("system", self._system), *messages]
        self._check_text_length(messages)
        rendered = self._render([self._disguised(message) for message in messages])
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        for piece, is_control in self._pieces(rendered):
            if not is_control:
                plain = self.tokenizer.plain(self._controls, first=not ids)
                ids += plain.encode(piece, add_special_tokens=False).ids
            elif piece != self.family.image_token:
                ids.append(self._control_ids[piece])
            elif len(spans) < len(plans):
                self._append_image(ids, spans, plans[len(spans)])
            else:
                spans.append((len(ids), 0))
        if len(spans) != len(plans):
            raise CheckpointError(
                f"the checkpoint's chat template wrote {len(spans)} image tokens for {len(plans)} images"
            )
        bos = self.tokenizer.named.get("bos_token")
        if not (bos and rendered.startswith(bos)):
            ids = self.tokenizer.prefix_ids + ids + self.tokenizer.suffix_ids
            spans = [(start + len(self.tokenizer.prefix_ids), length) for start, length in spans]
        self._check_length(len(ids), plans)
        return Prompt(np.array(ids, dtype=np.int32), np.array(spans, dtype=np.int32).reshape(-1, 2))

    def _disguised(self, message: Message) -> Message:
        def hide(text: str) -> str:
            pieces = self._user_pattern.split(text)
            return "".join(piece if piece in self._user_tokens else self._disguise.hide(piece) for piece in pieces)

        def user_text(text: str) -> UserText:
            parts = text.split(MARKER) if message.markers else [text]
            return UserText(self.family.marker_text.join(map(hide, parts)), self._disguise)

        if isinstance(message.content, str):
            return Message(message.role, user_text(message.content))
        parts = tuple(part if isinstance(part, ImagePlace) else user_text(part) for part in message.content)
        return Message(message.role, parts)

    def _pieces(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """Control tokens (True) and the plain text between them (False), which may well read like a control token.

        Whitespace is taken off the text where a neighbouring token's flags say so.
        """
        flags = self.tokenizer.added_tokens
        pieces = [piece for piece in self._control_pattern.split(rendered) if piece]
        for index, piece in enumerate(pieces):
            if piece in self._controls:
                yield piece, True
                continue
            before = flags.get(pieces[index - 1]) if index else None
            after = flags.get(pieces[index + 1]) if index + 1 < len(pieces) else None
            text = self._disguise.show(piece)
            text = _SPACE_IN_FRONT.sub("", text) if before and before.rstrip else text
            text = _SPACE_BEHIND.sub("", text) if after and after.lstrip else text
            if text:
                yield text, False

    def _append_image(self, ids: list[int], spans: list[tuple[int, int]], plan: ImagePlan) -> None:
        for token, count in self.family.placeholder_tokens(plan):
            if token == self.family.image_token:
                spans.append((len(ids), count))
            ids += [self._control_ids[token]] * count

    def _id_of(self, token: str) -> int:
        index = self.tokenizer.token_id(token)
        if index is None:
            raise CheckpointError(f"the tokenizer has no token {token}, which the model's prompts need")
        return index

    def _check_text_length(self, messages: Sequence[Message]) -> None:
        """Refuse far too long text before much time goes into it: by its characters, then by counting its parts."""
        texts = [text for message in messages for text in message.texts]
        characters = sum(len(text) for text in texts)
        if characters <= LIKELY_CHARACTERS * self.context_length:
            return
        least = 0
        if characters <= self.context_length * self.tokenizer.longest_token:
            plain = self.tokenizer.plain(self._controls, first=False)
            for part in (text[at : at + PART] for text in texts for at in range(0, len(text), PART)):
                least += max(0, len(plain.encode(part, add_special_tokens=False)) - PART_SLACK)
                if least >= self.context_length:
                    break
            else:
                return
        raise InvalidRequest(
            f"the prompt's text has {characters} characters, which are more tokens than the context of "
            f"{self.context_length} holds. Shorten it"
        )

    def _check_length(self, length: int, plans: Sequence[ImagePlan]) -> None:
        if length < self.context_length:
            return
        rows = sum(plan.tokens for plan in plans)
        raise InvalidRequest(
            f"the prompt has {length} tokens ({rows} of them for {len(plans)} images); the context of "
            f"{self.context_length} leaves no room for an answer. Shorten the text or {self.family.reduce_hint}"
        )


# What the tokenizers' own expressions call whitespace; Python's has four separators more.
_SPACE_IN_FRONT, _SPACE_BEHIND = re.compile(r"\A[^\S\x1c-\x1f]+"), re.compile(r"[^\S\x1c-\x1f]+\Z")


def _any_of(tokens: frozenset[str]) -> re.Pattern[str]:
    """Matches any of ``tokens``, the longest first, as one group; nothing where there are none."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("(" + ("|".join(map(re.escape, longest_first)) or "(?!)") + ")")


def stop_token_ids(config: CheckpointConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that end an answer: those the checkpoint states and, for the original layout, its template's separator."""
    ids: set[int | None] = set(config.eos_token_ids)
    if config.conversation is not None:
        ids.add(tokenizer.token_id(turns_of(config.conversation).end_token))
    return tuple(sorted(index for index in ids or {tokenizer.eos_id} if index is not None))
