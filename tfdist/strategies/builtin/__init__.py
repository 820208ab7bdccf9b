"""The strategies of tfdist, a file each; a new one is another file."""
