from fakes.backend import backend  # noqa: F401
