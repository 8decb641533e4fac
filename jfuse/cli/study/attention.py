"""The studies of attention: where its mass lies, what anchors and layers find, and what a fused cache recovers."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import tyro

from jfuse.cli.command import make_table
from jfuse.cli.selector import SelectorCommand
from jfuse.cli.store import needed_tokenizer
from jfuse.cli.study.base import Study

if TYPE_CHECKING:
    from jfuse.evals.prompts import Prompt
    from jfuse.models.decoder import Model


@dataclass(frozen=True, kw_only=True)
class Asked(Study):
    """A study that looks at the attention of questions."""

    task: str = "squad"
    """A needle task, shipped questions, or the path of a file."""
    num_samples: int = 16
    """How many questions."""

    def prompts(self, model: "Model") -> "list[Prompt]":
        """The questions in tokens, behind a progress bar."""
        from tqdm.auto import tqdm

        from jfuse.evals.prompts import make_prompt
        from jfuse.evals.settings import Task
        from jfuse.evals.workload import draw

        self.require(1, "num_samples")
        path = Path(self.task)
        task = Task(path.stem, data=self.task) if path.is_file() else Task(self.task)
        tokenizer = needed_tokenizer(model)
        prompts = [make_prompt(sample, tokenizer) for sample in draw(task, tokenizer, self.num_samples)]
        return tqdm(prompts, desc=self.name, unit="question", disable=None)  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class Concentration(Asked):
    """How few context tokens hold the question's attention, and which layers agree on them (QCFuse Fig. 5)."""

    name: ClassVar[str] = "attention"
    example: ClassVar[str] = "jfuse study attention --task squad --num-samples 16"

    def run(self) -> int:
        """Measures mass and overlap."""
        from jfuse.evals.studies.attention import concentration
        from jfuse.plot import by_layer, mass_concentration, pair

        model = self.load()
        curve, overlap = concentration(model, self.prompts(model))
        left, right = pair()
        mass_concentration(curve, ax=left)
        by_layer(overlap, y="overlap", ylabel="overlap with all layers' best 10%", ax=right)
        shown = [(f"{row['share']:.1%}", f"{row['mass']:.1%}", f"{row['mass_se']:.1%}") for row in curve]
        best = sorted(overlap, key=lambda row: -row["overlap"])[:5]
        agreed = [(row["layer"], f"{row['overlap']:.1%}") for row in best]
        return self.finish(
            {"mass": curve, "overlap": overlap},
            left,
            make_table(("tokens", "mass", "standard error"), shown, f"{self.task}, {curve[0]['n']} questions"),
            make_table(("layer", "overlap"), agreed, "Layers that agree best with all layers together"),
        )


@dataclass(frozen=True, kw_only=True)
class Anchors(Asked):
    """How well the question finds the answer when it sees anchors only, by rule and share (QCFuse Fig. 6)."""

    name: ClassVar[str] = "anchors"
    example: ClassVar[str] = "jfuse study anchors --rules sink kvzip --shares 0 0.1 1"

    rules: tuple[str, ...] = ("sink", "knorm", "h2o", "kvzip")
    """Anchor rules."""
    shares: tuple[float, ...] = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0)
    """Anchors, as a share of each chunk."""
    layers: Annotated[tuple[int, ...], tyro.conf.arg(help_behavior_hint="(default: all)")] = ()
    """Layers that score, counted from 0."""

    def run(self) -> int:
        """Measures recall at every rule and share."""
        from jfuse.evals.studies.anchors import anchor_recall
        from jfuse.plot import anchor_recall as figure

        model = self.load()
        layers = self.layers or None
        rows = anchor_recall(model, self.prompts(model), rules=self.rules, ratios=self.shares, layers=layers)
        shown = [
            (row["rule"], f"{row['anchor_ratio']:g}", f"{row['recall']:.3f}", f"{row['recall_se']:.3f}") for row in rows
        ]
        table = make_table(("rule", "anchors", "recall at 10%", "standard error"), shown, f"{rows[0]['n']} questions")
        return self.finish({"rows": rows}, figure(rows), table)


