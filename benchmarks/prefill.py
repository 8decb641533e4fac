"""Full prefill of SmolLM2-135M against transformers' sdpa, float32, both bound to the same single core, interleaved.

Both sides return the last token's logits and the keys and values of all layers. The baseline gets `logits_to_keep=1`,
`use_cache=True`, no attention mask, and torch's inference mode. Usage: python benchmarks/prefill.py [--repeats 5]
"""

import argparse

import setting

setting.pin()

import jax  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from jfuse import load_model, prefill  # noqa: E402
from jfuse.evals.latency import interleave, summary  # noqa: E402
from jfuse.models.decoder import logits  # noqa: E402
from jfuse.models.resolve import embedded_file  # noqa: E402


def main() -> None:
    """Runs the comparison and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model("smollm2-135m")
    path = embedded_file()
    # transformers asks for accelerate before it reads a GGUF file, but does not use it on a CPU.
    transformers.modeling_utils.is_accelerate_available = lambda: True  # pyright: ignore[reportPrivateImportUsage]
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    text = setting.wiki_tokens(model.tokenizer, max(arguments.lengths))
    rows = []
    for length in arguments.lengths:
        tokens, positions = text[:length], np.arange(length, dtype=np.int32)
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        last: dict[str, np.ndarray] = {}

        def ours(tokens=tokens, positions=positions, last=last):
            out = prefill(model, tokens, positions, hidden="last")
            last["jfuse"] = np.asarray(logits(model.config, model.params, out.hidden)[0])
            jax.block_until_ready(out.kv)

        def theirs(ids=ids, last=last):
            with torch.inference_mode():
                out = reference(ids, use_cache=True, logits_to_keep=1)
            last["transformers"] = out.logits[0, -1].numpy()

        seconds = interleave({"jfuse": ours, "transformers": theirs}, repeats=arguments.repeats)
        difference = float(np.abs(last["jfuse"] - last["transformers"]).max())
        row = {name: summary(times) for name, times in seconds.items()}
        ratio = row["transformers"]["median"] / row["jfuse"]["median"]
        rows.append({"tokens": length, **row, "speed_up": ratio, "max_logit_difference": difference})
        print(
            f"{length:5d} tokens: jfuse {row['jfuse']['median']:.2f} s, transformers "
            f"{row['transformers']['median']:.2f} s, {ratio:.2f}x, logits differ by {difference:.1e}",
            flush=True,
        )
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(setting.save("prefill", {"versions": versions, "dtype": "float32", "rows": rows}))


if __name__ == "__main__":
    main()
