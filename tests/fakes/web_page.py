"""A web server of one page, whatever it is asked for: :func:`serving`."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def serving(page: Callable[[], tuple[Any, ...]]) -> Iterator[int]:
    """Its port; ``page`` is asked each time for the status, the body, and headers if it has more."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body, *more = page()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **dict(*more)}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever, args=(0.02,))
        thread.start()
        yield listener.server_address[1]
        listener.shutdown()
        thread.join()
