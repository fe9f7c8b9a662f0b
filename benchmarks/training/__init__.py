"""Trains the weights that the package ships."""
