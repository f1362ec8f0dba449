"""What must not stand in an answer to a bad request."""

from __future__ import annotations

import sys
from pathlib import Path

LONGEST = 400
ROOT = str(Path(__file__).resolve().parents[2])
LEAKS = ("Traceback", ".py", "\n", "site-packages", "/tmp", "/home", "/root", "/usr", ROOT, sys.prefix)


def complaint(message: str) -> str | None:
    """Why this error message is no good, or None: it must be short and show nothing of the server's inside."""
    if not message.strip():
        return "the message is empty"
    if len(message) > LONGEST:
        return f"the message has {len(message)} characters: {message[:100]!r}..."
    found = [leak for leak in LEAKS if leak in message]
    return f"the message holds {found[0]!r}: {message!r}" if found else None
