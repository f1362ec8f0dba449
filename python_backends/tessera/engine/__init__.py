"""The language model: continuous batching over paged key/value blocks."""
