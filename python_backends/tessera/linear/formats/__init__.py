"""One file a quantized form; and what their readers take: a checkpoint's quantization_config, read so that nothing in
it goes unnoticed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tessera.checkpoint.files import one_of
from tessera.errors import CheckpointError
from tessera.linear.scheme import LinearScheme

#: what a configuration describes: (targets, maker of the scheme) of each group; a target is a module's name, a pattern
#: after "re:", or "Linear" for all
Groups = list[tuple[Sequence[str], Callable[[], LinearScheme]]]


class Settings:
    """A section of a configuration: all that it states must be taken, or known to be without effect."""

    def __init__(self, values: Mapping[str, Any], where: str = "quantization_config") -> None:
        self._left = dict(values)
        self.where = where

    def take(self, name: str, supported: Collection[Any] = (), default: Any = None) -> Any:
        """The value of ``name``; CheckpointError if it is none of the ``supported``, where there are any."""
        value = self._left.pop(name, default)
        if supported:
            one_of(value, supported, f"{self.where}: {name}")
        return value

    def check(self, name: str, value: Any, supported: Collection[Any]) -> None:
        """As :meth:`take`, for a value taken before."""
        one_of(value, supported, f"{self.where}: {name}")

    def has(self, name: str) -> bool:
        return name in self._left

    def section(self, name: str) -> Settings | None:
        """A section inside of it, None where there is none or null."""
        value = self._left.pop(name, None)
        if value is not None and not isinstance(value, Mapping):
            raise CheckpointError(f"{self.where}: {name} must be an object, not {value!r:.80}")
        return None if value is None else Settings(value, f"{self.where}.{name}")

    def sections(self) -> list[Settings]:
        """All that are left, which must be sections."""
        found = [(name, self.section(name)) for name in list(self._left)]
        return [section for _, section in found if section is not None]

    def drop(self, *names: str) -> None:
        """Settings that say how the file was made, not how it is read."""
        for name in names:
            self._left.pop(name, None)

    def finish(self) -> None:
        """Raises CheckpointError naming what nobody took and that asks for something."""
        left = ", ".join(f"{name} = {value!r:.80}" for name, value in self._left.items() if value)
        if left:
            raise CheckpointError(f"{self.where}: not understood: {left}")
