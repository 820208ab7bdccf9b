"""Uses finished runs: predicts images of any size, scores predictions and exports servables."""
