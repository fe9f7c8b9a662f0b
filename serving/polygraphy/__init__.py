"""Polygraphy: a bundle as a runner of `polygraphy run`, and as a folder for checking any run."""
