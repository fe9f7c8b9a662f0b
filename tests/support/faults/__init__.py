"""Seeded faults: mistakes that may occur between a module and its deployment, put into deployed graphs one at a time.

`python -m benchmarks run faults` deploys the subjects, runs `attnforge.verify` on every fault, and writes the results
file and the tables in `docs/faults.md`. The effect of a fault is measured independently of `verify`: the altered and
the original graph run in float64 over the bundle's cases, and the difference is the effect. A fault is

- `caught` if verify fails;
- `no effect` if the float64 outputs differ by at most :data:`~tests.support.faults.bench.NOTHING` in every
  case, provably;
- `below rounding` if they differ by no more than the budget in every case: eager's own
  rounding has as large an effect;
- an `ESCAPE` if it passes otherwise, `UNSEEN` if no case shows it though other inputs would, and a `FALSE ALARM`
  if it has no effect and verify fails; none of these three may occur.
"""
