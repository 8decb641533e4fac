"""An evaluation: models x tasks x samples x methods, every row written as soon as it is measured.

Read `evaluate` from top to bottom: plan, then sample by sample (the first of every task, then the second of each),
so that a run that is stopped early has measured all methods on the same samples. `summary` reads what it leaves.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from tqdm.auto import tqdm

from jfuse.anchors import by_name as anchor_rule_by_name
from jfuse.evals import workload
from jfuse.evals.items import Item, Plan, in_batches, measure_item, measure_together
from jfuse.evals.manifest import about, without_folders
from jfuse.evals.measure import DEFAULT, Setting
from jfuse.evals.methods import REUSE, Method, describe, ends, make_methods, needed_layers
from jfuse.evals.programs import release_programs
from jfuse.evals.prompts import Prompt, make_prompt
from jfuse.evals.records import Records, Row
from jfuse.evals.scorers import check_packages
from jfuse.evals.settings import Settings
from jfuse.fingerprint import Fingerprint
from jfuse.models.decoder import Model
from jfuse.models.resolve import load_model
from jfuse.selectors.base import Selector

FORMAT = 1
"""Version of what a row means. Raise it whenever equal settings give other numbers."""


def evaluate(
    settings: Settings,
    out: str | Path,
    *,
    selectors: Mapping[str, Selector] | None = None,
    profile: str | Path | None = None,
    load: Callable[..., Model] = load_model,
    command: Sequence[str] = (),
    setting: Setting = DEFAULT,
    progress: bool | None = None,
) -> int:
    """Measures what the folder does not hold yet, and returns how many rows were added.

    Args:
        out: the run's folder; rows that it holds are kept, whatever was measured in other goes.
        selectors: selectors of your own, by the name that `settings.methods` uses. A folder refuses one whose view,
            rule or source text has changed; what a function takes from elsewhere is not looked at.
        profile: a file that `save_profile` wrote, with the critical layers if `settings.layers` is empty.
        load: gives a model for a name and `settings.loading`, which is a dtype and perhaps the longest request.
        command: how the run was started, for the manifest.
        progress: show a bar; by default if stderr is a terminal.

    Raises:
        ValueError: settings that cannot be run, or a folder of another run.
        LookupError, ModuleNotFoundError: as `make_plan`.
    """
    _methods(settings, settings.layers or (0,), selectors)  # before a model is loaded
    added, too_long = 0, {}
    for name in settings.models:
        model = load(name, **settings.loading)
        plan = make_plan(settings, name, model, selectors=selectors, profile=profile, setting=setting)
        too_long[plan.name] = plan.too_long
        more = {"planned": plan.planned, "too_long": too_long}
        with Records(out, plan.identity, about=about(settings, command) | more) as records:
            so_far = ScoreSoFar(records.rows.values())
            todo = [item._replace(methods=_missing(plan.name, item, records)) for item in plan.items]
            todo = [item for item in todo if item.methods]
            total = sum(len(item.methods) for item in todo)
            disable = None if progress is None else not progress
            with tqdm(total=total, desc=f"evaluating {plan.name}", unit="run", disable=disable) as bar:
                for items in in_batches(todo, settings.batch or 1, setting):
                    release_programs()
                    rows = (
                        measure_together(plan, items, setting)
                        if settings.batch
                        else measure_item(plan, items[0], setting, ttft=settings.ttft)
                    )
                    for row, seconds in rows:
                        records.add(row, seconds)
                        if not bar.disable:
                            bar.set_postfix_str(so_far.add(row), refresh=False)
                        bar.update()
                        added += 1
    return added


def make_plan(
    settings: Settings,
    name: str,
    model: Model,
    *,
    selectors: Mapping[str, Selector] | None = None,
    profile: str | Path | None = None,
    setting: Setting = DEFAULT,
) -> Plan:
    """Every sample that a model is asked and by which methods, the first of every task before the second of any.

    Raises:
        ValueError: a model without a tokenizer, another model's profile, or no sample that the model can serve.
        LookupError: critical layers are needed, and jfuse ships no profile of the model.
        ModuleNotFoundError: answers are to be scored by a rule whose package is not installed.
    """
    if model.tokenizer is None:
        raise ValueError(f"{name} has no tokenizer, and tasks are texts; load a model with one.")
    name, mine = _key(name), selectors or {}
    asked = [entry.selector for entry in settings.methods if entry.selector not in mine]
    layers = needed_layers(asked, model, layers=settings.layers, profile=profile)
    methods = _methods(settings, layers, selectors, model.config.num_layers)
    rule = anchor_rule_by_name(settings.anchor_rule, model)
    drawn = {task.name: workload.draw(task, model.tokenizer, settings.limit) for task in settings.tasks}
    scored = [sample for task in settings.tasks if task.new_tokens for sample in drawn[task.name]]
    for metric in sorted({sample.rule for sample in scored}):
        check_packages(metric)
    items, too_long = [], []
    for index in range(settings.limit):
        for task in settings.tasks:
            if index >= len(drawn[task.name]):
                continue
            sample = drawn[task.name][index]
            prompt = make_prompt(sample, model.tokenizer)
            if not _fits(model, prompt, task.new_tokens):
                too_long.append(f"{task.name}/{sample.id}")
                continue
            items.append(Item(task, index, sample, prompt, [method for method, limit in methods if index < limit]))
    own: dict[str, Any] = {
        "fingerprint": Fingerprint.of(model, anchor_rule=rule).digest,
        "first_samples": {task: workload.checksum(samples[0]) for task, samples in drawn.items()},
    }
    if layers:  # other methods need none, and may join later
        own["layers"] = list(layers)
    identity = {
        "format": FORMAT,
        "tasks": {task.name: workload.identity(task) for task in settings.tasks},
        "models": {name: own},
        "setting": setting._asdict(),
        "ttft": settings.ttft,
        "batch": settings.batch,  # other sums, other last digits
        "platform": jax.default_backend(),
        "selectors": {
            entry.selector: describe(mine[entry.selector]) for entry in settings.methods if entry.selector in mine
        },
    }
    if not items:
        raise ValueError(
            f"{name} can serve none of the {len(too_long)} samples: each needs more than its "
            f"{model.config.max_positions} positions, or the other factor set of a longrope model. Ask shorter ones, "
            "cut them with `longest`, or choose the set with --longest-request."
        )
    planned = {method.key: limit for method, limit in methods}
    return Plan(name, model, rule, items, too_long, identity, planned)


def _key(name: str) -> str:
    """What rows call a model: of a local one its last part, however its path is spelled; else the name itself."""
    path = Path(name).expanduser()
    return os.path.basename(os.path.abspath(path)) if path.exists() else without_folders(name)


def _missing(name: str, item: Item, records: Records) -> list[Method]:
    where = (name, item.task.name, item.sample.id)
    return [method for method in item.methods if (*where, method.name, method.ratio) not in records]


def _methods(
    settings: Settings,
    layers: Sequence[int],
    selectors: Mapping[str, Selector] | None,
    num_layers: int | None = None,
) -> list[tuple[Method, int]]:
    """Methods in the order given, each with the number of samples it is measured on."""
    found = {method.key: (method, settings.limit) for method in ends()}
    for entry in settings.methods:
        limit = min(settings.limit, entry.limit or settings.limit)
        made = make_methods([entry.selector], entry.ratios, layers=layers, selectors=selectors, num_layers=num_layers)
        for method in made:
            if method.key not in found or limit > found[method.key][1]:
                found[method.key] = (method, limit)
    return list(found.values())


def _fits(model: Model, prompt: Prompt, new_tokens: int) -> bool:
    """Whether the model has the positions, with the longrope factor set that is in force."""
    after = max(len(prompt.reference), new_tokens)
    length = len(prompt.prefix) + sum(map(len, prompt.chunks)) + len(prompt.question.tokens) + after
    try:
        model.config.check_request(length)
    except ValueError:
        return False
    return True


class ScoreSoFar:
    """The share of the KL gap that every method has closed so far on its task, from running sums."""

    def __init__(self, rows: Iterable[Row] = ()):
        self._reuse: dict[tuple[Any, ...], float] = {}  # by sample
        self._sums: defaultdict[tuple[Any, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> str:
        """Takes a row in, and says where its method stands. Reuse, which is measured before, has to come before."""
        sample = row["model"], row["task"], row["id"]
        if row["method"] == REUSE:
            self._reuse[sample] = row["kl"]
        sums = self._sums[row["model"], row["task"], row["method"], row["ratio"]]
        if sample in self._reuse:
            sums[0] += row["kl"]
            sums[1] += self._reuse[sample]
        own, reuse = sums
        closed = f"{1 - own / reuse:.0%} of the KL gap closed" if reuse else "measuring the gap"
        return f"{row['task']} {row['method']} {row['ratio']:g}: {closed}"
