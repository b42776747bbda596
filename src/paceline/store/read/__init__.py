"""Reads packs: opens them, says what is in them, extracts samples as files."""
