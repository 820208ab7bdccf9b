"""Classification: a class for every image."""
