"""Contenders that decode: each takes tokens, keeps a KV cache, and returns logits."""
