"""What a forward consists of: the calls that it made, with what they were given, to be made again kind by kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

Path = tuple[str, ...]
"""The name of a call, after those of the calls that it was made in."""
Name = str | Callable[..., str]
"""A call's name, or what finds it by the call's arguments."""


class RecordedCalls:
    """Records while the context lasts; afterwards everything that was watched is as before.

    ``calls``: by path, in their order. They hold their arguments, and with them much of a forward's memory.
    """

    def __init__(self) -> None:
        self.calls: dict[Path, list[Callable[[], Any]]] = defaultdict(list)
        self._path: Path = ()
        self._on = False
        self._undo = ExitStack()

    def __enter__(self) -> RecordedCalls:
        self._on = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._on = False
        self._undo.close()

    def watch(self, owner: Any, attribute: str, name: Name, keep: Callable[[Any], Any] | None = None) -> None:
        """Records the calls of a method of an object or a function of a module, as :meth:`wrapped`."""
        kept = vars(owner).get(attribute)
        setattr(owner, attribute, self.wrapped(getattr(owner, attribute), name, keep))
        self._undo.callback(*((delattr, owner, attribute) if kept is None else (setattr, owner, attribute, kept)))

    def wrapped(self, call: Callable[..., Any], name: Name, keep: Callable[[Any], Any] | None = None) -> Any:
        """The call, recorded; ``keep``: argument -> what is kept in its place, for one that a second call may not be
        given as the first left it."""

        def recorded(*args: Any, **options: Any) -> Any:
            if not self._on:
                return call(*args, **options)
            before, self._path = self._path, (*self._path, name if isinstance(name, str) else name(*args))
            self.calls[self._path].append(partial(call, *(map(keep, args) if keep else args), **options))
            try:
                return call(*args, **options)
            finally:
                self._path = before

        return recorded

    def parts(self) -> dict[str, list[Callable[[], Any]]]:
        """The outermost calls, by name: together they are the forward."""
        return {path[0]: calls for path, calls in self.calls.items() if len(path) == 1}

    def within(self, part: str) -> dict[str, list[Callable[[], Any]]]:
        """The calls made in those of a part, by their paths after it."""
        return {"/".join(path[1:]): calls for path, calls in self.calls.items() if len(path) > 1 and path[0] == part}

    def forget(self) -> None:
        """Gives back the memory of all arguments."""
        self.calls.clear()
