"""Peak memory of a 4,096-token prefill and of a fusion, each in a process of its own.

Usage: python benchmarks/memory.py. Figures are the peak resident set above that of the loaded model and the inputs, and
the temporary buffers that XLA plans for one layer.
"""

import json
import resource
import subprocess
import sys

import numpy as np
import setting

TOKENS, CHUNK = 4096, 512


def peak_mb() -> float:
    """The process's peak resident set so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(what: str) -> dict[str, float]:
    """Runs one case in this process."""
    import jax

    import jfuse
    from jfuse.config import FusionConfig
    from jfuse.models.decoder import layer, start
    from jfuse.pipeline import Question, ResidentChunks, serve
    from jfuse.selectors import qcfuse
    from jfuse.stitch import make_layout

    model = jfuse.load_model("smollm2-135m")
    text = setting.wiki_tokens(model.tokenizer, TOKENS + 64)
    pieces = [text[i : i + CHUNK] for i in range(0, TOKENS, CHUNK)]
    question = Question(text[TOKENS:])
    if what == "prefill":
        before = peak_mb()
        jax.block_until_ready(jfuse.full_prefill(model, make_layout(pieces, pad_to=512), question).context.kv)
        x, rows = start(model.config, model.params, text[:TOKENS], np.arange(TOKENS, dtype=np.int32))
        plan = layer.lower(model.config, model.layers[0], x, rows).compile().memory_analysis()
        temporary = 0 if plan is None else plan.temp_size_in_bytes
        return {"peak_above_model_mb": peak_mb() - before, "layer_temporary_mb": temporary / 2**20}
    source = ResidentChunks([jfuse.encode_chunk(model, piece) for piece in pieces])
    before = peak_mb()
    serve(model, source, question, qcfuse((21, 22, 23)), FusionConfig(ratio=0.3))
    return {"peak_above_model_and_chunks_mb": peak_mb() - before}


def main() -> None:
    """Measures both cases."""
    rows = {}
    for what in ("prefill", "fuse"):
        done = subprocess.run([sys.executable, __file__, what], check=True, capture_output=True, text=True)
        rows[what] = json.loads(done.stdout.splitlines()[-1])
        print(what, rows[what])
    print(setting.save("memory", {"tokens": TOKENS, "rows": rows}))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
    else:
        main()
