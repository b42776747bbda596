"""Reports on federations."""