@dataclass(frozen=True, kw_only=True)
class LayerRecall(Asked):
    """Which layers find the answer, alone and together (QCFuse Figs. 7 and 8)."""

    name: ClassVar[str] = "layers"
    example: ClassVar[str] = "jfuse study layers --profile shipped"

    num_samples: int = 32
    top: int = 10
    """How many layers are added up at most."""
    profile: str = ""
    """Measure nothing, and draw this profile: a file of jfuse profile, or "shipped"."""

    def run(self) -> int:
        """Profiles every layer, or reads a profile."""
        from jfuse.evals.profiling import profile_layers
        from jfuse.evals.studies.layers import layer_rows
        from jfuse.plot import by_layer, pair, top_layer_recall
        from jfuse.profile import load_profile

        model = self.load()
        if self.profile:
            profile = load_profile(model, None if self.profile == "shipped" else self.profile)
        else:
            profile = profile_layers(model, self.prompts(model), num_top=self.top, data=self.task)
        single, together = layer_rows(profile)
        left, right = pair()
        critical = profile.critical_layers(min(3, len(single)))
        by_layer(single, y="recall", ylabel="recall at 10%", marked=critical, ax=left)
        top_layer_recall(together, ax=right)
        best = sorted(single, key=lambda row: row["rank"])[: self.top]
        shown = [
            (row["rank"], row["layer"], f"{row['recall']:.3f}", f"{summed['recall']:.3f}")
            for row, summed in zip(best, together, strict=False)
        ]
        columns = ("rank", "layer", "recall alone", "with those above")
        return self.finish(
            {"data": profile.data, "num_samples": profile.num_samples, "single": single, "together": together},
            left,
            make_table(columns, shown, f"{profile.data}, {profile.num_samples} questions"),
        )


@dataclass(frozen=True, kw_only=True)
class Fidelity(SelectorCommand, Asked):
    """How far fused caches and their attention are from full prefill, layer by layer; no labels are needed."""

    name: ClassVar[str] = "fidelity"
    example: ClassVar[str] = "jfuse study fidelity --selectors epic qcfuse --ratio 0.3"

    task: str = "hotpotqa"
    num_samples: int = 8
    selectors: tuple[str, ...] = ("epic", "cacheblend", "prophetkv", "qcfuse")
    """Methods beside reuse."""
    ratio: float = 0.3
    """Share of the context that is recomputed."""

    def run(self) -> int:
        """Measures error and recovery."""
        import numpy as np

        from jfuse.config import checked_ratio
        from jfuse.evals.methods import make_methods
        from jfuse.evals.studies.fidelity import layer_fidelity
        from jfuse.plot import by_layer, pair

        self.check_selectors(self.selectors)
        checked_ratio(self.ratio, name="--ratio")
        model = self.load()
        methods = make_methods(self.selectors, (self.ratio,), layers=self.critical_layers(model, self.selectors))
        rows = layer_fidelity(model, self.prompts(model), methods)
        left, right = pair()
        by_layer(rows, y="error", ylabel="relative error of keys and values", ax=left)
        by_layer(rows, y="recovery", ylabel="attention where full prefill has it", ax=right)
        shown = []
        for name, ratio in dict.fromkeys((row["method"], row["ratio"]) for row in rows):
            own = [row for row in rows if (row["method"], row["ratio"]) == (name, ratio)]
            means = (float(np.mean([row[field] for row in own])) for field in ("error", "recovery"))
            shown.append((name, f"{ratio:g}", *(f"{mean:.3f}" for mean in means)))
        table = make_table(("method", "ratio", "error", "recovery"), shown, "Means over layers")
        return self.finish({"rows": rows}, left, table)
