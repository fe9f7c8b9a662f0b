"""What the masks of attention hide: their graphs read as integer sets of queries and keys, for all sizes."""
