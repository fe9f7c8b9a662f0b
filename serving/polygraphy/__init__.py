"""Polygraphy: a bundle as a runner of `polygraphy run`, and as a folder that any run is held to."""
