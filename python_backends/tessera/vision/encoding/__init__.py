"""From requests to rows: pictures, batches, the cache, the order of work, and what they hold."""
