"""A real Triton server on this machine: unpacked beside the environment, started, asked, and stopped."""
