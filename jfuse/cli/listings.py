"""`jfuse models` and `jfuse selectors`: what jfuse knows."""

from dataclasses import dataclass

from jfuse.cli.command import Command, make_table


@dataclass(frozen=True, kw_only=True)
class Models(Command):
    """Lists the supported families, public configurations with their sizes, and the aliases of --model."""

    example = "jfuse models"

    def run(self) -> int:
        """Reads configurations only."""
        from jfuse.models.families import FAMILIES
        from jfuse.models.params import count_params
        from jfuse.models.public import PUBLIC_CONFIGS, public_config
        from jfuse.models.resolve import ALIASES, EMBEDDED

        families = [
            {"family": name, "architecture": family.architecture, "models": list(family.models)}
            | {"rope_types": list(family.rope_types), "tested": family.tested}
            for name, family in FAMILIES.items()
        ]
        configs = [
            {"model": name, "family": config.family, "parameters": count_params(config), "layers": config.num_layers}
            | {"kv_bytes_per_token": config.kv_bytes_per_token(), "max_positions": config.max_positions}
            for name, config in ((name, public_config(name)) for name in PUBLIC_CONFIGS)
        ]
        aliases = {EMBEDDED: "comes with jfuse, needs no hub"} | ALIASES
        self.show(
            {"families": families, "models": configs, "aliases": aliases},
            make_table(
                ("family", "architecture", "models", "RoPE", "tested against"),
                [
                    (one["family"], one["architecture"], ", ".join(one["models"]))
                    + (", ".join(one["rope_types"]), one["tested"])
                    for one in families
                ],
                "Supported families",
            ),
            make_table(
                ("model", "family", "parameters", "layers", "KV bytes per token", "positions"),
                [[f"{part:,}" if isinstance(part, int) else part for part in one.values()] for one in configs],
                "Public configurations (keys and values in bfloat16)",
            ),
            make_table(("alias", "model"), aliases.items(), "Aliases for --model"),
        )
        return 0


@dataclass(frozen=True, kw_only=True)
class Selectors(Command):
    """Lists the selectors: what each must see before it chooses, its own ratio and rounding, and where it is from."""

    example = "jfuse selectors"

    def run(self) -> int:
        """Prints the catalogue."""
        from jfuse.selectors import LEFT_OUT, catalogue

        rows = catalogue()
        columns = ("selector", "tokens seen", "layers scored", "must be loaded first", "ratio", "rounding", "from")
        caption = "; ".join(f"{name} is left out: {reason}" for name, reason in LEFT_OUT.items())
        value = {"selectors": [row._asdict() for row in rows], "left_out": LEFT_OUT}
        self.show(value, make_table(columns, rows, caption=f"Layers count from 0. {caption}."))
        return 0
