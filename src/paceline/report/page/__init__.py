"""A run as one HTML page: its parts (`overview` to `provenance`) and how they are drawn."""
