"""What all subcommands share that take selectors: names with settings, and where critical layers come from."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from jfuse.cli.command import Command

if TYPE_CHECKING:
    from jfuse.models.decoder import Model
    from jfuse.selectors.base import Selector


@dataclass(frozen=True, kw_only=True)
class SelectorCommand(Command):
    """A subcommand that takes selectors, of which some need critical layers."""

    layers: Annotated[tuple[int, ...], tyro.conf.arg(help_behavior_hint="(default: of the model's profile)")] = ()
    """Critical layers, counted from 0, for selectors that need them."""
    profile: Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="(default: the shipped one)")] = (
        None
    )
    """The profile that jfuse profile wrote for the model, whose critical layers are taken."""

    def check_selectors(self, names: Sequence[str] = ()) -> None:
        """Refuses what is wrong whatever the model is, before anything is loaded.

        Raises:
            ValueError: an unknown selector or setting, or critical layers that are named twice or not needed.
        """
        from jfuse.selectors.parse import needs_layers, parse_selector

        if self.layers and self.profile is not None:
            raise ValueError("Both --layers and --profile are given; name the critical layers in one way.")
        for name in names:
            parse_selector(name, layers=(0,))
        given = "--layers" if self.layers else "--profile" if self.profile is not None else ""
        if given and names and not any(map(needs_layers, names)):
            raise ValueError(f"{given} is given, but {', '.join(names)} takes no critical layers; leave it out.")

    def critical_layers(self, model: "Model", names: Sequence[str]) -> tuple[int, ...]:
        """The critical layers for selectors of these names; () if none of them needs any.

        Raises:
            LookupError: they are needed, and neither given nor known for this model.
            ValueError: another model's profile.
        """
        from jfuse.evals.methods import needed_layers

        return needed_layers(names, model, layers=self.layers, profile=self.profile)

    def choose(self, model: "Model", names: Sequence[str]) -> "dict[str, Selector]":
        """The selectors by their names.

        Raises:
            LookupError, ValueError: as `critical_layers`; ValueError also for a layer that the model does not have.
        """
        from jfuse.selectors.parse import parse_selector

        layers = self.critical_layers(model, names)
        chosen = {name: parse_selector(name, layers=layers) for name in names}
        for selector in chosen.values():
            selector.view.layer_indices(model.config.num_layers)
        return chosen
