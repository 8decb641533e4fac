"""A run that compiles for hours does not use up its memory maps."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jfuse.evals import programs
from jfuse.evals.programs import release_programs

COMPILE_AND_RELEASE = """
import jax, jax.numpy as jnp
from jfuse.evals.programs import MAPS, release_programs
maps = lambda: len(MAPS.read_bytes().splitlines())
grow = jax.jit(lambda x: jnp.tanh(x @ x).sum())
grow(jnp.ones((2, 2)))
before = maps()
for n in range(3, 33):
    grow(jnp.ones((n, n)))
after = maps()
print(before, after, release_programs(share=0.0), maps())
"""


@pytest.mark.skipif(not programs.MAPS.exists(), reason="the system does not list memory maps")
def test_maps_of_programs_are_given_back():
    """In a process of its own: what other tests compiled stays."""
    found = subprocess.run(
        [sys.executable, "-c", COMPILE_AND_RELEASE], capture_output=True, text=True, check=True
    ).stdout.split()
    before, after, last = (int(found[i]) for i in (0, 1, 3))
    assert found[2] == "True"
    assert after - before >= 30  # each program has one at least
    assert last - before < (after - before) / 2


def test_nothing_is_forgotten_before_its_time(tmp_path, monkeypatch, compilations):
    """Few maps, or a system that does not list them."""
    most = tmp_path / "most"
    most.write_text("65530\n")
    monkeypatch.setattr(programs, "MOST_MAPS", most)
    double = jax.jit(lambda x: x * 2)
    double(jnp.ones(3))
    once = compilations.count
    for maps in (tmp_path / "absent", tmp_path / "few"):
        (tmp_path / "few").write_text("one\n" * 32_764)
        monkeypatch.setattr(programs, "MAPS", maps)
        assert not release_programs()
        double(jnp.ones(3))
    assert compilations.count == once
