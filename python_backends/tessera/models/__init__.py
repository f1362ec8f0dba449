"""Model families, a folder each: config, processor, vision tower, names of weights; `text/` has the bodies."""
