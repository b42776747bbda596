"""The types that all packages share, the error tree, and interfaces to clock, files and settings.

Standard library and numpy only.
"""
