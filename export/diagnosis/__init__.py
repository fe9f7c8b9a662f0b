"""Where a deployment first goes wrong, and why."""
