"""A serving loop on a machine without torch: many threads on one session, and the latency of its requests.

python examples/serving_loop.py BUNDLE [REQUESTS]
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import attnforge


def main(bundle: Path, requests: int) -> None:
    rng = np.random.default_rng(0)
    with attnforge.load(bundle, threads=1) as session:  # one thread a request; the pool below has the others
        session.warm_up()  # at the example's sizes: compile and allocate before the first request
        choice = session.bundle.manifest.choice
        if choice is not None:
            print("measured when it was deployed, ms:", choice.milliseconds, "dropped:", list(choice.dropped))

        def request(number: int) -> float:
            """Answer a request of some size, and return its milliseconds."""
            feeds = {}
            for spec in session.inputs:
                shape = [d if isinstance(d, int) else d.factor * (d.min or 1) for d in spec.dims]
                feeds[spec.name] = rng.standard_normal(shape).astype(spec.dtype)
            start = time.perf_counter()
            outputs = session.run(feeds)
            assert all(np.isfinite(array.astype(np.float64)).all() for array in outputs.values())
            return 1e3 * (time.perf_counter() - start)

        start = time.perf_counter()
        with ThreadPoolExecutor(4) as pool:
            times = list(pool.map(request, range(requests)))
        seconds = time.perf_counter() - start
        print(
            f"{session.backend}: {requests / seconds:.0f} requests a second; median {np.median(times):.2f} ms, "
            f"99th percentile {np.percentile(times, 99):.2f} ms"
        )
    print("torch was not imported" if "torch" not in sys.modules else "torch was imported")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 100)
