from tessera.tritonserver.preprocess import TritonPythonModel  # noqa: F401
