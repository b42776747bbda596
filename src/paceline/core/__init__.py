"""The types everyone passes, the error tree, and the seams for time, files and configuration.

Standard library and numpy only.
"""
