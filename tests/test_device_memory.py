"""Memory settings work when they come first, and say so when they come too late (N-03)."""

import os
import subprocess
import sys
import warnings

import jax
import pytest

from jfuse.device_memory import device_in_use, limit_memory

FIRST = """
import os, warnings
warnings.simplefilter("error")
import jfuse
from jfuse.device_memory import device_in_use, limit_memory
assert not device_in_use()  # importing jfuse touches no device
limit_memory(0.4)
print(os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"], os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"])
import jax.numpy as jnp
assert float(jnp.ones(3).sum()) == 3 and device_in_use()
"""


def test_settings_that_come_first_are_set():
    clean = {name: value for name, value in os.environ.items() if not name.startswith("XLA_PYTHON_CLIENT")}
    done = subprocess.run([sys.executable, "-c", FIRST], env=clean, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["false", "0.4"]), done.stderr


def test_settings_that_come_too_late_warn_and_change_nothing(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    jax.devices()
    assert device_in_use()
    with pytest.warns(RuntimeWarning, match="restart Python"):
        limit_memory(0.5)
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in os.environ


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5])
def test_a_share_is_a_share(share):
    with warnings.catch_warnings(), pytest.raises(ValueError, match="share is"):
        limit_memory(share)
