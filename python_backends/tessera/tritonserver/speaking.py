"""One lock for all that a stage's process tells the server unasked: metrics and lines of the log."""

import threading

SPEAKING = threading.RLock()
