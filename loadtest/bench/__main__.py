"""`python loadtest/bench NAME ...`: modules are found beside this folder, not in it."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import main  # noqa: E402

if __name__ == "__main__":
    raise SystemExit(main())
