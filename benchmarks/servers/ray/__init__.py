"""Ray on this machine: a cluster, rows to predict, and clients."""
