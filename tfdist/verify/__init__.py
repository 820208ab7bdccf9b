"""The same few steps under each strategy, compared with one device."""
