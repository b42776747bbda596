"""Trains a model whose step needs more memory than there is.

The first steps are recorded (`recording`) while all that can be away is away; a plan is made of
them (`paceline.schedules.memory`) and carried out (`session`): saved tensors (`saved_tensors`) and
the optimizer's state (`optimizer_files`) go to a file (`spill_file`) and come back before they are
needed, or are computed again (`recompute`).
"""
