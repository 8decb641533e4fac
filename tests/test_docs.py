"""The tables in docs/ are what the code and the committed measurements say."""

import json
import re
from pathlib import Path

import pytest

from jfuse.models.families import FAMILIES
from jfuse.models.params import count_params
from jfuse.models.public import PUBLIC_CONFIGS, public_config

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def line(*cells):
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def family_lines():
    yield line("family", "architecture", "public models", "RoPE", "parity tested against")
    for family in FAMILIES.values():
        rope = ", ".join(family.rope_types)
        yield line(f"`{family.name}`", f"`{family.architecture}`", ", ".join(family.models), rope, family.tested)


def config_lines():
    yield line("model", "family", "parameters", "layers", "query / KV heads", "positions", "KV bytes per token", "10k")
    for name in PUBLIC_CONFIGS:
        config = public_config(name)
        heads, kv = f"{config.num_heads} / {config.num_kv_heads}", config.kv_bytes_per_token()
        sizes = (f"{count_params(config):,}", config.num_layers, heads, f"{config.max_positions:,}")
        yield line(name, f"`{config.family}`", *sizes, f"{kv:,}", f"{kv * 10_240 / 2**30:.2f} GiB")


def ttft_lines():
    found = json.loads((ROOT / "benchmarks/results/ttft.json").read_text(encoding="utf-8"))
    yield line("full prefill", "1", f"{found['full']['median']:.2f} s", "1.00x", "1.00x", "")
    for row in found["rows"]:
        speed_up, limit = f"{row['speed_up']:.2f}x", f"{row['flop_limit']:.2f}x"
        share = f"{row['selection_share_of_full']:.1%}"
        yield line("qcfuse", f"{row['ratio']:g}", f"{row['median']:.2f} s", speed_up, limit, share)


def prefill_lines():
    """Medians of both, and how fast jfuse is for them."""
    found = json.loads((ROOT / "benchmarks/results/prefill.json").read_text(encoding="utf-8"))
    for row in found["rows"]:
        yield against(f"{row['tokens']:,} tokens", row["jfuse"]["median"], row["transformers"]["median"])
    found = json.loads((ROOT / "benchmarks/results/kernels.json").read_text(encoding="utf-8"))
    ours, theirs = (found["seconds"][name]["median"] for name in ("all rows", "all rows, sdpa"))
    yield against(f"attention alone, {found['settings']['keys']:,} tokens, one layer", ours, theirs)


def against(what, ours, theirs):
    return line(what, f"{ours:.2f} s", f"{theirs:.2f} s", f"{theirs / ours:.0%}")


def pipeline_lines():
    found = json.loads((ROOT / "benchmarks/results/pipeline.json").read_text(encoding="utf-8"))
    times = {key: spread["median"] for key, spread in found["seconds"].items()}
    for name in ("qcfuse", "prophetkv"):
        rows = [row for row in found["rows"] if row["method"] == name]
        loaded = [cell for row in rows for cell in (f"{row['ttft']:.2f} s", f"{row['ideal']:.2f} s")]
        yield line(name, f"{times[f'{name} ready']:.2f} s", f"{times[f'{name} disk']:.2f} s", *loaded)


def throughput_lines():
    found = json.loads((ROOT / "benchmarks/results/throughput.json").read_text(encoding="utf-8"))["rows"]
    for load in dict.fromkeys(row["load"] for row in found):
        rows = {row["method"]: row for row in found if row["load"] == load}
        offered = rows["qcfuse"]["offered"]
        label = load if offered is None else f"{60 * offered:.1f} offered"
        figures = (
            (f"{60 * row['achieved']:.1f}", f"{row['p50']:.1f} s", f"{row['p95']:.1f} s") for row in rows.values()
        )
        yield line(label, *(cell for cells in figures for cell in cells))


def restricted_lines():
    found = json.loads((ROOT / "benchmarks/results/restricted.json").read_text(encoding="utf-8"))["rows"]
    for row in found:
        change = "" if row["method"] == "relaxkv_full_prefix" else f"{row['fuse_change']:+.1%}"
        sizes = (f"{row['ratio']:g}", f"{row['realised']:.3f}", f"{row['edges'] / 1e6:.1f}")
        yield line(row["method"], *sizes, f"{row['fuse']['median']:.2f} s", change)


@pytest.mark.parametrize(
    "page, lines",
    [
        ("models.md", family_lines),
        ("models.md", config_lines),
        ("when-it-helps.md", ttft_lines),
        ("when-it-helps.md", prefill_lines),
        ("when-it-helps.md", pipeline_lines),
        ("when-it-helps.md", throughput_lines),
        ("when-it-helps.md", restricted_lines),
    ],
)
def test_tables_are_up_to_date(page, lines):
    shown = (DOCS / page).read_text(encoding="utf-8").splitlines()
    missing = [row for row in lines() if row not in shown]
    assert not missing, f"put these lines into docs/{page}:\n" + "\n".join(missing)


def test_links_lead_somewhere():
    """Files that a page of docs/ links to exist."""
    for page in DOCS.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (DOCS / target).exists(), f"{page.name} links to {target}, which is not there"
