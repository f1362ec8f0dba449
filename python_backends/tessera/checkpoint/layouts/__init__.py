"""One module for each way in which checkpoints are laid out: the only places that know a layout."""
