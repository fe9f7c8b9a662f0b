"""An ONNX file that somebody gave you: say how large its dynamic dims may be, deploy, see what became of its attention.

python examples/onnx_file.py FILE.onnx [batch=1:4:16 tokens=1:128:512 …]
"""

import sys
from pathlib import Path

import onnx

import attnforge
from attnforge.errors import UsageError


def main(file: Path, dims: dict[str, tuple[int, int, int]]) -> None:
    for value in onnx.load(file, load_external_data=False).graph.input:
        sizes = [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        print(f"input {value.name}: {sizes}")
    try:
        bundle = attnforge.deploy(
            file, None, file.with_suffix(".bundle"), dims, tune=False, force=True
        )  # tune: measure for speed
    except UsageError as error:  # which dims need a range, for instance
        sys.exit(str(error))

    for site in bundle.manifest.attention.details:
        print(f"{site.site}: {site.written_as} → {site.form or site.reason}")
        for target, outcome in site.targets.items():
            print(f"  {target}: {outcome.kernel or outcome.reason}")
    report = attnforge.verify(bundle)  # against the file itself in float64: there is no module to ask
    print("passed" if report.passed else "over the budget", *report.backends)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    ranges = (argument.partition("=") for argument in sys.argv[2:])
    main(Path(sys.argv[1]), {name: tuple(map(int, text.split(":"))) for name, _, text in ranges})
