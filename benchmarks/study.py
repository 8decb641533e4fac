"""Table, figure and manifest of the study of all selectors, from a run's folder into `benchmarks/results/study`.

Usage, as often as more samples are there:

    jfuse eval --config benchmarks/study.yaml --out runs/study
    python benchmarks/study.py runs/study
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jfuse.evals.results import Run, markdown, write_results
from jfuse.evals.summary import EQUAL_WORK, Pair, as_row, averages
from jfuse.plot import figure_of, panels, quality_against_work

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results" / "study"
DRAWN = (
    *("full prefill", "reuse", "prophetkv", "qcfuse", "cacheblend", "epic", "random", "relaxkv:window=32", "relaxkv"),
    *("relaxkv_full_prefix", "qcfuse_relaxkv"),
)
COMPARED = ("prophetkv", "qcfuse", "cacheblend", "epic", "random", "relaxkv:window=32")


def main() -> None:
    """Writes the four files and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the evaluation")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    run = write_results(arguments.run, compared=COMPARED)
    arguments.out.mkdir(parents=True, exist_ok=True)
    shutil.copy(arguments.run / "metrics.csv", arguments.out)
    shutil.copy(arguments.run / "manifest.json", arguments.out)
    text = page(run)
    (arguments.out / "README.md").write_text(text, encoding="utf-8")
    draw([as_row(cell) for cell in run.cells if cell.method in DRAWN]).savefig(arguments.out / "study.png", dpi=120)
    print(text)


def draw(rows: list[dict[str, Any]]) -> "Figure":
    """Quality against work, a panel per task."""
    label = "share of the KL gap closed"
    axes = panels(
        rows, "task", lambda own, ax: quality_against_work(own, quality="kl_closed", label=label, ax=ax), columns=2
    )
    return figure_of(axes)


def page(run: Run) -> str:
    """The tables in Markdown."""
    settings, samples = run.manifest["settings"], {cell.task: cell.n for cell in run.cells}
    counted = ", ".join(f"{task} {n}" for task, n in samples.items())
    left = f" Begun, not complete, and not counted: {run.incomplete}." if run.incomplete else ""
    if run.left_out:
        left += f" Measured on fewer samples, and not shown: {', '.join(run.left_out)}."
    parts = [
        "# Selectors on the embedded model",
        f"{', '.join(settings['models'])} in {settings['dtype']}; samples: {counted}.{left} Made by "
        f"`{run.manifest['command']}`, then `python benchmarks/study.py runs/study`.",
        "Cells: mean, then the share of the way from reuse to full prefill with its 95 % bootstrap interval, then the "
        "number of samples. A share is blank where full prefill leads reuse by less than two standard errors. "
        "Realised: share of layer-token states that were recomputed, which decides what a method costs; compare "
        "methods at equal realised shares.",
    ]
    for measure, title in (("kl", "KL from full prefill over the answer's tokens"), ("nll", "NLL of the answer")):
        parts += [f"## {title}", markdown(run.cells, measure).rstrip()]
    parts += ["## Mean share of the KL gap closed, over the tasks", average_table(run).rstrip()]
    if run.pairs:
        explained = (
            f"Methods at one ratio, or at realised shares at most {EQUAL_WORK:g} apart. Difference in KL between the "
            "first and the second, as a share of reuse's KL, with its 95 % bootstrap interval; negative speaks for the "
            "first. Then the samples on which the first is closer to full prefill."
        )
        parts += ["## Pairs on the same samples", explained, pair_table(run.pairs).rstrip()]
    versions = ", ".join(f"{name} {version}" for name, version in run.manifest["versions"].items())
    parts.append(f"{versions}; {json.dumps(run.manifest['machine']['devices'])}.")
    return "\n\n".join(parts) + "\n"


def average_table(run: Run) -> str:
    """Method, ratio, share; tasks without a clear gap are left out for all."""
    lines = ["| method | ratio | closed |", "|---|---|---|"]
    lines += [f"| {method} | {ratio:g} | {share:.0%} |" for (_, method, ratio), share in averages(run.cells).items()]
    return "\n".join(lines) + "\n"


def pair_table(pairs: list[Pair]) -> str:
    """Difference in KL as a share of reuse's KL, a column per task; negative speaks for the first."""
    tasks = list(dict.fromkeys(pair.task for pair in pairs))
    found: dict[tuple[str, str], dict[str, Pair]] = {}
    for pair in pairs:
        names = f"{pair.first} at {pair.first_ratio:g}", f"{pair.second} at {pair.second_ratio:g}"
        found.setdefault(names, {})[pair.task] = pair
    lines = ["| first | second | " + " | ".join(tasks) + " |", "|---|---|" + "---|" * len(tasks)]
    for names, own in found.items():
        shown = [shown_pair(own[task]) if task in own else "" for task in tasks]
        lines.append("| " + " | ".join((*names, *shown)) + " |")
    return "\n".join(lines) + "\n"


def shown_pair(pair: Pair) -> str:
    """Difference with its interval, and on how many samples the first is closer to full prefill."""
    return f"{pair.difference:+.0%} [{pair.low:+.0%}, {pair.high:+.0%}] {pair.wins}/{pair.n}"


if __name__ == "__main__":
    main()
