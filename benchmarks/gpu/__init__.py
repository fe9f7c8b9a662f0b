"""All checks and measurements that need a GPU, in one command.

`python -m benchmarks.gpu` writes `benchmarks/results/gpu.json`, and next to it `gpu.md`, a page generated from the
figures. Without a CUDA device it prints one line and exits with 3. It exits with 1 if an answer of attnforge was
outside the parity budget or a test that needs a GPU failed, and with 0 otherwise: neither times nor contenders that
cannot run affect the exit code.

Steps run in order of importance until the time is over. Each step runs in its own process, which records tasks as they
are done. A task that raises is recorded with its message, and the next task runs. A task that kills its process, or
leaves the device unusable, is recorded too, and the step continues after it in a new process.

A wrong answer has no time: every contender is checked against the parity budget on the inputs that it is timed on.
Small models are checked in the reference cases of their bundles. For large models the truth is the same weights in
float64, and the eager baseline sets the budget at the precision. torch computes both on the device, one sample at a
time, because the n² scores of one sample fit where those of a batch would not; up to :data:`~.models.MOST_COMPARED`
elements of the output, drawn at random, are compared.

Contenders take turns (:func:`attnforge.runtime.race.in_turns`). Each call is timed twice. On the device: between CUDA
events around it, while the device is kept busy until the whole call is enqueued, so that gaps in which the device waits
for Python do not count. End to end: by the clock, until the stream is done.
"""
