"""The door that OpenAI's clients fit: an HTTP server before Tessera servers, which it asks through the SDK alone."""
