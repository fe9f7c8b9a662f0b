"""A real Triton server on this machine: unpacked into the environment, started, queried and stopped."""
