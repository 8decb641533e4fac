"""`jfuse demo`: the main job on the embedded model and the shipped passages."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jfuse.cli.command import Command, make_table, working
from jfuse.report import as_milliseconds


@dataclass(frozen=True, kw_only=True)
class Demo(Command):
    """Answers questions over real passages by full prefill, direct reuse and QCFuse, side by side."""

    example = "jfuse demo --questions 3 --ratios 0.1 0.5"

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and caches; auto is float32 on a CPU, bfloat16 on an accelerator."""
    store: str = "runs/demo/store"
    """Folder of the chunk store; a second run finds it warm."""
    out: Path = Path("runs/demo")
    """Folder for demo.json and the picture."""
    questions: int = 5
    """How many questions to ask."""
    ratios: tuple[float, ...] = (0.1, 0.3, 0.5)
    """Shares of the context that QCFuse recomputes."""

    def run(self) -> int:
        """Runs the demo and prints its table."""
        from jfuse.config import checked_ratio
        from jfuse.demo import run
        from jfuse.models.resolve import EMBEDDED, load_model

        for ratio in self.ratios:
            checked_ratio(ratio, name="ratios")
        with working(f"Loading {EMBEDDED} ..."):
            model = load_model(EMBEDDED, dtype=self.dtype)
        result = run(model, store=self.store, out=self.out, questions=self.questions, ratios=self.ratios)
        self.show(result, *report(result, self.out))
        return 0


def report(result: dict[str, Any], out: Path) -> list[Any]:
    """The demo's result for people: the answers, the table, and where the files lie."""
    answers = [
        make_table(
            ("method", "ratio", "", "answer"),
            [
                (
                    one["method"],
                    f"{one['ratio']:g}",
                    "right" if one["right"] else "wrong",
                    " ".join(one["answer"].split()),
                )
                for one in asked["answers"]
            ],
            f"{asked['question']}\nExpected: {', '.join(asked['expected'])}",
        )
        for asked in result["questions"]
    ]
    columns = ("method", "ratio", "TTFT", "select", "fuse", "query", "speed-up", "FLOP limit", "share", "KL", "NLL")
    known = {(one["method"], one["ratio"]): one for one in result["candidates"]}
    rows = []
    for row in result["rows"]:
        stages = [as_milliseconds(row["stages"][name]) if name in row["stages"] else "" for name in STAGES]
        everywhere = known.get((row["method"], row["ratio"]), {})
        rows.append(
            (row["method"], f"{row['ratio']:g}", as_milliseconds(row["ttft"]), *stages)
            + (f"{row['speed_up']:.2f}x", f"{row['flop_limit']:.2f}x", f"{row['share_of_limit']:.0%}")
            + (f"{row['first_kl']:.3f}", f"{row['nll']:.3f}")
            + tuple(f"{everywhere[name]:.3f}" if name in everywhere else "" for name in ("first_kl", "nll"))
        )
    number = result["num_candidates"]
    store = result["store"]
    summary = make_table(
        (*columns, f"KL ({number})", f"NLL ({number})"),
        rows,
        f"{len(result['questions'])} questions, {result['num_context']:,} context tokens; medians",
        "share: of the speed-up that FLOPs allow; noise may take it past 100 %. "
        f"KL: first token against full prefill. NLL: of the reference answer. Last columns: all {number} candidate "
        f"questions, of which full prefill answers {result['num_kept']} rightly; the questions shown are the first of "
        "those.",
    )
    line = f"Store: {store['warm']} of {store['chunks']} chunks were there already. "
    return [*answers, summary, f"{line}{result['seconds']:.0f} s in all. Written: {out}/demo.json"]


STAGES = ("select", "fuse", "query")
