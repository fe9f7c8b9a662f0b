"""Contenders that decode: each takes tokens, keeps a cache of keys and values, and answers with logits."""
