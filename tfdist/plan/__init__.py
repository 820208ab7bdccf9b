"""Predicts memory, speed and price of every strategy, before anything is rented."""
