"""The command line: arguments, flags, help, one-line errors, exit status."""
