"""`python tests/check_wheel.py WHEEL`: the wheel has every package, the types and the weights, nothing of the
laboratory and the tests, and it works without them.

Installed alone into an empty folder and used away from the source: a wheel that forgot a folder fails here only.
"""

import os
import subprocess
import sys
import tempfile
import zipfile

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

STUB = """
raise ImportError(f"a wheel has no {__name__}")
"""
USE = """
import attnforge
from attnforge.model.registry import build_model
example = build_model("patch-attention-digits")
bundle = attnforge.deploy(*example[:2], "bundle", example.dynamic_shapes, targets=["onnxruntime"])
assert attnforge.verify(bundle).passed
assert bundle.manifest.targets["onnxruntime"].tuning is not None, "the tuner measured nothing"
(model,) = attnforge.benchmark(bundle, against=["eager"], rounds=2, openings=1).models
assert all(contender.cold is not None for contender in model.contenders), "a process of its own found no attnforge"
print("wheel:", attnforge.__file__)
"""


def main(wheel: str) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    missing = [name for name in EXPECTED if name not in names]
    stray = [n for n in names if not n.startswith(("attnforge/", "attnforge-")) or LEFT_OUT & set(n.split("/")[:-1])]
    if missing or stray:
        sys.exit(f"the wheel lacks {missing} and puts {stray} into a user's site-packages")
    with tempfile.TemporaryDirectory() as folder:
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", "site"]
        subprocess.run([*install, os.path.abspath(wheel)], cwd=folder, check=True)
        for name in ("benchmarks", "tests"):  # an editable install would find the checkout's
            with open(os.path.join(folder, "site", f"{name}.py"), "w", encoding="utf-8") as stub:
                stub.write(STUB)
        environment = {**os.environ, "PYTHONPATH": os.path.join(folder, "site")}
        done = subprocess.run([sys.executable, "-c", USE], cwd=folder, env=environment, check=True, capture_output=True)
        where = done.stdout.decode().split()[-1]
        if not where.startswith(os.path.join(os.path.realpath(folder), "site")):
            sys.exit(f"the source was used instead of the wheel: {where}")


if __name__ == "__main__":
    main(sys.argv[1])
