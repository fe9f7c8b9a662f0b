"""Build a version-compatible plan with TensorRT 8.6. Run by that environment's Python; imports nothing of this project.

Usage: builder.py MODEL PROFILES PLAN [fp16] [tf32]. PROFILES is JSON: per profile, (min, opt, max) of every input.
"""

import json
import sys

import tensorrt as trt  # type: ignore[import-not-found, import-untyped, unused-ignore]

model, profiles, plan, *flags = sys.argv[1:]
log = trt.Logger(trt.Logger.ERROR)
builder = trt.Builder(log)
network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH))
parser = trt.OnnxParser(network, log)
if not parser.parse_from_file(model):
    sys.exit("; ".join(parser.get_error(i).desc() for i in range(parser.num_errors)))
config = builder.create_builder_config()
sources = trt.TacticSource.EDGE_MASK_CONVOLUTIONS, trt.TacticSource.JIT_CONVOLUTIONS
config.set_tactic_sources(sum(1 << int(source) for source in sources))  # neither cuBLAS nor cuDNN has to be there
config.set_preview_feature(trt.PreviewFeature.PROFILE_SHARING_0806, True)  # TensorRT 10's only behaviour
config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
if "fp16" in flags:
    config.set_flag(trt.BuilderFlag.FP16)
if "tf32" not in flags:
    config.clear_flag(trt.BuilderFlag.TF32)
for layer in map(network.get_layer, range(network.num_layers)):
    outputs = [layer.get_output(i) for i in range(layer.num_outputs)]
    kinds = {output.dtype for output in outputs}
    if layer.type not in (trt.LayerType.CONSTANT, trt.LayerType.SHAPE) and kinds <= {trt.float16, trt.float32}:
        layer.precision = outputs[0].dtype
        for i, output in enumerate(outputs):
            layer.set_output_type(i, output.dtype)
for ranges in json.loads(profiles):
    profile = builder.create_optimization_profile()
    for name, shapes in ranges.items():
        profile.set_shape(name, *shapes)
    config.add_optimization_profile(profile)
data = builder.build_serialized_network(network, config)
if data is None:
    sys.exit("TensorRT 8.6 built no plan")
with open(plan, "wb") as file:
    file.write(data)
