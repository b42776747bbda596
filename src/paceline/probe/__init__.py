"""Measures and checks a machine: `measure` makes a Machine, `doctor` says what is wrong here.

What needs torch runs in processes of its own (`worker`), so that the command line never loads it
and a hanging measurement can be ended.
"""
