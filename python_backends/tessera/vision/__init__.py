"""Pictures to rows of the language model: the vision tower, its runners, and the batching around them."""
