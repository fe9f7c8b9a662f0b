"""Everything that needs a GPU, proven and measured by one command.

`python -m attnforge.benchmarks.gpu` writes `benchmarks/results/gpu.json`, and `gpu.md` beside it, a page made from the
figures alone. Without a CUDA device it says so in one line and ends with 3; it ends with 1 where an answer of attnforge
was outside the parity budget or a test that needs a GPU failed, and else with 0: no time, and no failure to run at all,
decides that.

Steps are taken in order of worth until the time is over. Each is a process of its own, whose tasks are recorded as they
are done: a task that raises is recorded in its own words and the next one is taken; one that takes its process with it,
or leaves the device unusable, is recorded too, and the step goes on behind it in a new process.

A wrong answer has no time: every contender is held to the parity budget on the very inputs that it is timed on. Small
models are held to the reference cases of their bundles. For large ones the truth is the same weights in float64, and
the yardstick eager at the precision, computed by torch on the device one sample at a time, so that the n² scores of one
fit where those of all would not; compared are up to :data:`~.large.PLACES` places of the output, drawn at random.

Contenders take turns, round by round, in an order shuffled anew each time. Two times are taken of a call. On the
device: between CUDA events around it, while the device is kept busy until all of it is enqueued, so that no gap is
counted in which it waits for Python. End to end: by the clock, until the stream is done.
"""
