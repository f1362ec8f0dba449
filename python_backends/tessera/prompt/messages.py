"""A request's text or OpenAI-style messages, checked, with every image's place and source."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.errors import InvalidRequest

MARKER = "<image>"
ROLES = ("system", "user", "assistant")
IMAGE_PARTS = ("image", "image_url")
MAX_TURNS = 1024
MAX_PARTS = 1024


DETAILS = ("auto", "low", "high")


@dataclass(frozen=True)
class ImagePlace:
    """A content part that is an image; the chat template decides how it looks. ``low``: the least detail is enough."""

    low: bool = False


IMAGE = ImagePlace()


@dataclass(frozen=True)
class Message:
    """One turn: text, or parts that are text or IMAGE. With ``markers`` each ``<image>`` in its text is a place too."""

    role: str
    content: str | tuple[str | ImagePlace, ...]
    markers: bool = False

    @property
    def parts(self) -> tuple[str | ImagePlace, ...]:
        return (self.content,) if isinstance(self.content, str) else self.content

    @property
    def texts(self) -> list[str]:
        return [part for part in self.parts if isinstance(part, str)]


@dataclass(frozen=True)
class Chat:
    """``sources`` in order of appearance: an index into the request's images, or a URL that a message holds."""

    messages: tuple[Message, ...]
    sources: tuple[int | str, ...]

    @property
    def low(self) -> tuple[bool, ...]:
        """Of which of the sources the least detail is enough; only image parts can say so."""
        parts = [part.low for message in self.messages for part in message.parts if isinstance(part, ImagePlace)]
        return tuple(parts) or (False,) * len(self.sources)


def parse_chat(text: str | None, messages: Any, images: int) -> Chat:
    """Check a request and say which image stands where.

    ``text`` alone is one user turn. ``{"type": "image"}`` parts and ``<image>`` markers take the next of the
    request's ``images`` (their number); without either, all stand in front of the only user turn. In messages with
    an image part anywhere, ``<image>`` is plain text. Raises InvalidRequest that says both numbers when places and
    images differ.
    """
    if messages is None and not text and not images:
        raise InvalidRequest("the request has no text, no messages and no image; send text_input or messages")
    if text and messages is not None:
        raise InvalidRequest("the request has both text_input and messages; send one of them")
    turns: list[Message] = []
    sources: list[int | str | None] = []
    asked = _turns(messages, text)
    markers = not any(map(_has_image_part, asked))
    for index, message in enumerate(asked):
        turn, found = _turn(message, f"message {index}", markers)
        turns.append(turn)
        sources += found
    places = sum(source is None for source in sources)
    if images and not sources:
        return Chat(_in_front(turns, images), tuple(range(images)))
    if places != images:
        raise InvalidRequest(
            f"the prompt has {_counted(places, 'place')} for images but the request has {_counted(images, 'image')}"
            f"{_no_places(turns, sources)}; give one {MARKER} for each image, or none to put them first"
        )
    numbers = iter(range(images))
    return Chat(tuple(turns), tuple(next(numbers) if source is None else source for source in sources))


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _no_places(turns: Sequence[Message], sources: Sequence[int | str | None]) -> str:
    """What a user may have meant as a place for one of the request's images, and is none."""
    own = sum(source is not None for source in sources)
    typed = sum(text.count(MARKER) for turn in turns if not turn.markers for text in turn.texts)
    told = [f"{_counted(own, 'image part')} with a picture inside"] * bool(own)
    told += [f"{_counted(typed, MARKER + ' marker')} beside image parts or outside of user turns"] * bool(typed)
    return f" (not counted: {', '.join(told)})" if told else ""


def _turns(messages: Any, text: str | None) -> Sequence[Any]:
    if messages is None:
        return [{"role": "user", "content": text or ""}]
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidRequest("messages must be a list of at least one {role, content} object")
    if len(messages) > MAX_TURNS:
        raise InvalidRequest(f"{len(messages)} messages are above the limit of {MAX_TURNS}")
    return messages


def _has_image_part(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, (list, tuple)) and any(
        isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS for part in content
    )


def _turn(message: Any, where: str, markers: bool) -> tuple[Message, list[str | None]]:
    """The turn, and for each image in it its URL, or None where it takes the next of the request's images."""
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} must be an object with role and content, not {type(message).__name__}")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise InvalidRequest(f"{where}: role must be one of {', '.join(ROLES)}, not {role!r:.50}")
    markers = markers and role == "user"
    if isinstance(content, str):
        text = _text(content, where)
        places = text.count(MARKER) if markers else 0
        return Message(role, text, places > 0), [None] * places
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequest(f"{where}: content must be text or a list of parts, not {type(content).__name__}")
    if len(content) > MAX_PARTS:
        raise InvalidRequest(f"{where}: {len(content)} parts are above the limit of {MAX_PARTS}")
    parts: list[str | ImagePlace] = []
    sources: list[str | None] = []
    for index, part in enumerate(content):
        item, source = _part(part, role, f"{where}, part {index}")
        parts.append(item)
        if isinstance(item, ImagePlace):
            sources.append(source)
        elif markers:
            sources += [None] * item.count(MARKER)
    return Message(role, tuple(parts), markers and bool(sources)), sources


def _part(part: Any, role: str, where: str) -> tuple[str | ImagePlace, str | None]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        return _text(part.get("text"), where), None
    if kind not in IMAGE_PARTS:
        raise InvalidRequest(f"{where}: type must be text, image or image_url, not {kind!r:.50}")
    if role != "user":
        raise InvalidRequest(f"{where}: images belong in user turns, not in a turn of role {role}")
    if kind == "image_url":
        target = part.get("image_url")
        return _place(target, where), _url(target, where)
    if set(part) - {"type", "detail"}:
        raise InvalidRequest(
            f"{where}: an image part has no key but type and detail; it takes the next of the request's images. "
            "Use image_url with a data: URL to send one inside the message"
        )
    return _place(part, where), None


def _place(part: Any, where: str) -> ImagePlace:
    detail = part.get("detail", "auto") if isinstance(part, Mapping) else "auto"
    if detail not in DETAILS:
        raise InvalidRequest(f"{where}: detail must be one of {', '.join(DETAILS)}, not {detail!r:.50}")
    return ImagePlace(detail == "low")


def _url(value: Any, where: str) -> str:
    if isinstance(value, Mapping):
        value = value.get("url")
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}: image_url needs a url that is text")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}: text must be a string, not {type(value).__name__}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{where}: text has a lone surrogate at character {error.start}") from None
    return value


def _in_front(turns: Sequence[Message], images: int) -> tuple[Message, ...]:
    users = [index for index, turn in enumerate(turns) if turn.role == "user"]
    if len(users) != 1:
        raise InvalidRequest(
            f"the request has {_counted(images, 'image')}, no place for them{_no_places(turns, ())} and "
            f"{_counted(len(users), 'user turn')}; mark each image's place with {MARKER} in a user turn"
        )
    turn = turns[users[0]]
    marked = Message(turn.role, (IMAGE,) * images + turn.parts)
    return tuple(marked if index == users[0] else other for index, other in enumerate(turns))
