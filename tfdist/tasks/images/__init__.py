"""Reading of images, which several tasks share."""
