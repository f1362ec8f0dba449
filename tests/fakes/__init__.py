"""Stand-ins for what exists only inside a tritonserver process."""
