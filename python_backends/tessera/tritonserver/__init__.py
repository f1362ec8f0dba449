"""What every stage shares when it runs inside tritonserver's Python backend: settings, tensors, errors, responses.

The backend's module ``triton_python_backend_utils`` exists only inside a stub process, so it is imported inside
functions: the stages' logic stays importable, and testable with a fake, everywhere.
"""
