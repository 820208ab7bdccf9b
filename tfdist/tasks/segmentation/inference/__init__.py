"""Using a finished run: prediction on images of any size, its scores, and servables."""
