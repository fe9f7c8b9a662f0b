"""Training of the weights that the package ships."""
