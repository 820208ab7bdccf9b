"""The command line: arguments, flags, help, errors of one line, exit status."""
