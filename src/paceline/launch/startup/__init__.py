"""A folder for PYTHONPATH: Python runs its `sitecustomize` at every start. See `launch.attach`."""
