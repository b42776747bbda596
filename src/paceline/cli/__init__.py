"""The command line: one verb a file; each parses, calls one library function, prints."""
