"""Trains a model whose step needs more memory than there is.

The first steps are recorded (`recording`) while all that can be away is away; a plan is made of
them (`planning`) and carried out (`session`, `following`): saved tensors (`saved_tensors`) and the
optimizer's state (`optimizer_files`) go to a file (`spill_file`), or from a GPU to the memory of
the host (`host_memory`), and come back before they are needed, or are computed again (`recompute`).
"""
