"""The format of a trace on disk and in memory: the event schema, and reading a rank's file.

`events` is all that a collector needs. `files` reads a file of any version; version 1 is upgraded
in memory. docs/reference/trace-format.md defines the bytes.
"""
