"""Ray on this machine: a local cluster, rows to predict, and clients."""
