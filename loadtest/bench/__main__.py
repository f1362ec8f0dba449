"""`python loadtest/bench NAME ...`: modules are found beside this folder, not in it."""

import signal
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import main  # noqa: E402

if __name__ == "__main__":
    # Terminated, by `timeout` say, it ends the servers that it started: they would hold a GPU's memory.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    raise SystemExit(main())
