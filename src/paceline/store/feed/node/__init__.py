"""One reader for all ranks of a node: `reader` is its process, `client` what a rank sees of it."""
