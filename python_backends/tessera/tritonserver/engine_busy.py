"""Whether the engine computes most of the time, which the language model's stage tells the vision stage.

By an empty file in the folder that the stages of one server share: none asks another anything.
"""

import os
from contextlib import suppress

from tessera.tritonserver.leases import FOLDER

MOST = 0.5  # of the time since it was last told
_FILE = f"{FOLDER}/engine-busy"


def tell(busy: bool) -> None:
    """Of a full /dev/shm, or before the folder is there, nobody is told."""
    with suppress(OSError):
        if not busy:
            os.unlink(_FILE)
        elif not told():
            open(_FILE, "wb").close()


def told() -> bool:
    return os.path.exists(_FILE)
