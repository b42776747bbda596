"""The command line: one module per subcommand, which parses, calls one function and prints."""
