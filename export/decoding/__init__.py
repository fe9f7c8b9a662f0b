"""Turn a causal model into a decoder step that reads keys and values of earlier tokens from a cache of fixed size."""
