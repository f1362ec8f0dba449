from tessera.engine.tritonserver_model import TritonPythonModel  # noqa: F401
