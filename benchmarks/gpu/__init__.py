"""Everything that needs a GPU, proven and measured by one command.

`python -m benchmarks.gpu` writes `benchmarks/results/gpu.json`, and `gpu.md` beside it, a page made from the
figures alone. Without a CUDA device it says so in one line and exits with 3. It exits with 1 where an answer of
attnforge was outside the parity budget or a test that needs a GPU failed, and with 0 otherwise: no time, and no failure
to run at all, decides the exit code.

Steps run in order of worth until the time is over. Each step is a process of its own, whose tasks are recorded as they
are done. A task that raises is recorded in its own words, and the next task runs. A task that kills its process, or
leaves the device unusable, is recorded too, and the step goes on after it in a new process.

A wrong answer has no time: every contender is held to the parity budget on the very inputs that it is timed on. Small
models are held to the reference cases of their bundles. For large models the truth is the same weights in float64, and
the yardstick eager at the precision. torch computes both on the device, one sample at a time, because the n² scores of
one sample fit where those of a batch would not; up to :data:`~.models.PLACES` numbers of the output, drawn at random,
are compared.

Contenders take turns (:func:`attnforge.runtime.turns.in_turns`). Each call is timed twice. On the device: between CUDA
events around it, while the device is kept busy until all of the call is enqueued, so that no gap is counted in which
the device waits for Python. End to end: by the clock, until the stream is done.
"""
