"""How a pack lies on disk: constants, names of files, headers and sections."""
