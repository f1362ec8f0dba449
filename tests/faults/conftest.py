from server.conftest import server  # noqa: F401
