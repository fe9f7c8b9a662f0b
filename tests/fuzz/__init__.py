"""Fuzzing of manifests, bundle files, ONNX graphs and input files with hypothesis. Each invalid file must be accepted
rightly or refused in one line, without running anything, hanging, or taking memory without bound.

Every run of the tests tries a few, `make fuzz` thousands.
"""
