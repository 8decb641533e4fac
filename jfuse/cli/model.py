"""`jfuse profile`, `jfuse verify` and `jfuse convert`: what is done once for a model."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import tyro

from jfuse.cli.command import (
    DEFAULT_MODEL,
    Command,
    ModelCommand,
    make_table,
    working,
)
from jfuse.cli.store import needed_tokenizer
from jfuse.report import as_megabytes

if TYPE_CHECKING:
    from jfuse.evals.data import Sample
    from jfuse.models.decoder import Model

TRIED = ("qcfuse", "random", "reuse", "recompute_all")


@dataclass(frozen=True, kw_only=True)
class Profile(ModelCommand):
    """Finds a model's critical layers: those whose attention best localises the evidence of a question."""

    example = "jfuse profile --model qwen3-0.6b --num-samples 32"

    samples: Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="(default: needle tasks)")] = None
    """Questions whose answers are located: JSON Lines, SQuAD, NewsQA, Natural Questions or MRQA files."""
    task: Literal["single", "mk", "mq", "mv"] = "mk"
    """Without --samples: which needles to plant in Wikipedia passages."""
    num_samples: int = 24
    """How many questions."""
    length: int = 1024
    """Without --samples: context tokens of each question."""
    top: int = 3
    """How many critical layers to name."""
    out: Annotated[
        Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="(default: runs/profiles/ID.json)")
    ] = None
    """Where the profile is saved."""

    def run(self) -> int:
        """Profiles every layer and saves what was found."""
        from tqdm.auto import tqdm

        from jfuse.evals.profiling import profile_layers
        from jfuse.evals.prompts import make_prompt
        from jfuse.profile import critical_layers, save_profile

        self.require(1, "num_samples", "length", "top")
        model = self.load()
        tokenizer = needed_tokenizer(model)
        prompts = [make_prompt(sample, tokenizer) for sample in self.draw(model)]
        if self.top > model.config.num_layers:
            raise ValueError(f"top is {self.top}; use 1 to {model.config.num_layers}, the model's layers.")
        data = self.samples.name if self.samples else f"{self.task}, {self.length} tokens"
        bar = tqdm(prompts, desc="profiling", unit="question", disable=None)
        profile = profile_layers(model, bar, data=data)
        layers = critical_layers(profile.recall, self.top)
        out = self.out or Path("runs") / "profiles" / f"{profile.model[:12]}.json"
        out.parent.mkdir(parents=True, exist_ok=True)
        save_profile(profile, out)
        marks = ("critical" if l in layers else "" for l in range(len(profile.recall)))
        rows = [(l, f"{share:.3f}", mark) for (l, share), mark in zip(enumerate(profile.recall), marks, strict=True)]
        self.show(
            {"critical_layers": list(layers), "saved": str(out), **profile._asdict()},
            make_table(("layer", "recall at 10%", ""), rows, f"{profile.num_samples} questions ({data})"),
            f"Critical layers: {', '.join(map(str, layers))}. Saved: {out}. Use: --profile {out}",
        )
        return 0

    def draw(self, model: "Model") -> "list[Sample]":
        """The questions, from the file or planted now."""
        from jfuse.evals.readers import read_file
        from jfuse.evals.ruler import needle_sample

        if self.samples is not None:
            return read_file(self.samples, limit=self.num_samples)
        encode = needed_tokenizer(model).encode
        return [needle_sample(self.task, seed, length=self.length, encode=encode) for seed in range(self.num_samples)]


@dataclass(frozen=True, kw_only=True)
class Verify(Command):
    """Tries the exact identities of fusion on a model, in float32; exits with 1 if one of them fails."""

    example = "jfuse verify --model smollm2-135m"

    model: str = DEFAULT_MODEL
    """An alias (jfuse models lists them), a folder, a .gguf file, or a Hugging Face id."""
    selectors: Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint=f"(default: {' '.join(TRIED)})")] = ()
    """Which selectors to try."""
    seed: int = 0
    """Of the request's token ids."""

    def run(self) -> int:
        """Prints every check with the error found."""
        from jfuse.models.resolve import load_model
        from jfuse.selectors.parse import parse_selector
        from jfuse.verify import default_selectors, verify

        for name in self.selectors:
            parse_selector(name, layers=(0,))
        with working(f"Loading {self.model} ..."):
            model = load_model(self.model, dtype="float32")
        chosen = default_selectors(model.config.num_layers)
        layers = chosen[0].view.layers or ()
        asked = [parse_selector(name, layers=layers) for name in self.selectors] or chosen
        with working(f"Verifying {self.model} ..."):
            checks = verify(model, selectors=asked, seed=self.seed)
        failed = sum(not check.passed for check in checks)
        columns = ("", "identity", "selector", "what is compared", "error", "tolerance")
        rows = [
            ("pass" if check.passed else "FAIL", check.id, check.selector or "", check.meaning)
            + (f"{check.error:.1e}", f"{check.tolerance:.0e}" if check.tolerance else "0 (same bits)")
            for check in checks
        ]
        line = f"{self.model}: {len(checks) - failed} of {len(checks)} checks passed."
        value = {"model": self.model, "passed": not failed, "checks": [check.as_dict() for check in checks]}
        self.show(value, make_table(columns, rows), line)
        return int(failed > 0)


@dataclass(frozen=True, kw_only=True)
class Convert(Command):
    """Writes a model as an Orbax checkpoint, which loads without renaming or dequantising."""

    example: ClassVar[str] = "jfuse convert models/qwen.gguf models/qwen --dtype bfloat16"

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """What to convert: anything that --model takes."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")]
    """A new folder."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the stored weights; auto is float32 on a CPU, bfloat16 on an accelerator."""

    def run(self) -> int:
        """Loads and saves."""
        from jfuse.models.checkpoint import save_checkpoint
        from jfuse.models.params import count_params
        from jfuse.models.resolve import load_model

        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise ValueError(f"{self.out} exists and is not empty; give a new folder.")
        with working(f"Converting {self.source} ..."):
            model = load_model(self.source, dtype=self.dtype)
            folder = save_checkpoint(model, self.out)
        num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        value = {"source": self.source, "out": str(folder), "family": model.config.family, "num_bytes": num_bytes}
        value |= {"parameters": count_params(model.config), "dtype": str(model.dtype)}
        line = f"{value['parameters']:,} parameters in {value['dtype']}, {as_megabytes(num_bytes)}: {folder}"
        self.show(value, f"{line}\nUse: jfuse answer ... --model {self.out}")
        return 0
