"""How the tasks of a job find each other, share a start, notice each other's end, and part.

`root` and `member` are state machines without I/O; `tcp`, `shared_folder` and `memory` are shells
that carry their messages; `job` joins machine and shell for a task. See docs/architecture.md.
"""
