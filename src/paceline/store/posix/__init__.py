"""Gives unchanged programs a pack as folders and files, by a library that is loaded into them."""
