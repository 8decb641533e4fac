"""What all studies share: where results go, and how data, figure and table are shown and saved."""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import tyro

from jfuse.cli.command import ModelCommand

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, kw_only=True)
class Study(ModelCommand):
    """A study: it measures, saves data and figure side by side, and prints a table."""

    name: ClassVar[str] = ""
    varied: ClassVar[str] = ""  # the option that chooses among the study's tables, if it has several

    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(default: runs/studies/NAME)")] = (
        None
    )
    """Folder for data and figure."""

    @property
    def label_of_files(self) -> str:
        """The study's name, and which of its tables this is, so that none overwrites another."""
        return f"{self.name}-{getattr(self, self.varied)}" if self.varied else self.name

    @property
    def options(self) -> dict[str, Any]:
        """What the study was asked for, by option; where and how it is shown is left out."""
        names = [field.name for field in dataclasses.fields(self)]
        return {name: getattr(self, name) for name in names if name not in ("json", "debug", "out")}

    def require_shares(self, *names: str) -> None:
        """Refuses options, of one value or several, that are not above 0.

        Raises:
            ValueError: names the option and the value.
        """
        for name in names:
            given = getattr(self, name)
            several = isinstance(given, tuple)
            for share in given if several else (given,):
                if not 0 < share < math.inf:
                    verb = "holds" if several else "is"
                    raise ValueError(f"--{name.replace('_', '-')} {verb} {share:g}; use a share above 0.")

    def finish(self, result: dict[str, Any], axes: "Axes | None", *tables: Any) -> int:
        """Saves data (`NAME.json`, with the study's options) and figure (PNG, PDF), shows the result, returns 0."""
        result = {"settings": _plain(self.options), **result}
        folder = self.out or Path("runs") / "studies" / self.name
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.label_of_files}.json"
        path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        if axes is not None:
            from jfuse.plot import figure_of

            for kind in ("png", "pdf"):
                figure_of(axes).savefig(path.with_suffix(f".{kind}"))
        self.show(result | {"saved": str(path)}, *tables, f"Written: {path}")
        return 0


def _plain(value: Any) -> Any:
    """Options as JSON has them, paths cut as in manifests."""
    from jfuse.evals.manifest import without_folders

    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return without_folders(str(value)) if isinstance(value, str | Path) else value
