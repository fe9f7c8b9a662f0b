"""Seeded faults: what may go wrong between a module and what is deployed, put into deployed graphs one at a time.

`python -m benchmarks run faults` deploys the subjects, gives every fault to `attnforge.verify`, and writes the results
file and the tables in `docs/faults.md`. What a fault does is measured apart from `verify`: the altered graph and the
unaltered one run in float64 over the bundle's cases, and the difference is the effect. A fault is

- `caught`, where verify fails;
- `no effect`, where the float64 outputs do not differ by more than :data:`~tests.support.faults.bench.NOTHING` in any
  case, and that can be proven;
- `below rounding`, where they differ by no more than the budget allows there, in every case: what eager's own
  arithmetic does to the same numbers is as large;
- an `ESCAPE` where it passes all the same, `UNSEEN` where no case shows it though others would, and a `FALSE ALARM`
  where it has no effect and fails: none of these may be.
"""
