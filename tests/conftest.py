"""Fixtures of the core tests. Models and requests are built once per process and shared."""

import jax
import pytest

from tests import tiny


@pytest.fixture(scope="session")
def make_request():
    """`make_request(family, lengths, prefix=, query=, pad_to=, seed=)`; equal arguments give the same object."""
    return tiny.build_request


@pytest.fixture(params=tiny.FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture
def strict():
    """No silent dtype or rank promotion in anything that is traced."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


class CompileCounter:
    """Counts what XLA compiles, eager operations included."""

    def __init__(self):
        self.count = 0

    def __call__(self, event: str, duration: float, **_):
        self.count += event == "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compilations():
    counter = CompileCounter()
    jax.monitoring.register_event_duration_secs_listener(counter)
    yield counter
    jax.monitoring.unregister_event_duration_listener(counter)
