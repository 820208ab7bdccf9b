"""Classification: assigns a class to every image."""
