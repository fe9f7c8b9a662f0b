"""A bundle served by Ray Serve: scanned digits from many clients at once, over a handle and over HTTP.

python examples/ray_serve.py [FOLDER] [REQUESTS] [PORT]
"""

import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from ray import serve
from sklearn.datasets import load_digits

import attnforge
from attnforge.model.registry import build_model
from attnforge.serving.ray import Handle, PredictorDeployment


def main(folder: Path, requests: int, port: int) -> None:
    module, args, shapes = build_model("patch-attention-digits")  # trained
    bundle = attnforge.deploy(
        module, args, folder / "digits.bundle", shapes, targets=["onnxruntime"], tune=False, force=True
    )
    digits = load_digits()
    images = (digits.images[:requests, None] / 16).astype(np.float32)  # (n, 1, 8, 8) from 0 to 1

    serve.start(http_options={"host": "127.0.0.1", "port": port})
    application = PredictorDeployment.options(
        num_replicas=2,  # or autoscaling_config={"min_replicas": 1, "max_replicas": 8}
        ray_actor_options={"num_cpus": 0.5},
    ).bind(Handle(bundle.path))
    handle = serve.run(application, name="digits")

    def ask(image: np.ndarray) -> np.ndarray:
        """Requests of one image each; those that come together are one call."""
        return handle.predict.remote({"image": image[None]}).result(timeout_s=60)["output"][0]

    with ThreadPoolExecutor(16) as clients:
        scores = np.stack(list(clients.map(ask, images)))
    with attnforge.load(bundle, threads=1) as session:
        np.testing.assert_allclose(scores, session(images), rtol=1e-4, atol=1e-5)
    print(
        f"{len(scores)} requests, {np.mean(scores.argmax(-1) == digits.target[:requests]):.0%} of the digits are right"
    )

    tensor = {"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": images[0].ravel().tolist()}
    body = json.dumps({"inputs": [tensor]}).encode()  # the Open Inference Protocol
    with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/", body)) as answer:
        (output,) = json.load(answer)["outputs"]
    print("over HTTP, the first digit is a", np.argmax(output["data"]))
    serve.shutdown()


if __name__ == "__main__":
    main(
        Path(sys.argv[1] if len(sys.argv) > 1 else "."),
        int(sys.argv[2]) if len(sys.argv) > 2 else 1000,
        int(sys.argv[3]) if len(sys.argv) > 3 else 8000,
    )
