"""Manifests, bundles' files, ONNX graphs and input files that hypothesis makes wrong, one after another: each is
accepted rightly or refused in one line; none runs anything, hangs, or takes memory without bound.

A few in every run of the tests, thousands by `make fuzz`.
"""
