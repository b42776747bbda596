"""How the tasks of a job find each other, start together, notice failures, and end together.

`root` and `member` are state machines without I/O. `server` and `client` are their shells, which
carry messages over TCP or through files; `memory` is a shell for simulations. `job` connects state
machine and shell for a task. See docs/architecture.md.
"""
