"""A causal model becomes one step of a decoder: keys and values of earlier tokens come from a cache of fixed size."""
