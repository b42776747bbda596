"""The layout of a pack on disk: constants, names of files, headers and sections."""
