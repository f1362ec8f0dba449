from tessera.fronts.unary import TritonPythonModel  # noqa: F401
