"""Gives unchanged programs a pack as folders and files: by a library in them, or by the kernel."""
