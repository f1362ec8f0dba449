from tessera.tritonserver.language_model import TritonPythonModel  # noqa: F401
