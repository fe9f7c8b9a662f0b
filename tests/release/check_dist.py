"""`python tests/release/check_dist.py FOLDER [TAG]`: the wheel and the sdist in a folder work without the source, and
are of the tag's version.

The wheel has every package, the types and the weights, and nothing of the laboratory and the tests. It is installed
into an empty environment with what it requires and no extra, and used from another folder; so is the sdist.
"""

import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

EXPECTED = (
    "attnforge/__init__.py",
    "attnforge/py.typed",
    "attnforge/model/weights/patch-attention-digits.safetensors",
    "attnforge/model/weights/decoder-digits.safetensors",
    "attnforge/model/weights/decoder-digits.tokenizer.json",
    "attnforge/export/lowering/tensorrt.py",
    "attnforge/export/diagnosis/causes.py",
    "attnforge/runtime/session.py",
    "attnforge/serving/ray/predictor.py",
    "attnforge/serving/triton/model.py",
    "attnforge/report/attention_maps.py",
    "attnforge/templates/verify.html",
    "attnforge/templates/page.html",
    "attnforge/templates/style.css",
    "attnforge/bench/run.py",
    "attnforge/bench/contenders/decoding/registry.py",
    "attnforge/bench/limits/work.py",
)
LEFT_OUT = {"benchmarks", "experiments", "servers", "training", "tests", "support"}
"""Names of folders that no file of a wheel is in."""

USE = """
import attnforge
from attnforge.model.registry import build_model
example = build_model("patch-attention-digits")
bundle = attnforge.deploy(*example[:2], "bundle", example.dynamic_shapes, targets=["onnxruntime"], force=True)
assert attnforge.verify(bundle).passed
assert bundle.manifest.targets["onnxruntime"].tuning is not None, "the tuner measured nothing"
(model,) = attnforge.benchmark(bundle, against=["eager"], rounds=2, openings=1).models
assert all(contender.cold is not None for contender in model.contenders), "a process of its own found no attnforge"
print(attnforge.__file__)
"""
NEEDED = {
    "attnforge demo": "data,report",
    "attnforge verify bundle --html page.html": "report",
    "attnforge bench bundle --html page.html": "report",
    "attnforge sign bundle --key key.pem": "signing",
    "attnforge verify bundle --trusted key.pem": "signing",
    "attnforge deploy hf:config.json": "hf",
    "attnforge verify bundle --backend openvino": "openvino",
    "attnforge deploy vit --target tensorrt": "tensorrt",
    "python -c from·attnforge.serving.ray·import·Handle": "ray",
    "python -c import·attnforge.serving.metrics": "metrics",
}
"""Commands, with `·` for a space inside an argument, and the extra that each names if it is not installed."""


def main(folder: str, tag: str = "") -> None:
    (wheel,), (sdist,) = Path(folder).resolve().glob("*.whl"), Path(folder).resolve().glob("*.tar.gz")
    if tag and sdist.name != f"attnforge-{tag.removeprefix('v')}.tar.gz":
        sys.exit(f"{sdist.name} is not of the version of tag {tag}; change attnforge/version.py or the tag")
    names = zipfile.ZipFile(wheel).namelist()
    missing = [name for name in EXPECTED if name not in names]
    stray = [n for n in names if not n.startswith(("attnforge/", "attnforge-")) or LEFT_OUT & set(n.split("/")[:-1])]
    if missing or stray:
        sys.exit(f"the wheel lacks {missing} and puts {stray} into a user's site-packages")
    os.environ.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as empty:
        programs = Path(empty, "env", "bin")
        venv.create(programs.parent, with_pip=True)
        install = [str(programs / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, wheel], check=True)
        use(programs)
        for command, extra in NEEDED.items():
            check_names(programs, command, extra)
        subprocess.run([*install, "--no-deps", "--force-reinstall", sdist], check=True)
        use(programs, "import attnforge; print(attnforge.__file__)")


def use(programs: Path, code: str = USE) -> None:
    """Print the help, and run code that prints where attnforge is, in the folder of the environment."""
    folder = programs.parent.parent.resolve()
    subprocess.run([programs / "attnforge", "--help"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    done = subprocess.run([programs / "python", "-c", code], cwd=folder, check=True, capture_output=True, text=True)
    where = done.stdout.split()[-1]
    if not Path(where).is_relative_to(folder):
        sys.exit(f"the source was used instead of what was installed: {where}")


def check_names(programs: Path, command: str, extra: str) -> None:
    """Check that a command which needs an extra says how to install it, and exits with 1."""
    program, *arguments = (part.replace("·", " ") for part in command.split())
    folder = programs.parent.parent
    for name, text in (("config.json", '{"model_type": "bert"}'), ("key.pem", "")):
        (folder / name).write_text(text, encoding="utf-8")
    done = subprocess.run([programs / program, *arguments], cwd=folder, capture_output=True, text=True)
    said = " ".join(done.stderr.split())
    if done.returncode != 1 or f"pip install 'attnforge[{extra}]'" not in said:
        sys.exit(f"`{command}` without the extra {extra} exits with {done.returncode} and does not name it: {said}")


if __name__ == "__main__":
    main(*sys.argv[1:])
