from tessera.fronts.stream import TritonPythonModel  # noqa: F401
