"""A Llama that streams text."""

import attnforge

bundle = attnforge.deploy("hf:llama", cache_tokens=32, targets="onnxruntime", tune=False)
with attnforge.load(bundle) as session:
    for piece in session.generate("hello", max_new_tokens=3, temperature=0.8, seed=1):
        print(piece, end="", flush=True)
