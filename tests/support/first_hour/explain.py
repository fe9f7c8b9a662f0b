"""A colleague's model.onnx, verified, and why its attention is not fused where it is not."""

import attnforge

dims = {"batch": (1, 2, 4), "tokens": (1, 8, 16)}
bundle = attnforge.deploy("model.onnx", dynamic_shapes=dims, targets="onnxruntime", tune=False)
print(bundle.summary())
print(attnforge.verify(bundle).summary())
