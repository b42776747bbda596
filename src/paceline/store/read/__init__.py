"""Reads packs: opens packs, describes their content, extracts samples as files."""
