"""Renders the profile of a sweep: advice in words, tables for terminal and page, charts."""
